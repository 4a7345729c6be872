"""A teacher on disk against the live one: loss and gradients of the student, whatever the layout; what is refused; and a model
beside the cache, which fills it."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from read_rows import read_sampled, read_top_k
from taught import KD, batches_of, builder, data_of, relative, sentence, step, targets_of, write_files
from tiny import CPU, tiny
from tiny_models import TOKENIZER, make_model, write_jsonl

import potstill
from potstill.cache.build import CacheWriter, build
from potstill.cache.origin import format_of
from potstill.cache.reader import CacheReader, load_head
from potstill.cache.reading import examples_of, weights_fingerprint
from potstill.cache.store import Cache, Writer
from potstill.cache.verify import coverage, verify
from potstill.config import DataConfig, LossConfig, StoreConfig, TeacherConfig
from potstill.data import Feed, StepBatches, collate
from potstill.data.feed import without_missing
from potstill.losses import DIVERGENCES, SampledTarget, TopKTarget, fused_linear_kd
from potstill.models import LanguageModel, load_teacher, shared_ids
from potstill.objective.student_loss import LossSettings
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.open import as_teachers_need, open_teachers
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import CachedSignal
from potstill.teachers.teacher import Teacher
from potstill.types import HiddenTarget, PotstillError

TWO = {"kind": "top_k", "k": 32, "temperatures": (1.0, 2.0)}


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def data(files: Path) -> DataConfig:
    return data_of(files)


@pytest.fixture(scope="module")
def built(teacher: LanguageModel, data: DataConfig, tmp_path_factory: pytest.TempPathFactory):
    return builder(teacher, data, tmp_path_factory)


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0, max_position_embeddings=128)


def opened(
    folder: Path, student: LanguageModel, data: DataConfig, on_missing: str = "error", **loss: Any
) -> Teacher[CachedSignal]:
    configs = [TeacherConfig(cache=str(folder), on_missing=on_missing)]
    (found,) = open_teachers(configs, student, data, LossConfig(**loss), CPU).teachers
    assert isinstance(found.source, CachedSignal) and isinstance(found.view, SameTokenizerView)
    return found


def live_of(teacher: LanguageModel, student: LanguageModel) -> Teacher[LiveModel]:
    return live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "tiny")


# The same loss and gradients


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"packing": False},
        {"max_length": 40},
        {"max_length": 17, "packing": False},
        {"append_eos": False},
        {"shuffle": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_hidden_states_give_the_live_loss_and_gradients(built, teacher, student, data, layout, seed):
    """Texts, completions and chats of one cache, in other orders, rows and lengths."""
    data = data.model_copy(update=layout)
    batches = batches_of(data, student, seed)
    assert any(batch.packed for batch in batches) == data.packing
    live = live_of(teacher, student)
    found = opened(built(kind="hidden"), student, data)
    loss, gradients = step(student, batches, targets_of(found, batches))
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches])
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.1
    assert relative(gradients, live_gradients) <= 1e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_hidden_states_serve_every_divergence_and_temperature(built, teacher, student, data, divergence):
    batches = batches_of(data, student)[:2]
    live = live_of(teacher, student)
    for temperature in (1.0, 2.5):
        knobs = LossSettings(divergence, 0.3, 0.1, temperature, 0.7, 0.4)
        found = opened(built(kind="hidden"), student, data, divergence=divergence, temperature=temperature)
        loss, gradients = step(student, batches, targets_of(found, batches), knobs)
        expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches], knobs)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert relative(gradients, live_gradients) <= 1e-5


def test_layouts_differ(student, data):
    """Else that they agree would say little."""
    orders = [[e.key for b in batches_of(data, student, seed) for e in b.examples] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    cut = batches_of(data.model_copy(update={"max_length": 17, "packing": False}), student)
    lengths = [len(e.ids) for b in cut for e in b.examples]
    assert max(lengths) == 17 and lengths.count(17) > 10


def exact_top_k(target: HiddenTarget, k: int, temperature: float) -> TopKTarget:
    """The k largest and the rest, from whole logits in float64."""
    z = (target.hidden.double() @ target.head.weight.double().t()) / temperature
    top = z.log_softmax(-1).topk(k, -1)
    rest = z.log_softmax(-1).scatter(-1, top.indices, -math.inf).logsumexp(-1)
    return TopKTarget(top.indices, top.values.float(), rest.float())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_top_k_gives_the_live_top_k_within_quantisation(built, teacher, student, data, divergence, temperature):
    """Off by less than a thousandth, where dropping the rest bucket, or one shifted row, would be off by much more."""
    knobs = replace(KD, divergence=divergence, temperature=temperature)
    folder = built(**TWO)
    found = opened(folder, student, data, divergence=divergence, temperature=temperature)
    batches = batches_of(data, student)
    live = [exact_top_k(live_of(teacher, student).targets(batch), 32, temperature) for batch in batches]
    ours = targets_of(found, batches)
    loss, gradients = step(student, batches, ours, knobs)
    expected, live_gradients = step(student, batches, live, knobs)
    assert loss == pytest.approx(expected, rel=1e-3)
    assert relative(gradients, live_gradients) <= 5e-3
    for target, exact in zip(ours, live, strict=True):
        same = target.ids == exact.ids  # equally likely ones may stand in another order
        assert same.float().mean() > 0.99
        weight = exact.logprobs.exp()
        assert ((target.logprobs - exact.logprobs).abs() * weight * same).sum(-1).max() < 0.01
        assert (target.tail.exp() - exact.tail.exp()).abs().max() < 2e-3


def by_hand(folder: Path, batch, read):
    """What `read` says of each supervised token, found and decoded one row at a time, padded to the widest."""
    cache = Cache(folder)
    rows = []
    for example in batch.examples:
        (document,) = cache.documents([example.key])
        place = {int(token): row for row, token in enumerate(np.flatnonzero(document.predicted))}
        rows += [read([(document, np.array([place[int(i)]]))]) for i in np.flatnonzero(example.supervised)]
    parts = []
    for values in zip(*rows, strict=True):
        width = max(value.shape[-1] for value in values) if values[0].ndim == 2 else 0
        padded = [np.pad(v, ((0, 0), (0, width - v.shape[1]))) if width else v for v in values]
        parts.append(torch.from_numpy(np.concatenate(padded)))
    return parts


@pytest.mark.parametrize("layout", [{}, {"packing": False, "max_length": 30}], ids=str)
def test_top_k_targets_are_the_decoded_values(built, student, data, layout):
    data = data.model_copy(update=layout)
    folder = built(**TWO)
    found = opened(folder, student, data, temperature=2.0)
    batches = batches_of(data, student, seed=3)
    hand = []
    for batch, target in zip(batches, targets_of(found, batches), strict=True):
        ids, logprobs, tail = by_hand(folder, batch, lambda chosen: read_top_k(chosen, 2.0))
        assert torch.equal(target.ids, ids.long()) and torch.equal(target.logprobs, logprobs)
        assert torch.equal(target.tail, tail) and target.width == len(student.tokenizer)
        hand.append(TopKTarget(ids.long(), logprobs, tail))
    knobs = replace(KD, temperature=2.0)
    loss, gradients = step(student, batches, targets_of(found, batches), knobs)
    expected, others = step(student, batches, hand, knobs)
    assert loss == expected
    assert all(torch.equal(gradients[name], others[name]) for name in others)


def test_sampled_targets_are_the_decoded_values(built, student, data):
    folder = built(kind="sampled")
    found = opened(folder, student, data)
    for batch in batches_of(data, student):
        target = found.targets(batch, found.prepare(batch))
        ids, weights, entropy = by_hand(folder, batch, read_sampled)
        assert torch.equal(target.ids, ids.long()) and torch.equal(target.weights, weights)
        assert torch.equal(target.entropy, entropy) and target.width == len(student.tokenizer)


def test_sampled_gradients_converge_to_those_of_full_kd(teacher, student, files, tmp_path):
    """Caches that differ in their seed alone. Each gradient is an unbiased estimate, so that the mean of S of them lies, in any
    direction, within 5 standard errors (a chance of 6e-7 each); the squared distance of the mean has the expectation tr Σ / S
    and at most √2 times that as its standard deviation."""
    seeds = 30
    data = data_of(files, "pairs")
    batches = batches_of(data, student)
    live = live_of(teacher, student)
    dense = [live.targets(batch) for batch in batches]
    full_kl, gradients = step(student, batches, dense)
    names = sorted(gradients)
    full = torch.cat([gradients[name].flatten() for name in names]).double()
    tokens = sum(batch.supervised_tokens for batch in batches)
    entropy = sum(
        torch.distributions.Categorical(logits=(d.hidden @ d.head.weight.t()).double()).entropy().sum().item()
        for d in dense
    )
    losses, estimates = [], []
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        build(teacher, StoreConfig(kind="sampled", num_samples=20, seed=seed), data, folder, name="tiny")
        loss, gradients = step(student, batches, targets_of(opened(folder, student, data), batches))
        losses.append(loss)
        estimates.append(torch.cat([gradients[name].flatten() for name in names]).double())
    assert len(set(losses)) == seeds
    values = torch.tensor(losses, dtype=torch.float64)
    assert abs(values.mean().item() - (full_kl + entropy / tokens)) <= 5 * values.std().item() / math.sqrt(seeds)

    found = torch.stack(estimates)
    off = found.mean(0) - full
    expectation = found.var(0).sum().item() / seeds
    assert off.square().sum().item() <= expectation * (1 + 5 * math.sqrt(2))
    one = (found[0] - full).square().sum().item()
    assert off.square().sum().item() < one / 10  # 30 of them are nearer than one is
    directions = torch.randn(12, len(full), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for direction in [full, *directions]:
        along = found @ direction
        error = along.std().item() / math.sqrt(seeds)
        assert abs(along.mean().item() - (full @ direction).item()) <= 5 * error
        assert error < 0.2 * full.norm() * direction.norm()


# A student whose head is wider than the tokenizer


@pytest.mark.parametrize(
    ("kind", "temperature"), [("top_k", 1.0), ("top_k", 2.0), ("sampled", 1.0), ("hidden", 1.0), ("hidden", 2.0)]
)
def test_padding_ids_of_the_student_take_no_part(built, student, data, kind, temperature):
    """As a student without them, in value and gradient; theirs is exactly zero."""
    store = TWO if kind == "top_k" else {"kind": kind}
    wide = tiny(0, vocab_size=2048 + 77, tie_word_embeddings=False)
    narrow = tiny(0, tie_word_embeddings=False)
    state = wide.model.state_dict()
    with torch.no_grad():
        wide.model.lm_head.weight[2048:] += 3.0  # were they let in, they would have much of the mass
        for name, parameter in narrow.model.named_parameters():
            parameter.copy_(state[name][: parameter.shape[0]] if "lm_head" in name or "embed" in name else state[name])
    batches = batches_of(data, student)[:3]
    knobs = replace(KD, temperature=temperature)
    losses, found = [], []
    for one in (wide, narrow):
        cached = opened(built(**store), one, data, temperature=temperature)
        loss, gradients = step(one, batches, targets_of(cached, batches), knobs)
        losses.append(loss)
        found.append(gradients)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    head = found[0].pop("model.lm_head.weight")
    assert not head[2048:].any() and head[:2048].abs().max() > 0
    found[0]["model.lm_head.weight"] = head[:2048]
    embeddings = found[0]["model.model.embed_tokens.weight"]
    assert not embeddings[2048:].any()
    found[0]["model.model.embed_tokens.weight"] = embeddings[:2048]
    assert relative(*found) <= 1e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_width_in_the_fused_loss(divergence, temperature):
    """In float64, with everything else a call can have; cross-entropy stays over all ids."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    hidden, weight, bias = torch.randn(6, 5, **double), torch.randn(30, 5, **double), torch.randn(30, **double)
    labels = torch.tensor([0, 3, 21, 29, 25, 7])
    top = torch.randn(6, 22, **double).log_softmax(-1).topk(4)
    kept = TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1)), width=22)
    targets = [kept]
    if divergence == "forward_kl":
        targets.append(SampledTarget(top.indices, torch.full((6, 4), 0.25, **double), width=22))
    for target in targets:
        options = {"divergence": divergence, "temperature": temperature, "kd_weight": 0.7, "softcap": 4.0}
        inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        out = fused_linear_kd(
            inputs[0], inputs[1], target, labels=labels, ce_weight=0.3, bias=inputs[2], chunk_rows=4, **options
        )
        out.loss.backward()
        alone = [x.clone().requires_grad_() for x in (hidden, weight[:22], bias[:22])]
        kd = fused_linear_kd(alone[0], alone[1], replace(target, width=None), bias=alone[2], **options)
        kd.loss.backward()
        whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        ce = fused_linear_kd(
            whole[0], whole[1], None, labels=labels, ce_weight=0.3, bias=whole[2], softcap=options["softcap"]
        )
        ce.loss.backward()
        torch.testing.assert_close(out.loss, kd.loss + ce.loss)
        torch.testing.assert_close(out.kd, kd.kd)
        for mine, of_kd, of_ce in zip(inputs, alone, whole, strict=True):
            padded = torch.zeros_like(mine)
            padded[: of_kd.shape[0]] = of_kd.grad
            torch.testing.assert_close(mine.grad, padded + of_ce.grad)


