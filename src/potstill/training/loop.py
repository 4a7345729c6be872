"""The one training loop: whatever the teacher, the text or the number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import HfApi
from rich.console import Console

from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.data import Feed, PreparedStep, StoppedWaiting
from potstill.export import export_merged
from potstill.losses.kernels import kernels_note
from potstill.parallel.agree import Agreed, everyones, exchanged, raise_together
from potstill.parallel.channel import Asker
from potstill.parallel.mesh import pick_device, ranks, world
from potstill.parallel.shard import reshard
from potstill.parallel.stop import Stop, stop_signal
from potstill.parallel.watch import Watch, restarts_cannot_succeed
from potstill.teachers.placed import asking, own_ranks, serve_teacher
from potstill.training.checkpoint import Saver
from potstill.training.feed import open_feed
from potstill.training.logging import tell, told, watchers
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
    """Run a recipe to its end, or from where it stopped to its end. Under torchrun every process calls it; the callbacks are
    told in the first. `seconds`: the clock of checkpoint.every_minutes."""
    recipe = load_recipe(recipe)
    device = pick_device(recipe.train.device)
    with world(recipe.parallel, device, recipe.train.batch_size, own_ranks(recipe)) as here:
        if not here.student:
            serve_teacher(recipe, here, device)
            return Run(Path(recipe.run))
        with asking(recipe, here, device, recipe.train.timeout) as askers:
            return _train(recipe, askers, callbacks, seconds)


def _train(
    recipe: Recipe,
    askers: Mapping[int, Asker],
    callbacks: Sequence[Callback],
    seconds: Callable[[], float],
) -> Run:
    """On a rank that has the student, or a part of it."""
    here = ranks()
    console = Console(soft_wrap=True, quiet=not here.first)
    said: set[str] = set()

    def warn(message: str) -> None:
        if message not in said:
            said.add(message)
            console.print(message, style="yellow", highlight=False, markup=False)

    recipe, checkpoints = open_run(recipe, warn)
    markers = checkpoints.markers
    with markers.telling_errors():
        parts = assemble(recipe, askers)
        for note in [*parts.notes, *filter(None, [restarts_cannot_succeed(), kernels_note(parts.device)])]:
            warn(note)
        recipe, run = parts.recipe, resume(parts, checkpoints, console)
        for fact in parts.facts:  # of a run that begins; what is refused is refused in one sentence
            console.print(fact, highlight=False, markup=False)
        watching = [*watchers(recipe, console, warn), *callbacks] if here.first else []
        with ExitStack() as stack:
            stop = stack.enter_context(stop_signal(markers.asked_to_stop))
            feed = stack.enter_context(open_feed(parts, run, stop))
            for note in feed.notes:
                warn(note)
            for teacher in parts.teachers:  # before the feed, whose threads may wait for a server
                stack.callback(teacher.close)

            def begin(watcher: Callback) -> None:
                watcher.started(run)
                stack.callback(watcher.ended, run)

            tell(watching, begin)
            stack.callback(checkpoints.abandon)
            loop = Loop(parts, run, feed, Saver(run, parts, checkpoints, feed, watching, seconds), watching, stop)
            watch = Watch(here, recipe.train.timeout)
            while run.step < run.total_steps and not run.stopped_by:
                with watch.step(run.step + 1):
                    loop.advance()
        lora = recipe.student.lora
        if lora is not None and lora.export != "adapter" and run.checkpoint is not None and not run.exit_code:
            run.merged = export_merged(parts.student, run.folder)
        if run.step == run.total_steps and here.first:
            if recipe.checkpoint.push_to_hub:
                _push(run.model, recipe.checkpoint.push_to_hub)
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
        """Take the next step, or end the run: where a signal came, where there is no more text, by an error. All ranks do the
        same: what one of them met is told before any of them waits for another."""
        self.saver.look()
        following, trouble = self._following()
        own = 0 if following is None else sum(batch.supervised_tokens for batch in following.step.batches)
        failed, stopped = isinstance(trouble, PotstillError), isinstance(trouble, StoppedWaiting)
        now = exchanged(
            tokens=own * ranks().leader, failed=failed, stopped=stopped, ended=following is None and trouble is None
        )
        if now["failed"]:
            self._raise(trouble if isinstance(trouble, PotstillError) else None)
        if now["stopped"]:
            self._stopped()
        elif now["ended"]:
            self._end_of_text()
        else:
            assert following is not None
            self._take(following, now["tokens"])

    def _following(self) -> tuple[PreparedStep | None, Exception | None]:
        """The next step, or why there is none; neither at the end of the text."""
        try:
            stop = bool(self.stop())  # since the last look
            if self.feed.collective:  # the next texts are written by all ranks, or by none
                stop = exchanged(stop=stop)["stop"] > 0
            if stop:
                raise StoppedWaiting
            with self.clock.of("data"):
                following = next(self.feed, None)
                if following is not None and ranks().many:  # an error in there would leave the others waiting
                    following = following.waited_for()
            return following, None
        except (StoppedWaiting, PotstillError) as trouble:
            return None, trouble

    def _take(self, following: PreparedStep, tokens: int) -> None:
        seed_step(self.parts.recipe.train.seed, self.run.step, ranks().dp.index)
        try:
            metrics = optimizer_step(self.parts, following, tokens, self.run, self.clock)
        except StoppedWaiting:  # for a server that is away, say. The step is not taken
            self._stopped()
            return
        except Diverged:
            raise
        except PotstillError as error:
            if ranks().many:  # the others are within the step, and cannot save
                raise
            self._raise(error)
        self._taken(following.step, metrics)

    def _stopped(self) -> None:
        self.run.stopped_by = self._stop_name()
        self.saver.save_rest()

    def _stop_name(self) -> str | None:
        return next(filter(None, everyones(self.stop.name or self.run.asked_to_stop)), None)

    def _raise(self, error: PotstillError | None) -> NoReturn:
        """For an error of a server that stays away, of a record: the steps so far are sound, and saved."""
        try:
            raise_together(error)
        except PotstillError as everybodys:
            raise self.saver.save_despite(everybodys) from error
        raise AssertionError("no rank has an error")

    def _taken(self, step: StepBatch, metrics: Mapping[str, Any]) -> None:
        """Tell, evaluate and save a step, as far as that is due."""
        run, recipe = self.run, self.parts.recipe
        run.step, run.data, run.counts, run.tokens = run.step + 1, step.state, step.counts, metrics["tokens"]
        self.feed.advance(run.step)
        error = told(self.watching, lambda watcher: watcher.stepped(run, metrics))
        now = self._asked(due=ranks().first and self.saver.due(), failed=error is not None)
        if now["failed"]:
            raise_together(error)
        last = run.step == run.total_steps
        ends = last or (now["asked"] and not now["signalled"])  # after a signal there is no time to evaluate
        if recipe.eval is not None and (ends or (recipe.eval.every and run.step % recipe.eval.every == 0)):
            self._evaluate()
            now |= self._asked()  # those who watch may have seen enough
        # Read once: the step a run ends at is a step it saves.
        run.stopped_by = self._stop_name() if not last and (now["signalled"] or now["asked"]) else None
        if last or run.stopped_by or run.best_step == run.step or now["due"]:
            self.saver.save()

    def _asked(self, **more: int) -> dict[str, int]:
        """On how many ranks a signal came, or somebody asked to stop."""
        return exchanged(signalled=self.stop.name is not None, asked=self.run.asked_to_stop is not None, **more)

    def _evaluate(self) -> None:
        """An evaluation that fails loses no steps; one that a signal finds waiting for a server is given up."""
        run = self.run
        try:
            found = self.parts.evaluate(self.stop if not ranks().many else lambda: False)
        except StoppedWaiting:
            return
        except PotstillError as error:
            if ranks().many and not isinstance(error, Agreed):
                raise
            raise self.saver.save_despite(error) from error
        reshard(self.parts.module)
        run.evaluation = {"step": run.step, **found}
        evaluation = run.evaluation
        tell(self.watching, lambda watcher: watcher.evaluated(run, evaluation))
        best, bits = run.best_bits_per_byte, found["bits_per_byte"]
        if best is None or not (best <= bits):
            run.best_step, run.best_bits_per_byte = run.step, bits

    def _end_of_text(self) -> None:
        """With written text there may be fewer steps than were counted: some answers had nothing in them."""
        run, recipe = self.run, self.parts.recipe
        if not recipe.rollouts.writes or recipe.train.epochs is None:
            raise Agreed(
                f"data: it ended after step {run.step} of {run.total_steps}: there is less of it than when the run began; "
                "put back what was there, or begin anew with run="
            )
        run.total_steps = run.step
        if recipe.eval is not None and (run.evaluation is None or run.evaluation["step"] != run.step):
            self._evaluate()
        self.saver.save_rest()


def _push(folder: Path, repository: str) -> None:
    try:
        hub = HfApi()
        name = hub.create_repo(repository, exist_ok=True).repo_id
        hub.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # the hub's client raises many kinds; the run itself is saved and whole
        raise PotstillError(
            f"checkpoint.push_to_hub: could not push to {repository} ({error}); the run is saved"
        ) from error
