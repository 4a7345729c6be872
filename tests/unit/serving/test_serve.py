"""`potstill serve` from outside: what it answers and refuses; and servers that lie, fail or change: the client notices."""

from __future__ import annotations

import gc
import importlib
import json
import re
import socket
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Served
from starlette.responses import JSONResponse
from taught import batches_of
from threaded import Altered, Threaded
from tiny import CPU, examples
from tiny_models import make_model

import potstill
from potstill import http_client as connection
from potstill.cache.origin import format_of, identity_of_model, signal_of_examples
from potstill.config import LossConfig, StoreConfig, TeacherConfig
from potstill.models import LanguageModel, load_teacher
from potstill.serving.batching import Busy, Job, Scorer
from potstill.serving.protocol import Question, read_answer, read_question, write_question
from potstill.serving.server import ServeOptions, Service, application
from potstill.signals.kinds import Given, Hidden, Sampled, SignalKind, TokenLogprobs, TopK
from potstill.teachers.open import open_teachers
from potstill.teachers.remote import open_server
from potstill.types import PotstillError

TOP = TopK(2048, k=8, temperatures=(1.0, 2.0))
TOKEN = {"POTSTILL_TEST_TOKEN": "open-sesame\n"}  # as `$(cat file)` would not leave it, and a file of Docker's does
AUTH = {"authorization": "Bearer open-sesame"}


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")


@pytest.fixture(scope="module")
def served(tiny_teacher: Path):
    options = ["--token-env", "POTSTILL_TEST_TOKEN", "--max-body-mb", 0.05, "--max-tokens", 100]
    with Served(tiny_teacher, *options, env=TOKEN) as server:
        yield server


def metrics(address: str, **headers: Any) -> dict[str, float]:
    text = httpx.get(f"{address}/metrics", **headers).text
    assert all(re.match(r"# (HELP|TYPE) |potstill_\w+(\{[^}]*\})? [0-9.e+-]+$", line) for line in text.splitlines())
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


# The process


def test_health_version_and_token(served, teacher):
    assert httpx.get(f"{served.address}/health").json() == {"status": "ok"}
    for path in ("/version", "/metrics", "/head", "/tokenizer"):
        refused = httpx.get(served.address + path)
        assert refused.status_code == 401 and "bearer token, and none was sent" in refused.json()["error"]
        wrong = httpx.get(served.address + path, headers={"authorization": "Bearer open-sesamf"})
        assert wrong.status_code == 401 and "this is not it" in wrong.json()["error"]
    version = httpx.get(f"{served.address}/version", headers=AUTH).json()
    identity = identity_of_model(teacher, "x")
    assert version["weights"] == identity.weights and version["tokenizer"] == identity.tokenizer
    assert (version["vocabulary"], version["width"], version["positions"]) == (2048, 32, 100)
    assert version["dtype"] == "float32" and version["potstill"] == potstill.__version__
    assert re.match(rf"ready: {served.address} serves .*weights {identity.weights[:12]}", served.said[0])


def test_with_a_token_it_answers_to_any_name(served):
    found = httpx.get(f"{served.address}/version", headers={**AUTH, "host": "teacher.example"})
    assert found.status_code == 200
    assert httpx.get(f"{served.address}/version", headers={"host": "teacher.example"}).status_code == 401


@pytest.mark.parametrize(
    "form",
    [
        TOP,
        TopK(1000, k=1000),
        TopK(2048, k=4, tail_samples=6, seed=3),
        Sampled(2048, num_samples=9, seed=1),
        TokenLogprobs(2048),
        Hidden(2048, width=32),
        Given(2048, k=5, temperatures=(0.5,)),
    ],
    ids=lambda form: f"{form.kind}-{form.k}",
)
def test_it_answers_what_the_model_says(served, teacher, form):
    some = examples([9, 30, 4, 17], vocabulary=min(form.vocabulary, 900))
    wanted = None
    if form.kind == "given":
        generator = np.random.default_rng(0)
        wanted = [generator.permuted(np.tile(np.arange(2048), (e.supervised_tokens, 1)), axis=1)[:, :5] for e in some]
        wanted = [ids.astype(np.int32) for ids in wanted]
    body = write_question(Question(form, some, wanted))
    answer = httpx.post(f"{served.address}/score", content=body, headers=AUTH)
    assert answer.status_code == 200, answer.text
    found = read_answer(answer.content, form, sum(e.supervised_tokens for e in some))
    identity = identity_of_model(teacher, "x")
    for part in ("weights", "tokenizer", "dtype", "template"):
        assert answer.headers[f"x-potstill-{part}"] == str(getattr(identity, part))
    expected = signal_of_examples(teacher, form, some, wanted)
    for name, values in expected.items():
        if values.dtype.kind == "i" and form.kind != "top_k":
            assert (found[name] == values).mean() > 0.95  # a draw may fall to a neighbour by rounding
        else:
            assert np.allclose(found[name], values, atol=2e-5), name


