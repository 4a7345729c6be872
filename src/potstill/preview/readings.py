"""Records as the student and as each teacher reads them, through the same encoders as training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import Console

from potstill.config import DataConfig, Recipe, TeacherConfig
from potstill.data import Encoder, Source, example_maker, with_pieces
from potstill.dry_run import FirstStep, at_first_step
from potstill.models import difference, load_student_tokenizer
from potstill.report.alignment import shown_tokens
from potstill.teachers.open import as_teachers_need, teacher_tokenizer
from potstill.teachers.reading import reader_of
from potstill.teachers.teacher import teaches
from potstill.text import TokenTable
from potstill.types import Example


@dataclass(frozen=True)
class Token:
    text: str  # for the eye: spaces and line ends as signs
    supervised: bool


@dataclass(frozen=True)
class Reading:
    """A text in the tokens of one who reads it."""

    reader: str
    tokens: tuple[Token, ...] = ()
    note: str = ""  # in place of tokens, or about them

    @property
    def supervised(self) -> int:
        return sum(token.supervised for token in self.tokens)


@dataclass(frozen=True)
class Shown:
    """A record, or a piece of one, with what is supervised in its text and how each reads it."""

    where: str
    writer: str  # of the supervised part: the data set, the student, the teacher
    text: str
    spans: tuple[tuple[int, int], ...]  # characters that are supervised
    readings: tuple[Reading, ...]


def preview(recipe: Recipe, records: int, console: Console) -> list[Shown]:
    """Some records of each source in their order; where text is written, then as many of one generation."""
    tokenizer = load_student_tokenizer(recipe.student)
    data = with_pieces(as_teachers_need(recipe.with_columns().data, recipe.teachers), tokenizer)
    readers = [
        TeacherView(config, f"teachers[{index}]", tokenizer, data) for index, config in enumerate(recipe.teachers)
    ]
    weights = recipe.loss.token_weights
    encode = Encoder(tokenizer, max_length=data.max_length, append_eos=data.append_eos, token_weights=weights)
    table = TokenTable.from_tokenizer(tokenizer)
    shown = []
    for raw in _first_examples(data, tokenizer, records):
        (encoded,) = encode([raw])
        note = f"{encoded.cut} tokens beyond data.max_length {data.max_length} are cut" if encoded.cut else ""
        if encoded.example is None:
            shown.append(_shown(raw, Reading("student", note="nothing is supervised: the record is dropped"), ()))
        else:
            shown.append(_read(encoded.example, table, readers, note))
    if recipe.rollouts.writes:
        shown += _written(recipe, records, table, readers, console)
    return shown


def _first_examples(data: DataConfig, tokenizer: Any, records: int) -> Iterator[Example]:
    for index, config in enumerate(data.sources):
        source = Source(config, f"data.sources[{index}]", seed=0, shuffle=False, further=data.read_columns)
        make = example_maker(data, config, source.key, tokenizer)
        found = (example for record, where, _ in source.records(0) for example in make(record, where))
        yield from islice(found, records)


def _written(
    recipe: Recipe, records: int, table: TokenTable, readers: Sequence[TeacherView], console: Console
) -> list[Shown]:
    def look(first: FirstStep) -> list[Shown]:
        examples = (example for batch in first.prepared.step.batches for example in batch.examples)
        answers = (example for example in examples if example.writer is not None)
        return [_read(example, table, readers) for example in islice(answers, records)]

    return at_first_step(recipe, look, console, count=False) or []


def _read(example: Example, table: TokenTable, readers: Sequence[TeacherView], note: str = "") -> Shown:
    reading = Reading("student", _tokens(example, table), note)
    return _shown(example, reading, [reader(example) for reader in readers])


def _shown(example: Example, reading: Reading, others: Sequence[Reading]) -> Shown:
    spans = example.spans if example.spans is not None else ((0, len(example.text)),)
    return Shown(example.source, example.writer or "data set", example.text, spans, (reading, *others))


def _tokens(example: Example, table: TokenTable) -> tuple[Token, ...]:
    texts = shown_tokens(example.ids.tolist(), table)
    return tuple(Token(text, bool(on)) for text, on in zip(texts, example.supervised, strict=True))


class TeacherView:
    """How one teacher reads the student's texts."""

    def __init__(self, config: TeacherConfig, where: str, student: Any, data: DataConfig) -> None:
        self._config = config
        self._name = f"{where}: {config.name}"
        tokenizer = teacher_tokenizer(config, where, student)
        self._difference = difference(student, tokenizer)
        self._table: TokenTable | None = None
        if self._difference is not None or config.own_prompt:
            self._table = TokenTable.from_tokenizer(tokenizer)
            self._reader = reader_of(config, tokenizer, None, data)

    def __call__(self, example: Example) -> Reading:
        if not teaches(self._config.filter, example):
            return Reading(self._name, note="its filter leaves this record out")
        if self._table is None:
            return Reading(self._name, note="reads the student's tokens")
        (read,) = self._reader([example])
        if not len(read.ids):
            return Reading(self._name, note="has nothing to predict in it")
        return Reading(self._name, _tokens(read, self._table), self._difference or "reads a context of its own")
