"""The house rules that a machine can hold: who imports whom, no pickle, recipes and docs that fit the code."""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "potstill"
FILES = sorted(SOURCE.rglob("*.py"))
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(SOURCE / "shipped").glob("*.yaml")])
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A room imports itself and rooms of earlier lines, never one of its own line or of a later one.
ORDER = [
    {"types"},
    {"extras", "files", "shipped"},
    {"config"},
    {"text", "parallel"},
    {"losses"},
    {"models"},
    {"data"},
    {"cache"},
    {"serving"},
    {"teachers"},
    {"rollouts"},
    {"evals"},
    {"training"},
    {"report"},
    {"potstill"},  # the package's own __init__
    {"cli"},
    {"__main__"},  # `python -m potstill`
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def room(module: str) -> str:
    """`potstill.data.layout` is in the room `data`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "potstill"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are written in full"
            module = node.module or ""
            for alias in node.names:  # `from potstill import data` is an import of potstill.data
                inner = f"{module}.{alias.name}"
                is_module = module == "potstill" and alias.name in LEVEL
                yield node.lineno, inner if is_module else module


def violations(level: dict[str, int], here: str, modules: Iterator[tuple[int, str]]) -> list[str]:
    ours = room(here)
    return [
        f"line {line}: {here} imports {module}"
        for line, module in modules
        if module.split(".")[0] == "potstill" and room(module) != ours and level[room(module)] >= level[ours]
    ]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    assert room(module_of(path)) in LEVEL, "a new room: give it a line in ORDER"
    assert violations(LEVEL, module_of(path), imported(path)) == []


def test_the_import_rule_can_fail() -> None:
    there = [(1, "potstill.training.loop"), (2, "potstill.types"), (3, "potstill.losses.fused"), (4, "torch")]
    assert violations(LEVEL, "potstill.losses.kd", iter(there)) == [
        "line 1: potstill.losses.kd imports potstill.training.loop"
    ]
    assert len(violations(LEVEL, "potstill.models.x", iter([(1, "potstill.data")]))) == 1


def test_every_line_of_the_order_exists() -> None:
    assert set(LEVEL) == {room(module_of(path)) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_pickle(path: Path) -> None:
    """Nor what is pickle inside: a file from outside could run code."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    assert not [(line, m) for line, m in imported(path) if m.split(".")[0] in forbidden]
    called = {ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)}
    assert not called & {"torch.load", "torch.save", "np.load", "numpy.load"}
    pickled = {"FileSystemReader", "FileSystemWriter", "checkpoint_id"}  # torch.distributed.checkpoint's own format
    assert not pickled & set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", [*FILES, *RECIPES, *DOCUMENTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_path_of_one_machine(path: Path) -> None:
    """What a newcomer reads names no folder of the machine it was written on."""
    assert not re.search(r"(?<![\w.*])/(home|Users|root|work|tmp)/", path.read_text(encoding="utf-8"))


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
        (("train", "clip"), False),
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), f"{document.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{document.name}: {target}"


def test_the_readme_tree_shows_what_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^```text\n(.*?)^```", text, re.M | re.S)
    assert tree is not None
    shown, folders = set(), [ROOT]
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        path = folders[depth] / name
        assert path.exists(), f"the README's tree shows {path.relative_to(ROOT)}, which is not there"
        folders = [*folders[: depth + 1], path]
        shown.add(path)
    rooms = {p for p in SOURCE.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")}
    assert rooms <= shown, f"the README's tree leaves out {', '.join(p.name for p in rooms - shown)}"
