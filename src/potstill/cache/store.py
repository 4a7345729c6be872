"""The cache on disk: a folder with manifest.json and safetensors shards. docs/cache-format.md is the specification.

A shard appears by a rename, under a name that carries its checksum: whatever stands there is whole, or can be told not to be.
Any number of processes may write shards into one folder at once.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from potstill.cache.manifest import FORMAT, HEAD, VERSION, Manifest, part, read_manifest, tokenizer_of
from potstill.cache.shard import Shard, checksum, damaged, open_shard, shard_names, whole
from potstill.files import (
    MANIFEST,
    UNFINISHED,
    checksums,
    checksums_differ,
    could_not_write,
    lock,
    refusal,
    remove,
    write_bytes,
)
from potstill.signals.document import Document, to_bytes
from potstill.signals.kinds import SignalKind
from potstill.types import Example, PotstillError

LOCK = ".lock"  # of who changes the manifest
WRITERS = ".writers"  # shared by all who write: as long as one does, an empty cache is no failed command's
SHARD_BYTES = 128 * 2**20


class Index(NamedTuple):
    """Where documents are: their keys in order, and the shard and the number in it of each."""

    keys: npt.NDArray[np.bytes_]
    shards: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]

    @staticmethod
    def of(shards: Sequence[Shard]) -> Index:
        sizes = [len(shard.keys) for shard in shards]
        keys = np.concatenate([np.zeros((0, 16), np.uint8), *(shard.keys for shard in shards)]).view("S16")[:, 0]
        order = np.argsort(keys, kind="stable")
        numbers = np.arange(len(keys)) - np.repeat(np.cumsum([0, *sizes])[:-1], sizes)
        return Index(keys[order], np.repeat(np.arange(len(sizes)), sizes)[order], numbers[order])

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        wanted = np.frombuffer(bytes.fromhex("".join(keys)), dtype="S16")
        at = np.searchsorted(self.keys, wanted)
        return np.where(np.searchsorted(self.keys, wanted, "right") > at, at, -1)


class Cache:
    """A cache opened for reading. Documents are found by key; nothing is read before it is asked for. `damage`: a list for
    what is wrong with shards, which are then left out; without it that is an error."""

    def __init__(self, folder: Path, damage: list[str] | None = None) -> None:
        self.folder = folder
        self._damage = damage
        self.manifest = read_manifest(folder)
        self.form = self.manifest.form
        self.shards: list[Shard] = []
        self._refreshing = threading.Lock()
        self._index = Index.of(())
        self.refresh()

    def refresh(self) -> None:
        """See what other processes, or this one, have added."""
        with self._refreshing:
            listed = read_manifest(self.folder).shards
            names = shard_names(self.folder)  # after the manifest: another process may list a shard between the two
            damage = []
            if lost := sorted(set(listed) - set(names)):
                damage.append(
                    f"the cache {self.folder} lacks {len(lost)} of its shards ({lost[0]}{', …' if lost[1:] else ''}; "
                    f"{sum(listed[name].documents for name in lost):,} documents): put them back, or run `potstill cache "
                    "build` again, which computes what they held anew"
                )
            new = set(names) - {shard.name for shard in self.shards}
            for name in sorted(new):
                try:
                    self.shards.append(open_shard(self.folder, name, self.manifest.identity))
                except PotstillError as error:
                    damage.append(str(error))
            if new:
                self._index = Index.of(self.shards)
            if self._damage is not None:
                self._damage.extend(damage)
            elif damage:
                raise PotstillError(damage[0])

    def __len__(self) -> int:
        return len(self._index.keys)

    @property
    def tokens(self) -> int:
        return sum(int(shard.tokens.sum()) for shard in self.shards)

    @property
    def size(self) -> int:
        return sum(shard.path.stat().st_size for shard in self.shards)

    def sizes(self) -> str:
        """For people."""
        each = self.size / max(1, self.tokens)
        return (
            f"{len(self):,} documents, {self.tokens:,} tokens, {self.size / 2**20:,.1f} MB ({each:.1f} bytes a token)"
        )

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Where each key is in the index, until it is refreshed; −1 where it is not."""
        return self._index.find(keys)

    def documents(self, keys: Sequence[str]) -> list[Document | None]:
        """The document of each key, None where there is none. Another thread may refresh the index meanwhile."""
        index = self._index
        found = index.find(keys)
        for at in found[found >= 0]:
            self.shards[index.shards[at]].expect(int(index.numbers[at]))
        return [None if at < 0 else self.document(at, index) for at in found]

    def document(self, at: int, index: Index | None = None) -> Document:
        """The document at a place that `find` gave."""
        index = index or self._index
        return self.shards[index.shards[at]].document(int(index.numbers[at]), self.form)

    def check_files(self) -> None:
        """That what stands beside the shards is what was written."""
        check_beside(self.folder, self.manifest)

    def keys(self) -> npt.NDArray[np.uint64]:
        """All keys [documents, 2], in order."""
        return self._index.keys.view(">u8").reshape(-1, 2).astype(np.uint64)


