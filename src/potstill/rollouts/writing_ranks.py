"""The ranks that write together: what is asked for is dealt, each writes its share, and every rank has all of it.

A text depends on its prompt, its seed and the weights alone, so who writes it changes nothing: what comes after is the same on
every rank, and the same as with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from potstill.parallel.agree import gathered

if TYPE_CHECKING:
    from potstill.rollouts.engine import Completion, GenerationRequest

T = TypeVar("T")


@dataclass(frozen=True)
class WritingRanks:
    """All of them make the same calls in the same order. `group`: for values of the host, and for one thread at a time; None:
    one process."""

    group: dist.ProcessGroup | None = None
    writes: bool = True  # this rank; each of them tells the others

    @property
    def index(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def first(self) -> bool:
        return self.index == 0

    def told(self, value: T) -> list[T]:
        """What each rank says, in their order."""
        return gathered(lambda: value, self.group)

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on each rank. A rank that fails fails for all: nobody waits for it. The work itself waits for no
        other rank."""
        return gathered(work, self.group)

    def written(
        self,
        write: Callable[[Sequence[GenerationRequest]], list[Completion]],
        asked: Sequence[GenerationRequest],
        new_tokens: int,
    ) -> list[Completion]:
        """What `write` makes of what is asked for, each rank of its share. `new_tokens`: of a text, at most."""
        if self.group is None:
            return write(asked)
        shares = self._shares(asked, new_tokens)
        own = [asked[i] for i in shares[self.index]]
        found = self.together(lambda: write(own) if own else [])
        texts = {
            i: text for share, some in zip(shares, found, strict=True) for i, text in zip(share, some, strict=True)
        }
        return [texts[i] for i in range(len(asked))]

    def _shares(self, asked: Sequence[GenerationRequest], new_tokens: int) -> list[list[int]]:
        writers = [rank for rank, writes in enumerate(self.told(self.writes)) if writes]
        shares: list[list[int]] = [[] for _ in range(self.size)]
        for rank, share in zip(
            writers, deal_prompts([ask.ids.tobytes() for ask in asked], len(writers), new_tokens), strict=True
        ):
            shares[rank] = share
        return shares


ALONE = WritingRanks()


def deal_prompts(prompts: Sequence[bytes], writers: int, new_tokens: int) -> list[list[int]]:
    """Which texts each of so many writers takes: all of one prompt (int32 ids), which is read once for them, and so that all
    have about as much to do. Longest first, each to whoever has least."""
    places: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(i)
    weights = {prompt: len(prompt) // 4 + len(some) * new_tokens for prompt, some in places.items()}
    loads, shares = [0] * writers, [[] for _ in range(writers)]  # type: tuple[list[int], list[list[int]]]
    for prompt in sorted(places, key=lambda each: (-weights[each], places[each][0])):
        least = loads.index(min(loads))
        loads[least] += weights[prompt]
        shares[least] += places[prompt]
    return [sorted(share) for share in shares]
