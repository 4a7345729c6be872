"""Teachers behind OpenAI-compatible servers: those that can be believed give the top k that the model has, and the others are
refused with what they did. The servers are real HTTP servers over a real model, on a thread of this process."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taught import answers, batches_of, step, targets_of
from threaded import Altered, Completions, Threaded
from tiny import CPU, LLAMA
from tiny_models import TOKENIZER, make_model

import potstill
from potstill import http_client as connection
from potstill.cache.build import build
from potstill.cache.store import Cache
from potstill.cache.verify import verify
from potstill.config import DataConfig, LossConfig, StoreConfig, StudentConfig, TeacherConfig
from potstill.losses import TopKTarget
from potstill.models import LanguageModel, load_student, load_teacher
from potstill.shipped import locate
from potstill.teachers.live import live_teacher
from potstill.teachers.open import open_teachers
from potstill.teachers.remote import open_server
from potstill.types import PotstillError


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")


def config_of(server: Threaded, kind: str = "top_k", k: int = 16, **keys: Any) -> TeacherConfig:
    remote = {"retry_timeout": 20.0} | ({} if "cache" in keys else {"kind": kind, "k": k})
    return TeacherConfig.model_validate({"server": server.address, "tokenizer": TOKENIZER, "remote": remote, **keys})


def opened(server: Threaded, student: LanguageModel, data: DataConfig, loss: Any = None, **keys: Any):
    (found,) = open_teachers([config_of(server, **keys)], student, data, loss or LossConfig(), CPU).teachers
    return found


@pytest.mark.parametrize("way", ["vllm", "echo"])
@pytest.mark.parametrize(("suffix", "k"), [("", 16), ("/v1", 2), ("/v1/", 5)])
def test_the_top_k_is_the_models(teacher, student, data, way, suffix, k):
    batches = batches_of(data, student)[:2]
    with Threaded(Completions(teacher, "tiny", way).application) as server:
        server.address += suffix
        found = opened(server, student, data, k=k)
        live = live_teacher(teacher, 2048, "tiny")
        for batch, target in zip(batches, targets_of(found, batches), strict=True):
            dense = live.targets(batch)
            z = (dense.hidden @ dense.head.weight.T).double().log_softmax(-1)
            logprobs, ids = z.topk(k, -1)
            tail = z.scatter(-1, ids, -torch.inf).logsumexp(-1)
            assert isinstance(target, TopKTarget)
            assert torch.allclose(target.logprobs.double(), logprobs, atol=2e-5)
            assert (target.ids == ids).double().mean() > 0.999
            assert torch.allclose(target.tail.double(), tail, atol=1e-3)
        loss, _ = step(student, batches, targets_of(found, batches))
        expected, _ = step(student, batches, [exact(live.targets(batch), k) for batch in batches])
        assert loss == pytest.approx(expected, rel=1e-4)
        found.close()


@pytest.mark.parametrize("way", ["vllm", "echo"])
def test_ids_that_the_tokenizer_does_not_have_take_no_part(teacher, student, data, tmp_path, way):
    """A head is often padded: its rows beyond the tokenizer's ids may be anything, also likely."""
    wide = load_teacher(TeacherConfig(model=str(make_model(tmp_path / "wide", seed=3))), CPU, "t")
    wide.model.resize_token_embeddings(2051, mean_resizing=False)
    batch, k = batches_of(data, student)[0], 16
    with torch.no_grad():
        head = wide.model.lm_head.weight
        head[2048:] = head[:3] * 2
    with Threaded(Completions(wide, "tiny", way).application) as server:
        found = opened(server, student, data, k=k)
        (target,) = targets_of(found, [batch])
        z = wide.model.lm_head(wide.hidden(batch, batch.rows.teacher)).double()
        assert (z.topk(k, -1).indices >= 2048).any()
        logprobs, ids = z[:, :2048].log_softmax(-1).topk(k, -1)
        tail = z[:, :2048].log_softmax(-1).scatter(-1, ids, -torch.inf).logsumexp(-1)
        assert (target.ids == ids).double().mean() > 0.999
        near = [torch.allclose(a.double(), b, atol=0.02) for a, b in ((target.logprobs, logprobs), (target.tail, tail))]
        assert near == [True, True]
        found.close()
    made = Completions(wide, "tiny", way, most=k)
    with Threaded(made.application) as server:
        found = opened(server, student, data, k=k)
        with pytest.raises(
            PotstillError, match=r"rows for ids that its tokenizer does not have, .*: let the server give"
        ):
            found.prepare(batch)
        found.close()


