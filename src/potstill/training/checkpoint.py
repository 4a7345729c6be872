"""Checkpoints: the student in Hugging Face format beside what training needs to resume exactly where it was.

step-00000400/
  model/         the student, as `from_pretrained` loads it, with its tokenizer
  state/         optimizers (and weights that model/ holds in another form), in safetensors
  rollouts.safetensors  texts that were written and not yet trained on, where there are any
  progress.json  step, position in the data, totals
  manifest.json  sizes and checksums of the above

`latest` and `best` (lowest bits per byte) link to two of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from potstill.files import damage, new_folder, point, remove_folder, remove_unfinished, write_text
from potstill.parallel.markers import Markers
from potstill.training.run import Callback, Progress, Run
from potstill.training.state import save_state
from potstill.training.step import refuse_broken_weights
from potstill.types import PotstillError

if TYPE_CHECKING:
    from potstill.data import Feed
    from potstill.training.setup import Parts

FIELDS = [each.name for each in fields(Progress)]


@dataclass
class Checkpoints:
    """The checkpoints of one run. `warn` says the same thing once, for the same trouble comes with every checkpoint."""

    folder: Path
    keep: int
    warn: Callable[[str], None]
    markers: Markers = field(init=False)  # once the run's folder is this process's

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in remove_unfinished(self.folder):
            self.warn(f"{left}, which an earlier process left, cannot be removed")

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def all(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-????????"))

    def last_step(self) -> int:
        return int(self.all()[-1].name.removeprefix("step-")) if self.all() else 0

    def save(self, run: Run, parts: Parts, feed: Feed) -> Path:
        path = self.at(run.step)
        with new_folder(path, self.markers.check_owner) as beside:
            parts.student.save(beside / "model")
            save_state(beside / "state", beside / "model", parts.module, parts.optimizers)
            feed.save(beside, run.data or {})
            write_text(beside / "progress.json", json.dumps({name: getattr(run, name) for name in FIELDS}))
        self._settle(run)
        return path

    def newest(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint that is whole. A damaged one is reported and the one before is used."""
        damaged = []
        for path in reversed(self.all()):
            if reason := damage(path):
                damaged.append(path)
                self.warn(f"checkpoint {path} is damaged ({reason}); trying the one before")
                continue
            for bad in damaged:  # out of the way, for the run will write this step anew; but not lost
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                self.warn(f"moved the damaged {bad.name} to {bad.rename(aside)}")
            progress = _progress(path)
            if progress.best_step is not None and not self.at(progress.best_step).exists():
                progress = replace(progress, best_step=None, best_bits_per_byte=None)  # a later best had replaced it
            self._settle(progress)
            return path, progress
        if damaged:
            raise PotstillError(f"no checkpoint in {self.folder} is whole; to start the run anew, remove that folder")
        return None

    def _settle(self, progress: Progress) -> None:
        """Links and number of checkpoints as they should be with this one the newest; a kill may have come between. What the
        file system refuses is no reason to end a run, whose checkpoint is in place."""
        best = None if progress.best_step is None else self.at(progress.best_step)
        self._link("latest", self.at(progress.step))
        if best is not None:
            self._link("best", best)
        for path in self.all()[: -self.keep]:
            if path != best:
                try:
                    remove_folder(path)
                except OSError as error:
                    self.warn(f"old checkpoints in {self.folder} cannot be removed ({error.strerror or error})")

    def _link(self, name: str, path: Path) -> None:
        link = self.folder / name
        try:
            copied = point(link, path)
        except OSError as error:
            which = "the one of the highest step" if name == "latest" else path
            self.warn(f"{link} cannot be made a link ({error.strerror or error}): the {name} checkpoint is {which}")
            return
        if copied is not None:
            self.warn(f"{link} was a folder and no link, as copies have it: it is now {copied}, which may be removed")


def _progress(checkpoint: Path) -> Progress:
    path = checkpoint / "progress.json"
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
        return Progress(**{name: keys.pop(name) for name in FIELDS}, **keys)
    except (ValueError, TypeError, LookupError) as error:
        raise PotstillError(
            f"{path} is of another version of potstill ({error}): choose another folder with run="
        ) from error


@dataclass
class Saver:
    """Saves a run by the number of steps, by the clock (`seconds`), and when it ends; tells those who watch it."""

    run: Run
    parts: Parts
    checkpoints: Checkpoints
    feed: Feed
    watching: Sequence[Callback]
    seconds: Callable[[], float]

    def __post_init__(self) -> None:
        self._last = self.seconds()

    def due(self) -> bool:
        """Whether the step just taken is to be saved, even if it is neither the last nor the best."""
        config = self.parts.recipe.checkpoint
        by_step = config.every is not None and self.run.step % config.every == 0
        minutes = (self.seconds() - self._last) / 60
        return by_step or (config.every_minutes is not None and minutes >= config.every_minutes)

    def save(self) -> None:
        run = self.run
        refuse_broken_weights(self.parts.module, run.step)
        run.checkpoint = self.checkpoints.save(run, self.parts, self.feed)
        run.best = None if run.best_step is None else self.checkpoints.at(run.best_step)
        self._last = self.seconds()
        for watcher in self.watching:
            watcher.saved(run, run.checkpoint)

    def save_rest(self) -> bool:
        """Save what is not saved yet; whether there was something."""
        unsaved = self.run.step > 0 and self.run.checkpoint != self.checkpoints.at(self.run.step)
        if unsaved:
            self.save()
        return unsaved

    def save_despite(self, error: PotstillError) -> PotstillError:
        """What to raise in place of an error that the steps so far have nothing to do with: they are saved."""
        return PotstillError(f"{error}; the run is saved at step {self.run.step}") if self.save_rest() else error
