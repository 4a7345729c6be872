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
from tiny_models import TOKENIZER, make_model, write_jsonl
from tiny_runs import TinyRuns, metrics
from transformers import AutoTokenizer

import potstill
from potstill.cache.build import CacheWriter
from potstill.cache.store import Cache, read_manifest, shard_names
from potstill.data import with_pieces
from potstill.models import load_tokenizer
from potstill.shipped import locate

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
MODEL = ("{teacher}", "--data", "{text}", "--out", "x")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(command: Command, cache: Path, teacher: Path, text: Path, *options: object) -> str:
    k = () if "--kind" in options else ("--k", 8)
    said = command("cache", "build", teacher, "--data", text, "--out", cache, *k, *options)
    assert said.code == 0 and not said.err, said
    return said.out


def test_build_from_a_model_and_again(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path) -> None:
    first = build(command, cache, tiny_teacher, tiny_text)
    tokens = Cache(cache).tokens
    assert re.fullmatch(
        rf"60 documents added \({tokens:,} tokens, [\d,]+ per second\); 0 were there\n"
        r"beyond the top 8 lies \d+\.\d% of the mass; with --tail-samples 32 "
        r"forward KL learns what is in it \(docs/cache.md\)\n"
        r"texts were cut into pieces of at most 4,096 bytes \(piece_bytes\): students need a data.max_length of about a "
        r"quarter of that, 1,024, or more; with less the ends of long pieces are lost to them\n"
        rf"cache: {re.escape(str(cache))}, 60 documents, {tokens:,} tokens, [\d.]+ MB \(\d+\.\d bytes a token\)\n",
        first,
    )
    before = {path.name: path.read_bytes() for path in cache.iterdir() if path.is_file()}
    assert "0 documents added (0 tokens, 0 per second); 60 were there" in build(command, cache, tiny_teacher, tiny_text)
    assert {path.name: path.read_bytes() for path in cache.iterdir() if path.is_file()} == before