def test_what_it_refuses(served):
    def post(body: bytes, **headers: str) -> tuple[int, str]:
        answer = httpx.post(f"{served.address}/score", content=body, headers={**AUTH, **headers})
        return answer.status_code, answer.json()["error"]

    def asked(form: SignalKind = TOP, lengths: tuple[int, ...] = (9, 12), **arrays: Any) -> bytes:
        body = write_question(Question(form, examples(lengths)))
        if not arrays:
            return body
        about = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
        arrays = {name.rstrip("_"): values for name, values in arrays.items()}
        return safetensors.numpy.save({**safetensors.numpy.load(body), **arrays}, metadata=about)

    assert post(b"") == (400, post(b"")[1]) and "no safetensors body" in post(b"")[1]
    code, words = post(b"x" * 60_000)
    assert code == 413 and "larger than 0.05 MB" in words
    assert httpx.post(f"{served.address}/score", content=iter([b"x" * 60_000]), headers=AUTH).status_code == 413
    assert post(asked(lengths=(101,))) == (400, "a document has 101 tokens, and this server scores up to 100")
    assert post(asked(TopK(4096, k=4)))[1] == "probabilities over 4096 ids were asked for, and the model has 2048"
    assert "hidden states of width 7" in post(asked(Hidden(2048, width=7)))[1]
    assert "ids must be from 0 to 2047; there is -1" in post(asked(ids=np.full(21, -1, np.int32)))[1]
    assert "int32" in post(asked(ids=np.zeros(21, np.int64)))[1]
    assert "lengths must sum" in post(asked(lengths_=np.array([9, 13], np.int32)))[1]
    assert "its first one cannot be" in post(asked(predicted=np.ones(21, np.uint8)))[1]
    for odd in (
        {"kind": "nonsense"},
        {"k": 3000},
        {"dtype": ["float32"]},
        {"num_samples": 4},
        {"tail_samples": -1},
        {"tail_samples": 10**6},
        {"k": 0},
        {"k": True},
        {"temperatures": [1.0 + i for i in range(17)]},
        {"more": 1},
    ):
        body = asked()
        about = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
        about["format"] = json.dumps({**json.loads(about["format"]), **odd})
        code, words = post(safetensors.numpy.save(safetensors.numpy.load(body), metadata=about))
        assert code == 400 and "format" in words, odd
        assert "kind" not in odd or words == "format: there is no kind 'nonsense'"
    assert "given must be int32" in post(asked(Given(2048, k=3)))[1]
    twice = np.tile(np.array([5, 6, 5], np.int32), (sum(e.supervised_tokens for e in examples((9, 12))), 1))
    assert post(asked(Given(2048, k=3), given=twice)) == (400, "given has an id twice for one token")
    body = asked()
    for key, text in (("keys", "[" * 100_000), ("format", '{"temperatures": [1' + "0" * 400 + "]}")):
        about = {"format": "{}", "keys": "[]", key: text}
        with_it = safetensors.numpy.save(safetensors.numpy.load(body), metadata=about)
        if len(with_it) < 50_000:
            assert post(with_it)[0] == 400
        with pytest.raises(ValueError):
            read_question(with_it)
    for path, code in (("/score", 405), ("/nowhere", 404)):
        answer = httpx.get(served.address + path, headers=AUTH)
        assert answer.status_code == code and "POST /score" in answer.json()["error"]
    counted = metrics(served.address, headers=AUTH)
    assert counted['potstill_requests_total{code="413"}'] >= 2 and counted['potstill_requests_total{code="400"}'] >= 9


def test_concurrent_requests_share_forward_passes(teacher):
    """While the model is at work, what comes in waits, and is then taken together."""
    scorer = Paced(teacher, 4096)
    service = Service(scorer, identity_of_model(teacher, "t"), None, ServeOptions("", 0, None, 8.0, None, None))
    bodies = [write_question(Question(TOP, examples([40 + i % 3] * 4, seed=i))) for i in range(17)]
    with Threaded(application(service)) as server, ThreadPoolExecutor(17) as pool:
        asked = [pool.submit(httpx.post, f"{server.address}/score", content=bodies[0], timeout=120)]
        assert scorer.at_work.wait(120)
        asked += [pool.submit(httpx.post, f"{server.address}/score", content=body, timeout=120) for body in bodies[1:]]
        while scorer.waiting != 16:
            time.sleep(0.01)
        scorer.go.release(17)
        assert {answer.result().status_code for answer in asked} == {200}
        found = metrics(server.address)
    scorer.close()
    assert found["potstill_batch_documents_sum"] == 68 and found["potstill_batch_documents_count"] == 2
    assert found["potstill_tokens_total"] == sum((40 + i % 3) * 4 for i in range(17))
    assert found["potstill_waiting_requests"] == 0
    assert found["potstill_padding_tokens_total"] < 0.25 * found["potstill_tokens_total"]


