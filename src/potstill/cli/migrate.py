"""`potstill migrate`, from the command line's words."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from potstill.files import write_text
from potstill.migrate.config import migrate, read_file
from potstill.migrate.written import recipe_text


def migrate_file(path: Path, system: str, out: Path | None) -> None:
    """The recipe to `out` or the standard output, and a count of what became of the keys to the error output."""
    found = migrate(read_file(path), system)
    text = recipe_text(
        found, f"of {path.name}, a configuration of {system}, by potstill migrate; read it before you run it"
    )
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
    filled = [key for key, origin in found.origins.items() if origin.startswith("fill in")]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(
        f"{len(found.keys) - len(filled)} keys taken, {len(found.other)} with another meaning or place, "
        f"{len(found.dropped)} dropped, {len(found.unknown)} not known"
    )
    if filled:
        console.print(f"to fill in: {', '.join(filled)}", style="yellow", markup=False)
    for problem in found.problems:
        console.print(f"to mend: {problem}", style="yellow", markup=False)
