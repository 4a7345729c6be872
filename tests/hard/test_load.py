"""Minutes of load on `potstill serve`: many honest clients, and some that do not read, do not finish or do not stay."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from campaign import SEED, Campaign
from mutations import BYTES
from served import Served
from tiny_runs import TinyRuns

from potstill.serving.protocol import Question, read_answer, write_question
from potstill.signals.kinds import TopK
from potstill.types import Example

SECONDS = 300
HONEST, EACH_HOSTILE = 4, 2
QUESTIONS = 12
MOST_MB = 250.0  # by which the server's memory may be above what it had after its first minute's work
PATIENCE = 120.0
LONGEST = 3600.0  # seconds more, after which so few answers are a finding


def _question(numbers: random.Random, length: int, k: int = 16) -> Question:
    examples = []
    for _ in range(numbers.randrange(1, 5)):
        ids = np.array([numbers.randrange(2048) for _ in range(length)], dtype=np.int32)
        predicted = np.ones(length, dtype=np.bool_)
        predicted[0] = False
        examples.append(Example(f"{numbers.getrandbits(128):032x}", "", ids, predicted, 0, source="a document"))
    return Question(TopK(vocabulary=2048, k=k), examples)


def _rows(question: Question) -> int:
    return sum(example.supervised_tokens for example in question.examples)


class Load:
    """Clients on threads, until the time is over and as many honest answers were given as it has seconds: on a machine that is
    busy with other things it lasts longer."""

    def __init__(self, server: Served, seconds: int) -> None:
        self.server, self.until, self.enough = server, time.monotonic() + seconds, seconds
        self.counts, self.wrong = Counter[str](), list[str]()
        numbers = random.Random(f"{SEED} questions")
        self.questions = [_question(numbers, numbers.randrange(2, 120)) for _ in range(QUESTIONS)]
        self.expected = [self._ask(httpx.Client(), question) for question in self.questions]

    def _ask(self, client: httpx.Client, question: Question) -> dict[str, np.ndarray]:
        answer = client.post(f"{self.server.address}/score", content=write_question(question), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text[:200]
        return read_answer(answer.content, question.form, _rows(question))

    @property
    def over(self) -> bool:
        enough = self.counts["honest, answered"] >= self.enough
        return time.monotonic() >= (self.until if enough else self.until + LONGEST) or bool(self.wrong)

    def honest(self, numbers: random.Random) -> None:
        """Asks, and knows the answers. A server that has too much to do says so."""
        with httpx.Client() as client:
            while not self.over:
                number = numbers.randrange(QUESTIONS)
                body = write_question(self.questions[number])
                answer = client.post(f"{self.server.address}/score", content=body, timeout=PATIENCE)
                if answer.status_code == 503:
                    self.counts["honest, told to come again"] += 1
                    time.sleep(0.2)
                    continue
                assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:200]}"
                found = read_answer(answer.content, self.questions[number].form, _rows(self.questions[number]))
                expected = self.expected[number]
                near = np.exp(found["logprobs"]) - np.exp(expected["logprobs"])
                assert float(np.abs(near).max()) < 1e-4, f"question {number} has another answer"
                self.counts["honest, answered"] += 1

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)

    def _post(self, question: Question) -> bytes:
        body = write_question(question)
        head = f"POST /score HTTP/1.1\r\nhost: 127.0.0.1:{self.server.port}\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def does_not_read(self, numbers: random.Random) -> None:
        """Asks for large answers and never takes one."""
        large = self._post(_question(numbers, 120, 2000))
        with self._connected() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(large)
            self._rest(numbers.uniform(1, 4))

    def slow_body(self, numbers: random.Random) -> None:
        """A byte now and then, of a body that never ends."""
        with self._connected() as client:
            client.sendall(b"POST /score HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50000000\r\n\r\n")
            for _ in range(numbers.randrange(5, 40)):
                client.sendall(b"x" * numbers.choice([1, 1, 100_000]))
                self._rest(0.1)

    def closes_early(self, numbers: random.Random) -> None:
        with self._connected() as client:
            request = self._post(self.questions[numbers.randrange(QUESTIONS)])
            client.sendall(request[: numbers.randrange(1, len(request) + 1)])

    def idle(self, numbers: random.Random) -> None:
        with self._connected():
            self._rest(numbers.uniform(1, 5))

    def noise(self, numbers: random.Random) -> None:
        with self._connected() as client:
            request = self._post(self.questions[numbers.randrange(QUESTIONS)])
            client.sendall(BYTES[numbers.choice(list(BYTES))](request, numbers))
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass

    def _rest(self, seconds: float) -> None:
        if not self.over:
            time.sleep(seconds)

    def hostile(self, way: Callable[[random.Random], None], numbers: random.Random) -> None:
        while not self.over:
            try:
                way(numbers)
            except OSError:  # it may well be thrown out
                self.counts[f"hostile, thrown out: {way.__name__}"] += 1
            self.counts[f"hostile: {way.__name__}"] += 1
            self._rest(0.05)

    def run(self, watch: Callable[[], None]) -> None:
        ways = [self.does_not_read, self.slow_body, self.closes_early, self.idle, self.noise]
        works = [lambda numbers: self.honest(numbers)] * HONEST
        works += [lambda numbers, way=way: self.hostile(way, numbers) for way in ways for _ in range(EACH_HOSTILE)]
        threads = []
        for number, work in enumerate(works):

            def client(work: Callable[[random.Random], None] = work, number: int = number) -> None:
                try:
                    work(random.Random(f"{SEED} client {number}"))
                except Exception as error:  # told at the end
                    self.wrong.append(f"client {number}: {error!r}")

            threads.append(threading.Thread(target=client, daemon=True))
            threads[-1].start()
        while not self.over:
            watch()
            time.sleep(0.5)
        for thread in threads:
            thread.join(PATIENCE)
        self.wrong += [f"client {i} hangs" for i, thread in enumerate(threads) if thread.is_alive()]


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def test_load(runs: TinyRuns) -> None:
    campaign = Campaign("load", SECONDS)
    campaign.wanted = campaign.count = campaign.scaled(SECONDS)
    seen: list[tuple[float, int, int]] = []
    with Served(runs.teacher, "--max-answer-mb", 16, "--max-body-mb", 8) as server:
        pid = server.process.pid
        load = Load(server, campaign.count)

        def watch() -> None:
            files, tasks = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
            seen.append((_rss_mb(pid), files, tasks))

        before = _rss_mb(pid)
        load.run(watch)
        after = load._ask(httpx.Client(), load.questions[0])
        assert (after["ids"][:, 0] == load.expected[0]["ids"][:, 0]).all()
        assert server.end() in (-15, 0, 143)
        said = "".join(server.said)
    campaign.outcomes.update(load.counts)
    campaign.facts |= {"rss_mb": round(before), "largest_rss_mb": round(max(one[0] for one in seen))}
    campaign.facts |= {"largest_files": max(one[1] for one in seen), "lines_in_the_log": len(said.splitlines())}
    for what in load.wrong:
        campaign.found("load", what)
    if "Traceback" in said:
        campaign.found("load", f"a traceback in the server's log: {said[-800:]}")
    if max(one[0] for one in seen) - before > MOST_MB:
        campaign.found("load", f"the server's memory grew from {before:.0f} MB to {max(one[0] for one in seen):.0f} MB")
    if load.counts["honest, answered"] < campaign.count:
        campaign.found("load", f"only {load.counts['honest, answered']} honest answers")
    campaign.end()
