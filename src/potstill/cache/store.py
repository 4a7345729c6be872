"""The cache on disk: a folder with manifest.json and safetensors shards. docs/cache-format.md is the specification.

A shard appears by a rename, under a name that carries its checksum: whatever stands there is whole, or can be told not to be.
Any number of processes may write shards into one folder at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from potstill.cache.document import Document
from potstill.cache.kinds import KINDS
from potstill.cache.manifest import (
    FORMAT,
    HEAD,
    VERSION,
    check_manifest,
    form_of,
    identity_of,
    part,
    read_manifest,
    tokenizer_of,
)
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
    write_text,
)
from potstill.types import PotstillError

LOCK = ".lock"  # of who changes the manifest
WRITERS = ".writers"  # shared by all who write: as long as one does, an empty cache is no failed command's
LOCKS = (LOCK, WRITERS)
SHARD_BYTES = 128 * 2**20


class Cache:
    """A cache opened for reading. Documents are found by key; nothing is read before it is asked for. `damage`: a list for
    what is wrong with shards, which are then left out; without it that is an error."""

    def __init__(self, folder: Path, damage: list[str] | None = None) -> None:
        self.folder = folder
        self._damage = damage
        self.manifest = read_manifest(folder)
        self.form = form_of(self.manifest)
        self.shards: list[Shard] = []
        self._refreshing = threading.Lock()
        self._index: tuple[npt.NDArray[np.uint64], ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """See what other processes, or this one, have added."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        known = {shard.name for shard in self.shards}
        listed = read_manifest(self.folder)["shards"]
        names = shard_names(self.folder)  # after the manifest: another process may list a shard between the two
        lost = sorted(set(listed) - set(names))
        if lost:
            count = sum(listed[name]["documents"] for name in lost)
            self._wrong(
                PotstillError(
                    f"the cache {self.folder} lacks {len(lost)} of its shards ({lost[0]}{', …' if lost[1:] else ''}; "
                    f"{count:,} "
                    "documents): put them back, or run `potstill cache build` again, which computes what they held anew"
                )
            )
        if self.shards and not set(names) - known:
            return
        identity = identity_of(self.manifest)
        for name in names:
            if name not in known:
                try:
                    self.shards.append(open_shard(self.folder, name, identity))
                except PotstillError as error:
                    self._wrong(error)
        keys = np.concatenate([shard.keys for shard in self.shards]) if self.shards else np.zeros((0, 16), np.uint8)
        words = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
        order = np.argsort(words[:, 0], kind="stable")
        sizes = [len(shard.keys) for shard in self.shards]
        owner = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
        place = np.concatenate([np.arange(n, dtype=np.uint64) for n in sizes]) if sizes else owner
        self._index = (words[order, 0], words[order, 1], owner[order], place[order])

    def _wrong(self, error: PotstillError) -> None:
        if self._damage is None:
            raise error
        self._damage.append(str(error))

    def __len__(self) -> int:
        return len(self._index[0])

    @property
    def tokens(self) -> int:
        return sum(int(shard.tokens.sum()) for shard in self.shards)

    @property
    def size(self) -> int:
        return sum((self.folder / shard.name).stat().st_size for shard in self.shards)

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Where each key is in the index, until it is refreshed; −1 where it is not."""
        return self._find(self._index, keys)

    @staticmethod
    def _find(index: tuple[npt.NDArray[np.uint64], ...], keys: Sequence[str]) -> npt.NDArray[np.int64]:
        high, low = index[:2]
        wanted = np.frombuffer(bytes.fromhex("".join(keys)), dtype=">u8").reshape(-1, 2).astype(np.uint64)
        at = np.searchsorted(high, wanted[:, 0])
        found = np.full(len(keys), -1, dtype=np.int64)
        while True:  # more than once only where two keys begin with the same 64 bits
            inside = at < len(high)
            inside[inside] = high[at[inside]] == wanted[inside, 0]
            if not inside.any():
                return found
            hit = inside.copy()
            hit[inside] = low[at[inside]] == wanted[inside, 1]
            found[hit & (found < 0)] = at[hit & (found < 0)]
            at = np.where(inside & ~hit, at + 1, len(high))

    def document(self, at: int) -> Document:
        """The document at a place that `find` gave."""
        return self._document(self._index, at)

    def documents(self, keys: Sequence[str]) -> list[Document | None]:
        """The document of each key, None where there is none. Another thread may refresh the index meanwhile."""
        index = self._index
        found = self._find(index, keys)
        for at in found[found >= 0]:
            self.shards[int(index[2][at])].expect(int(index[3][at]))
        return [None if at < 0 else self._document(index, int(at)) for at in found]

    def _document(self, index: tuple[npt.NDArray[np.uint64], ...], at: int) -> Document:
        _, _, owner, place = index
        return self.shards[int(owner[at])].document(int(place[at]), self.form, self.folder)

    def check_files(self) -> None:
        """That what stands beside the shards is what was written."""
        check_beside(self.folder, self.manifest)

    def keys(self) -> npt.NDArray[np.uint64]:
        """All keys [documents, 2], in order."""
        return np.stack(self._index[:2], -1)


class Writer:
    """Adds documents to a cache. They can be lost until `flush` has returned, never be half there. Until it is closed, nobody
    makes the cache anew with other settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.close = weakref.finalize(self, os.close, lock(folder / WRITERS, fcntl.LOCK_SH))
        self.identity = identity_of(read_manifest(folder))
        self.size = 0
        self.waiting: dict[str, tuple[int, bytes]] = {}  # key → number of tokens, bytes

    def add(self, key: str, tokens: int, data: bytes) -> None:
        self.waiting[key] = (tokens, data)
        self.size += len(data)

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
        self.waiting, self.size = {}, 0
        with locked(self.folder):
            manifest = read_manifest(self.folder)
            if identity_of(manifest) != self.identity:
                (self.folder / name).unlink()
                raise PotstillError(
                    f"{self.folder / MANIFEST} was changed while this command was building the cache: choose another folder"
                )
            manifest["shards"][name] = {"documents": len(keys), "tokens": int(tokens.sum())}
            _write_manifest(self.folder, manifest)
        return len(content)


