"""A student's tokenizer and a teacher's: the rows of a batch as chunks that cover the same bytes on both sides.

C chunks, T teacher tokens that come after the first ones of their chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potstill.config import CrossTokenizerConfig
from potstill.teachers.protocols import NONE, Ints, flat_places
from potstill.text import (
    Alignment,
    PrefixTable,
    TokenTable,
    VocabMap,
    align_batch,
    align_spans,
    plain_backend,
    prefix_table,
    vocab_map,
)
from potstill.types import Batch, Example, PotstillError, Relation

LEAST_BYTES, LEAST_SHARE = 64, 0.05  # of a document of so many bytes, the share that must be the same on both sides


class TokenizerPair:
    """A student's tokenizer and a teacher's: how texts line up, and how the vocabularies relate."""

    def __init__(
        self, student: Any, teacher: Any, cross_tokenizer: CrossTokenizerConfig, sizes: tuple[int, int] | None = None
    ) -> None:
        """`sizes`: how many ids the models have; a tokenizer may have some more at its end."""
        self.cross_tokenizer, self._tokenizer = cross_tokenizer, student
        self.student, self.teacher = TokenTable.from_tokenizer(student), TokenTable.from_tokenizer(teacher)
        if sizes is not None:
            self.student, self.teacher = self.student.narrowed(sizes[0]), self.teacher.narrowed(sizes[1])
        self._ends = tuple({t.eos_token_id} - {None} for t in (student, teacher))
        self._relations: dict[torch.device, Relation] = {}

    @cached_property
    def map(self) -> VocabMap:
        return vocab_map(self.student, self.teacher, decay=self.cross_tokenizer.decay)

    @cached_property
    def prefix_table(self) -> PrefixTable:
        found = vocab_map(self.teacher, self.student)
        return prefix_table(self.teacher, self.student, found, plain_backend(self._tokenizer))

    def relation(self, device: torch.device) -> Relation:
        if device not in self._relations:
            self._relations[device] = relation_of(self.map).to(device)
        return self._relations[device]

    def chunks(self, examples: Sequence[Example], read: Sequence[Example]) -> list[Ints]:
        """For each document the chunks that may enter a loss, [chunks, 4]: student start and end, teacher start and end, in
        tokens. All of a chunk's student tokens are supervised, and the teacher has something before its first one."""
        there = [i for i, theirs in enumerate(read) if len(theirs.ids)]  # the others have nothing to predict
        plain = [i for i in there if examples[i].messages is None and examples[i].text == read[i].text]
        teacher_ids = [self._without_end(examples[i], read[i]) for i in plain]
        aligned = align_batch([examples[i].ids for i in plain], teacher_ids, self.student, self.teacher)
        found = dict(zip(plain, aligned, strict=True))
        found |= {i: self._by_turns(examples[i], read[i]) for i in there if i not in found}
        kept = [np.zeros((0, 4), dtype=np.int64)] * len(examples)
        for i, a in found.items():
            usable = a.supervised(examples[i].supervised) & (a.teacher_start > 0) & (a.student_start > 0)
            columns = np.stack([a.student_start, a.student_end, a.teacher_start, a.teacher_end], -1)
            kept[i] = columns[usable].astype(np.int64)
        return kept

    def _without_end(self, example: Example, read: Example) -> npt.NDArray[Any]:
        """The teacher's ids, without an eos that the student's text does not have: it goes on in another piece."""
        ours, theirs = self._ends
        goes_on = len(example.ids) and int(example.ids[-1]) not in ours
        return read.ids[:-1] if goes_on and len(read.ids) and int(read.ids[-1]) in theirs else read.ids

    def _by_turns(self, example: Example, read: Example) -> Alignment:
        """What is supervised in both, one stretch after the other: templates and prompts put other words around it."""
        whole = example.spans is None  # its first token is not supervised, but is part of the text
        answers = example.supervised if example.answers is None else example.answers
        ours, theirs = [(0, len(example.ids))] if whole else _runs(answers), _runs(read.supervised)
        if len(ours) > max(len(theirs), len(read.spans or ())):  # or else the teacher cannot read all of it
            raise PotstillError(
                f"{example.source} ({example.key}): the student's chat template shows {len(ours)} assistant turns of it and "
                f"the teacher's {len(theirs)}, so they cannot be matched"
            )
        spans = [(*a, *b) for a, b in zip(ours, theirs, strict=False)]
        return align_spans(example.ids, read.ids, self.student, self.teacher, spans)

    def covered(self, examples: Sequence[Example], read: Sequence[Example], kept: Sequence[Ints]) -> int:
        """Bytes of the examples that their chunks cover; an error where that is next to nothing of one."""
        total = 0
        for example, theirs, chunks in zip(examples, read, kept, strict=True):
            before = np.concatenate([[0], np.cumsum(self.student.lengths[example.ids])])
            here = min(int((before[chunks[:, 1]] - before[chunks[:, 0]]).sum()), example.supervised_bytes)
            much = example.supervised_bytes >= LEAST_BYTES and len(theirs.ids) > 0
            if much and here < LEAST_SHARE * example.supervised_bytes:
                raise PotstillError(
                    f"{example.source} ({example.key}): of {example.supervised_bytes} bytes only {here} are the same in the "
                    f"tokens of the student ({self.student.name}) and of the teacher ({self.teacher.name}): they do not "
                    "stand for the same text; `potstill align` shows how the two read a text"
                )
            total += here
        return total


