"""How two models differ row by row, measured (not trained): used by the evaluation and by the training log."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.fused import CHUNK_BYTES
from potstill.losses.rows import log_probs, target_logits
from potstill.types import CrossTarget, DenseTarget, SampledTarget, Target, TopKTarget


@dataclass(frozen=True)
class RowStats:
    """Per-row float32 values, at T = 1, in nats. The teacher's are None when there is none, or when it does not tell."""

    nll: Tensor  # −log Q(label) over the student's whole vocabulary
    confidence: Tensor  # the student's largest probability
    correct: Tensor  # its most likely token is the label
    student_entropy: Tensor
    teacher_entropy: Tensor | None
    kl: Tensor | None  # KL(P‖Q) over the ids both models have; of a truncated teacher over its entries and the rest
    agreement: Tensor | None  # both models' most likely tokens are the same


@torch.no_grad()
def compare_rows(student: DenseTarget, labels: Tensor, teacher: Target | None) -> RowStats:
    """Compare student (hidden states and head) and teacher at N rows, in chunks."""
    assert student.hidden is not None and student.weight is not None
    chunk = max(16, CHUNK_BYTES // (4 * student.weight.shape[0]))
    parts: list[tuple[Tensor | None, ...]] = []
    for start in range(0, max(1, labels.shape[0]), chunk):
        rows = slice(start, start + chunk)
        label = labels[rows, None]
        logits = target_logits(student, rows)
        logq = log_probs(logits)
        best, top = logq.max(-1)
        own = (
            -logq.gather(-1, label).squeeze(-1),
            best.exp(),
            (top == label.squeeze(-1)).float(),
            -(logq.exp() * logq).sum(-1),
        )
        parts.append((*own, *(_against(teacher, rows, logits) if teacher is not None else (None, None, None))))
    columns = [_joined(column) for column in zip(*parts, strict=True)]
    assert all(column is not None for column in columns[:4])
    return RowStats(*columns)  # type: ignore[arg-type]


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def _against(teacher: Target, rows: slice, logits: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The teacher's entropy, KL(P‖Q) and whether both like the same token best."""
    if isinstance(teacher, CrossTarget):
        return None, None, None  # its tokens are others
    logq = log_probs(logits[:, : teacher.width])
    best = logq.argmax(-1)
    if isinstance(teacher, SampledTarget):
        if teacher.entropy is None:
            return None, None, None
        entropy = teacher.entropy[rows].float()
        return entropy, -(teacher.weights[rows] * logq.gather(-1, teacher.ids[rows])).sum(-1) - entropy, None
    if isinstance(teacher, TopKTarget):
        ids, logprobs = teacher.ids[rows], teacher.logprobs[rows]
        rest = logq.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        logq = torch.cat([logq.gather(-1, ids), rest], -1).clamp_(min=LOG_FLOOR)
        logp = torch.cat([logprobs, teacher.tail[rows, None]], -1).float().clamp_(min=LOG_FLOOR)
        top = ids.gather(-1, logprobs.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        logp = log_probs(target_logits(teacher, rows))
        top = logp.argmax(-1)
    return -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - logq)).sum(-1), (top == best).float()


@torch.no_grad()
def label_logprobs(target: DenseTarget, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N] of given ids at a dense target's N rows, in chunks."""
    chunk = max(16, CHUNK_BYTES // (4 * target.width))
    parts = [torch.zeros(0, device=labels.device)]
    for start in range(0, labels.shape[0], chunk):
        rows = slice(start, start + chunk)
        logp = log_probs(target_logits(target, rows).div_(temperature))
        parts.append(logp.gather(-1, labels[rows, None]).squeeze(-1))
    return torch.cat(parts)
