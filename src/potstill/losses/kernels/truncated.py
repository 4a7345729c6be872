"""Truncated and sampled teachers, and the cross-entropy alone, by the kernels: a pass over the student's row for statistics and
one for the gradient, with all that is [n, K] in torch between and after them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.kernels import programs
from potstill.losses.kernels.chunk import LN_2, TINY, KernelChunk, Stats, reduced
from potstill.losses.rows import LOG2_E, SampledRows, TopKRows


class _Rest:
    """The two programs, around what torch does between them: over the first `width` ids at the temperature (`kd`), and over all
    of them at T = 1 (`ce`, which is the same where it is not asked for)."""

    def __init__(self, chunk: KernelChunk, width: int, *, kd: bool, ce: bool) -> None:
        self._chunk, self._width, self._kd = chunk, width, kd
        z, found = chunk.z, chunk.z.new_zeros(4, len(chunk.z))
        wide = (len(z), z.stride(0), z.shape[1], width, chunk.scale, chunk.cap)
        chunk.run(programs.rest_stats, z, found, *wide, KD=kd, CE=ce)
        self.kd: Stats = (found[0], found[1])
        self.ce: Stats = (found[2], found[3]) if ce else self.kd

    def gradient(self, label: Tensor, maximum: Tensor, pull: Tensor, ce: Stats) -> None:
        """pull · 2^(x − maximum) within the width, and the cross-entropy's. Dropped columns are 0."""
        chunk, z, grad = self._chunk, self._chunk.z, self._chunk.grad
        assert grad is not None
        rows = torch.stack([maximum, pull, ce[0], ce[1].log2(), chunk.ce_weight()])
        wide = (len(z), z.stride(0), grad.stride(0), z.shape[1], self._width, chunk.scale, chunk.cap)
        chunk.run(programs.rest_gradient, z, grad, label, rows, *wide, KD=self._kd, CE=chunk.ce_weighs)


def label_rows(chunk: KernelChunk) -> tuple[Tensor, Tensor]:
    """No teacher: the cross-entropy alone."""
    zero = chunk.z.new_zeros(len(chunk.z))
    if chunk.call.labels is None:
        if chunk.grad is not None:
            chunk.grad.zero_()
        return zero, zero
    label, logit = chunk.label()
    rest = _Rest(chunk, chunk.z.shape[1], kd=False, ce=True)
    (ce,), _ = reduced(chunk.shard, [rest.ce])
    if chunk.grad is not None:
        rest.gradient(label, zero, zero, ce)
    return zero, chunk.cross_entropy(ce, label, logit)


def sampled_rows(chunk: KernelChunk, teacher: SampledRows) -> tuple[Tensor, Tensor]:
    target, shard = teacher.target, chunk.shard
    width, shares, entries = shard.held(target.width), target.weights[chunk.rows].float(), _Entries(chunk, target.ids)
    label, logit = chunk.label()
    apart = _own_ce(chunk, target.width)
    rest = _Rest(chunk, width, kd=True, ce=apart)
    (kd, *others), _ = reduced(shard, [rest.kd] + [rest.ce] * apart)
    ce = others[0] if others else kd
    logq = (entries.scaled(width) - kd[0][:, None] - kd[1].log2()[:, None]) * LN_2
    value = (shares * logq.clamp_(min=LOG_FLOOR)).masked_fill(~entries.here, 0.0).sum(-1)
    if chunk.grad is not None:
        weight = chunk.kd_weight(1.0)
        pull = shares.sum(-1) * weight / kd[1]
        base = entries.wide_gradient(width, kd[0], pull, ce, label)
        rest.gradient(label, kd[0], pull, ce)
        entries.add(base, -shares * weight[:, None])
    return chunk.kd(-value), chunk.cross_entropy(ce, label, logit)


def top_k_rows(chunk: KernelChunk, teacher: TopKRows) -> tuple[Tensor, Tensor]:
    target, shard, rows = teacher.target, chunk.shard, chunk.rows
    width, entries = shard.held(target.width), _Entries(chunk, target.ids)
    there = entries.here if target.absent is None else entries.here & ~target.absent[rows]
    samples = _Entries(chunk, target.tail_samples) if teacher.draws_serve(chunk.call.params) else None
    label, logit = chunk.label()
    entries.drop()
    own_ce = _own_ce(chunk, target.width)
    rest, distinct = _Rest(chunk, width, kd=True, ce=own_ce), _distinct(there, target.absent, rows)
    kept, at_one = entries.scaled(width).masked_fill_(~there, -math.inf), entries.at_one(distinct)
    apart = own_ce or target.absent is not None
    (of_rest, of_kept, *others), _ = reduced(
        shard, [rest.kd, _stats(kept), *([rest.ce, _stats(at_one)] if apart else [])]
    )
    every = _together(of_rest, of_kept)
    ce = _together(*others) if others else every
    buckets = torch.cat([kept, (of_rest[0] + of_rest[1].log2())[:, None]], -1)
    logq = (buckets - every[0][:, None] - every[1].log2()[:, None]) * LN_2
    value, factor, grad = teacher.compared_entries(logq, rows, chunk.call)
    weight, share, from_rest = chunk.kd_weight(factor), target.tail[rows].float().exp(), grad[:, -1]
    if samples is not None:
        drawn = samples.scaled(width).masked_fill_(~samples.here, 0.0).sum(-1) * LN_2
        log_rest = of_rest[1].log() + of_rest[0] * LN_2
        value = value + shard.once(share * log_rest) - share * teacher.drawn_mean(drawn, rows, shard)
        from_rest = from_rest + share
    if chunk.grad is not None:
        pull = torch.where(of_rest[1] > TINY, from_rest / of_rest[1] * weight, 0.0)  # an empty rest has no column
        base = None if samples is None else samples.wide_gradient(width, of_rest[0], pull, ce, label)
        rest.gradient(label, of_rest[0], pull, ce)
        entries.put(grad[:, :-1].masked_fill(~there, 0.0) * weight[:, None], distinct, ce, label)
        if samples is not None and base is not None:
            samples.add(base, (-share * weight / base.shape[1])[:, None].expand_as(base))
    return chunk.kd(value), chunk.cross_entropy(ce, label, logit)


