"""A migrated configuration as a recipe with comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from potstill.config import Recipe
from potstill.config.foreign_names import OUR_NAMES
from potstill.migrate.config import Migrated, nested


def recipe_text(found: Migrated, title: str) -> str:
    """YAML: each key with the one it is from, and what became of the others below."""
    lines = [f"# {title}"]
    lines += [f"# to mend: {line}" for problem in found.problems for line in problem.splitlines()]
    made = nested({key: (value, found.origins[key]) for key, value in found.keys.items()})
    lines += _section({name: made[name] for name in Recipe.model_fields if name in made}, "")
    for heading, keys in (
        ("has another place, or means something else, here", found.other),
        ("dropped", found.dropped),
        (
            "not known to potstill migrate",
            {theirs: OUR_NAMES.get(theirs.split(".")[-1], "") for theirs in found.unknown},
        ),
    ):
        if keys:
            lines += ["", f"# {heading}:"]
            lines += [f"#   {theirs}{f': {why}' if why else ''}" for theirs, why in keys.items()]
    return "\n".join(lines) + "\n"


def _section(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, tuple):
            yield f"{indent}{key}: {json.dumps(value[0], ensure_ascii=False)} # {value[1]}"
        elif isinstance(value, list) and all(isinstance(each, tuple) for each in value):  # of betas
            yield f"{indent}{key}: {json.dumps([each[0] for each in value])} # {', '.join(each[1] for each in value)}"
        elif isinstance(value, list):
            yield f"{indent}{key}:"
            for each in value:
                first, *rest = _section(each, indent + "    ") if each else [f"{indent}    {{}}"]
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield f"{indent}{key}:"
            yield from _section(value, indent + "  ")
