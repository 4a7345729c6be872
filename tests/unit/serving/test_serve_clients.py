"""`potstill serve` with clients that send half a request, do not read their answer, connect and say nothing, or come under a
name that is not the server's: its memory stays within what was said, and whoever behaves is answered."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import Served
from threaded import Threaded
from tiny import CPU, examples

from potstill.cache.origin import identity_of_model
from potstill.config import TeacherConfig
from potstill.models import LanguageModel, load_teacher
from potstill.serving.batching import Busy, Scorer
from potstill.serving.connections import Budget, Hold, guarded
from potstill.serving.protocol import Question, read_answer, read_question, write_answer, write_question
from potstill.serving.server import PIECE, ServeOptions, Service, application, serve, streamed
from potstill.signals.kinds import TokenLogprobs, TopK
from potstill.teachers.remote import open_server
from potstill.types import PotstillError

ALL = TopK(2048, k=2048)
SECONDS = 60.0  # that anything here may take
CLIENT = httpx.Client(
    timeout=SECONDS, limits=httpx.Limits(max_keepalive_connections=0)
)  # each request has a connection


def until(true: Callable[[], Any]) -> Any:
    """What `true` gives when it is so at last."""
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.05)):
        if found := true():
            return found
        pause.wait(0.05)
    raise AssertionError("it never was so")


def metric(server: Served, name: str) -> float:
    """The sum over its labels."""
    found = CLIENT.get(f"{server.address}/metrics")
    lines = found.text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"potstill_{name}[ {{]", line))


def megabytes(server: Served, field: str) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", status, re.M)[1]) / 2**10  # type: ignore[index]


def connected(server: Served | Threaded) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made


def posted(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST /score HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n".encode() + body


def ended(made: socket.socket) -> bool:
    """It was closed by the server, whatever is left to read."""
    try:
        while made.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture(scope="module")
def server(tiny_teacher: Path) -> Iterator[Served]:
    limits = ["--max-memory-mb", 192, "--max-answer-mb", 40, "--max-body-mb", 8]
    with Served(tiny_teacher, *limits, "--max-connections", 40, "--client-timeout", 8) as running:
        yield running
    assert "Traceback" not in "".join(running.said)


def test_memory_is_bounded_with_clients_that_do_not_read(server: Served) -> None:
    """25 answers of 24 MB each, of which nobody reads a byte."""
    body = write_question(Question(ALL, examples([100] * 20)))
    warm = CLIENT.post(f"{server.address}/score", content=body)
    size = len(warm.content)
    assert warm.status_code == 200 and size > 24 * 2**20
    answered = metric(server, "requests_total")
    before = megabytes(server, "VmRSS")
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(25)]
        for one in clients:
            one.sendall(posted(body))
        asked = iter(range(1, 10_000))  # each look is a request too
        until(lambda: metric(server, "requests_total") - answered >= 25 + next(asked))
        assert metric(server, "held_bytes") <= 192 * 2**20
        assert megabytes(server, "VmHWM") - before < 192 + 250
        until(lambda: metric(server, "held_bytes") == 0)  # they were disconnected
    assert metric(server, "clients_cut_off_total") >= 1
    assert any(
        "did not read its answer in time (--client-timeout), and was disconnected" in line for line in server.said
    )
    again = CLIENT.post(f"{server.address}/score", content=body)
    assert again.status_code == 200 and len(again.content) == size


def test_unfinished_bodies_count_and_end(server: Served) -> None:
    """Each byte counts as it comes; when somebody else needs room, the slowest makes it, and the others end in time."""
    half = bytes(4 * 2**20)
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(11)]
        for one in clients:
            one.sendall(posted(half, 2 * len(half)))
        until(lambda: metric(server, "held_bytes") == 11 * 4 * len(half))
        body = write_question(Question(ALL, examples([100] * 20)))
        until(lambda: CLIENT.post(f"{server.address}/score", content=body).status_code == 200)
        assert all(ended(one) for one in clients)
    until(lambda: metric(server, "held_bytes") == 0)
    for words in ("did not send its request in time (--client-timeout)", "was slow when others needed its memory"):
        assert any(words in line for line in server.said)


def test_idle_connections_lock_nobody_out_and_are_not_logged_one_by_one(server: Served) -> None:
    said = len(server.said)
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(150)]
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")  # half a header is no request either

        def answered() -> bool:
            try:
                return CLIENT.get(f"{server.address}/health").status_code == 200
            except httpx.TransportError:  # all 40 were there within the last second
                return False

        until(answered)
        assert metric(server, "connections") <= 41
        assert metric(server, "clients_cut_off_total") >= 110
    assert len(server.said) - said <= 4, server.said


def test_a_client_that_leaves_is_one_line(server: Served) -> None:
    body = write_question(Question(ALL, examples([100] * 20)))
    left = metric(server, "clients_cut_off_total")
    for length in (None, 10**6):  # while it is scored, or answered; while it sends
        one = connected(server)
        one.sendall(posted(body, length))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
        one.close()
    until(lambda: metric(server, "clients_cut_off_total") - left >= 2)
    until(lambda: metric(server, "held_bytes") == 0)
    assert sum("left before it had its answer" in line for line in server.said) == 1


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", 200),
        ("localhost:8471", 200),
        ("LOCALHOST.", 200),
        ("10.1.2.3:80", 200),
        ("[::1]:8471", 200),
        ("teacher.example:1", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8471", 421),
        ("[evil", 421),
        ("", 421),
    ],
)
def test_names_that_are_not_the_servers(named: Served, host: str, code: int) -> None:
    found = CLIENT.get(f"{named.address}/version", headers={"host": host})
    assert found.status_code == code
    if code == 421:
        assert "--allowed-host" in found.json()["error"]
        assert CLIENT.get(f"{named.address}/health", headers={"host": host}).status_code == 200


@pytest.fixture(scope="module")
def named(tiny_teacher: Path) -> Iterator[Served]:
    with Served(tiny_teacher, "--allowed-host", "Teacher.Example", "--max-connections", 3) as running:
        yield running


def test_the_head_is_not_made_anew_for_everyone(named: Served) -> None:
    origin = open_server(TeacherConfig.model_validate({"server": named.address, "remote": {"kind": "hidden"}}), "t")
    first, second = origin.head(2048).weight, origin.head(1000).weight
    assert first is not None and second is not None and first[:1000].equal(second)
    origin.close()
    heads = [CLIENT.get(f"{named.address}/head").content for _ in range(2)]
    assert heads[0] == heads[1] and len(heads[0]) > 4 * 2048 * 32


def test_limits_that_do_not_fit_together(tiny_teacher: Path) -> None:
    options = ServeOptions("127.0.0.1", 0, None, 64.0, None, None, 1024.0, max_memory_mb=1000)
    with pytest.raises(
        PotstillError, match=r"--max-memory-mb 1000: .*--max-body-mb 64 .*--max-answer-mb 1024 take up to 1376"
    ):
        serve(str(tiny_teacher), options, dtype="auto", device_name="cpu", revision=None, trust_remote_code=False)


# In this process, to see who was disconnected and why


@contextmanager
def guarding(teacher: LanguageModel, **limits: float) -> Iterator[tuple[Threaded, Service]]:
    options = ServeOptions("127.0.0.1", 0, None, max_tokens=None, batch_tokens=None, **limits)  # type: ignore[arg-type]
    scorer = Scorer(teacher, 4096, int(options.max_answer_mb * 2**20))
    service = Service(scorer, identity_of_model(teacher, "t"), None, options)
    with Threaded(application(service), http=guarded(service.clients)) as running:
        yield running, service
    scorer.close()


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "t")


def test_a_byte_now_and_then_keeps_nobody_out(teacher: LanguageModel) -> None:
    """Eight bodies that lack their end hold all the memory there is, and each sends a byte whenever somebody else asks."""
    size, length = int(3.74 * 2**20), 4 * 2**20
    honest = write_question(Question(ALL, examples([100] * 2)))
    with (
        guarding(teacher, max_body_mb=4, max_answer_mb=4, max_memory_mb=120, client_timeout=600) as (server, service),
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(connected(server)) for _ in range(8)]
        for one in clients:
            one.sendall(posted(bytes(size), length))
        until(lambda: service.budget.held == 8 * 4 * size)

        def answered() -> bool:
            for one in clients:
                with suppress(OSError):
                    one.send(b"x")
            return CLIENT.post(f"{server.address}/score", content=honest).status_code == 200

        until(answered)
        assert service.clients.cut_off["memory"] == 1  # no more than it takes


def test_answers_that_nobody_reads_keep_nobody_out(teacher: LanguageModel) -> None:
    honest, slow = (write_question(Question(ALL, examples([100] * many))) for many in (5, 8))
    with (
        guarding(teacher, max_body_mb=1, max_answer_mb=16, max_memory_mb=32, client_timeout=600) as (server, service),
        ExitStack() as stack,
    ):
        whole = CLIENT.post(f"{server.address}/score", content=slow).content
        arrays = len(whole) - 8 - int.from_bytes(whole[:8], "little")
        for _ in range(3):
            stack.enter_context(connected(server)).sendall(posted(slow))
        until(lambda: service.budget.held == 3 * arrays)  # the questions are let go of, and the headers
        until(lambda: CLIENT.post(f"{server.address}/score", content=honest).status_code == 200)
        assert service.clients.cut_off["memory"] == 1


def test_sending_much_at_once_earns_no_time_for_later(teacher: LanguageModel) -> None:
    """28 MB would be worth almost four minutes, longer than this waits."""
    with (
        guarding(teacher, max_body_mb=64, max_answer_mb=1, max_memory_mb=400, client_timeout=2) as (server, service),
        connected(server) as one,
    ):
        one.sendall(posted(b"x", 32 * 2**20))
        until(lambda: any(hold.behind() for hold in list(service.budget.holds)))  # what comes from now on is noted
        one.sendall(bytes(28 * 2**20))
        one.settimeout(0.01)

        def cut_off() -> bool:
            try:
                one.send(b"x")
                return one.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(cut_off)
        assert service.clients.cut_off["request"] == 1


def test_without_room_one_is_told_when_to_come_back(teacher: LanguageModel) -> None:
    body = write_question(Question(ALL, examples([100])))
    with guarding(teacher, max_body_mb=1, max_answer_mb=4, max_memory_mb=8, client_timeout=600) as (server, service):
        with Hold(service.budget) as hold:  # of one that is being scored
            hold.set(7 * 2**20)
            full = CLIENT.post(f"{server.address}/score", content=body)
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert "requests and answers of 7 of 8 MB are held already (--max-memory-mb)" in full.json()["error"]
        assert CLIENT.post(f"{server.address}/score", content=body).status_code == 200


def test_parts_of_an_answer_are_let_go_of() -> None:
    arrays = [np.zeros(size, np.uint8) for size in (3, 2 * PIECE, 5)]
    alive, left = [weakref.ref(array) for array in arrays], []
    answer = streamed([array.data for array in arrays], {}, left=left.append)
    del arrays
    seen = []

    async def read() -> None:
        async for piece in answer.body_iterator:  # type: ignore[attr-defined]
            seen.append((len(piece), [one() is not None for one in alive]))

    asyncio.run(read())
    assert seen[0] == (3, [True] * 3) and seen[2][0] == PIECE and seen[3] == (5, [False, False, True])
    assert left == [3 + 2 * PIECE + 5, 2 * PIECE + 5, 5]


class Slow:
    """A connection whose client is so many seconds behind."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.ended = seconds, False

    def behind(self) -> float:
        return self.seconds

    def make_way(self) -> None:
        self.ended = True


