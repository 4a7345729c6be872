"""Checkpoints: the student in Hugging Face format beside what training needs to resume exactly where it was.

step-00000400/
  model/         the student, as `from_pretrained` loads it, or its adapter, as peft does; with its tokenizer
  state/         optimizers (and weights that model/ holds in another form), in safetensors, files of every rank
  rollouts.safetensors  texts that were written and not yet trained on, where there are any
  average-0.safetensors  the student's moving average, where that is a teacher
  progress.json  step, position in the data, totals
  manifest.json  sizes and checksums of the above

`latest` and `best` (lowest bits per byte) link to two of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from potstill.files import (
    begin_folder,
    checksums,
    could_not_write,
    damage,
    filling,
    finish_folder,
    point,
    refusal,
    remove_folder,
    remove_unfinished,
    write_text,
)
from potstill.models.adapters import save_description
from potstill.parallel.agree import Agreed, everyones, exchanged, first_alone, gathered, of_first, together
from potstill.parallel.markers import Markers
from potstill.parallel.mesh import ranks
from potstill.students.average import save_averages
from potstill.training.logging import tell
from potstill.training.run import Callback, Progress, Run
from potstill.training.state import Snapshot, WrittenFiles, take_snapshot, write_index
from potstill.training.step import refuse_broken_weights
from potstill.types import PotstillError

if TYPE_CHECKING:
    from potstill.data import Feed
    from potstill.training.setup import Parts

FIELDS = [each.name for each in fields(Progress)]
Sums = dict[str, dict[str, int]]  # of files, as `checksums` has them
T = TypeVar("T")


@dataclass
class Checkpoints:
    """The checkpoints of one run, in the hands of all its ranks: the first makes, links, prunes and moves folders, and each
    writes its own files into them. `warn` says the same thing once, for the same trouble comes with every checkpoint."""

    folder: Path
    keep: int
    warn: Callable[[str], None]
    markers: Markers = field(init=False)  # once the run's folder is this process's
    _writing: tuple[Path, Progress, Future[None]] | None = field(default=None, init=False)

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

    def begin(self, run: Run, parts: Parts, feed: Feed, background: bool = False) -> None:
        """Save a run as it is now. `background`: everything is copied, and the files are written while the run goes on."""
        assert self._writing is None
        path, progress = self.at(run.step), Progress(**{name: deepcopy(getattr(run, name)) for name in FIELDS})
        beside, small = first_alone(lambda: self._begun(path, progress, parts, feed))
        with _first_fills(beside, path):
            snapshot = take_snapshot(parts.student.model, parts.module, parts.optimizers, copy=background)
        write = partial(self._write, snapshot, beside, path, small)
        future: Future[None] = Future()
        if background:
            pool = ThreadPoolExecutor(1, "saving")
            future = pool.submit(write)
            pool.shutdown(wait=False)
        else:
            future.set_result(write())
        self._writing = path, progress, future

    def done(self) -> bool:
        """Whether a save is under way no more, on any rank. All ask at the same time."""
        if self._writing is None:
            return True
        return not exchanged(busy=int(not self._writing[2].done()))["busy"]

    def finish(self) -> Path | None:
        """Wait for the save that is under way. Gives its folder."""
        if self._writing is None:
            return None
        (path, progress, future), self._writing = self._writing, None
        future.result()
        if ranks().first:
            self._settle(progress)
        return path

    def abandon(self) -> None:
        """Wait for the save that is under way, whatever becomes of it: the run ends by an error of its own."""
        if self._writing is not None:
            error, self._writing = self._writing[2].exception(), None
            if error is not None:
                self.warn(f"the checkpoint that was being written is lost ({error})")

    def _begun(self, path: Path, progress: Progress, parts: Parts, feed: Feed) -> tuple[Path, list[str]]:
        """The folder to fill, and the names of the small files that are in it already."""
        beside = begin_folder(path)
        with filling(beside, path):
            (beside / "state").mkdir()
            save_description(parts.student.model, beside / "model")
            parts.student.save_words(beside / "model")
            feed.save(beside, progress.data or {})
            save_averages(parts.averages, beside)
            write_text(beside / "progress.json", json.dumps(vars(progress)))
        return beside, [str(each.relative_to(beside)) for each in beside.rglob("*") if each.is_file()]

    def _write(self, snapshot: Snapshot, beside: Path, path: Path, small: list[str]) -> None:
        """Files by every rank, then the manifest and the rename by the first. An error of one is that of all."""
        with _first_fills(beside, path):
            saving, first = ranks().saving, ranks().first
            found = gathered(lambda: _written(snapshot, beside, path, small if first else []), saving)
            gathered(lambda: self._put_in_place(beside, path, found) if first else None, saving)

    def _put_in_place(self, beside: Path, path: Path, found: list[tuple[WrittenFiles, Sums]]) -> None:
        sums = {name: entry for _, each in found for name, entry in each.items()}
        weights = {name: file for written, _ in found for name, file in written.weights.items()}
        sums |= checksums(beside, write_index(beside, weights))
        finish_folder(beside, path, sums, self.markers.check_owner)

    def newest(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint that is whole. A damaged one is reported and the one before is used. Each rank looks at a
        share of the files."""
        damaged: list[Path] = []
        for path in of_first(list(reversed(self.all()))):
            reasons = everyones(together(partial(damage, path, ranks().rank, ranks().students)))
            if reason := next(filter(None, reasons), None):
                damaged.append(path)
                self.warn(f"checkpoint {path} is damaged ({reason}); trying the one before")
                continue
            return path, first_alone(partial(self._chosen, path, damaged))
        if damaged:
            raise PotstillError(f"no checkpoint in {self.folder} is whole; to start the run anew, remove that folder")
        return None

    def _chosen(self, path: Path, damaged: list[Path]) -> Progress:
        for bad in damaged:  # out of the way, for the run will write this step anew; but not lost
            aside = bad.with_name(f"damaged-{bad.name}")
            shutil.rmtree(aside, ignore_errors=True)
            self.warn(f"moved the damaged {bad.name} to {bad.rename(aside)}")
        progress = read_progress(path)
        if progress.best_step is not None and not self.at(progress.best_step).exists():
            progress = replace(progress, best_step=None, best_bits_per_byte=None)  # a later best had replaced it
        self._settle(progress)
        return progress

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


