"""One file of a cache: some documents and their index, mapped into memory. D documents."""

from __future__ import annotations

import ctypes
import json
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

from potstill.files import checksums_differ
from potstill.teachers.codec import Document, Format, from_bytes
from potstill.teachers.manifest import SHARD, part
from potstill.types import PotstillError

MADVISE = getattr(ctypes.CDLL(None), "madvise", None)  # a hint, where the system takes it
DTYPES = {"U8": "u1", "I32": "<i4", "U32": "<u4", "I64": "<i8"}


@dataclass(frozen=True)
class Shard:
    """One file, mapped into memory."""

    name: str
    keys: npt.NDArray[np.uint8]  # [D, 16]
    tokens: npt.NDArray[np.int32]  # [D]
    offsets: npt.NDArray[np.int64]  # [D + 1], into data
    checksums: npt.NDArray[np.uint32]  # [D], see `checksum`
    data: npt.NDArray[np.uint8]

    def document(self, number: int, form: Format, folder: Path) -> Document:
        if not self.whole(number):
            raise damaged(folder, self.name, f"document {bytes(self.keys[number]).hex()} is not what was written")
        try:
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
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        written_for = header.get("__metadata__", {}).get("identity")
        arrays = {
            key: _array(data[8 + length :], header[key]) for key in ("keys", "tokens", "offsets", "checksums", "data")
        }
        shard = Shard(name, **arrays)
        documents = len(shard.tokens)
        if (shard.keys.shape, len(shard.offsets), len(shard.checksums)) != ((documents, 16), documents + 1, documents):
            raise ValueError("its arrays do not fit each other")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise damaged(folder, name, f"the header cannot be read ({error})") from error
    if written_for != identity:
        raise PotstillError(
            f"the cache {folder} is damaged: {name} was written for another cache (of another teacher, kind, signal or text), "
            "or manifest.json was changed since. Move that file away, or put back the manifest.json it was written with"
        )
    return shard


def _array(data: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    begin, end = entry["data_offsets"]
    return data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def whole(folder: Path, name: str) -> bool:
    """Whether a shard is what its name says."""
    match = SHARD.fullmatch(name)
    assert match is not None
    part(folder, name)
    return checksums_differ(folder, {name: {"bytes": int(match[1]), "crc32": int(match[2], 16)}}) is None
