"""The divergences on ready logits, as a module for other people's training loops.

It replaces NeMo Automodel's class of the same name one for one. Unlike the rest of potstill's losses it sees labels and
masks, since those loops have nothing else; rows are made of them here, and the engine (losses/rows.py) does the rest.
N rows ([B, S] or any other leading shape, flat), V vocabulary (this rank's part of it), n rows of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from potstill.losses.checks import check_settings
from potstill.losses.divergences import LossParams, temperature_scale
from potstill.losses.fused import BLOCK_BYTES, CHUNK_BYTES
from potstill.losses.rows import Call, Scratch, loss_of_rows
from potstill.losses.vocab_parallel import VocabShard, shared_columns
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

    def _check(self) -> None:
        check_settings(self.divergence, self.temperature, self.beta, self.alpha)
        if self.chunk_size < 0:
            raise ValueError(f"chunk_size must be 0 (chosen by memory) or above, not {self.chunk_size}")

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
        self._check()  # attributes may have been set since
        student, teacher, labels, columns = _on_this_rank(
            student_logits, teacher_logits.detach(), labels, self.tp_group
        )
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
        rows: Tensor | None = None
        if _reading_is_free(supervised):
            rows = supervised.nonzero().squeeze(-1)
            row_weight = row_weight[rows]
        settings = _Settings(
            rows=rows,
            row_weight=row_weight,
            divergence=self.divergence,
            knobs=LossParams(beta=self.beta, alpha=self.alpha),
            temperature=self.temperature,
            upcast=self.fp32_upcast,
            columns=columns,
            chunk_size=self.chunk_size,
            compute=compute,
            differentiate=torch.is_grad_enabled() and student.requires_grad,
        )
        return _LogitsKD.apply(student, teacher, settings)


@dataclass(frozen=True)
class _Settings:
    rows: Tensor | None  # which of the N rows are supervised; None: all are gone through, some with weight 0
    row_weight: Tensor  # of each of them
    divergence: str
    knobs: LossParams
    temperature: float
    upcast: bool
    columns: VocabShard
    chunk_size: int
    compute: torch.dtype
    differentiate: bool


def _reading_is_free(mask: Tensor) -> bool:
    """Choosing rows by a mask reads it. Elsewhere than on the CPU the host would wait for the device, so all rows are gone
    through there, the masked ones emptied and with weight 0."""
    return mask.device.type == "cpu"


class _LogitsKD(torch.autograd.Function):
    """The gradient is made in the forward pass, so that neither side's logits need be kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, settings: _Settings) -> Tensor:
        with torch.autocast(student.device.type, enabled=False):
            loss, ctx.gradient = _loss_and_gradient(student, teacher, settings)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, None, None]:
        gradient = ctx.gradient
        if gradient is None:
            raise RuntimeError("KDLoss went backward a second time: the first time needs retain_graph=True")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return gradient * grad_loss.to(gradient.dtype), None, None
        ctx.gradient = None  # nobody needs it again, so it can be scaled where it is: it is as large as the logits
        return gradient.mul_(grad_loss.to(gradient.dtype)), None, None


def _loss_and_gradient(student: Tensor, teacher: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None]:
    device, compute, weights = student.device, settings.compute, settings.row_weight
    scale = temperature_scale(settings.divergence, settings.temperature)
    call = Call(
        targets=((1.0, LogitsTarget(teacher)),),
        labels=None,
        row_weight=weights,
        divergence=settings.divergence,
        knobs=settings.knobs,
        temperature=1.0,  # logits arrive divided
        kd_weight=scale / settings.temperature,
        ce_weight=0.0,
        softcap=None,
        logit_scale=1.0,
        entropy_gate=None,
        columns=settings.columns,
        same_ids=True,
        differentiate=settings.differentiate,
    )
    count, width = weights.shape[0], student.shape[-1]
    n = max(1, min(count, _rows_at_a_time(settings, device)))
    q_buffer, p_buffer = (torch.empty(n, width, dtype=compute, device=device) for _ in range(2))
    scratch = Scratch(n, width, compute, device)
    gradient = torch.zeros(student.shape, dtype=student.dtype, device=device) if settings.differentiate else None
    by_row = None if gradient is None else gradient.view(math.prod(student.shape[:-1]), width)
    values = torch.zeros(count, dtype=compute, device=device)
    for start in range(0, count, n):
        block = slice(start, min(start + n, count))
        rows = torch.arange(block.start, block.stop, device=device) if settings.rows is None else settings.rows[block]
        q, p = q_buffer[: len(rows)], p_buffer[: len(rows)]
        for buffer, logits in ((q, student), (p, teacher)):
            _read(buffer, logits, rows, settings)
            if settings.rows is None:
                buffer.masked_fill_((weights[block] == 0)[:, None], 0.0)
        values[block] = loss_of_rows(q, [p], block, call, scratch, settings.differentiate)[0]
        if by_row is not None:
            by_row.index_copy_(0, rows, q.to(student.dtype))
    return (weights * values).sum() * scale, gradient


def _rows_at_a_time(settings: _Settings, device: torch.device) -> int:
    """Blocks that stay in cache on a CPU, and large ones where launches are to be few, as in fused.py. With a group, a number
    that does not depend on this rank's width: ranks must cut alike."""
    if settings.columns.group is not None:
        return settings.chunk_size or ROWS_OF_A_GROUP
    fitting = BLOCK_BYTES if device.type == "cpu" else CHUNK_BYTES
    fitting = max(1, fitting // (settings.compute.itemsize * settings.columns.size))
    return min(fitting, settings.chunk_size) if settings.chunk_size else fitting


def _read(out: Tensor, logits: Tensor, rows: Tensor, settings: _Settings) -> None:
    """Flat rows of `logits` over the temperature. By index, since flattening a shifted view would copy all of it."""
    chosen = logits[torch.unravel_index(rows, logits.shape[:-1])]
    if settings.temperature == 1.0:
        out.copy_(chosen)
    elif settings.upcast:
        torch.div(out.copy_(chosen), settings.temperature, out=out)
    else:
        out.copy_(chosen.div_(settings.temperature))


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
    columns, ((_, target),), same_ids = shared_columns(student.shape[-1], whole, group, student.device)
    assert isinstance(target, LogitsTarget)
    if not same_ids:
        _refuse_widths(teacher.shape[-1], student.shape[-1])
    return student, target.logits, labels, columns


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
