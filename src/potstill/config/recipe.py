"""Recipes in and out: YAML with dotted overrides into a checked Recipe, with every problem reported at once."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from potstill.config import Recipe
from potstill.config.foreign_names import OUR_NAMES
from potstill.errors import PotstillError
from potstill.recipe_text.plain_yaml import read_word, read_yaml, write_yaml
from potstill.recipe_text.references import escaped, resolved

BRACKET_GLOB = re.compile(r"\[[^\]]+\][^\]\s,]+")  # [ab]*.jsonl, which is no list
Checked = TypeVar("Checked", bound=BaseModel)


def load_recipe(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file, a mapping or a Recipe, with `key.sub=value` overrides on top. References to other keys
    (`${train.steps}`) mean what these are in the end; in a mapping or a Recipe, `${` is a text like any other."""
    if isinstance(recipe, Recipe):
        keys, where = escaped(recipe.model_dump(mode="json", by_alias=True)), "the recipe"
    elif isinstance(recipe, Mapping):
        keys, where = escaped(dict(recipe)), "the recipe"
    else:
        keys, where = _read_file(Path(recipe)), str(recipe)
    return checked(Recipe, _resolved(_overridden(keys, overrides), where), where)


def read_keys(path: Path) -> tuple[str, dict[str, Any]]:
    """A recipe's text and its keys, with references resolved and nothing checked."""
    keys = _resolved(_read_file(path), str(path))
    return path.read_text(encoding="utf-8"), keys


def _resolved(keys: dict[str, Any], where: str) -> Any:
    try:
        return resolved(keys)
    except PotstillError as error:
        raise PotstillError(f"{where}: {error}") from None


def checked(section: type[Checked], keys: Any, where: str) -> Checked:
    """Keys as a checked section of a recipe; all that is wrong with them in one error."""
    try:
        return section.model_validate(keys)
    except ValidationError as error:
        raise PotstillError(_explain(error, section, where)) from None


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe with every default spelled out; `load_recipe` reads it back to an equal one."""
    return write_yaml(escaped(recipe.model_dump(mode="json", by_alias=True)))


def recipe_schema() -> str:
    """JSON Schema of a recipe, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys in which two recipes differ, as `key: old → new`."""
    before, after = (_flat(r.model_dump(mode="json", by_alias=True)) for r in (old, new))
    keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    return [f"{k}: {before.get(k)} → {after.get(k)}" for k in keys]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, sub in value.items() for k, v in _flat(sub, f"{prefix}{key}.").items()}
    if isinstance(value, list) and value:
        return {k: v for i, sub in enumerate(value) for k, v in _flat(sub, f"{prefix}{i}.").items()}
    return {prefix.rstrip("."): value}


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PotstillError(f"there is no recipe {path}")
    try:
        loaded = read_yaml(path.read_text(encoding="utf-8"))
    except (PotstillError, UnicodeDecodeError) as error:
        raise PotstillError(f"{path} is not a readable YAML recipe: {error}") from None
    except OSError as error:
        raise PotstillError(f"cannot read the recipe {path}: {error.strerror or error}") from None
    if not isinstance(loaded, dict):
        raise PotstillError(f"{path} is not a recipe: expected keys such as student, data and train at the top")
    return loaded


def _overridden(keys: Any, overrides: Iterable[str]) -> Any:
    keys = copy.deepcopy(keys)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise PotstillError(f"cannot read the override {override!r}: write key.sub=value, as in train.steps=200")
        try:
            value = None if not text else text if BRACKET_GLOB.fullmatch(text) else read_word(text)
        except PotstillError as error:
            raise PotstillError(f"cannot apply the override {override!r}: {error}") from None
        _set(keys, key.replace("[", ".").replace("]", "").split("."), value, override)
    return keys


def _set(node: Any, path: list[str], value: Any, override: str) -> None:
    """Set `a.b.0.c` in nested keys; a list's index must be one that is there."""
    for depth, part in enumerate(path):
        place: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                at = ".".join(path[:depth])
                raise PotstillError(
                    f"override {override!r}: {at} is a list of {len(node)}; {part!r} is not one of its places"
                )
            place = int(part)
        if depth == len(path) - 1:
            node[place] = value
        elif not isinstance(node.get(place) if isinstance(node, dict) else node[place], dict | list):
            node[place] = {}
        node = node[place]


