"""What a server holds for its clients: bytes, from the first that comes in to the last that goes out, and connections."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType


class Busy(Exception):
    """More is held than can be answered now: whoever asked may come back."""


@dataclass
class Budget:
    """Bytes of requests and answers that may be held at once. On one thread."""

    most: int
    held: int = 0


class Hold:
    """One request's part of the budget, given back when the block ends."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._size = budget, 0

    def set(self, size: int) -> None:
        """So many bytes from now on. Busy: there is no room for them."""
        more = size - self._size
        if more > 0 and self._budget.held + more > self._budget.most:
            held, most = self._budget.held / 2**20, self._budget.most / 2**20
            raise Busy(f"requests and answers of {held:.0f} of {most:.0f} MB are held already (--max-memory-mb)")
        self._budget.held += more
        self._size = size

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set(0)


@dataclass
class Clients:
    """How many may be connected, and how long each may keep the server waiting."""

    most: int
    seconds: float  # for a request or an answer, beyond those that its bytes take at deadline.RATE
    now: int = 0  # connected
    cut_off: Counter[str] = field(default_factory=Counter)  # by what they did