# What stands beside the shards


def hit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("remove", [False, True], ids=["a flipped byte", "missing"])
@pytest.mark.parametrize("name", ["head.safetensors", "tokenizer/tokenizer_config.json"])
def test_a_damaged_file_beside_the_shards_is_told_and_a_build_writes_it_anew(
    teacher, student, files, tmp_path, name, remove
):
    """As verify and the message say."""
    data, folder, store = data_of(files, "text"), tmp_path / "cache", StoreConfig(kind="hidden")
    build(teacher, store, data, folder, name="tiny")
    batches = batches_of(data, student)
    expected, _ = step(student, batches, targets_of(opened(folder, student, data), batches))
    path = folder / name
    path.unlink() if remove else hit(path)
    with pytest.raises(PotstillError) as caught:
        CacheReader(Cache(folder))
    state = "missing" if remove else "not what was written"
    assert f"the cache {folder} is damaged: {name} is {state}. Run the command that made it" in str(caught.value)
    assert verify(folder).damage == [f"{name} is {state}"]
    assert build(teacher, store, data, folder, name="tiny").documents == 0
    loss, _ = step(student, batches, targets_of(opened(folder, student, data), batches))
    assert loss == expected and verify(folder).damage == []
    assert not list(folder.glob(".unfinished*"))