def test_the_slowest_make_room_and_only_where_that_is_enough() -> None:
    budget, connections = Budget(100), [Slow(seconds) for seconds in (0.5, 30.0, 2.0)]
    first, second, third = (Hold(budget, one) for one in connections)
    for hold in (first, second, third):
        hold.set(30)
    with Hold(budget) as asking:
        with pytest.raises(Busy, match="--max-memory-mb"):
            asking.set(71)
        assert budget.held == 90 and not any(one.ended for one in connections)
        asking.set(40)
        assert [one.ended for one in connections] == [False, True, False] and budget.held == 100
        asking.set(70)
        assert [one.ended for one in connections] == [False, True, True] and budget.held == 100
        with pytest.raises(Busy, match="another request was given the room"):
            second.set(1)
    assert budget.held == 30


def test_a_hold_gives_back_what_it_took() -> None:
    budget = Budget(100)
    with Hold(budget) as one, Hold(budget) as two:
        one.set(60)
        two.set(40)
        with pytest.raises(Busy, match="--max-memory-mb"):
            two.set(41)
        one.set(10)
        two.set(90)
        assert budget.held == 100
    assert budget.held == 0


def test_a_header_beyond_all_bounds_is_not_read() -> None:
    body = write_question(Question(ALL, examples([9])))
    length = int.from_bytes(body[:8], "little")
    large = (2**22 + 8).to_bytes(8, "little") + body[8 : 8 + length] + b" " * (2**22 + 8 - length) + body[8 + length :]
    with pytest.raises(ValueError, match="its header has more than 4,194,304 bytes"):
        read_question(large)
    many = Question(TokenLogprobs(2048), examples([2]) * 16_385)
    with pytest.raises(ValueError, match="there are 16,385 documents, and a request has up to 16,384"):
        read_question(write_question(many))


def test_an_answer_in_parts_is_a_safetensors_body(tiny_teacher: Path) -> None:
    form = TopK(9, k=3)
    rows = np.log(np.full((4, 3), 1 / 9, np.float32))
    signal = {
        "ids": np.tile(np.arange(3, dtype=np.int32), (4, 1)),
        "logprobs": rows,
        "odds": np.full((4, 1), np.log(2), np.float32),
        "token_logprobs": rows[:, 0],
    }
    found = read_answer(b"".join(write_answer(signal)), form, 4)
    assert all(np.array_equal(found[name], values) for name, values in signal.items())
