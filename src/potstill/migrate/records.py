"""Files in which other systems keep top-k entries, read one sequence at a time.

MaxText writes array_record files. A record is one sequence as a tf.train.Example (`inputs` [L], `top_k_indices` and
`top_k_logits` [L·K], and what its data pipeline knew, such as `inputs_segmentation` [L]), or a batch of them as safetensors or
as a pickle. A pickle can run code, and is refused. L tokens, M rows of entries, K entries of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy

from potstill.data.sources import first_line
from potstill.extras import missing_extra
from potstill.types import PotstillError

T = TypeVar("T")
Array = npt.NDArray[Any]
LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)
AT_ONCE = 16  # records, or rows of a parquet file
SEGMENTS = "inputs_segmentation"
BATCH_TOKENS = "tokens"  # what MaxText calls the inputs in a record that is a batch
# tf.train.Example, without its features of bytes. A map is a list of entries.
EXAMPLE = """
name: "tf_example.proto" syntax: "proto3"
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" field { name: "float_list" number: 2 type_name: ".FloatList" }
                               field { name: "int64_list" number: 3 type_name: ".Int64List" } }
message_type { name: "Entry" field { name: "name" number: 1 type: TYPE_STRING }
                             field { name: "feature" number: 2 type_name: ".Feature" } }
message_type { name: "Features" field { name: "entry" number: 1 type_name: ".Entry" label: LABEL_REPEATED } }
message_type { name: "Example" field { name: "features" number: 1 type_name: ".Features" } }
"""


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

        example_message()
    except ImportError as error:
        raise missing_extra("reading array_record files", "import") from error

    def records() -> Iterator[bytes]:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        for begin in range(0, count, AT_ONCE):
            yield from reader.read(list(range(begin, min(begin + AT_ONCE, count))))
        reader.close()  # says what went wrong, also when the file was opened

    for number, data in enumerate(_readable(path, "an array_record", records())):
        yield from _sequences(data, columns, f"{path}, record {number}")


def _readable(path: Path, what: str, parts: Iterable[T]) -> Iterator[T]:
    try:
        yield from parts
    except (RuntimeError, ValueError, IndexError, MemoryError, OSError, pa.ArrowException) as error:
        raise PotstillError(f"{path} cannot be read as {what} file: {first_line(error)}") from error


def _sequences(data: bytes, columns: Mapping[str, str], source: str) -> Iterator[Record]:
    batch = data[8:9] == b"{"
    features = _features(data, batch, source)
    if batch and columns["tokens"] not in features:
        columns = {**columns, "tokens": BATCH_TOKENS}
    if absent := [name for name in columns.values() if name not in features]:
        raise PotstillError(f"{source} has no feature {absent[0]} (there: {', '.join(sorted(features))}): see --column")
    if SEGMENTS in features:
        columns = {**columns, "segments": SEGMENTS}
    if not batch:
        yield _record({role: features[name] for role, name in columns.items()}, None, source)
        return
    sizes = {name: value.shape[:1] for name, value in features.items()}
    if len(set(sizes.values())) > 1 or () in sizes.values():
        raise PotstillError(f"{source} is a batch whose features are of different numbers of sequences: {sizes}")
    for number in range(len(features[columns["tokens"]])):
        arrays = {role: features[name][number].ravel() for role, name in columns.items()}
        yield _record(arrays, None, f"{source}, sequence {number}")


def _features(data: bytes, batch: bool, source: str) -> dict[str, Array]:
    if data[:1] == b"\x80":
        raise PotstillError(
            f"{source} is a pickle, which can run code when it is read: potstill does not read it. MaxText's newer script "
            "writes tf.train.Example: write the file anew with that"
        )
    try:
        return safetensors.numpy.load(data) if batch else example_features(data)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:  # KeyError: of a dtype NumPy lacks
        raise PotstillError(f"{source} is neither a tf.train.Example nor safetensors ({error})") from error


def _record(arrays: Mapping[str, Array], counts: Array | None, source: str, text: str | None = None) -> Record:
    """`arrays`: flat, by role. `counts`: how many entries each row has; None: a row for each token, with as many in each."""
    length, size, number = (len(arrays[role]) for role in ("tokens", "ids", "values"))
    if counts is None and length:
        counts = np.full(length, size // length)
    if counts is None or size != number or size != counts.sum():
        raise PotstillError(
            f"{source} has {length} tokens, {size} ids and {number} values: as many ids as values were expected at each "
            "token, and in one long list the same number at each"
        )
    typed = {
        role: _typed(array, role, source, "iuf" if role in ("values", "normaliser") else "iu")
        for role, array in arrays.items()
    }
    filled = np.arange(counts.max(initial=0)) < counts[:, None]
    ids, values = np.zeros(filled.shape, dtype=np.int64), np.full(filled.shape, -np.inf)
    ids[filled], values[filled] = typed["ids"], typed["values"]
    normaliser, segments = typed.get("normaliser"), typed.get("segments")
    if normaliser is not None:
        if len(normaliser) != len(values):
            raise PotstillError(f"{source} has entries at {len(values)} tokens and {len(normaliser)} normalisers")
        if not np.isfinite(normaliser).all():
            raise PotstillError(f"{source} has a normaliser that is not finite")
        values -= normaliser[:, None]
    if segments is not None and len(segments) != length:
        raise PotstillError(f"{source} has {length} tokens and {len(segments)} numbers of segments")
    return Record(typed["tokens"], ids, values, segments, normaliser is not None, text, source)


def _typed(values: Array, what: str, source: str, kinds: str) -> Array:
    """Of fractions, and of what is true or false, nobody knows which ids they stand for."""
    expected, dtype = ("numbers", np.float64) if "f" in kinds else ("integers", np.int64)
    if values.size and values.dtype.kind not in kinds:
        raise PotstillError(f"{source}: its {what} are of type {values.dtype}, where {expected} were expected")
    if values.size and values.dtype == np.uint64 and int(values.max()) >= 2**63:
        raise PotstillError(f"{source}: among its {what} is {values.max()}")
    return values.astype(dtype)


@cache
def example_message() -> Any:
    """The class of a tf.train.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def example_features(data: bytes) -> dict[str, Array]:
    """The numbers of a serialized tf.train.Example, by name. ValueError: it is none."""
    from google.protobuf.message import DecodeError

    try:
        entries = example_message().FromString(data).features.entry
    except DecodeError as error:
        raise ValueError(error) from error
    integers = {
        e.name: np.array(e.feature.int64_list.value, np.int64) for e in entries if e.feature.HasField("int64_list")
    }
    floats = {
        e.name: np.array(e.feature.float_list.value, np.float32) for e in entries if e.feature.HasField("float_list")
    }
    return integers | floats


