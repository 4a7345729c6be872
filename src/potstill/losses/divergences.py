"""Divergences as closed forms. Each takes log-probabilities of teacher (P) and student (Q) over the same buckets, [n, B],
and gives the per-row value [n] and its gradient with respect to the student's bucket logits [n, B].

The gradient of any f(q) through a softmax is q·(r − Σ q·r) with r = ∂f/∂q, which the closed forms below spell out.
Golden values: tests/unit/test_divergences.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(LOG_FLOOR) is 0 in float32 and float64. Log-probabilities are floored here, so that a bucket empty on one side costs
# a large but finite amount, and one empty on both sides costs 0.
LOG_FLOOR = -1e4


@dataclass(frozen=True)
class Knobs:
    beta: float = 0.5  # jsd
    alpha: float = 0.1  # skew_kl, skew_reverse_kl


Divergence = Callable[[Tensor, Tensor, Knobs], tuple[Tensor, Tensor]]


def _through_softmax(q: Tensor, r: Tensor) -> Tensor:
    return q * (r - (q * r).sum(-1, keepdim=True))


def _mixture(log_a: Tensor, weight_a: float, log_b: Tensor) -> Tensor:
    """log(w·a + (1−w)·b)"""
    return torch.logaddexp(log_a + math.log(weight_a), log_b + math.log1p(-weight_a))


def forward_kl(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    p = logp.exp()
    return (p * (logp - logq)).sum(-1), logq.exp() - p


def reverse_kl(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    q, r = logq.exp(), logq - logp
    value = (q * r).sum(-1)
    return value, q * (r - value[:, None])


def jsd(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    if knobs.beta == 0.0:
        return forward_kl(logp, logq, knobs)
    if knobs.beta == 1.0:
        return reverse_kl(logp, logq, knobs)
    p, q = logp.exp(), logq.exp()
    logm = _mixture(logp, knobs.beta, logq)
    r = (1 - knobs.beta) * (logq - logm)
    value = knobs.beta * (p * (logp - logm)).sum(-1) + (q * r).sum(-1)
    return value, _through_softmax(q, r)


def skew_kl(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    p, q = logp.exp(), logq.exp()
    logm = _mixture(logp, knobs.alpha, logq)
    r = -(1 - knobs.alpha) * (logp - logm).exp()
    return (p * (logp - logm)).sum(-1), _through_softmax(q, r)


def skew_reverse_kl(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    q = logq.exp()
    logm = _mixture(logq, knobs.alpha, logp)
    r = logq - logm
    return (q * r).sum(-1), _through_softmax(q, r - knobs.alpha * r.exp())


def tvd(logp: Tensor, logq: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    q = logq.exp()
    difference = q - logp.exp()
    return 0.5 * difference.abs().sum(-1), _through_softmax(q, 0.5 * difference.sign())


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
