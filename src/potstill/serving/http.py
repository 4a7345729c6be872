"""The one HTTP client. Requests to a server that may be away for a while: retried with back-off, stopped by what it refuses.
Nothing that a server sends is believed: its answers are as large as asked for or less, uncompressed, and in time."""

from __future__ import annotations

import base64
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import httpcore
from rich.console import Console

from potstill.config import RemoteConfig
from potstill.serving.deadline import Deadline, Sockets
from potstill.types import PotstillError

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 5.0  # after which a connection is not used again: a server may be closing it
WORDS = 500  # characters of what a server says
SMALL = 4 * 2**20  # bytes of an answer whose size cannot be told from what was asked
ERROR_BYTES = 64 * 2**10  # of an error's body that are read
UNSEEN = (httpcore.ConnectError, httpcore.ConnectTimeout)


class Refused(PotstillError):
    """A server does not take a request: sending it again would not help."""


class Unreadable(Exception):
    """An answer that is not to be read."""


def tell(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(message, style="yellow", highlight=False, markup=False)


@dataclass(frozen=True)
class Answer:
    """What a server sent."""

    status: int
    headers: Mapping[str, str]  # names in small letters
    content: bytes

    def json(self) -> Any:
        """ValueError: it is none."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("nested beyond all bounds") from error


class Connection:
    """To one server, for any number of threads. `say`: where the user is told that a run waits."""

    def __init__(self, address: str, config: RemoteConfig, where: str, say: Callable[[str], None] = tell) -> None:
        self.address = address.rstrip("/")
        self.where = where
        self.failures = 0  # so often a request failed, and was sent again
        self._timeout, self._patience = config.timeout, config.retry_timeout
        self._start_timeout = min(config.start_timeout, config.retry_timeout)
        self._say = say
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._seen = False  # any answer of it
        self._variable = config.api_key_env
        self._secret = None if config.api_key_env is None else _token(config.api_key_env, where)
        self._base, user = _parts(self.address, where)
        host = urlsplit(self._base).netloc
        self.headers = {"host": host, "accept": "*/*", "accept-encoding": "identity", "user-agent": "potstill"}
        if user is not None:
            pair = base64.b64encode(f"{user}:{self._secret or ''}".encode()).decode()
            self.headers["authorization"] = f"Basic {pair}"
        elif self._secret is not None:
            self.headers["authorization"] = f"Bearer {self._secret}"
        self._secrets = _spellings(self._secret, self.headers["authorization"]) if self._secret is not None else []
        self._sockets = Sockets()
        # As many connections as threads ask: nobody waits for one. httpcore itself knows no redirects, no compression, and no
        # proxies of the environment's.
        self._pool = httpcore.ConnectionPool(
            max_connections=None,
            max_keepalive_connections=config.concurrency,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=self._sockets,
        )

    @property
    def opened(self) -> int:
        """So often a connection was made."""
        return self._sockets.opened

    def get(self, path: str, most: int = SMALL) -> Answer:
        return self._sent("GET", path, None, most=most)

    def find(self, path: str) -> Answer | None:
        """None: the server has no such address."""
        return self.send("GET", path, absent=(404, 405, 501))

    def post(self, path: str, body: bytes | dict[str, Any], most: int = SMALL) -> Answer:
        return self._sent("POST", path, body, most=most)

    def _sent(self, method: str, path: str, body: bytes | dict[str, Any] | None, most: int) -> Answer:
        found = self.send(method, path, body, most=most)
        assert found is not None, "no code was said to mean that"
        return found

    def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        absent: tuple[int, ...] = (),
        refusals: tuple[int, ...] = (),
        most: int = SMALL,
    ) -> Answer | None:
        """The answer, of at most so many bytes; None for the codes `absent`. Sent again while the server is away or fails, as
        long as the recipe is patient; not when it refuses, also by one of the codes `refusals`."""
        begin, pause = time.monotonic(), FIRST_PAUSE
        while True:
            retry_timeout, key = self._patience, "retry_timeout"
            try:
                answer = self._once(method, path, body, most)
            except (httpcore.LocalProtocolError, httpcore.UnsupportedProtocol) as error:
                # Their words may quote the headers, and the token is in them.
                raise self.error(f"{method} {path} cannot be sent ({type(error).__name__})") from None
            except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
                problem = self._reason(error)
                if isinstance(error, UNSEEN) and not self._seen:
                    retry_timeout, key = self._start_timeout, "start_timeout"
            except Unreadable as error:
                raise self.error(f"its answer to {method} {path} {error}") from None
            else:
                self._seen = True
                if answer.status in absent:
                    return None
                if 200 <= answer.status < 300:
                    self._back()
                    return answer
                if answer.status < 500 or answer.status in refusals:
                    raise self._refused(method, path, answer)
                problem = f"it fails ({answer.status}): {words_of(answer, self._plain)}"
            if self._closing.is_set():
                raise self.error("the run has ended")
            waited = time.monotonic() - begin
            if waited + pause > retry_timeout:
                unseen = "; is it running, and is this its address?" if key == "start_timeout" else ""
                raise self.error(f"{problem}; given up after {waited:.0f} s{self._key(key)}{unseen}")
            self._away(problem, retry_timeout)
            if self._closing.wait(pause * random.uniform(0.75, 1.25)):
                raise self.error("the run has ended")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(self, method: str, path: str, body: bytes | dict[str, Any] | None, most: int) -> Answer:
        headers = dict(self.headers)
        if isinstance(body, dict):
            body = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
            headers["content-type"] = "application/json"
        seconds = {"connect": min(CONNECT_SECONDS, self._timeout)}
        deadline = Deadline(self._timeout, most + len(body or b""))
        with (
            self._sockets.within(deadline),
            self._pool.stream(
                method, self._base + path, headers=list(headers.items()), content=body, extensions={"timeout": seconds}
            ) as response,
        ):
            return _read(response, most)

    def _refused(self, method: str, path: str, answer: Answer) -> Refused:
        code, key = answer.status, _token_key(self.where)
        what = f"{method} {path} is refused ({code}): {words_of(answer, self._plain)}"
        if code < 400:
            there = self._plain(answer.headers.get("location", "nowhere"))[:WORDS]
            what = f"{method} {path} is sent elsewhere ({code}), to {there}: give the address of the server itself"
        elif code == 401 and self._variable is None:
            what += f"; no token was sent: name the environment variable that holds it with {key}"
        elif code == 401:
            what += f"; the token in the environment variable {self._variable} ({key}) is not the server's"
        return Refused(str(self.error(what)))

    def _reason(self, error: Exception) -> str:
        if isinstance(error, httpcore.TimeoutException) and not isinstance(error, httpcore.ConnectTimeout):
            return f"it does not answer in time{self._key('timeout')}"
        if isinstance(error, UNSEEN):
            return f"it cannot be reached ({str(error) or 'connecting takes too long'})"
        return f"the connection broke ({str(error) or type(error).__name__})"

    def _key(self, name: str) -> str:
        """The recipe's key for a number; a command has none."""
        return f" ({self.where}.remote.{name})" if self.where.startswith("teachers") else ""

    def error(self, what: str) -> PotstillError:
        return PotstillError(self._plain(f"{self.where}: the server at {self.address}: {what}"))

    def _plain(self, text: str) -> str:
        """For a terminal: much of it is in a server's words, which may hold control characters, or the token that it got."""
        text = plain(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _away(self, problem: str, retry_timeout: float) -> None:
        with self._lock:
            self.failures += 1
            if self._away_since is not None:
                return
            self._away_since = time.monotonic()
        self._say(self._plain(f"waiting for the server at {self.address}: {problem} (for up to {retry_timeout:g} s)"))

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
        self._sockets.wake()
        self._pool.close()


def _read(response: httpcore.Response, most: int) -> Answer:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    encoding = headers.get("content-encoding", "identity")
    good = 200 <= response.status < 300
    if encoding.strip().lower() != "identity":
        if not good:  # a proxy's words, perhaps: the status says enough
            return Answer(response.status, headers, b"")
        raise Unreadable(f"is compressed ({encoding[:40]}), which it was asked not to do")
    length = headers.get("content-length", "0")
    if good and length.isdecimal() and int(length[:20]) > most:
        raise Unreadable(f"would be {int(length[:20]):,} bytes, and what was asked for has {most:,} at most")
    parts, size = [], 0
    for part in response.iter_stream():
        parts.append(part)
        size += len(part)
        if good and size > most:
            raise Unreadable(f"does not end: what was asked for has {most:,} bytes at most")
        if not good and size > ERROR_BYTES:
            break
    return Answer(response.status, headers, b"".join(parts))


def _parts(address: str, where: str) -> tuple[str, str | None]:
    """The address as requests need it, and the user that it names. One that is refused is not shown, nor what urllib says of
    it: what it was meant to be is not known, and there may be a password in it."""
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError
        parts = urlsplit(address)
        host, port, user = (parts.hostname or "").encode("idna").decode(), parts.port, parts.username
        if not host or parts.query or parts.fragment:
            raise ValueError
    except ValueError:
        raise PotstillError(
            f"{where}.server: what stands there is no address of a server: write http://HOST:PORT (or https://), with "
            "at most "
            "a user before and a path after it"
        ) from None
    place = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    return f"{parts.scheme}://{place}{parts.path}", None if user is None else unquote(user)


def plain(text: str) -> str:
    """On one line, without characters that would move a terminal's cursor, or hide what stands there."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def sound_token(token: str) -> bool:
    """Whether it can stand in a header."""
    return bool(token) and all("!" <= character <= "~" for character in token)


def _token_key(where: str) -> str:
    """What names the variable: a recipe's key, or the option of a command without one."""
    return f"{where}.remote.api_key_env" if where.startswith("teachers") else "--token-env"


def _token(variable: str, where: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise PotstillError(
            f"{_token_key(where)}: there is no environment variable {variable}, which is to hold the server's token"
        )
    if not sound_token(token):
        raise PotstillError(
            f"{_token_key(where)}: the environment variable {variable} holds spaces, or characters that are not ASCII, "
            "within "
            "the token: set it to the token alone"
        )
    return token


def _spellings(secret: str, header: str) -> list[str]:
    """How a server may give back a token: as in JSON, or as the header has it, also in base64. The longest first."""
    return sorted({secret, json.dumps(secret)[1:-1], header.partition(" ")[2]}, key=len, reverse=True)


def words_of(answer: Answer, plain: Callable[[str], str]) -> str:
    """What a server says about an error, whatever it wraps it in; cut only when there is no secret left to be cut in two."""
    try:
        found = answer.json()
    except ValueError:
        found = answer.content.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = plain(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
    return (text[:WORDS] + " …" if len(text) > WORDS else text) or "it gives no reason"
