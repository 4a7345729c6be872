"""The cache on disk: found by key whatever the keys, and each kind of damage told from every other, with nothing else lost."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from read_rows import read_token_logprobs

from potstill.cache import store
from potstill.cache.manifest import Manifest, new_manifest, signal_keys
from potstill.cache.shard import open_shard
from potstill.cache.store import (
    Cache,
    Writer,
    adopt,
    create,
    read_manifest,
    shard_names,
)
from potstill.cache.verify import verify
from potstill.files import MANIFEST, UNFINISHED
from potstill.signals.codec import pack, unpack
from potstill.signals.document import to_bytes
from potstill.signals.kinds import Hidden, Sampled, SignalKind, TokenLogprobs, TopK, _at_ids, share_that_differs
from potstill.types import PotstillError

FORM = TokenLogprobs(500)
IDENTITY = {
    "teacher": {"model": "some-teacher", "weights": "abc", "dtype": "float32"},
    "tokenizer": "def",
    "chat": {"template": None, "kwargs": {}},
    "piece_bytes": 4096,
}


def identity(form: SignalKind = FORM, **changes) -> Manifest:
    return new_manifest(Path("cache"), form, **IDENTITY | changes)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def document(number: int) -> tuple[int, bytes]:
    """A document that tells which one it is: −chosen of its tokens is its number / 64."""
    tokens = 2 + number % 5
    predicted = np.arange(tokens) > 0
    signal = {"token_logprobs": np.full(tokens - 1, -number / 64)}
    ids = np.arange(tokens) + number % 400
    return tokens, to_bytes(FORM, ids, np.arange(tokens), predicted, FORM.encode(signal))


def number_of(read) -> int:
    assert read is not None
    values = read_token_logprobs([(read, np.arange(len(read.tokens) - 1))])
    assert (values == values[0]).all()
    return round(-values[0] * 64)


def fill(folder: Path) -> None:
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")


def new_cache(folder: Path) -> Path:
    create(folder, identity(), fill)
    return folder


def write(folder: Path, numbers, key=key_of) -> str:
    """One more shard; its name."""
    before = set(shard_names(folder))
    writer = Writer(folder)
    for number in numbers:
        writer.add(key(number), *document(number))
    writer.flush()
    (name,) = set(shard_names(folder)) - before
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_cache(tmp_path / "cache")


@pytest.fixture
def three(folder: Path) -> tuple[Path, list[str]]:
    """Ten documents in each of three shards."""
    return folder, [write(folder, range(begin, begin + 10)) for begin in (0, 10, 20)]


def readable(folder: Path, numbers=range(30)) -> set[int]:
    found = dict(zip(numbers, Cache(folder).documents([key_of(n) for n in numbers]), strict=True))
    assert all(number_of(read) == n for n, read in found.items() if read is not None)
    return {n for n, read in found.items() if read is not None}


# Found by key


def test_every_document_is_found_among_thousands_and_no_other(folder):
    for begin in range(0, 4000, 500):
        write(folder, range(begin, begin + 500))
    cache = Cache(folder)
    assert len(cache) == 4000
    order = np.random.default_rng(0).permutation(8000)
    found = cache.documents([key_of(int(n)) for n in order])
    for number, read in zip(order, found, strict=True):
        assert (read is None) == (number >= 4000)
        if read is not None:
            assert number_of(read) == number
    assert (cache.find([key_of(n) for n in range(4000, 8000)]) == -1).all()
    assert cache.tokens == sum(2 + n % 5 for n in range(4000))
    assert cache.find([]).shape == (0,)


def test_keys_that_share_their_first_64_bits(folder):
    """And those that are the smallest and the largest of all."""
    begin = "00" * 8, "ff" * 8, "8000000000000001"
    keys = [f"{b}{n:016x}" for b in begin for n in (0, 1, 5, 2**64 - 1)]
    write(folder, range(0, 12, 2), key=keys.__getitem__)
    write(folder, range(1, 12, 2), key=keys.__getitem__)
    cache = Cache(folder)
    assert [number_of(read) for read in cache.documents(keys)] == list(range(12))
    absent = [f"{b}{n:016x}" for b in (*begin, "8000000000000000") for n in (2, 7, 2**63)]
    assert (cache.find(absent) == -1).all()
    together = cache.find([absent[0], keys[3], absent[5], keys[3], keys[8]])
    assert [at >= 0 for at in together] == [False, True, False, True, True] and together[1] == together[3]


def test_an_empty_cache_has_nothing(folder):
    cache = Cache(folder)
    assert len(cache) == 0 and cache.documents([key_of(1)]) == [None] and cache.find([key_of(1)]).tolist() == [-1]


def test_a_million_documents_open_without_an_object_for_each(folder):
    """Counted, not timed: what Python allocates does not grow with the documents."""
    writer = Writer(folder)
    tokens, data = document(3)
    keys = np.random.default_rng(0).integers(0, 256, (1_000_000, 16), dtype=np.uint8)
    shard = {
        "keys": keys,
        "tokens": np.full(len(keys), tokens, dtype=np.int32),
        "offsets": np.arange(len(keys) + 1, dtype=np.int64) * len(data),
        "checksums": np.zeros(len(keys), dtype=np.uint32),
        "data": np.tile(np.frombuffer(data, dtype=np.uint8), len(keys)),
    }
    chosen = [0, 12_345, 999_999]
    for at in chosen:
        shard["checksums"][at] = store.checksum(bytes(keys[at]), tokens, data)
    content = safetensors.numpy.save(shard, metadata={"identity": writer.identity})
    name = f"shard-{len(content)}-{0:08x}.safetensors"
    (folder / name).write_bytes(content)
    del shard, content, writer

    def opened(where: Path) -> tuple[Cache, int]:
        gc.collect()
        before = sys.getallocatedblocks()
        cache = Cache(where)
        return cache, sys.getallocatedblocks() - before

    small = new_cache(folder.parent / "small")
    write(small, range(5))
    opened(small)  # what is made once and kept, by json and numpy
    _, few = opened(small)
    cache, many = opened(folder)
    assert len(cache) == 1_000_000
    assert many < few + 500
    for at in chosen:
        assert number_of(cache.documents([bytes(keys[at]).hex()])[0]) == 3


def test_more_shards_than_files_a_process_may_have_open(folder):
    """Shards are mapped, not held open: a cache filled over days has thousands of them."""
    for number in range(60):
        write(folder, [number])
    before = len(os.listdir("/proc/self/fd"))
    cache = Cache(folder)
    assert len(cache.shards) == 60
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert all(number_of(read) == n for n, read in enumerate(cache.documents([key_of(n) for n in range(60)])))


# Completion


def test_the_manifest_counts_and_lists_what_is_there(three):
    folder, names = three
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["documents"] == 30 and manifest["tokens"] == sum(2 + n % 5 for n in range(30))
    assert list(manifest["shards"]) == names
    for name, entry in manifest["shards"].items():
        assert entry["bytes"] == (folder / name).stat().st_size and entry["documents"] == 10
        assert name == f"shard-{entry['bytes']}-{entry['crc32']}.safetensors"
    assert manifest["bytes"] == sum((folder / name).stat().st_size for name in names)
    assert {k: manifest[k] for k in IDENTITY} == IDENTITY
    assert manifest["files"].keys() == {"tokenizer/tokenizer.json"}
    assert (manifest["format"], manifest["version"]) == ("potstill cache", 2)


def test_a_shard_is_plain_safetensors(three):
    """Readable with nothing but the specification."""
    folder, names = three
    tensors = safetensors.numpy.load_file(folder / names[1])
    assert {k: (v.dtype.str, v.shape[1:]) for k, v in tensors.items()} == {
        "keys": ("|u1", (16,)),
        "tokens": ("<i4", ()),
        "offsets": ("<i8", ()),
        "checksums": ("<u4", ()),
        "data": ("|u1", ()),
    }
    for i, key in enumerate(tensors["keys"]):
        data = tensors["data"][tensors["offsets"][i] : tensors["offsets"][i + 1]].tobytes()
        number = next(n for n in range(10, 20) if key_of(n) == bytes(key).hex())
        assert (int(tensors["tokens"][i]), data) == document(number)


def test_nothing_waits_after_a_flush_and_an_empty_one_writes_nothing(folder):
    writer = Writer(folder)
    assert writer.flush() == 0 and not shard_names(folder)
    writer.add(key_of(1), *document(1))
    assert writer.size == len(document(1)[1])
    assert writer.flush() == (folder / shard_names(folder)[0]).stat().st_size
    assert not writer.waiting and writer.size == 0 and writer.flush() == 0


def test_what_is_added_later_is_seen_on_refresh(three):
    folder, _ = three
    cache = Cache(folder)
    name = write(folder, range(30, 35))
    assert cache.documents([key_of(30)]) == [None]
    cache.refresh()
    assert len(cache) == 35 and number_of(cache.documents([key_of(33)])[0]) == 33
    assert cache.shards[-1].name == name  # those that were open stay where they are


def test_an_index_that_is_refreshed_between_finding_and_reading(three, monkeypatch):
    """By another thread: the places that were found are of the index they were found in."""
    folder, _ = three
    cache = Cache(folder)
    write(folder, range(30, 60))
    find = store.Index.find

    def meanwhile(index, keys):
        found = find(index, keys)
        cache.refresh()
        return found

    monkeypatch.setattr(store.Index, "find", meanwhile)
    assert [number_of(read) for read in cache.documents([key_of(n) for n in range(30)])] == list(range(30))


def test_threads_that_refresh_at_once_take_up_a_shard_once(three, monkeypatch):
    folder, _ = three
    cache = Cache(folder)
    write(folder, range(30, 40))

    def slowly(*where):
        time.sleep(0.2)
        return open_shard(*where)

    monkeypatch.setattr(store, "open_shard", slowly)
    threads = [threading.Thread(target=cache.refresh) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.shards) == 4 and len(cache) == 40


def test_a_shard_listed_while_another_process_looks_is_not_lost(three, monkeypatch):
    """A shard is there before it is listed. To look for files first and into the list then would miss it."""
    folder, _ = three
    cache = Cache(folder)
    listing, reading = store.shard_names, store.read_manifest
    wrote = []

    def after(function):
        def call(where):
            found = function(where)
            if not wrote:
                wrote.append(True)
                monkeypatch.undo()
                write(folder, range(30, 40))
            return found

        return call

    for name, function in (("shard_names", listing), ("read_manifest", reading)):
        monkeypatch.setattr(store, name, after(function))
    cache.refresh()
    cache.refresh()
    assert wrote and len(cache) == 40


def fill_with(folder: Path, numbers: list[int], ready, go) -> None:
    writer = Writer(folder)
    for number in numbers:
        writer.add(key_of(number), *document(number))
    ready.release()
    go.wait()
    writer.flush()


@pytest.mark.parametrize("same", [True, False], ids=["the same documents", "others"])
def test_processes_that_write_at_once(folder, same):
    """The same documents make a shard of the same name: neither may disturb the other's."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Semaphore(0), context.Event()
    numbers = [list(range(800)) if same else list(range(n * 200, n * 200 + 200)) for n in range(4)]
    processes = [context.Process(target=fill_with, args=(folder, some, ready, go)) for some in numbers]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    go.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(shard_names(folder)) == (1 if same else 4)
    assert readable(folder, range(800)) == set(range(800))
    assert sum(shard.documents for shard in read_manifest(folder).shards.values()) == 800
    assert not list(folder.glob(f"{UNFINISHED}*"))
    assert verify(folder).damage == []