def test_build_from_a_recipe_and_train_from_it(
    command: Command, runs: TinyRuns, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own model, store and data; the folder from the recipe, or from --out over it."""
    teachers = [{"model": str(runs.teacher), "cache": str(cache), "store": {"kind": "hidden"}}]
    recipe = runs.file("built", teachers=teachers)
    said = command("cache", "build", recipe).out
    size = with_pieces(runs.recipe("built").data, load_tokenizer(TOKENIZER, "x")).piece_bytes
    assert "documents added" in said and size != 4 * 64
    assert read_manifest(cache).kind == "hidden" and read_manifest(cache).piece_bytes == size
    other = runs.folder / "other"
    assert (
        command("cache", "build", recipe, "--out", other, "--kind", "sampled", "--num-samples", 9, "--seed", 4).code
        == 0
    )
    assert (Cache(other).form.kind, Cache(other).form.num_samples, Cache(other).form.seed) == ("sampled", 9, 4)
    given = ["data.max_length=32", "data.piece_bytes=99"]
    said = command("cache", "build", recipe, "--out", runs.folder / "cut", *given, "--kind", "token_logprobs")
    assert said.code == 0 and read_manifest(runs.folder / "cut").piece_bytes == 99
    # What is there stays as it was cut.
    said = command("cache", "build", recipe, "--out", runs.folder / "cut", "--kind", "token_logprobs")
    assert said.code == 0 and ": 0 documents added" in f": {said.out}"

    live = potstill.train(runs.recipe("live")).folder
    monkeypatch.setattr("potstill.teachers.placed.load_teacher", lambda *_: pytest.fail("the teacher was loaded"))
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
    assert well.out.startswith("documents ")
    assert re.search(r"^documents +60$", well.out, re.MULTILINE)

    numbers = command("cache", "verify", cache, "--teacher", tiny_teacher, "--sample", 9, "--json")
    found = json.loads(numbers.out)
    assert numbers.code == 0 and found["damage"] == [] and found["documents"] == 60 and found["compared"] == 9
    assert found["largest_error_of_mass"] <= 1e-6 and found["written_twice"] == 0
    assert 0 < found["mean_difference_of_log_probabilities"] <= found["largest_difference_of_log_probabilities"] < 0.01

    other = make_model(tmp_path / "other", seed=5)
    off = json.loads(command("cache", "verify", cache, "--teacher", other, "--json").out)
    assert off["mean_difference_of_log_probabilities"] > 100 * found["mean_difference_of_log_probabilities"]
    assert off["documents_that_differ"] > 20 and not off["damage"] and off["mismatch"]


@pytest.mark.parametrize("kind", ["top_k", "hidden"])
def test_verify_tells_another_teacher_from_damage(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path, kind: str
) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--kind", kind)
    pieces = make_model(tmp_path / "pieces")
    AutoTokenizer.from_pretrained(locate("shipped:tokenizers/pieces-1k")).save_pretrained(pieces)
    models = {
        "its weights are not those of the cache's": (make_model(tmp_path / "other", seed=5),),
        "its dtype is bfloat16 and that of the cache's": (tiny_teacher, "--dtype", "bfloat16"),
        "it has another tokenizer than the cache's": (pieces,),
        "it reads 16 tokens and the cache's": (make_model(tmp_path / "short", max_position_embeddings=16),),
    }
    if kind == "hidden":
        models["its hidden states are 16 wide and"] = (make_model(tmp_path / "narrow", hidden_size=16),)
    for what, teacher in models.items():
        said = command("cache", "verify", cache, "--teacher", *teacher)
        assert said.code == 1 and not said.err, said
        assert f"{teacher[0]} is not the cache's teacher: {what}" in said.out and str(tiny_teacher) in said.out
        assert "damaged" not in said.out and "the cache itself is whole" in said.out.splitlines()[-1]
    said = command("cache", "verify", cache, "--teacher", make_model(tmp_path / "fewer", vocab_size=2000))
    assert said.code == 1 and "has 2000 embeddings and its tokenizer 2048 ids" in said.err


def test_verify_loads_the_teacher_as_the_cache_has_it(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path
) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--dtype", "bfloat16")
    assert command("cache", "verify", cache, "--teacher", tiny_teacher).code == 0
    assert "60 were there" in build(command, cache, tiny_teacher, tiny_text)  # and so does a build that goes on


@pytest.mark.parametrize("kind", ["hidden", "sampled", "token_logprobs"])
def test_verify_recomputes_every_kind(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, kind: str
) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--kind", kind)
    found = json.loads(command("cache", "verify", cache, "--teacher", tiny_teacher, "--json").out)
    name = {"hidden": "difference_of_hidden_states", "sampled": "share_of_draws_that_differ"}
    most = {"hidden": 1e-4, "sampled": 0.05, "token_logprobs": 0.6 / 1024}[kind]
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
    for name in ("verify", "info"):
        said = command("cache", name, cache)
        assert said.code == 1 and f"damaged: the cache {cache} is damaged: in {shards[1]}, 100 bytes are" in said.out
        assert not said.err and re.search(r"^tokens +\d", said.out, re.MULTILINE)
    assert f"in {len(shards) - 1} shards" in said.out
    assert shards[1] in json.loads(command("cache", "info", cache, "--json").out)["damage"][0]

    (cache / shards[1]).unlink()
    (cache / shards[2]).unlink()
    said = command("cache", "info", cache)
    assert said.code == 1 and f"lacks 2 of its shards ({shards[1]}, …; " in said.out
    entries = read_manifest(cache).shards
    lost = sum(entries[name].documents for name in shards[1:3])
    out = build(command, cache, tiny_teacher, tiny_text, "--batch-tokens", 96)
    assert f"2 shards of {cache} are gone ({shards[1]}, …): their {lost} documents are computed again" in out
    assert f"{lost} documents added" in out and f"{60 - lost} were there" in out
    assert content(cache) == whole
    assert command("cache", "verify", cache).code == 0


def test_info(command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--temperature", 2, "--piece-bytes", 128)
    facts = json.loads(command("cache", "info", cache, "--json").out)
    assert facts["kind"] == "top_k" and facts["signal"]["k"] == 8 and facts["signal"]["temperatures"] == [2.0]
    assert facts["signal"]["vocabulary"] == 2048 and facts["piece bytes"] == 128 and facts["imported"] is None
    whole = Cache(cache)
    numbers = (facts["documents"], facts["tokens"], facts["bytes"], facts["shards"])
    assert numbers == (len(whole), whole.tokens, whole.size, len(whole.shards)) and facts["damage"] == []
    assert facts["teacher"]["model"] == str(tiny_teacher)
    assert facts["bytes a token"] == pytest.approx(whole.size / whole.tokens)
    said = command("cache", "info", cache).out
    assert "top_k: top 8 and the rest, at temperatures 2\n" in said and "at most 128 bytes of text" in said
    assert "2,048 ids, 11 bits each" in said and "imported" not in said
    manifest = json.loads((cache / "manifest.json").read_text())
    imported = {"layout": "maxtext", "values": "logits", "rest": "none"}
    (cache / "manifest.json").write_text(json.dumps({**manifest, "imported": imported}))
    said = command("cache", "info", cache).out
    assert re.search("^imported +from maxtext files of logits; rest none: the mass beyond", said, re.MULTILINE)

    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "Nothing of it."}, *map(json.loads, tiny_text.open())])
    said = command("cache", "info", cache, "--data", more)
    assert said.code == 0
    documents = len(Cache(cache)) + 1
    assert re.search(rf"^coverage +{documents - 1} of {documents} documents$", said.out, re.MULTILINE)
    assert re.search(rf"^first missing +{re.escape(str(more))}.*\([0-9a-f]{{32}}\)$", said.out, re.MULTILINE)
    assert "first missing" not in command("cache", "info", cache, "--data", tiny_text).out
    facts = json.loads(command("cache", "info", cache, "--data", more, "--json").out)
    assert facts["coverage"]["documents"] == documents and facts["coverage"]["missing"] == 1


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
        (
            ["build", *MODEL, "--kind", "sampled", "--k", "5"],
            "--k goes with kind top_k, and this cache is of kind sampled",
        ),
        (
            ["build", *MODEL, "--kind", "hidden", "--num-samples", "5"],
            "--num-samples goes with kind sampled, and this cache is of kind",
        ),
        (
            ["build", *MODEL, "--kind", "hidden", "--temperature", "2"],
            "--temperature goes with kind top_k, and this cache",
        ),
        (
            ["build", *MODEL, "--kind", "token_logprobs", "--seed", "5"],
            "--seed goes with kind sampled and top_k, and this cache is",
        ),
        (
            ["build", *MODEL, "--seed", "5"],
            "--seed is that of draws, and a top_k cache without --tail-samples has none",
        ),
        (["build", *MODEL, "--teacher", "1"], "--teacher 1 goes with a recipe"),
        (["build", "{recipe}", "--out", "x", "--dtype", "bfloat16"], "--dtype goes with a model and --data"),
        (["build", "{recipe}", "--out", "x", "--prompt-column", "a"], "--prompt-column goes with --data"),
        (["info", "x", "--text", "body"], "--text goes with --data, which says what to read"),
        (["verify", "x", "--sample", "3"], "--sample 3 goes with --teacher, which says what to compare with"),
        (["verify", "x", "--dtype", "float16"], "--dtype float16 goes with --teacher"),
        (["verify", "x", "--teacher", "{teacher}", "--sample", "0"], "--sample 0: choose how many documents"),
        (
            ["build", "{bare}", "--out", "x"],
            "teachers[0] has no model to run: add teachers.0.model=MODEL to the command",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    command: Command, runs: TinyRuns, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.folder)
    bare = runs.file("bare", teachers=[{"cache": "nowhere"}])
    places = {"teacher": runs.teacher, "text": runs.text, "recipe": runs.file("plain"), "bare": bare}
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
        (("--k", 9), "signal (k 8, now 9)"),
        (("--kind", "hidden"), "kind (top_k, now hidden)"),
        (("--piece-bytes", 50), "piece bytes (4096, now 50)"),
    ]:
        said = command(*line, *options)
        assert said.code == 1 and f"{cache} is a cache with another {what}: choose another" in said.err
    other = make_model(tmp_path / "other", seed=5)
    said = command("cache", "build", other, "--data", tiny_text, "--out", cache, "--k", 8)
    assert said.code == 1 and "is a cache with another teacher" in said.err
    moved = shutil.copytree(tiny_teacher, tmp_path / "moved")
    assert "60 were there" in build(command, cache, moved, tiny_text)
    assert content(cache) == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_build_that_is_told_to_stop_keeps_what_it_has(
    command: Command,
    cache: Path,
    tiny_teacher: Path,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    """In the middle: it says so in a line, and the documents computed until then are there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without one
    write, done = CacheWriter.write, []

    def stopped(self: CacheWriter, examples: list[Any]) -> Any:
        begun = write(self, examples)
        done.extend(example.key for example in examples)
        if len(done) > 20:
            signal.raise_signal(number)
        return begun

    monkeypatch.setattr(CacheWriter, "write", stopped)
    assert threading.current_thread() is threading.main_thread()
    said = command("cache", "build", tiny_teacher, "--data", tiny_text, "--out", cache, "--k", 8, "--batch-tokens", 96)
    assert said.code == code and 20 < len(done) < 60
    assert said.out == "stopped: what was computed until now is kept, and the same command goes on from there\n"
    assert not said.err
    assert set(content(cache)) == set(done)
    monkeypatch.setattr(CacheWriter, "write", write)
    out = build(command, cache, tiny_teacher, tiny_text, "--batch-tokens", 96)
    assert f"{60 - len(done)} documents added" in out and f"{len(done)} were there" in out
    signal.signal(signal.SIGINT, before)


def test_what_is_missing_is_added_as_the_error_says(command: Command, runs: TinyRuns, cache: Path) -> None:
    """`potstill cache build RECIPE --out DIR` with a recipe that has only the cache: its settings and its teacher are known."""
    lines = [json.loads(line) for line in runs.text.open()]
    some = write_jsonl(runs.folder / "some.jsonl", lines[:40])
    options = ("--k", 9, "--tail-samples", 4, "--seed", 3, "--temperature", 2, "--temperature", 1, "--piece-bytes", 100)
    build(command, cache, runs.teacher, some, *options, "--dtype", "bfloat16")
    before = read_manifest(cache)
    recipe = runs.file("cached", teachers=[{"cache": str(cache)}])
    said = command("cache", "build", recipe, "--out", cache)
    assert said.code == 0, said
    assert said.out.startswith(
        f"going on with what {cache} keeps, top_k: top 9 and the rest, at temperatures 1, 2; 4 draws"
    )
    after = read_manifest(cache)
    assert len(after.shards) > len(before.shards) and after.signal == before.signal and after.teacher == before.teacher
    assert "0 documents added" in command("cache", "build", runs.teacher, "--data", runs.text, "--out", cache).out
    said = command("cache", "build", recipe, "teachers.0.model=nowhere", "--out", cache)
    assert said.code == 1 and "nowhere" in said.err


@pytest.mark.parametrize("kind", ["sampled", "hidden"])
def test_an_existing_cache_says_the_kind(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, kind: str
) -> None:
    build(command, cache, tiny_teacher, tiny_text, "--kind", kind, *(("--num-samples", 7) if kind == "sampled" else ()))
    said = command("cache", "build", tiny_teacher, "--data", tiny_text, "--out", cache)
    assert said.code == 0 and "60 were there" in said.out and f"keeps, {kind}: " in said.out
    said = command("cache", "build", tiny_teacher, "--data", tiny_text, "--out", cache, "--k", 5)
    assert said.code == 1 and f"--k goes with kind top_k, and this cache is of kind {kind}" in said.err


def test_a_cache_whose_teacher_cannot_be_had(command: Command, runs: TinyRuns, cache: Path) -> None:
    build(command, cache, runs.teacher, runs.text)
    recipe = runs.file("cached", teachers=[{"cache": str(cache)}])
    manifest = json.loads((cache / "manifest.json").read_text())
    gone = {**manifest, "teacher": {**manifest["teacher"], "model": str(runs.folder / "gone")}}
    (cache / "manifest.json").write_text(json.dumps(gone))
    said = command("cache", "build", recipe)
    assert said.code == 1 and len(said.err.splitlines()) == 1
    assert f"{runs.folder / 'gone'}, with which {cache} was built, cannot be loaded (" in said.err
    assert "add teachers.0.model=MODEL to the command" in said.err
    assert "60 were there" in command("cache", "build", recipe, f"teachers.0.model={runs.teacher}").out
    imported = {**manifest, "teacher": {**manifest["teacher"], "weights": "imported"}}
    (cache / "manifest.json").write_text(json.dumps(imported))
    assert f"{cache} was imported, to which no model adds" in command("cache", "build", recipe).err


def test_a_build_that_came_to_nothing_does_not_stand_in_the_way(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    command("cache", "build", tiny_teacher, "--data", empty, "--out", cache, "--kind", "sampled", "--piece-bytes", 50)
    assert "60 documents added" in build(command, cache, tiny_teacher, tiny_text)
    assert Cache(cache).form.k == 8 and read_manifest(cache).piece_bytes == 4096


def test_errors_about_data_name_the_options(command: Command, cache: Path, tiny_teacher: Path, tmp_path: Path) -> None:
    body = write_jsonl(tmp_path / "body.jsonl", [{"body": "The people.", "n": 1}])
    line = ("cache", "build", tiny_teacher, "--out", cache, "--data")
    assert f"error: --text: {body}" in (said := command(*line, body).err)
    assert "has no column text (there: body, n); name one of them with --text" in said
    assert "did you mean --text body?" in command(*line, body, "--text", "bdy").err
    assert command(*line, tmp_path / "no.jsonl").err == f"error: --data: there is no file {tmp_path / 'no.jsonl'}\n"
    assert "1 documents added" in command(*line, body, "--text", "body").out
    said = command("cache", "info", cache, "--data", body)
    assert said.code == 1 and said.err.startswith(f"error: --text: {body}")


def test_draws_from_the_rest_are_not_recommended_where_no_loss_can_use_them(
    command: Command, cache: Path, tiny_teacher: Path, tiny_text: Path
) -> None:
    said = build(command, cache, tiny_teacher, tiny_text, "--temperature", 2)
    assert "beyond the top 8 lies" in said and "--tail-samples" not in said


def test_help_names_what_there_is(command: Command) -> None:
    assert all(word in command("cache", "--help").out for word in ("build", "verify", "info"))
    out = command("cache", "build", "--help").out
    assert all(f"--{name}" in out for name in ("out", "kind", "num-samples", "temperature", "data", "shard-seconds"))
    assert command("cache", "verify", "--help").code == 0 and command("cache", "info", "--help").code == 0
