"""`potstill cache build | verify | info`, as a person types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_content import content
from tiny_models import make_model, write_jsonl
from tiny_runs import TinyRuns, metrics

import potstill
from potstill.teachers.build import Scribe
from potstill.teachers.store import Cache, read_manifest, shard_names

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(command: Command, cache: Path, teacher: Path, text: Path, *options: object) -> str:
    said = command("cache", "build", teacher, "--data", text, "--out", cache, "--k", 8, *options)
    assert said.code == 0 and not said.err, said
    return said.out


def test_build_from_a_model_and_again(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path) -> None:
    first = build(command, cache, tiny_teacher, tiny_text)
    tokens = Cache(cache).tokens
    assert re.fullmatch(
        rf"60 documents added \({tokens:,} tokens, [\d,]+ a second\); 0 were there\n"
        r"beyond the top 8 lies \d+\.\d% of the mass; with --rest 32 forward KL learns what is in it \(docs/cache.md\)\n"
        rf"cache: {re.escape(str(cache))}, 60 documents, {tokens:,} tokens, [\d.]+ MB \(\d+\.\d bytes a token\)\n",
        first,
    )
    before = {path.name: path.read_bytes() for path in cache.iterdir() if path.is_file()}
    assert "0 documents added (0 tokens, 0 a second); 60 were there" in build(command, cache, tiny_teacher, tiny_text)
    assert {path.name: path.read_bytes() for path in cache.iterdir() if path.is_file()} == before


def test_build_from_a_recipe_and_train_from_it(
    command: Command, runs: TinyRuns, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own model, store and data; the folder from the recipe, or from --out over it."""
    teachers = [{"model": str(runs.teacher), "cache": str(cache), "store": {"kind": "hidden"}}]
    recipe = runs.file("built", teachers=teachers)
    assert "60 documents added" in command("cache", "build", recipe).out
    assert read_manifest(cache)["kind"] == "hidden" and read_manifest(cache)["piece_bytes"] == 4 * 64
    other = runs.folder / "other"
    assert command("cache", "build", recipe, "--out", other, "--kind", "sampled", "--draws", 9, "--seed", 4).code == 0
    assert (Cache(other).form.kind, Cache(other).form.draws, Cache(other).form.seed) == ("sampled", 9, 4)
    said = command("cache", "build", recipe, "--out", runs.folder / "cut", "data.max_length=32", "--kind", "chosen")
    assert said.code == 0 and read_manifest(runs.folder / "cut")["piece_bytes"] == 4 * 32

    live = potstill.train(runs.recipe("live")).folder
    monkeypatch.setattr("potstill.teachers.several.load_teacher", lambda *_: pytest.fail("the teacher was loaded"))
    cached = potstill.train(runs.recipe("cached", teachers=[{"cache": str(cache)}])).folder
    for ours, theirs in zip(metrics(cached), metrics(live), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-3)


