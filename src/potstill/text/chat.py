"""A chat as the text its tokenizer's template makes of it, and where in that text each assistant turn stands.

What a turn was answered from is `render(messages[:i])` with the generation prompt; what the turn itself is, is what
`render(messages[:i + 1])` has beyond that. Most templates only ever append, so that one text serves all turns. Some
rewrite what came before (they strip the thinking of earlier turns, or move the tools to the last question): a turn that
the whole conversation no longer shows as it was given becomes a text of its own.

Templates drop what they do not know, without a word: a student would be taught to answer nothing. So what a turn says and
the functions it calls must be found in its span.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from potstill.text.template import BoundedTemplate, TooMuch
from potstill.types import PotstillError

Message = Mapping[str, Any]
Made = TypeVar("Made")

RESERVED = ("add_generation_prompt", "continue_final_message", "conversation", "return_dict", "tokenize", "tools")
THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Rendered:
    """A text with the character spans to supervise in it, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]
    messages: Sequence[Message]  # what it is the text of: the conversation, or its beginning
    turns: tuple[int, ...]  # the messages whose spans these are


class ChatRenderer:
    """Turns conversations into texts with one tokenizer's chat template and one source's `chat_template_kwargs`."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None, key: str = "data.sources[0]") -> None:
        if not tokenizer.chat_template:
            raise PotstillError(
                f"{key}.messages: the tokenizer {tokenizer.name_or_path} has no chat template; set student.tokenizer "
                "to one that has, or give the data as prompt and completion"
            )
        reserved = sorted(set(kwargs or {}) & set(RESERVED))
        if reserved:
            raise PotstillError(f"{key}.chat_template_kwargs: {', '.join(reserved)} is set by potstill; leave it out")
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._templates: dict[str, BoundedTemplate] = {}
        self._specials = tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        where: str,
        turns: Sequence[int] | None = None,
    ) -> list[Rendered]:
        """The texts of a conversation, the whole of it first; none when nothing is supervised. `turns`: the messages that are,
        in order; None: every assistant turn."""
        if turns is None:
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        texts = self._first_accepted(messages, where, lambda spelled: self._texts(spelled, tools, where, turns))
        # The messages stay as they were given: they are what keys are made of.
        return [replace(text, messages=messages[: len(text.messages)]) for text in texts]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str) -> str:
        """What an assistant answers to: the conversation with its generation prompt."""
        return self._first_accepted(
            messages, where, lambda spelled: self._apply(spelled, tools, where, add_generation_prompt=True)
        )

    def _first_accepted(
        self, messages: Sequence[Message], where: str, made: Callable[[Sequence[Message]], Made]
    ) -> Made:
        """What is made of the first spelling of the messages that the template takes."""
        refused: list[str] = []
        for spelled in _spellings(messages):
            try:
                return made(spelled)
            except PotstillError as error:
                refused.append(str(error).removeprefix(f"{where}: "))
        other = f"; with null and the empty string exchanged, {refused[-1]}" if len(set(refused)) > 1 else ""
        raise PotstillError(f"{where}: {refused[0]}{other}")

    def without_end(self, text: str, begin: int, end: int) -> int:
        """Where a turn's own words end: before the special tokens that its template closes it with."""
        at = end
        while at > begin:
            if text[at - 1].isspace():
                at -= 1
                continue
            mark = next((mark for mark in self._specials if text.endswith(mark, begin, at)), None)
            if mark is None:
                break
            end = at = at - len(mark)
        return end

    def _texts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str, turns: Sequence[int]
    ) -> list[Rendered]:
        if not turns:
            return []
        whole = self._apply(messages, tools, where)
        # Texts and spans by how far the conversation goes. A turn joins the longest that shows it as it was given.
        texts: dict[int, str] = {len(messages): whole}
        spans: dict[int, dict[int, tuple[int, int]]] = {len(messages): {}}
        for i in reversed(turns):
            full = whole if i + 1 == len(messages) else self._apply(messages[: i + 1], tools, where)
            begin, end = self._span(messages, i, full, tools, where)
            _check_shown(messages[i], full[begin:end], f"message {i + 1}", where)
            length = next((n for n, text in texts.items() if text.startswith(full[:end])), i + 1)
            texts.setdefault(length, full)
            spans.setdefault(length, {})[i] = (begin, end)
        return [
            Rendered(texts[n], tuple(reversed(found.values())), messages[:n], tuple(reversed(found)))
            for n, found in spans.items()
            if found
        ]

    def _span(
        self, messages: Sequence[Message], i: int, full: str, tools: Sequence[Any] | None, where: str
    ) -> tuple[int, int]:
        """Where turn `i` begins and ends in `full`, the text of the conversation up to and with it."""
        if messages[i]["role"] != "assistant":
            begin = self._content(messages, i, full, tools, where)
        elif i == 0:
            begin = self._opening(full, messages[0], tools, where)
        else:
            prompt = self._apply(messages[:i], tools, where, add_generation_prompt=True)
            begin = (
                len(prompt) if full.startswith(prompt) else self._after_header(messages[:i], full, prompt, tools, where)
            )
        # The line break many templates write after the end of a turn is the template's, not the model's.
        bare = full.rstrip()
        return begin, len(bare) if len(bare) > begin and bare.endswith(self._specials) else len(full)

    def _content(self, messages: Sequence[Message], i: int, full: str, tools: Sequence[Any] | None, where: str) -> int:
        """Where the words of a message begin that is not the assistant's: no prompt says where its header ends."""
        before = self._apply(messages[:i], tools, where) if i else ""
        content = messages[i]["content"]
        at = (
            full.find(content.strip(), len(before) if full.startswith(before) else 0)
            if isinstance(content, str)
            else -1
        )
        if at < 0:
            raise PotstillError(
                f"{where}: message {i + 1} ({messages[i]['role']}) is to be learnt (data.supervise), and its words are not "
                "in what the chat template makes of it: leave its role out"
            )
        return at

    def _after_header(
        self, before: Sequence[Message], full: str, prompt: str, tools: Sequence[Any] | None, where: str
    ) -> int:
        """Where the turn begins when its generation prompt says more than the turn shows (an opened thought, say)."""
        shorter = self._apply(before, tools, where)
        if not full.startswith(shorter):
            raise PotstillError(
                f"{where}: the chat template does not show turn {len(before) + 1} as a continuation of the turns "
                "before it, so what the assistant said cannot be told apart; use another template (student.tokenizer)"
            )
        same = [a == b for a, b in zip(full, prompt, strict=False)]
        common = full[: same.index(False) if False in same else len(same)]
        # Only whole marks and lines of what the two share are the header; the rest may be the answer's own beginning.
        ends = [common.rfind(mark) + len(mark) for mark in (*self._specials, "\n") if mark in common]
        return max([len(shorter), *ends])

    def _opening(self, full: str, first: Message, tools: Sequence[Any] | None, where: str) -> int:
        """Where the assistant's turn begins when it opens the conversation: there is nothing to render before it."""
        try:
            nothing = self._render([], tools, add_generation_prompt=True)
        except Exception:  # most templates look at the first message
            nothing = None
        if nothing is not None and full.startswith(nothing):
            return len(nothing)
        question = [{"role": "user", "content": "?"}]
        asked = self._apply(question, tools, where)
        header = self._apply(question, tools, where, add_generation_prompt=True)[len(asked) :]
        if header and header in full:
            return full.index(header) + len(header)
        raise PotstillError(f"{where}: the conversation begins with the assistant, which its chat template cannot show")

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str, **kwargs: bool) -> str:
        try:
            return self._render(messages, tools, **kwargs)
        except TooMuch as error:
            raise PotstillError(
                f"{where}: the chat template of {self._tokenizer.name_or_path} is no good: {error}"
            ) from error
        except Exception as error:  # a template may raise anything; most say in a sentence what they do not like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise PotstillError(
                f"{where}: the chat template refuses the first {len(messages)} messages: {reason}"
            ) from error

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        source = self._tokenizer.get_chat_template(tools=tools)
        if source not in self._templates:
            self._templates[source] = BoundedTemplate(source)
        keys = {**self._tokenizer.special_tokens_map, **self._kwargs}
        return self._templates[source].render(messages, tools, add_generation_prompt=add_generation_prompt, **keys)


