"""Files in which other systems keep top-k entries, read one sequence at a time.

MaxText writes array_record files. A record is one sequence as a tf.train.Example (`inputs` [L], `top_k_indices` and
`top_k_logits` [L·K], and what its data pipeline knew, such as `inputs_segmentation` [L]), or a batch of them as safetensors or
as a pickle. A pickle can run code, and is refused. L tokens, M rows of entries, K entries of each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy

from potstill.data.sources import first_line
from potstill.extras import lacking
from potstill.types import PotstillError

Array = npt.NDArray[Any]
AT_ONCE = 16  # records, or rows of a parquet file
SEGMENTS = "inputs_segmentation"
BATCH_TOKENS = "tokens"  # what MaxText calls the inputs in a record that is a batch


@dataclass(frozen=True)
class Record:
    """A sequence and the entries at its tokens."""

    tokens: npt.NDArray[np.int64]  # [L]
    ids: npt.NDArray[np.int64]  # [M, K]
    values: npt.NDArray[np.float64]  # [M, K]; −inf where a token has fewer entries than another
    segments: npt.NDArray[np.int64] | None  # [L]: which document of a packed sequence; 0: padding
    normalised: bool  # the values are logits less their normaliser
    text: str | None
    source: str


def maxtext_records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise lacking("reading array_record files", "import") from error
    for number, data in enumerate(_array_records(array_record_module, path)):
        yield from _sequences(data, columns, f"{path}, record {number}")


def _array_records(module: Any, path: Path) -> Iterator[bytes]:
    try:
        reader = module.ArrayRecordReader(str(path))
        count = reader.num_records()
        for begin in range(0, count, AT_ONCE):
            yield from reader.read(list(range(begin, min(begin + AT_ONCE, count))))
        reader.close()  # says what went wrong, also when the file was opened
    except (RuntimeError, ValueError, IndexError, MemoryError, OSError) as error:
        raise PotstillError(f"{path} cannot be read as an array_record file: {first_line(error)}") from error


def _sequences(data: bytes, columns: Mapping[str, str], source: str) -> Iterator[Record]:
    if data[:1] == b"\x80":
        raise PotstillError(
            f"{source} is a pickle, which can run code when it is read: potstill does not read it. MaxText's newer script "
            "writes tf.train.Example: write the file anew with that"
        )
    if data[8:9] == b"{":
        try:
            features = safetensors.numpy.load(data)
        except (
            safetensors.SafetensorError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:  # the others: of a dtype NumPy lacks
            raise PotstillError(f"{source} is neither a tf.train.Example nor safetensors ({error})") from error
        tokens = columns["tokens"] if columns["tokens"] in features else BATCH_TOKENS
        sizes = {name: value.shape[:1] for name, value in features.items()}
        if len(set(sizes.values())) > 1 or () in sizes.values():
            raise PotstillError(f"{source} is a batch whose features are of different numbers of sequences: {sizes}")
        for number in range(len(_feature(features, tokens, source))):
            one = {name: value[number] for name, value in features.items()}
            yield _record(one, {**columns, "tokens": tokens}, f"{source}, sequence {number}")
        return
    try:
        features = example_features(data)
    except (IndexError, ValueError, struct.error) as error:
        raise PotstillError(f"{source} is neither a tf.train.Example nor safetensors ({error})") from error
    yield _record(features, columns, source)


def _record(features: Mapping[str, Array], columns: Mapping[str, str], source: str) -> Record:
    tokens = _whole(_feature(features, columns["tokens"], source), "tokens", source).ravel()
    ids = _whole(_feature(features, columns["ids"], source), "ids", source)
    values = _feature(features, columns["values"], source)
    if not len(tokens) or ids.size != values.size or ids.size % len(tokens):
        raise PotstillError(
            f"{source} has {len(tokens)} tokens, {ids.size} ids and {values.size} values: as many ids as values were "
            "expected, and the same number at each token"
        )
    values = _real(values, "values", source).reshape(len(tokens), -1)
    normaliser = columns.get("normaliser")
    if normaliser is not None:
        values = _less(values, _real(_feature(features, normaliser, source), "normaliser", source), source)
    segments = _whole(features[SEGMENTS], SEGMENTS, source).ravel() if SEGMENTS in features else None
    if segments is not None and len(segments) != len(tokens):
        raise PotstillError(f"{source} has {len(tokens)} tokens and {len(segments)} numbers of segments")
    return Record(tokens, ids.reshape(values.shape), values, segments, normaliser is not None, None, source)


def _whole(values: Array, what: str, source: str) -> npt.NDArray[np.int64]:
    """As integers. Of fractions, and of what is true or false, nobody knows which ids they stand for."""
    if values.size and values.dtype.kind not in "iu":
        raise PotstillError(f"{source}: its {what} are of type {values.dtype}, where integers were expected")
    if values.size and int(values.max()) >= 2**63:
        raise PotstillError(f"{source}: among its {what} is {values.max()}")
    return values.astype(np.int64)


def _real(values: Array, what: str, source: str) -> npt.NDArray[np.float64]:
    if values.size and values.dtype.kind not in "iuf":
        raise PotstillError(f"{source}: its {what} are of type {values.dtype}, where numbers were expected")
    return values.astype(np.float64)


def _less(values: npt.NDArray[np.float64], normaliser: npt.NDArray[np.float64], source: str) -> npt.NDArray[np.float64]:
    """Logits less their normaliser, of which there is one a row."""
    if normaliser.size != len(values):
        raise PotstillError(f"{source} has entries at {len(values)} tokens and {normaliser.size} normalisers")
    if not np.isfinite(normaliser).all():
        raise PotstillError(f"{source} has a normaliser that is not finite")
    return values - normaliser.reshape(-1, 1)


def _feature(features: Mapping[str, Array], name: str, source: str) -> Array:
    if name not in features:
        raise PotstillError(f"{source} has no feature {name} (there: {', '.join(sorted(features))}): see --column")
    return features[name]


def example_features(data: bytes) -> dict[str, Array]:
    """The numbers of a serialized tf.train.Example, by name. Features of bytes are left out."""
    features: dict[str, Array] = {}
    for _, inner in _fields(memoryview(data), 1):  # Example.features
        for _, entry in _fields(inner, 1):  # Features.feature, a map
            name = b"".join(bytes(value) for _, value in _fields(entry, 1)).decode()
            for _, feature in _fields(entry, 2):
                for number, values in _fields(feature):
                    if number == 2:  # float_list
                        parts = [np.frombuffer(part, dtype="<f4") for _, part in _fields(values, 1)]
                    elif number == 3:  # int64_list
                        parts = [varints(part) for _, part in _fields(values, 1)]
                    else:
                        continue
                    features[name] = np.concatenate(parts) if parts else np.zeros(0)
    return features


def _fields(data: memoryview, wanted: int | None = None) -> Iterator[tuple[int, memoryview]]:
    """The fields of a protobuf message, as (number, bytes): a packed list and a single number look alike."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            begin = at
            _, at = _varint(data, at)
        elif wire == 2:
            size, begin = _varint(data, at)
            at = begin + size
        elif wire in (1, 5):
            begin, at = at, at + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data):
            raise ValueError("it ends too early")
        if wanted in (None, number):
            yield number, data[begin:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def varints(data: memoryview) -> npt.NDArray[np.int64]:
    """All of a packed list of integers: each ends with the byte whose highest bit is not set."""
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    values = np.zeros(len(ends), dtype=np.uint64)
    sizes = ends - begins + 1
    for place in range(int(sizes.max(initial=0))):
        longer = np.flatnonzero(sizes > place)
        values[longer] |= (raw[begins[longer] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def parquet_records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    number = 0
    for batch in _batches(path, columns):
        for row in range(batch.num_rows):
            yield _row({role: batch[name][row] for role, name in columns.items()}, f"{path}, record {number}")
            number += 1


def _batches(path: Path, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            for role, name in columns.items():
                if there.count(name) != 1:
                    what = "no column" if name not in there else "more than one column"
                    raise PotstillError(f"{path} has {what} {name} (there: {', '.join(there)}): --column {role}=NAME")
            for batch in file.iter_batches(AT_ONCE, columns=list(columns.values())):
                batch.validate(full=True)  # Arrow believes the offsets in a file: wrong ones would read other memory
                yield batch
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        raise PotstillError(f"{path} cannot be read as a parquet file: {first_line(error)}") from error


def _row(cells: Mapping[str, Any], source: str) -> Record:
    lists = {role: _list(cell, source) for role, cell in cells.items() if role != "text"}
    tokens = _whole(_numbers(lists["tokens"], source), "tokens", source)
    ids, id_counts = _lists(lists["ids"], len(tokens), source)
    values, counts = _lists(lists["values"], len(tokens), source)
    if not np.array_equal(id_counts, counts):
        raise PotstillError(f"{source} has other numbers of ids than of values at its tokens")
    shape = (len(counts), int(counts.max(initial=0)))
    filled = np.arange(shape[1]) < counts[:, None]
    id_matrix, matrix = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf)
    id_matrix[filled], matrix[filled] = _whole(ids, "ids", source), _real(values, "values", source)
    if "normaliser" in lists:
        matrix = _less(matrix, _real(_numbers(lists["normaliser"], source), "normaliser", source), source)
    text = cells["text"].as_py() if "text" in cells else None
    if "text" in cells and not isinstance(text, str):
        raise PotstillError(f"{source} holds {cells['text'].type} where a text was expected")
    return Record(tokens, id_matrix, matrix, None, "normaliser" in cells, text, source)


def _lists(cell: Any, tokens: int, source: str) -> tuple[Array, Array]:
    """The numbers of a list a token, and how many each list has; of one long list as many at each token."""
    if pa.types.is_list(cell.type) or pa.types.is_large_list(cell.type) or pa.types.is_fixed_size_list(cell.type):
        counts = np.array([0 if count is None else count for count in cell.value_lengths().to_pylist()], dtype=np.int64)
        return _numbers(cell.flatten(), source), counts
    flat = _numbers(cell, source)
    if not tokens or len(flat) % tokens:
        raise PotstillError(f"{source} has {tokens} tokens and {len(flat)} entries, which is no whole number at each")
    return flat, np.full(tokens, len(flat) // tokens)


def _list(cell: Any, source: str) -> Any:
    """What a cell with a list holds."""
    if not isinstance(cell, pa.ListScalar) or cell.values is None:
        what = "nothing" if cell.as_py() is None else str(cell.type)
        raise PotstillError(f"{source} holds {what} where a list was expected")
    return cell.values


def _numbers(values: Any, source: str) -> Array:
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise PotstillError(f"{source} holds {values.type} where numbers, or a list of numbers a token, were expected")
    if values.null_count:
        raise PotstillError(f"{source} holds nothing at {values.null_count} places where numbers were expected")
    return values.to_numpy(zero_copy_only=False)
