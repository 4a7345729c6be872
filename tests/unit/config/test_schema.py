"""The schema, the recipes and the recipes in the docs fit the code. The other house rules: tools/check_house.py."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from potstill.config import LossConfig
from potstill.config.recipe import load_recipe, recipe_schema
from potstill.losses import DIVERGENCES

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "potstill"
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(SOURCE / "shipped").glob("*.yaml")])
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT)))
def test_recipes_load_and_fit_the_schema(path: Path) -> None:
    load_recipe(path)
    schema = json.loads(recipe_schema())
    assert list(broken(yaml.safe_load(path.read_text(encoding="utf-8")), schema, schema)) == []


def test_the_schema_refuses() -> None:
    schema = json.loads(recipe_schema())
    keys = yaml.safe_load((ROOT / "recipes" / "distil.yaml").read_text(encoding="utf-8"))
    for path, value in [
        (("train", "stepz"), 1),
        (("train", "steps"), 0),
        (("train", "steps"), "many"),
        (("loss", "divergence"), "kl"),
        (("loss", "temperature"), {"start": 1}),
        (("data", "sources"), []),
        (("data", "sources", 0, "fraction"), 1.5),
        (("student", "layers"), [-1]),
        (("train", "max_grad_norm"), False),
        (("train", "optimizer", "betas"), [0.9]),
    ]:
        copy = json.loads(json.dumps(keys))
        holder = copy
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = value
        assert list(broken(copy, schema, schema)), path
    assert list(broken({"student": {}}, schema, schema))


def broken(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> Iterator[str]:
    """What JSON Schema says against `value`. Knows the words that pydantic writes and refuses to guess at others."""
    known = {
        "$defs", "$ref", "additionalProperties", "anyOf", "const", "default", "description", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "items", "maxItems", "maximum", "minItems", "minimum", "prefixItems", "properties",
        "required", "title", "type",
    }  # fmt: skip
    assert set(schema) <= known, f"the test does not know {set(schema) - known}"
    if "$ref" in schema:
        yield from broken(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "anyOf" in schema and all(list(broken(value, each, root, at)) for each in schema["anyOf"]):
        yield f"{at}: {value!r} is none of the kinds allowed"
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        yield f"{at}: {value!r} is not one of the values allowed"
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": int | float,
    }  # fmt: skip
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at}: {value!r} is not of type {kind}"
        return
    if isinstance(value, int | float):
        for word, holds in (
            ("minimum", lambda least: value >= least), ("maximum", lambda most: value <= most),
            ("exclusiveMinimum", lambda least: value > least), ("exclusiveMaximum", lambda most: value < most),
        ):  # fmt: skip
            if word in schema and not holds(schema[word]):
                yield f"{at}: {value!r} breaks {word} {schema[word]}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{at}: {len(value)} items"
        each = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        for index, (item, inner) in enumerate(zip(value, each, strict=False)):
            yield from broken(item, inner, root, f"{at}[{index}]")
    if isinstance(value, dict):
        yield from (f"{at}.{key}: missing" for key in schema.get("required", ()) if key not in value)
        for key, item in value.items():
            if key in schema.get("properties", {}):
                yield from broken(item, schema["properties"][key], root, f"{at}.{key}")
            elif schema.get("additionalProperties") is False:
                yield f"{at}.{key}: no such key"


def test_the_recipe_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("write_recipe_docs", ROOT / "tools" / "write_recipe_docs.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.DOC.read_text(encoding="utf-8") == tool.recipe_docs(), "run python tools/write_recipe_docs.py"


def test_the_recipe_names_every_divergence() -> None:
    assert set(get_args(LossConfig.model_fields["divergence"].annotation)) == {*DIVERGENCES, "policy_gradient_kl"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_yaml_in_the_docs_is_a_recipe_or_part_of_one(document: Path) -> None:
    base = yaml.safe_load((ROOT / "recipes" / "distil.yaml").read_text(encoding="utf-8"))
    for block in re.findall(r"^```yaml\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S):
        keys = yaml.safe_load(block)
        load_recipe(keys if "student" in keys and "train" in keys else {**base, **keys})
