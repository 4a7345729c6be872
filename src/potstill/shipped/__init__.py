"""What ships with potstill: a small text, two tokenizers and a teacher. `shipped:NAME` in a recipe means one of these."""

from __future__ import annotations

from pathlib import Path

from potstill.types import PotstillError

PREFIX = "shipped:"
FOLDER = Path(__file__).parent


def locate(name: str) -> str:
    """The path of `shipped:NAME`; any other string is a path or hub id already and comes back as it is."""
    if not name.startswith(PREFIX):
        return name
    path = FOLDER / name.removeprefix(PREFIX)
    if not path.exists():
        there = ", ".join(sorted(f"{PREFIX}{p.relative_to(FOLDER)}" for p in FOLDER.glob("*/*") if p.suffix != ".py"))
        raise PotstillError(f"{name} does not ship with potstill; what does: {there}")
    return str(path)
