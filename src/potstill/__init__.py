"""potstill: distil a teacher language model into a student."""

from __future__ import annotations

import os
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
    from rich.console import Console

    from potstill.config.recipe import load_recipe
    from potstill.doctor.examine import quick_warnings
    from potstill.training.loop import train as run_recipe  # torch and transformers load only when they are needed

    checked = load_recipe(recipe, overrides)
    if not int(os.environ.get("RANK") or 0):
        for said in quick_warnings(checked):
            Console(soft_wrap=True).print(said, style="yellow", highlight=False, markup=False)
    return run_recipe(checked, callbacks)
