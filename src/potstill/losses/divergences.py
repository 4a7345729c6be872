"""Divergences as closed forms over a block of rows, in place.

Each takes a Block: log-probabilities and probabilities of teacher (P) and student (Q) over the same buckets, [n, B]. It gives
the per-row value [n] and leaves in `logq` the gradient with respect to the student's bucket logits, up to a constant factor
that it gives back too. All of the block's buffers but `q` may be overwritten; nothing of their size is allocated.
A block comes before its last passes, which not everyone needs: `b.normalised()` makes them.

The gradient of any f(q) through a softmax is q·(r − Σ q·r) with r = ∂f/∂q. Row sums go through `block.total`, which also
sums over the ranks that share the vocabulary: several sums of one call travel together.
Golden values: tests/unit/losses/test_divergences.py. How to add one: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# exp(LOG_FLOOR) is 0 in float32 and float64. Log-probabilities are floored here, so that a bucket empty on one side costs
# a large but finite amount, and one empty on both sides costs 0.
LOG_FLOOR = -1e4
TINY = 1e-37  # a mixture of two empty buckets is empty; its logarithm must be finite, also where subnormals are flushed to 0


@dataclass(frozen=True)
class LossParams:
    beta: float = 0.5  # jsd
    alpha: float = 0.1  # skew_kl, skew_reverse_kl


@dataclass(frozen=True)
class Block:
    logp: Tensor  # [n, B]; with `normalizers`, lacks −log of its side's mass
    logq: Tensor  # as logp
    p: Tensor  # with `normalizers`, to be divided by its mass
    q: Tensor
    spare: Tensor  # scratch of the same shape
    total: Callable[..., tuple[Tensor, ...]]  # row sums [n] of one or more [n, B]
    normalizers: tuple[Tensor, Tensor] | None = None  # [n] each, of P and of Q; None: everything is normalised

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


Divergence = Callable[[Block, LossParams], tuple[Tensor, float]]


def forward_kl(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    (value,) = b.total(b.logp.sub_(b.logq).mul_(b.p))
    if b.normalizers is None:
        torch.sub(b.q, b.p, out=b.logq)
        return value, 1.0
    share = b.normalizers[0].reciprocal()
    torch.addcmul(b.q, b.p, -share[:, None], out=b.logq)
    return value * share + b.log_norm_diff(), 1.0


def reverse_kl(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    r = b.logq.sub_(b.logp)
    (mean,) = b.total(torch.mul(b.q, r, out=b.logp))
    r.sub_(mean[:, None]).mul_(b.q)
    return mean - b.log_norm_diff(), 1.0


def jsd(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    beta = knobs.beta
    if beta in (0.0, 1.0):
        return forward_kl(b, knobs) if beta == 0.0 else reverse_kl(b, knobs)
    b = b.normalised()
    logm = torch.lerp(b.q, b.p, beta, out=b.spare).clamp_(min=TINY).log_()
    left = b.logp.sub_(logm).mul_(b.p)
    r = b.logq.sub_(logm)
    left, right = b.total(left, torch.mul(b.q, r, out=b.p))
    r.sub_(right[:, None]).mul_(b.q)
    return beta * left + (1 - beta) * right, 1 - beta


def skew_kl(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    b = b.normalised()
    m = torch.lerp(b.q, b.p, knobs.alpha, out=b.spare).clamp_(min=TINY)
    r = torch.div(b.p, m, out=b.logq)  # ∂f/∂q is −(1 − α) times this
    value, mean = b.total(b.logp.sub_(m.log_()).mul_(b.p), torch.mul(b.q, r, out=b.p))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, knobs.alpha - 1


def skew_reverse_kl(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    b = b.normalised()
    m = torch.lerp(b.p, b.q, knobs.alpha, out=b.spare).clamp_(min=TINY)
    share = torch.div(b.q, m, out=b.p)
    r = b.logq.sub_(m.log_())
    torch.mul(b.q, r, out=b.logp)
    r.sub_(share, alpha=knobs.alpha)
    value, mean = b.total(b.logp, torch.mul(b.q, r, out=b.spare))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, 1.0


def tvd(b: Block, knobs: LossParams) -> tuple[Tensor, float]:
    b = b.normalised()
    difference = torch.sub(b.q, b.p, out=b.p)
    r = torch.sign(difference, out=b.logq)
    value, mean = b.total(difference.abs_(), torch.mul(b.q, r, out=b.spare))
    r.sub_(mean[:, None]).mul_(b.q)
    return 0.5 * value, 0.5


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_kl": skew_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "tvd": tvd,
}


def temperature_scale(divergence: str, temperature: float) -> float:
    """What a divergence at this temperature is multiplied by, so that its gradients keep their size."""
    return temperature if divergence == "tvd" else temperature**2
