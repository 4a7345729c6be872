"""What a connection does with servers that hang, redirect or send rubbish, and with tokens that cannot be sent. The servers are
sockets that say one thing."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from gzip import compress
from pathlib import Path

import pytest

from potstill.config import EngineConfig, RemoteConfig, TeacherConfig
from potstill.config.recipe import checked
from potstill.http_client import Connection
from potstill.types import PotstillError

Parts = Callable[[], Iterable[bytes]]


@contextmanager
def saying(answer: bytes | Parts | None, heard: list[bytes] | None = None) -> Iterator[tuple[str, threading.Event]]:
    """A server that gives this answer to all, perhaps in parts; None: it reads, and never answers. `heard`: what it reads."""
    listening = socket.create_server(("127.0.0.1", 0))
    asked, kept = threading.Event(), []

    def say(one: socket.socket, parts: Iterable[bytes]) -> None:
        with suppress(OSError):  # the client has had enough
            for part in parts:
                one.sendall(part)
        one.close()

    def work() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            kept.append(one)
            found = one.recv(65536)
            if heard is not None:
                heard.append(found)
            asked.set()
            if answer is not None:
                parts = [answer] if isinstance(answer, bytes) else answer()
                threading.Thread(target=say, args=(one, parts), daemon=True).start()

    threading.Thread(target=work, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for one in kept:
        one.close()


def test_a_command_without_a_recipe_names_its_option() -> None:
    with pytest.raises(PotstillError, match="--token-env: there is no environment variable NO_SUCH_VARIABLE"):
        Connection("http://127.0.0.1:9", RemoteConfig(api_key_env="NO_SUCH_VARIABLE"), "MODEL")


def connection(address: str, said: list[str] | None = None, **remote: object) -> Connection:
    lines = [] if said is None else said
    return Connection(
        address, RemoteConfig.model_validate({"retry_timeout": 5.0, **remote}), "teachers[0]", lines.append
    )


def test_close_ends_a_request_that_is_under_way() -> None:
    said: list[str] = []
    with saying(None) as (address, asked), ThreadPoolExecutor(1) as pool:
        made = connection(address, said, timeout=3600.0)
        waiting = pool.submit(made.get, "/version")
        assert asked.wait(120)
        time.sleep(0.1)  # it reads by now; before that, closing the socket would end it too
        made.close()
        with pytest.raises(PotstillError, match="the run has ended"):
            waiting.result(timeout=120)
        assert said == []  # nobody is told to wait for it


def test_a_server_that_hangs_does_not_keep_a_process_from_ending() -> None:
    """Neither when the connection is closed, and everybody is told so, nor when it is not."""
    program = (
        "import sys; from test_http import connection, saying\n"
        "with saying(None) as (address, asked):\n"
        "    made = connection(address, timeout=3600.0, concurrency=2)\n"
        "    answers = [made.submit(made.get, '/version') for _ in range(3)]\n"
        "    assert asked.wait(120)\n"
        "    if sys.argv[1] == 'close':\n"
        "        made.close()\n"
        "        for answer in answers:\n"
        "            answer.wait(60)\n"
        "            print(type(answer._value).__name__, str(answer._value)[-17:])"
    )
    for close in (True, False):
        command = [sys.executable, "-c", program, "close" if close else ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["PotstillError the run has ended"] * (3 if close else 0), done.stderr


def test_calls_on_other_threads_give_results_and_errors_in_order() -> None:
    made = connection("http://127.0.0.1:9", concurrency=2)
    assert made.each(lambda i: divmod(i, 3), range(9)) == [divmod(i, 3) for i in range(9)]
    with pytest.raises(ZeroDivisionError):
        made.submit(divmod, 1, 0).get(10)
    together = threading.Barrier(2)
    answers = [made.submit(together.wait, 10) for _ in range(2)]
    assert sorted(answer.get(10) for answer in answers) == [0, 1]
    first, never = threading.Event(), threading.Event()

    def one(number: int) -> None:
        if number == 0:
            first.set()
            never.wait(60)
        assert first.wait(10)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # it does not wait for the first
        made.each(one, range(2))
    assert not never.is_set()
    never.set()
    made.close()
    with pytest.raises(PotstillError, match="the run has ended"):
        made.submit(divmod, 1, 2)


@pytest.mark.parametrize(
    ("value", "sent"), [("secret\n", True), (" secret ", True), ("sec\nret", False), ("sécret", False)]
)
def test_tokens_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, sent: bool) -> None:
    """A file's last newline is not part of it; what cannot stand in a header is refused, and never shown."""
    monkeypatch.setenv("A_TOKEN", value)
    with saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (address, _):
        if sent:
            made = connection(address, api_key_env="A_TOKEN")
            assert made.headers["authorization"] == "Bearer secret"
            assert made.get("/version").content == b"{}"
            made.close()
            return
        with pytest.raises(
            PotstillError, match=r"teachers\[0\]\.remote\.api_key_env: the environment variable A_TOKEN"
        ) as error:
            connection(address, api_key_env="A_TOKEN")
        assert "ret" not in str(error.value)


