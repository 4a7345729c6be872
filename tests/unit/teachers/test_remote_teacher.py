"""A teacher behind `potstill serve` against the live one: losses and gradients of the student, from every kind, also through a
cache that is filled from the server."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from read_rows import read_hidden, read_sampled, read_tail_samples, read_top_k
from taught import answers, batches_of, data_of, relative, step, targets_of, write_files
from threaded import Threaded, Together
from tiny import CPU, LLAMA, batch_of, tiny
from tiny_models import make_model

import potstill
from potstill.cache.build import build
from potstill.cache.origin import LiveOrigin, identity_of_model
from potstill.cache.store import Cache
from potstill.config import DataConfig, LossConfig, StoreConfig, StudentConfig, TeacherConfig
from potstill.data import Feed, StepBatches, without
from potstill.losses import DIVERGENCES, TopKTarget, fused_linear_kd
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel, load_student, load_teacher, shared_ids
from potstill.objective.student_loss import LossSettings
from potstill.serving.batching import Scorer
from potstill.serving.server import ServeOptions, Service, application
from potstill.teachers.combine import compute_targets
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.open import open_teachers
from potstill.teachers.remote import StudentTopK, open_server
from potstill.teachers.stored import StoredSignal
from potstill.teachers.teacher import Teacher
from potstill.types import Example, HiddenTarget, PotstillError

PIECES = "shipped:tokenizers/pieces-1k"
METHODS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return data_of(write_files(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0, max_position_embeddings=128)


@pytest.fixture(scope="module")
def other() -> LanguageModel:
    """A student with another tokenizer, and a chat template of its own."""
    made = load_student(StudentConfig(config={**LLAMA, "max_position_embeddings": 512}, tokenizer=PIECES), CPU, 0)
    made.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    return made


@pytest.fixture
def opened(served):
    """Teachers of a recipe, closed when the test is over."""
    made = []

    def get(student: LanguageModel, data: DataConfig, config: dict[str, Any], **loss: Any):
        keys = config if "model" in config else {"server": served.address, **config}
        made.extend(
            open_teachers([TeacherConfig.model_validate(keys)], student, data, LossConfig(**loss), CPU).teachers
        )
        return made[-1]

    yield get
    for one in made:
        one.close()


def live_of(teacher: LanguageModel, student: LanguageModel) -> Teacher[LiveModel]:
    return live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "tiny")


# The same loss and gradients as the live teacher's


@pytest.mark.parametrize("layout", [{}, {"packing": False}, {"max_length": 40}, {"append_eos": False}], ids=str)
def test_hidden_states_give_the_live_loss_and_gradients(opened, teacher, student, data, layout):
    data = data.model_copy(update=layout)
    batches = batches_of(data, student)
    live = live_of(teacher, student)
    found = opened(student, data, {"remote": {"kind": "hidden"}})
    loss, gradients = step(student, batches, targets_of(found, batches))
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches])
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.1
    assert relative(gradients, live_gradients) <= 1e-5


def exact_top_k(dense: HiddenTarget, k: int, temperature: float) -> TopKTarget:
    """By hand, in float64."""
    logits = target_logits(dense, slice(0, dense.hidden.shape[0])).double() / temperature
    logprobs, ids = logits.log_softmax(-1).topk(k, -1)
    rest = logits.log_softmax(-1).scatter(-1, ids, -torch.inf).logsumexp(-1)
    return TopKTarget(ids, logprobs.float(), rest.float(), width=logits.shape[1])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k_is_the_exact_top_k(opened, teacher, student, data, divergence, temperature):
    batches = batches_of(data, student)[:2]
    knobs = LossSettings(divergence, 0.3, 0.1, temperature, 0.7, 0.4)
    remote = {"kind": "top_k", "k": 24}
    found = opened(student, data, {"remote": remote}, divergence=divergence, temperature=temperature)
    live = live_of(teacher, student)
    by_hand = [exact_top_k(live.targets(batch), 24, temperature) for batch in batches]
    loss, gradients = step(student, batches, targets_of(found, batches), knobs)
    expected, exact_gradients = step(student, batches, by_hand, knobs)
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.02
    assert relative(gradients, exact_gradients) <= 1e-5


def test_a_smaller_vocabulary_of_the_students_is_the_one_asked_about(data, tmp_path):
    """The teacher has ids beyond the student's: as with a live one, they take no part."""
    student = tiny(0, max_position_embeddings=128)
    wide = make_model(tmp_path / "wide", seed=3)
    loaded = load_teacher(TeacherConfig(model=str(wide)), CPU, "t")
    loaded.tokenizer.add_tokens(["<more>", "<still more>"])
    loaded.model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    loaded.model.save_pretrained(wide)
    loaded.tokenizer.save_pretrained(wide)
    loaded = load_teacher(TeacherConfig(model=str(wide)), CPU, "t")  # as a server would
    batches = batches_of(data, student)[:1]
    scorer = Scorer(loaded, 4096)
    service = Service(scorer, identity_of_model(loaded, "wide"), None, ServeOptions("", 0, None, 8.0, None, None))
    with Threaded(application(service)) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"k": 16}})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        assert found.source.form.vocabulary == len(student.tokenizer) == len(loaded.tokenizer) - 2
        live = live_of(loaded, student)
        (target,), by_hand = targets_of(found, batches), exact_top_k(live.targets(batches[0]), 16, 1.0)
        assert torch.equal(target.ids, by_hand.ids)
        assert torch.allclose(target.logprobs, by_hand.logprobs, atol=1e-5)
        assert torch.allclose(target.tail, by_hand.tail, atol=1e-4)
        found.close()
    scorer.close()


