"""Which answers are kept: by an exact match, by mathematics, by a Python function, by how they end and how long they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from potstill.extras import missing_extra
from potstill.types import PotstillError

Record = Mapping[str, Any]  # an answer as it would be written
Check = Callable[[Record], bool]


@dataclass(frozen=True)
class Wanted:
    """What an answer must be; of `check`: exact, math, or FILE.py:FUNCTION."""

    check: str | None = None
    ended: bool = False  # only answers that the writer ended itself
    min_tokens: int = 0
    max_tokens: int | None = None


def checks_of(wanted: Wanted) -> dict[str, Check]:
    """By the name under which what they leave out is counted."""
    found: dict[str, Check] = {}
    if wanted.ended:
        found["not ended"] = lambda record: record["end"] != "length"
    if wanted.min_tokens:
        found["too short"] = lambda record: len(record["logprobs"]) >= wanted.min_tokens
    if wanted.max_tokens is not None:
        most = wanted.max_tokens
        found["too long"] = lambda record: len(record["logprobs"]) <= most
    if wanted.check is not None:
        found["wrong"] = _named(wanted.check)
    return found


def _named(name: str) -> Check:
    if name == "exact":
        return lambda record: _words(record["completion"]) == _words(_reference(record))
    if name == "math":
        return _math()
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise PotstillError(f"--check {name}: it is exact, math, or a function of a file, as in checks.py:is_right")
    return _function(Path(path), function)


def _words(text: str) -> list[str]:
    return text.split()


def _reference(record: Record) -> str:
    if record["reference"] is None:
        raise PotstillError(
            "--check: there is nothing to compare with: name the column of the right answers with --answer"
        )
    return str(record["reference"])


def _math() -> Check:
    """Equal as mathematics: 0.5, 1/2 and \\\\frac{1}{2} are one answer."""
    try:
        library = import_module("math_verify")
    except ImportError:
        raise missing_extra("--check math", "math") from None
    return lambda record: bool(library.verify(library.parse(_reference(record)), library.parse(record["completion"])))


def _function(path: Path, name: str) -> Check:
    """It is given the record, and says whether to keep it."""
    if not path.is_file():
        raise PotstillError(f"--check: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise PotstillError(f"--check: {path} has no function {name}")
    return lambda record: bool(found(dict(record)))
