"""What benchmarks/cache.py measures, one function a case; each runs in a process of its own and gives numbers for JSON.

`work` is a folder for what is made on the way: caches, a model, files of other systems.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from potstill.cache.build import batches, build, text_batches
from potstill.cache.manifest import new_manifest
from potstill.cache.reader import CacheReader
from potstill.cache.reading import TeacherText, examples_of
from potstill.cache.store import Cache, Index, Writer, create
from potstill.config import DataConfig, SourceConfig, StoreConfig, TeacherConfig
from potstill.config.recipe import load_recipe
from potstill.data import collate
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel, load_teacher
from potstill.signals import compute as signal
from potstill.signals.document import to_bytes
from potstill.signals.kinds import Sampled, SignalKind, TokenLogprobs, TopK
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import CachedSignal
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, Example

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
STORES = {
    "top_k 64": {"kind": "top_k", "k": 64},
    "top_k 50": {"kind": "top_k", "k": 50},
    "sampled 50": {"kind": "sampled", "num_samples": 50},
    "hidden": {"kind": "hidden"},
    "token_logprobs": {"kind": "token_logprobs"},
}
IDENTITY: dict[str, Any] = {  # of caches that no teacher made
    "teacher": {"model": "none", "weights": "none", "dtype": "none"},
    "tokenizer": "none",
    "chat": {"template": None, "kwargs": {}},
    "piece_bytes": 4096,
}


class Skipped(Exception):
    """What a case needs is not on this machine."""


class Clock:
    """Seconds of the clock and of the processor (all threads of the process)."""

    def __enter__(self) -> Clock:
        gc.collect()
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._begin[0]
        self.processor = time.process_time() - self._begin[1]


def best(runs: list[dict[str, float]], key: str) -> float:
    return max(run[key] for run in runs)


# --- models and texts ---


def model_of(name: str, options: Any) -> tuple[Path, list[str]]:
    """A teacher's folder and texts for it."""
    if name == "SmolLM2-135M":
        if options.smollm is None or not (options.smollm / "config.json").exists():
            raise Skipped("SmolLM2-135M as a model folder (--smollm) is not here")
        text = _asset(options, "data/wikitext2_raw/wiki.test.raw").read_text(encoding="utf-8")
        return options.smollm, [part for part in text.split("\n = ") if len(part) > 400]
    lines = _asset(options, "data/tinystories/stories_clean.jsonl").read_text(encoding="utf-8").splitlines()
    return _asset(options, f"models/{name}"), [next(iter(json.loads(line).values())) for line in lines]


def _asset(options: Any, path: str) -> Path:
    if options.assets is None or not (options.assets / path).exists():
        raise Skipped(f"{path} of the assets (--assets) is not here")
    return options.assets / path


def data_of(texts: list[str], folder: Path, piece_bytes: int, total_bytes: int) -> DataConfig:
    """So many bytes of the texts, as a jsonl file."""
    folder.mkdir(parents=True, exist_ok=True)
    size, chosen = 0, []
    for text in texts:
        chosen.append(json.dumps({"text": text[: max(0, total_bytes - size)]}))
        size += len(text)
        if size >= total_bytes:
            break
    (folder / "text.jsonl").write_text("\n".join(chosen), encoding="utf-8")
    return DataConfig(sources=[SourceConfig(files=str(folder / "text.jsonl"))], piece_bytes=piece_bytes)


def teacher_of(folder: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(folder), dtype="float32"), CPU, "teacher", "teacher")


def batches_of(teacher: LanguageModel, data: DataConfig, batch_tokens: int) -> Iterator[Batch]:
    """The batches that `build` makes."""
    text = TeacherText(teacher.tokenizer, teacher.positions)
    for some_text in text_batches(examples_of(data, teacher.tokenizer), batch_tokens):
        examples = sorted(filter(None, text(some_text)), key=lambda example: len(example.ids))
        for some in batches(examples, lambda example: len(example.ids), 2 * batch_tokens):
            yield collate([[example] for example in some], pad_id=0)


# --- building ---