# What the student likes best


def test_reverse_kl_on_the_students_own_top_k_by_hand(opened, teacher, data):
    """Σ q log(q / p) over the student's top k, and the same of the two rests."""
    student = tiny(5, max_position_embeddings=128, initializer_range=0.3)
    batch, k, t = batches_of(data, student)[0], 7, 1.5
    found = opened(student, data, {"remote": {"kind": "student_top_k", "k": k}}, divergence="reverse_kl", temperature=t)
    assert isinstance(found.source, StudentTopK)
    (target,) = targets_of(found, [batch])
    with torch.no_grad():
        q = student.model.lm_head(student.hidden(batch, batch.rows.student)).double().div(t).log_softmax(-1)
        dense = live_of(teacher, student).targets(batch)
        p = target_logits(dense, slice(0, len(batch.rows))).double().div(t).log_softmax(-1)
        ids = q.topk(k, -1).indices
        top_q, top_p = q.gather(-1, ids), p.gather(-1, ids)
        rest_q, rest_p = (x.scatter(-1, ids, -torch.inf).logsumexp(-1) for x in (q, p))
        rows = (top_q.exp() * (top_q - top_p)).sum(-1) + rest_q.exp() * (rest_q - rest_p)
        assert torch.equal(target.ids.sort(-1).values, ids.sort(-1).values)
        hidden = student.hidden(batch, batch.rows.student)
        weight = student.model.lm_head.weight
        out = fused_linear_kd(hidden, weight, target, divergence="reverse_kl", temperature=t)
    assert torch.allclose(out.kd.double(), rows * t * t, rtol=1e-4, atol=1e-5)
    assert rows.mean() > 0.1


@pytest.mark.parametrize("layout", [{}, {"packing": False, "max_length": 40}], ids=str)
def test_with_all_ids_it_is_the_dense_reverse_kl(opened, teacher, student, data, layout):
    data = data.model_copy(update=layout)
    batches = batches_of(data, student)[:2]
    knobs = LossSettings("reverse_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    remote = {"kind": "student_top_k", "k": 100_000}
    found = opened(student, data, {"remote": remote}, divergence="reverse_kl")
    live = live_of(teacher, student)
    student.model.train()
    loss, gradients = step(student, batches, targets_of(found, batches), knobs)
    assert student.model.training
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches], knobs)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-4


def test_a_micro_batch_with_nothing_to_predict(opened, student, data):
    """Where a teacher lacks all of its documents, they are left out, and the others are asked about it too."""
    batch = batches_of(data, student)[0]
    batch = without(batch, range(len(batch.examples)))
    found = opened(student, data, {"remote": {"kind": "student_top_k", "k": 7}}, divergence="reverse_kl")
    target = found.targets(batch, found.prepare(batch))
    assert (target.ids.shape, target.logprobs.shape, target.tail.shape) == ((0, 7), (0, 7), (0,))
    assert target.ids.dtype == torch.int64 and target.width == 2048


