"""A teacher with another tokenizer: it reads the same text in its own tokens, and answers at chunks that cover the same bytes.

Alignment happens on the prefetch thread. C chunks, T teacher tokens that come after the first ones of their chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.config import AcrossConfig
from potstill.data import Piece, collate
from potstill.losses import label_logprobs
from potstill.models import LanguageModel
from potstill.teachers.reading import TeacherText, piece_of
from potstill.text import Alignment, TokenTable, align_batch, align_spans, vocab_map
from potstill.text.chat import ChatRenderer
from potstill.types import Batch, Chunks, CrossTarget, DenseTarget, Example, PotstillError, Relation

Ints = npt.NDArray[np.int64]


class Pairing:
    """A student's tokenizer and a teacher's: how texts line up, and how the vocabularies relate."""

    def __init__(self, student: Any, teacher: Any, across: AcrossConfig) -> None:
        self.across = across
        self.student, self.teacher = TokenTable.from_tokenizer(student), TokenTable.from_tokenizer(teacher)
        self._ends = tuple({t.eos_token_id} - {None} for t in (student, teacher))
        self._relations: dict[torch.device, Relation] = {}

    @cached_property
    def map(self) -> Any:
        return vocab_map(self.student, self.teacher, decay=self.across.decay)

    def relation(self, device: torch.device) -> Relation:
        if device not in self._relations:
            self._relations[device] = relation_of(self.map).to(device)
        return self._relations[device]

    def chunks(self, examples: Sequence[Example], read: Sequence[Example]) -> list[npt.NDArray[np.int64]]:
        """For each document the chunks that may enter a loss, [chunks, 4]: student start and end, teacher start and end, in
        tokens. All of a chunk's student tokens are supervised, and the teacher has something before its first one."""
        found: list[Alignment | None] = [None] * len(examples)
        plain = [i for i, example in enumerate(examples) if example.messages is None]
        for i in set(range(len(examples))) - set(plain):
            found[i] = self._conversation(examples[i], read[i])
        teacher_ids = [self._without_end(examples[i], read[i]) for i in plain]
        aligned = align_batch([examples[i].ids for i in plain], teacher_ids, self.student, self.teacher)
        for i, alignment in zip(plain, aligned, strict=True):
            found[i] = alignment
        return [self._kept(a, example) for a, example in zip(found, examples, strict=True) if a is not None]

    def _kept(self, alignment: Alignment, example: Example) -> Ints:
        kept = alignment.supervised(example.supervised) & (alignment.teacher_start > 0) & (alignment.student_start > 0)
        columns = (alignment.student_start, alignment.student_end, alignment.teacher_start, alignment.teacher_end)
        result: Ints = np.stack(columns, -1)[kept].astype(np.int64)
        return result

    def _without_end(self, example: Example, read: Example) -> npt.NDArray[Any]:
        """The teacher's ids, without an eos that the student's text does not have: it goes on in another piece."""
        ours, theirs = self._ends
        goes_on = len(example.ids) and int(example.ids[-1]) not in ours
        return read.ids[:-1] if goes_on and len(read.ids) and int(read.ids[-1]) in theirs else read.ids

    def _conversation(self, example: Example, read: Example) -> Alignment:
        """Turn by turn: templates put other words around them."""
        ours, theirs = _runs(example.supervised), _runs(read.supervised)
        if len(ours) > len(theirs):
            raise PotstillError(
                f"{example.source} ({example.key}): the student's chat template shows {len(ours)} assistant turns of it and "
                f"the teacher's {len(theirs)}, so they cannot be matched"
            )
        spans = [(*a, *b) for a, b in zip(ours, theirs, strict=False)]
        return align_spans(example.ids, read.ids, self.student, self.teacher, spans)