def test_sigterm_ends_it_after_what_is_under_way(tiny_teacher):
    server = Served(tiny_teacher, "--batch-tokens", 256)
    body = write_question(Question(TopK(2048, k=512), examples([120] * 100)))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.address}/score", content=body, timeout=120)
        while not metrics(server.address)["potstill_batch_documents_count"]:
            time.sleep(0.005)
        assert server.end() == 0
        assert answer.result().status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.address}/health")


def test_an_empty_token_is_refused(tiny_teacher):
    from potstill.serving.server import serve

    options = ServeOptions("127.0.0.1", 0, "NO_SUCH_VARIABLE", 1.0, None, None)
    with pytest.raises(PotstillError, match="--token-env: there is no environment variable NO_SUCH_VARIABLE"):
        serve(str(tiny_teacher), options, dtype="auto", device_name="cpu", revision=None, trust_remote_code=False)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "potstill.serving.server")
    with pytest.raises(PotstillError, match=r"pip install starlette uvicorn \(or"):
        importlib.import_module("potstill.serving.server")


def test_a_port_that_is_taken(served, tiny_teacher):
    from potstill.serving.server import serve

    options = ServeOptions("127.0.0.1", served.port, None, 1.0, None, None)
    with pytest.raises(PotstillError, match=f"cannot listen on 127.0.0.1:{served.port} "):
        serve(str(tiny_teacher), options, dtype="auto", device_name="cpu", revision=None, trust_remote_code=False)


def test_the_token_of_a_recipe(served, student, data, monkeypatch):
    monkeypatch.setenv("RIGHT", "open-sesame")
    monkeypatch.setenv("WRONG", "open")
    data = data.model_copy(update={"max_length": 96})
    config = TeacherConfig.model_validate({"server": served.address, "remote": {"api_key_env": "WRONG"}})
    with pytest.raises(PotstillError, match=r"GET /version is refused \(401\): this server wants a bearer token"):
        open_teachers([config], student, data, LossConfig(), CPU)
    config = TeacherConfig.model_validate({"server": served.address, "remote": {"api_key_env": "RIGHT"}})
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    assert found.prepare(batches_of(data, student)[0]).plan is not None
    found.close()


def test_requests_larger_than_the_server_takes_are_split(served, teacher, monkeypatch):
    monkeypatch.setenv("RIGHT", "open-sesame")
    origin = open_server(
        TeacherConfig.model_validate({"server": served.address, "remote": {"api_key_env": "RIGHT"}}), "t"
    )
    some = examples([90] * 40)
    form = Given(2048, k=64)
    wanted = [np.tile(np.arange(64, dtype=np.int32), (e.supervised_tokens, 1)) for e in some]
    found = origin.score(form, some, wanted)()
    expected = signal_of_examples(teacher, form, some, wanted)
    assert np.allclose(np.concatenate([part["logprobs"] for part in found]), expected["logprobs"], atol=2e-5)
    origin.close()


def test_answers_larger_than_the_server_gives(teacher):
    """A document alone is refused; of several, the client asks for parts."""
    scorer = Scorer(teacher, 4096, most_bytes=20_000)
    service = Service(scorer, identity_of_model(teacher, "t"), None, ServeOptions("", 0, None, 16.0, None, None))
    form, some = TopK(2048, k=8), examples([30] * 40)
    with Threaded(application(service)) as server:
        origin = open_server(TeacherConfig.model_validate({"server": server.address, "remote": {"k": 8}}), "t")
        found = origin.score(form, some)()
        expected = signal_of_examples(teacher, form, some)
        assert np.allclose(np.concatenate([part["logprobs"] for part in found]), expected["logprobs"], atol=2e-5)
        with pytest.raises(PotstillError, match=r"\(413\): the answer would be 0\.\d+ MB, .*\(--max-answer-mb\)"):
            origin.score(TopK(2048, k=512), examples([30]))()
        many = write_question(Question(TokenLogprobs(2048), [replace(examples([100])[0], key="k")] * 11_000))
        answer = httpx.post(f"{server.address}/score", content=many, timeout=60)
        assert answer.status_code == 413 and "takes 1,048,576 at once" in answer.json()["error"]
        origin.close()
    scorer.close()


class Paced(Scorer):
    """Forwards a batch whenever it is told to, and notes whose it was."""

    def __init__(self, *arguments: Any) -> None:
        self.go, self.at_work, self.seen = threading.Semaphore(0), threading.Event(), []
        super().__init__(*arguments)

    def _answer(self, tasks):
        self.at_work.set()
        assert self.go.acquire(timeout=120)
        self.seen.append([(len(task.job.question.examples), len(task.example.ids)) for task in tasks])
        super()._answer(tasks)


