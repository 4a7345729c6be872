"""Arrow batches from files and folders that may be another's: none is read before it is validated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

ROWS_AT_ONCE = 256  # turned into Python objects together


class Unchecked:
    """The batches of a data set from a folder, which may be another's: each is validated before its first row is read (as in
    `rows_of`), and not all of them before the first step, for that would read the whole set."""

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


def rows_of(
    batches: Iterator[pa.RecordBatch], first: int, skip: int, path: str
) -> Iterator[tuple[int, dict[str, Any], str]]:
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