def _own_ce(chunk: KernelChunk, width: int | None) -> bool:
    """Whether the cross-entropy's softmax is another one than the divergence's."""
    return chunk.call.labels is not None and (chunk.call.params.temperature != 1.0 or width is not None)


def _distinct(there: Tensor, absent: Tensor | None, rows: slice) -> Tensor:
    """Each dropped column once: an absent entry repeats another's id, the first one's where all are absent."""
    if absent is None:
        return there
    nobody = absent[rows].all(-1)
    return torch.cat([there[:, :1] | nobody[:, None], there[:, 1:]], -1)


def _stats(x: Tensor) -> Stats:
    """Of logits [n, K] in base 2."""
    maximum = x.amax(-1).clamp(min=-3.4e38)
    return maximum, torch.exp2(x - maximum[:, None]).sum(-1)


def _together(a: Stats, b: Stats) -> Stats:
    """Of two sets of ids as one."""
    maximum = torch.maximum(a[0], b[0])
    return maximum, a[1] * torch.exp2(a[0] - maximum) + b[1] * torch.exp2(b[0] - maximum)


class _Entries:
    """Some columns of each row [n, K], by global ids: their logits before anything is written over them, and where their
    gradient goes. Columns of other ranks are the one that each row has beyond its last."""

    def __init__(self, chunk: KernelChunk, ids: Tensor | None) -> None:
        assert ids is not None
        self._chunk, z = chunk, chunk.z
        columns, inside = chunk.shard.local(ids[chunk.rows])
        self.here = torch.ones_like(columns, dtype=torch.bool) if inside is None else inside
        self._columns = columns.masked_fill(~self.here, z.shape[1])
        self.raw = z.gather(-1, columns)

    def _with_spare(self, matrix: Tensor) -> Tensor:
        return matrix.as_strided((matrix.shape[0], self._chunk.z.shape[1] + 1), matrix.stride())

    def drop(self) -> None:
        """−inf in their place."""
        self._with_spare(self._chunk.z).scatter_(-1, self._columns, -math.inf)

    def scaled(self, width: int) -> Tensor:
        """Logits at the temperature in base 2; −inf beyond the width."""
        return (self._chunk.capped(self.raw) * self._chunk.scale).masked_fill_(self._columns >= width, -math.inf)

    def at_one(self, which: Tensor) -> Tensor:
        """Logits at T = 1 in base 2; −inf but for some."""
        return (self._chunk.capped(self.raw) * LOG2_E).masked_fill_(~which, -math.inf)

    def _of_ce(self, ce: Stats, label: Tensor) -> Tensor | float:
        if not self._chunk.ce_weighs:
            return 0.0
        q = torch.exp2(self._chunk.capped(self.raw) * LOG2_E - ce[0][:, None] - ce[1].log2()[:, None])
        return (q - (self._columns == label[:, None]).float()) * self._chunk.ce_weight()[:, None]

    def wide_gradient(self, width: int, maximum: Tensor, pull: Tensor, ce: Stats, label: Tensor) -> Tensor:
        """What the program puts here, before it is rounded."""
        weights = torch.exp2(self.scaled(width) - maximum[:, None]) * pull[:, None]
        return (weights + self._of_ce(ce, label)) * self._chunk.slope(self.raw)

    def put(self, gradient: Tensor, distinct: Tensor, ce: Stats, label: Tensor) -> None:
        """The gradient of dropped columns, of which `distinct` has each once, and the cross-entropy's."""
        grad = self._chunk.grad
        assert grad is not None
        gradient = (gradient + self._of_ce(ce, label)) * self._chunk.slope(self.raw)
        columns = self._columns.masked_fill(~distinct, self._chunk.z.shape[1])
        self._with_spare(grad).scatter_(-1, columns, gradient.to(grad.dtype))

    def add(self, base: Tensor, more: Tensor) -> None:
        """`base` and more. An id may be there several times: sums are float32, where the logits were, and rounded once."""
        z, grad = (self._with_spare(x) for x in (self._chunk.z, self._chunk.grad) if x is not None)
        more = more * self._chunk.slope(self.raw)
        if grad.dtype == z.dtype:
            grad.scatter_add_(-1, self._columns, more)
            return
        z.scatter_(-1, self._columns, base).scatter_add_(-1, self._columns, more)
        grad.scatter_(-1, self._columns, z.gather(-1, self._columns).to(grad.dtype))