@pytest.mark.parametrize(
    ("way", "defaults"),
    [("vllm", ("top_p", "top_k", "min_p", "repetition_penalty", "temperature")), ("echo", ("top_p", "temperature"))],
)
def test_a_models_own_sampling_defaults_do_not_apply(teacher, student, data, way, defaults):
    made = Completions(teacher, "tiny", way)
    made.defaults = defaults
    with Threaded(made.application) as server:
        opened(server, student, data).close()


def exact(dense: Any, k: int) -> TopKTarget:
    z = (dense.hidden @ dense.head.weight.T).double().log_softmax(-1)
    logprobs, ids = z.topk(k, -1)
    tail = z.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return TopKTarget(ids, logprobs.float(), tail.float(), width=2048)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("shifted", "are shifted by one: what it gives for a token is that of the one after it"),
        ("ignoring", "it ignores the request for log-probabilities of the prompt"),
        (
            "hot",
            r"are not what it gives when it goes on from the beginnings of that prompt \(they differ by \d\.\d\d nats",
        ),
    ],
)
def test_a_server_that_cannot_be_believed(teacher, student, data, way, words):
    with Threaded(Completions(teacher, "tiny", way).application) as server:
        with pytest.raises(PotstillError, match=words) as error:
            opened(server, student, data)
        assert str(error.value).startswith(
            f"teachers[0]: the server at {server.address}: its" if way != "ignoring" else ""
        )


def test_tokens_named_by_their_text(teacher, student, data):
    """A thousand and more of the tokenizer's ids stand for parts of characters, which have no text of their own."""
    other = load_student(
        StudentConfig(config={**LLAMA, "max_position_embeddings": 512}, tokenizer="shipped:tokenizers/pieces-1k"),
        CPU,
        0,
    )
    batches = batches_of(data, other)[:2]
    with Threaded(Completions(teacher, "tiny", "text").application) as server:
        found = opened(server, other, data, kind="token_logprobs", cross_tokenizer={"method": "span_likelihood"})
        live = TeacherConfig.model_validate(
            {"model": teacher.model.name_or_path, "cross_tokenizer": {"method": "span_likelihood"}}
        )
        (expected,) = open_teachers([live], other, data, LossConfig(), CPU).teachers
        ours, theirs = (step(other, batches, answers(one, batches))[0] for one in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-4)
        found.close()
        same = opened(server, student, data)
        with pytest.raises(PotstillError, match=r"is not the text of one id alone: only remote\.kind: token_logprobs"):
            for batch in batches_of(data, student):
                same.prepare(batch)
        same.close()


def test_more_than_the_server_gives_is_refused_in_its_words(teacher, student, data):
    with (
        Threaded(Completions(teacher, "tiny", most=20).application) as server,
        pytest.raises(
            PotstillError, match=r"refused \(400\): Requested logprobs of 64, .* greater than max allowed: 20"
        ),
    ):
        opened(server, student, data, k=64)


def test_another_tokenizer_than_ours_is_noticed(teacher, student, data):
    made = Completions(teacher, "tiny")
    made.tokenize = lambda text: [5, 6, 7, *teacher.tokenizer(text).input_ids]
    with Threaded(made.application) as server:
        with pytest.raises(PotstillError, match=r"it has another tokenizer than .*: it makes \[5, 6, 7, "):
            opened(server, student, data)
        made.tokenize = lambda text: teacher.tokenizer(text).input_ids
        opened(server, student, data).close()


