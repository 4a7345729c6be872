"""Several teachers of one batch: whom each document listens to, and how much.

The weights of a document's teachers always sum to the sum of the recipe's weights. D documents of a batch, N rows, K teachers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.config import LossConfig
from potstill.data import collate
from potstill.losses import row_confidence
from potstill.types import (
    Batch,
    CrossTarget,
    DenseTarget,
    Example,
    PotstillError,
    SampledTarget,
    Target,
    Teacher,
    TopKTarget,
)


@dataclass(frozen=True)
class Routed:
    """What a teacher of some of a batch's documents made ready."""

    keep: npt.NDArray[np.bool_]  # [D]
    batch: Batch | None  # of those documents alone; None: there are none
    ready: Any

    @property
    def counts(self) -> Mapping[str, int]:
        return getattr(self.ready, "counts", {})


class RoutedTeacher:
    """A teacher that is asked about some documents only, by columns of their records."""

    def __init__(self, teacher: Teacher, only: Mapping[str, str | list[str]]) -> None:
        self.teacher = teacher
        self.name, self.weight = teacher.name, teacher.weight
        self._only = {column: {wanted} if isinstance(wanted, str) else set(wanted) for column, wanted in only.items()}

    def _wants(self, example: Example) -> bool:
        return all(example.columns[column] in wanted for column, wanted in self._only.items())

    def _asked(self, batch: Batch) -> tuple[npt.NDArray[np.bool_], Batch | None]:
        keep = np.array([self._wants(e) and bool(e.supervised.any()) for e in batch.examples], dtype=np.bool_)
        chosen = [[e] for e, wanted in zip(batch.examples, keep, strict=True) if wanted]
        return keep, collate(chosen, pad_id=0) if chosen else None

    def lacks(self, batch: Batch) -> Sequence[int]:
        keep, asked = self._asked(batch)
        places = np.flatnonzero(keep)
        return () if asked is None else [int(places[i]) for i in self.teacher.lacks(asked)]

    def prepare(self, batch: Batch) -> Routed:
        keep, asked = self._asked(batch)
        return Routed(keep, asked, None if asked is None else self.teacher.prepare(asked))

    def targets(self, batch: Batch, prepared: Routed) -> Target:
        assert prepared.batch is not None
        device = batch.input_ids.device
        found = self.teacher.targets(prepared.batch.to(device), prepared.ready)
        rows = np.flatnonzero(np.repeat(prepared.keep, _rows_of(batch)))
        return _spread(found, rows, len(batch.rows), device)

    def close(self) -> None:
        self.teacher.close()


def _rows_of(batch: Batch) -> list[int]:
    return [example.supervised_tokens for example in batch.examples]


def _spread(target: Target, rows: npt.NDArray[np.int64], count: int, device: torch.device) -> Target:
    """A target of some rows as one of all, with something harmless in the others: their weight is 0."""
    at = torch.from_numpy(rows).to(device)

    def spread(values: Tensor, fill: Tensor | float) -> Tensor:
        out = values.new_empty((count, *values.shape[1:]))
        out[:] = fill
        return out.index_copy_(0, at, values)

    if isinstance(target, CrossTarget):
        chunks = target.chunks
        first, inner = rows[chunks.first_host], rows[chunks.inner_host]
        moved = replace(chunks, first=at[chunks.first], inner=at[chunks.inner], first_host=first, inner_host=inner)
        return replace(target, chunks=moved)
    if isinstance(target, DenseTarget):
        assert target.hidden is not None
        return replace(target, hidden=spread(target.hidden, 0.0))
    places = torch.arange(target.ids.shape[1], device=device)
    if isinstance(target, SampledTarget):
        entropy = None if target.entropy is None else spread(target.entropy, 0.0)
        return replace(target, ids=spread(target.ids, places), weights=spread(target.weights, 0.0), entropy=entropy)
    even = -math.log(len(places) + 1)
    return TopKTarget(
        spread(target.ids, places),
        spread(target.logprobs, even),
        spread(target.tail, even),
        target.width,
        None if target.rest is None else spread(target.rest, len(places)),
        None if target.rest_entropy is None else spread(target.rest_entropy, 0.0),
    )


