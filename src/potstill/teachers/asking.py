"""Threads that ask a server, and that nobody has to wait for when a run has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from potstill.types import PotstillError


class Asking:
    """At most so many calls at once. Unlike a ThreadPoolExecutor's, its threads do not keep the process from ending, and
    closing it settles what is under way: a server that hangs hangs nobody."""

    def __init__(self, threads: int, ended: Callable[[], PotstillError]) -> None:
        self._most, self._ended = threads, ended
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._threads = 0
        self._closed = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise self._ended()
            self._open.add(future)
            if self._threads < min(self._most, len(self._open)):
                self._threads += 1
                threading.Thread(target=self._work, name="ask", daemon=True).start()
        self._calls.put((future, call, arguments))
        return future

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call, arguments = taken
            if self._begin(future):
                try:
                    result, error = call(*arguments), None
                except BaseException as raised:  # of whoever waits for it
                    result, error = None, raised
                self._settle(future, result, error)
            with self._lock:
                self._open.discard(future)
            del taken, future, call, arguments

    def _begin(self, future: Future[Any]) -> bool:
        with self._lock:
            return not self._closed and future.set_running_or_notify_cancel()

    def _settle(self, future: Future[Any], result: Any, error: BaseException | None) -> None:
        with self._lock:
            if future.done():  # by `close`
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            under_way, threads = list(self._open), self._threads
        for future in under_way:
            self._settle(future, None, self._ended())
        for _ in range(threads):
            self._calls.put(None)
