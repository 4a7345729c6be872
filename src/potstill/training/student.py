"""The student and its loss as one module: forward takes a batch and its targets, uses the head inside and returns the
loss. This is what a parallel wrapper wraps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potstill.losses import DenseTarget, compare_rows, fused_linear_kd, shared_mass
from potstill.models import LanguageModel
from potstill.types import Batch, CrossTarget, SampledTarget, Spelling, Target, TopKTarget


@dataclass(frozen=True)
class LossKnobs:
    """The loss of one optimizer step: the recipe's loss section with its schedules read off."""

    divergence: str
    beta: float
    alpha: float
    temperature: float
    kd_weight: float
    ce_weight: float
    entropy_gate: float | None = None


# What a forward pass sums up for the log, in this order.
SUMS = (
    "loss", "kd", "ce", "stat_rows", "kl", "teacher_entropy", "student_entropy", "agreement", "shared_rows", "shared_mass",
)  # fmt: skip


class StudentLoss(nn.Module):
    def __init__(self, student: LanguageModel) -> None:
        super().__init__()
        self.student = student
        self.model = student.model  # registered, so that parameters and checkpoints see it

    def forward(
        self,
        batch: Batch,
        targets: Sequence[tuple[float | Tensor, Target]],
        divisor: float,
        knobs: LossKnobs,
        stat_rows: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The batch's share of the step's loss (differentiable), and SUMS over its rows (detached).

        `divisor` is the number of supervised tokens of the whole step, over all micro-batches and ranks.
        """
        hidden = self.student.hidden(batch, batch.rows.student)
        if torch.is_autocast_enabled(hidden.device.type):  # the last norm is float32; the head's products need not be
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        head = self.student.at_rows(hidden)
        assert head.hidden is not None and head.weight is not None
        out = fused_linear_kd(
            head.hidden,
            head.weight,
            targets,
            labels=batch.rows.labels,
            row_weight=head.hidden.new_full((len(batch.rows),), 1.0 / divisor, dtype=torch.float32),
            divergence=knobs.divergence,
            temperature=knobs.temperature,
            beta=knobs.beta,
            alpha=knobs.alpha,
            kd_weight=knobs.kd_weight,
            ce_weight=knobs.ce_weight,
            entropy_gate=knobs.entropy_gate,
            bias=head.bias,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
        )
        sums = torch.zeros(len(SUMS), dtype=torch.float32, device=out.loss.device)
        sums[0], sums[1], sums[2] = out.loss.detach(), out.kd.sum(), out.ce.sum()
        if stat_rows and len(batch.rows):
            teacher = targets[0][1] if targets else None
            if isinstance(teacher, CrossTarget) or (knobs.temperature != 1.0 and not isinstance(teacher, DenseTarget)):
                teacher = None  # it has other tokens, or is truncated at the loss's temperature: the log is at T = 1
            sums[3:8] = _sampled_stats(head, batch.rows.labels, teacher, stat_rows)
            parts = (target.spelled if isinstance(target, DenseTarget) else target for _, target in targets)
            across = [part for part in parts if isinstance(part, CrossTarget | Spelling)]
            if across:
                mass = shared_mass(across[0], stat_rows)
                sums[8], sums[9] = mass.shape[0], mass.sum()
        return out.loss, sums


@torch.no_grad()
def _sampled_stats(
    head: DenseTarget, labels: Tensor, teacher: DenseTarget | TopKTarget | SampledTarget | None, rows: int
) -> Tensor:
    """Sums over a sample of the rows, evenly spread: number of rows, KL to the first teacher at T = 1, both entropies, top-1
    agreement. NaN: not known."""
    chosen = torch.arange(0, labels.shape[0], max(1, labels.shape[0] // rows))[:rows]  # on the host
    stats = compare_rows(head.select(chosen), labels[chosen], None if teacher is None else teacher.select(chosen))
    unknown = torch.full_like(stats.student_entropy, torch.nan)
    columns = [torch.ones_like(unknown), stats.kl, stats.teacher_entropy, stats.student_entropy, stats.agreement]
    return torch.stack([(unknown if column is None else column).sum() for column in columns])