def ask(
    teachers: Sequence[Teacher], ready: Sequence[Any], batch: Batch, loss: LossConfig
) -> list[tuple[float | Tensor, Target]]:
    """The targets of a batch, each with its weight, or with one for each row."""
    asked = [
        (teacher, made)
        for teacher, made in zip(teachers, ready, strict=True)
        if not (isinstance(made, Routed) and made.batch is None)
    ]
    targets = [teacher.targets(batch, made) for teacher, made in asked]
    weights: list[float] = [teacher.weight for teacher, _ in asked]
    if loss.several == "average" and len(targets) > 1:
        return [(sum(weights), _mean([t.name for t, _ in asked], weights, targets))]
    weighing = len(targets) > 1 and (loss.several == "best" or loss.confidence is not None)
    if not weighing and not any(isinstance(made, Routed) for _, made in asked):
        return list(zip(weights, targets, strict=True))
    device = batch.input_ids.device
    shares = torch.tensor(weights, device=device)[:, None].repeat(1, len(batch.examples))  # [K, D]
    for number, (_, made) in enumerate(asked):
        if isinstance(made, Routed):
            shares[number] *= torch.from_numpy(made.keep).to(device)
    document = torch.from_numpy(np.repeat(np.arange(len(batch.examples)), _rows_of(batch))).to(device)
    if weighing:
        shares = _weighed(shares, targets, [t.name for t, _ in asked], batch, document, loss)
    return [(share[document], target) for share, target in zip(shares, targets, strict=True)]


def _mean(names: Sequence[str], weights: Sequence[float], targets: Sequence[Target]) -> DenseTarget:
    parts = []
    for name, weight, target in zip(names, weights, targets, strict=True):
        if not isinstance(target, DenseTarget):
            raise PotstillError(
                f"loss.several is average, and the teacher {name} gives no distribution over all of the student's ids: it must "
                "be a model with the student's tokenizer, or a cache of kind hidden of one"
            )
        parts.append((weight / sum(weights), target))
    widths = {target.width for _, target in parts}
    if len(widths) > 1:
        raise PotstillError(f"loss.several is average, and the teachers share {sorted(widths)} ids with the student")
    return DenseTarget(mean=parts)


def _weighed(
    shares: Tensor, targets: Sequence[Target], names: Sequence[str], batch: Batch, document: Tensor, loss: LossConfig
) -> Tensor:
    """`shares` [K, D] by how much each teacher is to be trusted with each document."""
    what = "ce" if loss.several == "best" else loss.confidence
    assert what is not None
    trust = []
    for name, target in zip(names, targets, strict=True):
        found = row_confidence(target, batch.rows.labels, what)
        if found is None:
            raise PotstillError(
                f"loss.{'several' if loss.several == 'best' else 'confidence'} asks how sure the teacher {name} is ({what}), "
                "which a cache of draws or of likelihoods alone does not tell: use a live teacher, or kind top_k or hidden"
            )
        values, rows, counts = found
        owner = document[rows]
        zeros = shares.new_zeros(shares.shape[1])
        sums = zeros.index_add(0, owner, values.to(shares.dtype))
        trust.append(sums / zeros.index_add(0, owner, counts.to(shares.dtype)).clamp(min=1.0))
    scores = torch.stack(trust)  # [K, D]; the larger, the surer
    scores = scores.masked_fill(shares == 0, -torch.inf)
    total = torch.tensor(shares.shape[0] * [1.0], device=shares.device) @ shares
    if loss.several == "best":
        chosen = torch.zeros_like(shares).scatter_(0, scores.argmax(0, keepdim=True), 1.0)
        return chosen * total
    sure = shares * (scores if what == "max_probability" else (scores - scores.amax(0).clamp(min=-1e30)).exp())
    sure = torch.where(shares > 0, sure, 0.0)
    return sure / sure.sum(0).clamp(min=torch.finfo(sure.dtype).tiny) * total