def test_training_does_not_begin_with_a_damaged_head(teacher, student, files, tmp_path):
    data = data_of(files, "text")
    build(teacher, StoreConfig(kind="hidden"), data, tmp_path / "cache", name="tiny")
    hit(tmp_path / "cache" / "head.safetensors")
    with pytest.raises(PotstillError, match=r"head\.safetensors is not what was written"):
        opened(tmp_path / "cache", student, data)
    (tmp_path / "cache" / "head.safetensors").unlink()
    with pytest.raises(PotstillError, match=r"cannot read .*head\.safetensors .*potstill cache build"):
        load_head(tmp_path / "cache")


def test_a_tokenizer_that_changed_is_told_before_it_is_read(student, teacher, files, tmp_path):
    data = data_of(files, "text")
    build(teacher, StoreConfig(kind="token_logprobs"), data, tmp_path / "cache", name="tiny")
    path = tmp_path / "cache" / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    with pytest.raises(PotstillError, match=r"is damaged: tokenizer/tokenizer\.json is not what was written"):
        opened(tmp_path / "cache", student, data)
    build(teacher, StoreConfig(kind="token_logprobs"), data, tmp_path / "cache", name="tiny")
    opened(tmp_path / "cache", student, data, divergence="policy_gradient_kl")


# What is missing


@pytest.fixture(scope="module")
def partial(teacher, files, tmp_path_factory) -> Path:
    """A cache of the texts alone."""
    folder = tmp_path_factory.mktemp("caches") / "texts"
    build(teacher, StoreConfig(kind="top_k", k=16), data_of(files, "text"), folder, name="tiny")
    return folder


def test_a_missing_document_is_named_and_all_are_counted(partial, student, data):
    found = opened(partial, student, data)
    batches = batches_of(data, student)
    expected = coverage(found.source.reader.cache, data, student.tokenizer)
    assert expected.missing == 10
    with pytest.raises(PotstillError) as caught:
        for batch in batches:
            found.prepare(batch)
    message = str(caught.value)
    missing = next(e for batch in batches for e in batch.examples if found.source.reader.cache.find([e.key])[0] < 0)
    assert f"the cache {partial} has no document {missing.source} ({missing.key})" in message
    assert missing.source.split(" ")[0] in message and ".jsonl" in missing.source
    assert f"10 of the {expected.documents} documents of data are not in it" in message
    assert f"`potstill cache build RECIPE --out {partial}`" in message and "on_missing: skip" in message


