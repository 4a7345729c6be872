"""A chat template, which is a program that comes with a tokenizer: rendered as transformers does it, and with bounds.

The sandbox keeps a template from files and from Python; here it also gets a limited number of steps and of characters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Concat
from jinja2.runtime import str_join
from transformers.utils.chat_template_utils import _compile_jinja_template

MOST_STEPS = 2_000_000  # blocks that are entered: passes of a loop, calls of a macro. A message takes some ten
MOST_CHARACTERS = 100_000_000


class TooMuch(Exception):
    """A template that does not come to an end, or writes without one."""


class BoundedTemplate:
    def __init__(self, source: str) -> None:
        # transformers' own environment, with its filters and tags.
        environment = _compile_jinja_template("").environment.overlay()
        environment.code_generator_class = _Counting
        environment.intercepted_binops = frozenset(["*", "+", "**"])
        environment.call_binop = _binop(environment.binop_table)
        environment.step = self._step
        environment.joined = _joined
        self._taken = threading.local()
        self._taken.steps = 0
        self._template: Template = environment.from_string(source)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, **keys: Any) -> str:
        self._taken.steps = 0
        parts: list[str] = []
        size = 0
        for part in self._template.generate(messages=list(messages), tools=tools, documents=None, **keys):
            parts.append(part)
            size += len(part)
            _check_size(size)
        return "".join(parts)

    def _step(self) -> None:
        self._taken.steps += 1
        if self._taken.steps > MOST_STEPS:
            raise TooMuch(f"it takes more than {MOST_STEPS:,} steps; it may be endless")


class _Counting(CodeGenerator):
    """Jinja's compiler, with a step at the beginning of each block."""

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _joined(values: tuple[Any, ...]) -> str:
    _check_size(sum(len(value) for value in values if isinstance(value, str)))
    return str_join(values)


def _binop(table: Mapping[str, Any]) -> Any:
    """Of values that can grow: `x + x` in a loop doubles, and `'x' * 10**10` needs no loop."""

    def call(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
            _check_size(left.bit_length() * right)
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    _check_size(len(many) * times)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check_size(len(left) + len(right))
        return table[operator](left, right)

    return call


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TooMuch(f"it writes more than {MOST_CHARACTERS:,} characters")
