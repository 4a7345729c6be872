"""From a record to what a writer goes on from, and from what it wrote to an Example.

The ids that were written stay as they are: no tokenizer need give them back from the text, and the student is corrected on
what it really wrote. What a teacher with other tokens wrote reaches the student as text.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.data import Encoder, Piece, ids_key, json_key, untrimmed
from potstill.models import LanguageModel
from potstill.rollouts.engine import Completion
from potstill.text import TokenTable
from potstill.text.chat import ChatRenderer
from potstill.types import Example, PotstillError


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer, in one writer's tokens."""

    piece: Piece  # of the data set
    text: str  # as the writer reads it: rendered by its template, or plain
    ids: npt.NDArray[np.int32]  # [P]
    cut: int  # tokens left out for want of room: on the left, of the beginning of a plain text at its end
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
        if asked is not None and len(ids) and int(ids[0]) == self._tokenizer.bos_token_id:
            before = 1  # written by the template
        cut = max(0, len(ids) - self._most)
        if cut:  # on the left, but for what stands before every text
            first, spans = before + cut, encoding.offsets
            while first < len(ids) - 1 and spans[first][0] < spans[first - 1][1]:
                first += 1  # within a character
            text, cut = text[spans[first][0] :], first - before
            ids = np.concatenate([ids[:before], ids[first:]])
        return Prompt(piece, text, ids, cut, asked) if len(ids) else None

    def _beginning(self, piece: Piece) -> Prompt | None:
        encoding = self._backend.encode(piece.text)
        ids = np.array(encoding.ids, dtype=np.int32)
        spans = encoding.offsets
        last = len(ids) - self._after
        wanted = min(self._before + self._prompt_tokens, last)
        end = min(wanted, self._most)
        cut = max(0, wanted - end)
        while self._before < end < last and spans[end][0] < spans[end - 1][1]:
            end -= 1  # within a character
        if end <= self._before:
            return None
        return Prompt(piece, piece.text[: spans[end - 1][1]], ids[:end], cut, None)


class Answers:
    """What was written, as Examples of the student. `teacher`: a writer with other tokens than the student's."""

    def __init__(self, student: LanguageModel, encode: Encoder, kwargs: Mapping[str, Any], teacher: Any = None) -> None:
        self._table = TokenTable.from_tokenizer(student.tokenizer)
        self._student, self._encode, self._kwargs = student, encode, kwargs
        self._other = None if teacher is None else TokenTable.from_tokenizer(teacher)
        self._renderer: ChatRenderer | None = None
        self.counts: Counter[str] = Counter()  # of what was left out

    def own(self, prompt: Prompt, written: Completion, writer: str, version: int | None) -> Example:
        """In the student's own tokens, as they were written."""
        written = self._known(written, len(self._table))
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

    def _known(self, written: Completion, ids: int) -> Completion:
        """Up to the first id that no token has: the padding of a head's rows, which some engines draw from too."""
        beyond = np.flatnonzero(written.ids >= ids)
        if not len(beyond):
            return written
        self.counts["unknown_ids"] += 1
        return Completion(written.ids[: beyond[0]], written.logprobs[: beyond[0]], "length")

    def translated(self, prompt: Prompt, written: Completion) -> Example:
        """Of a teacher with other tokens: its answer as text, read by the student."""
        assert self._other is not None
        written = self._known(written, len(self._other))
        data = _answer_bytes(self._other, prompt.ids, written.ids)
        # An answer that was cut may end within a character.
        answer = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=False)
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

    def _conversation(self, prompt: Prompt, answer: str, whole: bool) -> Example:
        messages = [*(prompt.messages or ()), {"role": "assistant", "content": answer}]
        if self._renderer is None:
            self._renderer = ChatRenderer(self._student.tokenizer, self._kwargs, "data")
        key = json_key({"messages": messages, "tools": prompt.piece.tools, "written": True})
        piece = replace(prompt.piece, key=key, text="", template=True, messages=messages, dropped=False)
        try:
            rendered = self._renderer.render(messages, prompt.piece.tools, prompt.piece.source)[0]
        except PotstillError:  # a teacher may write what no template can show
            return self._read(replace(piece, dropped=True))
        begin, end = rendered.spans[-1]
        if not whole:  # it was cut: the end of the turn is the template's, not the writer's
            end = self._renderer.without_end(rendered.text, begin, end)
        return self._read(replace(piece, text=rendered.text, spans=((begin, end),)))

    def _read(self, piece: Piece) -> Example:
        (encoded,) = self._encode([piece])
        self.counts["cut_examples"] += encoded.cut > 0
        self.counts["cut_tokens"] += encoded.cut
        if encoded.example is None:  # nothing to learn, but its place in the step stays
            nothing = np.zeros(1, dtype=np.bool_)
            return Example(
                piece.key, "", np.zeros(1, dtype=np.int32), nothing, 0, columns=piece.columns, writer="teacher"
            )
        return replace(encoded.example, writer="teacher")


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