@pytest.mark.parametrize("length", [{"epochs": 1}, {"steps": 40}], ids=str)
def test_what_is_missing_is_told_before_the_first_step(partial, files, tmp_path, length):
    """The texts come first, and are there: without the look at the start the run would get as far as the chats."""
    recipe = recipe_of(tmp_path / "run", files, {"cache": str(partial)}, batch_size=1, micro_batch_size=None)
    recipe["train"] = {**{k: v for k, v in recipe["train"].items() if k not in ("epochs", "steps")}, **length}
    recipe["data"] |= {"shuffle": False, "packing": False}
    with pytest.raises(PotstillError, match=r"10 of the \d+ documents of data are not in it: add what is missing"):
        potstill.train(recipe)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()
    recipe["train"] = {**recipe["train"], "steps": 3}
    recipe["train"].pop("epochs", None)
    assert potstill.train(recipe).step == 3, "what the run does not come to is not asked for"


def test_only_what_a_teacher_is_asked_about_must_be_there(partial, files, tmp_path):
    recipe = recipe_of(tmp_path / "run", files, {"cache": str(partial), "filter": {"kind": "text"}}, batch_size=4)
    sources = recipe["data"]["sources"]
    for source, kind in zip(sources, ("text", "other", "other"), strict=True):
        lines = [json.loads(line) for line in Path(source["files"]).read_text(encoding="utf-8").splitlines()]
        path = tmp_path / Path(source["files"]).name
        path.write_text("".join(json.dumps({**line, "kind": kind}) + "\n" for line in lines), encoding="utf-8")
        source["files"] = str(path)
    recipe["teachers"].append({"cache": str(partial), "filter": {"kind": "text"}})
    recipe["train"] = {**recipe["train"], "steps": 2}
    recipe["train"].pop("epochs", None)
    assert potstill.train(recipe).step == 2


def test_what_the_message_says_to_run_works_for_a_shorter_max_length_too(partial, teacher, student, files, tmp_path):
    """Pieces are cut as the cache's were, though 4 × max_length is another number; texts join a cache of chats."""
    folder = tmp_path / "cache"
    build(teacher, StoreConfig(kind="token_logprobs"), data_of(files, "chats"), folder, name="tiny")
    more = data_of(files, "text", "pairs", max_length=32, piece_bytes=None)
    added = build(teacher, StoreConfig(kind="token_logprobs"), more, folder, name="tiny")
    assert added.there == 0 and coverage(Cache(folder), more, student.tokenizer).missing == 0
    again = build(teacher, StoreConfig(kind="token_logprobs"), more, folder, name="tiny")
    assert (again.documents, again.there) == (0, added.documents)


def test_missing_documents_that_are_skipped_are_as_if_they_were_not_there(partial, student, data, files):
    """Counted; and the step's loss and gradient are those of the texts alone, divided by their tokens."""
    found = opened(partial, student, data, "skip")
    steps = StepBatches(data, student.tokenizer, batch_size=30, micro_batch_size=3, seed=0, epochs=1)
    with Feed(steps, [found]) as feed:
        ready = next(feed)
        made_ready = list(ready.ready)
    kept = ready.step.batches
    assert ready.step.counts["skipped_examples"] == ready.step.state["counts"]["skipped_examples"] == 10
    assert ready.step.counts["supervised_tokens"] == sum(batch.supervised_tokens for batch in kept)
    targets = [found.targets(batch, made) for batch, (made,) in zip(kept, made_ready, strict=True)]
    loss, gradients = step(student, kept, targets)

    texts = batches_of(data_of(files, "text"), student)
    alone = opened(partial, student, data)
    expected, others = step(student, texts, targets_of(alone, texts))
    assert sum(b.supervised_tokens for b in kept) == sum(b.supervised_tokens for b in texts)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradients, others) <= 1e-4


def test_windows_of_which_nothing_is_left_are_passed_over_and_not_for_ever(partial, student, files):
    found = opened(partial, student, data_of(files, "pairs"), "skip")
    pairs = StepBatches(
        data_of(files, "pairs"), student.tokenizer, batch_size=2, micro_batch_size=2, seed=0, epochs=None
    )  # without end
    with pytest.raises(PotstillError, match="on_missing is skip, and the cache has none of the documents"):
        list(without_missing(pairs, [found], {}))
    mixed = StepBatches(
        data_of(files, "text", "pairs", packing=False),
        student.tokenizer,
        batch_size=1,
        micro_batch_size=1,
        seed=0,
        epochs=1,
    )
    left = list(without_missing(mixed, [opened(partial, student, data_of(files), "skip")], {}))
    assert 0 < len(left) == coverage(Cache(partial), data_of(files, "text"), student.tokenizer).documents


def test_a_run_over_epochs_ends_where_what_is_left_ends(partial, files, tmp_path, capsys):
    """Its steps are those that have something left; what was skipped is counted over a resume, and said at the end."""
    recipe = recipe_of(tmp_path / "run", files, {"cache": str(partial), "on_missing": "skip"}, batch_size=1)
    recipe["train"] |= {"micro_batch_size": None}
    recipe["data"] |= {"packing": False}
    texts = len(Cache(partial))
    run = potstill.train(recipe, [StopAt(texts + 3)])
    first = run.counts["skipped_examples"]
    assert run.stopped_by == "enough" and 10 <= first <= 20
    run = potstill.train(recipe)
    assert run.step == run.total_steps == 2 * texts
    skipped = run.counts["skipped_examples"]  # those after the last step were not looked at
    assert first < skipped <= 20 and run.counts["examples"] == 2 * texts + skipped
    assert f"{skipped} skipped examples" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens"] == run.counts["supervised_tokens"]
    nothing = recipe_of(tmp_path / "none", files, {"cache": str(partial), "on_missing": "skip"})
    nothing["data"]["sources"] = nothing["data"]["sources"][1:]
    with pytest.raises(PotstillError, match="on_missing is skip, and the cache has none of the documents"):
        potstill.train(nothing)


