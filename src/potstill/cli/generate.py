"""`potstill generate`, from the command line's words."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from potstill.config import Recipe
from potstill.generation.answers import Asked, generate


def generate_answers(recipe: Recipe, asked: Asked) -> None:
    console = Console(soft_wrap=True, highlight=False)

    def progress(done: int, counts: Counter[str]) -> None:
        console.print(f"{done:,} prompts, {counts['answers']:,} answers, {counts['kept']:,} kept", markup=False)

    counts = generate(recipe, asked, progress)
    left_out = {name: count for name, count in counts.items() if name not in ("prompts", "answers", "kept")}
    said = "; left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items()) if left_out else ""
    console.print(f"{asked.out}: {counts['kept']:,} of {counts['answers']:,} answers{said}", markup=False)
