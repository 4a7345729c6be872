"""A cache that a stranger made: nothing outside its folder is read, removed or overwritten, and whatever its manifest says, the
answer is one sentence."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from read_rows import read_sampled, read_top_k

import potstill
from potstill.cache.build import build
from potstill.cache.convert import convert_cache
from potstill.cache.manifest import part, read_manifest
from potstill.cache.reader import load_head
from potstill.cache.shard import open_shard
from potstill.cache.store import Cache, shard_names
from potstill.cache.verify import verify
from potstill.cli.cache_command import show_info
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.files import MANIFEST, draft_of
from potstill.models import load_teacher
from potstill.signals.document import from_bytes, to_bytes
from potstill.signals.kinds import KINDS
from potstill.types import PotstillError

SECRET = '{"secret": "outside"}'


@pytest.fixture(scope="module")
def teacher(tiny_teacher):
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), torch.device("cpu"), "teacher", "teacher")


@pytest.fixture(scope="module")
def data(tiny_text):
    return {"sources": [{"files": str(tiny_text)}], "max_length": 64}


@pytest.fixture(scope="module")
def made(teacher, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cache"
    build(teacher, StoreConfig(k=4), DataConfig.model_validate(data), folder, name="tiny")
    return folder


class Stranger:
    """A cache to spoil, and a folder beside it that is none of its business."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.cache, self.outside, self.out = folder / "cache", folder / "outside", folder / "out"
        shutil.copytree(made, self.cache)
        shutil.copytree(made / "tokenizer", self.outside / "tokenizer")
        shutil.copy(made / shard_names(made)[0], self.outside)
        shutil.copy(made / MANIFEST, self.outside)
        (self.outside / "victim.json").write_text(SECRET)
        self.before = self.seen()

    def seen(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.outside.rglob("*")) if path.is_file()}

    def say(self, **changes: Any) -> None:
        manifest = json.loads((self.cache / MANIFEST).read_text())
        (self.cache / MANIFEST).write_text(json.dumps({**manifest, **changes}))

    def name(self, name: str) -> None:
        """In its manifest, beside the true files."""
        files = json.loads((self.cache / MANIFEST).read_text())["files"]
        self.say(files={**files, name: {"bytes": 3, "crc32": 5}})

    def link(self, name: str, target: str) -> None:
        path = self.cache / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(self.outside / target)


SPOILT: dict[str, Callable[[Stranger], None]] = {
    "an absolute name": lambda s: s.name(str(s.outside / "victim.json")),
    "a name above": lambda s: s.name("../outside/victim.json"),
    "a name that climbs out of tokenizer/": lambda s: s.name("tokenizer/../../outside/victim.json"),
    "a name of somebody's": lambda s: s.name("thesis.tex"),
    "a hidden name": lambda s: s.name("tokenizer/.bashrc"),
    "a shard's name above": lambda s: s.say(shards={"../outside/victim.json": {"documents": 1, "tokens": 1}}),
    "a link in tokenizer/": lambda s: s.link("tokenizer/tokenizer.json", "victim.json"),
    "a link that is not listed": lambda s: s.link("tokenizer/added_tokens.json", "victim.json"),
    "tokenizer/ as a link": lambda s: s.link("tokenizer", "tokenizer"),
    "a shard as a link": lambda s: s.link(shard_names(s.cache)[0], shard_names(s.cache)[0]),
    "the manifest as a link": lambda s: s.link(MANIFEST, MANIFEST),
}


def emptied(stranger: Stranger) -> None:
    """As a command that failed leaves it, and of other settings: a build makes it anew."""
    for name in shard_names(stranger.cache):
        (stranger.cache / name).unlink()
    stranger.say(shards={}, piece_bytes=77)