def test_a_request_that_cannot_be_sent_is_not_shown_nor_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with saying(None) as (address, _):
        made = connection(address, said)
        made.headers["authorization"] = "Bearer secret\n"
        with pytest.raises(PotstillError, match="cannot be sent") as error:
            made.get("/version")
        assert "secret" not in str(error.value) and error.value.__cause__ is None and said == []
        made.close()


@pytest.mark.parametrize(
    ("answer", "token", "words"),
    [
        (b"307 Temporary Redirect\r\nlocation: https://elsewhere/x", None, r"elsewhere \(307\), to https://elsewhere/x"),
        (b"304 Not Modified", None, "sent elsewhere"),
        (b"200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nrubb", None, r"is compressed \(gzip\)"),
        (b"401 Unauthorized", None, r"no token was sent: name the environment variable .* teachers\[0\]\.remote\.api_key_env"),
        (b"401 Unauthorized", "A_TOKEN", r"A_TOKEN \(teachers\[0\]\.remote\.api_key_env\) is not the server's"),
    ],
)  # fmt: skip
def test_answers_that_end_a_run(monkeypatch: pytest.MonkeyPatch, answer: bytes, token: str | None, words: str) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    body = b"" if b"\r\n\r\n" in answer else b"\r\ncontent-length: 0\r\n\r\n"
    with saying(b"HTTP/1.1 " + answer + body) as (address, _):
        made = connection(address, api_key_env=token)
        with pytest.raises(PotstillError, match=words):
            made.post("/score", b"x")
        made.close()


def test_a_compressed_error_page_is_waited_out() -> None:
    """As a proxy sends one while the server behind it starts."""
    page = compress(b"<h1>Bad Gateway</h1>")
    away = b"HTTP/1.1 502 Bad Gateway\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(page) + page
    answers = iter([away, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"])
    said: list[str] = []
    with saying(lambda: [next(answers)]) as (address, _):
        made = connection(address, said)
        assert made.get("/version").content == b"ok"
        made.close()
    assert "it fails (502): it gives no reason" in said[0]


# Servers that would hold a run, or fill its memory

OK = b"HTTP/1.1 200 OK\r\n"


def dripping(before: bytes, letter: bytes, after: bytes) -> Iterator[bytes]:
    yield before
    never = threading.Event()
    for _ in range(
        400
    ):  # eight seconds or more: it does end, so that a client without a deadline fails and does not hang
        never.wait(0.02)
        yield letter
    yield after


@pytest.mark.parametrize(
    ("before", "letter", "after"),
    [
        (b"", b"", b""),
        (OK + b"x-slow: ", b"x", b"\r\ncontent-length: 2\r\n\r\n{}"),
        (OK + b"content-length: 400\r\n\r\n", b" ", b""),
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", b"0\r\n\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 2\r\n\r\n{}"),
    ],
    ids=["nothing", "headers", "body", "chunks", "100-continue"],
)
def test_a_byte_now_and_then_does_not_hold_a_request(before: bytes, letter: bytes, after: bytes) -> None:
    with saying(lambda: dripping(before, letter, after)) as (address, _):
        made = connection(address, timeout=1.0, retry_timeout=0.0)
        with pytest.raises(PotstillError, match=r"does not answer in time \(teachers\[0\]\.remote\.timeout\)"):
            made.get("/version")
        made.close()


def endless() -> Iterator[bytes]:
    yield OK + b"transfer-encoding: chunked\r\n\r\n"
    while True:
        yield b"10000\r\n" + bytes(2**16) + b"\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (OK + b"content-length: 5000000000\r\n\r\n{}", "would be 5,000,000,000 bytes, and .* 4,194,304 at most"),
        (endless, "does not end: what was asked for has 4,194,304 bytes at most"),
        (
            OK + b"content-encoding: gzip\r\n\r\n" + compress(bytes(2**22)),
            r"is compressed \(gzip\), which it was asked not",
        ),
    ],
    ids=["said", "endless", "compressed"],
)
def test_answers_are_no_larger_than_what_was_asked_for(answer: bytes | Parts, words: str) -> None:
    heard: list[bytes] = []
    with saying(answer, heard) as (address, _):
        made = connection(address)
        with pytest.raises(PotstillError, match=words):
            made.get("/version")
        made.close()
    assert len(heard) == 1 and b"accept-encoding: identity\r\n" in heard[0].lower()  # it is not asked again


def test_an_error_is_read_as_far_as_it_is_shown() -> None:
    def parts() -> Iterator[bytes]:
        yield b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n"
        while True:
            yield b"10000\r\n" + b"no" * 2**15 + b"\r\n"

    with saying(parts) as (address, _):
        made = connection(address)
        with pytest.raises(PotstillError, match=r"is refused \(400\): (no){250} …$"):
            made.get("/version")
        made.close()


