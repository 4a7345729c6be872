"""What a cache says of itself. A cache may come from anyone, so all of manifest.json is checked before any of it is used, and
a name in it becomes a path only here."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from potstill.data.examples import text_key
from potstill.files import MANIFEST, write_text
from potstill.signals.kinds import KINDS, SignalKind, first_error, read_kind, shown
from potstill.types import PotstillError

FORMAT, VERSION = "potstill cache", 2
IMPORTED = "imported"  # in place of the fingerprint of weights that potstill never saw
SHARD = re.compile(r"shard-([0-9]{1,15})-([0-9a-f]{8})\.safetensors")  # bytes, crc32
HEAD, TOKENIZER = "head.safetensors", "tokenizer"
BESIDE = re.compile(rf"{re.escape(HEAD)}|{TOKENIZER}(/\w[\w .-]*){{1,2}}")


def _plain(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError("there are control characters in it")
    return text


Words = Annotated[str, AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    def facts(self, **which: Any) -> dict[str, Any]:
        """As it stands in the file."""
        return self.model_dump(by_alias=True, exclude_unset=True, **which)


class TeacherFacts(_Checked):
    model: Words
    revision: Words | None = None
    weights: Words
    dtype: Words


class Chat(_Checked):
    template: Words | None
    arguments: Annotated[dict[str, Any], Field(alias="kwargs")]


class ListedShard(_Checked):
    documents: Count
    tokens: Count
    bytes: Count
    crc32: Words


class Import(_Checked):
    layout: Words
    values: Words
    rest: Literal["known", "partial", "none"]


class Manifest(_Checked):
    format: str
    version: int
    kind: str
    signal: dict[str, Any]  # see kinds.SignalKind
    teacher: TeacherFacts
    tokenizer: Words
    chat: Chat
    piece_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    imported: Import | None = None
    probe: list[float] | None = None  # of a server that does not say what its weights are: see openai.py
    files: dict[str, dict[str, Count]]  # size and crc32
    shards: dict[str, ListedShard]

    @model_validator(mode="after")
    def _fits(self) -> Manifest:
        for what, names, pattern in (("files", self.files, BESIDE), ("shards", self.shards, SHARD)):
            if wrong := [name for name in names if not pattern.fullmatch(name)]:
                raise ValueError(f"{what} names {wrong[0]!r}, and no cache has such a file")
        if missing := signal_keys(self.form).keys() - self.signal.keys():
            raise ValueError(f"signal lacks {', '.join(sorted(missing))}")
        return self

    @property
    def form(self) -> SignalKind:
        return read_kind(self.kind, self.signal)

    def meaning(self) -> dict[str, Any]:
        """What decides how the bytes are read and what they mean. What the teacher is called does not."""
        whole = dict.fromkeys(("kind", "signal", "tokenizer", "chat", "piece_bytes"), True)
        return self.facts(include={**whole, "teacher": {"weights", "dtype"}})

    @property
    def identity(self) -> str:
        """A hash of the meaning. Every shard has it."""
        return text_key(json.dumps(self.meaning(), sort_keys=True, separators=(",", ":"), ensure_ascii=False))

    def difference(self, other: Manifest) -> str:
        """The first thing that another one has changed, in words; nothing where they mean the same."""
        before, now = (
            {**each.meaning(), "imported": each.imported and each.imported.facts()} for each in (self, other)
        )
        for key in before:
            there, here = (each[key] if isinstance(each[key], dict) else {"": each[key]} for each in (before, now))
            names = [name for name in there | here if there.get(name) != here.get(name)]
            words = [f"{name} {_words(there.get(name))}, now {_words(here.get(name))}".strip() for name in names]
            if words:
                return f"{key.replace('_', ' ')} ({'; '.join(words)})"
        return ""

    def list_shard(self, name: str, documents: int, tokens: int) -> None:
        size, crc32 = shard_facts(name)
        self.shards[name] = ListedShard(documents=documents, tokens=tokens, bytes=size, crc32=crc32)

    def write(self, folder: Path) -> None:
        content, shards = self.facts(), self.shards.values()
        content |= {key: sum(dict(shard)[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        write_text(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False))


def shard_facts(name: str) -> tuple[int, str]:
    """The bytes of a shard and its crc32, as its name has them."""
    match = SHARD.fullmatch(name)
    assert match is not None
    return int(match[1]), match[2]


def signal_keys(form: SignalKind) -> dict[str, Any]:
    """A kind as the manifest records it."""
    return {**asdict(form), "temperatures": list(form.temperatures)}


def new_manifest(folder: Path, form: SignalKind, **keys: Any) -> Manifest:
    """Of a cache that holds nothing yet."""
    about = {"format": FORMAT, "version": VERSION, "kind": form.kind, "signal": signal_keys(form)}
    return _checked({**about, **keys, "files": {}, "shards": {}}, folder)


def read_manifest(folder: Path) -> Manifest:
    try:
        content = json.loads(part(folder, MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"is not a cache: it has no {MANIFEST}. `potstill cache build` makes one"
        if folder.is_file():
            what = "is a file, and a cache is a folder: name the one that `potstill cache build` made"
        raise PotstillError(f"{folder} {what}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PotstillError(f"{folder / MANIFEST} cannot be read ({error})") from error
    return _checked(content, folder)


def _checked(content: Any, folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PotstillError(f"{path} is not the manifest of a potstill cache")
    version, kind = (shown(content.get(key)) for key in ("version", "kind"))
    if content.get("version") != VERSION or kind not in KINDS:
        raise PotstillError(
            f"{folder} is a cache of version {version}, kind {kind}, which this potstill cannot read (it reads version "
            f"{VERSION}): build it anew, in another folder"
        )
    required = [key for key, field in Manifest.model_fields.items() if field.is_required()]
    if missing := [key for key in required if key not in content]:
        raise PotstillError(f"{path} lacks {', '.join(missing)}: it is not what potstill wrote")
    try:
        manifest = Manifest.model_validate(content)
        assert manifest.identity  # chat.kwargs may be what no JSON has
    except ValidationError as error:
        raise PotstillError(f"{path} is not what potstill wrote ({first_error(error)})") from None
    except (ValueError, RecursionError) as error:
        raise PotstillError(f"{path} is not what potstill wrote ({error!r})") from error
    return manifest


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def part(folder: Path, name: str) -> Path:
    """The path of a cache's file. Only names that a writer gives, and no links: what they lead to is not the cache's."""
    if not (name == MANIFEST or SHARD.fullmatch(name) or BESIDE.fullmatch(name)):
        raise PotstillError(f"the cache {folder} names a file {name!r}, and no cache has such a one: do not use it")
    path = folder / name
    _refuse_links(folder, (path, *path.parents[: name.count("/")]))
    return path


def tokenizer_of(folder: Path) -> Path:
    """Where a cache's tokenizer is. Who loads it reads whatever is there, so nothing of it may be a link."""
    path = folder / TOKENIZER
    _refuse_links(folder, (path, *path.rglob("*")))
    return path


def _refuse_links(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            raise PotstillError(
                f"the cache {folder} is not as potstill writes it: {path.relative_to(folder)} is a link or no plain file, "
                "and may lead out of the cache: copy the cache with its links followed (cp -rL), if you trust where they lead"
            )
