"""A student's texts as a teacher with another tokenizer, or with a prompt of its own, reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from potstill.cache.reading import TeacherText, chat_kwargs
from potstill.config import DataConfig, TeacherConfig
from potstill.text.chat import ChatRenderer
from potstill.types import Example, PotstillError

NOTHING = Example("", "")


def reader_of(config: TeacherConfig, tokenizer: Any, positions: int | None, data: DataConfig) -> TeacherReader:
    """As a recipe's teacher reads texts, in its own tokens."""
    kwargs = chat_kwargs(data) | (config.chat_template_kwargs or {})
    return TeacherReader(tokenizer, positions, kwargs, config.context_column, config.system)


class TeacherReader:
    """`context_column`: the column with what the teacher reads first, and the student does not. `system`: its system message of
    every chat."""

    def __init__(
        self,
        tokenizer: Any,
        positions: int | None,
        kwargs: Mapping[str, Any],
        context_column: str | None = None,
        system: str | None = None,
    ) -> None:
        self._text = TeacherText(tokenizer, positions)
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._column, self._system = context_column, system
        self._renderer: ChatRenderer | None = None

    def __call__(self, examples: Sequence[Example]) -> list[Example]:
        """NOTHING where there is nothing to predict."""
        return [read or NOTHING for read in self._text([self.as_read(example) for example in examples])]

    def as_read(self, example: Example) -> Example:
        """The example with the text that the teacher reads."""
        context = None if self._column is None else example.columns[self._column]
        if example.messages is not None:
            return self._conversation(example, self._system if context is None else context)
        if context is None:
            return example
        # In place of the prompt that the student reads, where there is one.
        begin = 0 if example.spans is None else example.spans[0][0]
        text = context + example.text[begin:]
        return replace(example, text=text, spans=((len(context), len(text)),))

    def _conversation(self, example: Example, context: str | None) -> Example:
        messages = list(example.messages or ())
        if context is not None:
            others = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": context}, *others]
        # The same turns as the student learns; with one more message before them, or not.
        more = len(messages) - len(example.messages or ())
        turns = None if example.turns is None else [i + more for i in example.turns]
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._kwargs, "teachers")
        try:
            rendered, *_ = self._renderer.render(messages, example.tools, example.source, turns)
        except PotstillError:
            if example.writer is None:
                raise
            return replace(example, text="")  # the student may write what no template can show
        return replace(example, text=rendered.text, spans=rendered.spans)