def parquet_records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    def batches() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            for role, name in columns.items():
                if there.count(name) != 1:
                    what = "no column" if name not in there else "more than one column"
                    raise PotstillError(f"{path} has {what} {name} (there: {', '.join(there)}): --column {role}=NAME")
            for batch in file.iter_batches(AT_ONCE, columns=list(columns.values())):
                batch.validate(full=True)  # Arrow believes the offsets in a file: wrong ones would read other memory
                yield batch

    number = 0
    for batch in _readable(path, "a parquet", batches()):
        for row in range(batch.num_rows):
            yield _of_cells({role: batch[name][row] for role, name in columns.items()}, f"{path}, record {number}")
            number += 1


def _of_cells(cells: Mapping[str, Any], source: str) -> Record:
    text = cells["text"].as_py() if "text" in cells else None
    if "text" in cells and not isinstance(text, str):
        raise PotstillError(f"{source} holds {cells['text'].type} where a text was expected")
    found = {role: _numbers(cell, source, role) for role, cell in cells.items() if role != "text"}
    counts = [lengths for _, lengths in found.values() if lengths is not None]
    if len(counts) == 2 and not np.array_equal(counts[0], counts[1]):
        raise PotstillError(f"{source} has other numbers of ids than of values at its tokens")
    arrays = {role: numbers for role, (numbers, _) in found.items()}
    return _record(arrays, counts[0] if counts else None, source, text=text)


def _numbers(cell: Any, source: str, role: str) -> tuple[Array, Array | None]:
    """The numbers of a cell, and how many each token has, where there is a list for each."""
    if not isinstance(cell, pa.ListScalar) or cell.values is None:
        what = "nothing" if cell.as_py() is None else str(cell.type)
        raise PotstillError(f"{source} holds {what} where a list was expected")
    numbers, counts = cell.values, None
    if role in ("ids", "values") and isinstance(numbers, LISTS):
        counts = numbers.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        numbers = numbers.flatten()
    if not (pa.types.is_integer(numbers.type) or pa.types.is_floating(numbers.type)):
        what = "numbers, or a list of numbers for each token, were expected"
        raise PotstillError(f"{source} holds {numbers.type} where {what}")
    if numbers.null_count:
        raise PotstillError(f"{source} holds nothing at {numbers.null_count} places where numbers were expected")
    return numbers.to_numpy(zero_copy_only=False), counts
