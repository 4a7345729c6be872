"""`potstill doctor`, from the command line's words."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from potstill.config import Recipe
from potstill.doctor.examine import Found, examine

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_recipe(recipe: Recipe, processes: int, json_out: bool) -> bool:
    """Print the findings; whether something is wrong."""
    progress = Console(stderr=True, soft_wrap=True)
    with progress.status("examining the recipe; the models are loaded, and one step is taken …"):
        found = examine(recipe, processes, progress)
    if json_out:
        keys = [{"check": name, "status": f.status, "said": f.said, "advice": f.advice} for name, f in found]
        print(json.dumps(keys, ensure_ascii=False, indent=1))
    else:
        console = Console()
        console.print(_table(found))
        counts = {status: sum(finding.status == status for _, finding in found) for status in STYLES}
        console.print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok", highlight=False)
    return any(finding.status == "error" for _, finding in found)


def _table(found: list[Found]) -> Table:
    table = Table(show_lines=False)
    for column in ("check", "", "what was found", "what to do"):
        table.add_column(column, no_wrap=column == "", overflow="fold")
    for name, finding in found:
        words = (name, finding.status, finding.said, finding.advice)
        table.add_row(*(Text(word, style=STYLES[finding.status] if word == finding.status else "") for word in words))
    return table