# Another tokenizer, and a prompt of its own


@pytest.mark.parametrize("method", METHODS)
def test_another_tokenizer_behind_a_server(opened, tiny_teacher, other, data, method):
    data = data.model_copy(update={"max_length": 128})
    batches = batches_of(data, other)
    across = {"method": method}
    live = opened(other, data, {"model": str(tiny_teacher), "cross_tokenizer": across})
    found = opened(other, data, {"remote": {"kind": "hidden"}, "cross_tokenizer": across})
    assert isinstance(live.source, LiveModel) and isinstance(found.source, StoredSignal)
    loss, gradients = step(other, batches, answers(found, batches))
    expected, live_gradients = step(other, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.02
    assert relative(gradients, live_gradients) <= (5e-3 if method == "uld" else 1e-5)


def test_likelihoods_alone_serve_the_method_chunk(opened, tiny_teacher, other, data):
    data = data.model_copy(update={"max_length": 128})
    batches, across = batches_of(data, other), {"method": "span_likelihood"}
    live = opened(other, data, {"model": str(tiny_teacher), "cross_tokenizer": across})
    found = opened(other, data, {"remote": {"kind": "token_logprobs"}, "cross_tokenizer": across})
    loss, gradients = step(other, batches, answers(found, batches))
    expected, live_gradients = step(other, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5


@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab", "uld"])
def test_all_ids_of_another_tokenizer_are_the_live_distribution(opened, tiny_teacher, other, data, method):
    data = data.model_copy(update={"max_length": 128})
    batches, across = batches_of(data, other)[:2], {"method": method}
    live = opened(other, data, {"model": str(tiny_teacher), "cross_tokenizer": across})
    found = opened(other, data, {"remote": {"kind": "top_k", "k": 100_000}, "cross_tokenizer": across})
    loss, _ = step(other, batches, answers(found, batches))
    expected, _ = step(other, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("whose", ["student", "other"])
def test_a_prompt_that_only_the_teacher_reads(opened, request, tiny_teacher, data, tmp_path, whose):
    student = request.getfixturevalue(whose)
    records = [{"q": f"What of {i}?", "a": f" peace and law {i}.", "hint": f"It is {i}."} for i in range(6)]
    path = tmp_path / "hints.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"files": str(path), "prompt": "q", "completion": "a"}
    data = DataConfig.model_validate({"sources": [source], "max_length": 96, "columns": ["hint"]})
    batches = batches_of(data, student)
    live = opened(student, data, {"model": str(tiny_teacher), "context_column": "hint"})
    found = opened(student, data, {"remote": {"kind": "hidden"}, "context_column": "hint"})
    without = opened(student, data, {"remote": {"kind": "hidden"}})
    loss, gradients = step(student, batches, answers(found, batches))
    expected, live_gradients = step(student, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5
    assert abs(step(student, batches, answers(without, batches))[0] - loss) > 1e-3


def test_several_teachers_some_behind_a_server(opened, served, tiny_teacher, student, data):
    """`filter`, and the mean of whole distributions."""
    batches = batches_of(data, student)[:2]
    configs = [
        TeacherConfig.model_validate(keys)
        for keys in ({"model": str(tiny_teacher)}, {"server": served.address, "remote": {"kind": "hidden"}})
    ]
    loss = LossConfig(combine_teachers="average")
    teacher_set = open_teachers(configs, student, data, loss, CPU)
    made = [[t.prepare(b) for t in teacher_set.teachers] for b in batches]
    targets = [compute_targets(teacher_set.teachers, ready, b, loss) for ready, b in zip(made, batches, strict=True)]
    value, _ = step(student, batches, targets)
    expected, _ = step(student, batches, [[(2.0, teacher_set.live[0].targets(batch))] for batch in batches])
    assert value == pytest.approx(expected, rel=1e-5)  # the mean of a teacher with itself
    teacher_set.teachers[1].close()


# Through a cache


@pytest.mark.parametrize(
    "store", [{"kind": "hidden"}, {"kind": "top_k", "k": 8, "tail_samples": 4}, {"kind": "sampled"}], ids=str
)
def test_a_cache_built_from_a_server_is_the_one_the_model_builds(served, teacher, data, tmp_path, store):
    config = TeacherConfig.model_validate({"server": served.address})
    built = build(open_server(config, "t"), StoreConfig(**store), data, tmp_path / "served", batch_tokens=256)
    assert built.documents > 20
    again = build(teacher, StoreConfig(**store), data, tmp_path / "served", name="tiny")
    assert again.documents == 0 and again.there == built.documents  # the same teacher, by fingerprint
    build(teacher, StoreConfig(**store), data, tmp_path / "live", name="tiny", batch_tokens=256)
    ours, theirs = Cache(tmp_path / "served"), Cache(tmp_path / "live")
    assert np.array_equal(ours.keys(), theirs.keys())
    pairs = [(ours.document(i), theirs.document(i)) for i in range(len(ours))]
    assert all(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.ends, b.ends) for a, b in pairs)
    a, b = ([(d, np.arange(d.predicted.sum())) for d in side if d.predicted.any()] for side in zip(*pairs, strict=True))
    if store["kind"] == "hidden":
        assert torch.allclose(read_hidden(a), read_hidden(b), atol=1e-4)
    elif store["kind"] == "top_k":
        (ids, logprobs, tail), (known, expected, rest) = read_top_k(a, 1.0), read_top_k(b, 1.0)
        assert (ids == known).mean() > 0.999  # two that are equally likely may change places
        assert np.allclose(logprobs, expected, atol=0.01) and np.allclose(tail, rest, atol=0.01)  # a step of its codes
        assert (
            read_tail_samples(a)[0] == read_tail_samples(b)[0]
        ).mean() > 0.97  # a draw may fall to a neighbour by rounding
    else:
        assert np.allclose(read_sampled(a)[2], read_sampled(b)[2], atol=0.02)
        drawn = [
            [Counter(dict(zip(*row, strict=True))) for row in zip(*read_sampled(x)[:2], strict=True)] for x in (a, b)
        ]
        shared = [(x & y).total() for x, y in zip(*drawn, strict=True)]
        assert np.mean(shared) > 0.97  # of a row's draws, whose shares sum to one


def test_a_cache_beside_the_server_is_filled_ahead_of_the_step(served, opened, tiny_teacher, student, data, tmp_path):
    batches = batches_of(data, student)
    keys = {"cache": str(tmp_path / "cache"), "store": {"kind": "hidden"}}
    found = opened(student, data, keys)
    assert isinstance(found.source, StoredSignal)
    targets = []
    for batch in batches:
        ready = found.prepare(batch)
        assert ready.plan is not None  # on the thread that prepares: the device is not needed
        targets.append(found.targets(batch, ready))
    live = opened(student, data, {"model": str(tiny_teacher)})
    loss, gradients = step(student, batches, targets)
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches])
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5
    found.close()
    alone = TeacherConfig(cache=str(tmp_path / "cache"))
    (cached,) = open_teachers([alone], student, data, LossConfig(), CPU).teachers
    assert step(student, batches, targets_of(cached, batches))[0] == pytest.approx(expected, rel=1e-5)
    assert len(Cache(tmp_path / "cache")) == len({e.key for b in batches for e in b.examples})


@pytest.mark.parametrize("origin", ["server", "model"])
def test_what_a_model_wrote_is_stored_in_its_own_tokens(opened, tiny_teacher, student, data, tmp_path, origin):
    """Two tokens that the tokenizer would make one of: the text does not give them back."""
    tokenizer = student.tokenizer
    whole = tokenizer("peace and the union", add_special_tokens=False).input_ids
    letters = [tokenizer(c, add_special_tokens=False).input_ids[0] for c in "peace and the union".replace(" ", "_")]
    ids = np.array([*whole[:2], *letters], dtype=np.int32)
    text = tokenizer.decode(ids)
    assert tokenizer(text, add_special_tokens=False).input_ids != ids.tolist()
    supervised = np.arange(len(ids)) >= 2
    ends = np.array([len(tokenizer.decode(ids[: i + 1]).encode()) for i in range(len(ids))])
    written = Example("ab" * 16, text, ids, supervised, 10, ends=ends, writer="student", source="written")
    batch = batch_of(written)
    keys: dict[str, Any] = {"cache": str(tmp_path / "cache"), "store": {"kind": "hidden"}}
    found = opened(student, data, keys if origin == "server" else {**keys, "model": str(tiny_teacher)})
    target = found.targets(batch, found.prepare(batch))
    live = opened(student, data, {"model": str(tiny_teacher)})
    assert torch.allclose(target.hidden, live.targets(batch).hidden, atol=1e-5)
    found.close()
    (document,) = Cache(tmp_path / "cache").documents([written.key])
    assert document is not None and document.tokens.tolist() == ids.tolist() and document.ends.tolist() == ends.tolist()


# A run


def recipe_of(folder: Path, data: DataConfig, teacher: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "run": str(folder),
        "student": {"tokenizer": "shipped:tokenizers/bytes-2k", "config": {**LLAMA, "max_position_embeddings": 128}},
        "teachers": [teacher],
        "data": data.model_dump(),
        "train": {"steps": 6, "batch_size": 4, "micro_batch_size": 1, "optimizer": {"lr": 1e-3}},
        "log": {"tensorboard": False},
        **changes,
    }


def losses(run: Path) -> list[float]:
    return [json.loads(line)["kd"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["hidden", "student_top_k"])
def test_a_run_from_a_server_is_the_run_from_the_model(served, tiny_teacher, data, tmp_path, kind):
    loss = {"divergence": "reverse_kl"} if kind == "student_top_k" else {}
    remote = {"kind": kind, "k": 100_000}
    potstill.train(recipe_of(tmp_path / "served", data, {"server": served.address, "remote": remote}, loss=loss))
    potstill.train(recipe_of(tmp_path / "live", data, {"model": str(tiny_teacher)}, loss=loss))
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    assert len(losses(tmp_path / "served")) == 6


@pytest.fixture
def honest(teacher):
    """The application of a server, on a thread of this process."""
    scorer = Scorer(teacher, 1024)
    options = ServeOptions("", 0, None, 8.0, None, None)
    yield application(Service(scorer, identity_of_model(teacher, "tiny"), None, options))
    scorer.close()


@pytest.mark.parametrize("beside", ["nothing", "cache"])
def test_micro_batches_of_a_step_are_asked_for_at_once(honest, student, data, tmp_path, beside):
    """The server answers none of them before all four are there."""
    keys = {"cache": str(tmp_path), "store": {"kind": "hidden"}} if beside == "cache" else {}
    remote = {"concurrency": 4} | ({} if keys else {"kind": "hidden"})
    together = Together(honest, "/score", 4)
    with Threaded(together) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": remote, **keys})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        steps = StepBatches(data, student.tokenizer, batch_size=4, micro_batch_size=1, seed=0, epochs=1)
        with Feed(steps, [found]) as feed:
            first = next(feed)
            ready = list(first.ready)
        assert len(ready) == 4 and all(made[0].plan is not None for made in ready)
        assert together.most == 4
        found.close()


class WaitFor(potstill.Callback):
    """After the first step: until the server has been asked so often."""

    def __init__(self, together: Together, times: int) -> None:
        self.together, self.times, self.seen = together, times, False

    def stepped(self, run, metrics):
        end = time.monotonic() + 120
        while run.step == 1 and not self.seen and time.monotonic() < end:
            self.seen = self.together.total >= self.times
            time.sleep(0.01)


def test_the_next_step_is_asked_for_while_the_present_one_trains(honest, data, tmp_path):
    together = Together(honest, "/score", 1)
    with Threaded(together) as server:
        wait = WaitFor(together, 8)  # four of each step, and the second one has not begun
        potstill.train(
            recipe_of(tmp_path / "run", data, {"server": server.address, "remote": {"kind": "hidden"}}), [wait]
        )
    assert wait.seen


def test_threads_that_need_the_same_documents_ask_for_them_once(honest, student, data, tmp_path):
    batch = batches_of(data, student)[0]
    together = Together(honest, "/score", 99, seconds=0.5)  # which never are: it is slow
    with Threaded(together) as server, ThreadPoolExecutor(4) as pool:
        asked = []
        for threads in (1, 4):
            keys = {"server": server.address, "cache": str(tmp_path / f"{threads}"), "store": {"kind": "hidden"}}
            (found,) = open_teachers([TeacherConfig.model_validate(keys)], student, data, LossConfig(), CPU).teachers
            made = [one.result() for one in [pool.submit(found.prepare, batch) for _ in range(threads)]]
            assert all(torch.equal(one.signals[0].hidden, made[0].signals[0].hidden) for one in made)
            asked.append(together.total)
            found.close()
        assert asked[1] == 2 * asked[0]


class Hanging(LiveOrigin):
    """Answers some times, and then waits for a server that does not answer."""

    ahead, at_once = True, 8

    def __init__(self, teacher: LanguageModel, answers: int) -> None:
        super().__init__(teacher, "tiny")
        self.answers, self.asked, self.hung, self.closed = answers, 0, threading.Event(), threading.Event()

    def begin(self, form, examples):
        self.asked += 1
        if self.asked <= self.answers:
            return super().begin(form, examples)

        def wait():
            self.hung.set()
            raise PotstillError("the run has ended" if self.closed.wait(120) else "nobody closed it")

        return wait

    def close(self) -> None:
        self.closed.set()


def test_ctrl_c_at_the_end_of_a_build_ends_it_with_what_was_computed(teacher, data, tmp_path):
    whole = Hanging(teacher, answers=99)
    build(whole, StoreConfig(k=8), data, tmp_path / "whole", batch_tokens=512)
    origin, batches = Hanging(teacher, answers=2), whole.asked
    assert batches >= 3

    def interrupt() -> None:
        assert origin.hung.wait(120)
        while origin.asked < batches:  # all are handed over, and the build waits for the last
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without one
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            build(origin, StoreConfig(k=8), data, tmp_path / "cache", batch_tokens=512)
    finally:
        signal.signal(signal.SIGINT, before)
    assert origin.closed.is_set() and origin.asked == batches
    assert len(Cache(tmp_path / "cache")) > 0


# What is refused


@pytest.mark.parametrize(
    ("config", "loss", "words"),
    [
        (
            {"remote": {"kind": "top_k"}},
            {"temperature": {"start": 2.0, "end": 1.0}},
            "moves over the run: use remote.kind: hidden",
        ),
        ({"remote": {"kind": "token_logprobs"}}, {}, "the loss needs a distribution"),
        ({"remote": {"api_key_env": "NO_SUCH_VARIABLE"}}, {}, "no environment variable NO_SUCH_VARIABLE"),
    ],
    ids=str,
)
def test_refused(opened, student, data, config, loss, words):
    with pytest.raises(PotstillError, match=words):
        opened(student, data, config, **loss)


def test_refused_with_another_tokenizer(opened, other, data):
    with pytest.raises(PotstillError, match="student_top_k asks about the student's tokens"):
        opened(other, data, {"remote": {"kind": "student_top_k"}})
    with pytest.raises(PotstillError, match=r"cross_tokenizer\.method: span_likelihood"):
        opened(other, data, {"remote": {"kind": "token_logprobs"}})
    with pytest.raises(PotstillError, match=r"use remote\.kind: hidden"):
        opened(other, data, {"remote": {"kind": "top_k"}}, temperature=2.0)


def test_a_document_longer_than_the_teacher_reads_is_refused_at_once(opened, data):
    student = tiny(0, max_position_embeddings=512)
    with pytest.raises(PotstillError, match=r"reads 128 tokens: set data\.max_length to 128"):
        opened(student, data.model_copy(update={"max_length": 200}), {})


def test_an_address_that_is_none(student, data):
    for address in ("localhost:80", "ftp://there", "http://[::1"):
        with pytest.raises(PotstillError, match="is no address"):
            open_server(TeacherConfig(server=address), "teachers[0]")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"server": "http://x", "dtype": "float32"}, "dtype goes with model: a server was started with its own"),
        ({"server": "http://x", "quantize": "4bit"}, "quantize goes with model"),
        ({"server": "http://x", "revision": "main"}, "revision goes with model"),
        ({"model": "x", "remote": {"k": 8}}, "remote go with server"),
        ({"cache": "x", "served_model_name": "y"}, "served_model_name and remote go with server"),
        ({"server": "http://x", "cache": "c", "remote": {"k": 8}}, "store says what is asked for and kept"),
        ({"server": "http://x", "model": "y"}, "not both"),
        ({"server": "http://x", "cache": "c", "on_missing": "skip"}, "what is missing is computed"),
    ],
)
def test_keys_that_do_not_go_together(keys, words):
    with pytest.raises(ValueError, match=words):
        TeacherConfig.model_validate(keys)