def test_documents_that_were_written_twice(three):
    folder, _ = three
    write(folder, range(5, 15))
    assert readable(folder) == set(range(30))
    report = verify(folder)
    assert report.damage == [] and report.numbers["written_twice"] == 10 and report.numbers["documents"] == 40


# Damage


def place(path: Path, array: str) -> range:
    """Where the bytes of an array are in a shard's file."""
    content = path.read_bytes()
    (length,) = np.frombuffer(content[:8], dtype="<u8").tolist()
    begin, end = json.loads(content[8 : 8 + length])[array]["data_offsets"]
    return range(8 + length + begin, 8 + length + end)


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def refused(call) -> str:
    with pytest.raises(PotstillError) as caught:
        call()
    return str(caught.value)


def heal(folder: Path, name: str, numbers) -> None:
    """What the message says: remove the file, and build again (here: its second half, writing what is missing)."""
    (folder / name).unlink(missing_ok=True)
    lost, names = adopt(folder)
    assert (lost, names) == (10, [name])
    assert readable(folder) == set(range(30)) - set(numbers)
    write(folder, numbers)
    assert readable(folder) == set(range(30)) and verify(folder).damage == []


def test_a_truncated_shard(three):
    folder, names = three
    path = folder / names[1]
    size = path.stat().st_size
    os.truncate(path, size - 7)
    for message in (refused(lambda: Cache(folder)), refused(lambda: adopt(folder)), *verify(folder).damage):
        assert message.startswith(
            f"the cache {folder} is damaged: in {names[1]}, {size - 7:,} bytes are left of {size:,}."
        )
        assert "Remove that file and run `potstill cache build` again" in message
    heal(folder, names[1], range(10, 20))


