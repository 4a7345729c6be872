"""Sockets of requests that end in time. httpcore's timeouts are for each read and write: a byte now and then would hold a
request for ever."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import httpcore

RATE = 128 * 2**10  # bytes per second: a transfer that is slower (1 Mbit/s) runs out of time
SLICE = 64 * 2**10  # bytes that are sent at once


class Deadline:
    """Of one request: so many seconds, and as many more as its bytes take at RATE, up to `most` of them; and so many seconds
    between one byte and the next."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._end, self._most = seconds, time.monotonic() + seconds, most
        self.moved = 0  # bytes, both ways

    @property
    def left(self) -> float:
        return min(self._seconds, self._end + min(self.moved, self._most) / RATE - time.monotonic())


class Sockets(httpcore.NetworkBackend):
    """Makes the connections of a pool."""

    def __init__(self) -> None:
        self.opened = 0  # how often a connection was made
        self.request = threading.local()  # under way on a thread: its `deadline`
        self._lock = threading.Lock()
        self._open: WeakSet[socket.socket] = WeakSet()
        self._ended = False

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = max(self.request.deadline.left, 1e-3)
        seconds = left if timeout is None else min(timeout, left)
        made = httpcore.SyncBackend().connect_tcp(host, port, seconds, local_address, socket_options)
        with self._lock:
            self.opened += 1
        return TimedStream(made, self)

    def keep(self, made: socket.socket) -> None:
        with self._lock:
            self._open.add(made)
        if self._ended:  # it was connected while `wake` was at work
            self.wake()

    def wake(self) -> None:
        """End all reads and writes. Closing a socket does not end a read of it on another thread; shutting it down does."""
        self._ended = True
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(one, socket.SHUT_RDWR)


class TimedStream(httpcore.NetworkStream):
    """A connection whose reads and writes end by the deadline of the request that they belong to."""

    def __init__(self, stream: httpcore.NetworkStream, sockets: Sockets) -> None:
        self._stream, self._sockets = stream, sockets
        self._socket: socket.socket = stream.get_extra_info("socket")
        sockets.keep(self._socket)
        self.close, self.get_extra_info = stream.close, stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline: Deadline = self._sockets.request.deadline
        if (left := deadline.left) <= 0:
            raise httpcore.ReadTimeout
        found = self._stream.read(max_bytes, left)
        deadline.moved += len(found)
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline, rest = self._sockets.request.deadline, memoryview(buffer)
        while rest:
            if (left := deadline.left) <= 0:
                raise httpcore.WriteTimeout
            try:
                self._socket.settimeout(left)
                sent = self._socket.send(rest[:SLICE])
            except TimeoutError as error:
                raise httpcore.WriteTimeout from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error
            deadline.moved += sent
            rest = rest[sent:]

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = max(self._sockets.request.deadline.left, 1e-3)
        # TLS makes another socket of the first.
        return TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._sockets)
