"""Several teachers of one batch: whom each document listens to, and how much.

The weights of a document's teachers always sum to the sum of the recipe's weights. D documents of a batch, N rows, K teachers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from potstill.config import LossConfig
from potstill.teachers.confidence import row_confidence
from potstill.transfer import to_device
from potstill.types import Batch, Dense, MeanTarget, PotstillError, Prepared, Target, Teacher


def compute_targets(
    teachers: Sequence[Teacher],
    prepared: Sequence[Prepared],
    batch: Batch,
    loss: LossConfig,
    counts: Counter[str] | None = None,
) -> list[tuple[float | Tensor, Target]]:
    """The targets of a batch, each with its weight, or with one per row. What the teachers counted is added to `counts`."""
    asked = _answers(teachers, prepared, batch, counts)
    names, weights, targets = [t.name for t, _, _ in asked], [t.weight for t, _, _ in asked], [t for _, t, _ in asked]
    several = len(asked) > 1
    if several and loss.combine_teachers == "average":
        return [(sum(weights), _mean(weights, targets))]
    weighing = several and (loss.combine_teachers == "best" or loss.teacher_weighting is not None)
    if not weighing and all(made.known is None for _, _, made in asked):
        return list(zip(weights, targets, strict=True))
    device, documents = batch.input_ids.device, len(batch.examples)
    document = np.repeat(np.arange(documents), [example.supervised_tokens for example in batch.examples])
    # [K, N] and [K, D]: where each teacher says something, and in which documents.
    everywhere = np.ones(len(document), dtype=np.bool_)
    says = np.stack([everywhere if made.known is None else made.known for _, _, made in asked])
    spoken = np.stack([np.bincount(document, one, documents) > 0 for one in says])
    shares = to_device(torch.tensor(weights), device)[:, None] * to_device(spoken, device)
    owner, mask = to_device(document, device), to_device(says, device)
    if weighing:
        shares = _weighed(shares, targets, names, batch, owner, mask, loss)
    return list(zip(shares[:, owner] * mask, targets, strict=True))


def _answers(
    teachers: Sequence[Teacher], prepared: Sequence[Prepared], batch: Batch, counts: Counter[str] | None
) -> list[tuple[Teacher, Target, Prepared]]:
    """Of those that have something to say."""
    asked: list[tuple[Teacher, Target, Prepared]] = []
    for teacher, made in zip(teachers, prepared, strict=True):
        target, made = teacher.answer(batch, made)
        asked += [] if target is None else [(teacher, target, made)]
        if counts is not None:
            counts.update(made.counts)
    return asked


def _mean(weights: Sequence[float], targets: Sequence[Target]) -> MeanTarget:
    parts = [target for target in targets if isinstance(target, Dense)]
    assert len(parts) == len(targets), "config/compatibility.py lets no other through"
    widths = {target.width for target in parts}
    if len(widths) > 1:
        raise PotstillError(
            f"loss.combine_teachers is average, and the teachers share {sorted(widths)} ids with the student"
        )
    return MeanTarget(tuple(weight / sum(weights) for weight in weights), tuple(parts))


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
    what = loss.teacher_weighting or "ce"
    trust = []
    for name, says, target in zip(names, mask, targets, strict=True):
        found = row_confidence(target, batch.rows.labels, what)
        if found is None:
            raise PotstillError(
                f"the loss asks how sure the teacher {name} is ({what}), which its signal does not tell"
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
