"""The divergences on ready logits, as a module for other people's training loops.

It replaces NeMo Automodel's class of the same name one for one. Unlike the rest of potstill's losses it sees labels and
masks, since those loops have nothing else; rows are made of them here, and the engine (losses/fused.py) does the rest.
N rows ([B, S] or any other leading shape, flat), V vocabulary (this rank's part of it), n rows of a block.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from potstill.losses.divergences import LossParams
from potstill.losses.fused import BLOCK_BYTES, fused_loss
from potstill.losses.rows import CHUNK_BYTES, Buffers, Call, DenseRows
from potstill.parallel.vocab import VocabShard, shard_targets
from potstill.types import LogitsTarget

ROWS_OF_A_GROUP = 256  # at a time, where ranks share the vocabulary


class KDLoss(nn.Module):
    """Σ over supervised positions of T² · D(teacher, student), divided by their number or by `num_batch_labels`.

    ignore_index: positions with this label take no part, whatever their logits are.
    fp32_upcast: with False, logits are divided by the temperature in their own dtype, as NeMo's class does, and in
        float32 otherwise. Softmax, sums and gradient are in float32 at least either way; float64 stays float64.
    tp_group: plain logits are this rank's slice of the vocabulary, in the order of the group's ranks; slices may be uneven.
        A DTensor says itself how it is sharded, and needs no group.
    chunk_size: at most so many rows are worked on at a time; 0 takes what fits a fixed memory budget.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        temperature: float = 1.0,
        fp32_upcast: bool = True,
        tp_group: dist.ProcessGroup | None = None,
        chunk_size: int = 0,
        *,
        divergence: str = "forward_kl",
        beta: float = 0.5,
        alpha: float = 0.1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.fp32_upcast = fp32_upcast
        self.tp_group = tp_group
        self.chunk_size = chunk_size
        self.divergence = divergence
        self.beta = beta
        self.alpha = alpha
        self._check()

    def _check(self) -> LossParams:
        if self.chunk_size < 0:
            raise ValueError(f"chunk_size must be 0 (chosen by memory) or above, not {self.chunk_size}")
        return LossParams(self.divergence, self.temperature, self.beta, self.alpha)

    def extra_repr(self) -> str:
        return f"divergence={self.divergence}, temperature={self.temperature}, ignore_index={self.ignore_index}"

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        num_batch_labels: int | Tensor | None = None,
    ) -> Tensor:
        """Scalar loss of logits [B, S, V] or [N, V], at labels [B, S] or [N] that are already shifted.

        `num_batch_labels` is the number of supervised positions of the whole optimizer step; without it the loss is the
        mean over this call's. The teacher gets no gradient. Logits may be DTensors sharded over the vocabulary; the loss is
        then the same on every rank, and each rank's gradient is that of its own slice.
        """
        params = self._check()  # attributes may have been set since
        student, teacher, labels, shard = _on_this_rank(student_logits, teacher_logits.detach(), labels, self.tp_group)
        if isinstance(num_batch_labels, (int, float)) and num_batch_labels < 0:
            raise ValueError(f"num_batch_labels must not be negative, and is {num_batch_labels}")
        supervised = labels.reshape(-1) != self.ignore_index
        divisor = supervised.sum() if num_batch_labels is None else num_batch_labels
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                raise ValueError(f"num_batch_labels {list(divisor.shape)} must be one number")
            divisor = divisor.reshape(()).to(student.device)
        compute = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
        # Not a product: with no supervised position the divisor may be 0.
        row_weight = torch.where(supervised, torch.ones_like(supervised, dtype=compute) / divisor, 0.0)
        rows, masked = torch.arange(len(supervised), device=student.device), None
        if _reading_is_free(supervised):
            rows, row_weight = rows[supervised], row_weight[supervised]
        else:
            masked = ~supervised
        rounded = 1.0 if self.fp32_upcast else self.temperature
        own, other = (_ReadyLogits(logits, rows, masked, rounded) for logits in (student, teacher))
        call = Call(
            comparisons=((1.0, DenseRows(other.logits, teacher.shape[-1])),),
            params=params,
            row_weight=row_weight,
            shard=shard,
            buffers=Buffers(compute, student.device),
            same_ids=True,
            row_values=False,
        )
        # There is no product that needs many rows: on a CPU a chunk stays in its cache. With a group all ranks cut alike.
        budget = BLOCK_BYTES if student.device.type == "cpu" else CHUNK_BYTES
        fitting = max(1, budget // (compute.itemsize * max(1, shard.size))) if shard.group is None else ROWS_OF_A_GROUP
        return fused_loss(own, call, min(fitting, self.chunk_size) if self.chunk_size else fitting)[0]


def _reading_is_free(mask: Tensor) -> bool:
    """Choosing rows by a mask reads it. Elsewhere than on the CPU the host would wait for the device, so all rows are gone
    through there, the masked ones emptied and with weight 0."""
    return mask.device.type == "cpu"


class _ReadyLogits:
    """Some positions of logits [..., V]. By index, since flattening a shifted view would copy all of it."""

    def __init__(self, logits: Tensor, rows: Tensor, masked: Tensor | None, rounded: float) -> None:
        self.leaves, self.rows, self.wants = (logits,), len(rows), torch.is_grad_enabled() and logits.requires_grad
        self.narrow = logits.dtype
        self._logits, self._rows, self._masked, self._rounded = logits, rows, masked, rounded
        self._grad = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device) if self.wants else None

    def logits(self, chunk: slice, out: Tensor) -> Tensor:
        chosen = self._logits[torch.unravel_index(self._rows[chunk], self._logits.shape[:-1])]
        if self._rounded != 1.0:  # as they are when the temperature divides them in their own type
            out.copy_(chosen.div_(self._rounded)).mul_(self._rounded)
        else:
            out.copy_(chosen)
        return out if self._masked is None else out.masked_fill_(self._masked[chunk, None], 0.0)

    def back(self, chunk: slice, grad: Tensor) -> None:
        assert self._grad is not None
        flat = self._grad.view(math.prod(self._grad.shape[:-1]), self._grad.shape[-1])
        flat.index_copy_(0, self._rows[chunk], grad.to(flat.dtype))

    def gradients(self) -> tuple[Tensor | None]:
        return (self._grad,)


