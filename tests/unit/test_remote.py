"""A teacher behind `potstill serve` against the live one: losses and gradients of the student, from every kind, also through a
cache that is filled from the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import Served
from taught import answers, batches_of, data_of, relative, step, targets_of, write_files
from tiny import CPU, LLAMA, batch_of, tiny
from tiny_models import make_model

import potstill
from potstill.config import DataConfig, LossConfig, StoreConfig, StudentConfig, TeacherConfig
from potstill.losses import DIVERGENCES, DenseTarget, TopKTarget, fused_linear_kd
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel, load_student, load_teacher, shared_ids
from potstill.teachers.aligned import AlignedCached, AlignedTeacher
from potstill.teachers.build import build
from potstill.teachers.cached import CachedTeacher
from potstill.teachers.live import LiveTeacher
from potstill.teachers.remote import RemoteShelf, StudentTopK, open_server
from potstill.teachers.several import open_teachers, prepared
from potstill.teachers.store import Cache
from potstill.training.student import LossKnobs
from potstill.types import Example, PotstillError

PIECES = "shipped:tokenizers/pieces-1k"
METHODS = ("spelled", "shared", "projection", "chunk", "uld")


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")


@pytest.fixture(scope="module")
def served(tiny_teacher: Path):
    with Served(tiny_teacher) as server:
        yield server


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


def live_of(teacher: LanguageModel, student: LanguageModel) -> LiveTeacher:
    return LiveTeacher(teacher, shared_ids(student, teacher, "teachers[0]"), "tiny")


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


def exact_top_k(dense: DenseTarget, k: int, temperature: float) -> TopKTarget:
    """By hand, in float64."""
    logits = target_logits(dense, slice(0, dense.hidden.shape[0])).double() / temperature
    logprobs, ids = logits.log_softmax(-1).topk(k, -1)
    rest = logits.log_softmax(-1).scatter(-1, ids, -torch.inf).logsumexp(-1)
    return TopKTarget(ids, logprobs.float(), rest.float(), width=logits.shape[1])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k_is_the_exact_top_k(opened, teacher, student, data, divergence, temperature):
    batches = batches_of(data, student)[:2]
    knobs = LossKnobs(divergence, 0.3, 0.1, temperature, 0.7, 0.4)
    remote = {"kind": "top_k", "k": 24}
    found = opened(student, data, {"remote": remote}, divergence=divergence, temperature=temperature)
    live = live_of(teacher, student)
    by_hand = [exact_top_k(live.targets(batch), 24, temperature) for batch in batches]
    loss, gradients = step(student, batches, targets_of(found, batches), knobs)
    expected, exact_gradients = step(student, batches, by_hand, knobs)
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.02
    assert relative(gradients, exact_gradients) <= 1e-5


def test_a_smaller_vocabulary_of_the_students_is_the_one_asked_about(teacher, data, tmp_path):
    """The teacher has ids beyond the student's: as with a live one, they take no part."""
    student = tiny(0, max_position_embeddings=128)
    teacher.tokenizer.save_pretrained(tmp_path / "model")
    wide = make_model(tmp_path / "wide", seed=3)
    loaded = load_teacher(TeacherConfig(model=str(wide)), CPU, "t")
    loaded.tokenizer.add_tokens(["<more>", "<still more>"])
    loaded.model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    loaded.model.save_pretrained(wide)
    loaded.tokenizer.save_pretrained(wide)
    batches = batches_of(data, student)[:1]
    with Served(wide) as server:
        config = TeacherConfig.model_validate({"server": server.address, "remote": {"k": 16}})
        (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
        assert found.form.vocabulary == len(student.tokenizer) == len(loaded.tokenizer) - 2
        live = live_of(loaded, student)
        (target,), by_hand = targets_of(found, batches), exact_top_k(live.targets(batches[0]), 16, 1.0)
        assert torch.equal(target.ids, by_hand.ids)
        assert torch.allclose(target.logprobs, by_hand.logprobs, atol=1e-5)
        assert torch.allclose(target.tail, by_hand.tail, atol=1e-4)
        found.close()


# What the student likes best


def test_reverse_kl_on_the_students_own_top_k_by_hand(opened, teacher, data):
    """Σ q log(q / p) over the student's top k, and the same of the two rests."""
    student = tiny(5, max_position_embeddings=128, initializer_range=0.3)
    batch, k, t = batches_of(data, student)[0], 7, 1.5
    found = opened(student, data, {"remote": {"kind": "student_top_k", "k": k}}, divergence="reverse_kl", temperature=t)
    assert isinstance(found, StudentTopK)
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
    knobs = LossKnobs("reverse_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    remote = {"kind": "student_top_k", "k": 100_000}
    found = opened(student, data, {"remote": remote}, divergence="reverse_kl")
    live = live_of(teacher, student)
    student.model.train()
    loss, gradients = step(student, batches, targets_of(found, batches), knobs)
    assert student.model.training
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches], knobs)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-4


