"""potstill: distil a teacher language model into a student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potstill.config import Recipe
    from potstill.training.run import Callback, Run

__version__ = "0.1.0"


def train(recipe: str | Path | Mapping[str, Any] | Recipe, callbacks: Sequence[Callback] = ()) -> Run:
    """Run a recipe (a path, a mapping or a Recipe), as `potstill train` does, and give back what came of it."""
    from potstill.training.loop import train as run_recipe  # torch and transformers load only when they are needed

    return run_recipe(recipe, callbacks)
