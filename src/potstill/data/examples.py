"""Records to pieces of text.

A piece is text with what is supervised in it, before any tokenizer: that is what is shuffled, and what an example's key
is the hash of. Long plain texts are cut here, as text, so that whoever tokenizes a piece has seen the same beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.config import DataConfig, SourceConfig
from potstill.text.chat import ChatRenderer, read_messages, read_tools
from potstill.types import PotstillError

Pieces = Callable[[Mapping[str, Any], str], "Iterator[Piece]"]


@dataclass(frozen=True)
class Piece:
    """What will become an Example, or (with `dropped`) the trace of a record that gave none, so that it is counted."""

    key: str
    text: str
    spans: tuple[tuple[int, int], ...] | None = None  # characters to supervise; None: all
    template: bool = False  # a template wrote the special tokens already
    first: bool = True  # of its record
    last: bool = True  # of its text: eos may follow
    split: bool = False  # of a conversation whose template rewrites earlier turns
    dropped: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Any] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


def text_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def json_key(value: Any) -> str:
    """Begins with a byte that no text has: a text that is the JSON of a conversation has another key than that."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(b"\xff" + text.encode()).hexdigest()[:32]


def ids_key(ids: npt.NDArray[np.int32], prompt: int) -> str:
    """Of a text that a model wrote: of its ids, which no tokenizer may give back, and of how many of them are the prompt."""
    content = b"\xfe" + prompt.to_bytes(4, "little") + ids.astype("<i4").tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def uniform(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return int(key[:13], 16) / 16**13


def cut_text(text: str, most: int) -> list[str]:
    """`text` in pieces of at most `most` UTF-8 bytes, which together are exactly `text`.

    A piece ends after the last line break in its second half, else before the last white space there (a word keeps the
    space in front of it, as most vocabularies spell it), else between two characters.
    """
    data = text.encode()
    pieces, begin = [], 0
    while len(data) - begin > most:
        half, limit = begin + (most + 1) // 2, begin + most
        end = data.rfind(b"\n", half, limit) + 1
        if not end:
            end = max(data.rfind(space, half, limit) for space in (b" ", b"\t", b"\r", b"\v", b"\f"))
        if end <= begin:
            end = limit
            while end > begin and data[end] & 0xC0 == 0x80:
                end -= 1
            if end == begin:  # one character that is longer than a whole piece may be
                end = limit
                while end < len(data) and data[end] & 0xC0 == 0x80:
                    end += 1
        pieces.append(data[begin:end].decode())
        begin = end
    if begin < len(data) or not pieces:
        pieces.append(data[begin:].decode())
    return pieces


def piece_maker(data: DataConfig, source: SourceConfig, key: str, tokenizer: Any) -> Pieces:
    """The function that turns a record of `source`, and where it is, into pieces."""
    maker = _maker(data, source, key, tokenizer)
    if not data.columns:
        return maker

    def with_columns(record: Mapping[str, Any], where: str) -> Iterator[Piece]:
        columns = {column: _text(record, column, where) for column in data.columns}
        return (replace(piece, columns=columns) for piece in maker(record, where))

    return with_columns


def _maker(data: DataConfig, source: SourceConfig, key: str, tokenizer: Any) -> Pieces:
    if source.kind == "messages":
        renderer = ChatRenderer(tokenizer, source.chat_template_kwargs, key)
        return lambda record, where: _chat_pieces(record, where, source, renderer)
    if source.kind == "completion":
        return lambda record, where: _completion_pieces(record, where, source)
    return lambda record, where: _text_pieces(record, where, source, data.cut_bytes)


def _text_pieces(record: Mapping[str, Any], where: str, source: SourceConfig, most: int) -> Iterator[Piece]:
    text = _text(record, source.text or "text", where)
    if not text:
        yield Piece("", "", dropped=True)
        return
    texts = cut_text(text, most)
    first = True
    for number, part in enumerate(texts, 1):
        key = text_key(part)
        if uniform(key) < source.fraction:
            yield Piece(key, part, first=first, last=number == len(texts), source=where)
            first = False


def _completion_pieces(record: Mapping[str, Any], where: str, source: SourceConfig) -> Iterator[Piece]:
    assert source.prompt is not None
    prompt = _text(record, source.prompt, where)
    completion = _text(record, source.completion, where) if source.completion else ""
    key = json_key({"prompt": prompt, "completion": completion})
    if uniform(key) < source.fraction:
        text = prompt + completion
        yield Piece(key, text, dropped=not text, spans=((len(prompt), len(text)),), source=where)


def _chat_pieces(
    record: Mapping[str, Any], where: str, source: SourceConfig, renderer: ChatRenderer
) -> Iterator[Piece]:
    assert source.messages is not None
    messages = read_messages(record[source.messages], f"{where}, column {source.messages}")
    tools = read_tools(record[source.tools], f"{where}, column {source.tools}") if source.tools else None
    try:
        key = json_key({"messages": messages, "tools": tools})
    except UnicodeEncodeError as error:
        raise PotstillError(f"{where}, column {source.messages} {_NOT_UNICODE}") from error
    if uniform(key) >= source.fraction:
        return
    texts = renderer.render(messages, tools, where)
    if not texts:
        yield Piece(key, "", dropped=True, messages=messages, tools=tools, source=where)  # it may still be answered
    for number, rendered in enumerate(texts):
        if len(rendered.messages) < len(messages):
            # The same messages may stand as a conversation of their own, with other turns supervised.
            key = json_key({"messages": rendered.messages, "tools": tools, "turns": rendered.turns})
        yield Piece(
            key,
            rendered.text,
            spans=rendered.spans,
            template=True,
            first=number == 0,
            split=len(rendered.messages) < len(messages),
            messages=rendered.messages,
            tools=tools,
            source=where,
        )


_NOT_UNICODE = "holds half of a surrogate pair, which is no character; repair the text"


def _text(record: Mapping[str, Any], column: str, where: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        hint = "leave such records out or name another column"
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            hint = "these are chat messages: join prompt and completion in one list and name its column with messages"
        raise PotstillError(f"{where}: column {column} holds {kind}, not text; {hint}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PotstillError(f"{where}: column {column} {_NOT_UNICODE}") from error
    return value
