"""Where records come from: jsonl, json, parquet, arrow and txt files, here or elsewhere, and Hugging Face data sets.

A source gives its records in an order that depends on (seed, epoch) alone, and can begin again at any of them: a
position is (part, record), where a part is a file in the epoch's order, or the one data set.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from potstill.config import SourceConfig
from potstill.shipped import locate
from potstill.storage import is_address, matching, open_binary, size, suffix
from potstill.types import PotstillError

Record = dict[str, Any]
Position = tuple[int, int]
Records = Iterator[tuple[int, Record, str]]  # numbered, with where each is
ROWS_AT_ONCE = 256  # turned into Python objects together
ROLES = ("prompt", "completion", "messages", "tools")  # keys of the recipe that name columns; else it is text


def generator(seed: int, *words: int) -> np.random.Generator:
    """A random generator for one purpose: equal words give equal numbers, whatever was drawn elsewhere."""
    return np.random.default_rng([seed % 2**64, *words])


def first_line(error: Exception) -> str:
    """What a library's error says, short enough to stand inside one sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Damage in a file can be anything to the library that reads it, and so can what a network does."""
    try:
        yield
    except PotstillError:
        raise
    except Exception as error:
        # The error's kind says more than a bare key or number does.
        kind = "" if isinstance(error, OSError | pa.ArrowException) else f"{type(error).__name__}: "
        raise PotstillError(f"{what} cannot be read: {kind}{first_line(error)}") from error


