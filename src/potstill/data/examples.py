"""Records to Examples, before any tokenizer: that is what is shuffled, and what an example's key is the hash of.

Long plain texts are cut here, as text, so that whoever tokenizes a piece has seen the same beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.config import DataConfig, SourceConfig
from potstill.config.data import SuperviseConfig
from potstill.text.chat import ChatRenderer, read_messages, read_tools
from potstill.types import Example, PotstillError

Record = Mapping[str, Any]
MakeExamples = Callable[[Record, str], Iterator[Example]]  # of a record, and where it is


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


def example_maker(
    data: DataConfig, source: SourceConfig, key: str, tokenizer: Any, each_turn: bool = False
) -> MakeExamples:
    """The function that turns a record of `source` into examples. One without text is the trace of a record that gave none,
    so that it is counted. `each_turn`: every supervised turn of a chat is an example of its own, with what comes before it."""
    renderer = ChatRenderer(tokenizer, source.chat_template_kwargs, key) if source.kind == "messages" else None

    def make(record: Record, where: str) -> Iterator[Example]:
        columns = {column: _column(record, column, where) for column in data.columns}
        if renderer is not None:
            made = _of_chat(record, where, source, renderer, data.supervised)
            made = chain.from_iterable(_by_turns(one, renderer, where) for one in made) if each_turn else made
        elif source.kind == "completion":
            made = _of_completion(record, where, source)
        else:
            made = _of_text(record, where, source, data.cut_bytes)
        return (replace(example, source=where, columns=columns) for example in made)

    return make


def _of_text(record: Record, where: str, source: SourceConfig, most: int) -> Iterator[Example]:
    texts = cut_text(_text(record, source.text or "text", where), most)
    first = True
    for number, text in enumerate(texts, 1):
        key = text_key(text)
        if not text or uniform(key) < source.fraction:
            yield Example(key, text, first=first, last=number == len(texts))
            first = False


def _of_completion(record: Record, where: str, source: SourceConfig) -> Iterator[Example]:
    assert source.prompt is not None
    prompt = _text(record, source.prompt, where)
    completion = _text(record, source.completion, where) if source.completion else ""
    key = json_key({"prompt": prompt, "completion": completion})
    if uniform(key) < source.fraction:
        text = prompt + completion
        yield Example(key, text, spans=((len(prompt), len(text)),))


def _of_chat(
    record: Record, where: str, source: SourceConfig, renderer: ChatRenderer, supervise: SuperviseConfig
) -> Iterator[Example]:
    assert source.messages is not None
    messages = read_messages(record[source.messages], f"{where}, column {source.messages}")
    tools = read_tools(record[source.tools], f"{where}, column {source.tools}") if source.tools else None
    try:
        key = json_key({"messages": messages, "tools": tools})
    except UnicodeEncodeError as error:
        raise PotstillError(f"{where}, column {source.messages} {_NOT_UNICODE}") from error
    if uniform(key) >= source.fraction:
        return
    texts = renderer.render(messages, tools, where, _supervised(messages, supervise, record, where))
    if not texts:
        yield Example(key, "", messages=messages, tools=tools, turns=())  # it may still be answered
    for number, rendered in enumerate(texts):
        split = len(rendered.messages) < len(messages)
        if split:  # the same messages may stand as a conversation of their own, with other turns supervised
            key = json_key({"messages": rendered.messages, "tools": tools, "turns": rendered.turns})
        yield Example(
            key,
            rendered.text,
            spans=rendered.spans,
            first=number == 0,
            split=split,
            messages=rendered.messages,
            tools=tools,
            turns=rendered.turns,
        )


def _supervised(messages: Sequence[Record], supervise: SuperviseConfig, record: Record, where: str) -> list[int]:
    """The messages that are learnt."""
    mask = [True] * len(messages)
    if supervise.column is not None:
        mask = record[supervise.column]
        if not isinstance(mask, list) or len(mask) != len(messages) or any(type(m) is not bool for m in mask):
            raise PotstillError(
                f"{where}: column {supervise.column} (data.supervise.column) is not a list of true and false, one for each of "
                f"the {len(messages)} messages"
            )
    chosen = [i for i, m in enumerate(messages) if m["role"] in supervise.roles and mask[i]]
    return chosen[-1:] if supervise.turns == "last" else chosen


def _by_turns(example: Example, renderer: ChatRenderer, where: str) -> Iterator[Example]:
    """A chat as one example per assistant turn that is learnt in it, with what comes before that turn; and as it is where its
    last message is still to be answered."""
    messages, first = example.messages or (), example.first
    asked = [i for i in example.turns or () if messages[i]["role"] == "assistant"]
    for i in asked:
        (text,) = renderer.render(messages[: i + 1], example.tools, where, [i])
        key = json_key({"messages": text.messages, "tools": example.tools, "turns": text.turns})
        yield replace(
            example,
            key=key,
            text=text.text,
            spans=text.spans,
            messages=text.messages,
            turns=text.turns,
            first=first,
        )
        first = False
    if not asked or (not example.split and messages[-1]["role"] != "assistant"):
        yield replace(example, text="", spans=None, turns=(), first=first)


_NOT_UNICODE = "holds half of a surrogate pair, which is no character; repair the text"


def _column(record: Record, column: str, where: str) -> str:
    """A further column: text as it is, numbers and lists of them as JSON."""
    value = record[column]
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(isinstance(number, bool | int | float) for number in numbers):
        return json.dumps(value)
    return _text(record, column, where)


def _text(record: Record, column: str, where: str) -> str:
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