class StopAt(potstill.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, run, metrics) -> None:
        if run.step == self.step:
            run.stop("enough")


def test_a_document_longer_than_the_cache_s_teacher_could_read(teacher, student, files, tmp_path):
    """The teacher saw 20 tokens of each: students of 20 tokens can learn from it, others are told."""
    short = copy.copy(teacher)
    short.model = copy.copy(teacher.model)
    short.model.config = copy.deepcopy(teacher.model.config)
    short.model.config.max_position_embeddings = 20
    build(short, StoreConfig(kind="token_logprobs"), data_of(files, "text"), tmp_path / "cache", name="tiny")
    cache = Cache(tmp_path / "cache")
    form = cache.form
    assert form.kind == "token_logprobs"
    assert max(len(cache.document(at).tokens) for at in range(len(cache))) == 20
    build(short, StoreConfig(kind="top_k", k=4), data_of(files, "text"), tmp_path / "top", name="tiny")
    whole = batches_of(data_of(files, "text"), student)
    with pytest.raises(PotstillError, match=r"has the first 20 tokens .* set data.max_length to at most that"):
        targets_of(opened(tmp_path / "top", student, data_of(files, "text")), whole)
    cut = data_of(files, "text", max_length=20)
    targets_of(opened(tmp_path / "top", student, cut), batches_of(cut, student))


def long_prompts(tmp_path: Path) -> DataConfig:
    records = [{"q": sentence(1, 40), "a": " peace."}, {"q": "x", "a": " law."}]
    write_jsonl(tmp_path / "long.jsonl", records)
    source = {"files": str(tmp_path / "long.jsonl"), "prompt": "q", "completion": "a"}
    return DataConfig.model_validate({"sources": [source], "max_length": 96})


@pytest.mark.parametrize("kind", ["top_k", "sampled", "hidden"])
def test_a_prompt_longer_than_the_teacher_can_read(student, tmp_path, kind):
    """There is nothing in the document to predict: it is stored as that, not missing for ever, and named where it is needed;
    with a model beside the cache just so."""
    data, store = long_prompts(tmp_path), StoreConfig(kind=kind, k=8)
    short = make_model(tmp_path / "short", max_position_embeddings=20)
    model = load_teacher(TeacherConfig(model=str(short)), CPU, "teachers[0]")
    first, again = (build(model, store, data, tmp_path / "cache", name="short") for _ in range(2))
    assert (first.unpredictable, again.unpredictable, again.there) == (1, 0, 2)
    assert coverage(Cache(tmp_path / "cache"), data, student.tokenizer).missing == 0
    assert verify(tmp_path / "cache", model).damage == []
    batches = batches_of(data, student)
    beside = TeacherConfig(model=str(short), cache=str(tmp_path / "beside"), store=store)
    (found,) = open_teachers([beside], student, data, LossConfig(), CPU).teachers
    for teacher in (opened(tmp_path / "cache", student, data), found):
        with pytest.raises(
            PotstillError, match=r"long\.jsonl.*\([0-9a-f]{32}\): the cache's teacher had nothing to predict"
        ):
            for batch in batches:
                teacher.targets(batch, teacher.prepare(batch))
    found.close()


def test_a_document_with_other_tokens_is_refused(partial, student, files):
    found = opened(partial, student, data_of(files, "text"))
    batch = batches_of(data_of(files, "text", packing=False), student)[0]
    example = batch.examples[0]
    ids = example.ids.copy()
    ids[3] += 1
    with pytest.raises(PotstillError, match=rf"{example.key}.*token 3 is {ids[3] - 1} there and {ids[3]} here"):
        found.prepare(collate([[replace(example, ids=ids)]], 0))


# Refused before the run


def with_tokenizer(student: LanguageModel, change) -> LanguageModel:
    changed = copy.copy(student)
    changed.tokenizer = copy.deepcopy(student.tokenizer)
    change(changed.tokenizer)
    return changed


def test_another_end_of_documents_is_refused(built, student, data, files):
    changed = with_tokenizer(student, lambda t: setattr(t, "eos_token", "<|im_end|>"))
    with pytest.raises(
        PotstillError, match=r"the cache's documents end with '.*' and the student's with '<\|im_end\|>'"
    ):
        opened(built(kind="hidden"), changed, data)
    for fine in (data.model_copy(update={"append_eos": False}), data_of(files, "chats")):
        found = opened(built(kind="hidden"), changed, fine)
        targets_of(found, batches_of(fine, changed))


def test_another_chat_template_is_refused_where_there_are_chats(built, student, data, files):
    changed = with_tokenizer(student, lambda t: setattr(t, "chat_template", t.chat_template + " "))
    with pytest.raises(PotstillError, match=r"rendered with another chat template than the student's"):
        opened(built(kind="hidden"), changed, data)
    opened(built(kind="hidden"), changed, data_of(files, "text", "pairs"))


def test_other_arguments_of_the_chat_template_are_refused(built, student, files):
    data = data_of(files, "text", "chats")
    chats = data.sources[1].model_copy(update={"chat_template_kwargs": {"thinking": True}})
    thinking = data.model_copy(update={"sources": [data.sources[0], chats]})
    with pytest.raises(PotstillError, match=r"rendered with chat_template_kwargs \{\}, .* are \{'thinking': True\}"):
        opened(built(kind="hidden"), student, thinking)
    both = data.model_copy(update={"sources": [data.sources[1], chats]})
    with pytest.raises(PotstillError, match=r"chat_template_kwargs differ between the sources"):
        opened(built(kind="hidden"), student, both)


def test_other_pieces_are_refused_where_there_are_texts(built, student, files):
    other = data_of(files, "text", "pairs", piece_bytes=200)
    with pytest.raises(PotstillError, match=r"pieces of 300 bytes, and data.piece_bytes is 200: leave it out"):
        opened(built(kind="hidden"), student, other)
    opened(built(kind="hidden"), student, data_of(files, "pairs", piece_bytes=200))
    left_out = data_of(files, piece_bytes=None)
    assert as_teachers_need(left_out, [TeacherConfig(cache=str(built(kind="hidden")))]).piece_bytes == 300


