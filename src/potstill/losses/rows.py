"""The loss of a block of rows and its gradient with respect to the logits, in place of the logits.

b rows, V vocabulary (this rank's part of it), W ids that teacher and student share, K kept entries of a teacher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from potstill.losses.divergences import DIVERGENCES, LOG_FLOOR, Block, LossParams, forward_kl, temperature_scale
from potstill.losses.vocab_parallel import VocabShard
from potstill.types import Dense, SampledTarget, Target, TopKTarget

LOG2_E = math.log2(math.e)
Ready = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]  # q, p, and the normalizers of P and Q, as a Block has them


class Opened(Protocol):
    """A target whose rows are not independent of each other, with what it finds out while they go by
    (losses/cross_tokenizer.py)."""

    def begin(self, logits: Tensor, chunk: slice, call: Call, block: int) -> None:
        """Before the blocks of a chunk of rows: look at all of the chunk's logits."""
        ...

    def loss(self, z: Tensor, rows: slice, call: Call, scratch: Scratch) -> tuple[Tensor, float]:
        """As `_divergence`."""
        ...

    def scaled_as(self, divergence: str) -> str:
        """The divergence whose scale with the temperature its values have."""
        ...

    def breaks(self, row: int) -> int:
        """The nearest row, at or before this one, where a chunk of rows may end."""
        ...


@dataclass(frozen=True)
class Call:
    """Everything of a call that is not differentiated."""

    targets: Sequence[tuple[float | Tensor, Target | Opened]]
    labels: Tensor | None
    row_weight: Tensor
    divergence: str
    knobs: LossParams
    temperature: float
    kd_weight: float
    ce_weight: float | Tensor
    softcap: float | None
    logit_scale: float
    entropy_gate: float | None
    columns: VocabShard
    same_ids: bool  # every dense target is over all of the student's ids, on every rank
    differentiate: bool


class Scratch:
    """Buffers of one block, made when first asked for and used again for every block."""

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._options = (rows, vocabulary), {"dtype": dtype, "device": device}
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, **self._options)  # type: ignore[call-overload]
        return self._buffers[name].view(-1)[: rows * width].view(rows, width)


