"""Requests to a server that may be away for a while: retried with back-off, stopped by what it refuses."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import httpx
from rich.console import Console

from potstill.config import RemoteConfig
from potstill.types import PotstillError

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds
CONNECT_SECONDS = 10.0
WORDS = 500  # characters of what a server says
CONNECTED = (
    "connection.connect_tcp.complete",
    "connection.start_tls.complete",
)  # TLS makes another socket of the first


class Refused(PotstillError):
    """A server does not take a request: sending it again would not help."""


def tell(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(message, style="yellow", highlight=False, markup=False)


class Connection:
    """To one server, for any number of threads. `say`: where the user is told that a run waits."""

    def __init__(self, address: str, config: RemoteConfig, where: str, say: Callable[[str], None] = tell) -> None:
        self.address = address.rstrip("/")
        self.where = where
        self.failures = 0  # so often a request failed, and was sent again
        self.opened = 0  # so often a connection was made
        self._patience = config.patience
        self._say = say
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._away_since: float | None = None
        self._variable = config.token
        headers = {} if config.token is None else {"authorization": f"Bearer {_token(config.token, where)}"}
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout, connect=min(CONNECT_SECONDS, config.timeout), pool=None)
        try:
            httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise PotstillError(f"{where}.server: {address} is no address ({error})") from error
        if not self.address.startswith(("http://", "https://")):
            raise PotstillError(f"{where}.server: {address} is no address: write http://HOST:PORT")
        self._client = httpx.Client(headers=headers, limits=limits, timeout=timeout, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        return self.send("GET", path)

    def find(self, path: str) -> httpx.Response | None:
        """None: the server has no such address."""
        return self.send("GET", path, absent=(404, 405, 501))

    def post(self, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
        return self.send("POST", path, body)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        absent: tuple[int, ...] = (),
        refusals: tuple[int, ...] = (),
    ) -> Any:
        """The answer; None for the codes `absent`. Sent again while the server is away or fails, as long as the recipe is
        patient; not when it refuses, also by one of the codes `refusals`."""
        keys: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"content": body}
        begin, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                response = self._client.request(method, self.address + path, extensions={"trace": self._traced}, **keys)
            except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
                # Their words may quote the headers, and the token is in them.
                raise self.error(f"{method} {path} cannot be sent ({type(error).__name__})") from None
            except httpx.TransportError as error:
                problem = _reason(error)
            except httpx.RequestError as error:  # DecodingError: it says gzip and sends something else
                raise self.error(f"its answer to {method} {path} cannot be read ({error})") from error
            except RuntimeError as error:  # of a client that is closed
                raise self.error("the run has ended") from error
            else:
                code = response.status_code
                if code in absent:
                    return None
                if 200 <= code < 300:
                    self._back()
                    return response
                if code < 500 or code in refusals:
                    raise self._refused(method, path, response)
                problem = f"it fails ({code}): {words_of(response)}"
            if self._closing.is_set():
                raise self.error("the run has ended")
            waited = time.monotonic() - begin
            if waited + pause > self._patience:
                raise self.error(f"{problem}; given up after {waited:.0f} s (remote.patience)")
            self._away(problem)
            if self._closing.wait(pause * random.uniform(0.75, 1.25)):
                raise self.error("the run has ended")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _refused(self, method: str, path: str, response: httpx.Response) -> Refused:
        code, key = response.status_code, _token_key(self.where)
        what = f"{method} {path} is refused ({code}): {words_of(response)}"
        if code < 400:
            there = response.headers.get("location", "nowhere")
            what = f"{method} {path} is sent elsewhere ({code}), to {there}: give the address of the server itself"
        elif code == 401 and self._variable is None:
            what += f"; no token was sent: name the environment variable that holds it with {key}"
        elif code == 401:
            what += f"; the token in the environment variable {self._variable} ({key}) is not the server's"
        return Refused(str(self.error(what)))

    def _traced(self, event: str, info: Any) -> None:
        if event not in CONNECTED:
            return
        made = info["return_value"].get_extra_info("socket")
        with self._lock:
            self.opened += event == CONNECTED[0]
            if isinstance(made, socket.socket):
                self._sockets.add(made)
        if self._closing.is_set():  # connected while `close` was at work
            self._wake()

    def error(self, what: str) -> PotstillError:
        return PotstillError(f"{self.where}: the server at {self.address}: {what}")

    def _away(self, problem: str) -> None:
        with self._lock:
            self.failures += 1
            if self._away_since is not None:
                return
            self._away_since = time.monotonic()
        self._say(f"waiting for the server at {self.address}: {problem} (for up to {self._patience:g} s)")

    def _back(self) -> None:
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            self._say(f"the server at {self.address} answers again, after {time.monotonic() - since:.0f} s")

    def close(self) -> None:
        """Whoever waits for the server stops waiting, also in the middle of a request."""
        self._closing.set()
        self._wake()
        self._client.close()

    def _wake(self) -> None:
        """Closing a socket does not end a read of it on another thread; shutting it down does."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def sound_token(token: str) -> bool:
    """Whether it can stand in a header."""
    return bool(token) and all("!" <= character <= "~" for character in token)


def _token_key(where: str) -> str:
    """What names the variable: a recipe's key, or the option of a command without one."""
    return f"{where}.remote.token" if where.startswith("teachers") else "--token-env"


def _token(variable: str, where: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise PotstillError(
            f"{_token_key(where)}: there is no environment variable {variable}, which is to hold the server's token"
        )
    if not sound_token(token):
        raise PotstillError(
            f"{_token_key(where)}: the environment variable {variable} holds spaces, or characters that are not ASCII, within "
            "the token: set it to the token alone"
        )
    return token


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time (remote.timeout)"
    if isinstance(error, httpx.ConnectError):
        return f"it cannot be reached ({error})"
    return f"the connection broke ({str(error) or type(error).__name__})"


def words_of(response: httpx.Response) -> str:
    """What a server says about an error, whatever it wraps it in."""
    try:
        found = response.json()
    except (ValueError, UnicodeDecodeError):
        found = response.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    text = " ".join(text.split())
    return (text[:WORDS] + " …" if len(text) > WORDS else text) or "it gives no reason"