def test_verify_reports_every_damaged_shard_and_not_only_the_first(three):
    folder, names = three
    os.truncate(folder / names[0], 100)
    damage(folder / names[1], place(folder / names[1], "data")[5])
    (folder / names[2]).unlink()
    report = verify(folder)
    assert [names[i] in line for i, line in zip((2, 0, 1, 1), report.damage, strict=True)] == [True] * 4
    assert report.numbers["documents"] == 10


def test_a_flipped_byte_in_the_data_of_one_document(three):
    folder, names = three
    shard = open_shard(folder, names[1], read_manifest(folder).identity)
    hit = next(n for n in range(10, 20) if key_of(n) == bytes(shard.keys[4]).hex())
    damage(folder / names[1], place(folder / names[1], "data")[int(shard.offsets[4]) + 3])
    cache = Cache(folder)
    message = refused(lambda: cache.documents([key_of(hit)]))
    assert f"in {names[1]}, document {key_of(hit)} is not what was written" in message
    for number in set(range(30)) - {hit}:
        assert number_of(cache.documents([key_of(number)])[0]) == number
    assert verify(folder).damage == [
        f"{names[1]}: its checksum is not the one in its name",
        f"{names[1]}: document {key_of(hit)} is not what was written",
    ]
    heal(folder, names[1], range(10, 20))