def _first_fills(beside: Path, path: Path) -> AbstractContextManager[None]:
    return filling(beside, path) if ranks().first else nullcontext()


def _written(snapshot: Snapshot, beside: Path, path: Path, small: list[str]) -> tuple[WrittenFiles, Sums]:
    try:
        written = snapshot.write(beside)
        return written, checksums(beside, [*small, *written.files])
    except Exception as error:
        refused = refusal(beside, error)
        raise could_not_write(path, refused) if refused is not None else error from error


def read_progress(checkpoint: Path) -> Progress:
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
        self._begun = 0 if self.run.checkpoint is None else self.run.step  # the last step that was saved

    def due(self) -> bool:
        """Whether the step just taken is to be saved, even if it is neither the last nor the best."""
        config = self.parts.recipe.checkpoint
        by_step = config.every is not None and self.run.step % config.every == 0
        minutes = (self.seconds() - self._last) / 60
        return by_step or (config.every_minutes is not None and minutes >= config.every_minutes)

    def save(self) -> None:
        """What is saved already, or being saved, is not saved again. The last save of a run is waited for."""
        run = self.run
        self.finish()
        refuse_broken_weights(self.parts.module, run.step)
        ends = run.step == run.total_steps or run.stopped_by is not None
        background = self.parts.recipe.checkpoint.async_save and not ends
        self.checkpoints.begin(run, self.parts, self.feed, background)
        self._begun, self._last = run.step, self.seconds()
        if not background:
            self.finish()

    def look(self) -> None:
        """Between steps: whether a save that is under way has ended."""
        if self.checkpoints.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, and tell of it."""
        path, run = self.checkpoints.finish(), self.run
        if path is None:
            return
        run.checkpoint = path
        run.best = None if run.best_step is None else self.checkpoints.at(run.best_step)
        tell(self.watching, lambda watcher: watcher.saved(run, path))

    def save_rest(self) -> bool:
        """Save what is not saved yet; whether there was something."""
        unsaved = self.run.step > 0 and self._begun != self.run.step
        if unsaved:
            self.save()
        self.finish()
        return unsaved

    def save_despite(self, error: PotstillError) -> PotstillError:
        """What to raise in place of an error that the steps so far have nothing to do with: they are saved."""
        kind = Agreed if error.shared else PotstillError
        return kind(f"{error}; the run is saved at step {self.run.step}") if self.save_rest() else error