def recipe(data: Any, folder: Path, teachers: list[Any]) -> dict[str, Any]:
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = {**llama, "num_attention_heads": 2, "max_position_embeddings": 128}
    return {
        "run": str(folder / "run"),
        "student": {"tokenizer": "shipped:tokenizers/bytes-2k", "config": config},
        "teachers": teachers,
        "data": data,
        "train": {"steps": 1, "batch_size": 2},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def actions(teacher, tiny_teacher, data, made, tmp_path) -> dict[str, Callable[[Stranger], Any]]:
    """What a command does with a cache; a list is what it found to be damaged."""

    def train(cache: Path, **more: Any) -> None:
        potstill.train(recipe(data, tmp_path, [{"cache": str(cache), "store": {"k": 4}, **more}]))

    return {
        "build": lambda s: build(
            teacher, StoreConfig(k=4), DataConfig.model_validate(data), s.cache, name="tiny", shard_seconds=0.0
        ),
        "train": lambda s: train(s.cache),
        "train beside a model": lambda s: train(s.cache, model=str(tiny_teacher)),
        "convert": lambda s: convert_cache(s.cache, s.out, k=2),
        "convert to it": lambda s: convert_cache(made, s.cache, k=4),
        "verify": lambda s: verify(s.cache).damage,
        "info": lambda s: [] if show_info(s.cache, data["sources"][0], False) else ["said"],
    }


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_nothing_outside_a_strangers_cache_is_touched(spoil, actions, made, tmp_path):
    for number, (what, act) in enumerate(actions.items()):
        stranger = Stranger(tmp_path / str(number), made)
        spoil(stranger)
        try:
            found = act(stranger)
        except PotstillError as error:
            found = [str(error)]
        assert found, what
        assert "link" in str(found) or "not what potstill wrote" in str(found) or found == ["said"], (what, found)
        assert stranger.seen() == stranger.before, what
        assert not any(SECRET.encode() in path.read_bytes() for path in stranger.out.rglob("*") if path.is_file()), what


@pytest.mark.parametrize("spoil", [SPOILT[name] for name in SPOILT if "shard" not in name and "manifest" not in name])
def test_an_empty_cache_of_a_strangers_is_not_made_anew_over_files_outside(spoil, actions, made, tmp_path):
    for number, what in enumerate(("build", "train beside a model", "convert to it")):
        stranger = Stranger(tmp_path / str(number), made)
        emptied(stranger)
        spoil(stranger)
        with pytest.raises(PotstillError, match=r"is a link|not what potstill wrote"):
            actions[what](stranger)
        assert stranger.seen() == stranger.before, what


@pytest.mark.parametrize("name", [".unfinished-cache", ".unfinished-files", ".unfinished-refused", "pid"])
def test_links_in_place_of_a_writers_own_files_are_not_written_through(name, actions, made, tmp_path):
    stranger = Stranger(tmp_path / "a", made)
    emptied(stranger)
    for left in [draft_of(Path(MANIFEST)).name] if name == "pid" else [name]:
        (stranger.cache / left).symlink_to(stranger.outside / ("tokenizer" if "files" in left else "victim.json"))
    actions["build"](stranger)
    assert stranger.seen() == stranger.before and verify(stranger.cache).damage == []
    assert len(Cache(stranger.cache)) == 60


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(actions, made, tmp_path):
    stranger = Stranger(tmp_path / "a", made)
    (stranger.cache / ".lock").unlink()
    (stranger.cache / ".lock").symlink_to(stranger.outside / "new")
    with pytest.raises(PotstillError, match=r"could not write|is a link"):
        actions["build"](stranger)
    assert stranger.seen() == stranger.before


def test_a_head_is_read_from_the_cache_alone_and_has_a_checksum(teacher, data, tmp_path):
    cache, outside = tmp_path / "cache", tmp_path / "head"
    build(teacher, StoreConfig(kind="hidden"), DataConfig.model_validate(data), cache, name="tiny")
    (cache / "head.safetensors").rename(outside)
    (cache / "head.safetensors").symlink_to(outside)
    with pytest.raises(PotstillError, match=r"head\.safetensors is a link"):
        load_head(cache)
    manifest = json.loads((cache / MANIFEST).read_text())
    (cache / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(PotstillError, match=r"has no checksum of head\.safetensors"):
        Cache(cache).check_files()


def test_the_head_of_a_float64_teacher_is_kept_as_its_hidden_states_are(tiny_teacher, data, tmp_path):
    config = TeacherConfig(model=str(tiny_teacher), dtype="float64")
    model = load_teacher(config, torch.device("cpu"), "teacher", "teacher")
    build(model, StoreConfig(kind="hidden"), DataConfig.model_validate(data), tmp_path / "cache", name="tiny")
    head = load_head(tmp_path / "cache")
    assert head.weight.dtype == torch.float32
    assert torch.equal(head.weight, model.model.get_output_embeddings().weight.float())


def test_names_that_a_writer_gives(tmp_path):
    good = ["head.safetensors", "tokenizer/tokenizer.json", "shard-12-0123abcd.safetensors", MANIFEST]
    good += ["tokenizer/additional_chat_templates/tool_use.jinja", "tokenizer/chat_template.jinja"]
    assert [part(tmp_path, name) for name in good] == [tmp_path / name for name in good]
    bad = [
        "",
        ".",
        "..",
        "/",
        "tokenizer",
        "tokenizer/",
        "tokenizer//x",
        "tokenizer/..",
        "tokenizer/x/../y",
        "x.json",
        "probe.json",
    ]
    bad += ["tokenizer/x\n", "head.safetensors\n", "HEAD.safetensors", "shard-²-0123abcd.safetensors", "tokenizer\\x"]
    bad += ["tokenizer/a/b/c", "tokenizer/-\0", "~/x", "shard-1-0123ABCD.safetensors", ".lock"]
    for name in bad:
        with pytest.raises(PotstillError, match="no cache has such a one"):
            part(tmp_path, name)


# Manifests


NASTY: list[Any] = [
    None, True, False, 0, -1, 1.5, 2, 10**30, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "../../x", [], [1],
    [None], {}, {"a": 1},
    {"bytes": -1, "crc32": "x"}, ["float32"], "bfloat16", 2**24 + 1, [0.0], [-1.0], [float("nan")], [[1.0]],
]  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*here, key))
    return found


