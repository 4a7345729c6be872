"""Divergences as closed forms over a block of rows, in place.

Each takes a Block: log-probabilities and probabilities of teacher (P) and student (Q) over the same buckets, [n, B]. It gives
the per-row value [n] and leaves in `logq` the gradient with respect to the student's bucket logits, up to a constant factor
that it gives back too. All of the block's buffers but `q` may be overwritten; nothing of their size is allocated.
A block comes before its last passes, which not everyone needs: `b.normalised()` makes them.

The gradient of any f(q) through a softmax is q·(r − Σ q·r) with r = ∂f/∂q. Row sums go through `block.total`, which also
sums over the ranks that share the vocabulary: several sums of one call travel together. A sum that the value alone needs is a
`block.part`: the ranks' parts are summed up later, and not row by row where nobody asks for the rows' values.
Golden values: tests/unit/losses/test_divergences.py. How to add one: docs/extending.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from potstill.config import registry
from potstill.config.registry import load
from potstill.parallel.vocab import VocabShard

# exp(LOG_FLOOR) is 0 in float32 and float64. Log-probabilities are floored here, so that a bucket empty on one side costs
# a large but finite amount, and one empty on both sides costs 0.
LOG_FLOOR = -1e4
TINY = 1e-37  # a mixture of two empty buckets is empty; its logarithm must be finite, also where subnormals are flushed to 0


@dataclass(frozen=True)
class LossParams:
    """Which divergence is meant."""

    divergence: str = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5  # jsd
    alpha: float = 0.1  # skew_kl, skew_reverse_kl
    entropy_gate: float | None = None

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"unknown divergence {self.divergence!r}; there are {', '.join(DIVERGENCES)}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, not {self.temperature}")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be between 0 and 1, not {self.beta}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, not {self.alpha}")
        if self.entropy_gate is not None and not self.entropy_gate > 0:
            raise ValueError(f"entropy_gate must be above 0, not {self.entropy_gate}")


@dataclass(frozen=True)
class Part:
    """This rank's summand of the values of rows [n]."""

    rows: Tensor


def _row_sums(matrix: Tensor) -> Tensor:
    return matrix.sum(-1)