# What a value of the wrong kind should have been, in our words; by the first word of pydantic's name for the error.
EXPECTED = {
    "bool": "true or false",
    "dict": "keys with values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a section with keys",
    "string": "text",
    "tuple": "a list",
}


def _explain(error: ValidationError, root: type[BaseModel], where: str) -> str:
    """All problems of a recipe, one line each: the key, the value and what is allowed."""
    found: dict[str, dict[str, list[str]]] = {}  # by key, then by how the sentence ends: what is allowed
    for detail in error.errors(include_url=False):
        key, section = _place(detail["loc"], root)
        allowed, ending = _problem(detail, section)
        options = found.setdefault(key, {}).setdefault(ending, [])
        if allowed not in options:
            options.append(allowed)
    # A value that could be a number or a section: when something inside the section is wrong, that is what to say.
    told = {key: endings for key, endings in found.items() if not any(k.startswith(f"{key}.") for k in found if key)}
    problems = []
    for key, endings in told.items():
        # A value of one kind or another: when it is said what is wrong with it, that it is not of the other is no news.
        sentences = "; ".join(_sentences({"": endings[""]} if "" in endings else endings))
        problems += [f"{key}: {sentences}"] if key else sentences.splitlines()  # rules between sections name their keys
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{where} has {len(problems)} problems:\n" + "\n".join(f"  - {line}" for line in problems)


def _sentences(endings: Mapping[str, list[str]]) -> Iterator[str]:
    for ending, allowed in endings.items():
        yield " or ".join([allowed[0], *(a.removeprefix("should be ") for a in allowed[1:])]) + ending


def _problem(detail: ErrorDetails, section: type[BaseModel] | None) -> tuple[str, str]:
    """What is allowed, and what was there instead."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        names = [f.alias or name for name, f in section.model_fields.items()] if section else []
        name = str(detail["loc"][-1])
        if name in OUR_NAMES:
            return f"no such key; here it is {OUR_NAMES[name]}", ""
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        return "no such key; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"), ""
    if kind == "missing":
        return "is missing", ""
    if kind == "value_error":
        return detail["msg"].removeprefix("Value error, "), ""
    shown = repr(detail["input"])
    instead = f", not {shown if len(shown) <= 200 else f'{shown[:200]}…'}"
    if kind == "too_short":
        return f"should have at least {detail['ctx']['min_length']}", instead
    wrong_kind = re.fullmatch(r"([a-z]+)_(?:type|parsing|from_float)", kind)
    allowed = EXPECTED.get(wrong_kind[1] if wrong_kind else "") or detail["msg"].removeprefix("Input should be ")
    return f"should be {allowed}", instead


def _place(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key of an error and the model that holds it. Pydantic's location also names the branch of a union; those
    parts are not keys and are left out."""
    key = ""
    holder: Any = root
    section: type[BaseModel] | None = root
    for part in loc:
        models = _models(holder)
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        fields = {f.alias or name: f for m in models for name, f in m.model_fields.items()}
        section = models[0] if models else None
        if part in fields:
            holder = fields[part].annotation
        elif part == loc[-1] and models and not _is_branch(part, models):
            holder = None
        else:
            continue
        key += f".{part}" if key else part
    return key, section


def _is_branch(part: str, models: list[type[BaseModel]]) -> bool:
    return part in {m.__name__ for m in models} or part in {"float", "int", "str"} or "[" in part


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models an annotation holds, through lists, unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, Annotated):
        return [m for arg in get_args(annotation) for m in _models(arg)]
    return []
