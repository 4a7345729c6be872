"""A teacher on disk with another tokenizer: what the live one says, from every kind of cache that can serve it, also filled as
it is read."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from taught import KD, answers, batches_of, builder, data_of, relative, sentence, step, write_files
from tiny import CPU, LLAMA, batch_of
from tiny_models import make_model, write_jsonl

import potstill
from potstill.cache.build import build
from potstill.config import CrossTokenizerConfig, DataConfig, LossConfig, StoreConfig, StudentConfig, TeacherConfig
from potstill.data import Encoder
from potstill.losses import DIVERGENCES
from potstill.models import LanguageModel, load_student, load_teacher
from potstill.teachers.live import LiveModel
from potstill.teachers.open import open_teachers
from potstill.teachers.stored import CachedSignal
from potstill.teachers.tokenizer_pair import TokenizerPair, aligned_chunks
from potstill.training.logging import TextWarnings
from potstill.types import Example, PotstillError

PIECES = "shipped:tokenizers/pieces-1k"
METHODS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return data_of(write_files(tmp_path_factory.mktemp("data")), max_length=128)


@pytest.fixture(scope="module")
def student(teacher: LanguageModel) -> LanguageModel:
    """With another tokenizer, and a chat template of its own that puts other words around the turns."""
    made = load_student(StudentConfig(config={**LLAMA, "max_position_embeddings": 512}, tokenizer=PIECES), CPU, 0)
    made.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    return made


@pytest.fixture(scope="module")
def built(teacher: LanguageModel, data: DataConfig, tmp_path_factory: pytest.TempPathFactory):
    return builder(teacher, data, tmp_path_factory)


def opened(student: LanguageModel, data: DataConfig, config: dict[str, Any], **loss: Any):
    configs = [TeacherConfig.model_validate(config)]
    return open_teachers(configs, student, data, LossConfig(**loss), CPU).teachers[0]


def both(teacher, student, data, cache, across, **loss):
    live = opened(student, data, {"model": teacher.model.name_or_path, "cross_tokenizer": across}, **loss)
    cached = opened(student, data, {"cache": str(cache), "cross_tokenizer": across}, **loss)
    assert isinstance(live.source, LiveModel) and isinstance(cached.source, CachedSignal)
    return live, cached


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", [{}, {"max_length": 40, "packing": False}, {"append_eos": False}], ids=str)
def test_hidden_states_give_the_live_loss_and_gradients(built, teacher, student, data, method, layout):
    data = data.model_copy(update=layout)
    batches = batches_of(data, student)
    live, cached = both(teacher, student, data, built(kind="hidden"), {"method": method})
    loss, gradients = step(student, batches, answers(cached, batches))
    expected, live_gradients = step(student, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.02
    assert relative(gradients, live_gradients) <= (5e-3 if method == "uld" else 1e-5)  # an L1 turns where two are equal


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_hidden_states_serve_every_divergence_and_temperature(built, teacher, student, data, divergence):
    batches = batches_of(data, student)[:2]
    knobs = KD.__class__(divergence, 0.3, 0.1, 2.5, 0.7, 0.4)
    live, cached = both(teacher, student, data, built(kind="hidden"), {}, divergence=divergence, temperature=2.5)
    loss, gradients = step(student, batches, answers(cached, batches), knobs)
    expected, live_gradients = step(student, batches, answers(live, batches), knobs)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, live_gradients) <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_all_entries_of_a_top_k_cache_give_the_live_loss_within_quantisation(built, teacher, student, data, method):
    """With k as large as the vocabulary there is no rest; a row, a token or a chunk that is off by one would be off by much
    more than a thousandth."""
    batches = batches_of(data, student)
    everything = built(kind="top_k", k=len(teacher.tokenizer))
    live, cached = both(teacher, student, data, everything, {"method": method})
    loss, gradients = step(student, batches, answers(cached, batches))
    expected, live_gradients = step(student, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-3)
    assert relative(gradients, live_gradients) <= (5e-2 if method == "uld" else 1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_few_entries_are_a_divergence_too(built, student, data, method):
    """Never below 0, with the text's own token among the entries or in the rest."""
    batches = batches_of(data, student)
    cached = opened(student, data, {"cache": str(built(kind="top_k", k=8)), "cross_tokenizer": {"method": method}})
    loss, gradients = step(student, batches, answers(cached, batches))
    assert loss > 0.02 and all(g.isfinite().all() for g in gradients.values())


