"""What flows through potstill: Example → Batch → Rows + Target → loss. Imports torch and numpy, nothing of ours.

Shapes: B rows of a batch, L positions, N loss rows, V vocabulary, H hidden width, K entries of a truncated target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class PotstillError(Exception):
    """Something the user can put right. The command line shows its one sentence and no traceback."""


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _no_mask() -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True)
class Example:
    """One text and what is supervised in it; once it is tokenized, in the student's tokens too.

    The raw text stays beside the student's ids because a teacher with another tokenizer reads the text, not the ids.
    """

    key: str  # stable hash of the text, or of the canonical JSON of the messages before any chat template
    text: (
        str  # as the student's tokenizer reads it (for a chat: as its template rendered it); "": nothing to learn from
    )
    ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)  # [L]; empty until it is tokenized
    # [L]; token i is to be predicted. Token 0 never is: nothing comes before it
    supervised: npt.NDArray[np.bool_] = field(default_factory=_no_mask)
    supervised_bytes: int = 0  # UTF-8 bytes of `text` that the supervised tokens stand for
    messages: Sequence[Mapping[str, Any]] | None = None  # the conversation, for a teacher with its own template
    tools: Sequence[Any] | None = None  # that were offered in it
    spans: tuple[tuple[int, int], ...] | None = None  # characters of `text` that are supervised; None: all
    ends: npt.NDArray[np.int64] | None = None  # [L]; where each token ends in `text`, in bytes, when asked for
    columns: Mapping[str, str] = field(default_factory=dict)  # of its record, that teachers ask for
    source: str = ""  # where it came from, for error messages: file and record
    first: bool = True  # of its record's examples
    last: bool = True  # of its text's pieces: eos may follow
    split: bool = False  # part of a conversation whose template rewrites earlier turns
    writer: str | None = None  # "student" or "teacher", who wrote the supervised part; None: it is the data set's
    behaviour: npt.NDArray[np.float32] | None = (
        None  # [L]; log-probability each token was sampled with; 0 in the prompt
    )
    version: int | None = None  # optimizer steps of the student that wrote it

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised.sum())


@dataclass(frozen=True)
class Rows:
    """The positions that enter the loss, flat over the batch. Shifting by one and masking happen when these are made."""

    student: Tensor  # int64 [N]; flat position (of B·L) whose hidden state predicts
    teacher: Tensor  # int64 [N]; flat teacher position that answers
    labels: Tensor  # int64 [N]; the token that comes next
    # [N]; log-probability with which the student wrote that token; NaN: it did not write it. None: it wrote none of them
    behaviour: Tensor | None = None

    def __len__(self) -> int:
        return self.student.shape[0]


@dataclass(frozen=True)
class Batch:
    """A micro-batch: documents packed or padded into B rows of L positions, and the rows of the loss over them."""

    input_ids: Tensor  # int64 [B, L]
    position_ids: Tensor  # int64 [B, L]; restarts at 0 with every document
    document: Tensor  # int32 [B, L]; 0 is padding, equal numbers in a row may attend to each other
    packed: bool  # some row holds more than one document
    rows: Rows
    supervised_tokens: int  # on the host: the step's divisor is summed without touching a device
    examples: tuple[Example, ...]

    def to(self, device: torch.device) -> Batch:
        return _moved(self, device)


@dataclass(frozen=True)
class DenseTarget:
    """The teacher's distribution over its whole vocabulary: hidden states and the output head, or ready logits, or the mean of
    several such distributions."""

    hidden: Tensor | None = None  # [N, H]
    weight: Tensor | None = None  # [V, H]
    logits: Tensor | None = None  # [N, V], instead of the two above
    mean: Sequence[tuple[float, DenseTarget]] = ()  # instead of all the others; the shares sum to one
    spelled: Spelling | None = None  # instead of all the others
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0

    def to(self, device: torch.device) -> DenseTarget:
        return _moved(self, device)

    @property
    def width(self) -> int:
        """How many ids it is over."""
        if self.mean:
            return self.mean[0][1].width
        if self.spelled is not None:
            return self.spelled.students
        source = self.logits if self.logits is not None else self.weight
        assert source is not None
        return source.shape[-1] if self.logits is not None else source.shape[0]

    def select(self, rows: Tensor) -> DenseTarget:
        """The same head at fewer rows, outside autograd."""
        if self.mean:
            return replace(self, mean=[(share, part.select(rows)) for share, part in self.mean])
        if self.spelled is not None:
            return replace(self, spelled=self.spelled.select(rows))
        hidden = None if self.hidden is None else self.hidden.detach()[rows]
        return replace(self, hidden=hidden, logits=None if self.logits is None else self.logits.detach()[rows])


@dataclass(frozen=True)
class Spelling:
    """A teacher's distribution over its own ids as one over the student's: each of its tokens counts for the student's first
    token of what is left of it. N rows, U places of the teacher's, E entries of nodes (`text.PrefixTable`)."""

    source: DenseTarget  # over the teacher's ids, at U places
    students: int  # ids of the student
    main: Tensor  # int64 [students]; the lexicon, as text.PrefixTable has it
    more_token: Tensor  # int64 [M]
    more_slot: Tensor  # int64 [M]; which of `several` each counts for
    several: Tensor  # int64 [S]; the student's ids that more than one counts for, increasing
    nowhere: Tensor  # int64; those that none does, increasing
    whole: Tensor  # bool [teacher ids]
    begin: Tensor  # int64 [nodes + 1]
    token: Tensor  # int64 [E]
    then: Tensor  # int64 [E]
    place: Tensor  # int64 [N], never falling; which of the places answers
    node: Tensor  # int64 [N]; what is written of the teacher's next token there
    actual: Tensor  # int64 [N]; which token that is …
    usual: Tensor  # int64 [N]; … what of the student's it would be counted for (−1: nothing) …
    own: Tensor  # int64 [N]; … and what it was written with
    beyond: Tensor  # [N]; log-probability of the teacher's further tokens that the student's goes on into
    odd_host: npt.NDArray[np.bool_]  # [N]; where it was not written as usual, or goes on
    more_then_host: npt.NDArray[np.int64]
    slot_host: npt.NDArray[np.int64]  # as more_slot
    nowhere_host: npt.NDArray[np.int64]
    place_host: npt.NDArray[np.int64]
    node_host: npt.NDArray[np.int64]
    sizes_host: npt.NDArray[np.int64]  # [nodes]; entries of each

    def select(self, rows: Tensor) -> Spelling:
        """`rows` are on the host. Of the places only those stay that answer one of them."""
        at, host = rows.to(self.place.device), rows.cpu().numpy()
        places, index = np.unique(self.place_host[host], return_inverse=True)
        changed: dict[str, Any] = {
            name: getattr(self, name)[at] for name in ("node", "actual", "usual", "own", "beyond")
        }
        changed |= {name: getattr(self, name)[host] for name in ("odd_host", "node_host")}
        changed["place"] = torch.from_numpy(index).to(self.place.device)
        return replace(self, source=self.source.select(torch.from_numpy(places)), place_host=index, **changed)


