"""What a server holds for its clients: bytes, from the first that comes in to the last that goes out, and connections."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

CONNECTION = "connection"  # in the state of a request's scope: what it came by
SILENT_SECONDS = 1.0  # after which a client that is waited for makes room for others


class Busy(Exception):
    """More is held than can be answered now: whoever asked may come back."""


class Waited(Protocol):
    """The connection that a request came by."""

    def behind(self) -> float:
        """Seconds that its client keeps the server waiting; 0 while the client is not waited for."""

    def make_way(self) -> None:
        """End it."""


@dataclass
class Budget:
    """Bytes of requests and answers that may be held at once. On one thread."""

    most: int
    held: int = 0
    holds: set[Hold] = field(default_factory=set)

    def make_room(self, more: int, asking: Hold) -> None:
        """For so many bytes, by ending transfers whose clients keep the server waiting, the slowest first. Busy: all of them
        together would not be enough, and none is ended."""
        lacking, ending = self.held + more - self.most, []
        behind = {hold: hold.behind() for hold in self.holds if hold is not asking}
        for hold in sorted(behind, key=lambda hold: -behind[hold]):
            if lacking <= 0 or behind[hold] < SILENT_SECONDS:
                break
            ending.append(hold)
            lacking -= hold.size
        if lacking > 0:
            held, most = self.held / 2**20, self.most / 2**20
            raise Busy(f"requests and answers of {held:.0f} of {most:.0f} MB are held already (--max-memory-mb)")
        for hold in ending:
            hold.end()


class Hold:
    """One request's part of the budget, given back when the block ends."""

    def __init__(self, budget: Budget, connection: Waited | None = None) -> None:
        self._budget, self._connection = budget, connection
        self.size, self._ended = 0, False

    def set(self, size: int) -> None:
        """So many bytes from now on. Busy: there is no room for them."""
        if self._ended and size:
            raise Busy("another request was given the room of this one")
        more = size - self.size
        if more > 0 and self._budget.held + more > self._budget.most:
            self._budget.make_room(more, self)
        self._budget.held += more
        self.size = size
        (self._budget.holds.add if size else self._budget.holds.discard)(self)

    def shrink(self, size: int) -> None:
        self.set(min(size, self.size))

    def behind(self) -> float:
        return 0.0 if self._connection is None else self._connection.behind()

    def end(self) -> None:
        """Its connection, too: the request lets go of its bytes as it hears of that."""
        self.set(0)
        self._ended = True
        if self._connection is not None:
            self._connection.make_way()

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
    seconds: float  # that a client may be behind with its request or its reading, at deadline.RATE
    now: int = 0  # connected
    cut_off: Counter[str] = field(default_factory=Counter)  # by what they did