class Writer:
    """Adds documents to a cache. They can be lost until `flush` has returned, never be half there. Until it is closed, nobody
    makes the cache anew with other settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close = weakref.finalize(self, os.close, lock(folder / WRITERS, fcntl.LOCK_SH))
        self.manifest = read_manifest(folder)
        self.identity = self.manifest.identity
        self.documents = self.tokens = self.bytes = 0  # that were added, as rows
        self.size = 0
        self.shard_seconds = math.inf  # after which what waits is due
        self.waiting: dict[str, tuple[int, bytes]] = {}  # key → number of tokens, bytes
        self._began = time.monotonic()

    def add(self, key: str, tokens: int, data: bytes) -> None:
        self.waiting[key] = (tokens, data)
        self.size += len(data)

    def add_rows(self, form: SignalKind, examples: Sequence[Example], streams: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add documents in the teacher's tokens; the streams have the rows of all of them, one after another."""
        begin = 0
        for example in examples:
            assert example.ends is not None
            end = begin + example.supervised_tokens
            rows = {name: stream[begin:end] for name, stream in streams.items()}
            data = to_bytes(form, example.ids, example.ends, example.supervised, rows)
            self.add(example.key, len(example.ids), data)
            self.tokens += len(example.ids)
            self.bytes += len(data)
            begin = end
        self.documents += len(examples)
        if self.due:
            self.flush()

    @property
    def due(self) -> bool:
        """Whether what waits is enough for a shard, or has waited long enough."""
        return self.size >= SHARD_BYTES or time.monotonic() - self._began >= self.shard_seconds

    def flush(self) -> int:
        """Write what waits as one shard; gives its size."""
        if not self.waiting:
            return 0
        keys = sorted(self.waiting)
        tokens = np.array([self.waiting[key][0] for key in keys], dtype=np.int32)
        blobs = [self.waiting[key][1] for key in keys]
        content = safetensors.numpy.save(
            {
                "keys": np.frombuffer(bytes.fromhex("".join(keys)), dtype=np.uint8).reshape(-1, 16),
                "tokens": tokens,
                "offsets": np.cumsum([0, *map(len, blobs)], dtype=np.int64),
                "checksums": np.array([checksum(bytes.fromhex(k), *self.waiting[k]) for k in keys], dtype=np.uint32),
                "data": np.frombuffer(b"".join(blobs), dtype=np.uint8),
            },
            metadata={"format": FORMAT, "version": str(VERSION), "identity": self.identity},
        )
        name = f"shard-{len(content)}-{zlib.crc32(content):08x}.safetensors"
        write_bytes(self.folder / name, content)
        self.waiting, self.size, self._began = {}, 0, time.monotonic()
        with locked(self.folder):
            manifest = read_manifest(self.folder)
            if manifest.identity != self.identity:
                (self.folder / name).unlink()
                raise PotstillError(
                    f"{self.folder / MANIFEST} was changed while this command was building the cache: choose another folder"
                )
            manifest.list_shard(name, len(keys), int(tokens.sum()))
            manifest.write(self.folder)
        return len(content)


def beside_differs(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files beside the shards, or None. A link among them is an error."""
    for name in manifest.files:
        part(folder, name)
    tokenizer_of(folder)
    if manifest.form.has_head and HEAD not in manifest.files:
        return f"its {MANIFEST} has no checksum of {HEAD}"
    return checksums_differ(folder, manifest.files)


def check_beside(folder: Path, manifest: Manifest) -> None:
    """That the files beside the shards are what was written: a head with another number in it is another teacher."""
    if what := beside_differs(folder, manifest):
        raise PotstillError(
            f"the cache {folder} is damaged: {what}. Run the command that made it (`potstill cache build`, or `convert`) "
            "again: it writes that file anew, and nothing else is lost"
        )


def create(folder: Path, manifest: Manifest, fill: Callable[[Path], object]) -> Writer:
    """Make the cache, or check that the one that is there is of the same teacher, text and signal; one that a failed command
    left empty is made anew. `fill(folder)` writes what stands beside the shards; again, where it is missing or damaged. Gives
    who adds to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder), ExitStack() as stack:
            try:  # who has locked it knows that nobody begins to write either
                stack.enter_context(locked(folder, WRITERS, fcntl.LOCK_EX | fcntl.LOCK_NB))
                alone = True
            except BlockingIOError:
                alone = False
            _create(folder, manifest, fill, alone)
            stack.close()
            return Writer(folder)
    except PotstillError:
        raise
    except Exception as error:  # the libraries that write for us raise many kinds when the disk is full
        refused = refusal(folder, error)
        if refused is None:
            raise
        raise could_not_write(folder, refused) from error


