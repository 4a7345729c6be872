"""The loss of a block of rows and its gradient with respect to the logits, in place of the logits; and how a dense, a truncated
and a sampled teacher are compared (losses/cross_tokenizer.py: one with other tokens).

b rows, V vocabulary (this rank's part of it), W ids that teacher and student share, K kept entries of a teacher.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR, Block, LossParams, compared, temperature_scale
from potstill.parallel.vocab import VocabShard
from potstill.types import Ints, SampledTarget, TopKTarget

LOG2_E = math.log2(math.e)
CHUNK_BYTES = 192 * 2**20  # of one [n, V] buffer; with few rows a product mostly moves the head about


class Buffers:
    """Matrices by name, made when first asked for and used again: by the next block, or by the next call."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._flat: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        size = rows * width
        flat = self._flat.pop(name, None)
        if flat is None or flat.numel() < size:
            del flat
            with torch.inference_mode(False):  # or it could not be written to outside of that mode
                flat = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        self._flat[name] = flat
        return flat[:size].view(rows, width)

    def padded(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """With rows a multiple of 16 columns apart, so that a GPU reads 128 bits at a time, and a column to spare at least."""
        return self(name, rows, (width // 16 + 1) * 16, dtype)[:, :width]

    def free(self) -> None:
        self._flat.clear()


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Buffers] = {}


_KEPT = _Kept()


@dataclass(frozen=True)
class Call:
    """Everything of a call but the student."""

    comparisons: Sequence[tuple[float | Tensor, Comparison]]  # with the targets' weights
    params: LossParams
    row_weight: Tensor
    shard: VocabShard
    buffers: Buffers  # for a block of rows
    labels: Tensor | None = None
    kd_weight: float = 1.0
    ce_weight: float | Tensor = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    token_clip: float | None = None  # largest value of a row, of each target
    same_ids: bool = False  # every dense target is over all of the student's ids, on every rank
    differentiate: bool = True
    row_values: bool = True  # False: values are left in the ranks' parts
    padded: bool = False  # rows of logits are padded, as the kernels (losses/kernels) read them

    def room(self, name: str, rows: int, width: int) -> Tensor:
        """For the logits of a chunk. On a CPU it is kept for the next call: a system fills fresh pages with zeros, which takes
        7 % of a call (dense, 1,024 rows, 49,152 ids). The allocators of other devices keep what was freed by themselves."""
        own = self.buffers
        if self.padded:
            return own.padded(name, rows, width)
        if own.device.type != "cpu" or rows * width * own.dtype.itemsize > CHUNK_BYTES:
            return own(name, rows, width)
        return _KEPT.buffers.setdefault(own.dtype, Buffers(own.dtype, own.device))(name, rows, width)


class Comparison:
    """A target during one call: what it finds out while its rows go by."""

    joined: Ints = np.zeros(0, dtype=np.int64)  # rows that must be in the chunk of the row before them

    def begin(self, logits: Tensor, chunk: slice, call: Call) -> None:
        """Before the blocks of a chunk of rows, with all of the chunk's logits."""

    def scale(self, params: LossParams) -> float:
        """What its values are multiplied by because of the temperature."""
        return temperature_scale(params.divergence, params.temperature)

    def loss(self, z: Tensor, rows: slice, call: Call) -> tuple[Tensor, float]:
        """This rank's parts of the values [b] at rows with the student's logits `z` [b, V] over the temperature; `z` becomes
        their gradient up to the factor that is given back."""
        raise NotImplementedError


def loss_of_rows(z: Tensor, rows: slice, call: Call) -> tuple[Tensor, Tensor]:
    """This rank's parts of the divergence and cross-entropy of rows with raw logits `z` [b, V], which become the weighted
    loss's gradient with respect to the head's product."""
    row_weight = call.row_weight[rows].to(z.dtype)
    slope = _capped(z, call.softcap, call.buffers) if call.softcap is not None else None
    ce, q, block = _cross_entropy(z, rows, call)
    kd, grad = _divergences(z, rows, call, row_weight, block)
    if not call.differentiate:
        return kd, ce
    if q is not None and (isinstance(call.ce_weight, Tensor) or call.ce_weight):
        assert call.labels is not None
        weight = (row_weight * _of_rows(call.ce_weight, rows, z.dtype))[:, None]
        call.shard.scatter_add(grad.addcmul_(q, weight), call.labels[rows, None], -weight)
    if slope is not None:
        grad.mul_(slope)
    if call.logit_scale != 1.0:
        grad.mul_(call.logit_scale)
    if grad is not z:
        z.copy_(grad)
    return kd, ce


def _cross_entropy(z: Tensor, rows: slice, call: Call) -> tuple[Tensor, Tensor | None, Block | None]:
    """−log softmax(z)[label], floored as log-probabilities are, where this rank has the label, and the softmax. With a single
    dense teacher over the same ids the divergence shares its maximum, and at T = 1 its softmax: then `z` is used up, and the
    divergence goes on with the block."""
    shard = call.shard
    if call.labels is None:
        return z.new_zeros(len(z)), None, None
    ids, only, block = call.labels[rows, None], call.comparisons[0][1] if len(call.comparisons) == 1 else None, None
    label, (_, inside) = shard.gather(z, ids, 0.0).squeeze(-1), shard.local(ids)
    if isinstance(only, DenseRows) and call.same_ids:
        plain = None if call.params.temperature == 1.0 else call.buffers("ce", *z.shape)
        block, mass, largest = only.block_of_raw(z, rows, call, plain)
        q = block.q if plain is None else plain
    else:
        (largest,) = shard.largest(_largest(z))
        q = call.buffers("ce", *z.shape)
        _exp(torch.sub(z, largest[:, None], out=q), q)
        mass = _mass(shard.total(q.sum(-1))[0])
        q.mul_(mass.reciprocal()[:, None])
    ce = (mass.log() - (label - largest)).clamp_(max=-LOG_FLOOR)
    return ce if inside is None else ce * inside.squeeze(-1), q, block


def _divergences(z: Tensor, rows: slice, call: Call, row_weight: Tensor, block: Block | None) -> tuple[Tensor, Tensor]:
    """The weighted sum over the targets [b] and its gradient, in place of `z` where there is one target."""
    t, kd = call.params.temperature, z.new_zeros(len(z))
    # With several targets each needs the logits anew, so their gradients are summed up elsewhere.
    grad = z if len(call.comparisons) == 1 else call.buffers("sum", *z.shape).zero_()
    for share, comparison in call.comparisons:
        work = z if grad is z else call.buffers("work", *z.shape).copy_(z)
        if t != 1.0 and block is None:
            work.div_(t)
        value, factor = comparison.loss(work, rows, call) if block is None else _compared_dense(block, call.params)
        scale, share = comparison.scale(call.params), _of_rows(share, rows, z.dtype)
        value, learns = _clipped(value * scale, call)
        kd += share * value
        weight = (row_weight * learns * (share * (factor * scale / t * call.kd_weight)))[:, None]
        grad.mul_(weight) if grad is z else grad.addcmul_(work, weight)
    return kd, grad


def _clipped(value: Tensor, call: Call) -> tuple[Tensor, Tensor | float]:
    """This rank's parts of values [b] that are at most `token_clip`, and what of their gradient is left: a row beyond it has
    none, as of the smaller of the value and a constant."""
    if call.token_clip is None:
        return value, 1.0
    (whole,) = call.shard.total(value)
    beyond = whole > call.token_clip
    limit = call.shard.once(torch.full_like(value, call.token_clip))
    return torch.where(beyond, limit, value), (~beyond).to(value.dtype)


def _of_rows(weight: float | Tensor, rows: slice, dtype: torch.dtype) -> float | Tensor:
    return weight[rows].to(dtype) if isinstance(weight, Tensor) else weight


def _capped(z: Tensor, softcap: float, buffers: Buffers) -> Tensor:
    """Soft-cap the logits in place; gives the slope of the cap at each."""
    tanh = torch.div(z, softcap, out=buffers("slope", *z.shape)).tanh_()
    torch.mul(tanh, softcap, out=z)
    return tanh.square_().neg_().add_(1.0)


def _largest(z: Tensor) -> Tensor:
    """The largest of each row; finite, for −inf − −inf is NaN: a row may be empty, or have no column on this rank."""
    least = -torch.finfo(z.dtype).max
    return z.amax(-1).clamp_(min=least) if z.shape[1] else z.new_full((z.shape[0],), least)


def _mass(mass: Tensor) -> Tensor:
    """A row's sum of exponentials, kept from the 0 of a row that is −inf everywhere."""
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def _exp(x: Tensor, out: Tensor) -> Tensor:
    """exp(x) as 2^(x · log₂ e): on a CPU two passes are faster than torch.exp's one, by 9 % of a call (dense, 49,152 ids)."""
    return torch.mul(x, LOG2_E, out=out).exp2_()


def softmax(
    shard: VocabShard, *pairs: tuple[Tensor, Tensor], temperature: float = 1.0, plain: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """In place of each pair's first: log softmax at a temperature, floored, but for −log of the mass that is given back [b];
    into its second: softmax, of the first pair divided by its mass, of the others not yet; into `plain`: the first pair's
    softmax at T = 1, whose mass comes last. The first pair's maxima too. What they need of other ranks travels together.
    The maximum is taken off before the logarithm, not with it: their sum would round large logits."""
    largest = shard.largest(*(_largest(z) for z, _ in pairs))
    for (z, _), m in zip(pairs, largest, strict=True):
        z.sub_(m[:, None])
    sums = [] if plain is None else [_exp(pairs[0][0], plain).sum(-1)]
    for z, out in reversed(pairs):
        sums.append(_exp(z if temperature == 1.0 else z.div_(temperature), out).sum(-1))
    normalizers = tuple(map(_mass, shard.total(*reversed(sums))))
    for (z, _), mass in zip(pairs, normalizers, strict=False):
        z.clamp_(min=(mass.log() + LOG_FLOOR)[:, None])
    pairs[0][1].mul_(normalizers[0].reciprocal()[:, None])
    if plain is not None:
        plain.mul_(normalizers[-1].reciprocal()[:, None])
    return normalizers, largest[0]


class DenseRows(Comparison):
    """A teacher with logits over `width` ids of this rank. `read` puts those of some rows into a buffer."""

    def __init__(self, read: Callable[[slice, Tensor], Tensor], width: int, name: str = "teacher") -> None:
        self._read, self._width, self._name = read, width, name
        self.logits, self._start = torch.empty(0), 0

    def begin(self, logits: Tensor, chunk: slice, call: Call) -> None:
        self.logits = self._read(chunk, call.room(self._name, len(logits), self._width))
        self._start = chunk.start

    def block(self, logq: Tensor, rows: slice, call: Call) -> Block:
        """The softmaxes of both sides, from the student's logits [b, W] over the temperature."""
        block = self._block(logq, rows, call)
        if call.params.temperature != 1.0:
            block.logp.div_(call.params.temperature)
        (mass_q, mass_p), _ = softmax(call.shard, (logq, block.q), (block.logp, block.p))
        return replace(block, normalizers=(mass_p, mass_q))

    def block_of_raw(self, z: Tensor, rows: slice, call: Call, plain: Tensor | None) -> tuple[Block, Tensor, Tensor]:
        """The same from raw logits; `plain` [b, V] becomes the student's softmax at T = 1, unless that is the block's own. With
        its mass and maxima [b]."""
        block = self._block(z, rows, call)
        sides = (z, block.q), (block.logp, block.p)
        masses, largest = softmax(call.shard, *sides, temperature=call.params.temperature, plain=plain)
        return replace(block, normalizers=(masses[1], masses[0])), masses[0 if plain is None else 2], largest

    def _block(self, logq: Tensor, rows: slice, call: Call) -> Block:
        logp = self.logits[rows.start - self._start : rows.stop - self._start]
        q, p, spare = (call.buffers(name, *logp.shape) for name in ("q", "p", "spare"))
        return Block(logp, logq, p, q, spare, call.shard)

    def loss(self, z: Tensor, rows: slice, call: Call) -> tuple[Tensor, float]:
        if self._width == z.shape[1]:
            return _compared_dense(self.block(z, rows, call), call.params)
        shared = call.buffers("narrow", len(z), self._width).copy_(z[:, : self._width])
        found = _compared_dense(self.block(shared, rows, call), call.params)
        z[:, : self._width] = shared
        z[:, self._width :] = 0.0  # ids beyond the shared ones have no part in the divergence
        return found


def _compared_dense(block: Block, params: LossParams) -> tuple[Tensor, float]:
    return compared(block, block.p.new_ones(()).expand_as(block.p), params)


@dataclass
class TopKRows(Comparison):
    """K kept ids and the rest as one bucket more. The student's rest is a sum over its own other ids, not 1 − Σ: the
    subtraction loses everything in float32 when the student has nearly all of its mass on the kept ids."""

    target: TopKTarget

    def loss(self, z: Tensor, rows: slice, call: Call) -> tuple[Tensor, float]:
        target, shard = self.target, call.shard
        ids, absent = target.ids[rows], None if target.absent is None else target.absent[rows]
        z[:, shard.held(target.width) :] = -math.inf
        kept = shard.gather(z, ids, -math.inf)
        if absent is not None:
            kept = kept.masked_fill(absent, -math.inf)
        shard.drop_(z, ids)
        kept_largest, rest_largest = shard.largest(_largest(kept), _largest(z))
        largest = torch.maximum(kept_largest, rest_largest)
        kept = kept - largest[:, None]
        z.sub_(rest_largest[:, None])  # its own maximum: however small the rest is, its logarithm is exact
        drawn = self._drawn(z, rows, call)
        _exp(z, z)
        kept_mass, rest_mass = shard.total(kept.exp().sum(-1), z.sum(-1))
        rest = rest_largest - largest + rest_mass.log()
        logq = torch.cat([kept, rest[:, None]], -1).sub_(_mass(kept_mass + rest.exp()).log()[:, None])
        value, factor, grad = self.compared_entries(logq, rows, call)
        from_rest, rest_mass = grad[:, -1], _mass(rest_mass)
        if drawn is not None:
            share = target.tail[rows].to(z.dtype).exp()
            value = value + shard.once(share * rest_mass.log()) - share * drawn
            from_rest = from_rest + share
        z.mul_((from_rest / rest_mass)[:, None])
        if drawn is not None:
            assert target.tail_samples is not None
            samples = target.tail_samples[rows]
            shard.scatter_add(z, samples, (-share / samples.shape[1])[:, None].expand_as(samples))
        # Kept columns are exp(−inf) = 0 until here.
        shard.scatter_add(z, ids, grad[:, :-1] if absent is None else grad[:, :-1].masked_fill(absent, 0.0))
        return value, factor

    def compared_entries(self, logq: Tensor, rows: slice, call: Call) -> tuple[Tensor, float, Tensor]:
        """Values, factor and the gradient at K + 1 buckets with the student's log-probabilities [b, K + 1]."""
        target, shard = self.target, call.shard
        logq = logq.clamp_(min=LOG_FLOOR)
        tail = target.tail[rows, None].to(logq.dtype)
        logp = torch.cat([target.logprobs[rows].to(logq.dtype), tail], -1).clamp_(min=LOG_FLOOR)
        p, q = logp.exp(), logq.exp()
        there = torch.ones_like(logq[:, :-1]) if target.absent is None else (~target.absent[rows]).to(logq.dtype)
        present = torch.cat([there, (tail > -math.inf).to(logq.dtype)], -1)
        _, inside = shard.local(target.ids[rows])
        if inside is not None:
            # A bucket counts on the rank that holds its id; the rest on the first, though all need it.
            here = torch.cat([inside, torch.ones_like(inside[:, :1])], -1)
            logp, logq, p, q, present = (x.masked_fill(~here, 0.0) for x in (logp, logq, p, q, present))

        def row_sums(matrix: Tensor) -> Tensor:
            return matrix.sum(-1) if shard.first else matrix[:, :-1].sum(-1)

        block = Block(logp, logq, p, q, torch.empty_like(p), shard, row_sums)
        value, factor = compared(block, present, call.params)
        return value, factor, block.logq

    def _drawn(self, z: Tensor, rows: slice, call: Call) -> Tensor | None:
        """This rank's part of: the mean of the student's logits [b] at draws from the teacher's rest, and the teacher's entropy
        in it. None where there are no draws that serve."""
        samples = self.target.tail_samples
        if samples is None or not self.draws_serve(call.params):
            return None
        return self.drawn_mean(call.shard.gather(z, samples[rows], 0.0).sum(-1), rows, call.shard)

    def draws_serve(self, params: LossParams) -> bool:
        """Whether there are draws from the teacher's rest, and they serve: they are unbiased for forward KL alone."""
        there = self.target.tail_samples is not None
        return there and params.divergence == "forward_kl" and params.entropy_gate is None

    def drawn_mean(self, total: Tensor, rows: slice, shard: VocabShard) -> Tensor:
        """`_drawn`, from the sum of the logits here."""
        samples, entropy = self.target.tail_samples, self.target.tail_entropy
        assert samples is not None
        mean = total / samples.shape[1]
        return mean if entropy is None else mean + shard.once(entropy[rows].to(total.dtype))


@dataclass
class SampledRows(Comparison):
    """Cross-entropy to the draws: unbiased for forward KL up to the teacher's entropy."""

    target: SampledTarget

    def loss(self, z: Tensor, rows: slice, call: Call) -> tuple[Tensor, float]:
        shard, ids, shares = call.shard, self.target.ids[rows], self.target.weights[rows].to(z.dtype)
        q = call.buffers("q", *z.shape)
        z[:, shard.held(self.target.width) :] = -math.inf
        (mass,), _ = softmax(shard, (z, q))
        value = (shares * shard.gather(z, ids, 0.0)).sum(-1) - shard.once(shares.sum(-1) * mass.log())
        torch.mul(q, shares.sum(-1, keepdim=True), out=z)
        shard.scatter_add(z, ids, -shares)
        return -value, 1.0
