"""The output head, the divergence, the cross-entropy and all their gradients, chunk of rows by chunk of rows, so that
logits of [rows, vocabulary] never exist for the whole batch.

Products are made for a chunk of rows at a time, as large as the memory budget allows. What follows them runs on blocks of a
few rows that stay in the processor's cache (losses/rows.py), in place, in buffers made once per call.
N rows, H hidden width, V vocabulary (this rank's part of it, with a group), n rows of a chunk, b rows of a block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.losses.checks import check_call
from potstill.losses.cross_tokenizer import OpenedChunks
from potstill.losses.dense import target_logits
from potstill.losses.divergences import LossParams
from potstill.losses.rows import Call, Opened, Scratch, loss_of_rows
from potstill.losses.vocab_parallel import VocabShard, shared_columns
from potstill.types import ChunkTarget, Dense, Head, PrefixMarginalTarget, Target

CHUNK_BYTES = 192 * 2**20  # of one [n, V] buffer; with few rows a product mostly moves the head about
BLOCK_BYTES = 2 * 2**20  # of one [b, V] buffer


class FusedLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable: Σ row_weight · (kd_weight · kd + ce_weight · ce)
    kd: Tensor  # [N], detached
    ce: Tensor  # [N], detached; zeros when there are no labels


def fused_linear_kd(
    hidden: Tensor,
    weight: Tensor,
    target: Target | Sequence[tuple[float | Tensor, Target]] | None,
    *,
    labels: Tensor | None = None,
    row_weight: Tensor | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
    kd_weight: float = 1.0,
    ce_weight: float | Tensor = 0.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy_gate: float | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Distillation and cross-entropy loss of `hidden` [N, H] through the output head `weight` [V, H].

    `target` may be a sequence of (weight, target) pairs, for several teachers over one head product; `kd` is then their
    weighted sum. A weight may be a tensor [N], one a row (the same for all rows of a chunk of a `ChunkTarget`). A dense target
    narrower than V leaves the student's further ids (padding of the vocabulary) out of the divergence's softmax; the
    cross-entropy is always over all of V.

    `ce_weight` may be a tensor [N] too, one a row; a weight below 0 makes the row's label less likely.

    `entropy_gate`: where the teacher's entropy, as a share of the largest possible one, is g, the row's divergence is
    (1 − g^gate) of the chosen one and g^gate of forward KL: the less sure the teacher, the more of its spread is learnt.

    `group`: `weight` and `bias` are this rank's slice of the vocabulary, in the order of the ranks; slices may be uneven. A
    dense target is cut at the same ids, or whole on every rank. `hidden` is the same on every rank, and its gradient is
    summed over the group. Ids are global.
    """
    targets = ((1.0, target),) if isinstance(target, Target) else tuple(target or ())
    head = Head(weight, bias, softcap, logit_scale)
    check_call(
        hidden,
        head,
        targets,
        labels=labels,
        row_weight=row_weight,
        divergence=divergence,
        temperature=temperature,
        beta=beta,
        alpha=alpha,
        ce_weight=ce_weight,
        entropy_gate=entropy_gate,
        chunk_rows=chunk_rows,
        sharded=group is not None,
    )
    columns, targets, same_ids = shared_columns(weight.shape[0], targets, group, hidden.device)
    if row_weight is None:
        row_weight = hidden.new_ones(hidden.shape[0], dtype=torch.float32)
    compute = torch.promote_types(hidden.dtype, torch.float32)
    call = Call(
        targets=[(w, OpenedChunks.of(t, compute) if isinstance(t, ChunkTarget) else t) for w, t in targets],
        labels=labels,
        row_weight=row_weight,
        divergence=divergence,
        knobs=LossParams(beta=beta, alpha=alpha),
        temperature=temperature,
        kd_weight=kd_weight if targets else 0.0,
        ce_weight=ce_weight,
        softcap=softcap,
        logit_scale=logit_scale,
        entropy_gate=entropy_gate,
        columns=columns,
        same_ids=same_ids,
        differentiate=torch.is_grad_enabled(),
    )
    return FusedLoss(*_FusedLinearKD.apply(hidden, weight, bias, call, chunk_rows))


