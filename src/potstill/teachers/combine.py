"""Several teachers of one batch: whom each document listens to, and how much.

The weights of a document's teachers always sum to the sum of the recipe's weights. D documents of a batch, N rows, K teachers.
"""

from __future__ import annotations

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
    Target,
    Teacher,
)

Ints = npt.NDArray[np.int64]


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
        self.name, self.weight, self.ahead = teacher.name, teacher.weight, teacher.ahead
        self._only = {column: {wanted} if isinstance(wanted, str) else set(wanted) for column, wanted in only.items()}

    def wants(self, example: Example) -> bool:
        return all(example.columns[column] in wanted for column, wanted in self._only.items())

    def _asked(self, batch: Batch) -> tuple[npt.NDArray[np.bool_], Batch | None]:
        keep = np.array([self.wants(e) and bool(e.supervised.any()) for e in batch.examples], dtype=np.bool_)
        chosen = [[e] for e, wanted in zip(batch.examples, keep, strict=True) if wanted]
        return keep, collate(chosen, pad_id=0) if chosen else None

    def missing(self, batch: Batch) -> Sequence[int]:
        keep, asked = self._asked(batch)
        places = np.flatnonzero(keep)
        return () if asked is None else [int(places[i]) for i in self.teacher.missing(asked)]

    def prepare(self, batch: Batch) -> Routed:
        keep, asked = self._asked(batch)
        return Routed(keep, asked, None if asked is None else self.teacher.prepare(asked))

    def complete(self, batch: Batch, prepared: Routed) -> Routed:
        if prepared.batch is None:
            return prepared
        asked = prepared.batch.to(batch.input_ids.device)
        return replace(prepared, ready=self.teacher.complete(asked, prepared.ready))

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


def _spread(target: Target, rows: Ints, count: int, device: torch.device) -> Target:
    """A target of some rows as one of all. The others repeat what comes before them; their weight is 0."""
    if isinstance(target, CrossTarget):
        at, chunks = torch.from_numpy(rows).to(device), target.chunks
        first, inner = rows[chunks.first_host], rows[chunks.inner_host]
        moved = replace(chunks, first=at[chunks.first], inner=at[chunks.inner], first_host=first, inner_host=inner)
        return replace(target, chunks=moved)
    return target.select(torch.from_numpy(np.maximum(np.searchsorted(rows, np.arange(count), side="right") - 1, 0)))


def complete(teachers: Sequence[Teacher], ready: Sequence[Any], batch: Batch) -> list[Any]:
    """What the teachers made ready, with what could not be done then."""
    return [teacher.complete(batch, made) for teacher, made in zip(teachers, ready, strict=True)]


def ask(
    teachers: Sequence[Teacher], ready: Sequence[Any], batch: Batch, loss: LossConfig
) -> list[tuple[float | Tensor, Target]]:
    """The targets of a batch, each with its weight, or with one for each row. `ready` is complete."""
    asked = [(teacher, made) for teacher, made in zip(teachers, ready, strict=True) if _has_a_say(made)]
    targets = [teacher.targets(batch, made) for teacher, made in asked]
    weights: list[float] = [teacher.weight for teacher, _ in asked]
    if loss.combine_teachers == "average" and len(targets) > 1:
        return [(sum(weights), _mean([t.name for t, _ in asked], weights, targets))]
    weighing = len(targets) > 1 and (loss.combine_teachers == "best" or loss.teacher_weighting is not None)
    heard = [_heard(made, batch) for _, made in asked]
    if not weighing and all(rows is None for rows in heard):
        return list(zip(weights, targets, strict=True))
    device, rows = batch.input_ids.device, len(batch.rows)
    document = np.repeat(np.arange(len(batch.examples)), _rows_of(batch))
    # [K, N] and [K, D]: where each teacher says something, and in which documents.
    says = np.stack([np.ones(rows, dtype=np.bool_) if one is None else one for one in heard])
    spoken = np.stack([np.bincount(document, one, len(batch.examples)) > 0 for one in says])
    shares = torch.tensor(weights, device=device)[:, None] * torch.from_numpy(spoken).to(device)
    owner, mask = torch.from_numpy(document).to(device), torch.from_numpy(says).to(device)
    if weighing:
        shares = _weighed(shares, targets, [t.name for t, _ in asked], batch, owner, mask, loss)
    return list(zip(shares[:, owner] * mask, targets, strict=True))


def _has_a_say(made: Any) -> bool:
    if isinstance(made, Routed):
        return made.batch is not None and _has_a_say(made.ready)
    known = getattr(made, "known", None)
    return known is None or bool(known.any())


def _heard(made: Any, batch: Batch) -> npt.NDArray[np.bool_] | None:
    """At which rows a teacher says something; None: at all."""
    known: npt.NDArray[np.bool_] | None = getattr(made.ready if isinstance(made, Routed) else made, "known", None)
    if not isinstance(made, Routed):
        return known
    rows = np.repeat(made.keep, _rows_of(batch))
    if known is not None:
        rows[rows] = known
    return rows


def _mean(names: Sequence[str], weights: Sequence[float], targets: Sequence[Target]) -> DenseTarget:
    parts = []
    for name, weight, target in zip(names, weights, targets, strict=True):
        if not isinstance(target, DenseTarget):
            raise PotstillError(
                f"loss.combine_teachers is average, and the teacher {name} gives no distribution over all of the "
                "student's ids: it must "
                "be a model with the student's tokenizer, or a cache of kind hidden of one"
            )
        parts.append((weight / sum(weights), target))
    widths = {target.width for _, target in parts}
    if len(widths) > 1:
        raise PotstillError(
            f"loss.combine_teachers is average, and the teachers share {sorted(widths)} ids with the student"
        )
    return DenseTarget(mean=parts)


def _weighed(
    shares: Tensor,
    targets: Sequence[Target],
    names: Sequence[str],
    batch: Batch,
    owner: Tensor,
    mask: Tensor,
    loss: LossConfig,
) -> Tensor:
    """`shares` [K, D] by how much each teacher is to be trusted with each document. `owner` [N]: the document of a row; `mask`
    [K, N]: where a teacher says something."""
    what = "ce" if loss.combine_teachers == "best" else loss.teacher_weighting
    assert what is not None
    trust = []
    for name, says, target in zip(names, mask, targets, strict=True):
        found = row_confidence(target, batch.rows.labels, what)
        if found is None:
            raise PotstillError(
                f"loss.{'combine_teachers' if loss.combine_teachers == 'best' else 'teacher_weighting'} asks how sure "
                f"the teacher {name} is ({what}), "
                "which a cache of draws or of likelihoods alone does not tell: use a live teacher, or kind top_k or hidden"
            )
        values, rows, counts = found
        zeros = shares.new_zeros(len(batch.examples))
        sums = zeros.index_add(0, owner[rows], values.to(shares.dtype) * says[rows])
        trust.append(sums / zeros.index_add(0, owner[rows], counts.to(shares.dtype) * says[rows]).clamp(min=1.0))
    scores = torch.stack(trust).masked_fill(shares == 0, -torch.inf)  # [K, D]; the larger, the surer
    total = shares.sum(0)
    if loss.combine_teachers == "best":
        return torch.zeros_like(shares).scatter_(0, scores.argmax(0, keepdim=True), 1.0) * total
    sure = scores if what == "max_probability" else (scores - scores.amax(0).clamp(min=-1e30)).exp()
    sure = torch.where(shares > 0, shares * sure, 0.0)
    return sure / sure.sum(0).clamp(min=torch.finfo(sure.dtype).tiny) * total
