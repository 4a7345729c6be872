"""The output head, the divergence, the cross-entropy and all their gradients, chunk of rows by chunk of rows, so that
logits of [rows, vocabulary] never exist for the whole batch.

Logits are made for a chunk of rows at a time, as large as the memory budget allows. What follows runs on blocks of a few rows
that stay in the processor's cache (losses/rows.py), in place, in buffers made once per call.
N rows, H hidden width, V vocabulary (this rank's part of it, with a group), n rows of a chunk, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from potstill.losses.cross_tokenizer import ChunkRows
from potstill.losses.dense import target_logits
from potstill.losses.divergences import LossParams
from potstill.losses.kernels import kernels_for
from potstill.losses.rows import CHUNK_BYTES, Buffers, Call, Comparison, DenseRows, SampledRows, TopKRows, loss_of_rows
from potstill.parallel.vocab import VocabShard, shard_targets
from potstill.products import wide_product
from potstill.types import (
    ChunkTarget,
    Dense,
    Head,
    Ints,
    PrefixMarginalTarget,
    SampledTarget,
    Target,
    TargetCheck,
    TopKTarget,
    expect,
)

BLOCK_BYTES = 2 * 2**20  # of one [b, V] buffer
GPU_CHUNK_BYTES = 2**30  # of one [n, V] buffer: every chunk reads the head and reads and writes its gradient, once
Targets = Sequence[tuple[float | Tensor, Target]]


class FusedLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable: Σ row_weight · (kd_weight · kd + ce_weight · ce)
    kd: Tensor  # [N], detached
    ce: Tensor  # [N], detached; zeros when there are no labels
    here: Tensor | None = None  # [N]; with row_values=False: rows whose `ce` is this rank's; None: both are whole


def fused_linear_kd(
    hidden: Tensor,
    weight: Tensor,
    target: Target | Targets | None,
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
    token_clip: float | None = None,
    group: dist.ProcessGroup | None = None,
    row_values: bool = True,
    chunk_rows: int | None = None,
) -> FusedLoss:
    """Distillation and cross-entropy loss of `hidden` [N, H] through the output head `weight` [V, H].

    `target` may be a sequence of (weight, target) pairs, for several teachers over one head product; `kd` is then their
    weighted sum. A weight may be a tensor [N], one per row (the same for all rows of a chunk of a `ChunkTarget`). A dense
    target narrower than V leaves the student's further ids (padding of the vocabulary) out of the divergence's softmax; the
    cross-entropy is always over all of V.

    `ce_weight` may be a tensor [N] too, one per row; a weight below 0 makes the row's label less likely.

    `entropy_gate`: where the teacher's entropy, as a share of the largest possible one, is g, the row's divergence is
    (1 − g^gate) of the chosen one and g^gate of forward KL: the less sure the teacher, the more of its spread is learnt.

    `token_clip`: a target's value at a row, with its temperature's factor, is at most this; a row beyond it has no gradient
    (not for a `ChunkTarget`, whose values are of several rows).

    `group`: `weight` and `bias` are this rank's slice of the vocabulary, in the order of the ranks; slices may be uneven. A
    dense target is cut at the same ids, or whole on every rank. `hidden` is the same on every rank, and its gradient is
    summed over the group. Ids are global.

    `row_values`: with False and a group, `kd` and `ce` are this rank's parts, whose sum over the group is the row's value: two
    floats of each row need not travel. A row's cross-entropy is whole on the rank that has its label, and 0 elsewhere.
    """
    params = LossParams(divergence, temperature, beta, alpha, entropy_gate)
    head = Head(weight, bias, softcap, logit_scale)
    targets: Targets = ((1.0, target),) if isinstance(target, Target) else tuple(target or ())
    if token_clip is not None and (not token_clip > 0 or any(isinstance(t, ChunkTarget) for _, t in targets)):
        raise ValueError(f"token_clip {token_clip} must be above 0, and goes without a ChunkTarget")
    _check(hidden, head, targets, labels, row_weight, ce_weight, chunk_rows, params, group is not None)
    shard, targets, same_ids = shard_targets(head.width, targets, group, hidden.device)
    compute = torch.promote_types(hidden.dtype, torch.float32)
    call = Call(
        comparisons=[(share, _comparison(t, i, shard, temperature)) for i, (share, t) in enumerate(targets)],
        params=params,
        row_weight=hidden.new_ones(hidden.shape[0], dtype=torch.float32) if row_weight is None else row_weight,
        shard=shard,
        buffers=Buffers(compute, hidden.device),
        labels=labels,
        kd_weight=kd_weight if targets else 0.0,
        ce_weight=ce_weight,
        softcap=softcap,
        logit_scale=logit_scale,
        token_clip=token_clip,
        same_ids=same_ids,
        row_values=row_values,
    )
    here = None
    if group is not None and not row_values:
        here = (
            shard.once(torch.ones_like(call.row_weight, dtype=torch.bool)) if labels is None else shard.local(labels)[1]
        )
    fitting = rows_of_a_chunk(hidden.device, compute.itemsize * shard.widest)
    return FusedLoss(*fused_loss(_HeadProduct(hidden, head, shard, compute), call, chunk_rows or fitting), here)


def rows_of_a_chunk(device: torch.device, row_bytes: int) -> int:
    """How many rows of logits fit the memory that a device gives to one buffer of them."""
    if device.type != "cuda":
        return max(16, CHUNK_BYTES // row_bytes)
    # Few passes over the head and its gradient; and products in whole tiles.
    return max(1, GPU_CHUNK_BYTES // row_bytes // 256) * 256


def _check(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    labels: Tensor | None,
    row_weight: Tensor | None,
    ce_weight: float | Tensor,
    chunk_rows: int | None,
    params: LossParams,
    sharded: bool,
) -> None:
    """What is refused, from shapes, types and settings alone: no device value is read."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
    head.check(hidden)
    if not head.width:
        raise ValueError("weight has no columns of the vocabulary: it must be [V, H] with V at least 1")
    rows = hidden.shape[0]
    if (isinstance(ce_weight, Tensor) or ce_weight) and labels is None:
        raise ValueError("ce_weight needs labels")
    if labels is not None:
        expect("labels", labels, rows, integer=True)
    shares = [("the weight of a target", share) for share, _ in targets]
    for name, value in (("row_weight", row_weight), ("ce_weight", ce_weight), *shares):
        if isinstance(value, Tensor):
            expect(name, value, rows)
    fit = TargetCheck(rows, None if sharded else head.width, params.divergence, params.temperature, labels is not None)
    for _, target in targets:
        if not isinstance(target, Target):
            raise ValueError(f"{type(target).__name__} is not a Target: DenseTarget(…), TopKTarget, SampledTarget, …")
        target.check(fit)


