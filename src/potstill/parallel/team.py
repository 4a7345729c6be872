"""Ranks that do something together, of which the first one leads: it knows, asks or reads, and the others are told.

What is told is host memory, over groups that take tensors of the host; by the main thread alone. An error of the first rank is
everybody's, in the same words: nobody waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.parallel.agree import Failure, said, tried
from potstill.parallel.mesh import Axis, Ranks
from potstill.types import PotstillError

T = TypeVar("T")
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Team:
    """The ranks along some axes. What the first one says goes along the first axis, then from all of these along the next."""

    axes: tuple[Axis, ...]

    @property
    def leads(self) -> bool:
        return all(axis.index == 0 for axis in self.axes)

    @property
    def many(self) -> bool:
        return any(axis.size > 1 for axis in self.axes)

    def told(self, value: Any = None) -> Any:
        """What the first rank gives here."""
        held = [value]
        for source, group in self._stages():
            dist.broadcast_object_list(held, source, group, HOST)
        return held[0]

    def of_first(self, work: Callable[[], T]) -> T:
        """What `work()` gives on the first rank, on all of them. It may not wait for the others."""
        found, error = tried(work, Exception) if self.leads else (None, None)
        found, failure = self.told((found, said(error)))
        _raise(failure, error)
        return found

    def tensor_of_first(self, work: Callable[[], Tensor]) -> Tensor:
        """As `of_first`, of a tensor, which is not packed for it."""
        found, error = tried(work, Exception) if self.leads else (None, None)
        shape, dtype, failure = self.told(None if found is None and error is None else _about(found, error))
        _raise(failure, error)
        values = torch.empty(shape, dtype=dtype) if found is None else found.detach().to(HOST).contiguous()
        self.send(values)
        return values if found is None else found

    def send(self, values: Tensor) -> None:
        """Put what the first rank has in a tensor of the host into everybody's, of the same shape."""
        for source, group in self._stages() if values.numel() else ():
            dist.broadcast(values, source, group)

    def _stages(self) -> list[tuple[int, dist.ProcessGroup]]:
        found = []
        for number, axis in enumerate(self.axes):
            if axis.group is not None and all(later.index == 0 for later in self.axes[number + 1 :]):
                found.append((dist.get_global_rank(axis.group, 0), axis.group))
        return found


@dataclass(frozen=True)
class Lockstep:
    """The ranks that make every pass of a model together: those that have the same rows, and the data-parallel ones, each with
    rows of its own. One that has nothing to read makes an empty pass."""

    rows: Team = field(default_factory=lambda: Team(()))
    dp: Axis = field(default_factory=Axis)


def sharing_rows(here: Ranks) -> Team:
    """The ranks that have this rank's rows."""
    return Team((here.cp, here.tp))


def students(here: Ranks) -> Team:
    """All ranks of the student."""
    return Team((here.dp, here.cp, here.tp))


def _about(found: Tensor | None, error: Exception | None) -> tuple[Any, ...]:
    return ((), None, said(error)) if found is None else (found.shape, found.dtype, None)


def _raise(failure: Failure | None, error: Exception | None) -> None:
    if error is not None:
        raise error
    if failure is not None:
        raise (PotstillError if failure.known else RuntimeError)(failure.words)