def _create(folder: Path, manifest: Manifest, fill: Callable[[Path], object], alone: bool) -> None:
    begun = folder / f"{UNFINISHED}cache"  # what a killed process left here is ours to write again
    there = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    if there is None and not begun.exists():
        _check_vacant(folder)
    for left in folder.glob(f"{UNFINISHED}*") if alone else ():  # what is unfinished has no writer any more
        if left != begun:
            remove(left)
    if there is not None and (difference := there.difference(manifest)):
        _discard(folder, there, difference, alone, begun)
        there = None
    if there is None:
        write_bytes(begun, b"")
    if there is None or beside_differs(folder, there):
        _fill(folder, there or manifest, fill)
    begun.unlink(missing_ok=True)


def _check_vacant(folder: Path) -> None:
    others = [name for name in os.listdir(folder) if name not in (LOCK, WRITERS) and not name.startswith(UNFINISHED)]
    if others:
        raise PotstillError(f"{folder} is not a cache and not empty (there: {min(others)}): choose another folder")


def _discard(folder: Path, manifest: Manifest, difference: str, alone: bool, begun: Path) -> None:
    """Remove an empty cache with other settings; one that is not empty is an error."""
    if not is_empty(folder, manifest):
        raise PotstillError(f"{folder} is a cache with another {difference}: choose another folder, or its settings")
    if not alone:
        raise PotstillError(
            f"another process is building {folder}, with another {difference}: wait for it, or choose another folder"
        )
    beside_differs(folder, manifest)  # before anything is removed: no links
    write_bytes(begun, b"")
    for name in (MANIFEST, *manifest.files):
        part(folder, name).unlink(missing_ok=True)


def _fill(folder: Path, manifest: Manifest, fill: Callable[[Path], object]) -> None:
    """Write the files beside the shards, and the manifest. They appear by renames: somebody may be reading them, and what
    stands in their place may be a link."""
    beside = folder / f"{UNFINISHED}files"
    remove(beside)
    try:
        beside.mkdir()
        fill(beside)
        files = checksums(beside)
        for name in files:
            path = part(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            (beside / name).replace(path)
        for name in set(manifest.files) - set(files):
            part(folder, name).unlink(missing_ok=True)
        manifest.model_copy(update={"files": files}).write(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def is_empty(folder: Path, manifest: Manifest) -> bool:
    """Whether nothing was ever written to a cache: its settings bind nobody."""
    return not manifest.shards and not shard_names(folder)


def begun_cache(folder: Path) -> Manifest | None:
    """The manifest of the cache in a folder, to which a build adds; None where there is none, or an empty one."""
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    return None if manifest is None or is_empty(folder, manifest) else manifest


def adopt(folder: Path) -> tuple[int, list[str]]:
    """Before a build: take up shards that a killed writer did not live to list, and strike off the list those that are gone.
    Gives how many documents were on lost shards, and their names. A shard that is not what its name says is an error."""
    with locked(folder):
        manifest = read_manifest(folder)
        names = shard_names(folder)
        lost = sorted(set(manifest.shards) - set(names))
        documents = sum(manifest.shards.pop(name).documents for name in lost)
        for name in names:
            shard = open_shard(folder, name, manifest.identity)
            if name not in manifest.shards:
                if not whole(folder, name):
                    raise damaged(shard.path, "the checksum in its name is not its own")
                manifest.list_shard(name, len(shard.keys), int(shard.tokens.sum()))
        manifest.write(folder)
    return documents, lost


@contextmanager
def locked(folder: Path, name: str = LOCK, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """One process at a time changes the manifest. Readers need no lock: it is replaced whole."""
    handle = lock(folder / name, how)
    try:
        yield
    finally:
        os.close(handle)
