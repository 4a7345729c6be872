"""The student and its loss as one module: forward takes a batch and its targets, uses the head inside and returns the
loss. This is what a parallel wrapper wraps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from potstill.evals.fidelity import completion, measure
from potstill.losses import (
    FusedLoss,
    Score,
    chosen_logprobs,
    compare_rows,
    fused_linear_kd,
    policy_gradient_kl,
    shared_mass,
)
from potstill.losses.compare import RowStats
from potstill.losses.support import on_support
from potstill.models import LanguageModel
from potstill.students.experts import Routers
from potstill.transfer import to_device
from potstill.types import Batch, Dense, HiddenTarget, Target

Targets = Sequence[tuple[float | Tensor, Target]]  # with the weight of each, or one per row


@dataclass(frozen=True)
class LossSettings:
    """The loss of one optimizer step: the recipe's loss section with its schedules read off, in the words of
    `fused_linear_kd` and of `policy_gradient_kl`."""

    divergence: str
    beta: float
    alpha: float
    temperature: float
    kd_weight: float
    ce_weight: float
    entropy_gate: float | None = None
    discount: float = 0.0
    ratio_clip: float = 2.0
    repeat_weight: float = 0.0
    token_clip: float | None = None
    reward_weight: float = 1.0
    student_top_k: int | None = None


class StudentLoss(nn.Module):
    METHODS = ("measure", "completion")  # by which it is called besides forward

    def __init__(self, student: LanguageModel, routers: Routers | None = None) -> None:
        super().__init__()
        self.student, self.routers = student, routers
        self.model = student.model  # registered, so that parameters and checkpoints see it

    def forward(
        self, batch: Batch, targets: Targets, divisor: float, settings: LossSettings, stat_rows: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's share of the step's loss (differentiable), and sums over its rows (detached), named as in
        `training.metrics.SUMS`.

        `divisor` is the number of supervised tokens of the whole step, over all micro-batches and ranks.
        """
        whole, context = batch, self.student.context
        if context is not None:
            batch, targets = context.share(batch, targets, whole_documents=settings.discount > 0)
        with self.routers.heard() if self.routers is not None else nullcontext():
            hidden = self.student.hidden(whole, batch.rows.student)
        if torch.is_autocast_enabled(hidden.device.type):  # the last norm is float32; the head's products need not be
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        own = self.student.at_rows(hidden)
        row_weight = hidden.new_full((len(batch.rows),), 1.0 / divisor, dtype=torch.float32)
        if batch.rows.weight is not None:
            row_weight *= batch.rows.weight
        score: Score | None = None
        compared, support = _on_support(own, targets, settings)
        if settings.divergence == "policy_gradient_kl":
            out, score = _policy_gradient(own, batch, targets, row_weight, settings)
        else:
            others = ("discount", "ratio_clip", "repeat_weight", "reward_weight", "student_top_k")
            options = {key: value for key, value in vars(settings).items() if key not in others} | {"row_values": False}
            out = _fused(own, batch, compared, row_weight, **options | {"ce_weight": _ce_weight(own, batch, settings)})
        if settings.repeat_weight:
            read = whole.input_ids.flatten()[batch.rows.student]
            more = {"labels": read, "ce_weight": settings.repeat_weight, "row_values": False}
            repeated = _fused(own, batch, None, row_weight, **more)
            out = out._replace(loss=out.loss + repeated.loss)
        sums = {"kd": out.kd.sum(), "ce": out.ce.sum()}
        if batch.rows.behaviour is not None:
            sums |= _on_policy_sums(out, batch.rows.behaviour, score)
        if out.here is not None:  # they are parts
            together = torch.stack(list(sums.values()))
            dist.all_reduce(together, group=own.head.group)
            sums = dict(zip(sums, together, strict=True))
        if self.routers is not None:
            balance, sums["expert_load"] = self.routers.terms(whole, divisor, context)
            out = out._replace(loss=out.loss + balance.to(out.loss.dtype))
            sums["router_aux"] = balance
        sums |= support
        sums["loss"] = out.loss
        if stat_rows and len(batch.rows):
            sums |= _sampled_sums(own, batch, targets, settings, stat_rows)
        return out.loss, {name: value.detach().to(out.loss.dtype) for name, value in sums.items()}

    def measure(self, batch: Batch, target: Target | None) -> RowStats:
        """The student at the batch's rows, beside what a teacher says there."""
        return measure(self.student, batch, target)

    def completion(self, prompt: str, max_new_tokens: int) -> str:
        return completion(self.student, prompt, max_new_tokens)


def _fused(own: HiddenTarget, batch: Batch, targets: Targets | None, row_weight: Tensor, **options: Any) -> FusedLoss:
    """`fused_linear_kd` of a batch."""
    given = {"labels": batch.rows.labels, "row_weight": row_weight} | options
    return fused_linear_kd(own.hidden, target=targets, **vars(own.head), **given)