def test_a_flipped_byte_anywhere_in_a_shard_is_never_taken_for_what_was_written(three):
    """Every third byte of the file in turn: an error at once, or when a document is read, or the document is found no more;
    where none of that happens, all documents are what they were. Never another kind of error, never a wrong document."""
    folder, names = three
    path = folder / names[1]
    whole = path.read_bytes()
    outcomes = {"header": 0, "document": 0, "missing": 0, "nothing": 0}
    tried = range(0, len(whole), 3)
    for at in tried:
        damage(path, at)
        assert not store.whole(folder, names[1])
        try:
            cache = Cache(folder)
        except PotstillError as error:
            assert "is damaged" in str(error)
            outcomes["header"] += 1
        else:
            seen = "nothing"
            for number in range(10, 20):
                try:
                    (found,) = cache.documents([key_of(number)])
                except PotstillError as error:
                    assert f"{key_of(number)} is not what was written" in str(error)
                    seen = "document"
                else:
                    if found is None:
                        seen = "missing"
                    else:
                        assert number_of(found) == number
                        assert found.tokens.tolist() == [number % 400 + i for i in range(2 + number % 5)]
            outcomes[seen] += 1
        path.write_bytes(whole)
    hits = {
        name: len(set(place(path, name)) & set(tried)) for name in ("keys", "tokens", "offsets", "checksums", "data")
    }
    assert outcomes["missing"] == hits["keys"] > 50
    others = hits["tokens"] + hits["offsets"] + hits["checksums"] + hits["data"]
    assert 100 < others - 4 <= outcomes["document"] <= others  # the last offset may as well lie beyond the end
    assert outcomes["header"] > 30
    assert outcomes["nothing"] < 50  # spaces and the free words of the header
    assert verify(folder).damage == []


def test_a_flipped_byte_in_the_index_is_reported_by_verify(three):
    folder, names = three
    path = folder / names[1]
    whole = path.read_bytes()
    for array in ("keys", "tokens", "offsets", "checksums"):
        damage(path, place(path, array)[1])
        found = verify(folder).damage
        assert found[0] == f"{names[1]}: its checksum is not the one in its name"
        assert len(found) >= 2, array
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"form": replace(FORM, vocabulary=400)},
        {"form": replace(FORM, temperatures=(2.0,))},
        {"teacher": {"model": "some-teacher", "weights": "other", "dtype": "float32"}},
        {"teacher": {"model": "some-teacher", "weights": "abc", "dtype": "bfloat16"}},
        {"tokenizer": "other"},
        {"chat": {"template": None, "kwargs": {"thinking": True}}},
        {"piece_bytes": 10},
    ],
    ids=str,
)
def test_a_shard_of_another_cache_or_a_manifest_that_was_edited(three, tmp_path, change):
    folder, _ = three
    other = tmp_path / "other"
    create(other, identity(**change), fill)
    name = write(other, range(5))
    (folder / name).write_bytes((other / name).read_bytes())
    for call in (lambda: Cache(folder), lambda: adopt(folder)):
        assert refused(call) == (
            f"the cache {folder} is damaged: {name} was written for another cache (of another teacher, kind, signal or "
            "text), "
            "or manifest.json was changed since. Move that file away, or put back the manifest.json it was written with"
        )
    (folder / name).unlink()
    assert readable(folder) == set(range(30))
    manifest = json.loads((folder / MANIFEST).read_text())
    edited = {"signal": signal_keys(change["form"])} if "form" in change else change
    (folder / MANIFEST).write_text(json.dumps({**manifest, **edited}))
    assert "was written for another cache" in refused(lambda: Cache(folder))
    renamed = {**manifest, "teacher": {**manifest["teacher"], "model": "moved/elsewhere"}}
    (folder / MANIFEST).write_text(json.dumps(renamed))
    assert readable(folder) == set(range(30))