def _runs(supervised: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def relation_of(found: Any) -> Relation:
    """A `VocabMap` as the losses use it."""
    students, teachers = found.shape
    student, teacher = found.student.astype(np.int64), found.teacher.astype(np.int64)
    alone = [np.setdiff1d(np.arange(size), ids) for size, ids in ((students, student), (teachers, teacher))]
    places = []
    for size, ids, others in ((students, student, alone[0]), (teachers, teacher, alone[1])):
        place = np.zeros(size, dtype=np.int64)
        place[ids], place[others] = np.arange(len(ids)), -1 - np.arange(len(others))
        places.append(place)
    counts = np.diff(found.indptr)
    hosts: dict[str, Ints] = {
        "student": student,
        "student_alone": alone[0],
        "start": np.repeat(np.arange(students), counts),
        "unmapped": np.flatnonzero(counts == 0),
    }
    return Relation(
        student=torch.from_numpy(student),
        teacher=torch.from_numpy(teacher),
        student_alone=torch.from_numpy(alone[0]),
        teacher_alone=torch.from_numpy(alone[1]),
        place_student=torch.from_numpy(places[0]),
        place_teacher=torch.from_numpy(places[1]),
        start=torch.from_numpy(hosts["start"]),
        end=torch.from_numpy(found.indices.astype(np.int64)),
        value=torch.from_numpy(found.values),
        unmapped=torch.from_numpy(hosts["unmapped"]),
        hosts=hosts,
    )


@dataclass(frozen=True)
class Aligned:
    """The chunks of a batch, before the teacher has said anything."""

    chunks: Chunks
    document: Ints  # [C]; of each chunk
    begin: Ints  # [C]; its first teacher token, in the document …
    token: Ints  # [C]; … which is this
    inner: Ints  # [T]; its other teacher tokens, in their documents …
    inner_token: Ints  # [T]; … which are these …
    inner_owner: Ints  # [T]; … of these chunks
    counts: Mapping[str, int]


def align_rows(pairing: Pairing, batch: Batch, read: Sequence[Example]) -> Aligned:
    """The rows of a batch as chunks. `read`: its documents in the teacher's tokens."""
    kept = pairing.chunks(batch.examples, read)
    document = np.repeat(np.arange(len(kept)), [len(k) for k in kept])
    s0, s1, t0, t1 = np.concatenate([*kept, np.zeros((0, 4), dtype=np.int64)]).T
    before = np.concatenate([[0], np.cumsum([example.supervised_tokens for example in batch.examples])])
    row_of = [np.cumsum(e.supervised) - 1 + begin for e, begin in zip(batch.examples, before[:-1], strict=True)]
    first = np.concatenate([NONE, *(rows[k[:, 0]] for rows, k in zip(row_of, kept, strict=True))])
    owner, step = _expanded(s1 - s0 - 1)
    teacher_owner, teacher_step = _expanded(t1 - t0 - 1)
    inner = (first[owner] + 1 + step).astype(np.int64)
    place = (t0[teacher_owner] + 1 + teacher_step).astype(np.int64)
    ids = [np.asarray(example.ids, dtype=np.int64) for example in read]
    flat = np.concatenate([NONE, *ids])
    starts = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
    return Aligned(
        Chunks(torch.from_numpy(first), torch.from_numpy(inner), torch.from_numpy(owner), first, inner),
        document,
        t0,
        flat[starts[document] + t0],
        place,
        flat[starts[document[teacher_owner]] + place],
        teacher_owner,
        {
            "chunks": len(first),
            "one_to_one": int(((s1 - s0 == 1) & (t1 - t0 == 1)).sum()),
            "tokens_in_chunks": int((s1 - s0).sum()),
        },
    )


NONE: Ints = np.zeros(0, dtype=np.int64)


def _expanded(counts: Ints) -> tuple[Ints, Ints]:
    """For each of `counts` so many entries: whose they are, and 0, 1, 2 …"""
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - begins[owner]


class Rereader:
    """Examples of the student's as the teacher reads them."""

    def __init__(self, tokenizer: Any, positions: int | None, kwargs: Mapping[str, Any]) -> None:
        self._text = TeacherText(tokenizer, positions)
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._renderer: ChatRenderer | None = None

    def __call__(self, examples: Sequence[Example]) -> list[Example]:
        read = self._text([self._piece(example) for example in examples])
        blank = np.zeros(0, dtype=np.int32)
        nothing = Example("", "", blank, blank.astype(np.bool_), 0)
        return [nothing if example is None else example for example in read]

    def _piece(self, example: Example) -> Piece:
        piece = piece_of(example)
        if example.messages is None:
            return piece
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._kwargs, "teachers")
        rendered = self._renderer.render(example.messages, example.tools, example.source)
        return replace(piece, text=rendered[0].text, spans=rendered[0].spans)


class AlignedTeacher:
    """A frozen model with another tokenizer than the student's."""

    def __init__(
        self,
        language_model: LanguageModel,
        pairing: Pairing,
        name: str,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.language_model = language_model
        self.name = name
        self.weight = weight
        self.counts: dict[str, int] = {}
        self._pairing = pairing
        self._temperature = temperature
        self._reread = Rereader(language_model.tokenizer, language_model.positions, kwargs or {})

    def lacks(self, batch: Batch) -> Sequence[int]:
        return ()

    def prepare(self, batch: Batch) -> tuple[Batch, Aligned, Tensor, Tensor]:
        """The teacher's own batch, the chunks, and where in that batch their tokens are predicted."""
        read = self._reread(batch.examples)
        found = align_rows(self._pairing, batch, read)
        theirs = collate([[example] for example in read], pad_id=0)
        width = theirs.input_ids.shape[1]
        first = found.document * width + found.begin - 1
        inner = found.document[found.inner_owner] * width + found.inner - 1
        for name, value in found.counts.items():
            self.counts[name] = self.counts.get(name, 0) + value
        return theirs, found, torch.from_numpy(first), torch.from_numpy(inner)

    @torch.no_grad()
    def targets(self, batch: Batch, prepared: tuple[Batch, Aligned, Tensor, Tensor]) -> CrossTarget:
        theirs, found, first, inner = prepared
        device = batch.input_ids.device
        positions = torch.cat([first, inner]).to(device)
        hidden = self.language_model.hidden(theirs.to(device), positions)
        at_first, at_inner = (
            self.language_model.at_rows(h, len(self._pairing.teacher)) for h in hidden.split([len(first), len(inner)])
        )
        return cross_target(self._pairing, found, at_first, at_inner, device, self._temperature)

    def close(self) -> None:
        """It keeps nothing."""


def cross_target(
    pairing: Pairing,
    found: Aligned,
    at_first: DenseTarget,
    at_inner: DenseTarget,
    device: torch.device,
    temperature: float,
) -> CrossTarget:
    """The target of a teacher that is there with its head."""
    method, chunks = pairing.across.method, found.chunks
    token = torch.from_numpy(found.token).to(device)
    inner_token, owner = (torch.from_numpy(x).to(device) for x in (found.inner_token, found.inner_owner))
    logprobs = label_logprobs(at_inner, inner_token, temperature)
    inner = logprobs.new_zeros(len(token)).index_add_(0, owner, logprobs)
    return CrossTarget(
        method,
        chunks.to(device),
        pairing.relation(device),
        None if method == "chunk" else at_first,
        token,
        label_logprobs(at_first, token, temperature) if method == "chunk" else torch.zeros_like(inner),
        inner,
        pairing.across.chunk_temperature,
    )