def _check_positions(student: Tensor, teacher: Tensor, labels: Tensor) -> None:
    """What can be said of plain tensors without knowing who has which ids."""
    if student.dim() < 2:
        raise ValueError(f"student_logits {list(student.shape)} must be [N, V] or [B, S, V]")
    for name, logits in (("student", student), ("teacher", teacher)):
        if not logits.is_floating_point():
            raise ValueError(f"{name}_logits must be floating point, not {logits.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, not {labels.dtype}")
    shape = student.shape[:-1]
    for name, other in (("teacher_logits", teacher.shape[:-1]), ("labels", labels.shape)):
        # [B, S] and its flat [N] are the same positions; [S, B] is not.
        if other != shape and (math.prod(other) != math.prod(shape) or 1 not in (len(other), len(shape))):
            raise ValueError(f"{name} has positions {list(other)} and student_logits {list(shape)}")
    for name, tensor in (("teacher_logits", teacher), ("labels", labels)):
        if tensor.device != student.device:
            raise ValueError(f"{name} is on {tensor.device} and student_logits on {student.device}")


def _refuse_widths(teacher: int, student: int) -> NoReturn:
    raise ValueError(
        f"teacher_logits has {teacher} ids and student_logits {student}: narrow both to the ids that both tokenizers "
        "have, as in logits[..., :n]"
    )


def _on_this_rank(
    student: Tensor, teacher: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, VocabShard]:
    """All three as plain tensors over the same positions and ids, and which ids those are."""
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (student, teacher, labels)):
        return _of_dtensors(student, teacher, labels, group)
    return _of_slices(student, teacher, labels, group)


def _of_slices(
    student: Tensor, teacher: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, VocabShard]:
    """Plain tensors. With a group, a whole teacher is cut to this rank's ids; the host waits for every rank's widths."""
    _check_positions(student, teacher, labels)
    if group is None:
        if not student.shape[-1] == teacher.shape[-1] > 0:
            _refuse_widths(teacher.shape[-1], student.shape[-1])
        return student, teacher, labels, VocabShard(student.shape[-1], student.shape[-1])
    whole = ((1.0, LogitsTarget(teacher)),)
    shard, ((_, target),), same_ids = shard_targets(student.shape[-1], whole, group, student.device)
    assert isinstance(target, LogitsTarget)
    if not same_ids:
        _refuse_widths(teacher.shape[-1], student.shape[-1])
    return student, target.logits, labels, shard


def _of_dtensors(
    student: Tensor, teacher: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, VocabShard]:
    """Some are DTensors. A student sharded over the vocabulary stays so; a teacher that is placed otherwise is moved."""
    # Importing it takes a second, and plain tensors need none of it.
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def over_vocabulary(tensor: Tensor) -> list[int]:
        """The mesh dimensions that the last dimension is sharded over."""
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        last = tensor.dim() - 1
        return [dim for dim, p in enumerate(placements) if isinstance(p, Shard) and p.dim % tensor.dim() == last]

    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    if not isinstance(student, DTensor) and group is not None:  # this rank's slice, as the teacher's may be too
        sliced = teacher.to_local() if isinstance(teacher, DTensor) and over_vocabulary(teacher) else whole(teacher)
        return _of_slices(student, sliced, whole(labels), group)
    sharded = over_vocabulary(student)
    if not isinstance(student, DTensor) or not sharded:
        return _of_slices(whole(student), whole(teacher), whole(labels), None)
    if len(sharded) > 1 or any(isinstance(p, Partial) for p in student.placements):
        raise ValueError(
            f"student_logits is placed as {student.placements}: it must be sharded over the vocabulary on one mesh dimension"
        )
    mesh, (over,) = student.device_mesh, sharded
    positions = [Replicate() if dim == over else p for dim, p in enumerate(student.placements)]

    def beside(tensor: Tensor) -> Tensor:
        """The positions that the student has here, each whole."""
        if isinstance(tensor, DTensor) and tensor.device_mesh == mesh:
            return tensor.redistribute(placements=positions).to_local()
        return whole(tensor)

    local, vocabulary, size = student.to_local(), student.shape[-1], mesh.size(over)
    widest = -(-vocabulary // size)  # a DTensor is cut as torch.chunk cuts
    start = min(vocabulary, widest * mesh.get_local_rank(over))
    if teacher.shape[-1] not in (vocabulary, local.shape[-1]):
        _refuse_widths(teacher.shape[-1], vocabulary)
    if isinstance(teacher, DTensor) and teacher.device_mesh == mesh and teacher.placements == student.placements:
        teacher = teacher.to_local()
    else:
        teacher = beside(teacher)
        if teacher.shape[-1] == vocabulary:
            teacher = teacher.narrow(-1, start, local.shape[-1])
    labels = beside(labels)
    _check_positions(local, teacher, labels)
    return local, teacher, labels, VocabShard(local.shape[-1], widest, start, mesh.get_group(over))