def test_a_shard_without_an_identity(folder):
    content = safetensors.numpy.save(
        {
            "keys": np.zeros((0, 16), np.uint8),
            "tokens": np.zeros(0, np.int32),
            "offsets": np.zeros(1, np.int64),
            "checksums": np.zeros(0, np.uint32),
            "data": np.zeros(0, np.uint8),
        }
    )
    name = f"shard-{len(content)}-{0:08x}.safetensors"
    (folder / name).write_bytes(content)
    assert f"{name} was written for another cache" in refused(lambda: Cache(folder))


@pytest.mark.parametrize("change", [b"x", None], ids=["longer", "shorter"])
def test_a_document_of_another_size_than_the_format_says(folder, change):
    """Its checksum is right: it was written so."""
    writer = Writer(folder)
    tokens, data = document(3)
    writer.add(key_of(3), tokens, data + change if change else data[:-1])
    writer.flush()
    message = refused(lambda: Cache(folder).documents([key_of(3)]))
    assert f"document {key_of(3)} does not fit what the manifest says (there are" in message
    assert len(verify(folder).damage) == 1 and key_of(3) in verify(folder).damage[0]


def test_keys_out_of_order(folder, monkeypatch):
    writer = Writer(folder)
    for number in range(5):
        writer.add(key_of(number), *document(number))
    monkeypatch.setattr(store, "sorted", lambda keys: sorted(keys, reverse=True), raising=False)
    writer.flush()
    monkeypatch.undo()
    assert [line.split(": ")[1] for line in verify(folder).damage] == ["its keys are not in order"]
    assert readable(folder, range(5)) == set(range(5)), "which this reader does not mind"


def test_a_shard_that_is_gone(three):
    folder, names = three
    (folder / names[2]).unlink()
    message = refused(lambda: Cache(folder))
    assert message == (
        f"the cache {folder} lacks 1 of its shards ({names[2]}; 10 documents): put them back, or run `potstill cache build` "
        "again, which computes what they held anew"
    )
    assert verify(folder).damage == [message]
    heal(folder, names[2], range(20, 30))


def test_a_shard_that_was_not_listed_before_the_writer_was_killed(three):
    """Training sees it at once; a build lists it."""
    folder, names = three
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["shards"][names[0]]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert readable(folder) == set(range(30))
    assert adopt(folder) == (0, [])
    listed = json.loads((folder / MANIFEST).read_text())
    assert set(listed["shards"]) == set(names) and listed["documents"] == 30
    assert adopt(folder) == (0, [])


def test_a_damaged_shard_is_not_taken_up(three):
    folder, names = three
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["shards"][names[0]]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    damage(folder / names[0], -1)
    message = refused(lambda: adopt(folder))
    assert f"in {names[0]}, the checksum in its name is not its own" in message
    (folder / names[0]).unlink()
    assert adopt(folder) == (0, []) and readable(folder) == set(range(10, 30))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "is not the manifest of a potstill cache"),
        ('{"files": {}}', "is not the manifest of a potstill cache"),
        (
            '{"format": "potstill cache", "version": 1, "kind": "top_k"}',
            "version 1, kind top_k, which this potstill cannot",
        ),
        ('{"format": "potstill cache", "version": 2, "kind": "all"}', "kind all, which this potstill cannot read"),
        (
            '{"format": "potstill cache", "version": 2, "kind": "top_k"}',
            "lacks signal, teacher, tokenizer, chat, piece_bytes",
        ),
    ],
)
def test_a_manifest_of_something_else(three, content, says):
    folder, _ = three
    (folder / MANIFEST).write_text(content)
    for call in (lambda: Cache(folder), lambda: adopt(folder), lambda: new_cache(folder), lambda: verify(folder)):
        message = refused(call)
        assert says in message and str(folder) in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("signal", {"vocabulary": 500}),
        ("signal", {**signal_keys(FORM), "bits": 7}),
        ("teacher", "some-teacher"),
        ("teacher", {}),
        ("chat", {}),
        ("shards", ["shard-1-00000000.safetensors"]),
        ("shards", {"shard-1-00000000.safetensors": {}}),
    ],
)
def test_a_manifest_with_parts_of_another_shape(three, key, value):
    folder, _ = three
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, key: value}))
    assert f"{folder / MANIFEST} is not what potstill wrote" in refused(lambda: Cache(folder))


