"""What a run will take of a device's memory, counted by a step on fake tensors: they have sizes and no contents."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from potstill.data import collate
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel
from potstill.models.libraries import reason
from potstill.types import Batch, Example, HiddenTarget

WORTH_COUNTING = 100 * 10**6  # bytes of weights, from which on a run says what it will take


@dataclass(frozen=True)
class Memory:
    """Bytes at the moment of a step when most is taken."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward pass, and what the layers, or the optimizer, need for a while
    loss: int  # logits of a chunk, and what goes with them
    teacher: int  # its weights

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def said(self) -> str:
        """A line for the beginning of a run."""
        parts = ", ".join(f"{each.name} {_size(getattr(self, each.name))}" for each in fields(self))
        return f"memory of a step, counted: {_size(self.total)} ({parts})"


@dataclass(frozen=True)
class Step:
    """A step, as its parts are made of a fake student."""

    rows: int  # of a forward pass
    length: int
    passes: int  # forward passes of a step
    loss: Callable[[LanguageModel, Batch, Sequence[Any]], Tensor]
    optimizers: Callable[[LanguageModel], Sequence[Optimizer]]
    autocast: Callable[[], AbstractContextManager[Any]]


def said_memory(student: LanguageModel, teachers: Sequence[LanguageModel], step: Step) -> str:
    """A line for the beginning of a run, which goes on without the account where there can be none."""
    try:
        return count_memory(student, teachers, step).said()
    except Exception as error:  # the code of each architecture, on tensors without contents
        return f"the memory of a step could not be counted ({reason(error)})"


def count_memory(student: LanguageModel, teachers: Sequence[LanguageModel], step: Step) -> Memory:
    """Of one process that has all of the student. The first teacher's hidden states are what the student learns from."""
    with ThreadPoolExecutor(1, "memory") as pool:  # the loss keeps buffers for the next call of its thread
        return pool.submit(_counted, student, teachers, step).result()


class Allocations(TorchDispatchMode):
    """The storages that operators have made and that are alive: how many bytes now, and at most. `there` was there before:
    an operator that gives a view of it, as of a weight that is transposed, makes nothing."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: dict[int, Any] = {}
        self._there = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in there)}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return out

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known or key in self._there:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def _counted(student: LanguageModel, teachers: Sequence[LanguageModel], step: Step) -> Memory:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made, first = (_fake(each, mode) if each is not None else None for each in (student, next(iter(teachers), None)))
    assert made is not None
    weights = _bytes(made.model)
    batch = full_batch(step.rows, step.length)
    with mode:
        there = batch.to(made.device)
        optimizers = step.optimizers(made)
        trained = [weight for o in optimizers for group in o.param_groups for weight in group["weights"]]
        models = [each.model for each in (made, first) if each is not None]
        with Allocations([*(x for model in models for x in _tensors(model)), *_masters(optimizers)]) as seen:
            target: HiddenTarget | None = None
            if first is not None:
                with torch.no_grad():
                    target = first.at_rows(first.hidden(there, there.rows.teacher), _shared(made, first))
            for _ in range(min(2, step.passes)):
                with step.autocast():
                    loss = step.loss(made, there, [] if target is None else [(1.0, target)])
                loss.backward()
                del loss
            in_passes, seen.most = seen.most, seen.now
            gradients = sum(p.grad.numel() * p.grad.element_size() for p in trained if p.grad is not None)
            del target
            before = seen.now
            for optimizer in optimizers:
                optimizer.step()
            in_optimizer, state = seen.most, _state_bytes(optimizers)
    masters = sum(p.numel() * p.element_size() for p in _masters(optimizers))
    # Between steps the optimizer's state stays; the first step makes it.
    above = max(in_passes - gradients, in_optimizer - before - state, 0)
    loss_bytes = min(_loss_bytes(made, first, there, mode, step), above)
    taught = sum(_bytes(teacher.model) for teacher in teachers)
    return Memory(weights, gradients, state + masters, above - loss_bytes, loss_bytes, taught)


def _fake(model: LanguageModel, mode: FakeTensorMode) -> LanguageModel:
    with FakeCopyMode(mode):
        return replace(model, model=copy.deepcopy(model.model))


def _shared(student: LanguageModel, teacher: LanguageModel) -> int:
    return min(student.vocabulary, teacher.vocabulary)


def full_batch(rows: int, length: int) -> Batch:
    """Every token is supervised but the first of a row."""
    supervised = np.arange(length) > 0
    example = Example("", "", np.zeros(length, dtype=np.int32), supervised, 1)
    return collate([[example]] * rows, pad_id=0)


def _loss_bytes(
    student: LanguageModel, teacher: LanguageModel | None, batch: Batch, mode: FakeTensorMode, step: Step
) -> int:
    """What the fused loss takes beyond what it is given and gives back."""
    with mode:
        count = len(batch.rows)
        own = student.output_head()
        dtype = torch.bfloat16 if torch.is_autocast_enabled(student.device.type) else own.weight.dtype
        hidden = torch.empty(count, own.weight.shape[1], dtype=dtype, device=student.device, requires_grad=True)
        target = None
        if teacher is not None:
            theirs = teacher.output_head(_shared(student, teacher))
            states = torch.empty(count, theirs.weight.shape[1], dtype=theirs.weight.dtype, device=student.device)
            target = HiddenTarget(states, theirs)
        with Allocations(
            [hidden, *_tensors(student.model), *([] if teacher is None else _tensors(teacher.model))]
        ) as seen:
            out = fused_linear_kd(hidden, target=target, labels=batch.rows.labels, ce_weight=1.0, **vars(own))
            del out
        return seen.most


def _masters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    pairs = [pair for group in groups for pair in zip(group["params"], group["weights"], strict=True)]
    return [master for master, weight in pairs if master is not weight and master.device == weight.device]


def _state_bytes(optimizers: Sequence[Optimizer]) -> int:
    kept = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in kept if value.dim())


def weight_bytes(model: LanguageModel) -> int:
    return _bytes(model.model)


def _bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(model))


def _tensors(model: nn.Module) -> list[Tensor]:
    return list({id(each): each for each in (*model.parameters(), *model.buffers())}.values())


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
