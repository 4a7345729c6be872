"""When a run is saved: by the number of steps, by the clock, and whenever it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potstill.config import CheckpointConfig
from potstill.training.checkpoint import Checkpoints, Progress
from potstill.training.diagnosis import refuse_broken_weights
from potstill.training.feed import Feed
from potstill.training.run import Callback, Run
from potstill.training.setup import Parts
from potstill.types import PotstillError


class Saver:
    """Saves the steps of a run and tells those who watch it. `seconds`: a clock."""

    def __init__(
        self,
        config: CheckpointConfig,
        run: Run,
        parts: Parts,
        checkpoints: Checkpoints,
        feed: Feed,
        watching: Sequence[Callback],
        seconds: Callable[[], float],
    ) -> None:
        self._config, self._run, self._parts, self._checkpoints = config, run, parts, checkpoints
        self._feed, self._watching, self._seconds = feed, watching, seconds
        self._last = seconds()

    def due(self) -> bool:
        """Whether the step just taken is to be saved, even if it is neither the last nor the best."""
        every, minutes = self._config.every, self._config.every_minutes
        by_step = every is not None and self._run.step % every == 0
        return by_step or (minutes is not None and self._seconds() - self._last >= 60 * minutes)

    def save(self, progress: Progress) -> None:
        run, parts = self._run, self._parts
        refuse_broken_weights(parts.module, run.step)
        run.checkpoint = self._checkpoints.save(
            progress,
            parts.student,
            parts.module,
            parts.optimizers,
            lambda folder: self._feed.save(folder, progress.data or {}),
        )
        run.best = None if progress.best_step is None else self._checkpoints.at(progress.best_step)
        self._last = self._seconds()
        for watcher in self._watching:
            watcher.saved(run, run.checkpoint)

    def kept(self, progress: Progress, error: PotstillError) -> PotstillError:
        """What to raise in place of an error that the steps so far have nothing to do with: they are saved."""
        return PotstillError(f"{error}; the run is saved at step {self._run.step}") if self.keep(progress) else error

    def keep(self, progress: Progress) -> bool:
        """Save what is not saved yet; whether there was something."""
        new = self._run.step > 0 and self._run.checkpoint != self._checkpoints.at(self._run.step)
        if new:
            self.save(progress)
        return new
