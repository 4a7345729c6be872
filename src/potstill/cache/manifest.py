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

from potstill.cache.codec import DTYPES, KINDS, LARGEST_VOCABULARY, Format
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


class _Signal(_Checked):
    model_config = ConfigDict(extra="forbid")

    vocabulary: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]
    k: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] = 0
    temperatures: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=1000)]
    tail_samples: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] = 0
    num_samples: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] = 0
    seed: Count = 0
    width: Annotated[int, Field(ge=0, le=2**24)] = 0
    dtype: str = "float32"


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
    signal: _Signal
    teacher: _Teacher
    tokenizer: Words
    chat: _Chat
    piece_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    imported: _Imported | None = None
    files: dict[str, _File]
    shards: dict[str, _Shard]

    @model_validator(mode="after")
    def _fits(self) -> _Manifest:
        signal = self.signal
        for name in self.files:
            if not BESIDE.fullmatch(name):
                raise ValueError(f"files names {name!r}, and no cache has such a file")
        for name in self.shards:
            if not SHARD.fullmatch(name):
                raise ValueError(f"shards names {name!r}, and no shard is called so")
        if self.kind == "top_k" and not 1 <= signal.k <= signal.vocabulary:
            raise ValueError(f"k is {signal.k} of {signal.vocabulary} ids")
        if self.kind == "sampled" and not signal.num_samples:
            raise ValueError("it has no draws")
        if self.kind == "hidden" and not (signal.width and signal.dtype in DTYPES):
            raise ValueError(f"hidden states of width {signal.width} in {signal.dtype!r}")
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
    if manifest.get("version") != VERSION or manifest.get("kind") not in KINDS:
        what = f"version {_shown(manifest.get('version'))}, kind {_shown(manifest.get('kind'))}"
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
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(_shown, first["loc"]))
        what = f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        raise PotstillError(f"{folder / MANIFEST} is not what potstill wrote ({what})") from None
    except (ValueError, RecursionError) as error:
        raise PotstillError(f"{folder / MANIFEST} is not what potstill wrote ({error!r})") from error


def _shown(value: Any) -> str:
    """For a message: short, and nothing that a terminal would obey."""
    text = str(value)[:80]
    return text if text.isprintable() else ascii(text)


def identity_of(manifest: Mapping[str, Any]) -> str:
    """A hash of what decides how a cache's bytes are read and what they mean. Every shard has it."""
    kept = {key: manifest[key] for key in ("kind", "signal", "tokenizer", "chat", "piece_bytes")}
    kept["teacher"] = {key: manifest["teacher"][key] for key in ("weights", "dtype")}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def form_of(manifest: Mapping[str, Any]) -> Format:
    signal = dict(manifest["signal"])
    signal["temperatures"] = tuple(signal["temperatures"])
    return Format(kind=manifest["kind"], **signal)


def signal_keys(form: Format) -> dict[str, Any]:
    """A format as the manifest records it."""
    keys = asdict(form)
    del keys["kind"]
    return {**keys, "temperatures": list(form.temperatures)}


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