def test_likelihoods_alone_serve_the_method_chunk(built, teacher, student, data):
    batches = batches_of(data, student)
    live, cached = both(teacher, student, data, built(kind="token_logprobs"), {"method": "span_likelihood"})
    loss, gradients = step(student, batches, answers(cached, batches))
    expected, live_gradients = step(student, batches, answers(live, batches))
    assert loss == pytest.approx(expected, rel=1e-3)
    assert relative(gradients, live_gradients) <= 1e-2


def test_a_model_beside_the_cache_fills_it(built, teacher, student, data, tmp_path):
    """With conversations in the teacher's own template: the cache is then what `cache build` makes."""
    batches = batches_of(data, student)
    config = {"model": teacher.model.name_or_path, "cache": str(tmp_path / "cache"), "store": {"kind": "hidden"}}
    filling = opened(student, data, config)
    loss, gradients = step(student, batches, answers(filling, batches))
    filling.close()
    for folder in (tmp_path / "cache", built(kind="hidden")):
        cached = opened(student, data, {"cache": str(folder)})
        again, theirs = step(student, batches, answers(cached, batches))
        assert again == pytest.approx(loss, rel=1e-5)
        assert relative(theirs, gradients) <= 1e-5


@pytest.mark.parametrize(
    ("store", "cross_tokenizer", "loss", "says"),
    [
        ({"kind": "sampled"}, {}, {}, r"the cache holds draws of the teacher's own tokens"),
        (
            {"kind": "token_logprobs"},
            {},
            {},
            r"only how likely .* top_k or hidden, or learn from it with cross_tokenizer.method: span_likelihood",
        ),
        (
            {"kind": "top_k", "k": 8},
            {},
            {"temperature": 2.0},
            r"loss.temperature is 2; the cache holds the likelihoods",
        ),
        (
            {"kind": "hidden"},
            {"method": "span_likelihood"},
            {"temperature": 2.0},
            r"is 2; the method span_likelihood compares likelihoods",
        ),
        (
            {"kind": "hidden"},
            {},
            {"temperature": {"start": 2, "end": 1}},
            r"moves over the run; the likelihood of a chunk",
        ),
        ({"kind": "top_k", "k": 8, "temperatures": (2.0,)}, {}, {}, r"at 2 only, and a teacher with another tokenizer"),
    ],
)
def test_what_a_cache_cannot_serve_is_refused(
    built, teacher, student, data, tmp_path, store, cross_tokenizer, loss, says
):
    with pytest.raises(PotstillError, match=says) as caught:
        opened(student, data, {"cache": str(built(**store)), "cross_tokenizer": cross_tokenizer}, **loss)
    assert str(caught.value).startswith("teachers[0].cache: ")
    beside = {
        "model": teacher.model.name_or_path,
        "cache": str(tmp_path / "new"),
        "store": store,
        "cross_tokenizer": cross_tokenizer,
    }
    with pytest.raises(PotstillError, match=says):
        opened(student, data, beside, **loss)
    assert not (tmp_path / "new").exists()


def test_a_missing_document_is_named(built, student, data, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "A message that no teacher has read."}\n')
    other = DataConfig.model_validate({"sources": [{"files": str(more)}], "piece_bytes": 300})
    cached = opened(student, other, {"cache": str(built(kind="hidden"))})
    with pytest.raises(PotstillError, match=r"has no document .*more.jsonl.*1 of the 1 documents of data"):
        answers(cached, batches_of(other, student))
    skipping = opened(student, other, {"cache": str(built(kind="hidden")), "on_missing": "skip"})
    assert skipping.missing(batches_of(other, student)[0]) == [0]


@pytest.mark.parametrize("kind", ["top_k", "hidden"])
def test_a_prompt_longer_than_the_teacher_can_read_has_no_chunks(student, tmp_path, kind):
    """Whether the cache was built before or is filled now; the other document has its own."""
    write_jsonl(tmp_path / "long.jsonl", [{"q": sentence(1, 40), "a": " peace."}, {"q": "x", "a": " law."}])
    source = {"files": str(tmp_path / "long.jsonl"), "prompt": "q", "completion": "a"}
    data = DataConfig.model_validate({"sources": [source], "max_length": 400, "packing": False})
    short = make_model(tmp_path / "short", max_position_embeddings=20)
    store = {"kind": kind, "k": 8}
    filled = opened(student, data, {"model": str(short), "cache": str(tmp_path / "filled"), "store": store})
    batches = batches_of(data, student)
    heard = [[(share > 0).sum().item() for share, _ in pairs] for pairs in answers(filled, batches)]
    filled.close()
    build(load_teacher(TeacherConfig(model=str(short)), CPU, "t"), StoreConfig(**store), data, tmp_path / "b", name="x")
    for config in ({"cache": str(tmp_path / "b")}, {"model": str(short)}):
        alone = answers(opened(student, data, config), batches)
        assert [[(share > 0).sum().item() for share, _ in pairs] for pairs in alone] == heard
    rows = sum(batch.supervised_tokens for batch in batches)
    assert 0 < sum(count for pairs in heard for count in pairs) < rows


