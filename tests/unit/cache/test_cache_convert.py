"""Caches made smaller, files of other systems taken in, and a reader that knows the specification alone."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
from array_record.python import array_record_module
from read_rows import read_hidden, read_sampled, read_tail_samples, read_token_logprobs, read_top_k
from tiny_models import make_model

from potstill.cache.build import build
from potstill.cache.convert import convert_cache
from potstill.cache.store import Cache, begun_cache
from potstill.cache.verify import verify
from potstill.cli.convert import convert
from potstill.config import DataConfig, SourceConfig, StoreConfig, TeacherConfig
from potstill.data.examples import text_key
from potstill.migrate.cache import COLUMNS, NOT_CUT, READERS, import_cache
from potstill.migrate.records import example_features
from potstill.models import load_teacher
from potstill.types import PotstillError

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
T = (1.0, 2.0)


@pytest.fixture(scope="module")
def teacher(tiny_teacher):
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teacher", "teacher")


@pytest.fixture(scope="module")
def made(teacher, tiny_text, tmp_path_factory):
    """A function that builds a cache of the tiny text, once for each set of options."""
    folder, done = tmp_path_factory.mktemp("caches"), {}

    def make(**keys) -> Cache:
        name = repr(sorted(keys.items()))
        if name not in done:
            data = DataConfig(sources=[SourceConfig(files=str(tiny_text))], max_length=64)
            out = folder / str(len(done))
            build(teacher, StoreConfig(**keys), data, out, name="tiny")
            done[name] = Cache(out)
        return done[name]

    return make


def keys_of(cache: Cache) -> list[str]:
    return ["".join(f"{int(word):016x}" for word in pair) for pair in cache.keys()]  # noqa: SIM118


def all_rows(cache: Cache, keys: list[str]):
    documents = [cache.document(int(at)) for at in cache.find(keys)]
    return [(document, np.arange(int(document.predicted.sum()))) for document in documents]


# --- the specification ---


def reader_of_the_spec():
    text = (ROOT / "docs" / "cache-format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    space: dict = {}
    exec(code, space)
    return space["documents"]


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "top_k", "k": 64, "temperatures": [1.0, 2.0]},
        {"kind": "top_k", "k": 16, "temperatures": [1.0, 2.0], "tail_samples": 12, "seed": 3},
        {"kind": "top_k", "k": 3},
        {"kind": "top_k", "k": 1},
        {"kind": "top_k", "k": 2048},
        {"kind": "sampled", "num_samples": 50},
        {"kind": "hidden"},
        {"kind": "token_logprobs"},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_the_spec_alone_reads_every_kind(made, keys):
    cache = made(**keys)
    found = dict(reader_of_the_spec()(cache.folder))
    assert sorted(found) == keys_of(cache)
    for key, read in found.items():
        ((document, rows),) = chosen = all_rows(cache, [key])
        assert np.array_equal(read["tokens"], document.tokens) and np.array_equal(read["ends"], document.ends)
        assert np.array_equal(read["predicted"], document.predicted)
        if cache.form.kind == "top_k":
            for temperature in cache.form.temperatures:
                ids, logprobs, tail = read_top_k(chosen, temperature)
                assert np.array_equal(read["ids"], ids)
                np.testing.assert_allclose(read[temperature][0], np.exp(logprobs), rtol=2e-5, atol=1e-9)
                np.testing.assert_allclose(read[temperature][1], np.exp(tail), atol=2e-6)
        if cache.form.tail_samples:
            draws, entropy = read_tail_samples(chosen)
            assert np.array_equal(read["tail_samples"], draws)
            np.testing.assert_allclose(read["tail_entropy"], entropy, rtol=1e-6)
        if cache.form.kind == "sampled":
            ids, shares, entropy = read_sampled(chosen)
            for row in rows:
                distinct, counts = np.unique(read["samples"][row], return_counts=True)
                assert dict(zip(distinct.tolist(), (counts / 50).astype("f4").tolist(), strict=True)) == {
                    i: s for i, s in zip(ids[row].tolist(), shares[row].tolist(), strict=True) if s
                }
            np.testing.assert_allclose(read["entropy"], entropy)
        if cache.form.kind == "hidden":
            assert np.array_equal(read["hidden"], read_hidden(chosen))
        if cache.form.kind in ("top_k", "token_logprobs"):
            np.testing.assert_allclose(read["token_logprobs"], read_token_logprobs(chosen), atol=1e-6)


# --- a smaller cache ---


@pytest.mark.parametrize("k", [64, 40, 9, 8, 2, 1])
def test_a_smaller_k_is_what_a_build_with_it_gives(made, tmp_path, k):
    large = made(kind="top_k", k=64, temperatures=list(T))
    direct = made(kind="top_k", k=k, temperatures=list(T))
    seen = []
    done = convert_cache(large.folder, tmp_path / "small", k=k, progress=lambda now, total: seen.append((now, total)))
    small = Cache(tmp_path / "small")
    assert (done.documents, done.there, done.tokens) == (len(large), 0, large.tokens) and seen[-1] == (60, 60)
    assert small.form == direct.form
    same = ("teacher", "tokenizer", "chat", "piece_bytes", "kind", "files")
    assert all(getattr(small.manifest, name) == getattr(large.manifest, name) for name in same)
    keys = keys_of(large)
    assert keys_of(small) == keys
    a, b = all_rows(small, keys), all_rows(direct, keys)
    for (one, _), (other, _) in zip(a, b, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.ends, other.ends)
        for name in ("ids", "fine", "token_logprobs") + (("coarse",) if k != 64 else ()):
            assert np.array_equal(one.arrays[name], other.arrays[name]), name
    for temperature in T:
        (ids, logprobs, tail), (ids_b, logprobs_b, tail_b) = (read_top_k(x, temperature) for x in (a, b))
        assert np.array_equal(ids, ids_b)
        assert np.abs(np.exp(logprobs).sum(-1) + np.exp(tail) - 1).max() < 1e-5
        # The entries that were dropped are known to a coarse gap each, so their sum is nearly exact, not exact.
        assert np.abs(np.exp(tail) - np.exp(tail_b)).max() < 0.01
        assert np.abs((np.exp(tail) - np.exp(tail_b)).mean()) < 1e-4
        assert np.abs(np.exp(logprobs) - np.exp(logprobs_b)).max() < 0.01
    assert not verify(tmp_path / "small").damage


def test_temperatures_can_be_left_out_and_nothing_else_changes(made, tmp_path):
    large = made(kind="top_k", k=64, temperatures=list(T))
    convert_cache(large.folder, tmp_path / "one", temperatures=[2.0])
    one = Cache(tmp_path / "one")
    assert one.form.temperatures == (2.0,) and one.form.k == 64
    keys = keys_of(large)
    for a, b in zip(read_top_k(all_rows(one, keys), 2.0), read_top_k(all_rows(large, keys), 2.0), strict=True):
        assert np.array_equal(a, b)


def test_draws_from_the_rest_stay_while_it_is_the_same_rest(made, tmp_path):
    large = made(kind="top_k", k=16, temperatures=list(T), tail_samples=12, seed=3)
    keys = keys_of(large)
    same = convert_cache(large.folder, tmp_path / "one", temperatures=[1.0])
    one = Cache(tmp_path / "one")
    assert (same.draws_left_out, one.form.tail_samples, one.form.seed) == (0, 12, 3)
    for a, b in zip(read_tail_samples(all_rows(one, keys)), read_tail_samples(all_rows(large, keys)), strict=True):
        assert np.array_equal(a, b)
    fewer = convert_cache(large.folder, tmp_path / "small", k=8)
    assert fewer.draws_left_out == 12
    assert Cache(tmp_path / "small").form == made(kind="top_k", k=8, temperatures=list(T)).form
    assert not verify(tmp_path / "small").damage and not verify(tmp_path / "one").damage
    without_one = convert_cache(large.folder, tmp_path / "two", temperatures=[2.0])  # at which they were drawn
    assert without_one.draws_left_out == 12 and Cache(tmp_path / "two").form.tail_samples == 0


def test_a_conversion_goes_on_and_adds_what_is_new(made, tmp_path):
    large = made(kind="top_k", k=64, temperatures=list(T))
    out = tmp_path / "small"
    convert_cache(large.folder, out, k=8)
    again = convert_cache(large.folder, out, k=8)
    assert (again.documents, again.there) == (0, 60)
    for shard in out.glob("shard-*"):
        shard.unlink()
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": {}}))
    assert convert_cache(large.folder, out, k=8).documents == 60


def test_what_cannot_be_converted_is_refused(made, tmp_path):
    large = made(kind="top_k", k=64, temperatures=list(T))
    for keys, words in (
        ({"k": 65}, "has 64 entries a token"),
        ({"k": 0}, "has 64 entries a token"),
        ({"temperatures": [3.0]}, "at 1, 2 only"),
    ):
        with pytest.raises(PotstillError, match=words):
            convert_cache(large.folder, tmp_path / "out", **keys)
    with pytest.raises(PotstillError, match="only top_k"):
        convert_cache(made(kind="token_logprobs").folder, tmp_path / "out", k=2)
    with pytest.raises(PotstillError, match="the cache itself"):
        convert_cache(large.folder, large.folder, k=2)
    assert not (tmp_path / "out").exists()
    convert_cache(large.folder, tmp_path / "out", k=8)
    with pytest.raises(PotstillError, match="another signal"):
        convert_cache(large.folder, tmp_path / "out", k=4)


# --- files of other systems ---


def varint(value: int) -> bytes:
    value %= 2**64
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def tf_example(features: dict[str, np.ndarray], packed: bool = True) -> bytes:
    entries = b""
    for name, values in features.items():
        values = np.asarray(values).ravel()
        if values.dtype.kind == "f":
            each = [struct.pack("<f", value) for value in values]
            listed, number, wire = each, 2, 5
        else:
            listed, number, wire = [varint(int(value)) for value in values], 3, 0
        inner = field(1, b"".join(listed)) if packed else b"".join(varint(1 << 3 | wire) + one for one in listed)
        entries += field(1, field(1, name.encode()) + field(2, field(number, inner)))
    return field(1, entries)


@pytest.mark.parametrize("packed", [True, False])
def test_a_serialized_example_is_read(packed):
    features = {
        "inputs": np.array([0, 1, 127, 128, 300, 2**31, -1, 2**62]),
        "top_k_logits": np.array([1.5, -2.25, np.inf], dtype=np.float32),
        "empty": np.array([], dtype=np.int64),
    }
    found = example_features(tf_example(features, packed))
    assert found.keys() == features.keys()
    for name, values in features.items():
        assert np.array_equal(found[name], values), name


def write_records(path: Path, records: list[bytes]) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


TEXTS = ["The people of the United States.", "Peace, and commerce with all nations", "a treaty — naïve façade 日本"]


def entries_of(tokenizer, texts=TEXTS, k=8, seed=0):
    """Tokens with eos, ids and logits of made-up teachers; the token that follows is mostly among them."""
    random, made = np.random.default_rng(seed), []
    for text in texts:
        tokens = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        logits = random.normal(0, 3, (len(tokens), len(tokenizer))).astype(np.float32)
        logits[np.arange(len(tokens) - 1), tokens[1:]] += 8
        ids = np.argsort(-logits, -1)[:, :k]
        made.append((text, tokens, ids, np.take_along_axis(logits, ids, -1), logits))
    return made


def expected(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    values = logits.astype(np.float64) / temperature
    return values - np.logaddexp.reduce(values, -1, keepdims=True)


@pytest.mark.parametrize("coding", ["example", "safetensors"])
def test_maxtext_files_become_a_cache(teacher, tiny_teacher, tmp_path, coding):
    made = entries_of(teacher.tokenizer)
    length = max(len(tokens) for _, tokens, *_ in made)
    records = []
    for _, tokens, ids, values, _ in made:
        pad = length - len(tokens)
        whole = {
            "inputs": np.pad(tokens, (0, pad)),
            "top_k_logits": np.pad(values, ((0, pad), (0, 0))),
            "top_k_indices": np.pad(ids, ((0, pad), (0, 0))),
            "inputs_segmentation": np.pad(np.ones(len(tokens), dtype=np.int64), (0, pad)),
        }
        records.append(whole)
    if coding == "example":
        data = [tf_example(record) for record in records]
    else:
        names = {name: "tokens" if name == "inputs" else name for name in records[0]}
        batch = {new: np.stack([record[name] for record in records]) for name, new in names.items()}
        data = [safetensors.numpy.save(batch)]
    file = write_records(tmp_path / "part.array_record", data)
    out, texts = tmp_path / "cache", tmp_path / "texts.jsonl"
    keys = {"layout": "maxtext", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": texts}
    found = import_cache([file], out, temperatures=[1.0, 2.0], **keys)
    assert (found.documents, found.noted, found.rest) == (3, {}, False)
    assert [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()] == TEXTS
    cache = Cache(out)
    assert cache.manifest.teacher.facts() == {"model": "big", "weights": "imported", "dtype": "unknown"}
    assert dict(cache.manifest.imported) == {"layout": "maxtext", "values": "logits", "rest": "none"}
    assert cache.manifest.piece_bytes == NOT_CUT and cache.form.k == 8 and cache.form.temperatures == T
    for text, tokens, ids, values, _ in made:
        ((document, rows),) = chosen = all_rows(cache, [text_key(text)])
        assert np.array_equal(document.tokens, tokens) and document.ends[-1] == len(text.encode())
        assert document.predicted.tolist() == [False] + [True] * (len(tokens) - 1)
        for temperature in T:
            got_ids, logprobs, tail = read_top_k(chosen, temperature)
            assert np.array_equal(got_ids, ids[rows])
            np.testing.assert_allclose(logprobs, expected(values[rows], temperature), atol=0.012)
            assert np.isneginf(tail).all()
        known = (ids[:-1] == tokens[1:, None]).any(-1)
        assert known.any()
        label = np.where(ids[:-1] == tokens[1:, None], expected(values[:-1]), -np.inf).max(-1)
        np.testing.assert_allclose(read_token_logprobs(chosen)[known], label[known], atol=1e-3)
        assert (read_token_logprobs(chosen)[~known] < -63.9).all()
    assert not verify(out).damage
    again = import_cache([file], out, temperatures=[1.0, 2.0], **keys)
    assert (again.documents, again.there) == (0, 3)
    with pytest.raises(PotstillError, match="is a cache of big, and what is imported is of other"):
        import_cache([file], out, **{**keys, "teacher_name": "other"})


def test_what_is_known_of_the_rest_of_logits_is_said(teacher, tiny_teacher, tmp_path):
    """Entries that are left out are a rest, in an import as in a conversion after it."""
    made = entries_of(teacher.tokenizer, k=16)
    file = write_parquet(tmp_path / "a.parquet", made, [one[3] for one in made])
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "values": "logits"}
    import_cache([file], tmp_path / "all", texts=tmp_path / "t.jsonl", **keys)
    import_cache([file], tmp_path / "some", texts=tmp_path / "t.jsonl", k=8, **keys)
    convert_cache(tmp_path / "all", tmp_path / "fewer", k=8)
    convert_cache(tmp_path / "all", tmp_path / "same")
    said = {name: Cache(tmp_path / name).manifest.imported.rest for name in ("all", "some", "fewer", "same")}
    assert said == {"all": "none", "some": "partial", "fewer": "partial", "same": "none"}
    for name, there in (("all", False), ("some", True), ("fewer", True)):
        cache = Cache(tmp_path / name)
        assert np.isfinite(read_top_k(all_rows(cache, keys_of(cache)), 1.0)[2]).all() == there


def test_packed_sequences_are_taken_apart(teacher, tiny_teacher, tmp_path):
    made = entries_of(teacher.tokenizer)
    parts = [np.concatenate([one[i] for one in made]) for i in (1, 2, 3)]
    segments = np.concatenate([np.full(len(one[1]), number) for number, one in enumerate(made, 1)])
    record = dict(zip(("inputs", "top_k_indices", "top_k_logits"), parts, strict=True))
    file = write_records(
        tmp_path / "a.array_record", [tf_example({**record, "inputs_segmentation": segments}), tf_example(record)]
    )
    found = import_cache(
        [file], tmp_path / "cache", layout="maxtext", tokenizer=str(tiny_teacher), teacher_name="big",
        texts=tmp_path / "t.jsonl",
    )  # fmt: skip
    assert found.documents == 4, "three of the packed one, and the second as the one text that nothing says it is not"
    cache = Cache(tmp_path / "cache")
    for text, _, ids, *_ in made:
        chosen = all_rows(cache, [text_key(text)])
        assert np.array_equal(read_top_k(chosen, 1.0)[0], ids[:-1])


def write_parquet(path: Path, made, values, **more) -> Path:
    table = {
        "input_ids": pa.array([tokens.tolist() for _, tokens, *_ in made], pa.list_(pa.uint64())),
        "top_k_indices": pa.array([one[2].tolist() for one in made], pa.list_(pa.list_(pa.uint64()))),
        "top_k_logprobs": pa.array([rows.tolist() for rows in values], pa.list_(pa.list_(pa.float32()))),
    }
    pq.write_table(pa.table({**table, **more}), path)
    return path


def test_parquet_with_log_probabilities_has_its_rest(teacher, tiny_teacher, tmp_path):
    made = entries_of(teacher.tokenizer, k=16)
    exact = [expected(logits) for *_, logits in made]
    logprobs = [np.take_along_axis(whole, one[2], -1) for whole, one in zip(exact, made, strict=True)]
    file = write_parquet(tmp_path / "a.parquet", made, logprobs)
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    found = import_cache([file], tmp_path / "cache", k=12, **keys)
    assert found.documents == 3 and found.rest
    cache = Cache(tmp_path / "cache")
    assert dict(cache.manifest.imported) == {"layout": "parquet", "values": "logprobs", "rest": "known"}
    for (text, _, ids, *_), whole in zip(made, exact, strict=True):
        got_ids, got, tail = read_top_k(all_rows(cache, [text_key(text)]), 1.0)
        assert np.array_equal(got_ids, ids[:-1, :12])
        right = np.take_along_axis(whole, ids, -1)[:-1, :12]
        np.testing.assert_allclose(np.exp(got), np.exp(right), atol=2e-3)
        rest = np.exp(np.sort(whole[:-1], -1)[:, :-12]).sum(-1)
        np.testing.assert_allclose(np.exp(tail), rest, rtol=2e-3, atol=1e-6)
    with pytest.raises(PotstillError, match="known there only"):
        import_cache([file], tmp_path / "other", temperatures=[2.0], **keys)


@pytest.mark.parametrize("values", ["logits", "logprobs"])
def test_an_import_is_compared_with_its_teacher_by_the_numbers(teacher, tiny_teacher, tmp_path, values):
    """It has no fingerprint of the weights. Logits lack the mass of the rest: what there is is compared as if it were all."""
    made = []
    for text, tokens, *_ in entries_of(teacher.tokenizer):
        with torch.no_grad():
            logits = teacher.model(input_ids=torch.from_numpy(tokens)[None]).logits[0].numpy()
        kept = np.argsort(-logits, -1)[:, :8]
        exact = logits if values == "logits" else expected(logits)
        made.append((text, tokens, kept, np.take_along_axis(exact, kept, -1)))
    file = write_parquet(tmp_path / "a.parquet", made, [one[3] for one in made])
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    other = load_teacher(TeacherConfig(model=str(make_model(tmp_path / "other", seed=5))), CPU, "teacher", "teacher")
    for k in (8, 4):
        import_cache([file], tmp_path / f"cache{k}", values=values, k=k, **keys)
        report = verify(tmp_path / f"cache{k}", teacher)
        assert report.numbers["compared"] == 3 and not report.damage and not report.mismatch
        assert report.numbers["mean_difference_of_log_probabilities"] < 0.01
        report = verify(tmp_path / f"cache{k}", other)
        (what,) = report.mismatch
        assert "3 of 3 documents are not what the teacher says now" in what and not report.damage


def test_an_import_that_failed_does_not_stand_in_the_way(teacher, tiny_teacher, tmp_path):
    made = entries_of(teacher.tokenizer)
    good = write_parquet(tmp_path / "good.parquet", made, [one[3] for one in made])
    text, tokens, ids, *more = made[0]
    beyond = (text, tokens, np.full_like(ids, 10**6), *more)
    bad = write_parquet(tmp_path / "bad.parquet", [beyond], [beyond[3]])
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "values": "logits", "texts": tmp_path / "t.jsonl"}
    with pytest.raises(PotstillError, match="has the id 1000000"):
        import_cache([good, bad], tmp_path / "cache", teacher_name="bgi", **keys)
    assert import_cache([good], tmp_path / "cache", teacher_name="big", k=4, **keys).documents == 3
    assert Cache(tmp_path / "cache").form.k == 4 and not verify(tmp_path / "cache").damage


def test_a_normaliser_beside_logits_gives_the_rest(teacher, tiny_teacher, tmp_path):
    made = entries_of(teacher.tokenizer)
    normaliser = [np.logaddexp.reduce(logits.astype(np.float64), -1) for *_, logits in made]
    file = write_parquet(
        tmp_path / "a.parquet", made, [one[3] for one in made], z=pa.array([row.tolist() for row in normaliser])
    )
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    found = import_cache([file], tmp_path / "cache", columns={"normaliser": "z"}, **keys)
    assert found.rest
    cache = Cache(tmp_path / "cache")
    for text, _, ids, _, logits in made:
        _, got, _ = read_top_k(all_rows(cache, [text_key(text)]), 1.0)
        whole = expected(logits)[:-1]
        np.testing.assert_allclose(got, np.take_along_axis(whole, ids[:-1], -1), atol=0.012)
    bare = import_cache([file], tmp_path / "bare", **keys)
    assert not bare.rest, "without it the values are told to be logits by their sums"


def test_entries_for_the_token_itself_ragged_lists_and_texts(teacher, tiny_teacher, tmp_path):
    """As vLLM gives them: none for the first token, k or k + 1 for the others, and the text is there."""
    made = entries_of(teacher.tokenizer, k=9)
    shifted, ids, values = [], [], []
    for text, tokens, one, _, logits in made:
        whole = np.take_along_axis(expected(logits), one, -1)
        counts = [8 + i % 2 for i in range(len(tokens) - 1)]
        ids.append([None, *(row[:c].tolist() for row, c in zip(one, counts, strict=False))])
        values.append([None, *(row[:c].tolist() for row, c in zip(whole, counts, strict=False))])
        shifted.append((text, tokens))
    table = {
        "ids": pa.array([tokens.tolist() for _, tokens in shifted]),
        "top": pa.array(ids),
        "how": pa.array(values),
        "body": pa.array([text for text, _ in shifted]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    columns = {"tokens": "ids", "ids": "top", "values": "how", "text": "body"}
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "columns": columns}
    found = import_cache([tmp_path / "a.parquet"], tmp_path / "cache", predicts="this", **keys)
    assert found.documents == 3 and Cache(tmp_path / "cache").form.k == 8
    for text, _, one, *_ in made:
        got, *_ = read_top_k(all_rows(Cache(tmp_path / "cache"), [text_key(text)]), 1.0)
        assert np.array_equal(got, one[:-1, :8])


def test_what_does_not_come_back_from_its_text_is_left_out_and_counted(teacher, tiny_teacher, tmp_path):
    tokenizer = teacher.tokenizer
    made = entries_of(tokenizer, [*TEXTS, TEXTS[0]], k=4)
    pieces = [tokenizer.convert_tokens_to_ids(letter) for letter in "theory"]  # never the tokens of that word
    odd = ("theory", np.array([*pieces, tokenizer.eos_token_id]), *(x[: len(pieces) + 1] for x in made[0][2:]))
    cut = ("", made[1][1][:-2], *(x[:-2] for x in made[1][2:]))  # no eos: one is put there, with the last entries
    file = write_parquet(tmp_path / "a.parquet", [*made, odd, cut], [one[3] for one in [*made, odd, cut]])
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "values": "logits"}
    (tmp_path / ".unfinished-t.jsonl").symlink_to(tmp_path / "outside")  # as a stranger's data may hold one
    found = import_cache([file], tmp_path / "cache", texts=tmp_path / "t.jsonl", **keys)
    assert not (tmp_path / "outside").exists() and not (tmp_path / "t.jsonl").is_symlink()
    assert found.noted == {"text": 1, "twice": 1} and found.documents == 4
    cache = Cache(tmp_path / "cache")
    for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines():
        ((document, _),) = all_rows(cache, [text_key(json.loads(line)["text"])])
        assert document.tokens[-1] == tokenizer.eos_token_id
    with pytest.raises(PotstillError, match="--texts"):
        import_cache([file], tmp_path / "x", **keys)


def test_bad_files_are_told_apart(tiny_teacher, tmp_path, monkeypatch):
    keys = {"tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}

    def of_maxtext(*records: bytes):
        file = write_records(tmp_path / "a.array_record", list(records))
        return import_cache([file], tmp_path / "cache", layout="maxtext", **keys)

    record = {"inputs": np.arange(3), "top_k_logits": np.ones((3, 2), "f4"), "top_k_indices": np.ones((3, 2), "i8")}
    for data, words in (
        (b"\x80\x04}", "is a pickle"),
        (b"\x0a\xff\xff", "neither a tf.train.Example"),
        (tf_example({"inputs": np.arange(3)}), "no feature top_k_indices"),
        (tf_example({**record, "top_k_indices": np.ones(5, "i8")}), "3 tokens, 5 ids and 6 values"),
        (tf_example({**record, "inputs": np.arange(3) + 70, "top_k_indices": np.full(6, 9999)}), "has the id 9999"),
    ):
        with pytest.raises(PotstillError, match=words):
            of_maxtext(data)
    with pytest.raises(PotstillError, match="holds no entries"):
        of_maxtext()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(PotstillError, match=r"has no column input_ids \(there: a\)"):
        import_cache([tmp_path / "a.parquet"], tmp_path / "cache2", layout="parquet", **keys)
    low = {"input_ids": [[5, 6]], "top_k_indices": [[[1], [2]]], "top_k_logprobs": [[[-9.0], [-8.0]]]}
    pq.write_table(pa.table(low), tmp_path / "b.parquet")
    with pytest.raises(PotstillError, match="say --values logits, or --values logprobs"):
        import_cache([tmp_path / "b.parquet"], tmp_path / "cache2", layout="parquet", **keys)
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(PotstillError, match="pip install array-record"):
        of_maxtext()


def spoilt(made, row: int, column: int, *, ids=None, values=None, tokens=None):
    """The entries of `entries_of`, one of the first text changed."""
    text, first_tokens, first_ids, first_values, logits = made[0]
    first_ids, first_values = first_ids.astype(object), first_values.astype(np.float64)
    first_tokens = first_tokens.copy()
    if ids is not None:
        first_ids[row, column] = None if ids == "null" else ids
    if values is not None:
        first_values[row, column] = values
    if tokens is not None:
        first_tokens[row] = tokens
    return [(text, first_tokens, first_ids, first_values, logits), *made[1:]]


def write_signed(path: Path, made) -> Path:
    table = {
        "input_ids": pa.array([one[1].tolist() for one in made]),
        "top_k_indices": pa.array([one[2].tolist() for one in made]),
        "top_k_logprobs": pa.array([one[3].tolist() for one in made], pa.list_(pa.list_(pa.float64()))),
    }
    pq.write_table(pa.table(table), path)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": -1}, "has the id -1, and the teacher has 2048 ids"),
        ({"ids": 2048}, "has the id 2048, and the teacher has 2048 ids"),
        ({"ids": "first"}, r"has the id \d+ twice at one token"),
        ({"ids": 3.5}, "its ids are of type float64, where integers were expected"),
        ({"ids": "null"}, "holds nothing at 1 places where numbers were expected"),
        ({"ids": 2**62}, "has the id 4611686018427387904"),
        ({"tokens": -1}, "has the id -1"),
        ({"values": math.nan}, "has nan among its values, where numbers were expected"),
        ({"values": math.inf}, "has inf among its values"),
        ({"values": 0.3}, r"probabilities at a token sum to \S+, so these are not log-probabilities"),
        ({"values": -0.001}, r"probabilities at a token sum to \S+, so these are not log-probabilities"),
    ],
    ids=str,
)
def test_entries_that_no_teacher_gives_are_refused(teacher, tiny_teacher, tmp_path, change, words):
    """Below 0 they were written as other ids, and twice in a row they count twice."""
    made = entries_of(teacher.tokenizer)
    made = [(*one[:3], np.take_along_axis(expected(one[4]), one[2], -1), one[4]) for one in made]
    if change.get("ids") == "first":
        change = {"ids": int(made[0][2][1, 0])}
    column = 1 if "values" in change else 5
    file = write_signed(tmp_path / "a.parquet", spoilt(made, 1, column, **change))
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "values": "logprobs"}
    with pytest.raises(PotstillError, match=words) as caught:
        import_cache([file], tmp_path / "cache", texts=tmp_path / "t.jsonl", **keys)
    assert "a.parquet, record 0" in str(caught.value)
    assert not (tmp_path / "t.jsonl").exists() and begun_cache(tmp_path / "cache") is None


def test_entries_of_no_mass_are_padding_whatever_their_ids(teacher, tiny_teacher, tmp_path):
    made = entries_of(teacher.tokenizer)

    def wider(rows: np.ndarray, value: float) -> np.ndarray:
        return np.pad(rows, ((0, 0), (0, 2)), constant_values=value)

    padded = [(text, tokens, wider(ids, -1), wider(values, -np.inf), x) for text, tokens, ids, values, x in made]
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "values": "logits"}
    file = write_signed(tmp_path / "a.parquet", padded)
    assert import_cache([file], tmp_path / "cache", texts=tmp_path / "t.jsonl", **keys).documents == 3
    cache = Cache(tmp_path / "cache")
    assert cache.form.k == 8 and verify(cache.folder).damage == []
    for text, _, ids, *_ in made:
        assert np.array_equal(read_top_k(all_rows(cache, [text_key(text)]), 1.0)[0], ids[:-1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k_indices": np.ones((3, 2), "f4")}, "its ids are of type float32"),
        ({"inputs": np.ones(3, "f4")}, "its tokens are of type float32"),
        ({"top_k_indices": np.array([[5, 6], [7, -9], [8, 9]])}, "has the id -9"),
        ({"inputs_segmentation": np.ones(4, "i8")}, "3 tokens and 4 numbers of segments"),
        ({"z": np.ones(2, "f4")}, "entries at 3 tokens and 2 normalisers"),
        ({"z": np.array([1, np.nan, 1], "f4")}, "a normaliser that is not finite"),
    ],
    ids=str,
)
@pytest.mark.parametrize("coding", ["example", "safetensors"])
def test_features_of_another_type_or_size_are_refused(teacher, tiny_teacher, tmp_path, coding, changes, words):
    tokens = np.array([*teacher.tokenizer("a")["input_ids"], teacher.tokenizer.eos_token_id])
    assert len(tokens) == 3
    record = {"inputs": tokens, "top_k_logits": np.full((3, 2), -1, "f4"), "top_k_indices": np.arange(6).reshape(3, 2)}
    record = {**record, "z": np.ones(3, "f4"), **changes}
    if coding == "example":
        data = tf_example(record)
    else:
        data = safetensors.numpy.save({name: value[None] for name, value in record.items()})
    keys = {"layout": "maxtext", "tokenizer": str(tiny_teacher), "teacher_name": "big", "columns": {"normaliser": "z"}}
    file = write_records(tmp_path / "a.array_record", [data])
    with pytest.raises(PotstillError, match=words):
        import_cache([file], tmp_path / "cache", texts=tmp_path / "t.jsonl", **keys)


def test_ids_that_are_true_or_false_are_refused(tiny_teacher, tmp_path):
    record = {"inputs": np.arange(3)[None], "top_k_logits": np.ones((1, 3, 2), "f4")}
    data = safetensors.numpy.save({**record, "top_k_indices": np.ones((1, 3, 2), bool)})
    keys = {"layout": "maxtext", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    with pytest.raises(PotstillError, match="its ids are of type bool, where integers were expected"):
        import_cache([write_records(tmp_path / "a.array_record", [data])], tmp_path / "cache", **keys)


@pytest.mark.parametrize("layout", ["parquet", "maxtext"])
def test_damaged_files_of_others_are_one_sentence(tmp_path, layout):
    """150 of each. Whatever can still be read is what an import then checks."""
    random_numbers = np.random.default_rng(0)
    made = [
        ("", random_numbers.integers(0, 500, 12), np.argsort(random_numbers.random((12, 500)), -1)[:, :4],
         random_numbers.normal(size=(12, 4)).astype("f4")) for _ in range(40)
    ]  # fmt: skip
    if layout == "parquet":
        path = write_parquet(tmp_path / "a.parquet", made, [one[3] for one in made])
    else:
        names = ("inputs", "top_k_indices", "top_k_logits")
        records = [tf_example(dict(zip(names, one[1:], strict=True))) for one in made]
        path = write_records(tmp_path / "a.array_record", records)
    whole = path.read_bytes()
    refused = 0
    for seed in range(150):
        generator = random.Random(seed)
        content = bytearray(whole)
        for _ in range(generator.choice([1, 1, 2, 8])):
            content[generator.randrange(len(content))] = generator.randrange(256)
        if generator.random() < 0.2:
            content = content[: generator.randrange(len(content))]
        path.write_bytes(content)
        try:
            for record in READERS[layout](path, COLUMNS[layout]):
                assert record.ids.shape == record.values.shape and record.ids.dtype == np.int64, seed
        except PotstillError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error), seed
    assert refused > 50


@pytest.mark.parametrize(
    "case", ["no list", "no cell", "texts of numbers", "two columns", "a list of texts", "normalisers"]
)
def test_parquet_of_another_shape_is_one_sentence(tiny_teacher, tmp_path, case):
    lists = {"input_ids": [[5, 6]], "top_k_indices": [[[1], [2]]], "top_k_logprobs": [[[-0.1], [-0.2]]], "text": ["x"]}
    changes, words = {
        "no list": ({"input_ids": [3]}, "holds int64 where a list was expected"),
        "no cell": ({"top_k_indices": pa.array([None], pa.list_(pa.list_(pa.int64())))}, "holds nothing where a list"),
        "texts of numbers": ({"text": [3]}, "holds int64 where a text was expected"),
        "two columns": ({}, "has more than one column input_ids"),
        "a list of texts": ({"top_k_indices": [["a", "b"]]}, "holds string where numbers"),
        "normalisers": ({"z": [[1.0]]}, "has entries at 2 tokens and 1 normalisers"),
    }[case]
    table = pa.table({**lists, **changes})
    if case == "two columns":
        table = table.append_column("input_ids", pa.array([[1, 2]]))
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"text": "text"} | ({"normaliser": "z"} if case == "normalisers" else {})
    keys = {"layout": "parquet", "tokenizer": str(tiny_teacher), "teacher_name": "big", "columns": columns}
    with pytest.raises(PotstillError, match=words):
        import_cache([tmp_path / "a.parquet"], tmp_path / "cache", **keys)


def test_a_batch_of_features_of_different_sizes(tiny_teacher, tmp_path):
    record = {"inputs": np.ones((2, 3), "i8"), "top_k_logits": np.ones((2, 3, 2), "f4")}
    keys = {"layout": "maxtext", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    for ids in (np.ones((1, 3, 2), "i8"), np.array(7)):
        data = safetensors.numpy.save({**record, "top_k_indices": ids})
        with pytest.raises(PotstillError, match="features are of different numbers of sequences"):
            import_cache([write_records(tmp_path / "a.array_record", [data])], tmp_path / "cache", **keys)


def test_a_real_array_record_file(teacher, tiny_teacher, tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    made = entries_of(teacher.tokenizer)
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for _, tokens, ids, values, _ in made:
        writer.write(tf_example({"inputs": tokens, "top_k_logits": values, "top_k_indices": ids}))
    writer.close()
    keys = {"layout": "maxtext", "tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    assert import_cache([tmp_path / "a.array_record"], tmp_path / "cache", **keys).documents == 3
    with pytest.raises(PotstillError, match="cannot be read as an array_record file"):
        (tmp_path / "b.array_record").write_bytes(b"nonsense" * 99)
        import_cache([tmp_path / "b.array_record"], tmp_path / "cache2", **keys)


# --- the command ---


def test_the_command_says_what_it_did(made, teacher, tiny_teacher, tmp_path, capsys):
    large = made(kind="top_k", k=64, temperatures=list(T))
    files = {"tokenizer": str(tiny_teacher), "teacher_name": "big", "texts": tmp_path / "t.jsonl"}
    nothing = dict.fromkeys(("tokenizer", "teacher_name", "texts", "k", "temperatures"))
    rest = {"columns": {}, "values": "auto", "predicts": "next"}
    convert([large.folder], tmp_path / "small", **{**nothing, **rest, "k": 8})
    said = capsys.readouterr().out
    assert "60 documents converted" in said and "bytes a token" in said
    one = entries_of(teacher.tokenizer)
    cut = ("", one[0][1][:-2], *(x[:-3] for x in one[0][2:]))
    file = write_parquet(tmp_path / "a.parquet", [*one, cut], [x[3] for x in [*one, cut]])
    convert([file], tmp_path / "cache", **{**nothing, **rest, **files})
    said = capsys.readouterr().out
    assert "4 documents imported" in said and "is not known, and is taken to be none" in said
    assert "1 documents have no entries for what follows them" in said and "texts to train on:" in said
    for sources, keys, words in (
        ([large.folder, large.folder], {}, "one cache at a time"),
        ([large.folder], files, "are for files to import"),
        ([file], {}, "say which teacher the files are of"),
        ([tmp_path / "none"], {}, "there is no"),
    ):
        with pytest.raises(PotstillError, match=words):
            convert(sources, tmp_path / "x", **{**nothing, **rest, **keys})


# --- the page ---


def benchmark():
    spec = importlib.util.spec_from_file_location("cache_benchmark", ROOT / "benchmarks" / "cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_results():
    script = benchmark()
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page, json.loads(script.RESULT.read_text(encoding="utf-8"))) == page
    assert page.count("<!-- end -->") == 6 and "<!-- end -->\n<!-- end -->" not in page
