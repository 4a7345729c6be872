"""`potstill preview`, from the command line's words."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from potstill.config import Recipe
from potstill.preview.display import as_json, page, print_shown
from potstill.preview.readings import preview
from potstill.report.alignment import write_page


def preview_recipe(recipe: Recipe, title: str, *, records: int, tokens: int, html: Path | None, json_out: bool) -> None:
    console = Console(soft_wrap=True, highlight=False)
    shown = preview(recipe, records, Console(stderr=True, soft_wrap=True))
    if json_out:
        print(json.dumps(as_json(shown), ensure_ascii=False))
    elif html is not None:
        write_page(html, page(shown, title))
        console.print(f"page: {html}", markup=False)
    else:
        print_shown(shown, console, tokens)