def test_a_folder_that_is_no_cache(tmp_path):
    message = refused(lambda: Cache(tmp_path))
    assert message == f"{tmp_path} is not a cache: it has no manifest.json. `potstill cache build` makes one"
    (tmp_path / "thesis.txt").write_text("precious")
    assert "is not a cache and not empty (there: thesis.txt): choose another folder" in refused(
        lambda: new_cache(tmp_path)
    )
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("teacher", {"model": "x", "weights": "other", "dtype": "float32"}, "another teacher (weights abc, now other)"),
        (
            "teacher",
            {"model": "x", "weights": "abc", "dtype": "bfloat16"},
            "another teacher (dtype float32, now bfloat16)",
        ),
        ("form", TopK(500, k=1), "another kind (token_logprobs, now top_k)"),
        ("form", replace(FORM, vocabulary=501), "another signal (vocabulary 500, now 501)"),
        ("tokenizer", "other", "another tokenizer (def, now other)"),
        ("chat", {"template": "x", "kwargs": {}}, "another chat (template null, now x)"),
        ("piece_bytes", 10, "another piece bytes (4096, now 10): choose another folder, or its settings"),
    ],
)
def test_a_cache_of_another_teacher_or_text_is_not_added_to(three, key, value, says):
    folder, _ = three
    before = (folder / MANIFEST).read_text()
    message = refused(lambda: create(folder, identity(**{key: value}), fill))
    assert f"{folder} is a cache with " in message and says in message
    assert (folder / MANIFEST).read_text() == before


def test_the_same_teacher_under_another_name_is_the_same(three):
    folder, _ = three
    create(folder, identity(teacher={**IDENTITY["teacher"], "model": "moved/elsewhere"}), fill)
    assert read_manifest(folder).teacher.model == "some-teacher"


def test_an_empty_cache_is_made_anew_with_other_settings(folder):
    """A command that failed before its first document leaves one: its settings must not bind the command that is right."""
    (folder / "tokenizer" / "tokenizer.json").write_text("[]")
    create(folder, identity(piece_bytes=10), fill)
    assert read_manifest(folder).piece_bytes == 10 and verify(folder).damage == []
    assert not list(folder.glob(f"{UNFINISHED}*"))
    write(folder, range(3))
    assert readable(folder) == {0, 1, 2}
    assert "another piece bytes (10, now 4096)" in refused(lambda: new_cache(folder))


def test_an_empty_cache_is_not_made_anew_while_somebody_fills_it(folder):
    """Until its first shard a build looks as if it had failed. Who has the same settings shares it."""
    builder = create(folder, identity(), fill)
    beside = folder / f"{UNFINISHED}123-shard"
    beside.write_bytes(b"")
    assert refused(lambda: create(folder, identity(piece_bytes=10), fill)) == (
        f"another process is building {folder}, with another piece bytes (4096, now 10): wait for it, or choose another "
        "folder"
    )
    second = create(folder, identity(), fill)
    assert beside.exists(), "it may be a live writer's"
    for writer, number in ((builder, 1), (second, 2)):
        writer.add(key_of(number), *document(number))
        writer.flush()
        writer.close()
    assert readable(folder) == {1, 2}


def test_a_manifest_that_is_changed_under_a_writer(folder):
    writer = Writer(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "piece_bytes": 10}))
    writer.add(key_of(1), *document(1))
    assert "manifest.json was changed while this command was building" in refused(writer.flush)
    assert shard_names(folder) == []


def hold(folder: Path, ready) -> None:
    """Build, until it is killed."""
    writer = create(folder, identity(), fill)
    (folder / f"{UNFINISHED}1-shard").write_bytes(b"half")
    ready.release()
    time.sleep(600)
    writer.close()


def test_a_killed_process_holds_nothing_and_what_it_left_is_removed(tmp_path):
    folder, context = tmp_path / "cache", multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    process = context.Process(target=hold, args=(folder, ready))
    process.start()
    ready.acquire()
    other = identity(piece_bytes=10)
    assert f"another process is building {folder}" in refused(lambda: create(folder, other, fill))
    new_cache(folder)
    assert (folder / f"{UNFINISHED}1-shard").exists()
    process.kill()
    process.join()
    create(folder, other, fill)
    assert read_manifest(folder).piece_bytes == 10 and not list(folder.glob(f"{UNFINISHED}*"))