class Source:
    """One entry of `data.sources`. `key` is its place in the recipe, for messages; `further` are columns that teachers read."""

    def __init__(
        self, config: SourceConfig, key: str, *, seed: int, shuffle: bool, further: Sequence[str] = ()
    ) -> None:
        self.config, self.key, self.seed, self.shuffle = config, key, seed, shuffle
        named = {column: role for role in ROLES if (column := getattr(config, role)) is not None}
        self.columns = dict.fromkeys(further, "columns") | (named or {config.text or "text": "text"})
        self._dataset: Any = None
        self._dataset_fingerprint = ""
        self._unchecked: Unchecked | None = None
        self._paths = _paths(config.files, key) if config.files is not None else []
        # A saved folder is here already, and has to be checked before it is read: see Unchecked.
        self._saved = config.dataset is not None and _is_saved(_folder(config.dataset))
        self._streams = config.streaming and not self._saved

    def records(self, epoch: int, start: Position = (0, 0)) -> Iterator[tuple[Record, str, Position]]:
        """The records of `epoch` from `start` on: each with where it is (for messages) and its own position."""
        name = self.config.dataset
        if name is not None:
            with _reading(f"{self.key}.dataset: {name}"):
                for number, record, where in self._from_dataset(name, epoch, start[1]):
                    yield self._without_padding(record), where, (0, number)
            return
        order = np.arange(len(self._paths))
        if self.shuffle:
            order = generator(self.seed, 1, epoch).permutation(len(self._paths))
        offered = self.config.tools is None or start != (0, 0)
        for part in range(start[0], len(order)):
            path = self._paths[int(order[part])]
            kind, skip = suffix(path), start[1] if part == start[0] else 0
            with _reading(f"{self.key}.files: {path}"):
                for number, record, where in READERS[kind](path, skip, self):
                    offered = offered or self.config.tools in record
                    record = self._without_padding(record) if kind in COLUMNAR else self._with_tools(record)
                    self.check_columns(record, where)
                    yield record, where, (part, number)
        if not offered:
            raise PotstillError(
                f"{self.key}.tools: no record has a column {self.config.tools}; leave tools out, or mend its name"
            )

    def _with_tools(self, record: Record) -> Record:
        """A record of JSON may leave its tools out. One that has a column of nearly that name is left as it is, and refused."""
        column = self.config.tools
        if column is None or column in record:
            return record
        near = difflib.get_close_matches(column, set(record) - set(self.columns), 1, 0.7)
        return record if near else {**record, column: None}

    def _without_padding(self, record: Record) -> Record:
        """Columns of one type give every message and every tool the keys of all others, with null as their value."""
        nested = ("messages", "tools")
        return {c: _without_nulls(v) if self.columns.get(c) in nested else v for c, v in record.items()}

    def fingerprint(self) -> str | None:
        """What is to be read, short, to notice that it has changed; None of a stream, which shows only what it gives."""
        if self.config.streaming:
            return None
        if self.config.dataset is not None:
            rows = len(self._opened(self.config.dataset))
            return f"{rows} rows, {self._dataset_fingerprint}"
        files = [(os.path.basename(path), size(path), self._rows_of(path)) for path in self._paths]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
        total = sum(size for _, size, _ in files)
        return f"{len(files)} {'file' if len(files) == 1 else 'files'} of {total} bytes, {digest}"

    def _rows_of(self, path: str) -> int | None:
        """Of a parquet file, which says so in its last bytes."""
        if suffix(path) != ".parquet":
            return None
        with _reading(f"{self.key}.files: {path}"), _parquet(path) as file:
            return int(file.metadata.num_rows)

    def _opened(self, name: str) -> Any:
        if self._dataset is None:
            dataset = _load_dataset(self.config, name, self.key)
            if not self._streams:
                self._dataset_fingerprint = dataset._fingerprint  # of all columns, before some are chosen
            if dataset.column_names is not None:
                self.check_columns(dataset.column_names, f"the data set {name}")
                dataset = dataset.select_columns(list(self.columns))
            self._unchecked = Unchecked(dataset) if self._saved else None
            self._dataset = dataset
        return self._dataset

    def _from_dataset(self, name: str, epoch: int, start: int) -> Records:
        dataset = self._opened(name)
        if self._streams:
            seed = int(generator(self.seed, 1, epoch).integers(2**31))
            rows = dataset.shuffle(seed=seed, buffer_size=1) if self.shuffle else dataset
            for number, record in enumerate(rows.skip(start) if start else rows, start):
                where = f"{name}, record {number + 1}"
                self.check_columns(record, where)
                yield number, record, where
            return
        size = len(dataset)
        order = generator(self.seed, 2, epoch).permutation(size) if self.shuffle else np.arange(size)
        for begin in range(start, size, ROWS_AT_ONCE):
            rows_here = order[begin : begin + ROWS_AT_ONCE]
            if self._unchecked is not None:
                self._unchecked.check(rows_here)
            columns = dataset[rows_here.tolist()]
            for offset, row in enumerate(rows_here.tolist()):
                yield begin + offset, {c: columns[c][offset] for c in self.columns}, f"{name}, record {row + 1}"

    def check_columns(self, there: Collection[str], where: str) -> None:
        """Every column the recipe names is there, or one sentence that says what is there instead."""
        for column, role in self.columns.items():
            if column not in there:
                near = difflib.get_close_matches(column, there, 1, 0.5)
                hint = f"did you mean {role}: {near[0]}?" if near else f"set {role} to one of them"
                listed = ", ".join(there) or "none at all"
                raise PotstillError(f"{self.key}.{role}: {where} has no column {column} (there: {listed}); {hint}")


class Unchecked:
    """The batches of a data set from a folder, which may be another's: each is validated before its first row is read (as in
    `_rows_of`), and not all of them before the first step, for that would read the whole set."""

    def __init__(self, dataset: Any) -> None:
        self._batches: list[pa.RecordBatch | None] = dataset.data.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches if batch is not None])
        self._indices = dataset._indices is not None  # rows are others than they are called

    def check(self, rows: npt.NDArray[np.int64]) -> None:
        touched = np.unique(np.searchsorted(self._ends, rows, side="right"))
        for place in range(len(self._batches)) if self._indices else touched.tolist():
            batch = self._batches[place]
            if batch is not None:
                batch.validate(full=True)
                self._batches[place] = None


def _rows_of(batches: Iterator[pa.RecordBatch], first: int, skip: int, path: str) -> Records:
    """The rows of columnar batches, the first of them numbered `first`, without those before number `skip`."""
    for batch in batches:
        if first + batch.num_rows <= skip:  # a resume does not read what it leaves out
            first += batch.num_rows
            continue
        # Arrow believes the offsets in a file: wrong ones would read other memory, or end the process.
        batch.validate(full=True)
        for begin in range(max(0, skip - first), batch.num_rows, ROWS_AT_ONCE):
            for offset, record in enumerate(batch.slice(begin, ROWS_AT_ONCE).to_pylist()):
                number = first + begin + offset
                yield number, record, f"{path}, record {number + 1}"
        first += batch.num_rows


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _paths(files: str | list[str], key: str) -> list[str]:
    patterns = [files] if isinstance(files, str) else files
    found = [path for pattern in patterns for path in matching(pattern, f"{key}.files")]
    for path in found:
        if suffix(path) not in READERS:
            raise PotstillError(f"{key}.files: {path} is of no known kind; known by their ending: {', '.join(READERS)}")
    if not found:
        raise PotstillError(f"{key}.files is empty; name at least one file")
    return found


