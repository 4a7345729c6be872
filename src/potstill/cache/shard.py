"""One file of a cache: some documents and their index, mapped into memory. D documents."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potstill.cache.document import Document, from_bytes
from potstill.cache.kinds import SignalKind
from potstill.cache.manifest import SHARD, part
from potstill.files import checksums_differ
from potstill.types import PotstillError

MADVISE = getattr(ctypes.CDLL(None), "madvise", None)  # a hint, where the system takes it
DTYPES = {"U8": "u1", "I32": "<i4", "U32": "<u4", "I64": "<i8"}
ARRAYS: Mapping[str, tuple[str, tuple[int, ...]]] = {  # dtype, and the columns of a row
    "keys": ("U8", (16,)),
    "tokens": ("I32", ()),
    "offsets": ("I64", ()),
    "checksums": ("U32", ()),
    "data": ("U8", ()),
}
LARGEST_HEADER = 100_000_000  # bytes, as safetensors has it


@dataclass(frozen=True)
class Shard:
    """One file, mapped into memory."""

    name: str
    keys: npt.NDArray[np.uint8]  # [D, 16]
    tokens: npt.NDArray[np.int32]  # [D]
    offsets: npt.NDArray[np.int64]  # [D + 1], into data
    checksums: npt.NDArray[np.uint32]  # [D], see `checksum`
    data: npt.NDArray[np.uint8]

    def document(self, number: int, form: SignalKind, folder: Path) -> Document:
        if not self.whole(number):
            raise damaged(folder, self.name, f"document {bytes(self.keys[number]).hex()} is not what was written")
        try:
            if self.tokens[number] < 0:
                raise ValueError(f"it has {self.tokens[number]} tokens")
            return from_bytes(form, self._bytes(number), int(self.tokens[number]))
        except ValueError as error:
            what = f"document {bytes(self.keys[number]).hex()} does not fit what the manifest says ({error})"
            raise damaged(folder, self.name, what) from error

    def whole(self, number: int) -> bool:
        """Whether a document is what was written."""
        found = checksum(bytes(self.keys[number]), int(self.tokens[number]), self._bytes(number).data)
        return found == self.checksums[number]

    def expect(self, number: int) -> None:
        """Let the system fetch a document from the disk while others are looked at."""
        here = self._bytes(number)
        begin = here.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        if MADVISE is not None:
            MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(here.ctypes.data + len(here) - begin), mmap.MADV_WILLNEED)

    def _bytes(self, number: int) -> npt.NDArray[np.uint8]:
        return self.data[self.offsets[number] : self.offsets[number + 1]]


def checksum(key: bytes, tokens: int, data: bytes | memoryview) -> int:
    """crc32 of a document's key, its number of tokens (int32) and its bytes: of the index too, without which they mean
    nothing."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<16si", key, tokens)))


def damaged(folder: Path, name: str, what: str) -> PotstillError:
    return PotstillError(
        f"the cache {folder} is damaged: in {name}, {what}. Remove that file and run `potstill cache build` again: it "
        "computes its documents anew, and nothing else is lost"
    )


def shard_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if SHARD.fullmatch(name))


def open_shard(folder: Path, name: str, identity: str) -> Shard:
    """Map a shard. Its size, and that it was written for a cache of this identity, are checked here; its documents'
    checksums when they are read."""
    match = SHARD.fullmatch(name)
    assert match is not None
    path = part(folder, name)
    try:
        size = path.stat().st_size
        if size != int(match[1]):
            raise damaged(folder, name, f"{size:,} bytes are left of {int(match[1]):,}")
        # Not np.memmap: it keeps a file open for each shard, and there may be more of them than a process may have open.
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    except (OSError, RuntimeError) as error:
        raise PotstillError(f"cannot read {path} ({str(error).splitlines()[0]})") from error
    data.flags.writeable = False
    try:
        arrays, written_for = _parsed(data)
    except (ValueError, RecursionError) as error:
        raise damaged(folder, name, f"the header cannot be read ({error})") from error
    shard = Shard(name, **arrays)
    if written_for != identity:
        raise PotstillError(
            f"the cache {folder} is damaged: {name} was written for another cache (of another teacher, kind, signal or "
            "text), "
            "or manifest.json was changed since. Move that file away, or put back the manifest.json it was written with"
        )
    return shard


def _parsed(data: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], str | None]:
    """The arrays of a safetensors file, and the identity that it was written for. As strict as safetensors, and stricter: just
    the arrays of a shard, one after another, from the end of the header to the end of the file. ValueError: it is none."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(len(data) - 8, LARGEST_HEADER):
        raise ValueError(f"{len(data):,} bytes, of which the header is to be {length:,}")
    text = data[8 : 8 + length].tobytes()
    header = json.loads(text.decode()) if text.startswith(b"{") else None
    if not isinstance(header, dict) or set(header) - {"__metadata__"} != set(ARRAYS):
        raise ValueError("it does not name the arrays of a shard")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not strings")
    body, arrays, spans = data[8 + length :], {}, []
    for name, (dtype, columns) in ARRAYS.items():
        begin, end, count = _span(name, header[name], dtype, columns)
        spans.append((begin, end))
        if end <= len(body):
            arrays[name] = body[begin:end].view(DTYPES[dtype]).reshape(count, *columns)
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), len(body)]:
        raise ValueError("its arrays leave holes, overlap, or do not end with the file")
    documents = len(arrays["tokens"])
    if [len(arrays[name]) for name in ("keys", "offsets", "checksums")] != [documents, documents + 1, documents]:
        raise ValueError("its arrays do not fit each other")
    return arrays, metadata.get("identity")


def _span(name: str, entry: Any, dtype: str, columns: tuple[int, ...]) -> tuple[int, int, int]:
    """Where an array begins and ends, and how many rows it has."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] != dtype:
        raise ValueError(f"{name} is not an array of {dtype}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"{name} has a shape or offsets that are no whole numbers")
    if len(offsets) != 2 or len(shape) != 1 + len(columns) or tuple(shape[1:]) != columns:
        raise ValueError(f"{name} has another shape than in a shard")
    begin, end = offsets
    if end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise ValueError(f"{name} has {end - begin:,} bytes, which is not what its shape {shape} takes")
    return begin, end, shape[0]


def whole(folder: Path, name: str) -> bool:
    """Whether a shard is what its name says."""
    match = SHARD.fullmatch(name)
    assert match is not None
    part(folder, name)
    return checksums_differ(folder, {name: {"bytes": int(match[1]), "crc32": int(match[2], 16)}}) is None