def test_without_a_name_and_without_a_tokenizer(teacher, student, data):
    with Threaded(Completions(teacher, "tiny").application) as server:
        with pytest.raises(
            PotstillError, match=r"does not hand its tokenizer out: name it with teachers\[0\]\.tokenizer"
        ):
            opened(server, student, data, tokenizer=None)
        with pytest.raises(PotstillError, match="served_model_name: large, and it has tiny"):
            opened(server, student, data, served_model_name="large")
        opened(server, student, data, served_model_name="tiny").close()
    with Threaded(Completions(teacher, teacher.model.name_or_path).application) as server:
        opened(server, student, data, tokenizer=None).close()  # its name is where it lies


@pytest.mark.parametrize(
    ("keys", "loss", "words"),
    [
        ({}, {"temperature": 2.0}, "at temperature 1 only: set loss.temperature to 1"),
        ({"kind": "hidden"}, {}, "only `potstill serve` gives kind hidden"),
        ({"kind": "student_top_k"}, {}, "only `potstill serve` gives kind student_top_k"),
        ({"cache": "c", "store": {"kind": "top_k", "k": 8, "tail_samples": 4}}, {}, "gives draws from the rest"),
        (
            {"cache": "c", "store": {"kind": "sampled"}},
            {},
            r"teachers\[0\].cache: only `potstill serve` gives kind sampled",
        ),
        (
            {"cache": "c", "store": {"temperatures": [1, 2]}},
            {"temperature": 2.0},
            r"set loss\.temperature to 1, and store\.temperatures to \[1\]",
        ),
    ],
)
def test_what_only_potstill_serve_gives(teacher, student, data, tmp_path, monkeypatch, keys, loss, words):
    monkeypatch.chdir(tmp_path)
    with Threaded(Completions(teacher, "tiny").application) as server, pytest.raises(PotstillError, match=words):
        opened(server, student, data, LossConfig(**loss), **keys)


def test_no_server_of_any_kind_that_is_known(student, data):
    from starlette.applications import Starlette

    with (
        Threaded(Starlette()) as server,
        pytest.raises(PotstillError, match="it has no /version and no /v1/models"),
    ):
        opened(server, student, data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda body, h: (body.replace(b'"logprob":-', b'"logprob":NaN,"x":-', 1), h),
            "no numbers|not understood|wrong",
        ),
        (lambda body, h: (body.replace(b'"logprob":-', b'"logprob":'), h), "above 0|wrong"),
        (lambda body, h: (b'{"choices": []}', h), "not understood"),
        (
            lambda body, h: (body.replace(b'"logprob":-', b'"logprob":9' + b"0" * 400 + b',"x":'), h),
            "not understood|wrong",
        ),
        (
            lambda body, h: (body.replace(b'"logprob":', b'"logprob":[],"x":'), h),
            "no entry for the token|not understood",
        ),
        (lambda body, h: (re.sub(rb'"(\d+)":\{', rb'"\g<1>' + b"7" * 30 + b'":{', body), h), "no entry|not understood"),
        (lambda body, h: (b"[" * 100_000, h), "not understood"),
        (lambda body, h: (b'{"choices": [[1]]}', h), "ignores"),
        (lambda body, h: (body + b" " * 2**24, h), "its answer to POST /v1/completions would be"),
        (lambda body, h: (b"<html>", h), "not understood"),
    ],
)
def test_a_server_that_lies_later(teacher, student, data, change, words):
    lying: list[bool] = []
    application = Altered(
        Completions(teacher, "tiny").application, "/v1/completions", lambda b, h: change(b, h) if lying else (b, h)
    )
    with Threaded(application) as server:
        found = opened(server, student, data)
        lying.append(True)
        with pytest.raises(PotstillError, match=words):
            for batch in batches_of(data, student):
                found.prepare(batch)
        found.close()


