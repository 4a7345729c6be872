"""From an example of the data set to what a writer goes on from, and from what it wrote to an Example.

The ids that were written stay as they are: no tokenizer need give them back from the text, and the student is corrected on
what it really wrote. What a teacher with other tokens wrote reaches the student as text.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.config import TokenWeightsConfig
from potstill.data import Encoder, around, ids_key, json_key, untrimmed
from potstill.data.weighing import weigh
from potstill.models import LanguageModel
from potstill.rollouts.engine import Completion
from potstill.text import TokenTable
from potstill.text.chat import ChatRenderer
from potstill.types import Example, PotstillError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer, in one writer's tokens."""

    example: Example  # of the data set
    text: str  # as the writer reads it: rendered by its template, or plain
    ids: Ids  # [P]
    cut: int  # tokens left out for want of room: on the left, of the beginning of a plain text at its end
    messages: Sequence[Mapping[str, Any]] | None  # of a chat: what is answered


def with_turn(example: Example, number: int) -> Example:
    """A chat that ends with one of the assistant turns that are learnt in it, or as it is where its last message is still to be
    answered; which of these, by a number that is drawn anew for each prompt."""
    messages = example.messages or ()
    ends = [i + 1 for i in example.turns or () if messages[i]["role"] == "assistant"]
    if messages and messages[-1]["role"] != "assistant" and not example.split:
        ends.append(len(messages))
    return replace(example, messages=messages[: ends[number % len(ends)]]) if ends else example


class Prompter:
    """Examples of a data set as prompts of at most `most` tokens. Of a plain text the first `prompt_tokens` are the prompt."""

    def __init__(self, tokenizer: Any, *, most: int, prompt_tokens: int, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._most, self._prompt_tokens = most, prompt_tokens
        self._backend = untrimmed(tokenizer.backend_tokenizer)
        self._before, self._after = around(self._backend)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer, self._kwargs, "data")

    def __call__(self, example: Example) -> Prompt | None:
        """None: there is nothing to go on from."""
        messages = example.messages
        if messages is not None:
            asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages  # a chosen turn is the last
            if not asked:
                return None
            return self._whole(example, self._renderer.prompt(asked, example.tools, example.source), asked)
        if not example.text:
            return None
        if example.spans is not None:
            return self._whole(example, example.text[: example.spans[0][0]])
        return self._beginning(example)

    def _whole(self, example: Example, text: str, asked: Sequence[Mapping[str, Any]] | None = None) -> Prompt | None:
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
        return Prompt(example, text, ids, cut, asked) if len(ids) else None

    def _beginning(self, example: Example) -> Prompt | None:
        encoding = self._backend.encode(example.text)
        ids, spans = np.array(encoding.ids, dtype=np.int32), encoding.offsets
        last = len(ids) - self._after
        wanted = min(self._before + self._prompt_tokens, last)
        end = min(wanted, self._most)
        cut = wanted - end
        while self._before < end < last and spans[end][0] < spans[end - 1][1]:
            end -= 1  # within a character
        return Prompt(example, example.text[: spans[end - 1][1]], ids[:end], cut, None) if end > self._before else None