# Another tokenizer, and a prompt of its own


@pytest.mark.parametrize("method", METHODS)
def test_another_tokenizer_behind_a_server(opened, tiny_teacher, other, data, method):
    data = data.model_copy(update={"max_length": 128})
    batches = batches_of(data, other)
    across = {"method": method}
    live = opened(other, data, {"model": str(tiny_teacher), "across": across})
    found = opened(other, data, {"remote": {"kind": "hidden"}, "across": across})
    assert isinstance(live, AlignedTeacher) and isinstance(found, AlignedCached)
    loss, gradients = step(other, batches, answers(found, batches))
    expected, live_gradients = step(other, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.02
    assert relative(gradients, live_gradients) <= (5e-3 if method == "uld" else 1e-5)


def test_likelihoods_alone_serve_the_method_chunk(opened, tiny_teacher, other, data):
    data = data.model_copy(update={"max_length": 128})
    batches, across = batches_of(data, other), {"method": "chunk"}
    live = opened(other, data, {"model": str(tiny_teacher), "across": across})
    found = opened(other, data, {"remote": {"kind": "chosen"}, "across": across})
    loss, gradients = step(other, batches, answers(found, batches))
    expected, live_gradients = step(other, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5


@pytest.mark.parametrize("method", ["spelled", "shared", "uld"])
def test_all_ids_of_another_tokenizer_are_the_live_distribution(opened, tiny_teacher, other, data, method):
    data = data.model_copy(update={"max_length": 128})
    batches, across = batches_of(data, other)[:2], {"method": method}
    live = opened(other, data, {"model": str(tiny_teacher), "across": across})
    found = opened(other, data, {"remote": {"kind": "top_k", "k": 100_000}, "across": across})
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
    live = opened(student, data, {"model": str(tiny_teacher), "prompt": "hint"})
    found = opened(student, data, {"remote": {"kind": "hidden"}, "prompt": "hint"})
    without = opened(student, data, {"remote": {"kind": "hidden"}})
    loss, gradients = step(student, batches, answers(found, batches))
    expected, live_gradients = step(student, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5
    assert abs(step(student, batches, answers(without, batches))[0] - loss) > 1e-3


def test_several_teachers_some_behind_a_server(opened, served, tiny_teacher, student, data):
    """`only`, and the mean of whole distributions."""
    batches = batches_of(data, student)[:2]
    configs = [
        TeacherConfig.model_validate(keys)
        for keys in ({"model": str(tiny_teacher)}, {"server": served.address, "remote": {"kind": "hidden"}})
    ]
    loss = LossConfig(several="average")
    faculty = open_teachers(configs, student, data, loss, CPU)
    from potstill.teachers.weighing import ask, complete

    made = [complete(faculty.teachers, [t.prepare(b) for t in faculty.teachers], b) for b in batches]
    targets = [ask(faculty.teachers, ready, b, loss) for ready, b in zip(made, batches, strict=True)]
    value, _ = step(student, batches, targets)
    expected, _ = step(student, batches, [[(2.0, faculty.live[0].targets(batch))] for batch in batches])
    assert value == pytest.approx(expected, rel=1e-5)  # the mean of a teacher with itself
    faculty.teachers[1].close()


# Through a cache


@pytest.mark.parametrize(
    "store", [{"kind": "hidden"}, {"kind": "top_k", "k": 8, "rest": 4}, {"kind": "sampled"}], ids=str
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
    near = {"hidden": 1e-4, "top_k": 0, "sampled": 0}[store["kind"]]
    differing = 0
    for i in range(len(ours)):
        a, b = ours.document(i), theirs.document(i)
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.ends, b.ends)
        if near:
            x, y = (d.streams["hidden"].view(np.float32) for d in (a, b))
            assert np.abs(x - y).max() <= near
        else:
            differing += any(not np.array_equal(a.streams[n], b.streams[n]) for n in a.streams)
    assert differing <= len(ours) // 2  # another rounding of a batch may turn a last bit


def test_a_cache_beside_the_server_is_filled_ahead_of_the_step(served, opened, tiny_teacher, student, data, tmp_path):
    batches = batches_of(data, student)
    keys = {"cache": str(tmp_path / "cache"), "store": {"kind": "hidden"}}
    found = opened(student, data, keys)
    assert isinstance(found, CachedTeacher)
    targets = []
    for batch in batches:
        ready = found.prepare(batch)
        assert ready is not None  # on the thread that prepares: the device is not needed
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
    target = found.targets(batch, found.complete(batch, found.prepare(batch)))
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


def test_micro_batches_of_a_step_are_asked_for_at_once(opened, student, data, monkeypatch):
    """And those of the next step while the present one is at work: the iterator does not wait to be asked."""
    import threading

    from potstill.data import Windows

    found = opened(student, data, {"remote": {"kind": "hidden", "concurrency": 4}})
    together, most = threading.Semaphore(0), []
    asking: set[int] = set()
    documents = RemoteShelf.documents

    def watched(self, examples):
        asking.add(threading.get_ident())
        most.append(len(asking))
        together.release()
        if len(most) <= 4:
            assert together.acquire(timeout=30)
        result = documents(self, examples)
        asking.discard(threading.get_ident())
        return result

    monkeypatch.setattr(RemoteShelf, "documents", watched)
    windows = Windows(data, student.tokenizer, batch_size=4, micro_batch_size=1, seed=0, epochs=1)
    first = next(iter(prepared(windows, [found])))
    assert len(first.ready) == 4 and all(made[0] is not None for made in first.ready)
    assert max(most) > 1


# What is refused


@pytest.mark.parametrize(
    ("config", "loss", "words"),
    [
        (
            {"remote": {"kind": "top_k"}},
            {"temperature": {"start": 2.0, "end": 1.0}},
            "moves over the run: use kind hidden",
        ),
        ({"remote": {"kind": "chosen"}}, {}, "the loss needs a distribution"),
        ({"remote": {"token": "NO_SUCH_VARIABLE"}}, {}, "no environment variable NO_SUCH_VARIABLE"),
    ],
    ids=str,
)
def test_refused(opened, student, data, config, loss, words):
    with pytest.raises(PotstillError, match=words):
        opened(student, data, config, **loss)


def test_refused_with_another_tokenizer(opened, other, data):
    with pytest.raises(PotstillError, match="student_top_k asks about the student's tokens"):
        opened(other, data, {"remote": {"kind": "student_top_k"}})
    with pytest.raises(PotstillError, match=r"across\.method: chunk"):
        opened(other, data, {"remote": {"kind": "chosen"}})
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
        ({"cache": "x", "name_on_server": "y"}, "name_on_server and remote go with server"),
        ({"server": "http://x", "cache": "c", "remote": {"k": 8}}, "store says what is asked for and kept"),
        ({"server": "http://x", "model": "y"}, "not both"),
        ({"server": "http://x", "cache": "c", "on_missing": "skip"}, "what is missing is computed"),
    ],
)
def test_keys_that_do_not_go_together(keys, words):
    with pytest.raises(ValueError, match=words):
        TeacherConfig.model_validate(keys)
