"""Run folders, read back: the recipe, the steps' metrics and the evaluations."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.config.recipe import read_keys
from potstill.files import json_lines
from potstill.report.panels import CROSS_TOKENIZER, KEYS
from potstill.types import PotstillError


@dataclass(frozen=True)
class Log:
    """A file of JSON lines as columns over the steps."""

    steps: npt.NDArray[np.int64]  # strictly increasing
    columns: dict[str, npt.NDArray[np.float64]]  # NaN where a line has no finite number
    odd: dict[str, npt.NDArray[np.int64]]  # key → the steps at which its value is NaN or infinite
    replaced: int  # lines of steps that were taken again after a resume
    unreadable: tuple[int, ...]  # numbers of damaged and torn lines, which are left out

    def at(self, key: str, place: int) -> float | None:
        """The value in a line: NaN if it was not finite, None if there is none."""
        if key not in self.columns or not len(self.steps):
            return None
        value = float(self.columns[key][place])
        return None if math.isnan(value) and self.steps[place] not in self.odd.get(key, ()) else value

    def last(self, key: str) -> float | None:
        return self.at(key, -1)

    def total(self, key: str) -> float:
        return float(np.nansum(self.columns[key])) if key in self.columns else 0.0


Samples = list[tuple[str, str]]  # prompts and texts


@dataclass(frozen=True)
class Run:
    label: str
    folder: Path
    recipe_text: str
    recipe: dict[str, Any]
    metrics: Log
    evals: Log
    samples: Samples  # of the last evaluation that has some
    samples_step: int | None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run, labelled by the shortest end of its path that no other run shares."""
    if not folders:
        raise PotstillError("there is nothing to report on: name at least one run folder")
    resolved = [folder.resolve() for folder in folders]
    for folder, times in Counter(resolved).items():
        if times > 1:
            raise PotstillError(f"{folder} is given {times} times: name each run once")
    return [_read_run(folder, label) for folder, label in zip(folders, labels(resolved), strict=True)]


def labels(folders: Sequence[Path]) -> list[str]:
    """`run`, or `a/run` and `b/run` where the last names are equal."""
    depth = [1] * len(folders)
    while True:
        names = ["/".join(folder.parts[-n:]) for folder, n in zip(folders, depth, strict=True)]
        clashes = {name for name, times in Counter(names).items() if times > 1}
        if not clashes:
            return names
        depth = [n + (name in clashes) for n, name in zip(depth, names, strict=True)]


def _read_run(folder: Path, label: str) -> Run:
    if not folder.is_dir():
        raise PotstillError(
            f"there is no run folder {folder}: name the folder that `potstill train` wrote (its `run:` key)"
        )
    recipe_file = folder / "recipe.yaml"
    if not recipe_file.is_file():
        raise PotstillError(
            f"{folder} is not a run, it has no recipe.yaml: name the folder that `potstill train` wrote"
        )
    text, recipe = read_keys(recipe_file)
    metrics, _, _ = _read_log(folder / "metrics.jsonl", KEYS["metrics"])
    evals, samples, samples_step = _read_log(folder / "evals.jsonl", KEYS["evals"])
    return Run(label, folder, text, recipe, _named(metrics, evals), evals, samples, samples_step)


def _named(metrics: Log, evals: Log) -> Log:
    """With the names of what they are, where the teacher that the student is compared with has other tokens: some are aligned,
    and no evaluation knows its KL."""
    known = evals.columns.get("kl")
    if "align_chunks_per_token" not in metrics.columns or (known is not None and not np.isnan(known).all()):
        return metrics
    return replace(
        metrics,
        columns={CROSS_TOKENIZER.get(key, key): values for key, values in metrics.columns.items()},
        odd={CROSS_TOKENIZER.get(key, key): steps for key, steps in metrics.odd.items()},
    )


def _read_log(path: Path, numeric: set[str]) -> tuple[Log, Samples, int | None]:
    """The file as columns, and the last samples in it with their step. A file that is not there is an empty one."""
    steps = array("q")
    columns: dict[str, array[float]] = {}
    samples: Samples = []
    samples_step: int | None = None
    unreadable: list[int] = []
    for number, (_, record) in enumerate(json_lines(path), 1):
        numbers = {key: value for key, value in (record or {}).items() if value is None or type(value) in (int, float)}
        written = None if record is None else _samples(record.get("samples") or [])
        if record is None or written is None or (record.keys() - numbers.keys()) & numeric:
            unreadable.append(number)
            continue
        step = numbers.pop("step")
        if written:
            samples, samples_step = written, step
        for key, value in numbers.items():
            column = columns.setdefault(key, array("d"))
            column.extend([math.nan] * (len(steps) - len(column)))
            column.append(math.nan if value is None else _real(value))
        steps.append(step)
    for column in columns.values():
        column.extend([math.nan] * (len(steps) - len(column)))
    return _log(np.array(steps, np.int64), columns, tuple(unreadable)), samples, samples_step


def _log(at: npt.NDArray[np.int64], columns: dict[str, array[float]], unreadable: tuple[int, ...]) -> Log:
    # A step that comes again was taken again after a resume, and so was all that followed it: a line stands if every
    # later line is of a later step.
    later = np.minimum.accumulate(at[::-1])[::-1][1:]
    stands = np.append(at[:-1] < later, True)[: len(at)]
    kept: dict[str, npt.NDArray[np.float64]] = {}
    odd: dict[str, npt.NDArray[np.int64]] = {}
    for key, column in columns.items():
        values = np.array(column)[stands]
        strange = np.isinf(values)
        if strange.any():
            odd[key] = at[stands][strange]
        kept[key] = np.where(strange, math.nan, values)
    return Log(at[stands], kept, odd, int(len(at) - stands.sum()), unreadable)


def _real(value: int | float) -> float:
    """The number, with infinity for all that is not finite: NaN then always means that there was no number."""
    try:
        return float(value) if math.isfinite(value) else math.inf
    except OverflowError:
        return math.inf


def _samples(value: Any) -> Samples | None:
    """None if they are no list of prompts and texts."""
    try:
        found = [(each["prompt"], each["text"]) for each in value]
    except (TypeError, KeyError):
        return None
    return found if all(isinstance(part, str) for sample in found for part in sample) else None