@pytest.mark.parametrize("code", [b"400 Bad Request", b"307 Elsewhere", b"500 Broken"])
def test_nothing_of_a_servers_moves_the_cursor_or_shows_the_token(monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    monkeypatch.setenv("A_TOKEN", "open-sesame")
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\u200b\x9b31mBearer open-sesame\r\nsecond line"
    body = evil.encode()
    place = "http://x/\x1b[2Jopen-sesame".encode("latin-1") if code.startswith(b"307") else b"/"
    head = b"HTTP/1.1 " + code + b"\r\nlocation: " + place + b"\r\ncontent-length: " + str(len(body)).encode()
    said: list[str] = []
    with saying(head + b"\r\n\r\n" + body) as (address, _):
        made = connection(address, said, api_key_env="A_TOKEN", retry_timeout=0.4)
        with pytest.raises(PotstillError) as error:
            made.get("/version")
        made.close()
    for text in [str(error.value), *said]:
        assert text.isprintable() and "open-sesame" not in text, text
    if not code.startswith(b"307"):
        assert "Bearer *** second line" in str(error.value)
        assert bool(said) == code.startswith(b"500")


# Addresses


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    for section, keys in (
        (TeacherConfig, {"server": "http://me:hunter2@host:8471"}),
        (TeacherConfig, {"server": "me:hunter2@host"}),
        (EngineConfig, {"kind": "vllm", "server": "https://me:hunter2@host/v1"}),
        (TeacherConfig, {"server": "http://me:hun/ter2@host"}),
        (TeacherConfig, {"server": "https//me:hunter2@host"}),
        (TeacherConfig, {"server": "http:/me:hunter2@host"}),
        (TeacherConfig, {"server": "http://me%3Ahunter2@host"}),
        (TeacherConfig, {"server": "http://me%3ahunter2%40host"}),
    ):
        with pytest.raises(PotstillError, match=r"server: an address holds no password.*remote\.api_key_env") as error:
            checked(section, keys, "recipe.yaml")
        assert "ter2" not in str(error.value)
    for address in ("http://host/?key=hunter2", "http://host/v1#hunter2"):
        with pytest.raises(PotstillError, match=r"server: an address ends with its path.*remote\.api_key_env") as error:
            checked(TeacherConfig, {"server": address}, "recipe.yaml")
        assert "hunter2" not in str(error.value)
    for address in ("http://me:hunter2", "me:hunter2", "http://[hunter2", "http://hunter2\u2100:80", "http://"):
        with pytest.raises(PotstillError, match="is no address") as error:
            connection(address)
        assert "hunter2" not in str(error.value)
    for address in ("http://[::1]:80/a%40b:c", "https://me@host:8471/v1", "http://a@b@host"):
        assert TeacherConfig(server=address).server == address


def test_no_spelling_of_a_secret_is_shown_however_the_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", 'open"sesame')
    pair = base64.b64encode(b'me:open"sesame').decode()
    cut = "x" * 490
    for words in (f"you sent Basic {pair}", json.dumps({"detail": {"got": 'open"sesame'}}), f'{cut} open"sesame'):
        body = words.encode()
        head = b"HTTP/1.1 403 Forbidden\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n"
        with saying(head + body) as (address, _):
            made = connection(address.replace("//", "//me@"), api_key_env="A_TOKEN")
            with pytest.raises(PotstillError, match=r"is refused \(403\): .*\*\*\*") as error:
                made.get("/version")
            made.close()
        assert pair not in str(error.value) and "sesame" not in str(error.value) and 'open"' not in str(error.value)


def test_a_users_password_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "hunter2")
    heard: list[bytes] = []
    with saying(OK + b"content-length: 2\r\n\r\n{}", heard) as (address, _):
        made = connection(address.replace("//", "//m%20e@"), api_key_env="A_TOKEN")
        assert made.get("/version").json() == {}
        made.close()
    assert b"authorization: Basic bSBlOmh1bnRlcjI=\r\n" in heard[0]  # of "m e:hunter2"
    assert f"host: {address.removeprefix('http://')}\r\n".encode() in heard[0]


# The start


def test_a_server_that_was_never_there_is_not_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made = connection(
            f"http://127.0.0.1:{free.getsockname()[1]}", said := [], retry_timeout=600.0, start_timeout=0.5
        )
        words = (
            r"cannot be reached .*; given up after \d s \(teachers\[0\]\.remote\.start_timeout\); is it running, and is"
        )
        with pytest.raises(PotstillError, match=words):
            made.get("/version")
        made.close()
    assert ["for up to 0.5 s" in line for line in said] == [True]


def test_a_server_that_was_there_is_waited_for() -> None:
    with saying(OK + b"content-length: 2\r\nconnection: close\r\n\r\n{}") as (address, _):
        made = connection(address, said := [], retry_timeout=1.0, start_timeout=0.0)
        made.get("/version")
    with pytest.raises(
        PotstillError, match=r"cannot be reached .*given up after \d s \(teachers\[0\]\.remote\.retry_timeout\)$"
    ):
        made.get("/version")
    made.close()
    assert ["for up to 1 s" in line for line in said] == [True] and made.failures >= 1
