"""What a teacher is made of: a source, which knows documents in the teacher's own tokens, and a tokenizer view, which knows how
the student's rows lie over them. n sources and m views are n + m classes; `teacher.Teacher` composes them.

U tokens that a teacher is asked about, N rows of the student's batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.cache.scored import Documents
from potstill.types import Batch, DenseTarget, Example, SampledTarget, Target, TopKTarget

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """Tokens of the teacher's documents, one document after the other."""

    document: Ints  # [U]; whose they are …
    place: Ints  # [U]; … where they stand in it …
    token: Ints  # [U]; … and which they are
    distribution: bool = True  # what else could have stood there is asked for
    token_logprobs: bool = False  # how likely these tokens were is asked for, where the distribution does not tell


@dataclass(frozen=True)
class Reading:
    """The documents of a batch as the teacher reads them."""

    examples: Sequence[Example]  # in the teacher's tokens
    batch: Batch | None = None  # the same, laid out for a model; None: as in the student's batch
    documents: Documents = ()  # the same, with what is stored of them


@dataclass(frozen=True)
class Signal:
    """What a teacher says at U of its tokens, over its own ids."""

    target: DenseTarget | TopKTarget | SampledTarget | None = None  # None: no distribution is known
    token_logprobs: Tensor | None = None  # [U]; of the tokens that were there
    hidden: Tensor | None = None  # [U, H]; on the host, in place of the target: the head is on the device


class SignalSource(Protocol):
    """Where a teacher's signal comes from: a model, a cache, a server, or a cache in front of one of them."""

    ahead: int  # micro-batches that are best prepared at once: requests under way at a server
    fixed: bool  # a document that it lacks is an error: nobody is to compute it, or to leave it out

    def missing(self, batch: Batch) -> Sequence[int]:
        """Examples of the batch that it does not have and that are to be left out. On the host thread."""
        ...

    def check_there(self, examples: Sequence[Example]) -> None:
        """An error where it is fixed and lacks one of them."""
        ...

    def read(self, batch: Batch, compute: bool) -> Reading | None:
        """On the host thread, without `compute`: None where some of it must first be computed on the device."""
        ...

    def prepare(self, reading: Reading, asked: Sequence[Asked]) -> Sequence[Signal]:
        """What can be had on the host thread, one per `asked`; nothing, where all of it comes from the device."""
        ...

    def signal(
        self, batch: Batch, reading: Reading, asked: Sequence[Asked], signals: Sequence[Signal]
    ) -> Sequence[Signal]:
        """One per `asked`, on the device of `batch`, outside autograd. `signals`: what `prepare` gave."""
        ...

    def close(self) -> None:
        """At the end of a run, however it ends."""
        ...


class Plan(Protocol):
    """How the rows of one batch lie over what the teacher reads."""

    @property
    def asked(self) -> Sequence[Asked]: ...

    @property
    def known(self) -> npt.NDArray[np.bool_] | None:
        """[N]; the rows that are answered; None: all."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Of the alignment, for the log."""
        ...

    def prepared(self, signals: Sequence[Signal]) -> Plan:
        """With what can be made of the signals on the host thread."""
        ...

    def target(self, signals: Sequence[Signal], device: torch.device) -> Target: ...


class TokenizerView(Protocol):
    def plan(self, batch: Batch, read: Sequence[Example]) -> Plan:
        """`read`: the batch's documents in the teacher's tokens. On the host thread."""
        ...