def test_two_caches_with_other_pieces_are_told_apart(built, teacher, student, files, tmp_path):
    """The recipe says nothing of pieces: it is the other cache that does."""
    build(teacher, StoreConfig(k=8), data_of(files, "text", piece_bytes=200), tmp_path / "other", name="tiny")
    configs = [TeacherConfig(cache=str(folder)) for folder in (built(kind="hidden"), tmp_path / "other")]
    data = as_teachers_need(data_of(files, "text", piece_bytes=None), configs)
    with pytest.raises(
        PotstillError, match=r"pieces of 200 bytes, .* is 300: .* another teacher's cache has pieces of that"
    ):
        open_teachers(configs, student, data, LossConfig(), CPU)


@pytest.mark.parametrize(
    ("store", "loss", "says"),
    [
        (TWO, {"temperature": 3.0}, r"loss.temperature is 3, .* at 1, 2 only: .* --temperature 3"),
        (TWO, {"temperature": {"start": 2.0, "end": 1.0}}, r"loss.temperature moves over the run, and the cache knows"),
        ({"kind": "sampled"}, {"temperature": 2.0}, r"loss.temperature is 2, .* draws are at temperature 1 only"),
        (
            {"kind": "sampled"},
            {"divergence": "reverse_kl"},
            r"unbiased for forward_kl only, and loss.divergence is reverse_kl",
        ),
        ({"kind": "sampled"}, {"entropy_gate": 1.0}, r"unbiased for forward_kl only, and loss.entropy_gate is set"),
        (
            {"kind": "token_logprobs"},
            {},
            r"only how likely the text's own tokens were, and the loss needs a distribution",
        ),
    ],
)
def test_a_loss_that_the_cache_cannot_serve_is_refused(built, teacher, student, data, tmp_path, store, loss, says):
    with pytest.raises(PotstillError, match=says) as caught:
        opened(built(**store), student, data, **loss)
    assert str(caught.value).startswith("teachers[0].cache: ")
    # Beside a model as well, and before there is a folder that only fits what was refused.
    beside = TeacherConfig(model=teacher.model.name_or_path, cache=str(tmp_path / "new"), store=StoreConfig(**store))
    with pytest.raises(PotstillError, match=says):
        open_teachers([beside], student, data, LossConfig(**loss), CPU)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("store", "loss"),
    [
        (TWO, {"temperature": {"start": 2.0, "end": 2.0}}),
        (TWO, {"temperature": {"start": 2.0, "end": 9.0, "shape": "constant"}}),
        (TWO, {"divergence": "jsd", "entropy_gate": 2.0}),
        ({"kind": "hidden"}, {"temperature": {"start": 4.0, "end": 1.0}, "divergence": "tvd"}),
        ({"kind": "sampled"}, {"kd_weight": {"start": 1.0, "end": 0.1}}),
    ],
)
def test_a_loss_that_the_cache_can_serve_is_not(built, student, data, store, loss):
    found = opened(built(**store), student, data, **loss)
    targets_of(found, batches_of(data, student)[:1])


