"""What a teacher is made of: a source, which knows documents in the teacher's own tokens, and a tokenizer view, which knows how
the student's rows lie over them. n sources and m views are n + m classes; `teacher.Teacher` composes them.

U tokens that a teacher is asked about, N rows of the student's batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.cache.document import Document
from potstill.types import Batch, DenseTarget, Example, SampledTarget, Target, TopKTarget

Ints = npt.NDArray[np.int64]
NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Asked:
    """Tokens of the teacher's documents, one document after the other."""

    document: Ints  # [U]; whose they are …
    place: Ints  # [U]; … where they stand in it …
    token: Ints  # [U]; … and which they are
    distribution: bool = True  # what else could have stood there is asked for
    token_logprobs: bool = False  # how likely these tokens were is asked for, where the distribution does not tell

    @classmethod
    def of(cls, read: Sequence[Example], document: Ints, place: Ints, **what: bool) -> Asked:
        ids = np.concatenate([NONE, *(example.ids for example in read)])
        return cls(document, place, ids[flat_places(read, document, place)].astype(np.int64), **what)


def flat_places(examples: Sequence[Example], document: Ints, place: Ints) -> Ints:
    """Places in documents as places among the tokens of all of them."""
    return np.cumsum([0, *(len(example.ids) for example in examples)])[document] + place


@dataclass(frozen=True)
class Reading:
    """The documents of a batch as the teacher reads them."""

    examples: Sequence[Example]  # in the teacher's tokens
    batch: Batch | None = None  # the same, laid out for a model; None: as in the student's batch
    documents: Sequence[Document] = ()  # the same, with what is stored of them


@dataclass(frozen=True)
class Signal:
    """What a teacher says at U of its tokens, over its own ids."""

    target: DenseTarget | TopKTarget | SampledTarget | None = None  # None: no distribution is known
    token_logprobs: Tensor | None = None  # [U]; of the tokens that were there
    hidden: Tensor | None = None  # [U, H]; on the host, in place of the target: the head is on the device


class SignalSource(ABC):
    """Where a teacher's signal comes from: a model, a cache, a server, or a cache in front of one of them. Inherit from it what
    holds for a source that can answer about any text, and needs the device for it."""

    ahead: int = 1  # micro-batches that are best prepared at once: requests under way at a server
    fixed: bool = False  # a document that it lacks is an error: nobody is to compute it, or to leave it out

    def missing(self, batch: Batch) -> Sequence[int]:
        """Examples of the batch that it lacks and that are to be left out. On the host thread."""
        return ()

    def check_there(self, examples: Sequence[Example]) -> None:  # noqa: B027
        """Of a fixed one: an error where it lacks one of them."""

    def read(self, batch: Batch, compute: bool) -> Reading | None:
        """On the host thread, without `compute`: None where some of it must first be computed on the device."""
        return Reading(batch.examples)

    def prepare(self, reading: Reading, asked: Sequence[Asked]) -> Sequence[Signal]:
        """What the host thread can have of it, one per `asked`, or nothing."""
        return ()

    @abstractmethod
    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        """One per `asked`, on the device of `batch`, outside autograd. `host`: what `prepare` gave."""

    def close(self) -> None:  # noqa: B027
        """At the end of a run, however it ends."""


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """How the rows of one batch lie over what the teacher reads."""

    asked: Sequence[Asked]
    known: npt.NDArray[np.bool_] | None = None  # [N]; the rows that are answered; None: all
    counts: Mapping[str, int] = field(default_factory=dict)  # of the alignment, for the log

    def prepared(self, signals: Sequence[Signal]) -> Plan:
        """With what can be made of the signals on the host thread."""
        return self

    @abstractmethod
    def target(self, signals: Sequence[Signal], device: torch.device) -> Target: ...


class TokenizerView(Protocol):
    def plan(self, batch: Batch, read: Sequence[Example]) -> Plan:
        """`read`: the batch's documents in the teacher's tokens. On the host thread."""
        ...