class _FusedLinearKD(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            wants = [call.differentiate and t is not None and t.requires_grad for t in (hidden, weight, bias)]
            gradients, kd, ce = _chunks(hidden, weight, bias, call, chunk_rows, wants)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(kd, ce)
        loss = (call.row_weight * (call.kd_weight * kd + call.ce_weight * ce)).sum()
        return loss, kd, ce

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("the loss went backward a second time: the first time needs retain_graph=True")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return (*(None if g is None else g * grad_loss.to(g.dtype) for g in gradients), None, None)
        ctx.gradients = None  # nobody needs them again: a head's is large, so it is handed out and scaled where it is
        if not (grad_loss.device.type == "cpu" and grad_loss == 1.0):
            gradients = tuple(None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in gradients)
        return (*gradients, None, None)


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, chunk_rows: int | None, wants: Sequence[bool]
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
    """Gradients of hidden, weight and bias (None where not wanted), and the per-row values."""
    compute = torch.promote_types(hidden.dtype, torch.float32)
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    n = min(rows, chunk_rows or max(16, CHUNK_BYTES // (compute.itemsize * call.columns.widest)))
    # A dense target needs five such buffers at once, the others two at most: as much cache is good for more rows.
    dense = any(isinstance(target, Dense) for _, target in call.targets)
    b = max(1, min(n, (1 if dense else 4) * BLOCK_BYTES // (compute.itemsize * vocabulary)))
    if call.columns.group is not None or hidden.device.type != "cpu":
        b = n  # collectives and kernel launches are few when blocks are large
    grad_hidden = torch.empty_like(hidden) if wants[0] else None
    # The first chunk's product can be the first value, without zeros before it.
    unfilled = torch.empty_like if rows and hidden.dtype == compute else torch.zeros_like
    grad_weight = unfilled(weight, dtype=compute) if wants[1] else None
    grad_bias = torch.zeros(vocabulary, dtype=compute, device=hidden.device) if wants[2] else None
    kd = torch.zeros(rows, dtype=compute, device=hidden.device)
    ce = torch.zeros_like(kd)
    weight_h = weight.to(hidden.dtype)
    head = Head(weight_h, bias, None, call.logit_scale)
    opened = [target for _, target in call.targets if isinstance(target, OpenedChunks)]
    chunks = list(_cut(rows, n, opened))
    n = max((chunk.stop - chunk.start for chunk in chunks), default=n)
    student = _room(0, n, vocabulary, compute, hidden.device)
    teachers = [
        _room_for(target, place, n, compute, call.columns, hidden.device)
        for place, (_, target) in enumerate(call.targets, 1)
    ]
    scratch = Scratch(b, vocabulary, compute, hidden.device)

    for chunk in chunks:
        start, count = chunk.start, chunk.stop - chunk.start
        logits = head.logits(hidden[chunk], student[:count])  # its cap comes later, with its slope
        ready = [
            target_logits(target, chunk, buffer[:count], call.temperature, call.columns)
            if isinstance(target, Dense) and buffer is not None
            else None
            for (_, target), buffer in zip(call.targets, teachers, strict=True)
        ]
        for target in opened:
            target.begin(logits, chunk, call, b)
        for first in range(0, count, b):
            block = slice(first, min(first + b, count))
            at = slice(start + block.start, start + block.stop)
            kd[at], ce[at] = loss_of_rows(
                logits[block], [None if t is None else t[block] for t in ready], at, call, scratch, any(wants)
            )
        if not any(wants):
            continue
        grad = logits.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight_h, out=grad_hidden[chunk])
        if grad_weight is not None and hidden.dtype == compute:
            torch.addmm(grad_weight, grad.t(), hidden[chunk], beta=1.0 if start else 0.0, out=grad_weight)
        elif grad_weight is not None:
            grad_weight += grad.t() @ hidden[chunk]
        if grad_bias is not None:
            grad_bias += logits.sum(0)
    if grad_hidden is not None and call.columns.group is not None:
        dist.all_reduce(grad_hidden, group=call.columns.group)
    gradients = (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
    return gradients, kd, ce


def _cut(rows: int, n: int, opened: Sequence[Opened]) -> Iterator[slice]:
    """Chunks of about n rows that end where every opened target allows it."""
    start = 0
    while start < rows:
        stop = size = min(n, rows - start) + start
        while stop < rows:
            earliest = min([stop, *(target.breaks(stop) for target in opened)])
            if earliest == stop:
                break
            stop = earliest
            if stop <= start:  # one run of rows is longer than a chunk: let it be as long as that
                stop = size = size + 1
        yield slice(start, stop)
        start = stop


def _room_for(
    target: Target | Opened, place: int, rows: int, compute: torch.dtype, columns: VocabShard, device: torch.device
) -> Tensor | None:
    """Room for a chunk of a dense teacher's logits; the divergence works in it, so ready logits are copied there too."""
    if not isinstance(target, Dense):
        return None
    # A prefix-marginal one is whole on every rank, but its logits are made for this rank's ids.
    width = columns.beyond(target.width) if isinstance(target, PrefixMarginalTarget) else target.width
    return _room(place, rows, width, compute, device)


class _Kept(threading.local):
    """Room for the logits of a chunk, kept from call to call: a system fills fresh pages with zeros, which on a CPU can take
    7 % of a call's time. The allocators of other devices keep what was freed by themselves."""

    def __init__(self) -> None:
        self.flat: dict[tuple[int, torch.dtype], Tensor] = {}


_KEPT = _Kept()


def _room(place: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = rows * width
    if device.type != "cpu" or size * dtype.itemsize > CHUNK_BYTES:
        return torch.empty(rows, width, dtype=dtype, device=device)
    flat = _KEPT.flat.pop((place, dtype), None)
    if flat is None or flat.numel() < size:
        del flat
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            flat = torch.empty(size, dtype=dtype)
    _KEPT.flat[place, dtype] = flat
    return flat[:size].view(rows, width)
