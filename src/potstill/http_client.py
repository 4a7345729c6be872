"""The only HTTP client: requests to a server that may be away for a while are retried with back-off, and stop at what it
refuses. Nothing that a server sends is trusted: an answer is no larger than asked for, uncompressed, and in time."""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from multiprocessing.pool import AsyncResult, ThreadPool
from operator import itemgetter
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

import httpcore
from rich.console import Console

from potstill.config import RemoteConfig
from potstill.errors import PotstillError

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # after which a connection is not used again: uvicorn closes one after 5
RATE = 128 * 2**10  # bytes per second: a transfer that is slower (1 Mbit/s) runs out of time
SLICE = 64 * 2**10  # bytes that are sent at once
WORDS = 500  # characters of what a server says
SMALL = 4 * 2**20  # bytes of an answer whose size cannot be told from the request
ERROR_BYTES = 64 * 2**10  # of an error's body that are read
UNREACHED = (httpcore.ConnectError, httpcore.ConnectTimeout)
NO_SUCH_PATH = (404, 405, 501)

Body = bytes | dict[str, Any] | None
Codes = tuple[int, ...]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Refused(PotstillError):
    """A server rejects a request: sending it again would not help."""


def tell(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(message, style="yellow", highlight=False, markup=False)


@dataclass(frozen=True)
class Answer:
    """What a server sent."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    content: bytes

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """ValueError: it is not JSON."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("nested beyond all bounds") from error

    def object(self) -> dict[str, Any]:
        """ValueError: what it is instead of a JSON object."""
        try:
            found = self.json()
        except ValueError as error:
            raise ValueError(f"no JSON ({error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"no JSON object: {json.dumps(found)[:80]}")
        return found

    def words(self, plain: Callable[[str], str]) -> str:
        """What it says about an error, whatever that is wrapped in. It is cut only after `plain` has taken the secrets out."""
        try:
            found = self.json()
        except ValueError:
            found = self.content.decode("utf-8", "replace")
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        text = plain(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
        return (text[:WORDS] + " …" if len(text) > WORDS else text) or "it gives no reason"


class Connection:
    """To one server, for any number of threads. `say`: where the user is told that a run waits."""

    def __init__(self, address: str, config: RemoteConfig, where: str, say: Callable[[str], None] = tell) -> None:
        self.address, self.where = address.rstrip("/").removesuffix("/v1"), where
        self.failures = 0  # requests that failed and were sent again
        self._config, self._say = config, say
        self._in_recipe = where.startswith("teachers")  # a command has options instead of keys
        self._token_key = f"{where}.remote.api_key_env" if self._in_recipe else "--token-env"
        secret = token_from(config.api_key_env, self._token_key)
        self._base, user = _parts(self.address, where)
        host = urlsplit(self._base).netloc
        self.headers = {"host": host, "accept": "*/*", "accept-encoding": "identity", "user-agent": "potstill"}
        sent = secret if user is None else base64.b64encode(f"{user}:{secret or ''}".encode()).decode()
        if sent is not None:
            self.headers["authorization"] = f"{'Bearer' if user is None else 'Basic'} {sent}"
        # A server may repeat the token as it is, as JSON has it, or as the header does. The longest is masked first.
        forms = {secret, json.dumps(secret)[1:-1], str(sent)} if secret is not None else set()
        self._secrets = sorted(forms, key=len, reverse=True)
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._away_since: float | None = None
        self._seen = False  # any answer of it
        self.sockets = Sockets()
        # As many connections as there are threads: none waits for another. httpcore itself follows no redirect, decompresses
        # nothing and uses no proxy of the environment.
        self._pool = httpcore.ConnectionPool(
            max_connections=None,
            max_keepalive_connections=config.concurrency,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=self.sockets,
        )

    @cached_property
    def _threads(self) -> ThreadPool:
        """Daemons, unlike those of a ThreadPoolExecutor: a server that hangs does not keep the process from ending."""
        return ThreadPool(self._config.concurrency)

    def submit(self, call: Callable[..., Result], *arguments: Any) -> AsyncResult[Result]:
        """On another thread, as many at once as `concurrency` says."""
        self._check_open()
        return self._threads.apply_async(call, arguments)

    def each(self, call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The same for each of some, in their order. The first error is raised when it comes: the others are not waited for."""
        self._check_open()
        answers = self._threads.imap_unordered(lambda one: (one[0], call(one[1])), enumerate(items))
        return [result for _, result in sorted(answers, key=itemgetter(0))]

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise self.error("the run has ended")

    def send(
        self, method: str, path: str, body: Body = None, most: int = SMALL, *, accepted: Codes = (), fatal: Codes = ()
    ) -> Answer:
        """The answer, of at most so many bytes, if it is good or has one of the codes `accepted`. The request is sent again
        while the server is away or fails, for as long as the recipe says; not if it is refused, by 3xx, 4xx or `fatal`."""
        begin, pause = time.monotonic(), FIRST_PAUSE
        while True:
            self._check_open()
            patience, key = self._config.retry_timeout, "retry_timeout"
            try:
                answer = self._once(method, path, body, most)
            except (httpcore.LocalProtocolError, httpcore.UnsupportedProtocol) as error:
                # Their words may quote the headers, and the token is in them.
                raise self.error(f"{method} {path} cannot be sent ({type(error).__name__})") from None
            except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
                problem = self._reason(error)
                if isinstance(error, UNREACHED) and not self._seen:
                    patience, key = min(self._config.start_timeout, patience), "start_timeout"
            else:
                self._seen = True
                if answer.good:
                    self._back()
                if answer.good or answer.status in accepted:
                    return answer
                if answer.status < 500 or answer.status in fatal:
                    raise self._refused(method, path, answer)
                problem = f"it fails ({answer.status}): {answer.words(self._plain)}"
            self._check_open()  # closing it breaks off what is under way
            waited = time.monotonic() - begin
            if waited + pause > patience:
                unseen = "; is it running, and is this its address?" if key == "start_timeout" else ""
                raise self.error(f"{problem}; given up after {waited:.0f} s{self._key(key)}{unseen}")
            self._away(problem, patience)
            self._closing.wait(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE)

    get = partialmethod(send, "GET")
    post = partialmethod(send, "POST")

    def _once(self, method: str, path: str, body: Body, most: int) -> Answer:
        headers = dict(self.headers)
        if isinstance(body, dict):
            body = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
            headers["content-type"] = "application/json"
        self.sockets.begin(self._config.timeout, most + len(body or b""))
        seconds = {"connect": min(CONNECT_SECONDS, self._config.timeout)}
        with self._pool.stream(
            method, self._base + path, headers=list(headers.items()), content=body, extensions={"timeout": seconds}
        ) as response:
            return self._read(f"its answer to {method} {path}", response, most)

    def _read(self, what: str, response: httpcore.Response, most: int) -> Answer:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        answer = Answer(response.status, headers, b"")
        encoding, length = headers.get("content-encoding", "identity"), headers.get("content-length", "0")
        if encoding.strip().lower() != "identity":
            if not answer.good:  # a proxy's words, perhaps: the status says enough
                return answer
            raise self.error(f"{what} is compressed ({encoding[:40]}), which it was asked not to do")
        if answer.good and length.isdecimal() and int(length[:20]) > most:
            large = int(length[:20])
            raise self.error(f"{what} would be {large:,} bytes, and what was asked for has {most:,} at most")
        content = bytearray()
        for part in response.iter_stream():
            content += part
            if answer.good and len(content) > most:
                raise self.error(f"{what} does not end: what was asked for has {most:,} bytes at most")
            if not answer.good and len(content) > ERROR_BYTES:
                break
        return replace(answer, content=bytes(content))

    def _refused(self, method: str, path: str, answer: Answer) -> Refused:
        code, variable = answer.status, self._config.api_key_env
        what = f"{method} {path} is refused ({code}): {answer.words(self._plain)}"
        if code < 400:
            there = self._plain(answer.headers.get("location", "nowhere"))[:WORDS]
            what = f"{method} {path} is sent elsewhere ({code}), to {there}: give the address of the server itself"
        elif code == 401 and variable is None:
            what += f"; no token was sent: name the environment variable that holds it with {self._token_key}"
        elif code == 401:
            what += f"; the token in the environment variable {variable} ({self._token_key}) is not the server's"
        return Refused(str(self.error(what)))

    def _reason(self, error: Exception) -> str:
        if isinstance(error, UNREACHED):
            return f"it cannot be reached ({str(error) or 'connecting takes too long'})"
        if isinstance(error, httpcore.TimeoutException):
            return f"it does not answer in time{self._key('timeout')}"
        return f"the connection broke ({str(error) or type(error).__name__})"

    def _key(self, name: str) -> str:
        return f" ({self.where}.remote.{name})" if self._in_recipe else ""

    def error(self, what: str) -> PotstillError:
        return PotstillError(self._plain(f"{self.where}: the server at {self.address}: {what}"))

    def _plain(self, text: str) -> str:
        """For a terminal: a server's words may hold control characters, or the token that it got."""
        text = plain(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _away(self, problem: str, patience: float) -> None:
        with self._lock:
            self.failures += 1
            if self._away_since is not None:
                return
            self._away_since = time.monotonic()
        self._say(self._plain(f"waiting for the server at {self.address}: {problem} (for up to {patience:g} s)"))

    def _back(self) -> None:
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            self._say(f"the server at {self.address} answers again, after {time.monotonic() - since:.0f} s")

    def close(self) -> None:
        """Whoever waits for the server stops waiting, also in the middle of a request."""
        self._closing.set()
        self.sockets.wake()
        if "_threads" in vars(self):
            self._threads.close()  # what waits there ends as soon as it begins
        self._pool.close()


def _parts(address: str, where: str) -> tuple[str, str | None]:
    """The address as requests need it, and the user that it names. A wrong one is not shown, nor what urllib says of it: there
    may be a password in it."""
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError
        parts = urlsplit(address)
        host, port, user = (parts.hostname or "").encode("idna").decode(), parts.port, parts.username
        if not host or parts.query or parts.fragment:
            raise ValueError
    except ValueError:
        raise PotstillError(
            f"{where}.server: what stands there is no address of a server: write http://HOST:PORT (or https://), with at "
            "most a user before and a path after it"
        ) from None
    place = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    return f"{parts.scheme}://{place}{parts.path}", None if user is None else unquote(user)


def plain(text: str) -> str:
    """On one line, without characters that would move a terminal's cursor or hide what stands there."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def token_from(variable: str | None, key: str) -> str | None:
    """The bearer token that an environment variable holds; `key`: what names the variable. It is never shown."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise PotstillError(f"{key}: there is no environment variable {variable}, or it is empty")
    if not all("!" <= character <= "~" for character in token):
        raise PotstillError(
            f"{key}: the environment variable {variable} holds spaces, or characters that are not ASCII, within the token, "
            "and no client could send it: set it to the token alone"
        )
    return token


class Sockets(httpcore.NetworkBackend):
    """Makes the connections of a pool. A request ends in time: after so many seconds, and as many more as its bytes take at
    RATE, and after so many seconds between one byte and the next. httpcore's timeouts are for each read and write: a byte now
    and then would hold a request for ever."""

    def __init__(self) -> None:
        self.opened = 0  # sockets
        self.request = threading.local()  # the one under way on a thread; `moved`: its bytes, both ways
        self._lock = threading.Lock()
        self._open: WeakSet[socket.socket] = WeakSet()
        self._ended = False

    def begin(self, seconds: float, most: int) -> None:
        """A request that may move so many bytes."""
        now = self.request
        now.seconds, now.end, now.most, now.moved = seconds, time.monotonic() + seconds, most, 0

    def left(self) -> float:
        """Seconds that the request has."""
        now = self.request
        return float(min(now.seconds, now.end + min(now.moved, now.most) / RATE - time.monotonic()))

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = max(min(self.left(), timeout or CONNECT_SECONDS), 1e-3)
        return TimedStream(httpcore.SyncBackend().connect_tcp(host, port, seconds, local_address, socket_options), self)

    def keep(self, made: socket.socket) -> None:
        with self._lock:
            self.opened += 1
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
        if (left := self._sockets.left()) <= 0:
            raise httpcore.ReadTimeout
        found = self._stream.read(max_bytes, left)
        self._sockets.request.moved += len(found)
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        while rest:
            if (left := self._sockets.left()) <= 0:
                raise httpcore.WriteTimeout
            try:
                self._socket.settimeout(left)
                sent = self._socket.send(rest[:SLICE])
            except TimeoutError as error:
                raise httpcore.WriteTimeout from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error
            self._sockets.request.moved += sent
            rest = rest[sent:]

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = max(self._sockets.left(), 1e-3)
        # TLS makes another socket of the first.
        return TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._sockets)