def changed(value: Any, generator: random.Random) -> Any:
    """A copy with one to three places set to something else, taken out, or called something else."""
    copy = json.loads(json.dumps(value))
    for _ in range(generator.choice([1, 1, 2, 3])):
        *way, last = generator.choice(places(copy))
        inner = copy
        for key in way:
            inner = inner[key]
        act = generator.random()
        if act < 0.7:
            inner[last] = generator.choice(NASTY)
        elif isinstance(inner, dict):
            taken = inner.pop(last)
            if act > 0.85:
                inner[generator.choice(["x", "../x", "", "\x1b", str(last) + "x"])] = taken
    return copy


def sentence_or_nothing(call: Callable[[], Any], what: str) -> str:
    try:
        call()
    except PotstillError as error:
        said = str(error)
        assert "\x1b" not in said and "Traceback" not in said and said.count("\n") == 0, (what, said)
        said.encode()
        return said
    return ""


def test_fuzzed_manifests_are_one_sentence(made, teacher, data, tmp_path):
    """Of 300, in each of the ways a cache is opened. Whatever is taken for a manifest is as good as the true one."""
    folder = tmp_path / "cache"
    shutil.copytree(made, folder)
    whole = (folder / MANIFEST).read_bytes()
    manifest = {**json.loads(whole), "imported": {"layout": "parquet", "values": "logits", "rest": "none"}}
    refused = 0
    for seed in range(300):
        generator = random.Random(seed)
        if seed % 4:
            content = json.dumps(changed(manifest, generator)).encode()
        else:  # bytes
            content = bytearray(whole)
            for _ in range(generator.randrange(1, 4)):
                content[generator.randrange(len(content))] = generator.randrange(256)
            content = bytes(content[: generator.choice([len(content), generator.randrange(len(content))])])
        (folder / MANIFEST).write_bytes(content)
        said = sentence_or_nothing(lambda: read_manifest(folder), f"seed {seed}")
        refused += bool(said)
        if said:
            assert sentence_or_nothing(lambda: Cache(folder), f"seed {seed}") == said
            assert sentence_or_nothing(lambda: verify(folder), f"seed {seed}") == said
            continue
        for call in (
            lambda: verify(folder),
            lambda: show_info(folder, None, False),
            lambda: show_info(folder, None, True),
            lambda seed=seed: convert_cache(folder, tmp_path / f"out-{seed}", k=2),
            lambda: Cache(folder).check_files(),
        ):
            sentence_or_nothing(call, f"seed {seed}")
    assert refused > 150


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"", b"null", b"1" * 5000])
def test_a_manifest_that_is_no_sound_json(made, tmp_path, content):
    folder = tmp_path / "cache"
    shutil.copytree(made, folder)
    (folder / MANIFEST).write_bytes(content)
    assert str(folder / MANIFEST) in sentence_or_nothing(lambda: read_manifest(folder), "")


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(PotstillError, match=r"manifest.json is a link or no plain file"):
        read_manifest(tmp_path)