def _comparison(target: Target, number: int, shard: VocabShard, temperature: float) -> Comparison:
    if isinstance(target, Dense):
        read = partial(target_logits, target, temperature=temperature, shard=shard)
        # A prefix-marginal one is whole on every rank, but its logits are made for this rank's ids.
        width = shard.held(target.width) if isinstance(target, PrefixMarginalTarget) else target.width
        return DenseRows(read, width, f"teacher {number}")
    kinds: dict[type[Target], Callable[[Any], Comparison]] = {
        TopKTarget: TopKRows,
        SampledTarget: SampledRows,
        ChunkTarget: ChunkRows,
    }
    return kinds[type(target)](target)


class Student(Protocol):
    """The side that learns: where its logits come from, and where their gradient goes."""

    rows: int
    wants: bool  # some leaf wants a gradient
    narrow: torch.dtype  # what that of the logits is rounded to, sooner or later

    @property
    def leaves(self) -> Sequence[Tensor | None]:
        """What autograd knows it by."""
        ...

    def logits(self, chunk: slice, out: Tensor) -> Tensor:
        """Raw ones, into a buffer."""
        ...

    def back(self, chunk: slice, grad: Tensor) -> None:
        """Take the gradient of a chunk's logits."""
        ...

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of the leaves, once all chunks are through."""
        ...


class _HeadProduct:
    """Hidden states and a head: logits are a product with the head, and so are the gradients."""

    def __init__(self, hidden: Tensor, head: Head, shard: VocabShard, compute: torch.dtype) -> None:
        self.leaves = (hidden, head.weight, head.bias)
        self.rows, self.narrow, self._hidden, self._shard = hidden.shape[0], hidden.dtype, hidden, shard
        # Its cap comes later, block by block, together with the slope of the cap.
        self._head = replace(head, weight=head.weight.to(hidden.dtype), softcap=None)
        enabled = torch.is_grad_enabled()
        of_hidden, of_weight, of_bias = (enabled and x is not None and x.requires_grad for x in self.leaves)
        self.wants = of_hidden or of_weight or of_bias
        self._grad_hidden = torch.empty_like(hidden) if of_hidden else None
        self._grad_weight = torch.empty_like(head.weight, dtype=compute) if of_weight else None
        self._chunks = 0  # that are in it
        self._grad_bias = torch.zeros(head.width, dtype=compute, device=hidden.device) if of_bias else None

    def logits(self, chunk: slice, out: Tensor) -> Tensor:
        return self._head.logits(self._hidden[chunk], out)

    def back(self, chunk: slice, grad: Tensor) -> None:
        hidden = self._hidden[chunk]
        narrow = grad.to(hidden.dtype)
        if self._grad_hidden is not None:
            torch.mm(narrow, self._head.weight, out=self._grad_hidden[chunk])
        if self._grad_weight is not None:
            wide_product(narrow.t(), hidden, self._grad_weight, add=self._chunks > 0)
        if self._grad_bias is not None:
            self._grad_bias += grad.sum(0, dtype=self._grad_bias.dtype)
        self._chunks += 1

    def gradients(self) -> tuple[Tensor | None, ...]:
        if self._grad_hidden is not None and self._shard.group is not None:
            dist.all_reduce(self._grad_hidden, group=self._shard.group)
        if self._grad_weight is not None and not self._chunks:
            self._grad_weight.zero_()
        found = (self._grad_hidden, self._grad_weight, self._grad_bias)
        return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in zip(found, self.leaves, strict=True))


def fused_loss(student: Student, call: Call, chunk_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum over all rows (differentiable), and the rows' divergence and cross-entropy, whole or in parts."""
    call = replace(call, differentiate=student.wants)
    found: tuple[Tensor, Tensor, Tensor] = _Fused.apply(student, call, chunk_rows, *student.leaves)
    return found