class Answers:
    """What was written, as Examples of the student. `teacher`: the tokenizer of a teacher that writes, where it is another
    than the student's. `token_weights`: what each token counts, in what is given in the student's own tokens (`encode` sees to
    the rest)."""

    def __init__(
        self,
        student: LanguageModel,
        encode: Encoder,
        kwargs: Mapping[str, Any],
        teacher: Any = None,
        token_weights: TokenWeightsConfig | None = None,
    ) -> None:
        self._table = TokenTable.from_tokenizer(student.tokenizer)
        self._student, self._encode, self._kwargs = student, encode, kwargs
        self._other = None if teacher is None else TokenTable.from_tokenizer(teacher)
        self._weights = token_weights
        self.counts: Counter[str] = Counter()  # of what was left out

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._student.tokenizer, self._kwargs, "data")

    def __call__(self, prompt: Prompt, written: Completion, writer: str, version: int) -> Example:
        """`version`: of the student, optimizer steps taken."""
        if writer == "teacher" and self._other is not None:
            return self.translated(prompt, written)
        return self.own(prompt, written, writer, version if writer == "student" else None)

    def own(self, prompt: Prompt, written: Completion, writer: str, version: int | None) -> Example:
        """In the student's own tokens, as they were written."""
        written, data = self._known(prompt, written, self._table)
        ids = np.concatenate([prompt.ids, written.ids])
        begin = len(prompt.ids)
        supervised = np.arange(len(ids)) >= max(1, begin)
        behaviour = None
        if writer == "student":
            behaviour = np.concatenate([np.zeros(begin, dtype=np.float32), written.logprobs], dtype=np.float32)
        answer = data.decode(errors="replace")
        text = prompt.text + answer
        messages, sizes = prompt.messages, self._table.lengths[ids]
        example = replace(
            prompt.example,
            key=ids_key(ids, begin),
            text=text,
            ids=ids,
            supervised=supervised,
            supervised_bytes=len(data),
            messages=None if messages is None else [*messages, {"role": "assistant", "content": answer}],
            turns=None if messages is None else (len(messages),),
            spans=((len(prompt.text), len(text)),),
            ends=np.cumsum(sizes, dtype=np.int64),
            source=f"{prompt.example.source}, answered by the {writer}",
            writer=writer,
            behaviour=behaviour,
            version=version,
        )
        return weigh(example, sizes, self._weights)

    def _known(
        self, prompt: Prompt, written: Completion, table: TokenTable, counts: Counter[str] | None = None
    ) -> tuple[Completion, bytes]:
        """Up to the first id that no token has (the padding of a head's rows, which some engines draw from too); and its text,
        from which no dummy prefix is taken off, for it stands after a prompt."""
        beyond = np.flatnonzero(written.ids >= len(table))
        if len(beyond):
            (self.counts if counts is None else counts)["unknown_ids"] += 1
            written = Completion(written.ids[: beyond[0]], written.logprobs[: beyond[0]], "length")
        before = table.text_bytes(prompt.ids.astype(np.int64))
        return written, table.text_bytes(np.concatenate([prompt.ids, written.ids]).astype(np.int64))[len(before) :]

    def text(self, prompt: Prompt, written: Completion) -> str:
        """What the student wrote."""
        return self._known(prompt, written, self._table, Counter())[1].decode(errors="replace")

    def translated(self, prompt: Prompt, written: Completion) -> Example:
        """Of a teacher with other tokens: its answer as text, read by the student."""
        assert self._other is not None
        written, data = self._known(prompt, written, self._other)
        # An answer that was cut may end within a character.
        answer = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=False)
        whole = written.end == "eos"
        if prompt.messages is not None:
            return self._conversation(prompt, answer, whole)
        text = prompt.text + answer
        key = json_key({"prompt": prompt.text, "completion": answer})
        return self._read(
            replace(prompt.example, key=key, text=text, spans=((len(prompt.text), len(text)),), last=whole)
        )

    def _conversation(self, prompt: Prompt, answer: str, whole: bool) -> Example:
        messages = [*(prompt.messages or ()), {"role": "assistant", "content": answer}]
        tools = prompt.example.tools
        example = replace(
            prompt.example,
            key=json_key({"messages": messages, "tools": tools, "written": True}),
            messages=messages,
            turns=(len(messages) - 1,),
        )
        try:
            rendered = self._renderer.render(messages, tools, example.source, example.turns)[0]
        except PotstillError:  # a teacher may write what no template can show
            return self._read(replace(example, text=""))
        begin, end = rendered.spans[-1]
        if not whole:  # it was cut: the end of the turn is the template's, not the writer's
            end = self._renderer.without_end(rendered.text, begin, end)
        return self._read(replace(example, text=rendered.text, spans=((begin, end),)))

    def _read(self, example: Example) -> Example:
        (encoded,) = self._encode([replace(example, writer="teacher")])
        self.counts["cut_examples"] += encoded.cut > 0
        self.counts["cut_tokens"] += encoded.cut
        # Where there is nothing to learn, its place in the step stays.
        return encoded.example or Example(
            example.key,
            "",
            np.zeros(1, dtype=np.int32),
            np.zeros(1, dtype=np.bool_),
            columns=example.columns,
            writer="teacher",
        )


def stop_ids(writer: Any, chats: bool) -> tuple[int, ...]:
    """What ends a text: the model's own eos ids (there may be several; unknown where the writer is behind a server), its
    tokenizer's, and in chats the end of a turn."""
    config = writer.model.generation_config if isinstance(writer, LanguageModel) else None
    own = None if config is None else config.eos_token_id
    found = {own} if isinstance(own, int) else set(own or ())
    if writer.tokenizer.eos_token_id is not None:
        found.add(writer.tokenizer.eos_token_id)
    if chats:
        found |= set(TokenTable.from_tokenizer(writer.tokenizer).special.get("end_of_turn", ()))
    return tuple(sorted(found))
