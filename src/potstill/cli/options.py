"""Options that several commands share, and what `--data` and its columns become."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from potstill.errors import PotstillError

DATA = "Files (jsonl, parquet, arrow, txt; globs), or a data set folder or name."
AnyDtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Kind = Literal["top_k", "sampled", "hidden", "token_logprobs"]
BatchTokens = Annotated[int | None, typer.Option(help="Tokens a forward pass; default 4096, on a GPU 16384.", min=1)]
CompletionColumn = Annotated[str | None, typer.Option(help="With --data: column with completions, supervised.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
Folder = Annotated[Path, typer.Argument(help="Folder of the cache.")]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
Messages = Annotated[str | None, typer.Option(help="With --data: column with chats.")]
Model = Annotated[str, typer.Argument(help="Model folder, shipped:NAME or hub id.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value …, over the recipe's own.")]
PromptColumn = Annotated[str | None, typer.Option(help="With --data: column with prompts.")]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the model.")]
Split = Annotated[str | None, typer.Option(help="With --data: split of a data set (train).")]
Text = Annotated[str | None, typer.Option(help="With --data: column with the text.")]
TokenEnv = Annotated[str | None, typer.Option(help="With a server: environment variable with its bearer token.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the hub.")]

SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".arrow", ".txt")
# Errors about data name keys of a recipe; with --data they were options. In this order: longer words first.
IN_OPTIONS = [
    (r"--data\.sources\[0\]\.(files|dataset)\b", "--data"),
    (r"--data\.sources\[0\]\.(prompt|completion)\b", r"--\1-column"),
    (r"--data\.sources\[0\]\.(\w+)", r"--\1"),
    (r"--data\.sources(\[0\])?", "--data"),
    (r"--data\.packing to false", "--no-packing"),
    (r"--data\.(packing)", r"--\1"),
    (r"--data\.(max|piece)_(length|bytes)", r"--\1-\2"),
    (r"(did you mean|; set) (prompt|completion)\b", r"\1 \2-column"),
    (r"did you mean ([\w-]+): ", r"did you mean --\1 "),
    (r"; set ([\w-]+) to one of them", r"; name one of them with --\1"),
    (r"(\S+) \(looked in \1\)", r"\1"),
]


def source_of(data: Sequence[str] | None, **columns: str | None) -> dict[str, Any] | None:
    """--data as a source: files where they look like files or are some, else a data set (org/data-v1.5, say)."""
    given = {name: value for name, value in columns.items() if value is not None}
    if not data:
        for name in given:
            option = f"{name}-column" if name in ("prompt", "completion") else name
            raise PotstillError(f"--{option} goes with --data, which says what to read; a recipe has its own data")
        return None
    sets = [d for d in data if not (d.startswith("shipped:") or d.endswith(SUFFIXES) or "*" in d or Path(d).is_file())]
    if sets and len(data) > 1:
        raise PotstillError(
            f"--data: {sets[0]} is a data set and can only be given alone; files exist, have a * or end in "
            f"{' '.join(SUFFIXES)}"
        )
    return {**({"dataset": sets[0]} if sets else {"files": list(data)}), **given}


def with_source(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a command, with those that say what to read as one source."""
    columns = {name: options.pop(name) for name in ("text", "messages", "split")}
    columns |= {name: options.pop(f"{name}_column") for name in ("prompt", "completion")}
    source = source_of(options.pop("data"), **columns)
    return {**options, "source": source}


@contextmanager
def in_words_of_options() -> Iterator[None]:
    """Errors about `--data` name the options of the command, not the keys that they become."""
    try:
        yield
    except PotstillError as error:
        words = str(error)
        if "--data" not in words:
            raise
        for pattern, option in IN_OPTIONS:
            words = re.sub(pattern, option, words)
        raise PotstillError(words) from error
