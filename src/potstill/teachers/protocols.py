"""What a teacher is made of: a source, which knows documents in the teacher's own tokens, and a tokenizer view, which knows how
the student's rows lie over them. n sources and m views are n + m classes; `teacher.Teacher` composes them.

U tokens that a teacher is asked about, N rows of the student's batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.signals.document import Document
from potstill.types import Batch, Example, HiddenTarget, LogitsTarget, SampledTarget, Target, TopKTarget

Ints = npt.NDArray[np.int64]
NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Asked:
    """Tokens of the teacher's documents, ordered by document."""

    document: Ints  # [U]; the document of each token …
    place: Ints  # [U]; … its place there …
    token: Ints  # [U]; … and its id
    distribution: bool = True  # the distribution over all ids is wanted
    token_logprobs: bool = False  # the tokens' own log-probabilities are wanted, unless hidden states tell them

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
    batch: Batch | None = None  # the same, laid out for a model
    documents: Sequence[Document] = ()  # the same, with what is stored of them


@dataclass(frozen=True)
class Signal:
    """What a teacher says at U of its tokens, over its own ids."""

    target: HiddenTarget | LogitsTarget | TopKTarget | SampledTarget | None = None  # None: no distribution is known
    token_logprobs: Tensor | None = None  # [U]; of the tokens that were there
    hidden: Tensor | None = None  # [U, H]; on the host, in place of the target: the head is on the device
    begun: Callable[[], Tensor] | None = None  # waits for the hidden states of all that is asked


class SignalSource(ABC):
    """Where a teacher's signal comes from: a model, a cache, a server, or a cache in front of one of them. The defaults are
    those of a source that reads the student's own tokens, can answer about any text, and computes on the device."""

    ahead: int = 1  # micro-batches that are best prepared at once: requests under way at a server
    fixed: bool = False  # a missing document is an error: it is neither computed nor left out
    skips: bool = False  # a missing document is left out

    def missing(self, batch: Batch) -> Sequence[int]:
        """Which examples of the batch are missing and must be left out. Runs on the prefetch thread."""
        return ()

    def check_there(self, examples: Sequence[Example]) -> None:  # noqa: B027
        """Raise if the source is fixed and lacks one of them."""

    def read(self, batch: Batch, compute: bool) -> Reading | None:
        """What the teacher reads. On the prefetch thread `compute` is false, and None means that some of it has to be computed
        on the device first; then it is called again with `compute`."""
        return Reading(batch.examples)

    def computing(self) -> AbstractContextManager[None]:
        """Around `read` with `compute`; and once for a batch that is there already, or that another rank reads: where ranks
        make the passes of a model together, they make them here."""
        return nullcontext()

    def prepare(self, reading: Reading, asked: Sequence[Asked]) -> Sequence[Signal]:
        """What can be read on the prefetch thread: one signal per `asked`, or nothing at all."""
        return ()

    @abstractmethod
    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        """One per `asked`, on the device of `batch`, outside autograd. `host`: what `prepare` gave."""

    def idle(self, device: torch.device) -> None:  # noqa: B027
        """In place of `signal`, for a batch that it has nothing to say about: where ranks make the passes of a model together,
        it makes the one that the others make."""

    @property
    def waited(self) -> float:
        """Seconds that the run has stood still for ranks that compute its signal."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """Called at the end of a run, however it ends."""


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """How the rows of one batch lie over what the teacher reads."""

    asked: Sequence[Asked]
    known: npt.NDArray[np.bool_] | None = None  # [N]; the rows that are answered; None: all
    counts: Mapping[str, int] = field(default_factory=dict)  # of the alignment, for the log
    view: Any = None  # that made it, where `target` needs it; it is not sent to other ranks, which have their own

    def prepared(self, signals: Sequence[Signal]) -> Plan:
        """The plan with what can be computed from the signals on the prefetch thread."""
        return self

    @abstractmethod
    def target(self, signals: Sequence[Signal], device: torch.device) -> Target: ...


class TokenizerView(Protocol):
    def plan(self, batch: Batch, read: Sequence[Example]) -> Plan:
        """`read`: the batch's documents in the teacher's tokens. Runs on the prefetch thread."""
        ...
