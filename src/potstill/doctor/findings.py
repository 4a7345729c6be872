"""What a check says, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from potstill.config import DataConfig, Recipe
from potstill.data import with_pieces
from potstill.dry_run import FirstStep
from potstill.models import load_student_tokenizer
from potstill.teachers.open import as_teachers_need, teacher_tokenizer

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    status: Status
    said: str
    advice: str = ""  # what to do; of everything but ok


def ok(said: str) -> Finding:
    return Finding("ok", said)


def warning(said: str, advice: str) -> Finding:
    return Finding("warning", said, advice)


def error(said: str, advice: str) -> Finding:
    return Finding("error", said, advice)


class Patient:
    """A recipe, and what its checks share without loading a model. `quick`: nothing is asked of servers."""

    def __init__(self, recipe: Recipe, processes: int, quick: bool = False) -> None:
        self.recipe, self.processes, self.quick = recipe, processes, quick

    @cached_property
    def tokenizer(self) -> Any:
        return load_student_tokenizer(self.recipe.student)

    @cached_property
    def data(self) -> DataConfig:
        return with_pieces(as_teachers_need(self.recipe.with_columns().data, self.recipe.teachers), self.tokenizer)

    @cached_property
    def teachers(self) -> Sequence[tuple[str, Any]]:
        """Of each teacher with a tokenizer of its own: what it is called, and that."""
        return [
            (where, teacher_tokenizer(config, where, self.tokenizer))
            for where, config in ((f"teachers[{i}]", config) for i, config in enumerate(self.recipe.teachers))
            if config.student is None and config.source is None and not (self.quick and config.server is not None)
        ]

    @property
    def chats(self) -> bool:
        return any(source.messages for source in self.recipe.data.sources)


Check = Callable[[Patient], Iterator[Finding]]
StepCheck = Callable[[Patient, FirstStep], Iterator[Finding]]
