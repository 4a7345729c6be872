"""The one training loop: whatever the teacher, the text or the number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.data import Feed, StoppedWaiting
from potstill.parallel.mesh import ranks, refuse_many_processes
from potstill.parallel.stop import Stop, stop_signal
from potstill.training.checkpoint import Saver
from potstill.training.feed import open_feed
from potstill.training.logging import watchers
from potstill.training.metrics import Stopwatch
from potstill.training.resume import open_run, resume
from potstill.training.run import Callback, Run
from potstill.training.setup import Parts, assemble
from potstill.training.state import seed_step
from potstill.training.step import Diverged, optimizer_step
from potstill.types import PotstillError, StepBatch


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    callbacks: Sequence[Callback] = (),
    seconds: Callable[[], float] = time.monotonic,
) -> Run:
    """Run a recipe to its end, or from where it stopped to its end. `seconds`: the clock of checkpoint.every_minutes."""
    refuse_many_processes()
    console = Console(soft_wrap=True)

    said: set[str] = set()

    def warn(message: str) -> None:
        if message not in said:
            said.add(message)
            console.print(message, style="yellow", highlight=False, markup=False)

    recipe, checkpoints = open_run(load_recipe(recipe), warn)
    markers = checkpoints.markers
    with markers.telling_errors():
        parts = assemble(recipe)
        for note in parts.notes:
            warn(note)
        recipe, run = parts.recipe, resume(parts, checkpoints, console)
        watching = [*watchers(recipe, console, warn), *callbacks]
        with ExitStack() as stack:
            stop = stack.enter_context(stop_signal(markers.asked_to_stop))
            feed = stack.enter_context(open_feed(parts, run, stop))
            for note in feed.notes:
                warn(note)
            for teacher in parts.teachers:  # before the feed, whose threads may wait for a server
                stack.callback(teacher.close)
            for watcher in watching:
                watcher.started(run)
                stack.callback(watcher.ended, run)
            loop = Loop(parts, run, feed, Saver(run, parts, checkpoints, feed, watching, seconds), watching, stop)
            while run.step < run.total_steps and not run.stopped_by:
                loop.advance()
        if run.step == run.total_steps:
            if recipe.checkpoint.push_to_hub:
                _push(parts, recipe.checkpoint.push_to_hub)
            markers.finished()
    return run


@dataclass
class Loop:
    """A run under way."""

    parts: Parts
    run: Run
    feed: Feed
    saver: Saver
    watching: Sequence[Callback]
    stop: Stop
    clock: Stopwatch = field(default_factory=Stopwatch)

    def advance(self) -> None:
        """Take the next step, or end the run: where a signal came, where there is no more text, by an error."""
        run = self.run
        try:
            if self.stop():  # since the last look
                raise StoppedWaiting
            with self.clock.of("data"):
                following = next(self.feed, None)
            if following is None:
                self._end_of_text()
                return
            seed_step(self.parts.recipe.train.seed, run.step, ranks().dp.index)
            metrics = optimizer_step(self.parts, following, run, self.clock)
        except StoppedWaiting:  # for a server that is away, say. The step is not taken
            run.stopped_by = self.stop.name
            self.saver.save_rest()
            return
        except Diverged:
            raise
        except PotstillError as error:  # of a server that stays away, of a record: the steps so far are sound
            raise self.saver.save_despite(error) from error
        self._taken(following.step, metrics)

    def _taken(self, step: StepBatch, metrics: Mapping[str, Any]) -> None:
        """Tell, evaluate and save a step, as far as that is due."""
        run, recipe = self.run, self.parts.recipe
        run.step, run.data, run.counts, run.tokens = run.step + 1, step.state, step.counts, metrics["tokens"]
        self.feed.advance(run.step)
        for watcher in self.watching:
            watcher.stepped(run, metrics)
        last = run.step == run.total_steps
        ends = last or (run.asked_to_stop and not self.stop.name)  # after a signal there is no time to evaluate
        if recipe.eval is not None and (ends or (recipe.eval.every and run.step % recipe.eval.every == 0)):
            self._evaluate()
        # Read once: the step a run ends at is a step it saves.
        run.stopped_by = None if last else self.stop.name or run.asked_to_stop
        if last or run.stopped_by or run.best_step == run.step or self.saver.due():
            self.saver.save()

    def _evaluate(self) -> None:
        """An evaluation that fails loses no steps; one that a signal finds waiting for a server is given up."""
        run = self.run
        try:
            found = self.parts.evaluate(self.stop)
        except StoppedWaiting:
            return
        except PotstillError as error:
            raise self.saver.save_despite(error) from error
        run.evaluation = {"step": run.step, **found}
        for watcher in self.watching:
            watcher.evaluated(run, run.evaluation)
        best, bits = run.best_bits_per_byte, found["bits_per_byte"]
        if best is None or not (best <= bits):
            run.best_step, run.best_bits_per_byte = run.step, bits

    def _end_of_text(self) -> None:
        """With written text there may be fewer steps than were counted: some answers had nothing in them."""
        run, recipe = self.run, self.parts.recipe
        if not recipe.rollouts.writes or recipe.train.epochs is None:
            raise PotstillError(
                f"data: it ended after step {run.step} of {run.total_steps}: there is less of it than when the run began; "
                "put back what was there, or begin anew with run="
            )
        run.total_steps = run.step
        if recipe.eval is not None and (run.evaluation is None or run.evaluation["step"] != run.step):
            self._evaluate()
        self.saver.save_rest()


def _push(parts: Parts, repository: str) -> None:
    try:
        parts.student.model.push_to_hub(repository)
        parts.student.tokenizer.push_to_hub(repository)
    except Exception as error:  # the hub's client raises many kinds; the run itself is saved and whole
        raise PotstillError(
            f"checkpoint.push_to_hub: could not push to {repository} ({error}); the run is saved"
        ) from error
