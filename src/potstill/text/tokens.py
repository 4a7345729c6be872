"""A vocabulary as bytes: what each id stands for, whatever family of tokenizer it is from.

Bytes are kept flat (one buffer and offsets), so that a batch of ids becomes its text in a few array operations.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import tokenizers

from potstill.files import write_bytes
from potstill.text.decoding import Prefix, decode_tokens, keeps_text, prefix_of
from potstill.text.roles import roles_of
from potstill.types import PotstillError

Arrays = dict[str, npt.NDArray[Any]]

FORMAT = "potstill tokens 1"
TEXT, BYTE, SPECIAL, ABSENT = range(4)  # kinds of ids: BYTE is a fallback for one byte, ABSENT an id that no token has
SPACE = 0x20
PROBE = "Hello  wörld,\t日本語\r\n don't 2024 é e\u0301 ﬁ ＡＢ\u00a0x=1; 🙂 ok"
DECLARED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")  # as in transformers' bos_token, eos_token …


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A vocabulary as bytes."""

    buffer: npt.NDArray[np.uint8]  # the bytes of all tokens, in the order of their ids
    offsets: npt.NDArray[np.int64]  # [V + 1]; token i is buffer[offsets[i]:offsets[i + 1]]
    kinds: npt.NDArray[np.uint8]  # [V]; TEXT, BYTE, SPECIAL, ABSENT
    added: npt.NDArray[np.bool_]  # [V]; found in a text before anything else, so that it cuts the text in two
    special: dict[str, tuple[int, ...]] = field(repr=False)  # role -> ids
    contents: dict[int, str] = field(repr=False)  # what the specials are called
    identity: bool  # the tokens of a text concatenate to that text (one without `▁`, which may mean a space)
    prefix: Prefix  # where the tokenizer puts a space that is not in the text: it has no bytes
    prefix_always: bool  # before a text that begins with a space, too
    fingerprint: str
    name: str = ""

    @classmethod
    def from_tokenizer(cls, tok: Any, cache: Path | str | None = "default") -> TokenTable:
        """`tok` is a fast tokenizer of transformers or a tokenizers.Tokenizer; `cache` is a folder, None for no cache."""
        backend, name, declared, specials = _parts(tok)
        spec = _spec(backend)
        tokens = _tokens_by_id(spec)
        fingerprint = _fingerprint(spec, tokens, declared, specials)
        folder = None if cache is None else _cache_folder() if cache == "default" else Path(cache)
        path = None if folder is None else folder / f"{fingerprint}.tokens"
        table = None if path is None else _from_cache(path, name, fingerprint)
        if table is None:
            table = _probed(_build(spec, tokens, declared, specials, fingerprint, name), backend)
            if path is not None:
                _into_cache(path, table)
        return table

    @classmethod
    def from_tiktoken(cls, path: Path | str, specials: Mapping[str, int] | None = None) -> TokenTable:
        """From a tiktoken file (a line per token: its bytes in base64, its rank), and the specials, which it does not hold."""
        pieces: dict[int, bytes] = {}
        try:
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise PotstillError(f"cannot read {path}: {error.strerror or error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                encoded, rank = line.split()
                pieces[int(rank)] = base64.b64decode(encoded, validate=True)
            except (ValueError, binascii.Error) as error:
                raise PotstillError(
                    f"{path}, line {number}: not a token in base64 and its rank, as in a tiktoken file"
                ) from error
        contents = {index: content for content, index in (specials or {}).items()}
        size = max([*pieces, *contents], default=-1) + 1
        kinds = [SPECIAL if i in contents else TEXT if i in pieces else ABSENT for i in range(size)]
        flat = [b"" if i in contents else pieces.get(i, b"") for i in range(size)]
        digest = hashlib.sha256(json.dumps([FORMAT, sorted(contents.items())]).encode())
        for piece in flat:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return _table(
            flat, kinds, list(contents),
            special=roles_of(contents, {}, None), contents=contents, identity=True, prefix="none", prefix_always=True,
            fingerprint=digest.hexdigest(), name=str(path),
        )  # fmt: skip

    def narrowed(self, size: int) -> TokenTable:
        """Of the first `size` ids alone: those that a model has embeddings for."""
        if size >= len(self):
            return self
        return replace(
            self,
            offsets=self.offsets[: size + 1],
            kinds=self.kinds[:size],
            added=self.added[:size],
            special={role: tuple(i for i in ids if i < size) for role, ids in self.special.items()},
            contents={i: content for i, content in self.contents.items() if i < size},
            fingerprint=f"{self.fingerprint}-{size}",
        )

    def __len__(self) -> int:
        return len(self.kinds)

    def __repr__(self) -> str:
        return f"TokenTable({self.name or self.fingerprint[:12]}, {len(self)} ids)"

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Bytes of each id, as in the middle of a text; specials have none."""
        return np.diff(self.offsets).astype(np.int32)

    @cached_property
    def spaced(self) -> npt.NDArray[np.bool_]:
        """[V]; the ids whose bytes begin with a space, which may be a dummy prefix."""
        first = self.buffer[np.minimum(self.offsets[:-1], max(len(self.buffer) - 1, 0))] if len(self.buffer) else 0
        return np.asarray((self.lengths > 0) & (first == SPACE))

    def token_bytes(self, index: int) -> bytes:
        return self.buffer[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def by_bytes(self, kinds: Sequence[int], free: npt.NDArray[np.bool_] | None = None) -> dict[bytes, list[int]]:
        """Bytes → the ids of these kinds (of those that are `free`) that stand for them, the lowest first."""
        wanted = np.isin(self.kinds, list(kinds)) & (self.lengths > 0)
        whole, offsets = self.buffer.tobytes(), self.offsets.tolist()
        found: dict[bytes, list[int]] = {}
        for index in np.flatnonzero(wanted if free is None else wanted & free).tolist():
            found.setdefault(whole[offsets[index] : offsets[index + 1]], []).append(index)
        return found

    @cached_property
    def words(self) -> dict[bytes, int]:
        """Bytes → the id that stands for them: a token of text before a fallback for the same byte."""
        return {content: ids[0] for kind in (BYTE, TEXT) for content, ids in self.by_bytes([kind]).items()}

    def longest_words(self, text: bytes) -> Iterator[int | None]:
        """The longest tokens that `text` begins with, one after the other; None: none does, a byte is passed over."""
        longest, at = self._longest, 0
        while at < len(text):
            ends = range(min(at + longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self.words), None)
            yield None if end is None else self.words[text[at:end]]
            at = at + 1 if end is None else end

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.words), default=0)

    def text_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text that a whole sequence of ids stands for: dummy prefixes and specials left out."""
        flat = checked_ids(ids, "ids")
        spans, begins = self.lengths[flat], self.offsets[flat]
        if self.prefix != "none":
            dummy = self.dummies(flat, np.zeros(1, dtype=np.int64))
            spans, begins = spans - dummy, begins + dummy
        return gather(self.buffer, begins, spans).tobytes()

    def dummies(self, flat: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which tokens of sequences, flat with their `starts`, hold a dummy prefix: a space where the tokenizer puts one."""
        held = np.zeros(len(flat), dtype=np.bool_)
        if self.prefix == "none" or not len(flat):
            return held
        cuts = self.added[flat]
        after = np.empty(len(flat), dtype=np.bool_)
        after[0], after[1:] = True, cuts[:-1]
        after[starts[starts < len(flat)]] = True
        candidates = np.flatnonzero(after & ~cuts)
        if self.prefix == "first":
            candidates = candidates[np.unique(np.searchsorted(starts, candidates, side="right"), return_index=True)[1]]
        held[candidates] = self.spaced[flat[candidates]]
        return held


def checked_ids(ids: npt.ArrayLike, what: str) -> npt.NDArray[np.int64]:
    flat = np.asarray(ids)
    if flat.ndim != 1 or not (np.issubdtype(flat.dtype, np.integer) or not flat.size):
        raise PotstillError(f"{what} are to be one sequence of token ids, not an array of {flat.dtype} {flat.shape}")
    flat = flat.astype(np.int64, copy=False)
    if flat.size and flat.min() < 0:
        raise PotstillError(f"{what} hold the id {flat.min()}; padding and masks (-100) are not ids: leave them out")
    return flat


def gather(
    buffer: npt.NDArray[Any], begins: npt.NDArray[np.integer[Any]], spans: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[Any]:
    """buffer[begins[0]:begins[0] + spans[0]], buffer[begins[1]: …] … as one array."""
    if not spans.all():
        some = np.flatnonzero(spans)
        begins, spans = begins[some], spans[some]
    ends = np.cumsum(spans, dtype=np.int64)
    if not len(ends):
        return buffer[:0]
    # Steps of one, and a jump where a token begins: a third of the time that np.repeat takes.
    steps = np.ones(int(ends[-1]), dtype=np.int64)
    steps[0] = begins[0]
    steps[ends[:-1]] = begins[1:] - begins[:-1] - spans[:-1] + 1
    return buffer.take(np.cumsum(steps, out=steps))


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """A safetensors file that is never half there."""
    write_bytes(path, safetensors.numpy.save(arrays, metadata))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    with safetensors.safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def _parts(tok: Any) -> tuple[tokenizers.Tokenizer, str, dict[str, str], set[int]]:
    """The backend, a name, the declared roles, and the ids that only transformers knows to be special."""
    if isinstance(tok, tokenizers.Tokenizer):
        return tok, "", {}, set()
    if not hasattr(tok, "backend_tokenizer") or not isinstance(tok.backend_tokenizer, tokenizers.Tokenizer):
        raise PotstillError(
            f"the tokenizer {getattr(tok, 'name_or_path', type(tok).__name__)} has no fast version (tokenizer.json), "
            "which is needed to tell which bytes a token stands for"
        )
    named = tok.special_tokens_map
    declared = {role: str(named[f"{role}_token"]) for role in DECLARED if named.get(f"{role}_token")}
    return tok.backend_tokenizer, str(tok.name_or_path), declared, set(tok.all_special_ids)


def plain_backend(tok: Any) -> tokenizers.Tokenizer:
    """A tokenizer's backend without the truncation and padding that a caller switched on."""
    backend = _parts(tok)[0]
    if backend.truncation is None and backend.padding is None:
        return backend
    whole = json.loads(backend.to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**whole, "truncation": None, "padding": None}))


