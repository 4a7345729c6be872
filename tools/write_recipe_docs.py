"""Write docs/recipe.md from the recipe's JSON Schema, and so from the pydantic models in src/potstill/config.

python tools/write_recipe_docs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from potstill.config.recipe import recipe_schema

DOC = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"

OPENING = """\
# The recipe

<!-- Written by tools/write_recipe_docs.py from src/potstill/config: change those files, not this one. -->

A recipe is a YAML file with the sections below. Only `student`, `data` and `train` must be there. What is present
decides: `teachers: []` is plain training on the text, no `eval` section is no evaluation.

- **On the command line** any key can be set after the file, and the last one wins: `potstill train recipes/distil.yaml
  train.steps=200 teachers.0.dtype=bfloat16 loss.temperature='{start: 4, end: 1}' train.max_grad_norm=null`. Places in a list
  count from 0.
- **An unknown key is an error**, and so is a value of the wrong kind; what is wrong is reported together, before
  anything is loaded.
- **What does not go together** is refused with the reason: [compatibility.md](compatibility.md) has the whole table.
- **`${train.steps}`** is the value of another key, after all overrides. Nothing else can be referred to, the environment
  least of all: a secret stands in no recipe, only the name of the variable that holds it. `\\${` is a `${` that means itself.
- **`shipped:NAME`** is a file or folder that comes with potstill: `shipped:teacher`, `shipped:corpus/train.parquet`,
  `shipped:corpus/heldout.parquet`, `shipped:tokenizers/bytes-2k`, `shipped:tokenizers/pieces-1k`.
- Paths are relative to the folder the command is started in.
- The recipe with every default spelled out is saved as `recipe.yaml` in the run's folder and can be run again as it is.
- `potstill schema` prints the JSON Schema, for editors that complete and check YAML
  ([how](getting-started.md#completion-in-the-editor)).
"""

# Sections that are used in several places, or that a reader looks for under a name of their own.
TITLES = {"Schedule": "Schedules", "SourceConfig": "data.sources[]", "TeacherConfig": "teachers[]"}


def recipe_docs() -> str:
    schema = json.loads(recipe_schema())
    definitions = schema["$defs"]
    sections = {"": schema, **_sections(schema, definitions, "")}
    parts = [OPENING]
    titles = {name: title or "Top level" for title, name in ((t, _name(s)) for t, s in sections.items())}
    for title, section in sections.items():
        about = section.get("description", "")
        text = " ".join(about.split()) if title else ""
        parts.append("\n".join(filter(None, [f"## {title or 'Top level'}\n", f"{_escaped(text)}\n" if text else ""])))
        parts.append(_table(section, definitions, titles))
    return "\n".join(parts)


def _sections(section: dict[str, Any], definitions: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Every section by its dotted title, in the order of the recipe; a section used twice stands where it is first."""
    found: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    for key, field in section["properties"].items():
        for name in _references(field):
            title = TITLES.get(name) or f"{prefix}{key}"
            inside = {title: definitions[name], **_sections(definitions[name], definitions, f"{title}.")}
            target = last if name == "Schedule" else found
            known = {_name(s) for s in [*found.values(), *last.values()]}
            target.update({t: s for t, s in inside.items() if _name(s) not in known})
    return {**found, **last}


def _name(section: dict[str, Any]) -> str:
    return str(section["title"])


def _references(field: dict[str, Any]) -> list[str]:
    """Names of the sections a field may hold, itself or in a list."""
    if "$ref" in field:
        return [field["$ref"].rpartition("/")[2]]
    inner = [*field.get("anyOf", []), *([field["items"]] if isinstance(field.get("items"), dict) else [])]
    return [name for each in inner for name in _references(each)]


def _table(section: dict[str, Any], definitions: dict[str, Any], titles: dict[str, str]) -> str:
    lines = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    required = section.get("required", [])
    for key, field in section["properties"].items():
        meaning = field.get("description") or _first_sentence(field, definitions)
        cells = (f"`{key}`", _allowed(field, titles), _default(key, field, required), _escaped(meaning))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _first_sentence(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    about = " ".join(definitions[_references(field)[0]].get("description", "").split())
    sentence = about.partition(". ")[0].rstrip(".").split(": ")[0]
    return sentence[:1].lower() + sentence[1:]


def _default(key: str, field: dict[str, Any], required: list[str]) -> str:
    if key in required:
        return "**required**"
    default = field.get("default")
    if isinstance(default, dict) and default:
        return "its own defaults"
    return f"`{json.dumps(default, ensure_ascii=False)}`".replace('"', "")


def _allowed(field: dict[str, Any], titles: dict[str, str]) -> str:
    if "$ref" in field:
        title = titles[field["$ref"].rpartition("/")[2]]
        if title == "Schedules":
            return "a [schedule](#schedules)"
        return f"[{title}](#{_anchor(title)})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_allowed(each, titles) for each in field["anyOf"]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type")
    if kind == "array":
        if "prefixItems" in field:
            return f"list of {len(field['prefixItems'])}: {_allowed(field['prefixItems'][0], titles)}"
        least = f", at least {field['minItems']}" if "minItems" in field else ""
        return f"list of {_allowed(field['items'], titles)}{least}"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    names |= {"null": "`null`", "object": "keys with values"}
    return " ".join([names[str(kind)], *_range(field)])


def _range(field: dict[str, Any]) -> list[str]:
    signs = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}
    bounds = [f"{sign}{field[name]:g}" for name, sign in signs.items() if name in field]
    return [", ".join(bounds)] if bounds else []


def _anchor(title: str) -> str:
    """As GitHub makes it from a heading."""
    return "".join(c for c in title.lower() if c.isalnum() or c in "_- ").replace(" ", "-")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    DOC.write_text(recipe_docs(), encoding="utf-8")
    print(f"wrote {DOC.relative_to(Path.cwd()) if DOC.is_relative_to(Path.cwd()) else DOC.name}")
