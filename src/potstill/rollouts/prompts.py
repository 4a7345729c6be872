"""From a record to what a writer goes on from, and from what it wrote to an Example.

The ids that were written stay as they are: no tokenizer need give them back from the text, and the student is corrected on
what it really wrote. What a teacher with other tokens wrote reaches the student as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.data import Encoder, Piece, ids_key, json_key, untrimmed
from potstill.models import LanguageModel
from potstill.rollouts.engine import Written
from potstill.text import TokenTable
from potstill.text.chat import ChatRenderer
from potstill.types import Example


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer, in one writer's tokens."""

    piece: Piece  # of the data set
    text: str  # as the writer reads it: rendered by its template, or plain
    ids: npt.NDArray[np.int32]  # [P]
    cut: int  # tokens left out on the left, for want of room
    messages: Sequence[Mapping[str, Any]] | None  # of a chat: what is answered


class Prompter:
    """Pieces of a data set as prompts of at most `most` tokens. Of a plain text the first `prompt_tokens` are the prompt."""

    def __init__(self, tokenizer: Any, *, most: int, prompt_tokens: int, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._most, self._prompt_tokens = most, prompt_tokens
        self._backend = untrimmed(tokenizer.backend_tokenizer)
        mask = self._backend.encode("a").special_tokens_mask
        self._before, self._after = mask.index(0), mask[::-1].index(0)
        self._renderer: ChatRenderer | None = None

    def __call__(self, piece: Piece) -> Prompt | None:
        """None: there is nothing to go on from."""
        if piece.messages is not None:
            return self._chat(piece, piece.messages)
        if piece.dropped:
            return None
        if piece.spans is not None:
            return self._made(piece, piece.text[: piece.spans[0][0]])
        return self._beginning(piece)

    def _chat(self, piece: Piece, messages: Sequence[Mapping[str, Any]]) -> Prompt | None:
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not asked:
            return None
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._kwargs, "data")
        text = self._renderer.prompt(asked, piece.tools, piece.source)
        return self._made(piece, text, asked)

    def _made(self, piece: Piece, text: str, asked: Sequence[Mapping[str, Any]] | None = None) -> Prompt | None:
        encoding = self._backend.encode(text, add_special_tokens=asked is None)
        before, after = (self._before, self._after) if asked is None else (0, 0)
        ids = np.array(encoding.ids, dtype=np.int32)
        ids = ids[: len(ids) - after]
        cut = max(0, len(ids) - self._most)
        if cut:  # on the left, but for what the tokenizer itself puts before every text
            first = before + cut
            text = text[encoding.offsets[first][0] :]
            ids = np.concatenate([ids[:before], ids[first:]])
        return Prompt(piece, text, ids, cut, asked) if len(ids) else None

    def _beginning(self, piece: Piece) -> Prompt | None:
        encoding = self._backend.encode(piece.text)
        ids = np.array(encoding.ids, dtype=np.int32)
        spans = encoding.offsets
        last = len(ids) - self._after
        end = min(self._before + min(self._prompt_tokens, self._most - self._before), last)
        while self._before < end < last and spans[end][0] < spans[end - 1][1]:
            end -= 1  # within a character
        if end <= self._before:
            return None
        return Prompt(piece, piece.text[: spans[end - 1][1]], ids[:end], 0, None)