def beside_differs(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the files beside the shards, or None. A link among them is an error."""
    for name in manifest["files"]:
        part(folder, name)
    tokenizer_of(folder)
    if KINDS[manifest["kind"]].has_head and HEAD not in manifest["files"]:
        return f"its {MANIFEST} has no checksum of {HEAD}"
    return checksums_differ(folder, manifest["files"])


def check_beside(folder: Path, manifest: Mapping[str, Any]) -> None:
    """That the files beside the shards are what was written: a head with another number in it is another teacher."""
    if what := beside_differs(folder, manifest):
        raise PotstillError(
            f"the cache {folder} is damaged: {what}. Run the command that made it (`potstill cache build`, or `convert`) "
            "again: it writes that file anew, and nothing else is lost"
        )


def create(folder: Path, identity: Mapping[str, Any], fill: Any) -> Writer:
    """Make the cache, or check that the one that is there is of the same teacher, text and signal; one that a failed command
    left empty is made anew. `fill(folder)` writes what stands beside the shards; again, where it is missing or damaged. Gives
    who adds to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            with _alone(folder) as alone:
                _create(folder, identity, fill, alone)
            return Writer(folder)
    except PotstillError:
        raise
    except Exception as error:  # the libraries that write for us raise many kinds when the disk is full
        refused = refusal(folder, error)
        if refused is None:
            raise
        raise could_not_write(folder, refused) from error


def _create(folder: Path, identity: Mapping[str, Any], fill: Any, alone: bool) -> None:
    begun = folder / f"{UNFINISHED}cache"  # what a killed process left here is ours to write again
    manifest = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    others = sorted(name for name in os.listdir(folder) if name not in LOCKS and not name.startswith(UNFINISHED))
    if manifest is None and others and not begun.exists():
        raise PotstillError(f"{folder} is not a cache and not empty (there: {others[0]}): choose another folder")
    if alone:  # what is unfinished has no writer any more
        for left in folder.glob(f"{UNFINISHED}*"):
            if left != begun:
                remove(left)
    if manifest is not None and _differing(manifest, identity) and is_empty(folder, manifest):
        if not alone:
            raise PotstillError(
                f"another process is building {folder}, with another {_difference(manifest, identity)}: wait for it, or "
                "choose "
                "another folder"
            )
        beside_differs(folder, manifest)  # before anything is removed: no links
        write_bytes(begun, b"")
        for name in (MANIFEST, *manifest["files"]):
            part(folder, name).unlink(missing_ok=True)
        manifest = None
    if manifest is not None:
        if differs := _difference(manifest, identity):
            raise PotstillError(f"{folder} is a cache with another {differs}: choose another folder, or its settings")
        begun.unlink(missing_ok=True)
        if beside_differs(folder, manifest):
            _fill(folder, manifest, fill)
        return
    write_bytes(begun, b"")
    new = {"format": FORMAT, "version": VERSION, **identity, "files": {}, "shards": {}}
    check_manifest(new, folder)
    _fill(folder, new, fill)
    begun.unlink()


def _fill(folder: Path, manifest: dict[str, Any], fill: Any) -> None:
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
        for name in set(manifest["files"]) - set(files):
            part(folder, name).unlink(missing_ok=True)
        _write_manifest(folder, {**manifest, "files": files})
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def is_empty(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether nothing was ever written to a cache: its settings bind nobody."""
    return not manifest["shards"] and not shard_names(folder)


def begun_cache(folder: Path) -> dict[str, Any] | None:
    """The manifest of the cache in a folder, to which a build adds; None where there is none, or an empty one."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    return None if is_empty(folder, manifest) else manifest


def _differing(manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs of two caches: there, and here."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, here in identity.items():
        there: Any = manifest.get(key)
        if key == "teacher":  # what it is called does not matter
            there, here = ({k: teacher[k] for k in ("weights", "dtype")} for teacher in (there, here))
        if there != here:
            found[key] = (there, here)
    return found


def _difference(manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """The first thing that differs, in words; nothing where all is the same."""
    for key, (there, here) in _differing(manifest, identity).items():
        if isinstance(there, dict) and isinstance(here, dict):
            parts = [name for name in {**there, **here} if there.get(name) != here.get(name)]
            what = "; ".join(f"{name} {_shown(there.get(name))}, now {_shown(here.get(name))}" for name in parts)
        else:
            what = f"{_shown(there)}, now {_shown(here)}"
        return f"{key.replace('_', ' ')} ({what})"
    return ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def adopt(folder: Path) -> tuple[int, list[str]]:
    """Before a build: take up shards that a killed writer did not live to list, and strike off the list those that are gone.
    Gives how many documents were on lost shards, and their names. A shard that is not what its name says is an error."""
    with locked(folder):
        manifest = read_manifest(folder)
        listed, names = manifest["shards"], shard_names(folder)
        lost = sorted(set(listed) - set(names))
        documents = sum(listed.pop(name)["documents"] for name in lost)
        for name in names:
            shard = open_shard(folder, name, identity_of(manifest))
            if name not in listed:
                if not whole(folder, name):
                    raise damaged(folder, name, "the checksum in its name is not its own")
                listed[name] = {"documents": len(shard.keys), "tokens": int(shard.tokens.sum())}
        _write_manifest(folder, manifest)
    return documents, lost


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    shards = manifest["shards"]
    for name, entry in shards.items():
        size, checksum = name.removesuffix(".safetensors").split("-")[1:]
        entry.update(bytes=int(size), crc32=checksum)
    totals = {key: sum(entry[key] for entry in shards.values()) for key in ("documents", "tokens", "bytes")}
    write_text(folder / MANIFEST, json.dumps({**manifest, **totals, "shards": shards}, indent=1, ensure_ascii=False))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time changes the manifest. Readers need no lock: it is replaced whole."""
    handle = lock(folder / LOCK, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else writes to a cache. Who asks has `locked` it, so that nobody begins to either."""
    try:
        handle = lock(folder / WRITERS, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(handle)
