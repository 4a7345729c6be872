"""YAML as recipes have it: texts, numbers, true, false, null, lists and keys, and nothing that runs or reads anything else.

What is written here is read back as it is: reader and writer go by the same rules about what a bare word means."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from potstill.errors import PotstillError

MOST_VALUES = 100_000  # with what aliases repeat: a file of a few lines can stand for billions
MOST_LEVELS = 100  # one inside the other
KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "merge")
TAG = "tag:yaml.org,2002:"
# As in YAML 1.2, where 1e-3 is a number; PyYAML follows YAML 1.1, in which it is a text.
FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
    |[-+]?\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """What a bare word means, by its first character: as in PyYAML, but for floats, and a date is a text."""
    kept = {
        first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(TAG) in KINDS and tag != f"{TAG}float"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        kept.setdefault(first, []).append((f"{TAG}float", FLOAT))
    return kept


CONSTRUCTORS = {t: make for t, make in yaml.SafeLoader.yaml_constructors.items() if t is None or t[len(TAG) :] in KINDS}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    yaml_constructors = CONSTRUCTORS
    _level = 0

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if _values(node, {}) > MOST_VALUES:
            raise PotstillError(f"it stands for more than {MOST_VALUES:,} values (aliases repeat what they name)")
        return node

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise PotstillError(f"it is nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if value.isascii():
            return value
        try:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")  # JSON has such pairs for 🙂
        except UnicodeDecodeError:
            where = f"line {node.start_mark.line + 1}"
            raise PotstillError(f"{where}: it holds bytes or half of a surrogate pair that are no character") from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            given = set()
            for key, _ in node.value:
                where = f"line {key.start_mark.line + 1}"
                if key.tag not in (f"{TAG}str", f"{TAG}merge"):
                    shown = key.value if isinstance(key, yaml.ScalarNode) else "of several values"
                    raise PotstillError(f"{where}: the key {shown} is no text; put it in quotes")
                if key.tag == f"{TAG}str" and key.value in given:
                    raise PotstillError(f"{where}: the key {key.value} stands there twice")
                given.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _WordLoader(_Loader):
    """Of one value on a command line, where * begins a glob: there is nothing an alias or a tag could name."""

    fetch_alias = fetch_anchor = fetch_tag = yaml.scanner.Scanner.fetch_plain


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def choose_scalar_style(self) -> str:
        # PyYAML breaks lines in quotes, and folds such breaks, in ways that do not always come back.
        text = self.event.value
        return '"' if not text.isprintable() else super().choose_scalar_style()


def write_yaml(value: Any) -> str:
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False, width=float("inf")
    )


def read_yaml(text: str, loader: Callable[..., Any] = _Loader) -> Any:
    """What a YAML text holds. An error says what is wrong with it, in one line."""
    try:
        return yaml.load(text, Loader=loader)  # a SafeLoader with still fewer kinds of values
    except yaml.YAMLError as error:
        raise PotstillError(" ".join(str(error).split())) from None
    except (ValueError, KeyError, AttributeError, OverflowError) as error:  # a tag with what it cannot be: !!int x
        raise PotstillError(f"a value in it cannot be read ({type(error).__name__}: {str(error)[:100]})") from None


def read_word(text: str) -> Any:
    """What a value on a command line means."""
    return read_yaml(text, _WordLoader)


def _values(node: Any, counted: dict[int, int]) -> int:
    """How many values a node stands for, each alias with all that it repeats."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = MOST_VALUES  # of a node that stands in itself
        pairs = isinstance(node, yaml.MappingNode)
        inner = [one for pair in node.value for one in pair] if pairs else node.value
        counted[id(node)] = 1 + sum(_values(one, counted) for one in inner)
    return counted[id(node)]