@dataclass(frozen=True)
class TopKTarget:
    """K entries normalised over the teacher's full vocabulary, and the log-mass of all the rest (−inf: no rest)."""

    ids: Tensor  # int64 [N, K]
    logprobs: Tensor  # [N, K]
    tail: Tensor  # [N]
    width: int | None = (
        None  # ids it is over; the student's further ones leave the divergence's softmax. None: all of its
    )
    tail_samples: Tensor | None = None  # int64 [N, M]; draws from the rest, from which forward KL learns what is in it
    tail_entropy: Tensor | None = None  # [N]; of the teacher within the rest: what these draws cost at least
    absent: Tensor | None = None  # bool [N, K]; entries that are none: they repeat the id of another one of the row

    def to(self, device: torch.device) -> TopKTarget:
        return _moved(self, device)

    def select(self, rows: Tensor) -> TopKTarget:
        rest, entropy, absent = (
            None if x is None else x[rows] for x in (self.tail_samples, self.tail_entropy, self.absent)
        )
        return TopKTarget(self.ids[rows], self.logprobs[rows], self.tail[rows], self.width, rest, entropy, absent)


@dataclass(frozen=True)
class SampledTarget:
    """Draws from the teacher with their shares: unbiased for forward KL and cross-entropy only."""

    ids: Tensor  # int64 [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor | None = None  # [N], of the teacher: the loss is a cross-entropy, and KL is what it has beyond this
    width: int | None = None  # as TopKTarget's

    def to(self, device: torch.device) -> SampledTarget:
        return _moved(self, device)

    def select(self, rows: Tensor) -> SampledTarget:
        entropy = None if self.entropy is None else self.entropy[rows]
        return replace(self, ids=self.ids[rows], weights=self.weights[rows], entropy=entropy)


@dataclass(frozen=True)
class Chunks:
    """Runs of a batch's rows that cover the same bytes as runs of a teacher's tokens. C chunks, M rows within them."""

    first: Tensor  # int64 [C]; the row of each chunk's first token, increasing
    inner: Tensor  # int64 [M]; the other rows of the chunks, increasing
    owner: Tensor  # int64 [M]; the chunk of each
    first_host: npt.NDArray[np.int64]  # the same as `first` and `inner`: which rows are where is asked on the host
    inner_host: npt.NDArray[np.int64]

    def to(self, device: torch.device) -> Chunks:
        return _moved(self, device)