def test_after_it_was_away_it_is_probed_again(teacher, student, data, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.02)
    made = Completions(teacher, "tiny")
    batches = batches_of(data, student)
    other = load_teacher(TeacherConfig(model=str(make_model(tmp_path / "other", seed=8))), CPU, "t")
    with Threaded(made.application) as server:
        found = opened(server, student, data, remote={"kind": "top_k", "k": 16, "concurrency": 1})
        before = found.prepare(batches[0]).signals[0].target
        asked, made.failing = len(made.asked), 2
        again = found.prepare(batches[0]).signals[0].target
        assert torch.equal(again.logprobs, before.logprobs)
        assert len(made.asked) == asked + len(batches[0].examples) + 2 + 5  # two failed, and the probe
        made.model, made.failing = other, 1
        with pytest.raises(PotstillError, match="it now serves another model than when the run began"):
            found.prepare(batches[0])
        found.close()


def test_a_cache_from_such_a_server(teacher, data, tmp_path):
    with Threaded(Completions(teacher, "tiny").application) as server:
        config = TeacherConfig.model_validate(
            {"server": server.address, "tokenizer": TOKENIZER, "cache": str(tmp_path / "c"), "store": {"k": 16}}
        )
        built = build(open_server(config, "t"), StoreConfig(k=16), data, tmp_path / "c")
    build(teacher, StoreConfig(k=16), data, tmp_path / "live", name="tiny")
    ours, theirs = Cache(tmp_path / "c"), Cache(tmp_path / "live")
    assert built.documents == len(ours) == len(theirs) > 10
    assert dict(ours.manifest.teacher) == {
        "model": "tiny",
        "revision": None,
        "weights": "served tiny",
        "dtype": "unknown",
    }
    same = [np.array_equal(ours.document(i).arrays["ids"], theirs.document(i).arrays["ids"]) for i in range(len(ours))]
    assert np.mean(same) > 0.8  # two equal logits may change places


def test_another_model_of_the_same_name_does_not_add_to_a_cache(teacher, data, tmp_path):
    other = load_teacher(TeacherConfig(model=str(make_model(tmp_path / "other", seed=8))), CPU, "t")
    made = Completions(teacher, "tiny")
    with Threaded(made.application) as server:
        config = config_of(server, cache=str(tmp_path / "c"), store={"k": 16})
        first = build(open_server(config, "t"), StoreConfig(k=16), data, tmp_path / "c")
        again = build(open_server(config, "t"), StoreConfig(k=16), data, tmp_path / "c")
        assert first.documents == again.there > 10 and verify(tmp_path / "c").damage == []
        made.model = other
        with pytest.raises(PotstillError, match="was built with another model than the server has now, though both"):
            build(open_server(config, "t"), StoreConfig(k=16), data, tmp_path / "c")


def test_a_run_from_such_a_server(teacher, data, tmp_path):
    with Threaded(Completions(teacher, "tiny").application) as server:
        recipe = {
            "run": str(tmp_path / "run"),
            "student": {"tokenizer": TOKENIZER, "config": {**LLAMA, "max_position_embeddings": 128}},
            "teachers": [config_of(server).model_dump()],
            "data": data.model_dump(),
            "train": {"steps": 3, "batch_size": 4, "micro_batch_size": 2},
            "log": {"tensorboard": False},
        }
        assert potstill.train(recipe).step == 3


@pytest.mark.parametrize("named", ["nobody", "tokenizer", "served_model_name"])
def test_a_server_does_not_choose_whose_code_runs(teacher, student, data, tmp_path, named):
    """A folder with a tokenizer of its own code, which leaves a mark: it is run only where the recipe names the folder."""
    folder, mark = tmp_path / "tokenizer", tmp_path / "mark"
    shutil.copytree(locate(TOKENIZER), folder)
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(mark)!r}).touch()\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    keys = {"tokenizer": None, "trust_remote_code": True} | ({} if named == "nobody" else {named: str(folder)})
    with Threaded(Completions(teacher, str(folder)).application) as server:
        if named == "nobody":
            with pytest.raises(
                PotstillError, match=r"teachers\[0\]\.tokenizer .*code from the hub is run only for a name"
            ):
                opened(server, student, data, **keys)
        else:
            opened(server, student, data, **keys).close()
    assert mark.exists() == (named != "nobody")
