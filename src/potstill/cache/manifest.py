"""What a cache says of itself. A cache may come from anyone, so all of manifest.json is checked before any of it is used, and
a name in it becomes a path only here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from potstill.cache.kinds import KINDS, SignalKind, first_error, read_kind, shown
from potstill.files import MANIFEST
from potstill.types import PotstillError

FORMAT, VERSION = "potstill cache", 2
IMPORTED = "imported"  # in place of the fingerprint of weights that potstill never saw
IDENTITY = ("format", "version", "kind", "signal", "teacher", "tokenizer", "chat", "piece_bytes")  # alike in all shards
SHARD = re.compile(r"shard-([0-9]{1,15})-([0-9a-f]{8})\.safetensors")  # bytes, crc32
HEAD, TOKENIZER = "head.safetensors", "tokenizer"
PROBE = "probe.json"  # of a server that does not say what its weights are: see openai.py
BESIDE = re.compile(rf"{re.escape(HEAD)}|{re.escape(PROBE)}|{TOKENIZER}(/\w[\w .-]*){{1,2}}")


def _plain(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError("there are control characters in it")
    return text


Words = Annotated[str, AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Teacher(_Checked):
    model: Words
    revision: Words | None = None
    weights: Words
    dtype: Words


class _Chat(_Checked):
    template: Words | None
    arguments: Annotated[dict[str, Any], Field(alias="kwargs")]


class _File(_Checked):
    bytes: Count
    crc32: Count


class _Shard(_Checked):
    documents: Count
    tokens: Count


class _Imported(_Checked):
    layout: Words
    values: Words
    rest: Literal["known", "partial", "none"]


class _Manifest(_Checked):
    kind: str
    signal: dict[str, Any]
    teacher: _Teacher
    tokenizer: Words
    chat: _Chat
    piece_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    imported: _Imported | None = None
    files: dict[str, _File]
    shards: dict[str, _Shard]

    @model_validator(mode="after")
    def _fits(self) -> _Manifest:
        for name in self.files:
            if not BESIDE.fullmatch(name):
                raise ValueError(f"files names {name!r}, and no cache has such a file")
        for name in self.shards:
            if not SHARD.fullmatch(name):
                raise ValueError(f"shards names {name!r}, and no shard is called so")
        if missing := signal_keys(read_kind(self.kind, self.signal)).keys() - self.signal.keys():
            raise ValueError(f"signal lacks {', '.join(sorted(missing))}")
        return self


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(part(folder, MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PotstillError(
            f"{folder} is not a cache: it has no {MANIFEST}. `potstill cache build` makes one"
        ) from None
    except NotADirectoryError:
        raise PotstillError(
            f"{folder} is a file, and a cache is a folder: name the one that `potstill cache build` made"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PotstillError(f"{folder / MANIFEST} cannot be read ({error})") from error
    check_manifest(manifest, folder)
    return manifest


def check_manifest(manifest: Any, folder: Path) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PotstillError(f"{folder / MANIFEST} is not the manifest of a potstill cache")
    if manifest.get("version") != VERSION or manifest.get("kind") not in list(KINDS):
        what = f"version {shown(manifest.get('version'))}, kind {shown(manifest.get('kind'))}"
        raise PotstillError(
            f"{folder} is a cache of {what}, which this potstill cannot read (it reads version {VERSION}): build it anew, in "
            "another folder"
        )
    missing = [key for key in (*IDENTITY, "files", "shards") if key not in manifest]
    if missing:
        raise PotstillError(f"{folder / MANIFEST} lacks {', '.join(missing)}: it is not what potstill wrote")
    try:
        _Manifest.model_validate(manifest)
        identity_of(manifest)
    except ValidationError as error:
        raise PotstillError(f"{folder / MANIFEST} is not what potstill wrote ({first_error(error)})") from None
    except (ValueError, RecursionError) as error:
        raise PotstillError(f"{folder / MANIFEST} is not what potstill wrote ({error!r})") from error


def identity_of(manifest: Mapping[str, Any]) -> str:
    """A hash of what decides how a cache's bytes are read and what they mean. Every shard has it."""
    kept = {key: manifest[key] for key in ("kind", "signal", "tokenizer", "chat", "piece_bytes")}
    kept["teacher"] = {key: manifest["teacher"][key] for key in ("weights", "dtype")}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def form_of(manifest: Mapping[str, Any]) -> SignalKind:
    return read_kind(manifest["kind"], manifest["signal"])


def signal_keys(form: SignalKind) -> dict[str, Any]:
    """A kind as the manifest records it."""
    return {**asdict(form), "temperatures": list(form.temperatures)}


def part(folder: Path, name: str) -> Path:
    """The path of a cache's file. Only names that a writer gives, and no links: what they lead to is not the cache's."""
    if not (name == MANIFEST or SHARD.fullmatch(name) or BESIDE.fullmatch(name)):
        raise PotstillError(f"the cache {folder} names a file {name!r}, and no cache has such a one: do not use it")
    path = folder
    *folders, last = name.split("/")
    for word, is_right in [*((word, stat.S_ISDIR) for word in folders), (last, stat.S_ISREG)]:
        path = path / word
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            break
        if not is_right(mode):
            raise _not_plain(folder, path)
    return folder / name


def tokenizer_of(folder: Path) -> Path:
    """Where a cache's tokenizer is. Who loads it reads whatever is there, so nothing of it may be a link."""
    for parent, folders, files in os.walk(folder / TOKENIZER):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(parent, name)):
                raise _not_plain(folder, Path(parent) / name)
    if (folder / TOKENIZER).is_symlink():
        raise _not_plain(folder, folder / TOKENIZER)
    return folder / TOKENIZER


def _not_plain(folder: Path, path: Path) -> PotstillError:
    return PotstillError(
        f"the cache {folder} is not as potstill writes it: {path.relative_to(folder)} is a link or no plain file, and "
        "may lead "
        "out of the cache: copy the cache with its links followed (cp -rL), if you trust where they lead"
    )
