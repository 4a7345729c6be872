"""potstill: distil a teacher language model into a student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potstill.training.run import Callback, Run

if TYPE_CHECKING:
    from potstill.config import Recipe

__all__ = ["Callback", "Run", "train"]
__version__ = "0.1.0"


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe, callbacks: Sequence[Callback] = (), overrides: Sequence[str] = ()
) -> Run:
    """Run a recipe (a path, a mapping or a Recipe, with `key.sub=value` overrides), as `potstill train` does, and give back
    what came of it."""
    from potstill.config.recipe import load_recipe
    from potstill.training.loop import train as run_recipe  # torch and transformers load only when they are needed

    return run_recipe(load_recipe(recipe, overrides), callbacks)