@dataclass(frozen=True)
class Block:
    logp: Tensor  # [n, B]; with `normalizers`, lacks −log of its side's mass
    logq: Tensor  # as logp
    p: Tensor  # with `normalizers`, to be divided by its mass
    q: Tensor
    spare: Tensor  # scratch of the same shape
    shard: VocabShard | None = None  # None: every rank has all buckets
    row_sums: Callable[[Tensor], Tensor] = _row_sums  # [n] of [n, B], over the buckets that count on this rank
    # [n] each, of P and of Q; None: everything is normalised. To leave that to those who need it saves forward KL 5 % of a call
    # on a CPU (dense, 49,152 ids).
    normalizers: tuple[Tensor, Tensor] | None = None

    def total(self, *matrices: Tensor) -> tuple[Tensor, ...]:
        """Row sums [n] of one or more [n, B], the same on every rank."""
        sums = tuple(map(self.row_sums, matrices))
        return sums if self.shard is None else self.shard.total(*sums)

    def part(self, matrix: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Part:
        """This rank's part of scale · (the row sums of `matrix`) + shift."""
        rows = self.row_sums(matrix) * scale
        return Part(rows + shift if self.shard is None or self.shard.first else rows)

    def normalised(self) -> Block:
        """The block with true probabilities and log-probabilities, in the same buffers."""
        if self.normalizers is None:
            return self
        mass_p, mass_q = self.normalizers
        self.p.mul_(mass_p.reciprocal()[:, None])
        self.logp.sub_(mass_p.log()[:, None])
        self.logq.sub_(mass_q.log()[:, None])
        return replace(self, normalizers=None)

    def log_norm_diff(self) -> Tensor | float:
        """What logp − logq lacks of the true difference, [n]."""
        return 0.0 if self.normalizers is None else self.normalizers[1].log() - self.normalizers[0].log()


Divergence = Callable[[Block, LossParams], tuple[Tensor | Part, float]]


def forward_kl(b: Block, params: LossParams) -> tuple[Part, float]:
    costs = b.logp.sub_(b.logq).mul_(b.p)
    if b.normalizers is None:
        torch.sub(b.q, b.p, out=b.logq)
        return b.part(costs), 1.0
    share = b.normalizers[0].reciprocal()
    torch.addcmul(b.q, b.p, -share[:, None], out=b.logq)
    return b.part(costs, share, b.log_norm_diff()), 1.0


def reverse_kl(b: Block, params: LossParams) -> tuple[Tensor, float]:
    r = b.logq.sub_(b.logp)
    (mean,) = b.total(torch.mul(b.q, r, out=b.logp))
    r.sub_(mean[:, None]).mul_(b.q)
    return mean - b.log_norm_diff(), 1.0


def jsd(b: Block, params: LossParams) -> tuple[Tensor | Part, float]:
    beta = params.beta
    if beta in (0.0, 1.0):
        return forward_kl(b, params) if beta == 0.0 else reverse_kl(b, params)
    b = b.normalised()
    logm = torch.lerp(b.q, b.p, beta, out=b.spare).clamp_(min=TINY).log_()
    left = b.logp.sub_(logm).mul_(b.p)
    r = b.logq.sub_(logm)
    (right,) = b.total(torch.mul(b.q, r, out=b.p))
    r.sub_(right[:, None]).mul_(b.q)
    return b.part(left, beta, (1 - beta) * right), 1 - beta


def skew_kl(b: Block, params: LossParams) -> tuple[Part, float]:
    b = b.normalised()
    m = torch.lerp(b.q, b.p, params.alpha, out=b.spare).clamp_(min=TINY)
    r = torch.div(b.p, m, out=b.logq)  # ∂f/∂q is −(1 − α) times this
    value = b.part(b.logp.sub_(m.log_()).mul_(b.p))
    (mean,) = b.total(torch.mul(b.q, r, out=b.p))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, params.alpha - 1


def skew_reverse_kl(b: Block, params: LossParams) -> tuple[Part, float]:
    b = b.normalised()
    m = torch.lerp(b.p, b.q, params.alpha, out=b.spare).clamp_(min=TINY)
    share = torch.div(b.q, m, out=b.p)
    r = b.logq.sub_(m.log_())
    value = b.part(torch.mul(b.q, r, out=b.logp))
    r.sub_(share, alpha=params.alpha)
    (mean,) = b.total(torch.mul(b.q, r, out=b.spare))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, 1.0


def tvd(b: Block, params: LossParams) -> tuple[Part, float]:
    b = b.normalised()
    difference = torch.sub(b.q, b.p, out=b.p)
    r = torch.sign(difference, out=b.logq)
    value = b.part(difference.abs_(), 0.5)
    (mean,) = b.total(torch.mul(b.q, r, out=b.spare))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, 0.5


DIVERGENCES: dict[str, Divergence] = {name: load(place) for name, place in registry.DIVERGENCES.items()}


def temperature_scale(divergence: str, temperature: float) -> float:
    """What a divergence at this temperature is multiplied by, so that its gradients keep their size."""
    return temperature if divergence == "tvd" else temperature**2


def compared(block: Block, present: Tensor, params: LossParams) -> tuple[Tensor, float]:
    """The chosen divergence, mixed with forward KL row by row when there is an entropy gate. `present` is 1 at the buckets
    that exist and count on this rank. Values are this rank's parts."""
    if params.entropy_gate is None:
        return _in_parts(params.divergence, block, params)
    block = block.normalised()
    entropy, buckets = block.total(torch.mul(block.p, block.logp, out=block.spare).neg_(), present)
    gate = (entropy / buckets.clamp(min=2.0).log()).clamp_(0.0, 1.0) ** params.entropy_gate  # one bucket has no entropy
    other = replace(block, logp=block.logp.clone(), logq=block.logq.clone())  # forward KL leaves p and q as they are
    forward, forward_factor = _in_parts("forward_kl", other, params)
    value, factor = _in_parts(params.divergence, block, params)
    block.logq.mul_(((1 - gate) * factor)[:, None]).addcmul_(other.logq, (gate * forward_factor)[:, None])
    return (1 - gate) * value + gate * forward, 1.0


def _in_parts(name: str, block: Block, params: LossParams) -> tuple[Tensor, float]:
    """A divergence with this rank's parts of its values; what every rank has whole counts on the first."""
    value, factor = DIVERGENCES[name](block, params)
    if isinstance(value, Part):
        return value.rows, factor
    return value if block.shard is None else block.shard.once(value), factor