# Shards


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def opened(folder: Path, content: bytes, identity: str) -> Any:
    """The shard of that content, or what was said of it."""
    name = f"shard-{len(content)}-00000000.safetensors"
    (folder / name).write_bytes(content)
    try:
        return open_shard(folder, name, identity)
    except PotstillError as error:
        assert str(error).count("\n") == 0
        return str(error)
    finally:
        (folder / name).unlink()


def with_header(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def moved(header: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return {**header, name: {**header[name], **changes}}


def hostile(header: dict[str, Any], body: bytes) -> dict[str, tuple[Any, bytes]]:
    begin, end = header["data"]["data_offsets"]
    tokens = header["tokens"]["data_offsets"]
    shape = header["data"]["shape"][0]
    none = dict.fromkeys(header)
    return {
        "negative offsets": (moved(header, "data", data_offsets=[begin - len(body), end - len(body)]), body),
        "overlapping": (moved(header, "tokens", data_offsets=[tokens[0] - 4, tokens[1] - 4]), body),
        "the same bytes twice": (moved(header, "checksums", data_offsets=tokens), body),
        "a hole": (moved(header, "data", data_offsets=[begin + 1, end], shape=[shape - 1]), body),
        "junk after the data": (header, body + b"junk"),
        "less than it says": (header, body[:-1]),
        "a tensor of 1 TB": (moved(header, "data", shape=[2**40], data_offsets=[begin, begin + 2**40]), body),
        "a shape of 1 TB": (moved(header, "data", shape=[2**40]), body),
        "a shape that overflows": (moved(header, "data", shape=[2**63, 2**63]), body),
        "another dtype": (moved(header, "tokens", dtype="F32"), body),
        "a dtype that is a list": (moved(header, "tokens", dtype=["I32"]), body),
        "another shape": (moved(header, "keys", shape=[header["keys"]["shape"][0] * 16]), body),
        "offsets that are true": (moved(header, "data", data_offsets=[True, end]), body),
        "offsets that are no list": (moved(header, "data", data_offsets=7), body),
        "a tensor more": ({**header, "more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, body),
        "a tensor less": ({k: v for k, v in header.items() if k != "checksums"}, body),
        "no tensors": (none, body),
        "a list": ([], body),
        "metadata of numbers": ({**header, "__metadata__": {"identity": 3}}, body),
        "deep": (b'{"a":' * 50_000, body),
        "no text": (b"{\xff}", body),
    }


def test_shards_that_safetensors_refuses_are_refused(made, tmp_path):
    path = made / shard_names(made)[0]
    identity = read_manifest(made).identity
    header, body = parts_of(path)
    assert len(opened(tmp_path, with_header(header, body), identity).keys) == 60
    for what, (changed_header, changed_body) in hostile(header, body).items():
        said = opened(tmp_path, with_header(changed_header, changed_body), identity)
        assert isinstance(said, str) and "the header cannot be read (" in said, what
    for content in (b"", b"\0" * 7, b"\xff" * 8 + body, (len(body) + 1).to_bytes(8, "little") + body):
        assert isinstance(opened(tmp_path, content, identity), str)


def test_fuzzed_shards_are_read_as_safetensors_reads_them_or_not_at_all(made, tmp_path):
    """400 of them: what is taken is what safetensors takes, to the byte."""
    identity = read_manifest(made).identity
    header, body = parts_of(made / shard_names(made)[0])
    small = [-1, 0, 1, 4, 15, 16, 59, 60, 61, 2**40, 2**64, True, None, "U8", "I32", 1.0, [], [0], [0, 0], {}]
    small += [number for entry in header.values() if "shape" in entry for number in entry["data_offsets"]]
    taken = 0
    for seed in range(400):
        generator = random.Random(seed)
        copy = json.loads(json.dumps(header))
        for _ in range(generator.randrange(3)):
            *way, last = generator.choice([place for place in places(copy) if len(place) > 1])
            inner = copy
            for key in way:
                inner = inner[key]
            inner[last] = generator.choice(small)
        content = bytearray(with_header(copy, body))
        for _ in range(generator.choice([0, 0, 1, 4])):
            content[generator.randrange(len(content) if generator.random() < 0.5 else 600)] = generator.randrange(256)
        if generator.random() < 0.2:
            content = content[: generator.randrange(len(content))] if generator.random() < 0.5 else content + b"\0"
        found = opened(tmp_path, bytes(content), identity)
        if isinstance(found, str):
            continue
        taken += 1
        theirs = safetensors.numpy.load(bytes(content))
        assert sorted(theirs) == ["checksums", "data", "keys", "offsets", "tokens"], seed
        for name, array in theirs.items():
            ours = getattr(found, name)
            assert ours.dtype == array.dtype and np.array_equal(ours, array), (seed, name)
    assert 40 < taken < 300


@pytest.mark.parametrize("kind", ["top_k", "sampled", "hidden", "token_logprobs"])
def test_documents_of_fuzzed_bytes_are_read_or_one_sentence(kind):
    """Whoever makes a shard makes its checksums too."""
    form = KINDS[kind](300, k=6, num_samples=5, width=3, temperatures=(1.0,))
    random_numbers = np.random.default_rng(0)
    signal = {
        "ids": np.argsort(random_numbers.random((9, 300)), -1)[:, :6],
        "logprobs": -np.sort(random_numbers.random((9, 6)) * 5, -1),
        "odds": random_numbers.normal(size=(9, 1)),
        "token_logprobs": -random_numbers.random(9),
        "samples": np.sort(random_numbers.integers(0, 300, (9, 5)), -1),
        "entropy": random_numbers.random(9),
        "hidden": random_numbers.random((9, 3)).astype(np.float32),
    }
    ids, ends, predicted = np.arange(10), np.cumsum(np.arange(10)), np.arange(10) > 0
    good = to_bytes(form, ids, ends, predicted, form.encode(signal))
    for seed in range(400):
        generator = random.Random(seed)
        data = bytearray(good)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data) if generator.random() < 0.5 else 20)] = generator.randrange(256)
        tokens = generator.choice([10, 10, 10, 0, 9, 11, 2**31 - 1])
        try:
            document = from_bytes(form, np.frombuffer(bytes(data), dtype=np.uint8), tokens)
        except ValueError:
            continue
        chosen = [(document, np.arange(int(document.predicted.sum())))]
        assert len(document.ends) == tokens
        if kind == "top_k":
            read = read_top_k(chosen, 1.0)
            np.testing.assert_allclose(np.exp(read[1]).sum(-1) + np.exp(read[2]), 1, atol=1e-5)
        if kind == "sampled":
            np.testing.assert_allclose(read_sampled(chosen)[1].sum(-1), 1, atol=1e-6)
