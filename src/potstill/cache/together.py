"""A model whose passes several ranks make together, as what computes a cache's documents.

Of the ranks with the same rows the first one has the documents; the others are told what it reads. Where shards of the model
lie over data-parallel ranks, all of them make every pass: one that has no document left makes it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.cache.origin import LiveOrigin, TeacherBackend
from potstill.data import collate
from potstill.models import LanguageModel
from potstill.models.placed import batch_of, request_of
from potstill.signals.kinds import Signal, SignalKind
from potstill.types import Example, PotstillError

Said = tuple[bool, str]  # of an error: whether it is the user's to put right, and its words


def origin_of(teacher: LanguageModel, name: str) -> LiveOrigin:
    step = teacher.lockstep
    return SharedOrigin(teacher, name) if step.rows.many or step.dp.size > 1 else LiveOrigin(teacher, name)


@contextmanager
def computing(origin: TeacherBackend | None) -> Iterator[None]:
    """Around all that this rank computes for a batch, or for a build; the ranks that help it are in it meanwhile."""
    if isinstance(origin, SharedOrigin):
        with origin.computing():
            yield
    else:
        yield


class SharedOrigin(LiveOrigin):
    def __init__(self, teacher: LanguageModel, name: str) -> None:
        super().__init__(teacher, name)
        self._rows, self._dp = teacher.lockstep.rows, teacher.lockstep.dp
        self._told = False  # all ranks know of an error: none of them waits any more

    @property
    def leads(self) -> bool:
        """Whether this rank has documents of its own."""
        return self._rows.leads

    def begin(self, form: SignalKind, examples: Sequence[Example]) -> Callable[[], Signal]:
        self._agreed(True)
        batch = collate([[example] for example in examples], pad_id=0)
        self._rows.told(request_of(batch, batch.rows.teacher))
        return super().begin(form, examples)

    @contextmanager
    def computing(self) -> Iterator[None]:
        if not self.leads:
            self._follow()
            yield
            return
        try:
            yield
        except BaseException as error:
            words = (isinstance(error, PotstillError), str(error) or repr(error))
            with suppress(Exception):  # they may be gone
                if not self._told:
                    self._agreed(False, words)
            raise
        nothing = collate([], pad_id=0)
        while self._agreed(False):
            request = request_of(nothing, nothing.rows.teacher)
            self._rows.told(request)
            self._pass(request)
        self._rows.told(None)

    def _agreed(self, busy: bool, error: Said | None = None) -> bool:
        """Whether any of the ranks that lead makes a pass now. An error of one of them is everybody's."""
        found: list[tuple[bool, Said | None]] = [(busy, error)]
        if self._dp.group is not None:
            everyone: list[Any] = [None] * self._dp.size
            dist.all_gather_object(everyone, found[0], self._dp.group)
            found = everyone
        said = [words for _, words in found if words is not None]
        if said:
            self._told = True
            self._rows.told(said[0])
            _raise(said[0])
        return any(each for each, _ in found)

    def _follow(self) -> None:
        while isinstance(job := self._rows.told(), Tensor):
            self._pass(job)
        if job is not None:
            _raise(job)

    @torch.no_grad()
    def _pass(self, request: Tensor) -> None:
        batch, positions = batch_of(request)
        device = self.teacher.device
        with suppress(PotstillError):  # the first rank has it too
            self.teacher.hidden(batch.to(device), positions.to(device))


def _raise(said: Said) -> None:
    ours, words = said
    raise (PotstillError if ours else RuntimeError)(words)
