"""Prepare what comes next on a background thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Interrupted = Callable[[], bool]

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 10.0


class StoppedWaiting(Exception):
    """Whoever waited was told to stop, and what is waited for is not there yet."""


class Prefetched(Generic[T]):
    """Iterates `iterable` on a thread, up to `depth` items ahead. `waited`: seconds its reader stood still. `interrupted`:
    asked now and then whether the reader is to stop waiting (StoppedWaiting)."""

    def __init__(self, iterable: Iterable[T], depth: int = 2, interrupted: Interrupted = lambda: False) -> None:
        self.waited = 0.0
        self._interrupted = interrupted
        self._ready: queue.Queue[Future[T]] = queue.Queue(depth)
        stop = threading.Event()
        # The thread holds the queue and not this object: when nobody reads any more, it is told to stop.
        thread = threading.Thread(target=_work, args=(iter(iterable), self._ready, stop), name="prefetch", daemon=True)
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
                future = self._ready.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if self._interrupted():
                    raise StoppedWaiting from None
        self.waited += time.perf_counter() - begin
        if future.exception() is not None:  # StopIteration, too
            self.close()
        return future.result()

    def close(self) -> None:
        """End the thread. Safe to call twice, and called at the end of the program."""
        self._close()

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _work(iterator: Iterator[Any], ready: queue.Queue[Future[Any]], stop: threading.Event) -> None:
    ended = False
    while not (ended or stop.is_set()):
        future: Future[Any] = Future()
        try:
            future.set_result(next(iterator))
        except BaseException as error:  # raised again where the items are read
            future.set_exception(error)
            ended = True
        while not stop.is_set():
            with suppress(queue.Full):
                ready.put(future, timeout=_POLL_SECONDS)
                break


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)


def result_of(future: Future[T], interrupted: Interrupted) -> T:
    """Wait for what another thread makes, as Prefetched waits."""
    while True:
        try:
            return future.result(_POLL_SECONDS)
        except TimeoutError:
            if future.done():  # it was its own error
                raise
            if interrupted():
                raise StoppedWaiting from None
