"""The same top-k entries in other systems' files: how large they are, and how fast they are read to arrays.

array_record + protobuf: as MaxText's script writes it, a tf.train.Example a sequence with `inputs`, `top_k_logits` and
`top_k_indices`, one a group, compressed as array_record does by default. Parquet: lists of lists, as DistillKit's schema has
them, compressed as pyarrow does by default.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from cache_cases import Clock, Skipped, batches_of, best, data_of, model_of, teacher_of

from potstill.cache.build import build
from potstill.cache.reader import CacheReader
from potstill.cache.store import Cache
from potstill.config import StoreConfig
from potstill.losses.dense import target_logits
from potstill.migrate.records import example_features
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import CachedSignal
from potstill.teachers.teacher import Teacher
from potstill.types import Example

Sequence = dict[str, np.ndarray]  # inputs [L], top_k_indices and top_k_logits [L, K]


def peers(k: int) -> Callable[[Any, Path], dict[str, Any]]:
    def run(options: Any, work: Path) -> dict[str, Any]:
        module = _array_record()
        folder, texts = model_of("SmolLM2-135M", options)
        data = data_of(texts, work, 2048, 8_000 if options.quick else 32_000)
        teacher = teacher_of(folder)
        out = work / f"peers-{k}"
        shutil.rmtree(out, ignore_errors=True)
        build(teacher, StoreConfig(kind="top_k", k=k), data, out, name="SmolLM2-135M", batch_tokens=1024)
        cache, sequences, examples = Cache(out), [], []
        with torch.no_grad():
            for batch in batches_of(teacher, data, 1024):
                hidden = teacher.hidden(batch, batch.rows.teacher)
                target, begin = teacher.at_rows(hidden, cache.form.vocabulary), 0
                for example in batch.examples:
                    logits = target_logits(target, slice(begin, begin + example.supervised_tokens))
                    begin += example.supervised_tokens
                    values, ids = logits.topk(k, -1)
                    inputs = example.ids[:-1].astype(np.int64)  # as many positions as have entries
                    sequences.append(
                        {
                            "inputs": inputs,
                            "top_k_logits": values.numpy(),
                            "top_k_indices": ids.numpy().astype(np.int64),
                        }
                    )
                    examples.append(example)
        files = {
            "array_record": work / f"peers-{k}.array_record",
            "parquet": work / f"peers-{k}.parquet",
        }
        _write_array_record(module, files["array_record"], sequences)
        _write_parquet(files["parquet"], sequences)
        tokens = sum(len(example.ids) for example in examples)
        readers: dict[str, Callable[[], int]] = {
            "potstill": lambda: _read_cache(cache, examples),
            "array_record, protobuf": lambda: _read_array_record(module, files["array_record"], _message(), k),
            "array_record, NumPy": lambda: _read_array_record(module, files["array_record"], None, k),
            "parquet": lambda: _read_parquet(files["parquet"], k),
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(options.rounds + 1):
            for name, read in readers.items():
                with Clock() as clock:
                    rows = read()
                assert rows == sum(len(one["inputs"]) for one in sequences)
                runs[name].append(
                    {"per_processor_second": tokens / clock.processor, "tokens_per_second": tokens / clock.seconds}
                )
        sizes = {name: path.stat().st_size for name, path in files.items()}
        sizes |= {"potstill": cache.size}
        found = {}
        for name, some in runs.items():
            size = sizes[name.split(",")[0]]
            found[name] = {"bytes_a_token": size / tokens} | {key: best(some, key) for key in some[0]}
            print(f"  {name}: {found[name]}", file=sys.stderr, flush=True)
        return {
            "k": k,
            "tokens": tokens,
            "vocabulary": cache.form.vocabulary,
            "contenders": found,
            "runs": runs,
        }

    return run


def _array_record() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise Skipped("array-record is not installed: pip install -e '.[import]'") from error
    return array_record_module


def _message() -> Any:
    """tf.train.Example as a class of protobuf's own, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    for name, kind in (("BytesList", 12), ("FloatList", 2), ("Int64List", 3)):
        message = file.message_type.add(name=name)
        listed = message.field.add(name="value", number=1, type=kind, label=3)
        if kind != 12:
            listed.options.packed = True
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        kind = "".join(part.capitalize() for part in name.split("_"))
        feature.field.add(name=name, number=number, type=11, type_name=f".tensorflow.{kind}", label=1, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, type_name=".tensorflow.Feature", label=1)
    features.field.add(name="feature", number=1, type=11, type_name=".tensorflow.Features.FeatureEntry", label=3)
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=11, type_name=".tensorflow.Features", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _write_array_record(module: Any, path: Path, sequences: list[Sequence]) -> None:
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for sequence in sequences:
        record = _message()()
        for name, values in sequence.items():
            feature = record.features.feature[name]
            (feature.float_list if values.dtype.kind == "f" else feature.int64_list).value.extend(
                values.ravel().tolist()
            )
        writer.write(record.SerializeToString())
    writer.close()


def _read_array_record(module: Any, path: Path, message: Any, k: int) -> int:
    reader, rows = module.ArrayRecordReader(str(path)), 0
    for data in reader.read_all():
        if message is None:
            features = example_features(data)
            ids, logits = features["top_k_indices"], features["top_k_logits"]
        else:
            found = message.FromString(data).features.feature
            ids = np.array(found["top_k_indices"].int64_list.value, dtype=np.int64)
            logits = np.array(found["top_k_logits"].float_list.value, dtype=np.float32)
        rows += len(ids.reshape(-1, k).astype(np.int32))
        assert len(logits) == len(ids)
    return rows


def _write_parquet(path: Path, sequences: list[Sequence]) -> None:
    kinds = {"inputs": pa.uint64(), "top_k_indices": pa.list_(pa.uint64()), "top_k_logits": pa.list_(pa.float32())}
    table = {
        name: pa.array([sequence[name].tolist() for sequence in sequences], pa.list_(kind))
        for name, kind in kinds.items()
    }
    pq.write_table(pa.table(table), path, row_group_size=64)


def _read_parquet(path: Path, k: int) -> int:
    rows = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(8, use_threads=False):
            ids, logits = (batch[name].flatten().flatten().to_numpy() for name in ("top_k_indices", "top_k_logits"))
            rows += len(ids.reshape(-1, k).astype(np.int32))
            assert len(logits) == len(ids)
    return rows


def _read_cache(cache: Cache, examples: list[Example]) -> int:
    teacher, rows = Teacher(CachedSignal(CacheReader(cache), cache.form.vocabulary), SameTokenizerView(), "cache"), 0
    for begin in range(0, len(examples), 8):
        made = teacher.prepare(SimpleNamespace(examples=examples[begin : begin + 8]))  # type: ignore[arg-type]
        target: Any = made.signals[0].target
        rows += len(target.ids)
    return rows
