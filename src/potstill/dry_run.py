"""A run up to its first step: whatever would be refused before it is refused here, and nothing is trained or saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from potstill.config import Recipe
from potstill.data import Feed, PreparedStep
from potstill.parallel.agree import of_leaders, together
from potstill.parallel.mesh import pick_device, world
from potstill.teachers.placed import asking, own_ranks, serve_teacher
from potstill.training.feed import open_feed
from potstill.training.resume import RECIPE, as_begun, planned_steps
from potstill.training.run import Run
from potstill.training.setup import Parts, assemble
from potstill.types import PotstillError

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class FirstStep:
    """All that a run has before it takes its first step."""

    parts: Parts
    prepared: PreparedStep  # the step's texts, and what the teachers made ready for them
    run: Run
    notes: tuple[str, ...]  # what `train` would warn of


def at_first_step(
    recipe: Recipe, look: Callable[[FirstStep], Seen], console: Console, count: bool = True
) -> Seen | None:
    """What `look` makes of a run before its first step; under torchrun every process calls it, and one that has a teacher alone
    gets None. `count`: the steps of train.epochs, which takes a pass over the data."""
    device = pick_device(recipe.train.device)
    with world(recipe.parallel, device, recipe.train.batch_size, own_ranks(recipe)) as here:
        if not here.student:
            serve_teacher(recipe, here, device)
            return None
        with asking(recipe, here, device, recipe.train.timeout) as askers:
            folder = Path(recipe.run)
            if (folder / RECIPE).exists():
                recipe = as_begun(recipe, folder)
            parts = assemble(recipe, askers)
            try:
                total = planned_steps(parts, console) if count else recipe.train.steps or 0
                run = Run(folder, total_steps=total, teachers=parts.identities)
                with open_feed(parts, run) as feed:
                    prepared = together(lambda: _first(feed))
                    return look(FirstStep(parts, prepared, run, (*parts.notes, *feed.notes)))
            finally:
                for teacher in parts.teachers:
                    teacher.close()


def _first(feed: Feed) -> PreparedStep:
    prepared = next(feed, None)
    if prepared is None:
        raise PotstillError("data.sources: there is nothing to learn in them")
    return prepared.waited_for()


def dry_run(recipe: Recipe, console: Console) -> None:
    """Say what the first step would be."""
    at_first_step(recipe, lambda first: _tell(first, console), console)


def _tell(first: FirstStep, console: Console) -> None:
    parts, step = first.parts, first.prepared.step
    for note in dict.fromkeys(first.notes):
        console.print(note, style="yellow", markup=False, highlight=False)
    rows = of_leaders([(len(batch.examples), batch.supervised_tokens) for batch in step.batches])
    documents, supervised = (sum(batch[i] for own in rows for batch in own) for i in (0, 1))
    trained = sum(weight.numel() for weight in parts.student.model.parameters() if weight.requires_grad)
    for line in (
        *parts.facts,
        f"student: {trained:,} trained parameters, on {parts.device}",
        f"teachers: {', '.join(teacher.name for teacher in parts.teachers) or 'none'}",
        f"steps: {first.run.total_steps:,}; the first has {documents} documents with {supervised:,} supervised tokens",
        "dry run: all is ready for the first step; nothing was trained or saved",
    ):
        console.print(line, markup=False, highlight=False)