class _Fused(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, student: Student, call: Call, chunk_rows: int, *leaves: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(call.row_weight.device.type, enabled=False):
            kd, ce = _all_rows(student, call, chunk_rows)
            if call.row_values:
                kd, ce = _whole(kd, ce, call)
            loss = (call.row_weight * (call.kd_weight * kd + call.ce_weight * ce)).sum()
            if not call.row_values and call.shard.group is not None:
                dist.all_reduce(loss, group=call.shard.group)
            ctx.gradients = student.gradients()
        ctx.mark_non_differentiable(kd, ce)
        return loss, kd, ce

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("the loss went backward a second time: the first time needs retain_graph=True")
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if not kept:
            # Nobody needs them again: a head's is large, so it is handed out and scaled where it is.
            ctx.gradients = None
        scale = torch.mul if kept else Tensor.mul_
        return (None, None, None, *(None if g is None else scale(g, grad_loss.to(g.dtype)) for g in gradients))


def _whole(kd: Tensor, ce: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The rows' values from the ranks' parts, in one exchange for all chunks."""
    if not call.comparisons or call.labels is None:
        (one,) = call.shard.total(kd if call.comparisons else ce)
        return (one, ce) if call.comparisons else (kd, one)
    kd, ce = call.shard.total(kd, ce)
    return kd, ce


def _all_rows(student: Student, call: Call, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """This rank's parts of the rows' divergence and cross-entropy, with the gradients left with the student."""
    dtype, device, shard, rows = call.buffers.dtype, call.buffers.device, call.shard, student.rows
    kernels = kernels_for(call)
    call = replace(call, padded=kernels is not None)
    kd, ce = torch.zeros(2, rows, dtype=dtype, device=device)
    joined = np.concatenate([Comparison.joined, *(c.joined for _, c in call.comparisons)])
    chunks = list(_cut(rows, max(1, min(rows, chunk_rows)), joined))
    largest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    room = call.room("student", largest, shard.size)
    for chunk in chunks:
        count = chunk.stop - chunk.start
        logits = student.logits(chunk, room[:count])
        for _, comparison in call.comparisons:
            comparison.begin(logits, chunk, call)
        if kernels is not None:
            grad = _room_for_gradient(student, call, logits)
            kd[chunk], ce[chunk] = kernels(logits, grad, chunk, call)
        else:
            grad = logits
            for at in _blocks(chunk, call):
                inside = slice(at.start - chunk.start, at.stop - chunk.start)
                kd[at], ce[at] = loss_of_rows(logits[inside], at, call)
        if grad is not None and student.wants:
            student.back(chunk, grad)
    call.buffers.free()
    return kd, ce


def _room_for_gradient(student: Student, call: Call, logits: Tensor) -> Tensor | None:
    """In place of the logits, or narrow at once where it would be narrowed later: half as much to write and to read."""
    if not student.wants:
        return None
    if student.narrow not in (torch.bfloat16, torch.float16):
        return logits
    return call.buffers.padded("gradient", logits.shape[0], logits.shape[1], student.narrow)


def _blocks(chunk: slice, call: Call) -> Iterator[slice]:
    """Rows that are worked on together."""
    dtype, shard, count = call.buffers.dtype, call.shard, chunk.stop - chunk.start
    if shard.group is not None or call.buffers.device.type != "cpu":
        # Collectives and launches are few when blocks are large. Ranks cut alike.
        b = CHUNK_BYTES // (dtype.itemsize * shard.widest)
    else:
        # A dense target needs five such buffers at once, the others two at most: as much cache is good for more rows.
        several = 1 if any(isinstance(comparison, DenseRows) for _, comparison in call.comparisons) else 4
        b = several * BLOCK_BYTES // (dtype.itemsize * max(1, shard.size))
    b = max(1, min(count, b))
    return (slice(first, min(first + b, chunk.stop)) for first in range(chunk.start, chunk.stop, b))


def _cut(rows: int, n: int, joined: Ints) -> Iterator[slice]:
    """Chunks of at most n rows; of more where that many are joined, each to the row before it."""
    ends = np.setdiff1d(np.arange(rows + 1), joined)
    start = 0
    while start < rows:
        at = int(np.searchsorted(ends, start + n, side="right")) - 1
        stop = int(ends[at] if ends[at] > start else ends[at + 1])
        yield slice(start, stop)
        start = stop