def asked(question: Question, answer: Callable[[Any], None]) -> Job:
    job = Job(question)
    job.answer.add_done_callback(lambda future: answer(future.exception() or future.result()))
    return job


def test_a_huge_request_does_not_hold_up_the_others(teacher):
    scorer, done = Paced(teacher, 64), []
    huge, small = (Question(TOP, examples(lengths)) for lengths in ([32] * 10, [9]))
    scorer.submit(asked(huge, lambda found: done.append(("huge", found))))
    while scorer.waiting != 1 or len(scorer._waiting[0].waiting) != 8:  # it has had its turn, and waits for the next
        time.sleep(0.01)
    scorer.submit(asked(small, lambda found: done.append(("small", found))))
    for _ in range(6):
        scorer.go.release()
    while len(done) < 2:
        time.sleep(0.01)
    scorer.close()
    assert [name for name, _ in done] == ["small", "huge"]
    assert scorer.seen.index([(1, 9)]) <= 2 and len(scorer.seen) == 6
    expected = signal_of_examples(teacher, TOP, huge.examples)
    assert np.allclose(done[1][1]["logprobs"], expected["logprobs"], atol=2e-5)


def test_what_waits_when_the_server_ends_is_not_computed(teacher):
    scorer, done = Paced(teacher, 64), []

    def answer(found: Any) -> None:
        done.append(found)
        if len(done) == 4:  # it ends, and has told all who wait: the model may finish what it has in hand
            scorer.go.release()

    for _ in range(5):
        scorer.submit(asked(Question(TOP, examples([60])), answer))
    while scorer.waiting != 4:
        time.sleep(0.01)
    scorer.close()
    assert len(scorer.seen) == 1 and [isinstance(found, RuntimeError) for found in done] == [True] * 4 + [False]
    with pytest.raises(Busy, match="the server ends"):
        scorer.submit(Job(Question(TOP, examples([60]))))


def test_what_is_dropped_is_let_go_of_at_once(teacher):
    """Also what has had its turn: nobody waits for the garbage collector, for the arrays may be large."""
    scorer = Paced(teacher, 64)
    jobs = [Job(Question(TOP, examples([60] * 3))) for _ in range(2)]
    gone = [weakref.ref(job) for job in jobs]
    gc.collect()
    gc.disable()
    try:
        for job in jobs:
            scorer.submit(job)
        while scorer.waiting != 2 or len(jobs[0].waiting) != 2:
            time.sleep(0.01)
        for job in jobs:
            scorer.drop(job)
        del job, jobs
        assert gone[1]() is None and gone[0]() is not None  # of the first, a document is being scored
        scorer.go.release()
        scorer.close()
        assert gone[0]() is None
    finally:
        gc.enable()


def test_a_handler_that_is_cancelled_abandons_its_job(teacher):
    """As uvicorn does when what is under way takes too long after SIGTERM."""
    scorer = Paced(teacher, 64)
    service = Service(scorer, identity_of_model(teacher, "t"), None, ServeOptions("", 0, None, 8.0, None, None))
    body = write_question(Question(TOP, examples([60])))
    with ThreadPoolExecutor(2) as pool:
        with Threaded(application(service)) as server:  # which gives one second
            asked = [pool.submit(httpx.post, f"{server.address}/score", content=body, timeout=30) for _ in range(2)]
            while scorer.waiting != 1:
                time.sleep(0.01)
            (job,) = scorer._waiting
        assert job.answer.cancelled()
        scorer.go.release()
        scorer.close()
        assert len(scorer.seen) == 1
        assert all(one.exception() is not None or one.result().status_code >= 500 for one in asked)


def test_a_tokenizer_with_several_chat_templates(tmp_path):
    folder = make_model(tmp_path / "model", seed=3)
    loaded = load_teacher(TeacherConfig(model=str(folder)), CPU, "t")
    loaded.tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "tool_use": "{{ tools }}"}
    loaded.tokenizer.save_pretrained(folder)
    loaded = load_teacher(TeacherConfig(model=str(folder)), CPU, "t")
    assert set(loaded.tokenizer.chat_template) == {"default", "tool_use"}
    scorer = Scorer(loaded, 1024)
    service = Service(scorer, identity_of_model(loaded, "t"), None, ServeOptions("", 0, None, 8.0, None, None))
    with Threaded(application(service)) as server:
        origin = open_server(TeacherConfig(server=server.address), "t")
        assert origin.tokenizer.chat_template == loaded.tokenizer.chat_template
        origin.close()
    scorer.close()