class Answers:
    """What was written, as Examples of the student. `teacher`: a writer with other tokens than the student's."""

    def __init__(self, student: LanguageModel, encode: Encoder, kwargs: Mapping[str, Any], teacher: Any = None) -> None:
        self._table = TokenTable.from_tokenizer(student.tokenizer)
        self._student, self._encode, self._kwargs = student, encode, kwargs
        self._other = None if teacher is None else TokenTable.from_tokenizer(teacher)

    def own(self, prompt: Prompt, written: Written, writer: str, version: int | None) -> Example:
        """In the student's own tokens, as they were written."""
        ids = np.concatenate([prompt.ids, written.ids])
        begin = len(prompt.ids)
        supervised = np.zeros(len(ids), dtype=np.bool_)
        supervised[max(1, begin) :] = True
        behaviour = None
        if writer == "student":
            behaviour = np.zeros(len(ids), dtype=np.float32)
            behaviour[begin:] = written.logprobs
        data = _answer_bytes(self._table, prompt.ids, written.ids)
        answer = data.decode(errors="replace")
        text = prompt.text + answer
        messages = prompt.messages
        return Example(
            key=ids_key(ids, begin),
            text=text,
            ids=ids,
            supervised=supervised,
            supervised_bytes=len(data),
            messages=None if messages is None else [*messages, {"role": "assistant", "content": answer}],
            tools=prompt.piece.tools,
            spans=((len(prompt.text), len(text)),),
            ends=np.cumsum(self._table.lengths[ids], dtype=np.int64),
            columns=prompt.piece.columns,
            source=f"{prompt.piece.source}, answered by the {writer}",
            writer=writer,
            behaviour=behaviour,
            version=version,
        )

    def translated(self, prompt: Prompt, written: Written) -> Example | None:
        """Of a teacher with other tokens: its answer as text, read by the student. None: there is nothing in it."""
        assert self._other is not None
        answer = _answer_bytes(self._other, prompt.ids, written.ids).decode(errors="replace")
        whole = written.end == "eos"
        if prompt.messages is not None:
            return self._conversation(prompt, answer, whole)
        text = prompt.text + answer
        piece = replace(
            prompt.piece,
            key=json_key({"prompt": prompt.text, "completion": answer}),
            text=text,
            spans=((len(prompt.text), len(text)),),
            first=True,
            last=whole,
        )
        return self._read(piece)

    def _conversation(self, prompt: Prompt, answer: str, whole: bool) -> Example | None:
        messages = [*(prompt.messages or ()), {"role": "assistant", "content": answer}]
        renderer = ChatRenderer(self._student.tokenizer, self._kwargs, "data")
        rendered = renderer.render(messages, prompt.piece.tools, prompt.piece.source)[0]
        begin, end = rendered.spans[-1]
        if not whole:  # it was cut: the end of the turn is the template's, not the writer's
            end = min(end, begin + rendered.text[begin:end].find(answer.strip()) + len(answer.strip()))
        key = json_key({"messages": messages, "tools": prompt.piece.tools, "written": True})
        piece = replace(
            prompt.piece,
            key=key,
            text=rendered.text,
            spans=((begin, end),),
            template=True,
            messages=messages,
            dropped=False,
        )
        return self._read(piece)

    def _read(self, piece: Piece) -> Example | None:
        (encoded,) = self._encode([piece])
        return None if encoded.example is None else replace(encoded.example, writer="teacher")


def _answer_bytes(table: TokenTable, prompt: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> bytes:
    """The text of an answer, which stands after a prompt: no dummy prefix is taken off it."""
    before = table.text_bytes(prompt.astype(np.int64))
    return table.text_bytes(np.concatenate([prompt, ids]).astype(np.int64))[len(before) :]


def stop_ids(language_model: LanguageModel, chats: bool) -> tuple[int, ...]:
    """What ends a text: the model's own eos ids (there may be several), the tokenizer's, and in chats the end of a turn."""
    config = language_model.model.generation_config
    own = None if config is None else config.eos_token_id
    return _stop_ids(language_model.tokenizer, {own} if isinstance(own, int) else set(own or ()), chats)


def tokenizer_stop_ids(tokenizer: Any, chats: bool) -> tuple[int, ...]:
    """The same, of a model that is elsewhere."""
    return _stop_ids(tokenizer, set(), chats)


def _stop_ids(tokenizer: Any, found: set[int], chats: bool) -> tuple[int, ...]:
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if chats:
        found |= set(TokenTable.from_tokenizer(tokenizer).special.get("end_of_turn", ()))
    return tuple(sorted(found))