def _runs(supervised: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def relation_of(found: VocabMap) -> Relation:
    """A `VocabMap` as the losses use it."""
    student, teacher = found.student.astype(np.int64), found.teacher.astype(np.int64)
    (student_alone, place_student), (teacher_alone, place_teacher) = map(_places, found.shape, (student, teacher))
    counts = np.diff(found.indptr)
    hosts: dict[str, Ints] = {
        "student": student,
        "student_alone": student_alone,
        "start": np.repeat(np.arange(len(counts)), counts),
        "unmapped": np.flatnonzero(counts == 0),
    }
    others = {
        "teacher": teacher,
        "teacher_alone": teacher_alone,
        "place_student": place_student,
        "place_teacher": place_teacher,
        "end": found.indices.astype(np.int64),
        "value": found.values,
    }
    return Relation(hosts=hosts, **{name: torch.from_numpy(array) for name, array in (hosts | others).items()})


def _places(size: int, paired: Ints) -> tuple[Ints, Ints]:
    """The ids that are in no pair, and where each of all ids is found: in the pairs, or as −1 − its place among the others."""
    alone, place = np.setdiff1d(np.arange(size), paired), np.zeros(size, dtype=np.int64)
    place[paired], place[alone] = np.arange(len(paired)), -1 - np.arange(len(alone))
    return alone, place


@dataclass(frozen=True)
class AlignedChunks:
    """The chunks of a batch that may enter a loss, one after the other."""

    document: Ints  # [C]
    student: tuple[Ints, Ints]  # [C]; the tokens of each in its document, from … to
    teacher: tuple[Ints, Ints]
    first: Ints  # [C]; row of its first token
    counts: Mapping[str, int]


def aligned_chunks(pair: TokenizerPair, batch: Batch, read: Sequence[Example]) -> AlignedChunks:
    kept = pair.chunks(batch.examples, read)
    s0, s1, t0, t1 = np.concatenate([*kept, np.zeros((0, 4), dtype=np.int64)]).T
    document = np.repeat(np.arange(len(kept)), [len(chunks) for chunks in kept])
    row_of = np.cumsum(np.concatenate([NONE, *(example.supervised for example in batch.examples)])) - 1
    return AlignedChunks(
        document,
        (s0, s1),
        (t0, t1),
        row_of[flat_places(batch.examples, document, s0)],
        {
            "chunks": len(s0),
            "one_to_one": int(((s1 - s0 == 1) & (t1 - t0 == 1)).sum()),
            "tokens": batch.supervised_tokens,
            "tokens_in_chunks": int((s1 - s0).sum()),
            "bytes": sum(example.supervised_bytes for example in batch.examples),
            "bytes_in_chunks": pair.covered(batch.examples, read, kept),
        },
    )


def expanded(counts: Ints) -> tuple[Ints, Ints]:
    """For each of `counts` so many entries: whose they are, and 0, 1, 2 …"""
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - begins[owner]
