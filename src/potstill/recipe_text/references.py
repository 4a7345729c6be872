r"""`${train.steps}` in a recipe: the value of another of its keys. Nothing else: no environment, no files, no functions.

`\${` is a `${` that means itself, and `\\${` a backslash before a reference."""

from __future__ import annotations

import json
import re
from typing import Any

from potstill.errors import PotstillError

MOST_CHARACTERS = 100_000  # that references may bring in: they can double one another
BEGIN = re.compile(r"(?<!\\)(\\*)\$\{")  # from the first backslash on: else every one of many would be a beginning
DEEPEST = 100  # references that lead to references
ADVICE = "only other keys of it can be referred to, as in ${train.steps}; write \\${ for a ${ that means itself"
PATH = re.compile(r"[^\W\d]\w*(?:\.[\w-]+|\[\d+\])*")


def escaped(value: Any) -> Any:
    r"""With `${` written so that it means itself, in every text."""
    if isinstance(value, dict):
        return {key: escaped(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [escaped(sub) for sub in value]
    return BEGIN.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def resolved(keys: Any) -> Any:
    """The keys of a recipe with the value of another key in the place of each reference to it."""
    return _Resolver(keys).value(keys, "")


class _Resolver:
    def __init__(self, keys: Any) -> None:
        self._keys = keys
        self._left = MOST_CHARACTERS
        self._under_way: list[str] = []

    def value(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return {key: self.value(sub, f"{where}.{key}" if where else str(key)) for key, sub in value.items()}
        if isinstance(value, list):
            return [self.value(sub, f"{where}[{index}]") for index, sub in enumerate(value)]
        return self._text(value, where) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, where: str) -> Any:
        made, at = [], 0
        for found in BEGIN.finditer(text):
            if found.start() < at:  # inside the reference before it
                raise PotstillError(f"{where}: a reference inside a reference; {ADVICE}")
            made.append(text[at : found.start()] + "\\" * (len(found[1]) // 2))
            at = found.end()
            if len(found[1]) % 2:
                made.append("${")
                continue
            end = text.find("}", at)
            name = text[at:end] if end >= 0 else text[at:]
            if end < 0 or not PATH.fullmatch(name.strip()):
                raise PotstillError(
                    f"{where}: ${{{name[:60]}{'}' if end >= 0 else ''} is no key of the recipe; {ADVICE}"
                )
            other = self._referred(name.strip(), where)
            at = end + 1
            if found.start() == 0 and not found[1] and at == len(text):
                return other  # a number stays a number
            if isinstance(other, dict | list):
                raise PotstillError(f"{where}: ${{{name}}} is a section or a list, and cannot stand inside a text")
            made.append(other if isinstance(other, str) else json.dumps(other))
        return "".join([*made, text[at:]])

    def _referred(self, name: str, where: str) -> Any:
        if name in self._under_way:
            raise PotstillError(f"{where}: ${{{name}}} refers to itself, by way of {', '.join(self._under_way)}")
        if len(self._under_way) >= DEEPEST:
            raise PotstillError(
                f"{where}: ${{{name}}} is reached by more than {DEEPEST} references, one after the other"
            )
        node = self._keys
        for part in re.split(r"[.\[]", name.replace("]", "")):
            place: Any = int(part) if isinstance(node, list) and part.isdecimal() else part
            there = range(len(node)) if isinstance(node, list) else node if isinstance(node, dict) else ()
            if place not in there:
                raise PotstillError(f"{where}: ${{{name}}}: the recipe has no key {name}; {ADVICE}")
            node = node[place]
        self._under_way.append(name)
        value = self.value(node, name)
        self._under_way.pop()
        self._left -= 1 + len(str(value))
        if self._left < 0:
            raise PotstillError(f"{where}: references bring in more than {MOST_CHARACTERS:,} characters")
        return value