def _on_support(own: HiddenTarget, targets: Targets, settings: LossSettings) -> tuple[Targets, dict[str, Tensor]]:
    """The targets on the student's likeliest tokens, where the recipe says so; and the teachers' mass there."""
    if settings.student_top_k is None or not targets:
        return targets, {}
    found = [
        (share, *on_support(own, target, settings.student_top_k, settings.temperature))
        for share, target in targets
        if isinstance(target, Dense)
    ]
    assert len(found) == len(targets), "config/compatibility.py lets no other through"
    mass = found[0][2]
    sums = {"support_rows": torch.ones_like(mass).sum(), "support_mass": mass.sum()}
    return [(share, target) for share, target, _ in found], sums


def _ce_weight(own: HiddenTarget, batch: Batch, settings: LossSettings) -> float | Tensor:
    """0 at what the student wrote itself: that would teach it to be surer of itself, and nothing else."""
    behaviour = batch.rows.behaviour
    if behaviour is None or not settings.ce_weight:
        return settings.ce_weight
    # As exact as the number is in batches of the data set's text alone: what lies in a batch must not matter.
    exact = torch.promote_types(own.hidden.dtype, torch.float32)
    weight = torch.full((), settings.ce_weight, dtype=exact, device=behaviour.device)
    return torch.where(behaviour.isnan(), weight, 0.0)


def _policy_gradient(
    own: HiddenTarget, batch: Batch, targets: Targets, row_weight: Tensor, settings: LossSettings
) -> tuple[FusedLoss, Score | None]:
    """The loss by the tokens that the student drew. Its gradient is that of a cross-entropy with weights of its own, its value
    is not: the one is put under the other."""
    behaviour, plain = batch.rows.behaviour, _ce_weight(own, batch, settings)
    if behaviour is None or not targets:
        return _fused(own, batch, None, row_weight, ce_weight=plain), None
    with torch.no_grad():
        logq = -_fused(own, batch, None, row_weight).ce
    score = policy_gradient_kl(
        logq,
        [(share, chosen_logprobs(target, batch.rows.labels)) for share, target in targets],
        behaviour,
        [example.supervised_tokens for example in batch.examples],
        discount=settings.discount,
        ratio_clip=settings.ratio_clip,
        token_clip=settings.token_clip,
        reward=None if batch.rows.advantage is None else settings.reward_weight * batch.rows.advantage,
    )
    out = _fused(own, batch, None, row_weight, ce_weight=plain + settings.kd_weight * score.weight)
    value = (row_weight * (settings.kd_weight * score.value + plain * out.ce)).sum()
    return FusedLoss(out.loss - out.loss.detach() + value, score.value, out.ce), score


def _on_policy_sums(out: FusedLoss, behaviour: Tensor, score: Score | None) -> dict[str, Tensor]:
    """Over the rows that the student wrote: |log Q − log B|, and what the policy gradient made of them."""
    own = ~behaviour.isnan() if out.here is None else ~behaviour.isnan() & out.here
    gap = torch.where(own, (out.ce + behaviour).abs(), 0.0).sum()
    rows = own.sum().to(gap.dtype)
    sums = {"on_policy_rows": rows, "sampling_logprob_gap": gap}
    if score is None:
        return sums
    scored = {"ratio_mean": score.ratio, "ratio_clipped": score.clipped, "advantage": score.advantage}
    return sums | {"policy_gradient_rows": rows} | {name: column.sum() for name, column in scored.items()}


@torch.no_grad()
def _sampled_sums(
    own: HiddenTarget, batch: Batch, targets: Targets, settings: LossSettings, rows: int
) -> dict[str, Tensor]:
    """Over a sample of the rows, evenly spread: KL to the first teacher at T = 1, both entropies, top-1 agreement (NaN: not
    known); and how much of the teacher's probability the student's tokens can express, where it has other tokens."""
    labels = batch.rows.labels
    teacher = targets[0][1] if targets else None
    if teacher is not None and settings.temperature != 1.0 and not teacher.dense:
        teacher = None  # it is truncated at the loss's T, and the log is at T = 1
    count = labels.shape[0]
    chosen = np.arange(0, count, max(1, count // rows))[:rows]  # on the host
    sample = None if teacher is None else teacher.select(chosen)
    stats = compare_rows(own.select(chosen), labels[to_device(chosen, labels.device)], sample)
    unknown = torch.full_like(stats.student_entropy, torch.nan)
    sums = {"stat_rows": torch.ones_like(unknown).sum()}
    for name in ("kl", "teacher_entropy", "student_entropy", "agreement"):
        column = getattr(stats, name)
        sums[name] = (unknown if column is None else column).sum()
    masses = (shared_mass(target, rows) for _, target in targets)
    if (mass := next((one for one in masses if one is not None), None)) is not None:
        sums |= {"shared_rows": torch.ones_like(mass).sum(), "shared_mass": mass.sum()}
    return sums