def _read_lines(path: str, skip: int, source: Source) -> Records:
    with open_binary(path) as opened, gzip.open(opened) if suffix(path).endswith(".gz") else opened as file:
        number = 0
        for line_number, line in enumerate(file, 1):
            if line_number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            number += 1
            if number > skip:
                where = f"{path}, line {line_number}"
                try:
                    record = json.loads(line)
                except UnicodeDecodeError as error:
                    raise PotstillError(
                        f"{where} is not UTF-8 ({first_line(error)}); save the file as UTF-8"
                    ) from error
                except (ValueError, RecursionError) as error:
                    raise PotstillError(f"{where} is not JSON: {first_line(error)}") from error
                yield number - 1, _record(record, where), where


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise PotstillError(f"{where} holds a {type(value).__name__} where a record {{…}} was expected")
    return value


def _read_json(path: str, skip: int, source: Source) -> Records:
    """A `.json` file is lines of records, or one list of them, which is read whole."""
    with open_binary(path) as file:
        head = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not head.startswith(b"["):
            yield from _read_lines(path, skip, source)
            return
        file.seek(0)
        try:
            records = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise PotstillError(f"{path} is not JSON: {first_line(error)}") from error
    for number, record in enumerate(records[skip:], skip):
        where = f"{path}, record {number + 1}"
        yield number, _record(record, where), where


def _read_text(path: str, skip: int, source: Source) -> Records:
    """A `.txt` file is one document."""
    if skip:
        return
    with open_binary(path) as file:
        data = file.read()
    try:
        yield 0, {"text": data.decode()}, path
    except UnicodeDecodeError as error:
        raise PotstillError(f"{path} is not UTF-8 ({first_line(error)}); save it as UTF-8") from error


def _parquet(path: str) -> pq.ParquetFile:
    if not is_address(path):
        return pq.ParquetFile(path)
    return pq.ParquetFile(open_binary(path), pre_buffer=True)  # a few large requests, where each costs a round trip


def _read_parquet(path: str, skip: int, source: Source) -> Records:
    with _parquet(path) as file:
        source.check_columns(file.schema_arrow.names, path)
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > skip:
                batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(source.columns))
                yield from _rows_of(batches, first, skip, path)
            first += rows


def _read_arrow(path: str, skip: int, source: Source) -> Records:
    # A batch may be as large as the file: from a disk it is not held, but paged in and out.
    with pa.PythonFile(open_binary(path), "r") if is_address(path) else pa.memory_map(path) as file:
        try:
            reader: Any = pa.ipc.open_file(file)
            batches: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = pa.ipc.open_stream(file)
            batches = iter(reader)
        source.check_columns(reader.schema.names, path)
        yield from _rows_of((batch.select(list(source.columns)) for batch in batches), 0, skip, path)


READERS = {
    ".jsonl": _read_lines,
    ".jsonl.gz": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
COLUMNAR = (".parquet", ".arrow")


def _folder(dataset: str) -> str:
    return os.path.expanduser(locate(dataset))


def _is_saved(path: str) -> bool:
    """Whether it is a folder that `save_to_disk` wrote."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def _load_dataset(config: SourceConfig, name: str, key: str) -> Any:
    import datasets  # here, because importing it takes seconds and most runs read files

    path = _folder(name)
    try:
        if _is_saved(path):
            loaded = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(
                path, config.name, split=config.split, revision=config.revision, streaming=config.streaming
            )
    except Exception as error:  # whatever the hub, the network or the data set's own files raise
        raise PotstillError(f"{key}.dataset: cannot load {name} (split {config.split}): {first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise PotstillError(f"{key}.split: {path} has no split {config.split} (there: {', '.join(loaded)})")
        loaded = loaded[config.split]
    return loaded
