"""What a connection does with servers that hang, redirect or send rubbish, and with tokens that cannot be sent. The servers are
sockets that say one thing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from potstill.config import RemoteConfig
from potstill.teachers.asking import Asking
from potstill.teachers.connection import Connection
from potstill.types import PotstillError


@contextmanager
def saying(answer: bytes | None) -> Iterator[tuple[str, threading.Event]]:
    """A server that gives this answer to all; None: it reads, and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    asked, kept = threading.Event(), []

    def work() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            kept.append(one)
            one.recv(65536)
            asked.set()
            if answer is not None:
                one.sendall(answer)
                one.close()

    threading.Thread(target=work, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for one in kept:
        one.close()


def test_a_command_without_a_recipe_names_its_option() -> None:
    with pytest.raises(PotstillError, match="--token-env: there is no environment variable NO_SUCH_VARIABLE"):
        Connection("http://127.0.0.1:9", RemoteConfig(token="NO_SUCH_VARIABLE"), "MODEL")


def connection(address: str, said: list[str] | None = None, **remote: object) -> Connection:
    lines = [] if said is None else said
    return Connection(address, RemoteConfig.model_validate({"patience": 5.0, **remote}), "teachers[0]", lines.append)


def test_close_ends_a_request_that_is_under_way() -> None:
    said: list[str] = []
    with saying(None) as (address, asked), ThreadPoolExecutor(1) as pool:
        made = connection(address, said, timeout=60.0)
        waiting = pool.submit(made.get, "/version")
        assert asked.wait(10)
        time.sleep(0.3)  # it reads by now: closing a socket before that would end it too
        begin = time.monotonic()
        made.close()
        with pytest.raises(PotstillError, match="the run has ended"):
            waiting.result(timeout=30)
        assert time.monotonic() - begin < 5 and said == []  # nobody is told to wait for it


def test_what_asks_does_not_keep_a_process_from_ending() -> None:
    program = (
        "import time; from potstill.teachers.asking import Asking; from potstill.types import PotstillError\n"
        "asking = Asking(2, lambda: PotstillError('ended'))\n"
        "futures = [asking.submit(time.sleep, 60) for _ in range(3)]\n"
        "time.sleep(0.2); asking.close()\n"
        "print([type(f.exception(timeout=5)).__name__ for f in futures])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40)
    assert done.stdout.strip() == "['PotstillError', 'PotstillError', 'PotstillError']", done.stderr


def test_asking_gives_results_and_errors_and_refuses_when_closed() -> None:
    asking = Asking(2, lambda: PotstillError("ended"))
    assert [asking.submit(divmod, i, 3).result(10) for i in range(9)] == [divmod(i, 3) for i in range(9)]
    with pytest.raises(ZeroDivisionError):
        asking.submit(divmod, 1, 0).result(10)
    together = threading.Barrier(2)
    futures = [asking.submit(together.wait, 10) for _ in range(2)]
    assert sorted(future.result(10) for future in futures) == [0, 1]
    asking.close()
    with pytest.raises(PotstillError, match="ended"):
        asking.submit(divmod, 1, 2)


@pytest.mark.parametrize(
    ("value", "sent"), [("secret\n", True), (" secret ", True), ("sec\nret", False), ("sécret", False)]
)
def test_tokens_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, sent: bool) -> None:
    """A file's last newline is not part of it; what cannot stand in a header is refused, and never shown."""
    monkeypatch.setenv("A_TOKEN", value)
    with saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (address, _):
        if sent:
            made = connection(address, token="A_TOKEN")
            assert made._client.headers["authorization"] == "Bearer secret"
            assert made.get("/version").content == b"{}"
            made.close()
            return
        with pytest.raises(
            PotstillError, match=r"teachers\[0\]\.remote\.token: the environment variable A_TOKEN"
        ) as error:
            connection(address, token="A_TOKEN")
        assert "ret" not in str(error.value)


def test_a_request_that_cannot_be_sent_is_not_shown_nor_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with saying(None) as (address, _):
        made = connection(address, said)
        made._client.headers["authorization"] = "Bearer secret\n"
        with pytest.raises(PotstillError, match="cannot be sent") as error:
            made.get("/version")
        assert "secret" not in str(error.value) and error.value.__cause__ is None and said == []
        made.close()


@pytest.mark.parametrize(
    ("answer", "token", "words"),
    [
        (b"307 Temporary Redirect\r\nlocation: https://elsewhere/x", None, r"elsewhere \(307\), to https://elsewhere/x"),
        (b"304 Not Modified", None, "sent elsewhere"),
        (b"200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nrubb", None, "cannot be read"),
        (b"401 Unauthorized", None, r"no token was sent: name the environment variable .* teachers\[0\]\.remote\.token"),
        (b"401 Unauthorized", "A_TOKEN", r"A_TOKEN \(teachers\[0\]\.remote\.token\) is not the server's"),
    ],
)  # fmt: skip
def test_answers_that_end_a_run(monkeypatch: pytest.MonkeyPatch, answer: bytes, token: str | None, words: str) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    body = b"" if b"\r\n\r\n" in answer else b"\r\ncontent-length: 0\r\n\r\n"
    with saying(b"HTTP/1.1 " + answer + body) as (address, _):
        made = connection(address, token=token)
        with pytest.raises(PotstillError, match=words):
            made.post("/score", b"x")
        made.close()
