"""How two models differ row by row, measured (not trained): used by the evaluation and by the training log."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from potstill.losses.fused import CHUNK_BYTES
from potstill.losses.rows import log_probs, target_logits
from potstill.types import DenseTarget


@dataclass(frozen=True)
class RowStats:
    """Per-row float32 values, at T = 1, in nats. The teacher's are None when there is none."""

    nll: Tensor  # −log Q(label) over the student's whole vocabulary
    confidence: Tensor  # the student's largest probability
    correct: Tensor  # its most likely token is the label
    student_entropy: Tensor
    teacher_entropy: Tensor | None
    kl: Tensor | None  # KL(P‖Q) over the ids both models have
    agreement: Tensor | None  # both models' most likely tokens are the same


@torch.no_grad()
def compare_rows(student: DenseTarget, labels: Tensor, teacher: DenseTarget | None) -> RowStats:
    """Compare student and teacher (given as hidden states and heads) at N rows, in chunks."""
    assert student.hidden is not None and student.weight is not None
    chunk = max(16, CHUNK_BYTES // (4 * student.weight.shape[0]))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(1, labels.shape[0]), chunk):
        rows = slice(start, start + chunk)
        label = labels[rows, None]
        logits = target_logits(student, rows)
        logq_full = log_probs(logits)
        best, top = logq_full.max(-1)
        part = [
            -logq_full.gather(-1, label).squeeze(-1),
            best.exp(),
            (top == label.squeeze(-1)).float(),
            -(logq_full.exp() * logq_full).sum(-1),
        ]
        if teacher is not None:
            logp = log_probs(target_logits(teacher, rows))
            logq = log_probs(logits[:, : logp.shape[-1]])
            part.append(-(logp.exp() * logp).sum(-1))
            part.append((logp.exp() * (logp - logq)).sum(-1))
            part.append((logp.argmax(-1) == logq.argmax(-1)).float())
        parts.append(tuple(part))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    with_teacher = columns[4:] if teacher is not None else (None, None, None)
    return RowStats(*columns[:4], *with_teacher)