def _spec(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The tokenizer's own JSON without its merges: they say how text is cut, not what tokens stand for, and reading them takes
    most of the time. Inside a string of JSON the quotes would be escaped, so this is their key; they come last."""
    text = backend.to_str()
    at = text.rfind(',"merges":[')
    spec: dict[str, Any] = json.loads(f"{text[:at]}}}}}" if at >= 0 and text.endswith("]}}") else text)
    return spec


def _tokens_by_id(spec: Mapping[str, Any]) -> list[str | None]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: by rank, with a score
        vocabulary = {content: index for index, (content, _) in enumerate(vocabulary)}
    size = max([*vocabulary.values(), *(token["id"] for token in spec["added_tokens"])], default=-1) + 1
    tokens: list[str | None] = [None] * size
    for content, index in vocabulary.items():
        tokens[index] = content
    return tokens


def _fingerprint(
    spec: Mapping[str, Any], tokens: list[str | None], declared: Mapping[str, str], specials: set[int]
) -> str:
    """Of all that decides what ids stand for. Merges do not; nor does the padding that a caller switched on."""
    rest = {part: spec[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "decoder", "post_processor")}
    rest["model"] = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    head = json.dumps([FORMAT, rest, dict(declared), sorted(specials)], sort_keys=True)
    return hashlib.sha256((head + json.dumps(tokens)).encode()).hexdigest()


def _build(
    spec: Mapping[str, Any],
    tokens: list[str | None],
    declared: Mapping[str, str],
    specials: set[int],
    fingerprint: str,
    name: str,
) -> TokenTable:
    pieces, fallbacks = decode_tokens([token or "" for token in tokens], spec["decoder"])
    kinds = np.array([ABSENT if token is None else TEXT for token in tokens], dtype=np.uint8)
    kinds[fallbacks] = BYTE
    for token in spec["added_tokens"]:
        if tokens[token["id"]] is None:  # it stands in the text as it is written
            kinds[token["id"]], pieces[token["id"]] = TEXT, token["content"].encode()
    contents, roles = _special(spec, tokens, declared, specials)
    kinds[list(contents)] = SPECIAL
    pieces = [piece if kind in (TEXT, BYTE) else b"" for piece, kind in zip(pieces, kinds.tolist(), strict=True)]
    prefix, always = prefix_of(spec)
    return _table(
        pieces, kinds, [token["id"] for token in spec["added_tokens"]],
        special=roles, contents=contents, identity=keeps_text(spec) and (prefix == "none" or always),
        prefix=prefix, prefix_always=always, fingerprint=fingerprint, name=name,
    )  # fmt: skip


def _special(
    spec: Mapping[str, Any], tokens: list[str | None], declared: Mapping[str, str], specials: set[int]
) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
    """Id → how a special is written, and role → the ids that have it."""
    added = spec["added_tokens"]
    contents = {token["id"]: token["content"] for token in added if token["special"] or token["id"] in specials}
    unknown = _unknown(spec["model"], tokens)
    if unknown is None:
        return contents, roles_of(contents, declared, spec["post_processor"])
    contents.setdefault(unknown, tokens[unknown] or "")
    roles = roles_of(contents, declared, spec["post_processor"])
    roles["unk"] = tuple(dict.fromkeys((*roles.get("unk", ()), unknown)))
    return contents, roles


def _unknown(model: Mapping[str, Any], tokens: list[str | None]) -> int | None:
    """The id of what the vocabulary cannot say, by number or by name."""
    unknown = model["unk_id"] if "unk_id" in model else model.get("unk_token")
    return (
        next((i for i, token in enumerate(tokens) if token == unknown), None) if isinstance(unknown, str) else unknown
    )


def _table(pieces: Sequence[bytes], kinds: npt.ArrayLike, added: Sequence[int], **rest: Any) -> TokenTable:
    offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    cuts = np.zeros(len(pieces), dtype=np.bool_)
    cuts[list(added)] = True
    buffer = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    return TokenTable(buffer, offsets, np.array(kinds, dtype=np.uint8), cuts, **rest)


def _probed(table: TokenTable, backend: tokenizers.Tokenizer) -> TokenTable:
    """The table, if the tokenizer's own decoder agrees with it; not the identity if a text does not come back."""
    backend = plain_backend(backend)
    ids = backend.encode(PROBE, add_special_tokens=False).ids
    ours = table.text_bytes(ids)
    text = [index for index in ids if table.kinds[index] != SPECIAL]
    theirs = backend.decode(text, skip_special_tokens=False)
    if text == ids and ours.decode("utf-8", "replace").strip() != theirs.strip():
        who = f"the tokenizer {table.name}" if table.name else "the tokenizer"
        raise PotstillError(
            f"{who} reads its own tokens back as {theirs[:12]!r}, where potstill finds {ours[:12]!r} in them: it is of "
            "a kind that potstill does not know"
        )
    return replace(table, identity=table.identity and ours == PROBE.encode())


def _cache_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("POTSTILL_CACHE") or caches / "potstill") / "tokens"


def _into_cache(path: Path, table: TokenTable) -> None:
    about = {name: getattr(table, name) for name in ("special", "contents", "identity", "prefix", "prefix_always")}
    arrays: Arrays = {name: getattr(table, name) for name in ("buffer", "offsets", "kinds", "added")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, {"format": FORMAT, "fingerprint": table.fingerprint, "about": json.dumps(about)})
    except (OSError, PotstillError):
        return  # a home that cannot be written to costs a second the next time, no more


def _from_cache(path: Path, name: str, fingerprint: str) -> TokenTable | None:
    """The table, or None where there is none or the file is damaged: it is then built anew."""
    if not path.is_file():
        return None
    try:
        arrays, metadata = read_arrays(path)
        if metadata["format"] != FORMAT or metadata["fingerprint"] != fingerprint:
            return None
        about = json.loads(metadata["about"])
        about["special"] = {role: tuple(ids) for role, ids in about["special"].items()}
        about["contents"] = {int(index): content for index, content in about["contents"].items()}
        fields: dict[str, Any] = {**arrays, **about}
        return TokenTable(**fields, fingerprint=fingerprint, name=name)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
        return None