def build_speed(options: Any, work: Path) -> dict[str, Any]:
    """Tokens a second of `build`, beside the teacher's own products: hidden states, and the head over all ids in chunks."""
    folder, texts = model_of("SmolLM2-135M", options)
    data = data_of(texts, work, 2048, 12_000 if options.quick else 28_000)
    teacher = teacher_of(folder)
    batches = list(batches_of(teacher, data, 1024))
    tokens = sum(len(example.ids) for batch in batches for example in batch.examples)
    vocabulary = len(teacher.tokenizer)

    @torch.no_grad()
    def bare() -> None:
        chunk = max(1, signal.PRODUCT_BYTES // (4 * vocabulary))
        out = torch.empty(chunk, vocabulary)
        for batch in batches:
            hidden = teacher.hidden(batch, batch.rows.teacher)
            target = teacher.at_rows(hidden, vocabulary)
            for start in range(0, len(hidden), chunk):
                count = min(chunk, len(hidden) - start)
                target_logits(target, slice(start, start + count), out=out[:count])

    def building(name: str) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(work / "cache", ignore_errors=True)
            store = StoreConfig(**STORES[name])
            built = build(teacher, store, data, work / "cache", name="SmolLM2-135M", batch_tokens=1024)
            assert built.tokens == tokens

        return run

    contenders = {"forward": bare} | {name: building(name) for name in ("top_k 64", "sampled 50", "hidden")}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    bare()
    for _ in range(options.rounds):
        for name, run in contenders.items():
            with Clock() as clock:
                run()
            numbers = {"tokens_per_second": tokens / clock.seconds, "per_processor_second": tokens / clock.processor}
            runs[name].append(numbers)
            print(f"  {name}: {numbers}", file=sys.stderr, flush=True)
    shutil.rmtree(work / "cache", ignore_errors=True)
    found = {name: {key: best(r, key) for key in r[0]} for name, r in runs.items()}
    for numbers in found.values():
        for key in ("tokens_per_second", "per_processor_second"):
            numbers[f"share_{key}"] = numbers[key] / found["forward"][key]
    return {"tokens": tokens, "vocabulary": vocabulary, "rounds": options.rounds, "contenders": found, "runs": runs}


# --- size and exactness ---


def exactness(name: str) -> Callable[[Any, Path], dict[str, Any]]:
    def run(options: Any, work: Path) -> dict[str, Any]:
        """Bytes a token of real caches, and what rounding adds: KL of the exact k + 1 buckets to those that are read."""
        folder, texts = model_of(name, options)
        data = data_of(texts, work, 2048 if name.startswith("Smol") else 900, 8_000 if options.quick else 24_000)
        teacher = teacher_of(folder)
        found: dict[str, Any] = {}
        for kind in ("top_k 64", "top_k 50", "sampled 50", "token_logprobs", "hidden"):
            out = work / kind.replace(" ", "-")
            shutil.rmtree(out, ignore_errors=True)
            store = {**STORES[kind], **({"temperatures": [1.0, 2.0]} if kind == "top_k 64" else {})}
            build(teacher, StoreConfig(**store), data, out, name=name, batch_tokens=1024)
            cache = Cache(out)
            found[kind] = _sizes(cache)
            if kind.startswith("top_k"):
                found[kind] |= _added_kl(cache, teacher, data)
        return {"vocabulary": cache.form.vocabulary, "id_bits": cache.form.id_bits, "kinds": found}

    return run


def _sizes(cache: Cache) -> dict[str, Any]:
    form, rows, distinct = cache.form, 0, 0
    for shard in cache.shards:
        for number in range(len(shard.keys)):
            document = shard.document(number, form)
            rows += int(document.predicted.sum())
            distinct += int((form.shares(document.all_rows())[1] > 0).sum()) if form.kind == "sampled" else 0
    found: dict[str, Any] = {
        "documents": len(cache), "tokens": cache.tokens, "bytes_a_token": cache.size / cache.tokens,
        "data_bytes_a_token": sum(len(shard.data) for shard in cache.shards) / cache.tokens,
    }  # fmt: skip
    if form.kind == "sampled":
        found["distinct_a_token"] = distinct / rows
    # The same with ids of 18 bits: every id (tokens, entries) grows by the difference.
    wide = replace(form, vocabulary=2**18)
    more = (wide.id_bits - form.id_bits) / 8
    entries = distinct if form.kind == "sampled" else 0
    grown = sum(code.width for code in wide.streams().values()) - sum(code.width for code in form.streams().values())
    total = cache.size + cache.tokens * more + rows * grown + entries * more
    found["bytes_a_token_18_bits"] = total / cache.tokens
    return found


@torch.no_grad()
def _added_kl(cache: Cache, teacher: LanguageModel, data: DataConfig) -> dict[str, float]:
    form = cache.form
    temperatures = form.temperatures
    kl: dict[float, list[np.ndarray]] = {t: [] for t in temperatures}
    for batch in batches_of(teacher, data, 1024):
        hidden = teacher.hidden(batch, batch.rows.teacher)
        target, begin = teacher.at_rows(hidden, form.vocabulary), 0
        for example in batch.examples:
            rows = example.supervised_tokens
            logits = target_logits(target, slice(begin, begin + rows)).double()
            begin += rows
            document = cache.document(int(cache.find([example.key])[0]))
            for temperature in temperatures:
                ids, stored, tail = form.entries(document.all_rows(), temperature)
                p = torch.log_softmax(logits / temperature, -1)
                kept = p.gather(-1, torch.from_numpy(ids).long())
                rest = p.scatter(-1, torch.from_numpy(ids).long(), -torch.inf).logsumexp(-1)
                exact = np.concatenate([kept.numpy(), rest.numpy()[:, None]], -1)
                read = np.concatenate([stored, tail[:, None]], -1).astype(np.float64)
                kl[temperature].append((np.exp(exact) * (exact - read)).sum(-1))
    numbers = {}
    for temperature, parts in kl.items():
        values = np.concatenate(parts)
        at = "" if temperature == 1.0 else f"_at_{temperature:g}"
        numbers |= {f"mean_added_kl{at}": float(values.mean()), f"largest_added_kl{at}": float(values.max())}
    return numbers


# --- reading ---

DOCUMENT = 512  # tokens
VOCABULARY = 151_936
READ_FORMS = {
    "top_k 64": TopK(VOCABULARY, k=64),
    "sampled 50": Sampled(VOCABULARY, num_samples=50),
}


def synthetic(form: SignalKind, folder: Path, tokens: int, shard_bytes: int = 128 * 2**20) -> Cache:
    """A cache of made-up documents: their bytes repeat, under other keys and in another order."""
    if (folder / "manifest.json").exists():
        return Cache(folder)
    random = np.random.default_rng(0)
    rows = DOCUMENT - 1
    blobs = []
    for _ in range(64):
        ids = random.integers(0, form.vocabulary, DOCUMENT)
        if form.kind == "top_k":
            gaps = random.exponential(0.25, (rows, form.k)) / np.linspace(1, 6, form.k)
            entries = np.argsort(random.random((rows, 4096)), -1)[:, : form.k] * 37
            streams = form.encode(
                {"ids": entries, "logprobs": -np.cumsum(gaps, -1), "odds": random.normal(-3, 2, (rows, 1)),
                 "token_logprobs": -random.exponential(2, rows)},
            )  # fmt: skip
        else:  # 50 draws of a Zipf-like law: some 12 different ones
            weights = 1 / np.arange(1, 4097) ** 1.9
            draws = random.choice(4096, (rows, form.num_samples), p=weights / weights.sum()) * 37
            streams = form.encode({"samples": np.sort(draws, -1), "entropy": random.exponential(2, rows)})
        predicted = np.arange(DOCUMENT) > 0
        ends = np.cumsum(random.integers(1, 8, DOCUMENT))
        blobs.append(to_bytes(form, ids, ends, predicted, streams))
    create(folder, new_manifest(folder, form, **IDENTITY), lambda _: None)
    writer = Writer(folder)
    for number in range(tokens // DOCUMENT):
        writer.add(random.bytes(16).hex(), DOCUMENT, blobs[number % len(blobs)])
        if writer.size >= shard_bytes:
            writer.flush()
    writer.flush()
    return Cache(folder)


def with_keys(cache: Cache, documents: int) -> Cache:
    """The same documents under more keys, so that the index has the size it would have."""
    random = np.random.default_rng(1)
    chosen = random.permutation(np.arange(documents) % len(cache))
    keys = np.sort(np.frombuffer(random.bytes(16 * documents), dtype="S16"))
    cache._index = Index(keys, cache._index.shards[chosen], cache._index.numbers[chosen])
    return cache


def key_at(cache: Cache, at: int) -> str:
    return bytes(cache._index.keys[at]).ljust(16, b"\0").hex()


def student_examples(cache: Cache, places: np.ndarray) -> list[Example]:
    """What a student's pipeline would ask with; made before the clock starts."""
    made = []
    for at in places:
        document = cache.document(int(at))
        made.append(Example(key_at(cache, at), "", document.tokens.astype(np.int32), document.predicted, 0))
    return made


def forget(folder: Path) -> None:
    """Drop a cache's files from the page cache, so that they are read from the disk."""
    for path in folder.glob("shard-*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def reading(kind: str) -> Callable[[Any, Path], dict[str, Any]]:
    def run(options: Any, work: Path) -> dict[str, Any]:
        """Tokens a second of `Teacher.prepare`, as the training calls it, eight documents a batch."""
        form = READ_FORMS[kind]
        index_tokens = 2_000_000 if options.quick else 100_000_000
        stored = min(index_tokens, 20_000_000 if kind.startswith("top_k") else 100_000_000)
        folder = work / f"synthetic-{kind.replace(' ', '-')}"
        cache = synthetic(form, folder, stored)
        del cache
        gc.collect()
        found: dict[str, Any] = {"index_tokens": index_tokens, "stored_tokens": stored, "document_tokens": DOCUMENT}
        cache = with_keys(Cache(folder), index_tokens // DOCUMENT)
        found["bytes"] = cache.size
        teacher = Teacher(CachedSignal(CacheReader(cache), form.vocabulary), SameTokenizerView(), "synthetic")
        random = np.random.default_rng(2)
        count = 512 if options.quick else 2048
        by_place = np.lexsort((cache._index.numbers, cache._index.shards))
        start = int(random.integers(0, len(by_place) - count))
        orders = {"sequential": by_place[start : start + count], "random": random.permutation(len(cache))[:count]}
        asked = {name: student_examples(cache, places) for name, places in orders.items()}

        def read(teacher: Teacher[CachedSignal], examples: list[Example]) -> dict[str, float]:
            with Clock() as clock:
                for begin in range(0, len(examples), 8):
                    teacher.prepare(SimpleNamespace(examples=examples[begin : begin + 8]))  # type: ignore[arg-type]
            tokens = sum(len(example.ids) for example in examples)
            return {"tokens_per_second": tokens / clock.seconds, "per_processor_second": tokens / clock.processor}

        runs: dict[str, list[dict[str, float]]] = {name: [] for name in orders}
        for _ in range(options.rounds + 2):
            for name, examples in asked.items():
                runs[name].append(read(teacher, examples))
        for name, some in runs.items():
            found[name] = {key: best(some, key) for key in some[0]} | {"runs": some}
        del cache, teacher
        found["from_disk"] = _from_disk(form, folder, orders, asked, index_tokens // DOCUMENT)
        return found

    return run


def _from_disk(form: SignalKind, folder: Path, orders: Any, asked: Any, documents: int) -> dict[str, float]:
    """The same with nothing of the cache in memory."""
    found = {}
    for name in orders:
        gc.collect()
        forget(folder)
        cache = with_keys(Cache(folder), documents)
        teacher = Teacher(CachedSignal(CacheReader(cache), form.vocabulary), SameTokenizerView(), "synthetic")
        with Clock() as clock:
            for begin in range(0, len(asked[name]), 8):
                teacher.prepare(SimpleNamespace(examples=asked[name][begin : begin + 8]))  # type: ignore[arg-type]
        found[name] = sum(len(example.ids) for example in asked[name]) / clock.seconds
        del cache, teacher
    return found


def opening(options: Any, work: Path) -> dict[str, Any]:
    """Seconds to open a cache of a million documents, and to find one."""
    documents = 20_000 if options.quick else 1_000_000
    folder = work / "million"
    form = TokenLogprobs(VOCABULARY)
    if not (folder / "manifest.json").exists():
        random = np.random.default_rng(0)
        create(folder, new_manifest(folder, form, **IDENTITY), lambda _: None)
        writer = Writer(folder)
        streams = form.encode({"token_logprobs": -random.exponential(2, 31)})
        blob = to_bytes(form, np.arange(32), np.arange(1, 33), np.arange(32) > 0, streams)
        for number in range(1, documents + 1):
            writer.add(random.bytes(16).hex(), 32, blob)
            if number % (documents // 16) == 0:
                writer.flush()
        writer.flush()
    runs, key = [], ""
    for _ in range(options.rounds + 2):
        with Clock() as clock:
            cache = Cache(folder)
        assert len(cache) == documents
        key = key or key_at(cache, 7)
        with Clock() as finding:
            cache.document(int(cache.find([key])[0]))
        runs.append({"open": clock.seconds, "find": finding.seconds})
    shards = len(cache.shards)
    del cache
    forget(folder)
    with Clock() as cold:
        Cache(folder)
    return {
        "documents": documents, "shards": shards, "seconds": min(run["open"] for run in runs),
        "seconds_from_disk": cold.seconds, "find_seconds": min(run["find"] for run in runs),
    }  # fmt: skip


# --- training ---


class Steps:
    """Remembers each step's metrics."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def stepped(self, run: Any, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)

    def started(self, run: Any) -> None: ...
    def ended(self, run: Any) -> None: ...
    def evaluated(self, run: Any, evaluation: Any) -> None: ...
    def saved(self, run: Any, checkpoint: Any) -> None: ...


def training(options: Any, work: Path) -> dict[str, Any]:
    """Steps of recipes/distil.yaml: on text alone, from the live teacher, and from caches. All in turn, several times."""
    import potstill

    steps = 12 if options.quick else 40
    share = "data.sources.0.fraction=0.01"
    base = load_recipe(ROOT / "recipes" / "distil.yaml", [share, f"train.steps={steps}"])
    keys = base.model_dump(mode="json", by_alias=True) | {"eval": None, "checkpoint": {"keep": 1}}
    keys["log"] |= {"tensorboard": False, "every": 1000, "stat_rows": 0}
    model = keys["teachers"][0]
    caches = {}
    for kind in ("top_k 64", "sampled 50", "hidden"):
        caches[kind] = work / f"quickstart-{kind.replace(' ', '-')}"
        if not (caches[kind] / "manifest.json").exists():
            teacher = load_teacher(TeacherConfig(model=model["model"]), CPU, "teacher", "teacher")
            build(teacher, StoreConfig(**STORES[kind]), base.data, caches[kind], name=model["model"])
    teachers: dict[str, list[dict[str, Any]]] = {
        "text only": [], "live": [{"model": model["model"]}], **{kind: [{"cache": str(p)}] for kind, p in caches.items()}
    }  # fmt: skip
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in teachers}
    for number in range(options.rounds):
        for name, listed in teachers.items():
            folder = work / "runs" / f"{name}-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            loss = {**keys["loss"], "ce_weight": 0.0 if listed else 1.0}
            seen = Steps()
            potstill.train({**keys, "teachers": listed, "loss": loss, "run": str(folder)}, callbacks=[seen])
            parts = ("data", "teacher", "student", "optimizer")
            some = seen.metrics[4:]
            each = {part: float(np.median([m[f"seconds_{part}"] for m in some])) for part in parts}
            seconds = float(np.median([sum(m[f"seconds_{part}"] for part in parts) for m in some]))
            speed = float(np.median([m["tokens_per_second"] for m in some]))
            runs[name].append({"step": seconds, "tokens_per_second": speed, **each})
            print(f"  {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    found = {name: min(some, key=lambda run: run["step"]) for name, some in runs.items()}
    return {"steps": steps, "rounds": options.rounds, "students": found, "runs": runs}
