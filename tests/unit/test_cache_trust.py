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

import pytest
import torch

import potstill
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.files import MANIFEST
from potstill.models import load_teacher
from potstill.teachers.build import build
from potstill.teachers.command import show_info
from potstill.teachers.convert import convert_cache
from potstill.teachers.inspect import verify
from potstill.teachers.manifest import part, read_manifest
from potstill.teachers.store import Cache, shard_names
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
    for left in [f".unfinished-{os.getpid()}-{MANIFEST}"] if name == "pid" else [name]:
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


def test_names_that_a_writer_gives(tmp_path):
    good = ["head.safetensors", "probe.json", "tokenizer/tokenizer.json", "shard-12-0123abcd.safetensors", MANIFEST]
    good += ["tokenizer/additional_chat_templates/tool_use.jinja", "tokenizer/chat_template.jinja"]
    assert [part(tmp_path, name) for name in good] == [tmp_path / name for name in good]
    bad = ["", ".", "..", "/", "tokenizer", "tokenizer/", "tokenizer//x", "tokenizer/..", "tokenizer/x/../y", "x.json"]
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