@pytest.mark.parametrize("what", ["tokenizer", "head"])
def test_what_could_not_be_made_is_made_when_it_can_be(teacher, tmp_path, monkeypatch, what):
    scorer = Scorer(teacher, 1024)
    service = Service(scorer, identity_of_model(teacher, "t"), None, ServeOptions("", 0, None, 8.0, None, None))
    with Threaded(application(service)) as server:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-such-folder"))
        failed = httpx.get(f"{server.address}/{what}")
        assert failed.status_code == 503 and failed.headers["retry-after"] == "1"
        assert f"the {what} cannot be written to a temporary file" in failed.json()["error"]
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert httpx.get(f"{server.address}/{what}").status_code == 200
    scorer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_it_listens_on_either_kind_of_address(host):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with ServeOptions(host, 0, None, 1.0, None, None).listen() as listening:
        there = "::1" if host == "::1" else "127.0.0.1"
        with socket.create_connection((there, listening.getsockname()[1]), timeout=60) as made:
            one, _ = listening.accept()
            one.sendall(b"here")
            assert made.recv(4) == b"here"
            one.close()


@pytest.mark.parametrize("token", ["open sesame", "öffne dich"])
def test_a_token_that_no_client_can_send(tiny_teacher, monkeypatch, token):
    from potstill.serving.server import serve

    monkeypatch.setenv("A_TOKEN", token)
    options = ServeOptions("127.0.0.1", 0, "A_TOKEN", 1.0, None, None)
    with pytest.raises(PotstillError, match="no client could send it") as error:
        serve(str(tiny_teacher), options, dtype="auto", device_name="cpu", revision=None, trust_remote_code=False)
    assert token not in str(error.value)


# The wire


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 400), st.integers(0, 255))
def test_no_body_breaks_the_reader(junk: bytes, at: int, value: int) -> None:
    """Whatever comes is a question or a ValueError: nothing else reaches the handler."""
    body = bytearray(write_question(Question(TOP, examples([9, 12]))))
    for wrong in (junk, struct.pack("<Q", len(junk)) + junk, bytes(body[: at % len(body)])):
        with pytest.raises(ValueError):
            read_question(wrong)
    body[at % len(body)] = value
    with suppress(ValueError):
        assert isinstance(read_question(bytes(body)), Question)


def test_a_question_comes_through_whole() -> None:
    some = examples([9, 12, 30])
    wanted = [np.tile(np.array([7, 3, 9], np.int32), (e.supervised_tokens, 1)) for e in some]
    form = Given(2048, k=3, temperatures=(1.5,))
    again = read_question(write_question(Question(form, some, wanted)))
    assert again.form == form and [e.key for e in again.examples] == [e.key for e in some]
    for a, b in zip(again.examples, some, strict=True):
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.supervised, b.supervised)
    assert again.given is not None and all(np.array_equal(a, b) for a, b in zip(again.given, wanted, strict=True))


# Servers that lie, fail or change


@pytest.fixture
def honest(teacher):
    """The application of a server, on a thread of this process."""
    scorer = Scorer(teacher, 1024)
    yield application(
        Service(scorer, identity_of_model(teacher, "tiny"), None, ServeOptions("", 0, None, 8.0, None, None))
    )
    scorer.close()


def changed(**arrays: Any):
    """Answers with some arrays put through functions."""

    def change(body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        found = safetensors.numpy.load(body)
        for name, make in arrays.items():
            found[name] = np.ascontiguousarray(make(found[name]))
        return safetensors.numpy.save(found), headers

    return change


def poked(value: float):
    def make(values: Any) -> Any:
        values = values.copy()
        values.reshape(-1)[3] = value
        return values

    return make


LIES = {
    "shape": (changed(ids=lambda x: x[:-1], logprobs=lambda x: x[:-1]), r"ids is int32 \[\d+, 8\] where int32"),
    "dtype": (changed(logprobs=lambda x: x.astype(np.float64)), "logprobs is float64"),
    "nan": (changed(token_logprobs=poked(float("nan"))), "token_logprobs that are no numbers"),
    "ids": (changed(ids=poked(5000)), "the id 5000, and the teacher has 2048 ids"),
    "negative ids": (changed(ids=poked(-1)), "the id -1, and the teacher has 2048 ids"),
    "twice": (changed(ids=lambda x: np.repeat(x[:, :1], 8, 1)), r"the id \d+ twice at one token"),
    "order": (changed(logprobs=lambda x: x[:, ::-1]), "not in order"),
    "mass": (changed(logprobs=lambda x: x + 1.0), "above 0|sum to"),
    "too much": (changed(logprobs=lambda x: np.minimum(x + 0.4, -0.01)), "sum to"),
    "odds": (changed(odds=lambda x: x + 2.0), "of the rest sum to"),
    "positive": (changed(token_logprobs=poked(0.5)), "token_logprobs with a log-probability of 0.5"),
    "other arrays": (lambda body, headers: (safetensors.numpy.save({"x": np.zeros(3)}), headers), "it has x where"),
    "no safetensors": (lambda body, headers: (b"<html>", headers), "no safetensors body"),
    "nothing": (lambda body, headers: (b"", headers), "no safetensors body"),
    "another model": (
        lambda body, headers: (body, {**headers, "x-potstill-weights": "0" * 32}),
        "now serves another model",
    ),
    "another tokenizer": (
        lambda body, headers: (body, {**headers, "x-potstill-tokenizer": "0" * 32}),
        "now serves another tokenizer",
    ),
    "another precision": (
        lambda body, headers: (body, {**headers, "x-potstill-dtype": "bfloat16"}),
        r"now serves another precision \(dtype\) than when the run began \(bfloat16, before float32\)",
    ),
    "another template": (
        lambda body, headers: (body, {**headers, "x-potstill-template": "0" * 32}),
        "now serves another chat template",
    ),
    "no fingerprint": (lambda body, headers: (body, {}), "now serves another model"),
    "refuses": (lambda *_: JSONResponse({"error": "not on Sundays"}, 403), r"refused \(403\): not on Sundays"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_found_out(honest, student, data, lie):
    change, words = LIES[lie]
    with Threaded(Altered(honest, "/score", change)) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"k": 8, "retry_timeout": 30.0}})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        with pytest.raises(PotstillError, match=words) as error:
            found.prepare(batches_of(data, student)[0])
        assert str(error.value).startswith(f"teachers[0]: the server at {server.address}: ")
        found.close()


