"""What clients of `potstill serve` may hold of it: bytes, from the first that comes in to the last that goes out, and
connections. uvicorn waits for ever for a client that does not send the rest of a request, and for one that does not read; its
`limit_concurrency` counts idle connections, and then refuses all."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from potstill.http_client import RATE, plain
from potstill.serving.batching import Busy

CONNECTION = "connection"  # in the state of a request's scope: the connection that it came by
SILENT_SECONDS = 1.0  # after which a client that is waited for makes room for others
IDLE_SECONDS = 75  # without a request
LOGGERS = ("potstill.serve", "uvicorn.error", "asyncio")
SPARSE_SECONDS = 10.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TRANSFERS = ("request", "answer")
WORDS = {
    "request": "did not send its request in time (--client-timeout)",
    "answer": "did not read its answer in time (--client-timeout)",
    "room": "was silent when others came (--max-connections)",
    "memory": "was slow when others needed its memory (--max-memory-mb)",
}
log = logging.getLogger(LOGGERS[0])


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

    def __init__(self, budget: Budget, connection: Guarded | None = None) -> None:
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

    def sent(self, size: int) -> None:
        """So many bytes of its answer were handed to the connection."""
        if self._connection is not None:
            self._connection.sent += size

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

    def __exit__(self, *_: object) -> None:
        self.set(0)


@dataclass
class Clients:
    """How many may be connected, and how long each may keep the server waiting."""

    most: int
    seconds: float  # that a client may be behind with its request or its reading, at RATE
    now: int = 0  # connected
    cut_off: Counter[str] = field(default_factory=Counter)  # by what they did


class Guarded(H11Protocol):
    """One connection. Its client is behind by the time that it is waited for, less what its bytes take at RATE; being ahead
    earns nothing: whoever sends much at once, and then a byte now and then, is behind like any other."""

    clients: ClassVar[Clients]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.received = self.sent = 0  # bytes; `sent` counts what was handed to the transport
        self._cut = False
        self._state: tuple[str, object] = ("idle", None)
        self._due, self._moved = self.loop.time(), 0  # when the client was not behind, and the bytes until then
        self.app_state = {**self.app_state, CONNECTION: self}  # of each request's scope
        self._tick = min(1.0, self.clients.seconds / 4)
        self._timer = self.loop.call_later(self._tick, self._look)
        self.clients.now = len(self.connections)
        if self.clients.now > self.clients.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        under_way = self.cycle is not None and not self.cycle.response_complete
        super().connection_lost(exc)
        self.clients.now = len(self.connections)
        if under_way and not self._cut:
            self.clients.cut_off["left"] += 1
            log.warning("%s left before it had its answer", self._who)

    @property
    def _who(self) -> str:
        return "a client" if self.client is None else f"the client at {self.client[0]}:{self.client[1]}"

    def _phase(self) -> str:
        """What the connection waits for: the client's request or reading, the model, or nothing."""
        if self.cycle is None or self.cycle.response_complete:
            return "answer" if self.transport.get_write_buffer_size() else "idle"
        if self.cycle.response_started:
            return "answer"
        return "request" if self.cycle.more_body else "work"

    def _note(self) -> tuple[str, float]:
        """The phase, and how many seconds the client is behind in it."""
        now, state = self.loop.time(), (self._phase(), self.cycle)
        moved = self.received + self.sent - self.transport.get_write_buffer_size()
        self._due = min(now, self._due + (moved - self._moved) / RATE) if state == self._state else now
        self._state, self._moved = state, moved
        return state[0], now - self._due

    def _look(self) -> None:
        phase, behind = self._note()
        if (phase == "idle" and behind > IDLE_SECONDS) or (phase in TRANSFERS and behind > self.clients.seconds):
            self._cut_off(phase)
        else:
            self._timer = self.loop.call_later(self._tick, self._look)

    def behind(self) -> float:
        """Seconds that its client keeps the server waiting; 0 while the client is not waited for."""
        phase, behind = self._note()
        return behind if phase in TRANSFERS and not self._cut else 0.0

    def make_way(self) -> None:
        self._cut_off("memory")

    def _cut_off(self, why: str) -> None:
        self._cut = True
        self.clients.cut_off[why] += 1
        if why in WORDS:  # "idle" is how most connections end
            log.warning("%s %s, and was disconnected", self._who, WORDS[why], extra={"why": why})
        self.transport.abort()  # not close: that would wait until all is read

    def _make_room(self) -> None:
        """For this connection, by ending the one whose client has kept the server waiting longest."""
        others = [one for one in self.connections if isinstance(one, Guarded) and one is not self and not one._cut]
        noted = {one: one._note() for one in others}
        waiting = {one: behind for one, (phase, behind) in noted.items() if phase != "work"}
        silent = max(waiting, key=lambda one: waiting[one], default=None)
        if silent is not None and waiting[silent] >= SILENT_SECONDS:
            silent._cut_off("room")
            return
        self._cut = True
        self.clients.cut_off["refused"] += 1
        log.warning("%s was refused: %d are connected (--max-connections)", self._who, self.clients.most)
        self.transport.write(FULL)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nobody has to know."""


def guarded(clients: Clients) -> type[Guarded]:
    """As uvicorn takes it: a class."""
    return type("GuardedOfClients", (Guarded,), {"clients": clients})


class Sparse(logging.Handler):
    """One line of each kind in ten seconds, on stderr; how many there were besides is told with the next."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind, now = (record.name, record.lineno, getattr(record, "why", "")), time.monotonic()
        last, more = self._kinds.get(kind, (-math.inf, 0))
        if now - last < SPARSE_SECONDS:
            self._kinds[kind] = (last, more + 1)
            return
        self._kinds[kind] = (now, 0)
        text = plain(record.getMessage()) + (f" ({more} more of these before)" if more else "")
        trace = f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
        print(text + trace, file=sys.stderr, flush=True)


def log_sparsely() -> None:
    """Let the server's loggers be heard by `Sparse` alone."""
    handler = Sparse()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