def test_documents_are_added_to_a_finished_cache(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    build(command, cache, tiny_teacher, tiny_text)
    before, shards = content(cache), shard_names(cache)
    lines = tiny_text.read_text().splitlines()
    new = [{"text": f"The {n} states adjourned."} for n in range(7)]
    more = write_jsonl(tmp_path / "more.jsonl", [*map(json.loads, lines[:5]), *new, *map(json.loads, lines[50:])])
    assert "7 documents added" in build(command, cache, tiny_teacher, more)
    after = content(cache)
    assert len(after) == 67 and all(after[key] == value for key, value in before.items())
    assert set(shards) < set(shard_names(cache))


def test_verify(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--temperature", 1, "--temperature", 2)
    well = command("cache", "verify", cache)
    assert well.code == 0 and well.out.endswith("all is well\n") and not well.err
    assert re.search(r"^documents +60$", well.out, re.MULTILINE)

    numbers = command("cache", "verify", cache, "--teacher", tiny_teacher, "--sample", 9, "--json")
    found = json.loads(numbers.out)
    assert numbers.code == 0 and found["damage"] == [] and found["documents"] == 60 and found["compared"] == 9
    assert found["largest_error_of_mass"] <= 1e-6 and found["written_twice"] == 0
    assert 0 < found["mean_difference_of_log_probabilities"] <= found["largest_difference_of_log_probabilities"] < 0.01

    other = make_model(tmp_path / "other", seed=5)
    wrong = command("cache", "verify", cache, "--teacher", other)
    assert wrong.code == 1
    assert f"damaged: the teacher is not the one of the cache ({tiny_teacher})" in wrong.out
    off = json.loads(command("cache", "verify", cache, "--teacher", other, "--json").out)
    assert off["mean_difference_of_log_probabilities"] > 100 * found["mean_difference_of_log_probabilities"]


@pytest.mark.parametrize("kind", ["hidden", "sampled", "chosen"])
def test_verify_recomputes_every_kind(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, kind: str
) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--kind", kind)
    found = json.loads(command("cache", "verify", cache, "--teacher", tiny_teacher, "--json").out)
    name = {"hidden": "difference_of_hidden_states", "sampled": "share_of_draws_that_differ"}
    most = {"hidden": 1e-4, "sampled": 0.05, "chosen": 0.6 / 1024}[kind]
    assert found["compared"] == 32 and found["damage"] == []
    assert found[f"largest_{name.get(kind, 'difference_of_log_probabilities')}"] <= most


def test_damage_is_found_and_mended(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path) -> None:
    """Exit code 1 and a sentence for each kind; what the sentence says to do brings back what was there, and no more than
    what was lost is computed again."""
    build(command, cache, tiny_teacher, tiny_text, "--shard-seconds", 0, "--batch-tokens", 96)
    whole, shards = content(cache), shard_names(cache)
    assert len(shards) > 5

    flipped = bytearray((cache / shards[1]).read_bytes())
    flipped[-3] ^= 1
    (cache / shards[1]).write_bytes(flipped)
    said = command("cache", "verify", cache)
    assert said.code == 1 and f"damaged: {shards[1]}: its checksum is not the one in its name" in said.out
    assert said.out.endswith("remove the damaged files, and run the build again\n")

    os.truncate(cache / shards[1], 100)
    for name, begin in (("verify", "damaged: "), ("info", "error: ")):
        said = command("cache", name, cache)
        what = f"{begin}the cache {cache} is damaged: in {shards[1]}, 100 bytes are"
        assert said.code == 1 and what in said.out + said.err
    assert len(said.err.splitlines()) == 1

    (cache / shards[1]).unlink()
    (cache / shards[2]).unlink()
    said = command("cache", "info", cache)
    assert said.code == 1 and f"lacks 2 of its shards ({shards[1]}, …; " in said.err
    entries = read_manifest(cache)["shards"]
    lost = sum(entries[name]["documents"] for name in shards[1:3])
    out = build(command, cache, tiny_teacher, tiny_text, "--batch-tokens", 96)
    assert f"2 shards of {cache} are gone ({shards[1]}, …): their {lost} documents are computed again" in out
    assert f"{lost} documents added" in out and f"{60 - lost} were there" in out
    assert content(cache) == whole
    assert command("cache", "verify", cache).code == 0


def test_info(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--temperature", 2, "--piece-bytes", 128)
    facts = json.loads(command("cache", "info", cache, "--json").out)
    assert facts["signal"] == "top_k: top 8 and the rest, at temperatures 2"
    assert facts["vocabulary"] == "2,048 ids, 11 bits each" and facts["pieces"] == "at most 128 bytes of text"
    assert facts["documents"] == f"{len(Cache(cache)):,}" and facts["tokens"] == f"{Cache(cache).tokens:,}"
    assert str(tiny_teacher) in facts["teacher"]
    assert float(facts["bytes a token"]) == pytest.approx(Cache(cache).size / Cache(cache).tokens, abs=0.06)

    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "Nothing of it."}, *map(json.loads, tiny_text.open())])
    said = command("cache", "info", cache, "--data", more)
    assert said.code == 0
    documents = len(Cache(cache)) + 1
    assert re.search(rf"^coverage +{documents - 1} of {documents} documents$", said.out, re.MULTILINE)
    assert re.search(rf"^first missing +{re.escape(str(more))}.*\([0-9a-f]{{32}}\)$", said.out, re.MULTILINE)
    assert "first missing" not in command("cache", "info", cache, "--data", tiny_text).out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "{teacher}"], "--data: say which text {teacher} is to read (or give a recipe, which ends in .yaml)"),
        (["build", "{teacher}", "--data", "{text}"], "--out: say where the cache is to be"),
        (["build", "{teacher}", "train.steps=3", "--data", "{text}"], "key=value goes with a recipe"),
        (["build", "{recipe}", "--data", "{text}"], "--data goes with a model; a recipe has its own data"),
        (["build", "{recipe}", "--teacher", "1", "--out", "x"], "--teacher 1: the recipe has 1 teachers"),
        (["build", "{recipe}"], "--out: say where the cache is to be"),
        (["build", "{recipe}", "--out", "x", "--k", "0"], "store: k: should be greater than 0, not 0"),
        (["build", "nowhere", "--data", "{text}", "--out", "x"], "nowhere"),
        (["verify", "nowhere"], "nowhere is not a cache: it has no manifest.json"),
        (["info", "{text}"], "{text} is a file, and a cache is a folder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    command: Command, runs: TinyRuns, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.folder)
    places = {"teacher": runs.teacher, "text": runs.text, "recipe": runs.file("plain")}
    said = command("cache", *(argument.format(**places) for argument in arguments))
    assert said.code == 1 and says.format(**places) in said.err
    assert said.err.startswith("error: ") and len(said.err.splitlines()) == 1
    assert not (runs.folder / "x").exists()


def test_another_teacher_or_signal_is_not_mixed_in(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    build(command, cache, tiny_teacher, tiny_text)
    whole = content(cache)
    line = ("cache", "build", tiny_teacher, "--data", tiny_text, "--out", cache)
    for options, what in [
        (("--k", 9), "signal"),
        (("--kind", "hidden"), "kind"),
        (("--piece-bytes", 50), "piece bytes"),
    ]:
        said = command(*line, *(("--k", 8) if "--k" not in options else ()), *options)
        assert said.code == 1 and f"{cache} is a cache with another {what} (" in said.err
    other = make_model(tmp_path / "other", seed=5)
    said = command("cache", "build", other, "--data", tiny_text, "--out", cache, "--k", 8)
    assert said.code == 1 and "is a cache with another teacher" in said.err
    moved = shutil.copytree(tiny_teacher, tmp_path / "moved")
    assert "60 were there" in build(command, cache, moved, tiny_text)
    assert content(cache) == whole


def test_a_build_that_is_told_to_stop_keeps_what_it_has(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle: exit code 130, and the documents computed until then are there."""
    write, done = Scribe.write, []

    def stopped(self: Scribe, examples: list[Any]) -> None:
        write(self, examples)
        done.extend(example.key for example in examples)
        if len(done) > 20:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Scribe, "write", stopped)
    assert threading.current_thread() is threading.main_thread()
    said = command("cache", "build", tiny_teacher, "--data", tiny_text, "--out", cache, "--k", 8, "--batch-tokens", 96)
    assert said.code == 130 and 20 < len(done) < 60
    assert set(content(cache)) == set(done)
    monkeypatch.setattr(Scribe, "write", write)
    out = build(command, cache, tiny_teacher, tiny_text, "--batch-tokens", 96)
    assert f"{60 - len(done)} documents added" in out and f"{len(done)} were there" in out


def test_help_names_what_there_is(command: Command) -> None:
    assert all(word in command("cache", "--help").out for word in ("build", "verify", "info"))
    out = command("cache", "build", "--help").out
    assert all(f"--{name}" in out for name in ("out", "kind", "draws", "temperature", "data", "shard-seconds"))
    assert command("cache", "verify", "--help").code == 0 and command("cache", "info", "--help").code == 0
