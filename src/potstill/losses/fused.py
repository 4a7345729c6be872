"""The output head, the divergence, the cross-entropy and all their gradients, chunk of rows by chunk of rows, so that
logits of [rows, vocabulary] never exist for the whole batch.

N rows, H hidden width, V vocabulary, n rows of a chunk, K entries of a truncated target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from potstill.losses.divergences import DIVERGENCES, LOG_FLOOR, Knobs, temperature_scale
from potstill.types import DenseTarget, SampledTarget, Target, TopKTarget

CHUNK_BYTES = 64 * 2**20  # of one [n, V] buffer


class FusedLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable: Σ row_weight · (kd_weight · kd + ce_weight · ce)
    kd: Tensor  # [N], detached
    ce: Tensor  # [N], detached; zeros when there are no labels


def fused_linear_kd(
    hidden: Tensor,
    weight: Tensor,
    target: Target | Sequence[tuple[float, Target]] | None,
    *,
    labels: Tensor | None = None,
    row_weight: Tensor | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Distillation and cross-entropy loss of `hidden` [N, H] through the output head `weight` [V, H].

    `target` may be a sequence of (weight, target) pairs, for several teachers over one head product; `kd` is then their
    weighted sum. A dense target narrower than V leaves the student's further ids (padding of the vocabulary) out of the
    divergence's softmax; the cross-entropy is always over all of V.
    """
    targets = _as_pairs(target)
    _check(hidden, weight, targets, labels, divergence, temperature, beta, ce_weight)
    call = _Call(
        targets=targets,
        labels=labels,
        divergence=divergence,
        knobs=Knobs(beta=beta, alpha=alpha),
        temperature=temperature,
        kd_weight=kd_weight if targets else 0.0,
        ce_weight=ce_weight,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_rows=chunk_rows or max(16, CHUNK_BYTES // (4 * weight.shape[0])),
        differentiate=torch.is_grad_enabled(),
    )
    if row_weight is None:
        row_weight = hidden.new_ones(hidden.shape[0], dtype=torch.float32)
    loss, kd, ce = _FusedLinearKD.apply(hidden, weight, bias, row_weight, call)
    return FusedLoss(loss, kd, ce)


@dataclass(frozen=True)
class _Call:
    """Everything of a call that is not differentiated."""

    targets: Sequence[tuple[float, Target]]
    labels: Tensor | None
    divergence: str
    knobs: Knobs
    temperature: float
    kd_weight: float
    ce_weight: float
    softcap: float | None
    logit_scale: float
    chunk_rows: int
    differentiate: bool


class _FusedLinearKD(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_weight: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return _forward(ctx, hidden, weight, bias, row_weight, call)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = (None if g is None else g * grad_loss for g in ctx.gradients)
        return (*scaled, None, None)


def _forward(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_weight: Tensor, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    compute = torch.promote_types(hidden.dtype, torch.float32)
    wants = [call.differentiate and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    grad_hidden = torch.empty_like(hidden) if wants[0] else None
    grad_weight = torch.zeros_like(weight, dtype=compute) if wants[1] else None
    grad_bias = torch.zeros_like(weight[:, 0], dtype=compute) if wants[2] else None
    weight_h = weight.to(hidden.dtype)
    kd = torch.zeros(hidden.shape[0], dtype=compute, device=hidden.device)
    ce = torch.zeros_like(kd)

    for start in range(0, hidden.shape[0], call.chunk_rows):
        rows = slice(start, min(start + call.chunk_rows, hidden.shape[0]))
        logits = head_logits(hidden[rows], weight_h, bias, call.softcap, call.logit_scale)
        grad = torch.zeros_like(logits)
        for share, target in call.targets:
            value, grad_kd, width = _kd_rows(logits, target, rows, call)
            kd[rows] += share * value
            grad[:, :width].add_(grad_kd, alpha=share * call.kd_weight)
        if call.labels is not None:
            label = call.labels[rows, None]
            logq = torch.log_softmax(logits, -1)
            ce[rows] = -logq.gather(-1, label).squeeze(-1)
            if call.ce_weight:
                grad.add_(logq.exp_(), alpha=call.ce_weight)
                grad.scatter_add_(-1, label, torch.full_like(label, -call.ce_weight, dtype=compute))
        if not any(wants):
            continue
        grad.mul_(row_weight[rows, None])
        if call.softcap is not None:
            grad.mul_(1 - (logits / call.softcap) ** 2)
        if call.logit_scale != 1.0:
            grad.mul_(call.logit_scale)
        grad_h = grad.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad_h, weight_h, out=grad_hidden[rows])
        if grad_weight is not None and hidden.dtype == compute:
            grad_weight.addmm_(grad_h.t(), hidden[rows])
        elif grad_weight is not None:
            grad_weight += grad_h.t() @ hidden[rows]
        if grad_bias is not None:
            grad_bias += grad.sum(0)

    ctx.gradients = (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
    ctx.mark_non_differentiable(kd, ce)
    loss = (row_weight * (call.kd_weight * kd + call.ce_weight * ce)).sum()
    return loss, kd, ce


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, logit_scale: float = 1.0
) -> Tensor:
    """softcap(scale · (hidden · weightᵀ + bias)), in float32 at least."""
    logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    if bias is not None:
        logits += bias
    if logit_scale != 1.0:
        logits *= logit_scale
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / T), floored: see divergences.LOG_FLOOR."""
    return torch.log_softmax(logits / temperature, -1).clamp_(min=LOG_FLOOR)


def target_logits(target: DenseTarget, rows: slice) -> Tensor:
    """A dense teacher's logits at some rows."""
    if target.logits is not None:
        return target.logits[rows].to(torch.promote_types(target.logits.dtype, torch.float32))
    assert target.hidden is not None and target.weight is not None
    weight = target.weight.to(target.hidden.dtype)
    return head_logits(target.hidden[rows], weight, target.bias, target.softcap, target.logit_scale)


def _kd_rows(logits: Tensor, target: Target, rows: slice, call: _Call) -> tuple[Tensor, Tensor, int]:
    """Scaled divergence of some rows, its gradient with respect to the first `width` logits, and that width."""
    closed_form, t = DIVERGENCES[call.divergence], call.temperature
    scale = temperature_scale(call.divergence, t)
    if isinstance(target, DenseTarget):
        teacher = target_logits(target, rows).to(logits.dtype)
        width = teacher.shape[-1]
        value, grad = closed_form(log_probs(teacher, t), log_probs(logits[:, :width], t), call.knobs)
        return value * scale, grad.mul_(scale / t), width

    width = logits.shape[-1]
    z, ids = logits / t, target.ids[rows]
    if isinstance(target, SampledTarget):
        shares = target.weights[rows].to(z.dtype)
        logq = torch.log_softmax(z, -1)
        value = -(shares * logq.gather(-1, ids)).sum(-1)
        grad = logq.exp_().mul_(shares.sum(-1, keepdim=True)).scatter_add_(-1, ids, -shares)
        return value * scale, grad.mul_(scale / t), width

    # The student's rest is a sum over its own other ids, not 1 − Σ: the subtraction loses everything in float32 when the
    # student has nearly all of its mass on the k ids.
    kept = z.gather(-1, ids)
    rest = z.scatter(-1, ids, float("-inf"))
    rest_lse = rest.logsumexp(-1, keepdim=True)
    logq = log_probs(torch.cat([kept, rest_lse], -1))
    logp = torch.cat([target.logprobs[rows], target.tail[rows, None]], -1).to(z.dtype).clamp(min=LOG_FLOOR)
    value, grad_buckets = closed_form(logp, logq, call.knobs)
    grad = rest.sub_(rest_lse.clamp(min=LOG_FLOOR)).exp_().mul_(grad_buckets[:, -1:])
    grad.scatter_(-1, ids, grad_buckets[:, :-1])
    return value * scale, grad.mul_(scale / t), width


def _as_pairs(target: Target | Sequence[tuple[float, Target]] | None) -> Sequence[tuple[float, Target]]:
    if target is None:
        return ()
    return ((1.0, target),) if isinstance(target, Target) else tuple(target)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Sequence[tuple[float, Target]],
    labels: Tensor | None,
    divergence: str,
    temperature: float,
    beta: float,
    ce_weight: float,
) -> None:
    """Refuse what cannot be right, from shapes and types alone: no device value is read."""
    n, v = hidden.shape[0], weight.shape[0]
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; there are {', '.join(DIVERGENCES)}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, H] and [V, H]")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 and 1, not {beta}")
    if ce_weight and labels is None:
        raise ValueError("ce_weight needs labels")
    if labels is not None and labels.shape != (n,):
        raise ValueError(f"labels {list(labels.shape)} must be [{n}], one a row")
    for _, target in targets:
        if isinstance(target, DenseTarget):
            _check_dense(target, n, v)
            continue
        if isinstance(target, SampledTarget) and divergence != "forward_kl":
            raise ValueError(f"sampled targets are unbiased for forward_kl only, not for {divergence}")
        other = target.logprobs if isinstance(target, TopKTarget) else target.weights
        if (
            target.ids.dim() != 2
            or target.ids.shape[0] != n
            or target.ids.shape != other.shape
            or not target.ids.shape[1]
        ):
            raise ValueError(
                f"target ids {list(target.ids.shape)} and values {list(other.shape)} must both be [{n}, K]"
            )


def _check_dense(target: DenseTarget, n: int, v: int) -> None:
    if target.logits is not None:
        rows, width = target.logits.shape[0], target.logits.shape[-1]
    elif target.hidden is not None and target.weight is not None:
        rows, width = target.hidden.shape[0], target.weight.shape[0]
    else:
        raise ValueError("a DenseTarget needs hidden and weight, or logits")
    if rows != n:
        raise ValueError(f"the teacher has {rows} rows and the student {n}")
    if width > v:
        raise ValueError(
            f"the teacher has {width} ids and the student's head {v}: narrow the teacher to the shared ids"
        )