def _spellings(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages as they were given, then with the other way to say that a call comes without words: some templates
    know null only, others the empty string only."""
    yield messages
    silent = [not message["content"] and bool(message.get("tool_calls")) for message in messages]
    for content in ("", None):
        if any(empty and message["content"] != content for empty, message in zip(silent, messages, strict=True)):
            yield [
                {**message, "content": content} if empty else message
                for empty, message in zip(silent, messages, strict=True)
            ]


def _check_shown(message: Message, span: str, name: str, where: str) -> None:
    """What the message says, but for its thinking, and the functions it calls are in its span of the text."""
    content = message["content"]
    calls = message.get("tool_calls") or []
    dropped = None
    if isinstance(content, str):
        lost = _first_lost(without_thinking(content), span)
        if lost is not None:
            dropped = f"{json.dumps(lost[:40], ensure_ascii=False)} from {name}"
    elif content is None and "None" in span and "None" not in str(calls):
        raise PotstillError(f"{where}: the chat template writes None where {name} has no content")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        function_name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(function_name, str) and function_name not in span:
            dropped = f"the call of {function_name} from {name}"
    if dropped:
        raise PotstillError(
            f"{where}: the chat template drops {dropped}, so the student would not learn it; use a tokenizer whose "
            "template shows it (student.tokenizer), or leave such records out"
        )


def without_thinking(text: str) -> list[str]:
    """What stands between the thoughts of a text. A template may leave thinking out, or open the thought in the generation
    prompt, so a thought may lack its opening mark at the beginning, or its closing one."""
    first = text.find(THINK)
    parts, at = [], 0
    unopened = text.rfind(THOUGHT, 0, first if first >= 0 else len(text))
    if unopened >= 0:
        parts, at = [""], unopened + len(THOUGHT)
    last = text.rfind(THOUGHT)
    while (begin := text.find(THINK, at)) >= 0:
        parts.append(text[at:begin])
        # Looked for only where there is one: else each of many open marks would look through all the rest.
        at = text.find(THOUGHT, begin) + len(THOUGHT) if begin < last else begin + len(THINK)
    return [*parts, text[at:]]


def _first_lost(parts: Sequence[str], span: str) -> str | None:
    """The first part that is not in `span`. Each is looked for after the one before it first: in a long text of many parts
    looking from the beginning would take the square of its length."""
    at = 0
    for part in dict.fromkeys(part.strip() for part in parts):
        found = span.find(part, at)
        if found >= 0:
            at = found
        elif part not in span:
            return part
    return None


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a record, checked. A message's own keys without a value are left out; what is null deeper down, in
    the arguments of a call, say, was meant."""
    value = _from_json(value)
    if not isinstance(value, list) or not value:
        raise PotstillError(f"{where} is not a list of messages, each with role and content")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PotstillError(f"{where}: message {number} has no role")
        message = {key: content for key, content in message.items() if content is not None}
        if not isinstance(message.get("content"), str | list):
            if "content" in message or not message.get("tool_calls"):
                raise PotstillError(f"{where}: message {number} ({message['role']}) has no text as its content")
            message["content"] = None  # there, because a template may ask whether it is none
        messages.append(message)
    return messages


def read_tools(value: Any, where: str) -> list[Any] | None:
    value = _from_json(value)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise PotstillError(f"{where} is not a list of tools, each a JSON schema")
    return value


def _from_json(value: Any) -> Any:
    """Many data sets keep nested columns as JSON in a string."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