@dataclass(frozen=True)
class Relation:
    """How two vocabularies relate, on a device: `text.VocabMap` as the losses need it. Vs and Vt ids, P pairs, E entries."""

    student: Tensor  # int64 [P], increasing; student[i] and teacher[i] mean the same
    teacher: Tensor  # int64 [P]
    student_alone: Tensor  # int64; the ids that are in no pair, increasing
    teacher_alone: Tensor
    place_student: Tensor  # int64 [Vs]; index in `student`, or −1 − index in `student_alone`
    place_teacher: Tensor  # int64 [Vt]
    start: Tensor  # int64 [E]; the projection: student id, increasing …
    end: Tensor  # int64 [E]; … teacher id …
    value: Tensor  # [E]; … and share
    unmapped: Tensor  # int64; student ids without an entry
    hosts: Mapping[str, npt.NDArray[np.int64]]  # student, student_alone, start and unmapped, to cut them on the host

    def to(self, device: torch.device) -> Relation:
        return _moved(self, device)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.place_student.shape[0], self.place_teacher.shape[0]


@dataclass(frozen=True)
class CrossTarget:
    """What a teacher with other tokens says, chunk by chunk; `rows` of the other targets are rows of the batch. C chunks."""

    method: str  # shared, projection, chunk or uld
    chunks: Chunks
    relation: Relation
    start: (
        DenseTarget | TopKTarget | None
    )  # what it expects where a chunk begins, over its own ids [C]; None: not known
    token: Tensor  # int64 [C]; its first token of each chunk
    logprob: Tensor  # [C]; log-probability of that token
    inner: Tensor  # [C]; sum of the log-probabilities of its other tokens of the chunk
    chunk_temperature: float = 1.0

    def to(self, device: torch.device) -> CrossTarget:
        return _moved(self, device)


@dataclass(frozen=True)
class TokenLogprobsTarget:
    """Only how likely the text's own next tokens are to the teacher."""

    logprobs: Tensor  # [N]

    def to(self, device: torch.device) -> TokenLogprobsTarget:
        return _moved(self, device)

    def select(self, rows: Tensor) -> TokenLogprobsTarget:
        return TokenLogprobsTarget(self.logprobs[rows])


Target = DenseTarget | TopKTarget | SampledTarget | CrossTarget | TokenLogprobsTarget


@dataclass(frozen=True)
class Prepared:
    """What a teacher prepared for a micro-batch, on the host and ahead of its step."""

    known: npt.NDArray[np.bool_] | None = None  # [N]; the rows that the teacher answers; None: all
    counts: Mapping[str, int] = field(default_factory=dict)  # of the alignment of two tokenizers, for the log


class Teacher(Protocol):
    """Where a teacher's signal comes from is its own business; the loop asks for targets and nothing else."""

    name: str
    weight: float
    ahead: int  # micro-batches that are best prepared at once: requests under way at a server
    fixed: bool  # a missing document is an error: it is neither computed nor left out

    def missing(self, batch: Batch) -> Sequence[int]:
        """Which examples of the batch are missing and must be left out. Runs on the prefetch thread."""
        ...

    def check_there(self, examples: Sequence[Example]) -> None:
        """Raise if the teacher is fixed and lacks one of them."""
        ...

    def prepare(self, batch: Batch) -> Prepared:
        """What can be done without the device. Runs on the prefetch thread."""
        ...

    def answer(self, batch: Batch, prepared: Prepared) -> tuple[Target | None, Prepared]:
        """The target at each of the batch's rows, on the batch's device, outside autograd; None if the teacher answers none of
        them. And what was prepared, completed by what needed the device: computing what a cache lacks."""
        ...

    def close(self) -> None:
        """At the end of a run, however it ends: put away what was gathered."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step, as micro-batches."""

    batches: tuple[Batch, ...]
    state: dict[str, Any]  # JSON-able: what to resume from after this step
    counts: dict[str, int]  # since the beginning of the run
    epoch: int  # from 0
    facts: Mapping[str, float] = field(default_factory=dict)  # about text that was written for it, for the log


class RolloutSource(Protocol):
    """Step batches of text that a model writes while the run goes on. `data.loader.Feed` reads them as it reads a data set."""

    @property
    def waiting(self) -> int:
        """Step batches that are written already: what comes after them may need weights that are not there yet."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is worth a word before the first step."""
        ...

    def __iter__(self) -> Iterator[StepBatch]: ...

    def __next__(self) -> StepBatch: ...

    def advance(self, version: int) -> None:
        """The student has new weights, after so many optimizer steps."""
        ...

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write to a checkpoint what was written and is still to be trained on after `state`."""
        ...

    def close(self) -> None: ...


def _moved(record: Any, device: torch.device) -> Any:
    """A copy of a frozen dataclass with its tensors (and those of the dataclasses in it) on `device`."""
    changed: dict[str, Any] = {}
    for part in fields(record):
        value = getattr(record, part.name)
        if isinstance(value, Tensor):
            changed[part.name] = value.to(device, non_blocking=True)
        elif isinstance(value, Rows | Chunks | Relation | DenseTarget | TopKTarget | Spelling):
            changed[part.name] = _moved(value, device)
        elif part.name == "mean":
            changed[part.name] = [(share, _moved(one, device)) for share, one in value]
    return replace(record, **changed)