def test_a_run_from_a_cache_says_how_well_the_tokens_lie(built, data, tmp_path):
    config = {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"} | {"max_position_embeddings": 512}
    recipe = {
        "run": str(tmp_path / "run"),
        "student": {"config": config, "tokenizer": PIECES},
        "teachers": [{"cache": str(built(kind="hidden"))}],
        "data": data.model_copy(update={"sources": data.sources[:2], "workers": 2}),
        "train": {"steps": 3, "batch_size": 4},
    }
    seen = []

    class Watch(potstill.Callback):
        def stepped(self, run, metrics):
            seen.append(metrics)

    potstill.train(recipe, [Watch()])
    assert len(seen) == 3
    for metrics in seen:
        assert metrics["align_exact"] == 1.0 and metrics["align_bytes"] == 1.0
        assert 0.3 < metrics["align_one_to_one"] < 1 and 0.3 < metrics["align_chunks_per_token"] < 1
        assert 0.1 < metrics["shared_mass"] < 1
        assert metrics["kl"] > 0


def test_dynamic_scaling_survives_a_stop(built, data, tmp_path):
    """The divergence is scaled to the cross-entropy of the step before, also of the one before a stop."""
    config = {**LLAMA, "max_position_embeddings": 512}

    def recipe(run: str, steps: int) -> dict[str, Any]:
        return {
            "run": str(tmp_path / run),
            "student": {"config": config, "tokenizer": PIECES},
            "teachers": [{"cache": str(built(kind="hidden"))}],
            "data": data.model_copy(update={"sources": data.sources[:2]}),
            "loss": {"dynamic_scaling": True, "ce_weight": 0.5, "repeat_weight": 0.0},
            "train": {"steps": steps, "batch_size": 4, "lr_schedule": {"shape": "constant"}},
        }

    def steps(run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]

    potstill.train(recipe("whole", 4))
    potstill.train(recipe("stopped", 2))
    potstill.train(recipe("stopped", 4))
    whole = steps("whole")
    assert whole[0]["kd_scale"] == 1.0
    for before, after in pairwise(whole):
        assert after["kd_scale"] == pytest.approx(before["ce"] / before["kd"], rel=1e-6)
        assert after["loss"] == pytest.approx(after["kd_scale"] * after["kd"] + 0.5 * after["ce"], rel=1e-5)
    assert [s["loss"] for s in steps("stopped")] == [s["loss"] for s in whole]


def test_texts_that_differ_are_an_error_and_little_coverage_a_warning(student, teacher, tmp_path, capsys):
    """A lower-casing tokenizer keeps what it does not change; a text that is another is refused, naming the pair."""
    pair = TokenizerPair(student.tokenizer, teacher.tokenizer, CrossTokenizerConfig())
    encode = Encoder(student.tokenizer, max_length=200, append_eos=True)
    theirs = Encoder(teacher.tokenizer, max_length=200, append_eos=True)
    text = "The people keep the peace, and the treasury pays for all of it in time."
    (ours,) = [e.example for e in encode([Example("0" * 32, text)])]
    (same,) = [e.example for e in theirs([Example("0" * 32, text)])]
    (other,) = [e.example for e in theirs([Example("0" * 32, "0123456789" * 7)])]
    assert aligned_chunks(pair, batch_of(ours), [same]).counts["bytes_in_chunks"] == len(text)
    object.__setattr__(other, "text", text)
    with pytest.raises(
        PotstillError, match=r"only \d+ are the same .* student .*pieces-1k.* teacher .*they do not stand"
    ):
        aligned_chunks(pair, batch_of(ours), [other])
    watch = TextWarnings(print)
    watch.stepped(potstill.Run(tmp_path, step=3), {"align_bytes": 0.95})
    assert capsys.readouterr().out == ""
    for _ in range(2):
        watch.stepped(potstill.Run(tmp_path, step=3), {"align_bytes": 0.5})
    assert capsys.readouterr().out.count("step 3: only 50% of the text's bytes are the same") == 1