def headed(about: dict[str, str] | None = None, **tensors: Any) -> Any:
    """A head of which something is changed; None: taken away."""

    def change(body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        found = {**safetensors.torch.load(body), **tensors}
        found = {name: tensor for name, tensor in found.items() if tensor is not None}
        return safetensors.torch.save(found, about), headers

    return change


RIGHT = torch.zeros(2048, 32)
HEADS = [
    (lambda body, h: (b"no", h), "its head is wrong: it is no safetensors body"),
    (lambda body, h: (body + bytes(2**23), h), "its answer to GET /head would be"),
    (lambda body, h: (b"\xff" * 8 + body, h), "no safetensors body"),
    (headed(weight=None), "its head is wrong: it has nothing where weight, and perhaps bias, were expected"),
    (headed(extra=torch.zeros(3)), "it has extra, weight where"),
    (headed(weight=torch.zeros(4, 4)), r"weight is \[4, 4\] where \[2048, 32\]"),
    (headed(weight=torch.zeros(2048, 31)), r"weight is \[2048, 31\] where"),
    (headed(weight=torch.zeros(2048)), r"weight is \[2048\] where"),
    (headed(weight=torch.tensor(1.0)), r"weight is \[\] where"),
    (headed(weight=RIGHT.to(torch.int32)), "weight is torch.int32"),
    (headed(weight=RIGHT.bool()), "weight is torch.bool"),
    (headed(weight=RIGHT / 0), "not finite"),
    (headed(bias=torch.full([2048], torch.nan)), "not finite"),
    (headed(bias=torch.zeros(7)), r"bias is \[7\] where \[2048\]"),
    (headed({"softcap": "-1"}), "softcap is -1.0"),
    (headed({"softcap": "nan"}), "softcap is nan"),
    (headed({"logit_scale": "0"}), "logit_scale is 0.0"),
    (headed({"logit_scale": "(" * 9000}), "could not convert"),
    (headed({"softcap": "\x1b[2J"}), "could not convert"),
]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("/version", lambda body, h: (body.replace(b'"protocol":1', b'"protocol":9'), h), "it speaks protocol 9"),
        ("/version", lambda body, h: (body.replace(b'"width":32', b'"width":"wide"'), h), "not understood"),
        ("/version", lambda body, h: (re.sub(rb'"tokenizer":"\w+"', b'"tokenizer":"x"', body), h), "not the one that its"),
        ("/tokenizer", lambda body, h: (b"[]", h), "no JSON object"),
        ("/version", lambda body, h: (body.replace(b'"width":32', b'"width":true'), h), "width is 'True'"),
        ("/version", lambda body, h: (body.replace(b'"width":32', b'"width":1e400'), h), "width is 'inf'"),
        ("/version", lambda body, h: (body.replace(b'"name":"tiny"', b'"name":["tiny"]'), h), "name is"),
        ("/version", lambda body, h: (body.replace(b'"vocabulary":2048', b'"vocabulary":-1'), h), "vocabulary is '-1'"),
        ("/version", lambda body, h: (body + b" " * 2**22, h), "its answer to GET /version would be 4,"),
        ("/tokenizer", lambda body, h: (b"{}", h), r"its tokenizer cannot be read \(what /tokenizer gives: cannot load the"),
        ("/tokenizer", lambda body, h: (b'{"tokenizer.json": "{}"}', h), "its tokenizer cannot be read"),
        ("/tokenizer", lambda body, h: (b'{"a":' * 100_000, h), "its answer is no JSON"),
        ("/tokenizer", lambda body, h: (body[:-1] + b', "chat_templates": "[[[["}', h), "its tokenizer cannot be read"),
        *(("/head", *lie) for lie in HEADS),
    ],
)  # fmt: skip
def test_a_server_that_is_not_what_it_says(honest, student, data, path, change, words):
    with Threaded(Altered(honest, path, change)) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"kind": "hidden"}})
        with pytest.raises(PotstillError, match=words) as error:
            (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
            batch = batches_of(data, student)[0]
            found.targets(batch, found.prepare(batch))
        assert str(error.value).isprintable() and str(error.value).startswith(
            f"teachers[0]: the server at {server.address}"
        )


def test_hidden_states_that_are_not_finite(honest, student, data):
    with Threaded(Altered(honest, "/score", changed(hidden=poked(float("inf"))))) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"kind": "hidden"}})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        with pytest.raises(PotstillError, match="hidden states that are not finite"):
            found.prepare(batches_of(data, student)[0])
        found.close()
    for bits, sound in ((0x7F80, False), (0xFFC0, False), (0x7F7F, True), (0x0000, True)):
        form = Hidden(2048, width=2, dtype="bfloat16")
        signal = {"hidden": np.full((1, 2), bits, np.uint16)}
        if sound:
            form.check(signal, 1)
        else:
            with pytest.raises(ValueError, match="not finite"):
                form.check(signal, 1)


