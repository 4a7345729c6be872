"""What the ranks of a run tell each other on the host: whether all go on, and what is wrong.

An error of one rank is the error of all, in the same words: nobody is left waiting for a rank that has gone. With one process
nothing is exchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from potstill.parallel.mesh import ranks
from potstill.types import PotstillError

T = TypeVar("T")


class Agreed(PotstillError):
    """An error that every rank raises. One of them says it."""

    shared = True


def exchanged(**counts: int) -> dict[str, int]:
    """Each number summed over the ranks of the student."""
    here = ranks()
    if here.control is None:
        return counts
    values = torch.tensor(list(counts.values()))
    dist.all_reduce(values, group=here.control)
    return dict(zip(counts, values.tolist(), strict=True))


def everyones(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank of the student has, in their order. `group`: of a thread other than the main one."""
    group = ranks().control if group is None else group
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def of_leaders(value: T) -> list[T]:
    """What each of the ranks has among which rows are dealt; those that hold the same rows say the same."""
    return [each for leads, each in everyones((ranks().leader, value)) if leads]


def of_first(value: T) -> T:
    """What rank 0 has."""
    here = ranks()
    if here.control is None:
        return value
    held = [value if here.first else None]
    dist.broadcast_object_list(held, src=0, group=here.control)
    found: T = held[0]  # type: ignore[assignment]
    return found


def together(work: Callable[[], T]) -> T:
    """`work()` on every rank of the student. If it is a mistake on one of them, it is everybody's: that of the lowest rank.
    It must not wait for other ranks before it can fail."""
    if ranks().control is None:
        return work()
    result, error = tried(work, PotstillError)
    raise_together(error)
    return result  # type: ignore[return-value]


def gathered(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `work()` gives on each rank of `group`, in their order; None: one process. Whatever goes wrong on one of them goes
    wrong on all. The work waits for no other rank."""
    if group is None:
        return [work()]
    result, error = tried(work, Exception)
    found = everyones((result, said(error)), group)
    _raise_lowest([failure for _, failure in found], error)
    return [each for each, _ in found]  # type: ignore[misc]


def raise_together(error: Exception | None) -> None:
    """To be called by all: raises where one of them has an error."""
    if ranks().control is None:
        if error is not None:
            raise error
        return
    _raise_lowest(everyones(said(error)), error)


def first_alone(work: Callable[[], T]) -> T:
    """What `work()` gives on rank 0, on every rank; what goes wrong there goes wrong everywhere."""
    here = ranks()
    found = together(lambda: work() if here.first else None)
    return of_first(found)  # type: ignore[return-value]


class RankLeft(PotstillError):
    """Another rank reads no more."""


class Rounds:
    """Exchanges that a background thread of each rank makes in the same order, for as long as all of them go on.

    Nobody knows how far the threads of others have run ahead when a run ends. So each rank's last exchange says that it leaves,
    which ends them on all ranks: no thread is left waiting in a group that is about to be destroyed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.index, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._exchanging, self._ended = threading.Lock(), False

    def gathered(self, work: Callable[[], T]) -> list[T]:
        """As the function of that name. RankLeft: some rank reads no more."""
        result, error = tried(work, Exception)
        with self._exchanging:
            if self._ended:
                raise RankLeft("data: the run has ended")
            found = everyones((False, result, said(error)), self._group)
            self._ended = any(left for left, _, _ in found)
        _raise_lowest([failure for _, _, failure in found], error)
        if self._ended:
            raise RankLeft("data: the run has ended on another rank")
        return [each for _, each, _ in found]  # type: ignore[misc]

    def totals(self, **counts: int) -> dict[str, int]:
        """Each number summed over the ranks among which rows are dealt."""
        found = self.gathered(lambda: {name: count * ranks().leader for name, count in counts.items()})
        return {name: sum(each[name] for each in found) for name in counts}

    def leave(self) -> None:
        """Once no thread of this rank asks any more. Waits for the others, who come to it or leave too."""
        with self._exchanging:
            if not self._ended:
                self._ended = True
                everyones((True, None, None), self._group)


@dataclass(frozen=True)
class Failure:
    """An error as other ranks hear of it."""

    words: str
    known: bool  # the user can put it right


def tried(work: Callable[[], T], kind: type[Exception]) -> tuple[T | None, Exception | None]:
    """What `work()` gives, or the error of that kind that it raised."""
    try:
        return work(), None
    except kind as error:
        return None, error


def said(error: Exception | None) -> Failure | None:
    if error is None:
        return None
    known = isinstance(error, PotstillError)
    return Failure(str(error) if known else repr(error), known)


def _raise_lowest(failures: Sequence[Failure | None], error: Exception | None) -> None:
    """The first of what the ranks said. `error`: this rank's own; if it is no mistake of the user's it keeps its traceback."""
    for rank, failure in enumerate(failures):
        if failure is None:
            continue
        if error is not None and not isinstance(error, PotstillError):
            raise error
        raise (Agreed(failure.words) if failure.known else RuntimeError(f"rank {rank}: {failure.words}")) from error
