"""Checkpoints: the student in Hugging Face format beside what training needs to go on exactly where it was.

step-00000400/
  model/         the student, as `from_pretrained` loads it, with its tokenizer
  state/         optimizers and random state (and weights that model/ holds in another form), in safetensors
  rollouts.safetensors  texts that were written and not yet trained on, where there are any
  progress.json  step, position in the data, totals
  manifest.json  sizes and checksums of the above

`latest` and `best` (lowest bits per byte) link to two of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from potstill.files import damage, new_folder, point, remove_folder, remove_unfinished, write_text
from potstill.models import LanguageModel
from potstill.training.state import save_state
from potstill.types import PotstillError


@dataclass(frozen=True)
class Progress:
    """Where a run stands: all that is needed, besides weights and optimizer, to go on."""

    step: int  # optimizer steps taken
    tokens: int  # supervised tokens so far
    data: dict[str, Any] | None  # the data iterator's position
    counts: dict[str, int]
    total_steps: int
    best_step: int | None
    best_bits_per_byte: float | None
    kd_scale: float = 1.0  # as Run has it
    teachers: list[str | None] = field(default_factory=list)  # fingerprints of those behind servers


def saved_steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-????????"))


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.keep = keep
        self._warn = warn
        self._said: set[str] = set()

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in remove_unfinished(self.folder):
            self._warn(f"{left}, which an earlier process left, cannot be removed")

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def all(self) -> list[Path]:
        """Oldest first."""
        return saved_steps(self.folder)

    def save(
        self,
        progress: Progress,
        student: LanguageModel,
        module: nn.Module,
        optimizers: list[Optimizer],
        beside_them: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """`beside_them`: puts what else a run needs into the folder."""
        path = self.at(progress.step)
        with new_folder(path) as beside:
            student.save(beside / "model")
            save_state(beside / "state", beside / "model", module, optimizers)
            beside_them(beside)
            write_text(beside / "progress.json", json.dumps(asdict(progress)))
        self._settle(progress)
        return path

    def newest(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint that is whole. A damaged one is reported and the one before is used."""
        damaged = []
        for path in reversed(self.all()):
            if reason := damage(path):
                damaged.append(path)
                self._warn(f"checkpoint {path} is damaged ({reason}); trying the one before")
                continue
            for bad in damaged:  # out of the way, for the run will write this step anew; but not lost
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                self._warn(f"moved the damaged {bad.name} to {bad.rename(aside)}")
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
        self._point("latest", self.at(progress.step))
        if best is not None:
            self._point("best", best)
        for path in self.all()[: -self.keep]:
            if path != best:
                try:
                    remove_folder(path)
                except OSError as error:
                    self._once(f"old checkpoints in {self.folder} cannot be removed ({error.strerror or error})")

    def _point(self, name: str, path: Path) -> None:
        link = self.folder / name
        try:
            copied = point(link, path)
        except OSError as error:
            self._once(f"{link} cannot be made a link ({error.strerror or error}): the {name} checkpoint is {path}")
            return
        if copied is not None:
            self._warn(f"{link} was a folder and no link, as copies have it: it is now {copied}, which may be removed")

    def _once(self, message: str) -> None:
        """The same trouble comes again with every checkpoint, and is told once."""
        about = message.split(" (")[0]
        if about not in self._said:
            self._said.add(about)
            self._warn(message)


def _progress(path: Path) -> Progress:
    try:
        return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise PotstillError(
            f"{path / 'progress.json'} is of another version of potstill ({error}): choose another folder with run="
        ) from error