def test_a_refusal_comes_before_the_run(built, files, tmp_path):
    with pytest.raises(PotstillError, match="how likely the text's own tokens were"):
        potstill.train(recipe_of(tmp_path / "run", files, {"cache": str(built(kind="token_logprobs"))}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# A model beside the cache


def recipe_of(run: Path, files: Path, teacher: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "run": str(run),
        "student": {
            "tokenizer": TOKENIZER,
            "config": {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 128,
            },
        },
        "teachers": [teacher],
        "data": data_of(files).model_dump(exclude_none=True),
        "train": {"epochs": 2, "batch_size": 4, "micro_batch_size": 2, "optimizer": {"lr": 1e-2}, **train},
        "log": {"tensorboard": False},
    }


def losses(run: Path) -> list[tuple[float, float, int]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"], line["epoch"]) for line in lines]


@pytest.mark.parametrize("kind", ["top_k", "hidden"])
def test_the_first_epoch_fills_the_cache_and_the_second_needs_no_teacher(
    teacher, tiny_teacher, files, tmp_path, monkeypatch, kind
):
    computed: list[str] = []
    write = CacheWriter.write

    def counting(self, examples):
        computed.extend(example.key for example in examples)
        return write(self, examples)

    monkeypatch.setattr(CacheWriter, "write", counting)
    cache = tmp_path / "cache"
    both = {"model": str(tiny_teacher), "cache": str(cache), "store": {"kind": kind, "k": 16}}
    potstill.train(recipe_of(tmp_path / "first", files, both))
    documents = len(Cache(cache))
    assert len(computed) == len(set(computed)) == documents > 20
    assert {epoch for _, _, epoch in losses(tmp_path / "first")} == {0, 1}
    assert verify(cache, teacher).damage == [] and verify(cache).numbers["written_twice"] == 0

    def never(*_, **__):
        raise AssertionError("the teacher was asked")

    monkeypatch.setattr(CacheWriter, "write", never)
    potstill.train(recipe_of(tmp_path / "second", files, both))
    monkeypatch.setattr("potstill.teachers.placed.load_teacher", never)
    potstill.train(recipe_of(tmp_path / "alone", files, {"cache": str(cache)}))
    assert losses(tmp_path / "alone") == losses(tmp_path / "first") == losses(tmp_path / "second")
    metrics = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert sum(m["seconds_teacher"] for m in metrics) < 0.5 * sum(m["seconds_student"] for m in metrics)


def test_a_loss_from_the_filled_cache_is_that_of_a_built_one(built, teacher, tiny_teacher, student, data, tmp_path):
    """Computed for one micro-batch at a time or by the builder's batches: the same up to rounding."""
    config = TeacherConfig(
        model=str(tiny_teacher), cache=str(tmp_path / "filled"), store=StoreConfig(kind="hidden"), weight=2.0
    )
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batches = batches_of(data, student)
    loss, gradients = step(student, batches, targets_of(found, batches))
    found.close()
    from_build = opened(built(kind="hidden"), student, data)
    expected, others = step(student, batches, targets_of(from_build, batches))
    assert loss == pytest.approx(expected, rel=1e-5) and relative(gradients, others) <= 1e-5
    assert coverage(Cache(tmp_path / "filled"), data, student.tokenizer).missing == 0


def test_a_document_prepared_twice_before_it_is_computed_once(teacher, tiny_teacher, student, data, tmp_path):
    """The next micro-batch is prepared while this one is computed; when its turn comes, nothing is missing any more."""
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batch = batches_of(data, student)[0]
    again = collate([[example] for example in (*batch.examples, batch.examples[0])], 0)
    assert found.prepare(batch).plan is None and found.prepare(again).plan is None
    first = found.targets(batch, None)
    second = found.targets(again, None)
    assert len(second.ids) == len(first.ids) + batch.examples[0].supervised_tokens
    assert found.prepare(batch).plan is not None  # waits to be written, and is read from there
    found.close()
    assert len(Cache(tmp_path / "cache")) == len(set(e.key for e in batch.examples))


def test_documents_move_from_memory_to_the_disk_while_they_are_read(
    teacher, tiny_teacher, student, data, tmp_path, monkeypatch
):
    """A flush between looking at the disk and looking at what waits: the document is found all the same."""
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batch = batches_of(data, student)[0]
    before = found.targets(batch, None)
    looking = Cache.documents
    writer: Writer = found.source.reader._writer.writer

    def flushed_after(self, keys):
        result = looking(self, keys)
        writer.flush()
        return result

    monkeypatch.setattr(Cache, "documents", flushed_after)
    (signal,) = found.prepare(batch).signals
    after = signal.target
    assert not writer.waiting
    assert torch.equal(after.ids, before.ids) and torch.equal(after.logprobs, before.logprobs)
    found.close()


def test_what_waits_is_written_in_time_though_nothing_is_added(teacher, tiny_teacher, student, data, tmp_path):
    """The last documents of an epoch: from then on the cache is only read."""
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batch = batches_of(data, student)[0]
    found.targets(batch, None)
    writer = found.source.reader._writer
    found.prepare(batch)
    assert writer.writer.waiting and len(Cache(tmp_path / "cache")) == 0
    writer.writer.shard_seconds = 0.0
    assert found.prepare(batch).plan is not None
    writer._flushing.result()
    assert not writer.writer.waiting and len(Cache(tmp_path / "cache")) == len({e.key for e in batch.examples})
    found.close()


def test_a_disk_that_fills_while_the_cache_is_only_read_is_told(tiny_teacher, student, data, tmp_path, monkeypatch):
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batch = batches_of(data, student)[0]
    found.targets(batch, None)
    writer = found.source.reader._writer
    writer.writer.shard_seconds = 0.0

    def full(_):
        raise PotstillError("could not write")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "flush", full)
        found.prepare(batch)
        with suppress(PotstillError):
            writer._flushing.result()
        with pytest.raises(PotstillError, match="could not write"):
            found.prepare(batch)
    found.close()


def test_one_long_document_does_not_pad_many_short_ones(tiny_teacher, student, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "mix.jsonl", [{"text": f"law {i}"} for i in range(40)] + [{"text": sentence(2, 60)}])
    data = DataConfig.model_validate({"sources": [{"files": str(tmp_path / "mix.jsonl")}], "max_length": 120})
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    (batch,) = batches_of(data, student, rows=8)
    sizes = []
    hidden = LanguageModel.hidden

    def counting(self, some, positions):
        sizes.append(some.input_ids.numel())
        return hidden(self, some, positions)

    monkeypatch.setattr(LanguageModel, "hidden", counting)
    found.targets(batch, None)
    found.close()
    tokens = sum(len(example.ids) for example in batch.examples)
    assert len(batch.examples) == 41 and len(sizes) > 1 and sum(sizes) < 2 * tokens


def test_what_another_process_added_is_used(teacher, tiny_teacher, student, data, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    config = TeacherConfig(model=str(tiny_teacher), cache=str(folder), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batches = batches_of(data, student)
    assert found.prepare(batches[0]).plan is None
    build(teacher, StoreConfig(k=8), data, folder, name="tiny")

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(CacheWriter, "write", never)
    targets_of(found, batches)
    found.targets(batches[0], None)
    found.close()


def test_what_killed_writers_left_is_removed(teacher, data, tmp_path):
    """And nothing while another process writes: what is unfinished may be its own."""
    cache = tmp_path / "cache"
    build(teacher, StoreConfig(k=8), data, cache, name="tiny")
    left, folder = (cache / f".unfinished-{name}" for name in ("1-shard", "files"))
    folder.mkdir()
    for path in (left, folder / "head.safetensors"):
        path.write_bytes(b"half")
    other = Writer(cache)
    build(teacher, StoreConfig(k=8), data, cache, name="tiny")
    assert left.exists() and folder.exists()
    other.close()
    build(teacher, StoreConfig(k=8), data, cache, name="tiny")
    assert not left.exists() and not folder.exists()


def test_threads_that_read_while_the_cache_grows(teacher, tiny_teacher, student, data, tmp_path):
    """The prefetch thread prepares, the loop's thread computes and flushes: every document is always itself."""
    config = TeacherConfig(model=str(tiny_teacher), cache=str(tmp_path / "cache"), store=StoreConfig(k=8))
    (found,) = open_teachers([config], student, data, LossConfig(), CPU).teachers
    batches = batches_of(data.model_copy(update={"packing": False}), student, rows=2)
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for batch in batches:
                    found.prepare(batch)  # raises where a document's tokens are not the example's
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for batch in batches:
            found.targets(batch, None)
            found.source.reader._writer._worker.submit(found.source.reader._writer.writer.flush).result()
    finally:
        done.set()
        thread.join()
    assert not errors
    assert all(found.prepare(batch).plan is not None for batch in batches)
    found.close()


def test_a_teacher_that_is_not_finite_is_not_cached(tmp_path, files):
    broken = make_model(tmp_path / "broken", num_hidden_layers=1)
    model = load_teacher(TeacherConfig(model=str(broken)), CPU, "teachers[0]")
    with torch.no_grad():
        model.model.model.embed_tokens.weight[model.tokenizer(" peace", add_special_tokens=False).input_ids[0]] = (
            math.nan
        )
    with pytest.raises(PotstillError, match=r"hidden states are not finite in .*text\.jsonl.* \([0-9a-f]{32}\)"):
        build(model, StoreConfig(k=4), data_of(files, "text"), tmp_path / "cache", name="broken", batch_tokens=32)
    assert verify(tmp_path / "cache").damage == []  # what was sound before it


@pytest.mark.parametrize("kind", ["top_k", "sampled", "token_logprobs", "hidden"])
def test_a_head_that_is_not_finite_is_not_cached(teacher, files, tmp_path, kind):
    broken = copy.copy(teacher)
    broken.model = copy.deepcopy(teacher.model)
    with torch.no_grad():
        broken.model.lm_head.weight = torch.nn.Parameter(broken.model.lm_head.weight.detach().clone())
        broken.model.lm_head.weight[1500] = math.nan
    says = (
        r"head has numbers" if kind == "hidden" else r"probabilities are not finite in .*text\.jsonl.* \([0-9a-f]{32}\)"
    )
    with pytest.raises(PotstillError, match=says):
        build(broken, StoreConfig(kind=kind, k=4), data_of(files, "text"), tmp_path / "cache", name="broken")
    if kind != "hidden":
        assert len(Cache(tmp_path / "cache")) == 0


@pytest.mark.parametrize("kind", ["top_k", "sampled", "token_logprobs", "hidden"])
def test_verify_finds_documents_that_are_not_what_the_teacher_says(teacher, files, tmp_path, monkeypatch, kind):
    """One of them, with every checksum right: as a teacher that was changed while it was run would write it."""
    data, store = data_of(files, "text"), StoreConfig(kind=kind, k=16)
    folder = tmp_path / "cache"
    known = next(examples_of(data, teacher.tokenizer)).key
    add = CacheWriter._add

    def other(self, examples, signal_rows):
        if any(example.key == known for example in examples):
            signal_rows = {name: values[::-1].copy() for name, values in signal_rows.items()}
        add(self, examples, signal_rows)

    monkeypatch.setattr(CacheWriter, "_add", other)
    build(teacher, store, data, folder, name="tiny", batch_tokens=1)
    assert verify(folder).damage == []
    report = verify(folder, teacher, sample=99)
    (what,) = report.damage
    assert f"1 of {len(Cache(folder))} documents are not what the teacher says now" in what and known in what
    monkeypatch.undo()
    build(teacher, store, data, tmp_path / "right", name="tiny")
    assert verify(tmp_path / "right", teacher, sample=99).damage == []


def test_the_same_weights_with_another_configuration_are_another_teacher(teacher, files, tmp_path):
    """It decides what is computed with them; where a model is and what it is called does not."""
    (data, store, folder), same = (data_of(files, "text"), StoreConfig(k=8), tmp_path / "cache"), tmp_path / "same"
    build(teacher, store, data, folder, name="tiny")
    shutil.copytree(teacher.model.name_or_path, same)
    moved = load_teacher(TeacherConfig(model=str(same)), CPU, "teachers[0]")
    assert weights_fingerprint(moved) == weights_fingerprint(teacher)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    other = load_teacher(TeacherConfig(model=str(same)), CPU, "teachers[0]")
    assert weights_fingerprint(other) != weights_fingerprint(teacher)
    with pytest.raises(PotstillError, match="is a cache with another teacher"):
        build(other, store, data, folder, name="tiny")


def test_temperatures_that_a_cache_has_no_use_for(teacher):
    assert format_of(StoreConfig(k=8, temperatures=[2.0, 1.0, 1.0]), teacher).temperatures == (1.0, 2.0)
    with pytest.raises(PotstillError, match=r"draws from the rest are at temperature 1, .* add 1 to temperatures"):
        format_of(StoreConfig(k=8, temperatures=[2.0], tail_samples=4), teacher)
    for kind in ("sampled", "token_logprobs"):
        with pytest.raises(PotstillError, match=rf"what kind {kind} keeps is at temperature 1: leave them out"):
            format_of(StoreConfig(kind=kind, temperatures=[2.0]), teacher)
    assert format_of(StoreConfig(kind="hidden", temperatures=[2.0]), teacher).kind == "hidden"


def test_a_vocabulary_smaller_than_k_and_a_head_smaller_than_the_tokenizer(teacher, files, tmp_path):
    with pytest.raises(PotstillError, match="k is 3000 and the teacher has 2048 ids"):
        build(teacher, StoreConfig(k=3000), data_of(files, "text"), tmp_path / "a", name="tiny")
    small = make_model(tmp_path / "small", vocab_size=2000)
    with pytest.raises(PotstillError, match=r"the teacher .* has 2000 embeddings and its tokenizer 2048 ids"):
        load_teacher(TeacherConfig(model=str(small)), CPU, "teachers[0]")
    assert not (tmp_path / "a").exists()
