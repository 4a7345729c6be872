"""A dense teacher on the student's own support: the k tokens that the student finds likeliest, and all others as one bucket.
Reverse KL is almost all there, for it is weighted by the student. N rows, K tokens, W ids that both have."""

from __future__ import annotations

import torch
from torch import Tensor

from potstill.losses.compare import chunks_of_rows
from potstill.losses.dense import log_probs, target_logits
from potstill.types import Dense, HiddenTarget, TopKTarget


@torch.no_grad()
def on_support(student: HiddenTarget, teacher: Dense, k: int, temperature: float) -> tuple[TopKTarget, Tensor]:
    """What the teacher says at a temperature of the student's k likeliest tokens, exactly, and of the rest; and its mass on
    these k [N]."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.autocast(student.hidden.device.type, enabled=False):
        for rows in chunks_of_rows(max(1, student.hidden.shape[0]), student.width):
            logp = log_probs(target_logits(teacher, rows, temperature=temperature) / temperature)
            ids = target_logits(student, rows)[:, : logp.shape[1]].topk(min(k, logp.shape[1])).indices
            kept = logp.gather(-1, ids)
            # The rest as a sum over its own tokens: 1 − Σ would lose everything where it is small.
            parts.append((ids, kept, logp.scatter(-1, ids, -torch.inf).logsumexp(-1)))
    ids, kept, tail = (torch.cat(column) for column in zip(*parts, strict=True))
    return TopKTarget(ids, kept, tail, teacher.width), kept.exp().sum(-1)