def test_no_step_is_taken_with_a_lie(honest, data, tmp_path):
    """The run stops with the sentence, and goes on from there as if nothing had been: the student is what it was."""
    answered, lying = [], [True]

    def change(body: bytes, headers: dict[str, str]) -> Any:
        answered.append(1)
        if len(answered) <= 3 or not lying:
            return body, headers
        return changed(logprobs=poked(float("nan")))(body, headers)

    with Threaded(Altered(honest, "/score", change)) as server:
        recipe = {
            "run": str(tmp_path / "run"),
            "student": {"tokenizer": "shipped:tokenizers/bytes-2k", "config": student_config()},
            "teachers": [{"server": server.address, "remote": {"k": 8}}],
            "data": data.model_dump(),
            "train": {"steps": 8, "batch_size": 2},
            "checkpoint": {"every": 1},
            "log": {"tensorboard": False},
        }
        with pytest.raises(PotstillError, match="logprobs that are no numbers"):
            potstill.train(recipe)
        told, steps = len(answered), losses_of(tmp_path / "run")
        lying.clear()
        runs = [potstill.train(recipe), potstill.train({**recipe, "run": str(tmp_path / "honest")})]
    assert 0 < len(steps) < told and np.isfinite(steps).all()
    ours, theirs = (safetensors.torch.load_file(Path(run.model) / "model.safetensors") for run in runs)
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "honest"), rel=1e-4)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def student_config() -> dict[str, Any]:
    from tiny import LLAMA

    return {**LLAMA, "max_position_embeddings": 128}


class Wire:
    """Fails in given ways, in turn, before it lets requests of /score through."""

    def __init__(self, application: Any, *faults: Any) -> None:
        self.application, self.faults, self.times = application, list(faults), []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/score":
            self.times.append(time.monotonic())
            if self.faults:
                fault = self.faults.pop(0)
                if isinstance(fault, int):
                    await JSONResponse({"error": "out of luck"}, fault)(scope, receive, send)
                    return
                if fault == "slow":  # for longer than any client waits
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    return
                if fault == "cut":
                    head = [(b"content-length", b"1000")]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                    await send({"type": "http.response.body", "body": b"half", "more_body": True})
                    raise ConnectionError
        await self.application(scope, receive, send)


def test_failures_are_waited_out_with_growing_pauses(honest, student, data, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(connection.Connection.__init__, "__defaults__", (said.append,))
    wire = Wire(honest, 500, 503, "cut", "slow", 502)
    with Threaded(wire) as server:
        remote = {"k": 8, "timeout": 4.0, "concurrency": 1}
        config = TeacherConfig.model_validate({"server": server.address, "remote": remote})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        batch = batches_of(data, student)[0]
        (signal,) = found.prepare(batch).signals
        assert len(signal.target.ids) == len(batch.rows)
        pauses = np.diff(wire.times)
        assert len(pauses) == 5 and (pauses[:3] >= 0.75 * 0.05 * 2.0 ** np.arange(3)).all() and pauses[3] >= 4.0
        assert len(said) == 2 and re.search(r"waiting for the server at http.*: it fails \(500\): out of luck", said[0])
        assert "answers again" in said[1]
        found.close()


def test_patience_ends(honest, student, data):
    with Threaded(Wire(honest, *[500] * 1000)) as server:
        remote = {"k": 8, "retry_timeout": 1.0}
        config = TeacherConfig.model_validate({"server": server.address, "remote": remote})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        with pytest.raises(
            PotstillError,
            match=r"it fails \(500\): out of luck; given up after \d+ s \(teachers\[0\]\.remote\.retry_timeout\)",
        ):
            found.prepare(batches_of(data, student)[0])
        found.close()


def test_nobody_there(student, data):
    remote = {"retry_timeout": 0.5}
    config = TeacherConfig.model_validate({"server": "http://127.0.0.1:9", "remote": remote})
    with pytest.raises(PotstillError, match="cannot be reached"):
        open_teachers([config], student, data, LossConfig(), CPU)


def test_a_run_that_ends_does_not_wait_for_its_server(honest, student, data):
    with Threaded(Wire(honest, *[500] * 1000)) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"k": 8}})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(found.prepare, batches_of(data, student)[0])
            while not found.source.origin.server.connection.failures:
                time.sleep(0.01)
            found.close()
            with pytest.raises(PotstillError, match="the run has ended"):
                waiting.result(timeout=120)


