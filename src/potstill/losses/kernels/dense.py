"""A dense teacher by the kernels: `stats` of both sides, `sums` where the gradient needs one more, `gradient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.kernels import programs
from potstill.losses.kernels.chunk import LN_2, TINY, KernelChunk, Stats, reduced
from potstill.losses.rows import DenseRows

KINDS = {
    "forward_kl": programs.FORWARD_KL,
    "reverse_kl": programs.REVERSE_KL,
    "jsd": programs.JSD,
    "skew_kl": programs.SKEW_KL,
    "skew_reverse_kl": programs.SKEW_REVERSE_KL,
    "tvd": programs.TVD,
}


@dataclass(frozen=True)
class _Plan:
    """What of the programs a call needs."""

    kind: int
    mix: float  # of the two sides
    factor: float  # that the gradient lacks
    gate: float | None
    own_ce: bool  # the cross-entropy has a softmax of its own


def _plan(chunk: KernelChunk) -> _Plan:
    call, params = chunk.call, chunk.call.params
    name = params.divergence
    if name == "jsd" and params.beta in (0.0, 1.0):
        name = "forward_kl" if params.beta == 0.0 else "reverse_kl"
    factors = {"jsd": 1 - params.beta, "skew_kl": params.alpha - 1, "tvd": 0.5}
    return _Plan(
        kind=KINDS[name],
        mix=params.beta if name == "jsd" else params.alpha,
        factor=factors.get(name, 1.0),
        gate=None if name == "forward_kl" else params.entropy_gate,  # between forward KL and itself there is nothing
        own_ce=call.labels is not None and not (params.temperature == 1.0 and call.same_ids),
    )


def dense_rows(chunk: KernelChunk, teacher: DenseRows) -> tuple[Tensor, Tensor]:
    """This rank's parts of the values, as rows.loss_of_rows gives them."""
    plan, z, t, n = _plan(chunk), chunk.z, teacher.logits, len(chunk.z)
    label, logit = chunk.label()
    strides, widths = (n, z.stride(0), t.stride(0)), (z.shape[1], t.shape[1], chunk.scale, chunk.cap)
    found = z.new_zeros(11, n)
    gated, forward = plan.gate is not None, plan.kind == programs.FORWARD_KL
    wanted = {"CE": plan.own_ce, "FORWARD": forward or gated, "REVERSE": plan.kind == programs.REVERSE_KL}
    chunk.run(programs.stats, z, t, found, *strides, *widths, **wanted, ENTROPY=gated)
    both = _both(chunk, plan, found, t.shape[1])
    vectors = [x for maximum, mass in (both.student, both.teacher, both.ce) for x in (maximum, mass.log2())]
    value = mean = both.forward
    if plan.kind == programs.REVERSE_KL:
        value, mean = chunk.shard.once(both.reverse), both.reverse
    elif not forward:
        two = z.new_empty(2, n)
        chunk.run(programs.sums, z, t, torch.stack(vectors[:4]), two, *strides, *widths, plan.mix, KIND=plan.kind)
        value, (mean,) = two[0], chunk.shard.total(two[1])
    gate = both.gate
    if gated:
        value = (1 - gate) * value + gate * both.forward
    if chunk.grad is not None:
        weights = [chunk.kd_weight(plan.factor) * (1 - gate), chunk.kd_weight(1.0) * gate, chunk.ce_weight()]
        given = (z, t, chunk.grad, label, torch.stack([*vectors, mean, *weights]), *strides, chunk.grad.stride(0))
        chunk.run(programs.gradient, *given, *widths, plan.mix, KIND=plan.kind, GATE=gated, CE=chunk.ce_weighs)
    return chunk.kd(value), chunk.cross_entropy(both.ce, label, logit)


@dataclass(frozen=True)
class _Both:
    """What the first pass found of both sides, over the ids of all ranks."""

    student: Stats
    teacher: Stats
    ce: Stats  # the student over all ids at T = 1
    forward: Tensor  # this rank's part of forward KL, where it was asked for
    reverse: Tensor  # reverse KL, likewise
    gate: Tensor  # how much of the row is forward KL's


def _both(chunk: KernelChunk, plan: _Plan, found: Tensor, width: int) -> _Both:
    """Of the ranks only what the gradient needs travels."""
    shard = chunk.shard
    ms, zs, mt, zt, mc, zc, forward, forward_floor, reverse, reverse_floor, entropy = found
    sums: list[Callable[[Sequence[Tensor]], Tensor]] = []
    # Over the same ids the maximum at T = 1 is known from the one at the temperature.
    known = plan.own_ce and chunk.call.same_ids and shard.group is not None
    if known:
        sums += [lambda maxima: zc * torch.exp2(mc - _at_one(maxima[0], chunk))]
    if plan.gate is not None:  # the entropy's sum is relative to no rank's maximum while it travels
        sums += [
            lambda maxima: (entropy + zt * mt) * torch.exp2(mt - maxima[1]),
            lambda maxima: torch.full_like(zt, width),
        ]
    stats, total = reduced(shard, [(ms, zs), (mt, zt)] + [(mc, zc)] * (plan.own_ce and not known), *sums)
    student, teacher, gate = stats[0], stats[1], torch.zeros_like(zt)
    if plan.gate is not None:
        mean, ids = total[-2] / teacher[1] - teacher[0], total[-1]
        share = (teacher[1].log() - mean * LN_2) / ids.clamp(min=2.0).log()
        gate = share.clamp_(0.0, 1.0) ** plan.gate
    whole = gate
    if plan.kind == programs.REVERSE_KL:
        by = torch.exp2(ms - student[0])
        (whole,) = shard.total(_cost(reverse * by, reverse_floor * by, student, teacher))
        whole = whole + _shift(student, teacher)
    by = torch.exp2(mt - teacher[0])
    return _Both(
        student=student,
        teacher=teacher,
        ce=(_at_one(student[0], chunk), total[0].clamp(min=TINY)) if known else stats[2] if plan.own_ce else student,
        forward=_cost(forward * by, forward_floor * by, teacher, student) + shard.once(_shift(teacher, student)),
        reverse=whole,
        gate=gate,
    )


def _at_one(maximum: Tensor, chunk: KernelChunk) -> Tensor:
    """The largest logit at T = 1, from that at the temperature; finite, as an empty row's is."""
    return (maximum * chunk.call.params.temperature).clamp(min=-3.4e38)


def _cost(cost: Tensor, floored: Tensor, own: Stats, other: Stats) -> Tensor:
    """Σ p·(log p − log q) in nats but for the normalizers of both sides, from sums with weights that are not normalised; log q
    is the floor at the mass that is `floored`."""
    logs = cost - floored * (other[0] + other[1].log2())
    return (logs * LN_2 - floored * LOG_FLOOR) / own[1]


def _shift(own: Stats, other: Stats) -> Tensor:
    """What the normalizers add to it."""
    return (other[0] - own[0] + (other[1].log2() - own[1].log2())) * LN_2