def test_a_shard_that_a_killed_writer_did_not_list_is_content(three):
    folder, _ = three
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "shards": {}}))
    assert "another piece bytes" in refused(lambda: create(folder, identity(piece_bytes=10), fill))


def test_a_file_in_place_of_a_cache(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("{}")
    assert refused(lambda: Cache(file)) == (
        f"{file} is a file, and a cache is a folder: name the one that `potstill cache build` made"
    )


def test_a_creation_that_was_killed_half_way(tmp_path, monkeypatch):
    """The folder has files and no manifest, as if it were somebody's: it is known to be ours, and begun again."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "cache"
    monkeypatch.setattr(Manifest, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        create(folder, identity(), fill)
    monkeypatch.undo()
    assert (folder / "tokenizer").exists() and not (folder / MANIFEST).exists()
    new_cache(folder)
    write(folder, range(3))
    assert readable(folder) == {0, 1, 2} and verify(folder).damage == []
    assert not list(folder.glob(f"{UNFINISHED}*"))


def test_a_file_beside_the_shards_that_changed(three):
    folder, _ = three
    (folder / "tokenizer" / "tokenizer.json").write_text('{"a": 1}')
    assert verify(folder).damage == ["tokenizer/tokenizer.json is not what was written"]
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert verify(folder).damage == ["tokenizer/tokenizer.json is missing"]


def test_a_document_with_an_id_beyond_the_vocabulary(folder):
    writer = Writer(folder)
    predicted = np.array([False, True])
    data = to_bytes(
        FORM, np.array([1, 505]), np.array([1, 2]), predicted, FORM.encode({"token_logprobs": np.array([-1.0])})
    )
    writer.add(key_of(0), 2, data)
    writer.flush()
    assert [line.split(": ")[1] for line in verify(folder).damage] == [
        f"document {key_of(0)} has the id 505, and the teacher has 500 ids"
    ]


def one_document(folder: Path, form: SignalKind, predicted, signal) -> list[str]:
    """What verify says of a cache with one document of three tokens, without the names."""
    create(folder, identity(form), fill)
    writer = Writer(folder)
    streams = form.encode({name: np.asarray(value) for name, value in signal.items()})
    writer.add(key_of(0), 3, to_bytes(form, np.arange(3), np.arange(3), np.array(predicted), streams))
    writer.flush()
    return [
        line.split(": ")[1].removeprefix(f"document {key_of(0)} has ")
        for line in verify(folder).damage
        if "document" in line
    ]


def test_verify_finds_what_no_teacher_says_whatever_the_checksums(tmp_path):
    top = TopK(500, k=3)
    rows = {"logprobs": [[-1.0, -2, -3]] * 2, "odds": [[0.5]] * 2, "token_logprobs": [-1.0] * 2}
    predicted = [False, True, True]
    assert one_document(tmp_path / "a", top, predicted, {**rows, "ids": [[1, 2, 3], [3, 2, 1]]}) == []
    twice = {**rows, "ids": [[1, 2, 3], [7, 9, 7]]}
    assert one_document(tmp_path / "b", top, predicted, twice) == ["the id 7 twice at one token"]
    beyond = {**rows, "ids": [[1, 2, 3], [4, 5, 511]]}
    assert one_document(tmp_path / "c", top, predicted, beyond) == ["the id 511, and the teacher has 500 ids"]
    first = {**rows, "ids": [[1, 2, 3], [3, 2, 1]]}
    assert one_document(tmp_path / "d", top, [True, True, False], first) == ["a prediction of its first token"]
    drawn = Sampled(500, num_samples=4)
    good = {"samples": [[1, 1, 5, 9], [2, 2, 2, 2]], "entropy": [1.0, 0.0]}
    assert one_document(tmp_path / "e", drawn, predicted, good) == []
    mixed = {**good, "samples": [[1, 5, 1, 9], [2, 2, 2, 510]]}
    assert one_document(tmp_path / "f", drawn, predicted, mixed) == [
        "the id 510, and the teacher has 500 ids",
        "draws that are not in the order of their ids",
    ]
    states = np.array([[1.0, 2.0], [3.0, np.inf]], np.float32)
    for number, dtype in enumerate(("float32", "float16", "bfloat16")):
        hidden = torch.from_numpy(states).to(getattr(torch, dtype))
        stored = (hidden.view(torch.uint16) if dtype == "bfloat16" else hidden).numpy()
        form = Hidden(500, width=2, dtype=dtype)
        said = one_document(tmp_path / f"g{number}", form, predicted, {"hidden": stored})
        assert said == ["hidden states that are not finite"]


@pytest.mark.parametrize("values", [[[-1]], [[3, 2048]], [[1.0]], [[True]], [[2**40]]])
def test_the_packer_takes_no_values_that_do_not_fit(values):
    with pytest.raises(AssertionError, match="do not fit their bits"):
        pack(np.array(values), 11)
    assert unpack(pack(np.array([[0, 2047]]), 11), 2, 11).tolist() == [[0, 2047]]


def test_a_shard_that_may_not_be_read(three):
    folder, names = three
    (folder / names[0]).unlink()
    os.mkdir(folder / names[0])  # root may read anything but a folder
    assert names[0] in refused(lambda: Cache(folder))


def test_verify_compares_values_id_by_id():
    """Against a loop: two teachers of like confidence that mean other tokens are not alike."""
    generator = np.random.default_rng(0)
    wanted, ids = (np.stack([generator.permutation(20)[:6] for _ in range(9)]) for _ in range(2))
    values = -np.sort(generator.random((9, 6)))
    found = _at_ids(wanted, ids, values, 20)
    for row in range(9):
        here = dict(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        assert found[row].tolist() == [here.get(i, values[row, -1]) for i in wanted[row].tolist()]
    assert (wanted != ids).any() and not np.array_equal(found, values)


@pytest.mark.parametrize("draw", [505, 7], ids=["beyond the vocabulary", "an entry"])
def test_draws_from_the_rest_that_cannot_be(tmp_path, draw):
    form = TopK(500, k=2, tail_samples=3)
    create(tmp_path / "cache", identity(form), fill)
    signal = {
        "ids": np.array([[7, 8]]),
        "logprobs": np.log([[0.5, 0.25]]),
        "odds": np.log([[1 / 3]]),
        "token_logprobs": np.array([-1.0]),
        "tail_samples": np.array([[9, 10, 11]]),
        "tail_entropy": np.array([1.0]),
    }
    for number, drawn in enumerate((signal["tail_samples"], np.array([[9, draw, 11]]))):
        writer = Writer(tmp_path / "cache")
        streams = form.encode({**signal, "tail_samples": drawn})
        writer.add(key_of(number), 2, to_bytes(form, np.arange(2), np.arange(2), np.arange(2) > 0, streams))
        writer.flush()
    (what,) = verify(tmp_path / "cache").damage
    says = "the id 505, and the teacher has 500 ids" if draw == 505 else "draws from the rest that are not of the rest"
    assert what.endswith(f"document {key_of(1)} has {says}")


def test_the_share_of_draws_that_differ():
    """Against counting; and by hand: 3 of 4 have a partner."""
    generator = np.random.default_rng(0)
    one, other = (np.sort(generator.integers(0, 9, (30, 12)), -1) for _ in range(2))
    for row, share in enumerate(share_that_differs(one, other, 9)):
        both = Counter(one[row].tolist()) & Counter(other[row].tolist())
        assert share == pytest.approx(1 - sum(both.values()) / 12)
    assert share_that_differs(np.array([[1, 1, 2, 5]]), np.array([[1, 2, 5, 5]]), 9).tolist() == [0.25]


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(line, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_loses_nothing_that_was_written(small_disk):
    folder = new_cache(small_disk / "cache")
    write(folder, range(30))
    free = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 20_000))
    writer = Writer(folder)
    for number in range(30, 1500):
        writer.add(key_of(number), *document(number))
    message = refused(writer.flush)
    assert message.startswith(f"could not write {folder}/shard-") and "No space left on device" in message
    assert readable(folder) == set(range(30)) and verify(folder).damage == []
    assert not list(folder.glob(f"{UNFINISHED}*"))
    filler.unlink()
    writer.flush()  # it still has what it could not write
    assert readable(folder, range(1500)) == set(range(1500)) and verify(folder).damage == []


def test_a_disk_that_is_full_before_there_is_a_cache(small_disk):
    """The libraries that write beside the shards do not say that the disk is full; potstill does."""
    free = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 12_000))

    def library(folder: Path) -> None:
        raise Exception("I/O error of a kind of its own")

    message = refused(lambda: create(small_disk / "cache", identity(), library))
    assert message == (
        f"could not write {small_disk}/cache: No space left on device; what was there before is untouched"
    )
    filler.unlink()
    write(new_cache(small_disk / "cache"), range(3))
    assert readable(small_disk / "cache") == {0, 1, 2}
    with pytest.raises(Exception, match="of a kind of its own"):  # with room on the disk it is something else
        create(small_disk / "another", identity(), library)
