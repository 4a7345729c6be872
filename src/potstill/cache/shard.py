"""One file of a cache: some documents and their index, mapped into memory. D documents."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors

from potstill.cache.manifest import SHARD, part, shard_facts
from potstill.files import checksums_differ
from potstill.signals.document import Document, from_bytes
from potstill.signals.kinds import SignalKind
from potstill.types import PotstillError

MADVISE = getattr(ctypes.CDLL(None), "madvise", None)  # a hint, where the system takes it
ARRAYS = {"keys": "<u1", "tokens": "<i4", "offsets": "<i8", "checksums": "<u4", "data": "<u1"}


@dataclass(frozen=True)
class Shard:
    """One file, mapped into memory."""

    path: Path
    keys: npt.NDArray[np.uint8]  # [D, 16]
    tokens: npt.NDArray[np.int32]  # [D]
    offsets: npt.NDArray[np.int64]  # [D + 1], into data
    checksums: npt.NDArray[np.uint32]  # [D], see `checksum`
    data: npt.NDArray[np.uint8]

    @property
    def name(self) -> str:
        return self.path.name

    def document(self, number: int, form: SignalKind) -> Document:
        named = f"document {bytes(self.keys[number]).hex()}"
        if not self.whole(number):
            raise damaged(self.path, f"{named} is not what was written")
        try:
            if self.tokens[number] < 0:
                raise ValueError(f"it has {self.tokens[number]} tokens")
            return from_bytes(form, self._bytes(number), int(self.tokens[number]))
        except ValueError as error:
            raise damaged(self.path, f"{named} does not fit what the manifest says ({error})") from error

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


def damaged(path: Path, what: str) -> PotstillError:
    return PotstillError(
        f"the cache {path.parent} is damaged: in {path.name}, {what}. Remove that file and run `potstill cache build` again: "
        "it computes its documents anew, and nothing else is lost"
    )


def shard_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if SHARD.fullmatch(name))


def open_shard(folder: Path, name: str, identity: str) -> Shard:
    """Map a shard. Its size, and that it was written for a cache of this identity, are checked here; its documents'
    checksums when they are read. The file does not stay open: a cache may have more shards than a process may open."""
    path, (expected, _) = part(folder, name), shard_facts(name)
    try:
        if (size := path.stat().st_size) != expected:
            raise damaged(path, f"{size:,} bytes are left of {expected:,}")
        with safetensors.safe_open(path, "pt") as file:  # the other frameworks would copy
            if set(file.keys()) != set(ARRAYS):
                raise ValueError("it does not name the arrays of a shard")
            arrays = {array: file.get_tensor(array).numpy() for array in ARRAYS}
            written_for = (file.metadata() or {}).get("identity")
        for array, values in arrays.items():
            values.flags.writeable = False
            columns = (16,) if array == "keys" else ()
            if values.dtype != ARRAYS[array] or values.shape[1:] != columns or not values.ndim:
                raise ValueError(f"{array} is {values.dtype} {list(values.shape)}")
        documents = len(arrays["tokens"])
        if [len(arrays[array]) for array in ("keys", "offsets", "checksums")] != [documents, documents + 1, documents]:
            raise ValueError("its arrays do not fit each other")
    except OSError as error:
        raise PotstillError(f"cannot read {path} ({error})") from error
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise damaged(path, f"the header cannot be read ({error})") from error
    if written_for != identity:
        raise PotstillError(
            f"the cache {folder} is damaged: {name} was written for another cache (of another teacher, kind, signal or "
            "text), or manifest.json was changed since. Move that file away, or put back the manifest.json it was written with"
        )
    return Shard(path, **arrays)


def whole(folder: Path, name: str) -> bool:
    """Whether a shard is what its name says."""
    part(folder, name)
    size, crc32 = shard_facts(name)
    return checksums_differ(folder, {name: {"bytes": size, "crc32": int(crc32, 16)}}) is None
