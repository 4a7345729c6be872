"""Prepare what comes next on a background thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 10.0


class StoppedWaiting(Exception):
    """Whoever waited was told to stop, and what is waited for is not there yet."""


class Prefetched(Generic[T]):
    """Iterates `iterable` on a thread, up to `depth` items ahead. `waited`: seconds its reader stood still. `interrupted`:
    asked now and then whether the reader is to stop waiting (StoppedWaiting)."""

    def __init__(self, iterable: Iterable[T], depth: int = 2, interrupted: Callable[[], bool] = lambda: False) -> None:
        self.waited = 0.0
        self._interrupted = interrupted
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        stop = threading.Event()
        # The thread holds the queue and not this object: when nobody reads any more, it is told to stop.
        thread = threading.Thread(target=_work, args=(iterable, self._ready, stop), name="prefetch", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, thread, stop)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._close.alive:
            raise StopIteration
        begin = time.perf_counter()
        while True:
            try:
                kind, value = self._ready.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if self._interrupted():
                    raise StoppedWaiting from None
        self.waited += time.perf_counter() - begin
        if kind == "item":
            item: T = value
            return item
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread. Safe to call twice, and called at the end of the program."""
        self._close()

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(iterable: Iterable[Any], ready: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put((kind, value), timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    try:
        for item in iterable:
            put("item", item)
            if stop.is_set():
                return
        put("end", None)
    except BaseException as error:  # raised again where the items are read
        put("error", error)


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)
