"""What each token of a vocabulary stands for, read from the tokenizer's own JSON: its decoder, model and normaliser.

A token is decoded as it would be in the middle of a text. What a tokenizer puts before a text that is not in it (the `▁` of
SentencePiece) is not the decoder's business: `prefix_of` says where it does so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from potstill.types import PotstillError

Json = Mapping[str, Any]
# No dummy prefix · before a text · before every stretch between added tokens
Prefix = Literal["none", "first", "every"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_LETTER = 256
_CLEANED = (  # the WordPiece decoder's own clean-up, in its order
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be seen, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


def decode_tokens(tokens: Sequence[str], decoder: Json | None) -> tuple[list[bytes], list[int]]:
    """The bytes of each token, and which of them (by index) are fallbacks for one byte, as `<0x0A>` is."""
    texts: list[str] = list(tokens)
    steps = list(_steps(decoder))
    if not steps:  # without a decoder, tokens are words
        return [f" {text}".encode() for text in texts], []
    fused = False
    fallbacks: dict[int, bytes] = {}
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            return _from_letters(texts), []
        if kind == "ByteFallback":
            matches = ((index, _BYTE.fullmatch(text)) for index, text in enumerate(texts) if text.startswith("<0x"))
            fallbacks = {index: bytes.fromhex(match[1]) for index, match in matches if match}
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            continue  # the edges of the whole text, not of a token
        else:
            texts = _transform(kind, step, texts)
    whole = [text.encode("utf-8", "surrogatepass") for text in texts]
    for index, byte in fallbacks.items():
        whole[index] = byte
    return whole, list(fallbacks)


def _steps(part: Json | None) -> Iterator[Json]:
    """The parts of a Sequence, of whatever depth; of anything else, itself."""
    if part is None:
        return
    for name in ("decoders", "normalizers", "pretokenizers"):
        if name in part:
            for inner in part[name]:
                yield from _steps(inner)
            return
    yield part


def _transform(kind: str, step: Json, texts: list[str]) -> list[str]:
    if kind == "Metaspace":
        return [text.replace(step["replacement"], " ") for text in texts]
    if kind == "Replace":
        return _replace(step, texts)
    if kind == "Strip":
        return [_strip(text, step["content"], step["start"], step["stop"]) for text in texts]
    if kind == "WordPiece":
        prefix = step["prefix"]
        texts = [text[len(prefix) :] if text.startswith(prefix) else f" {text}" for text in texts]
        for old, new in _CLEANED if step["cleanup"] else ():
            texts = [text.replace(old, new) for text in texts]
        return texts
    if kind == "BPEDecoder":
        return [text.replace(step["suffix"], " ") for text in texts]
    raise PotstillError(
        f"the tokenizer's decoder has a step {kind}, and potstill cannot tell which bytes its tokens stand for"
    )


def _replace(step: Json, texts: list[str]) -> list[str]:
    pattern, content = step["pattern"], step["content"]
    if "String" in pattern:
        return [text.replace(pattern["String"], content) for text in texts]
    try:
        expression = re.compile(pattern["Regex"])
    except re.error as error:
        raise PotstillError(
            f"the tokenizer's decoder replaces {pattern['Regex']}, which Python does not read ({error})"
        ) from error
    return [expression.sub(lambda _: content, text) for text in texts]


def _strip(text: str, content: str, start: int, stop: int) -> str:
    begin = next((at for at in range(min(start, len(text))) if text[at] != content), min(start, len(text)))
    text = text[begin:]
    end = next((at for at in range(min(stop, len(text))) if text[-1 - at] != content), min(stop, len(text)))
    return text[: len(text) - end]


def _from_letters(texts: list[str]) -> list[bytes]:
    """Tokens spelled in letters for bytes. One with a letter that stands for no byte is text already (an added token)."""
    ends = np.cumsum([len(text) for text in texts]).tolist() if texts else []
    letters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    byte_of = np.full(0x110000, _NO_LETTER, dtype=np.uint16)
    byte_of[[ord(letter) for letter in byte_letters()]] = np.arange(256)
    found = byte_of[letters]
    whole = found.astype(np.uint8).tobytes()
    pieces = [whole[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    for at in np.unique(np.searchsorted(ends, np.flatnonzero(found == _NO_LETTER), side="right")):
        pieces[at] = texts[at].encode("utf-8", "surrogatepass")
    return pieces


def prefix_of(spec: Json) -> tuple[Prefix, bool]:
    """Where the tokenizer puts a space that is not in the text, and whether it does so before a space as well."""
    for step in _steps(spec["normalizer"]):
        if step["type"] == "Prepend":
            return "every", True
    for step in _steps(spec["pre_tokenizer"]):
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return ("first" if step["prepend_scheme"] == "first" else "every"), False
        if step["type"] == "ByteLevel" and step["add_prefix_space"]:
            return "every", False
    joined_by_spaces = [step["type"] for step in _steps(spec["decoder"])][:1] in ([], ["WordPiece"])
    return ("every" if joined_by_spaces else "none"), True


def keeps_text(spec: Json) -> bool:
    """Whether the normaliser leaves a text as it is, but for what the decoder takes back (`▁` for a space)."""
    for step in _steps(spec["normalizer"]):
        if step["type"] in ("Prepend", "ByteLevel"):
            continue
        undone = step["type"] == "Replace" and "String" in step["pattern"]
        if not undone or decode_tokens([step["content"]], spec["decoder"])[0] != [step["pattern"]["String"].encode()]:
            return False
    return True