def loss_of_rows(
    z: Tensor, teachers: Sequence[Tensor | None], rows: slice, call: Call, scratch: Scratch, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Divergence and cross-entropy of rows with raw logits `z` [b, V] and dense teachers' logits; `z` becomes the gradient of
    the weighted loss with respect to the head's product. Teachers' logits are used up."""
    b, v = z.shape
    row_weight = call.row_weight[rows].to(z.dtype)
    slope = _capped(z, call.softcap, scratch) if call.softcap is not None else None
    # At T = 1 and over the same ids, divergence and cross-entropy share one softmax.
    only = teachers[0] if len(teachers) == 1 and call.temperature == 1.0 and call.same_ids else None
    ce, q, ready = z.new_zeros(b), None, None
    if call.labels is not None and only is not None:
        q, p = scratch("q", b, v), scratch("p", b, v)
        mass_q, mass_p = softmax(call.columns, (z, q), (only, p))
        ready = q, p, (mass_p, mass_q)
        (label,) = call.columns.total(call.columns.gather(z, call.labels[rows, None], 0.0).squeeze(-1))
        ce = mass_q.log() - label
    elif call.labels is not None:
        ce, q = _cross_entropy(z, call.labels[rows], call.columns, scratch("ce", b, v))
    kd = z.new_zeros(b)
    grad = z
    if len(call.targets) != 1:  # each target needs the logits anew, so their gradients are summed up elsewhere
        grad = scratch("sum", b, v).zero_()
    for (share, target), teacher in zip(call.targets, teachers, strict=True):
        work = z if grad is z else scratch("work", b, v).copy_(z)
        value, factor = _divergence(work, teacher, target, rows, call, scratch, ready)
        share = share[rows].to(z.dtype) if isinstance(share, Tensor) else share
        kd += share * value
        weight = (row_weight * (share * factor * call.kd_weight))[:, None]
        grad.mul_(weight) if grad is z else grad.addcmul_(work, weight)
    if not differentiate:
        return kd, ce
    if q is not None and (isinstance(call.ce_weight, Tensor) or call.ce_weight):
        assert call.labels is not None
        ce_weight = call.ce_weight[rows].to(z.dtype) if isinstance(call.ce_weight, Tensor) else call.ce_weight
        weight = (row_weight * ce_weight)[:, None]
        grad.addcmul_(q, weight)
        where, inside = call.columns.local(call.labels[rows, None])
        grad.scatter_add_(-1, where, -weight if inside is None else -weight * inside)
    if slope is not None:
        grad.mul_(slope)
    if call.logit_scale != 1.0:
        grad.mul_(call.logit_scale)
    if grad is not z:
        z.copy_(grad)
    return kd, ce


def _capped(z: Tensor, softcap: float, scratch: Scratch) -> Tensor:
    """Soft-cap the logits in place; gives the slope of the cap at each."""
    tanh = torch.div(z, softcap, out=scratch("slope", *z.shape)).tanh_()
    torch.mul(tanh, softcap, out=z)
    return tanh.square_().neg_().add_(1.0)


def _largest(z: Tensor) -> Tensor:
    """The largest of each row; finite, for −inf − −inf is no number: a row may be empty, or have no column on this rank."""
    least = -torch.finfo(z.dtype).max
    return z.amax(-1).clamp_(min=least) if z.shape[1] else z.new_full((z.shape[0],), least)


def _mass(mass: Tensor) -> Tensor:
    """A row's sum of exponentials, kept from the 0 of a row that is −inf everywhere."""
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def _exp(x: Tensor, out: Tensor) -> Tensor:
    """exp(x) as 2^(x · log₂ e): two passes that take two thirds of the time of torch.exp's one on a CPU."""
    return torch.mul(x, LOG2_E, out=out).exp2_()


def softmax(columns: VocabShard, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """In place of each pair's first: log softmax, floored, but for −log of the mass that is given back [b]; into its second:
    softmax, of the first pair divided by its mass, of the others not yet. What they need of other ranks travels together.
    The maximum is taken off before the logarithm, not with it: their sum would round large logits."""
    largest = columns.largest(*(_largest(z) for z, _ in pairs))
    normalizers = columns.total(
        *(_exp(z.sub_(m[:, None]), out).sum(-1) for (z, out), m in zip(pairs, largest, strict=True))
    )
    normalizers = tuple(map(_mass, normalizers))
    for (z, _), mass in zip(pairs, normalizers, strict=True):
        z.clamp_(min=(mass.log() + LOG_FLOOR)[:, None])
    pairs[0][1].mul_(normalizers[0].reciprocal()[:, None])
    return normalizers


def _cross_entropy(z: Tensor, labels: Tensor, columns: VocabShard, out: Tensor) -> tuple[Tensor, Tensor]:
    """−log softmax(z)[label], floored as log-probabilities are, and the softmax in `out`."""
    (largest,) = columns.largest(_largest(z))
    _exp(torch.sub(z, largest[:, None], out=out), out)
    mass, label = columns.total(out.sum(-1), columns.gather(z, labels[:, None], 0.0).squeeze(-1))
    mass = _mass(mass)
    out.mul_(mass.reciprocal()[:, None])
    return (mass.log() - (label - largest)).clamp_(max=-LOG_FLOOR), out


def _divergence(
    z: Tensor,
    teacher: Tensor | None,
    target: Target | Opened,
    rows: slice,
    call: Call,
    scratch: Scratch,
    ready: Ready | None,
) -> tuple[Tensor, float]:
    """Scaled divergence of the rows. `z` becomes its gradient up to the factor that is given back. With `ready`, `z` and
    `teacher` have been through `softmax` already."""
    t = call.temperature
    name = call.divergence if isinstance(target, Target) else target.scaled_as(call.divergence)
    scale = temperature_scale(name, t)
    if t != 1.0:
        z.div_(t)
        if teacher is not None:
            teacher.div_(t)
    if isinstance(target, Dense):
        assert teacher is not None
        value, factor = _dense(z, teacher, call, scratch, ready)
    elif isinstance(target, TopKTarget):
        value, factor = _top_k(z, target, rows, call)
    elif isinstance(target, SampledTarget):
        value, factor = _sampled(z, target, rows, call, scratch)
    else:
        assert not isinstance(target, Target), "a ChunkTarget was opened before, the others are refused"
        value, factor = target.loss(z, rows, call, scratch)
    return value * scale, factor * scale / t


def _dense(z: Tensor, teacher: Tensor, call: Call, scratch: Scratch, ready: Ready | None) -> tuple[Tensor, float]:
    b, width = teacher.shape
    columns = call.columns
    logq = z if width == z.shape[1] else scratch("shared", b, width).copy_(z[:, :width])
    if ready is None:
        q, p = scratch("q", b, width), scratch("p", b, width)
        mass_q, mass_p = softmax(columns, (logq, q), (teacher, p))
        ready = q, p, (mass_p, mass_q)
    q, p, normalizers = ready

    def total(*matrices: Tensor) -> tuple[Tensor, ...]:
        return columns.total(*(matrix.sum(-1) for matrix in matrices))

    block = Block(teacher, logq, p, q, scratch("spare", b, width), total, normalizers)
    value, factor = gated(block, p.new_ones(()).expand_as(p), call)
    if logq is not z:  # the ids beyond the shared ones have no part in the divergence
        z[:, :width] = logq
        z[:, width:] = 0.0
    return value, factor


def gated(block: Block, present: Tensor, call: Call) -> tuple[Tensor, float]:
    """The chosen divergence, mixed with forward KL row by row when there is an entropy gate. `present` is 1 at the buckets
    that exist and count on this rank."""
    chosen = DIVERGENCES[call.divergence]
    if call.entropy_gate is None:
        return chosen(block, call.knobs)
    block = block.normalised()
    entropy, buckets = block.total(torch.mul(block.p, block.logp, out=block.spare).neg_(), present)
    gate = (entropy / buckets.clamp(min=2.0).log()).clamp_(0.0, 1.0) ** call.entropy_gate  # one bucket has no entropy
    other = replace(block, logp=block.logp.clone(), logq=block.logq.clone())  # forward KL leaves p and q as they are
    forward, forward_factor = forward_kl(other, call.knobs)
    value, factor = chosen(block, call.knobs)
    block.logq.mul_(((1 - gate) * factor)[:, None]).addcmul_(other.logq, (gate * forward_factor)[:, None])
    return (1 - gate) * value + gate * forward, 1.0


def _top_k(z: Tensor, target: TopKTarget, rows: slice, call: Call) -> tuple[Tensor, float]:
    """K kept ids and the rest as one bucket more. The student's rest is a sum over its own other ids, not 1 − Σ: the
    subtraction loses everything in float32 when the student has nearly all of its mass on the kept ids."""
    columns, ids = call.columns, target.ids[rows]
    where, inside = columns.local(ids)
    z[:, columns.beyond(target.width) :] = -math.inf
    kept = columns.gather(z, ids, -math.inf)
    absent = None if target.absent is None else target.absent[rows]
    if absent is not None:
        kept = kept.masked_fill(absent, -math.inf)
    if inside is None:
        z.scatter_(-1, where, -math.inf)
    else:  # ids of other ranks must not overwrite a column here
        z.scatter_reduce_(-1, where, torch.where(inside, -math.inf, math.inf).to(z.dtype), "amin")
    kept_largest, rest_largest = columns.largest(_largest(kept), _largest(z))
    largest = torch.maximum(kept_largest, rest_largest)
    kept = kept - largest[:, None]
    z.sub_(rest_largest[:, None])  # its own maximum: however small the rest is, its logarithm is exact
    drawn = _drawn(z, target, rows, call)
    _exp(z, z)
    kept_mass, rest_mass = columns.total(kept.exp().sum(-1), z.sum(-1))
    rest = rest_largest - largest + rest_mass.log()
    log_mass = _mass(kept_mass + rest.exp()).log()

    tail = target.tail[rows, None].to(z.dtype)
    logq = torch.cat([kept, rest[:, None]], -1).sub_(log_mass[:, None]).clamp_(min=LOG_FLOOR)
    logp = torch.cat([target.logprobs[rows].to(z.dtype), tail], -1).clamp_(min=LOG_FLOOR)
    p, q = logp.exp(), logq.exp()
    there = torch.ones_like(kept) if absent is None else (~absent).to(z.dtype)
    present = torch.cat([there, (tail > -math.inf).to(z.dtype)], -1)
    if inside is not None:  # a bucket counts on the rank that holds its id; the rest on the first, though all need it
        here = torch.cat([inside, torch.ones_like(inside[:, :1])], -1)
        logp, logq, p, q, present = (x.masked_fill(~here, 0.0) for x in (logp, logq, p, q, present))

    def total(*matrices: Tensor) -> tuple[Tensor, ...]:
        once = [m.sum(-1) if columns.first else m[:, :-1].sum(-1) for m in matrices]
        return columns.total(*once)

    block = Block(logp, logq, p, q, torch.empty_like(p), total)
    value, factor = gated(block, present, call)
    grad = block.logq
    from_rest = grad[:, -1]
    if drawn is not None:
        share = tail.squeeze(-1).exp()
        value = value + share * (_mass(rest_mass).log() - drawn)
        from_rest = from_rest + share
    z.mul_((from_rest / _mass(rest_mass))[:, None])
    if drawn is not None:
        assert target.tail_samples is not None
        places, held = columns.local(target.tail_samples[rows])
        each = (-share / places.shape[1])[:, None].expand_as(places)
        z.scatter_add_(-1, places, each if held is None else each * held)
    kept_grad = grad[:, :-1] if inside is None else grad[:, :-1].masked_fill(~inside, 0.0)
    kept_grad = kept_grad if absent is None else kept_grad.masked_fill(absent, 0.0)
    z.scatter_add_(-1, where, kept_grad)  # kept columns are exp(−inf) = 0 until here
    return value, factor


def _drawn(z: Tensor, target: TopKTarget, rows: slice, call: Call) -> Tensor | None:
    """The mean of the student's logits [b] at draws from the teacher's rest, and the teacher's entropy in it; None when there
    are no draws or they do not serve: they are unbiased for forward KL alone."""
    if target.tail_samples is None or call.divergence != "forward_kl" or call.entropy_gate is not None:
        return None
    (total,) = call.columns.total(call.columns.gather(z, target.tail_samples[rows], 0.0).sum(-1))
    mean = total / target.tail_samples.shape[1]
    return mean if target.tail_entropy is None else mean + target.tail_entropy[rows].to(z.dtype)


def _sampled(z: Tensor, target: SampledTarget, rows: slice, call: Call, scratch: Scratch) -> tuple[Tensor, float]:
    """Cross-entropy to the draws: unbiased for forward KL up to the teacher's entropy."""
    columns, ids, shares = call.columns, target.ids[rows], target.weights[rows].to(z.dtype)
    q = scratch("q", *z.shape)
    z[:, columns.beyond(target.width) :] = -math.inf
    (mass,) = softmax(columns, (z, q))
    (value,) = columns.total((shares * columns.gather(z, ids, 0.0)).sum(-1))
    value -= shares.sum(-1) * mass.log()
    where, inside = columns.local(ids)
    torch.mul(q, shares.sum(-1, keepdim=True), out=z)
    z.scatter_add_(-1, where, -shares if inside is None else -shares.masked_fill(~inside, 0.0))
    return -value, 1.0
