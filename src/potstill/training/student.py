"""The student and its loss as one module: forward takes a batch and its targets, uses the head inside and returns the
loss. This is what a parallel wrapper wraps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from potstill.losses import (
    DenseTarget,
    FusedLoss,
    Score,
    chosen_logprobs,
    compare_rows,
    fused_linear_kd,
    policy_gradient_kl,
    shared_mass,
)
from potstill.models import LanguageModel
from potstill.types import Batch, CrossTarget, SampledTarget, Spelling, Target, TokenLogprobsTarget, TopKTarget

SAMPLED = "policy_gradient_kl"  # the divergence that learns from the tokens the student drew


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
    discount: float = 0.0
    ratio_clip: float = 2.0


# What a forward pass sums up for the log, in this order.
SUMS = (
    "loss", "kd", "ce", "stat_rows", "kl", "teacher_entropy", "student_entropy", "agreement", "shared_rows", "shared_mass",
    "on_policy_rows", "sampling_logprob_gap", "ratio", "clipped", "advantage",
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
        score: Score | None = None
        if knobs.divergence == SAMPLED:
            out, score = _by_draws(head, batch, targets, divisor, knobs)
        else:
            out = fused_linear_kd(
                head.hidden,
                head.weight,
                targets,
                **_of_rows(head, batch, divisor),
                divergence=knobs.divergence,
                temperature=knobs.temperature,
                beta=knobs.beta,
                alpha=knobs.alpha,
                kd_weight=knobs.kd_weight,
                ce_weight=_ce_weight(batch, knobs),
                entropy_gate=knobs.entropy_gate,
            )
        sums = torch.zeros(len(SUMS), dtype=torch.float32, device=out.loss.device)
        sums[0], sums[1], sums[2] = out.loss.detach(), out.kd.sum(), out.ce.sum()
        if batch.rows.behaviour is not None:
            sums[10:15] = _own_sums(out.ce, batch.rows.behaviour, score)
        if stat_rows and len(batch.rows):
            teacher = targets[0][1] if targets else None
            if isinstance(teacher, CrossTarget | TokenLogprobsTarget) or (
                knobs.temperature != 1.0 and not isinstance(teacher, DenseTarget)
            ):
                teacher = None  # other tokens, no distribution, or one truncated at the loss's T: the log is at T = 1
            sums[3:8] = _sampled_stats(head, batch.rows.labels, teacher, stat_rows)
            parts = (target.spelled if isinstance(target, DenseTarget) else target for _, target in targets)
            across = [part for part in parts if isinstance(part, CrossTarget | Spelling)]
            if across:
                mass = shared_mass(across[0], stat_rows)
                sums[8], sums[9] = mass.shape[0], mass.sum()
        return out.loss, sums


def _of_rows(head: DenseTarget, batch: Batch, divisor: float) -> dict[str, Any]:
    """What every loss of the rows needs."""
    assert head.hidden is not None
    return {
        "labels": batch.rows.labels,
        "row_weight": head.hidden.new_full((len(batch.rows),), 1.0 / divisor, dtype=torch.float32),
        "bias": head.bias,
        "softcap": head.softcap,
        "logit_scale": head.logit_scale,
    }


def _ce_weight(batch: Batch, knobs: LossKnobs) -> float | Tensor:
    """0 at what the student wrote itself: that would teach it to be surer of itself, and nothing else."""
    behaviour = batch.rows.behaviour
    if behaviour is None or not knobs.ce_weight:
        return knobs.ce_weight
    return torch.where(behaviour.isnan(), knobs.ce_weight, 0.0)


def _by_draws(
    head: DenseTarget, batch: Batch, targets: Sequence[tuple[float | Tensor, Target]], divisor: float, knobs: LossKnobs
) -> tuple[FusedLoss, Score | None]:
    """The loss by the tokens that the student drew. Its gradient is that of a cross-entropy with weights of its own, its value
    is not: the one is put under the other."""
    assert head.hidden is not None and head.weight is not None
    behaviour, options = batch.rows.behaviour, _of_rows(head, batch, divisor)
    plain = _ce_weight(batch, knobs)
    if behaviour is None or not targets:
        return fused_linear_kd(head.hidden, head.weight, None, ce_weight=plain, **options), None
    with torch.no_grad():
        logq = -fused_linear_kd(head.hidden, head.weight, None, **options).ce
    score = policy_gradient_kl(
        logq,
        [(share, chosen_logprobs(target, batch.rows.labels)) for share, target in targets],
        behaviour,
        [example.supervised_tokens for example in batch.examples],
        discount=knobs.discount,
        ratio_clip=knobs.ratio_clip,
    )
    weight = plain + knobs.kd_weight * score.weight
    out = fused_linear_kd(head.hidden, head.weight, None, ce_weight=weight, **options)
    value = (options["row_weight"] * (knobs.kd_weight * score.value + plain * out.ce)).sum()
    return FusedLoss(out.loss - out.loss.detach() + value, score.value, out.ce), score


def _own_sums(ce: Tensor, behaviour: Tensor, score: Score | None) -> Tensor:
    """Sums over what the student wrote: number of rows, |log Q − log B|, ratio, how many are clipped, advantage."""
    own = ~behaviour.isnan()
    gap = torch.where(own, (ce + behaviour).abs(), 0.0)
    measured = [] if score is None else [score.ratio, score.clipped, score.advantage]
    found = torch.stack([column.sum().float() for column in (own, gap, *measured)])
    return torch.nn.functional.pad(found, (0, 5 - len(found)))


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
