"""Divergences as closed forms over a block of rows, in place.

Each takes a Block: log-probabilities and probabilities of teacher (P) and student (Q) over the same buckets, [n, B]. It gives
the per-row value [n] and leaves in `logq` the gradient with respect to the student's bucket logits, up to a constant factor
that it gives back too. All of the block's buffers but `q` may be overwritten; nothing of their size is allocated.

The gradient of any f(q) through a softmax is q·(r − Σ q·r) with r = ∂f/∂q. Row sums go through `block.total`, which also
sums over the ranks that share the vocabulary: several sums of one call travel together.
Golden values: tests/unit/test_divergences.py. How to add one: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(LOG_FLOOR) is 0 in float32 and float64. Log-probabilities are floored here, so that a bucket empty on one side costs
# a large but finite amount, and one empty on both sides costs 0.
LOG_FLOOR = -1e4
TINY = 1e-37  # a mixture of two empty buckets is empty; its logarithm must be finite, also where subnormals are flushed to 0


@dataclass(frozen=True)
class Knobs:
    beta: float = 0.5  # jsd
    alpha: float = 0.1  # skew_kl, skew_reverse_kl


@dataclass(frozen=True)
class Block:
    logp: Tensor  # [n, B]
    logq: Tensor
    p: Tensor
    q: Tensor
    spare: Tensor  # scratch of the same shape
    total: Callable[..., tuple[Tensor, ...]]  # row sums [n] of one or more [n, B]


Divergence = Callable[[Block, Knobs], tuple[Tensor, float]]


def forward_kl(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
    torch.sub(b.logp, b.logq, out=b.spare).mul_(b.p)
    torch.sub(b.q, b.p, out=b.logq)
    return b.total(b.spare)[0], 1.0


def reverse_kl(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
    r = b.logq.sub_(b.logp)
    (value,) = b.total(torch.mul(b.q, r, out=b.spare))
    r.sub_(value[:, None]).mul_(b.q)
    return value, 1.0


def jsd(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
    beta = knobs.beta
    if beta in (0.0, 1.0):
        return forward_kl(b, knobs) if beta == 0.0 else reverse_kl(b, knobs)
    logm = torch.lerp(b.q, b.p, beta, out=b.spare).clamp_(min=TINY).log_()
    left = b.logp.sub_(logm).mul_(b.p)
    r = b.logq.sub_(logm)
    left, right = b.total(left, torch.mul(b.q, r, out=b.spare))
    r.sub_(right[:, None]).mul_(b.q)
    return beta * left + (1 - beta) * right, 1 - beta


def skew_kl(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
    m = torch.lerp(b.q, b.p, knobs.alpha, out=b.spare).clamp_(min=TINY)
    r = torch.div(b.p, m, out=b.logq)  # ∂f/∂q is −(1 − α) times this
    value, mean = b.total(b.logp.sub_(m.log_()).mul_(b.p), torch.mul(b.q, r, out=b.p))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, knobs.alpha - 1


def skew_reverse_kl(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
    m = torch.lerp(b.p, b.q, knobs.alpha, out=b.spare).clamp_(min=TINY)
    share = torch.div(b.q, m, out=b.p)
    r = b.logq.sub_(m.log_())
    torch.mul(b.q, r, out=b.logp)
    r.sub_(share, alpha=knobs.alpha)
    value, mean = b.total(b.logp, torch.mul(b.q, r, out=b.spare))
    r.sub_(mean[:, None]).mul_(b.q)
    return value, 1.0


def tvd(b: Block, knobs: Knobs) -> tuple[Tensor, float]:
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
