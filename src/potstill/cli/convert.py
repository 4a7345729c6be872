"""`potstill cache convert`: a smaller cache out of a larger one, or a cache out of the files of another system."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from potstill.cache.convert import convert_cache
from potstill.cache.store import Cache
from potstill.errors import PotstillError
from potstill.migrate.cache import Layout, import_cache


def convert(
    sources: Sequence[Path], out: Path, *, k: int | None, temperatures: Sequence[float] | None, **options: Any
) -> None:
    """The command: a cache folder, or files to import, with the options of `import_cache`; what was done is printed."""
    console = Console(soft_wrap=True, highlight=False)
    if absent := [path for path in sources if not path.exists()]:
        raise PotstillError(f"there is no {absent[0]}")
    folder = sources[0].is_dir()
    of_files = [bool(options[name]) for name in ("tokenizer", "teacher_name", "texts", "columns")]
    refused = {
        "one cache at a time can be converted: name one folder, or files to import": folder and len(sources) > 1,
        "--tokenizer, --teacher-name, --texts and --column are for files to import; a cache has its own": folder
        and any(of_files),
        "--tokenizer and --teacher-name: say which teacher the files are of; they do not say it themselves": not folder
        and not all(of_files[:2]),
    }
    for what in (what for what, is_so in refused.items() if is_so):
        raise PotstillError(what)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        show = partial(_show, bar, bar.add_task("converting", total=None))
        if folder:
            lines = convert_cache(sources[0], out, k=k, temperatures=temperatures, progress=show).lines()
        else:
            layout: Layout = "parquet" if sources[0].suffix == ".parquet" else "maxtext"
            options |= {"layout": layout, "k": k, "temperatures": temperatures or (1.0,)}
            lines = import_cache(sources, out, progress=show, **options).lines()
    for line in (*lines, f"cache: {out}, {Cache(out).sizes()}"):
        console.print(line, markup=False)


def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)