def test_a_request_that_nobody_waits_for_is_not_computed(teacher):
    """A client that has gone: its documents are left out when their turn comes."""
    entered, release, dropped = threading.Event(), threading.Event(), threading.Event()

    class Slow(Scorer):
        def drop(self, job):
            super().drop(job)
            dropped.set()

        def _answer(self, tasks):
            entered.set()
            assert release.wait(120)
            super()._answer(tasks)

    scorer = Slow(teacher, 16)
    options = ServeOptions("", 0, None, 8.0, None, None)
    service = Service(scorer, identity_of_model(teacher, "tiny"), None, options)
    body = write_question(Question(TOP, examples([9])))
    with Threaded(application(service)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{server.address}/score", content=body, timeout=120)
        assert entered.wait(120)
        with socket.create_connection(("127.0.0.1", server.port)) as leaves:
            head = f"POST /score HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-length: {len(body)}\r\n\r\n"
            leaves.sendall(head.encode() + body)
            while not scorer.waiting:
                time.sleep(0.01)
        assert dropped.wait(120) and scorer.waiting == 0
        release.set()
        assert first.result().status_code == 200
    scorer.close()
    assert scorer.counts["documents"] == 1


def test_a_model_that_fails_tells_who_asked_and_lives_on(teacher):
    class Failing(LanguageModel):
        def hidden(self, batch, positions):
            if any(len(e.ids) == 11 for e in batch.examples):
                raise RuntimeError("no room for eleven")
            return super().hidden(batch, positions)

    broken = Failing(teacher.model, teacher.tokenizer, teacher.head, teacher.attention)
    scorer = Scorer(broken, 4096)
    options = ServeOptions("", 0, None, 8.0, None, None)
    service = Service(scorer, identity_of_model(teacher, "tiny"), None, options)
    with Threaded(application(service)) as server, ThreadPoolExecutor(8) as pool:
        bodies = [write_question(Question(TOP, examples([length]))) for length in (10, 11, 12, 10, 11, 12, 10, 12)]
        answers = list(pool.map(lambda body: httpx.post(f"{server.address}/score", content=body, timeout=60), bodies))
    assert [answer.status_code for answer in answers] == [200, 500, 200, 200, 500, 200, 200, 200]
    assert "no room for eleven" in answers[1].json()["error"]
    scorer.close()


def test_numbers_that_are_none_stop_the_run_at_once(teacher, tmp_path, student, data):
    """422, which is not tried again."""
    folder = make_model(tmp_path / "broken", seed=9)
    model = load_teacher(TeacherConfig(model=str(folder)), CPU, "t")
    with torch.no_grad():
        model.model.get_input_embeddings().weight[900:] = float("nan")
    scorer = Scorer(model, 4096)
    options = ServeOptions("", 0, None, 8.0, None, None)
    service = Service(scorer, identity_of_model(model, "tiny"), None, options)
    with Threaded(application(service)) as server:
        origin = open_server(TeacherConfig(server=server.address), "t")
        with pytest.raises(PotstillError, match=r"\(422\): the teacher's hidden states are not finite"):
            origin.score(TOP, examples([30]))()
        origin.close()
    scorer.close()


def test_formats_of_a_server_are_those_of_its_model(served, teacher, monkeypatch):
    monkeypatch.setenv("RIGHT", "open-sesame")
    origin = open_server(
        TeacherConfig.model_validate({"server": served.address, "remote": {"api_key_env": "RIGHT"}}), "t"
    )
    for store in (
        StoreConfig(k=8),
        StoreConfig(kind="hidden"),
        StoreConfig(kind="sampled"),
        StoreConfig(kind="token_logprobs"),
    ):
        assert origin.format(store) == format_of(store, teacher)
    with pytest.raises(PotstillError, match="choose a k of at most that"):
        origin.format(StoreConfig(k=5000))
    origin.close()
