"""The command line: one thin function a command."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from potstill import __version__
from potstill.types import PotstillError

app = typer.Typer(
    name="potstill",
    help="Distil a teacher language model into a student.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, not only its sentence.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Distil a teacher language model into a student."""
    # What libraries say about themselves would drown what potstill says about the run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the two runs and the report.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the student's first weights and of the order of the text.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 400,
) -> None:
    """Distil the shipped teacher into a small student and compare it with one trained on the text alone."""
    from potstill.quickstart import quickstart as run_quickstart

    run_quickstart(out, seed=seed, steps=steps)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe; docs/recipe.md lists its keys.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …, over the recipe's own.")] = None,
) -> None:
    """Run a recipe, or go on with it where it stopped.

    Example: potstill train recipes/distil.yaml train.steps=200 run=runs/short
    """
    from potstill import train as run_recipe
    from potstill.recipe import load_recipe

    run = run_recipe(load_recipe(recipe, overrides or []))
    console = Console(soft_wrap=True)
    if run.stopped_by:
        console.print(
            f"stopped by {run.stopped_by} at step {run.step}; the same command goes on from there", highlight=False
        )
        return
    console.print(f"student: {run.model}", highlight=False, markup=False)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model folder, shipped:NAME or hub id.")],
    data: Annotated[
        list[str], typer.Option(help="Files (jsonl, parquet, arrow, txt; globs), or a data set folder or name.")
    ],
    teacher: Annotated[str | None, typer.Option(help="Measure KL and agreement against this model.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights; default: float32, and the teacher's as saved."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code from the hub.")
    ] = False,
    text: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    messages: Annotated[str | None, typer.Option(help="Column with chats, instead of --text.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column with prompts, with --completion-column.")] = None,
    completion_column: Annotated[str | None, typer.Option(help="Column with completions, which are scored.")] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    max_length: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens; default: what the models can read, at most 1024.")
    ] = None,
    piece_bytes: Annotated[int | None, typer.Option(help="Cut texts into pieces of so many bytes.")] = None,
    examples: Annotated[int | None, typer.Option(help="Use only the first so many examples.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 8,
    packing: Annotated[bool, typer.Option(help="Several documents a row.")] = True,
    prompt: Annotated[list[str] | None, typer.Option(help="Also complete this beginning; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the completions.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    json_out: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Bits per byte, perplexity, calibration, and closeness to a teacher, on given text."""
    from potstill.evals.command import evaluate_model, source_of

    evaluate_model(
        model,
        teacher=teacher,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        source=source_of(
            data, text=text, messages=messages, prompt=prompt_column, completion=completion_column, split=split
        ),
        max_length=max_length,
        piece_bytes=piece_bytes,
        packing=packing,
        examples=examples,
        batch_size=batch_size,
        prompts=prompt or [],
        max_new_tokens=max_new_tokens,
        device_name=device,
        as_json=json_out,
    )


cache_app = typer.Typer(
    no_args_is_help=True, help="A teacher's signal on disk: build once, distil any student from it."
)
app.add_typer(cache_app, name="cache")

DATA = "Files (jsonl, parquet, arrow, txt; globs), or a data set folder or name."


def _source(data: list[str] | None, **columns: str | None) -> dict[str, Any] | None:
    from potstill.evals.command import source_of

    given = [name for name, value in columns.items() if value is not None]
    if given and not data:
        named = given[0] if given[0] in ("text", "messages", "split") else f"{given[0]}-column"
        raise PotstillError(f"--{named} goes with --data, which says what to read; a recipe has its own data")
    return source_of(data, **columns) if data else None


@cache_app.command(name="build")
def cache_build(
    what: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe (.yaml), or a model with --data.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …, over the recipe's own.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cache; default: the recipe's teachers[…].cache.")
    ] = None,
    teacher: Annotated[int, typer.Option(help="Which of the recipe's teachers, from 0.")] = 0,
    kind: Annotated[
        Literal["top_k", "sampled", "hidden", "chosen"] | None,
        typer.Option(help="What to keep; default: as the cache that is there, else the recipe's store, else top_k."),
    ] = None,
    k: Annotated[int | None, typer.Option(help="top_k: how many tokens (64).")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="top_k: a temperature to learn at (1); may be repeated.")
    ] = None,
    rest: Annotated[int | None, typer.Option(help="top_k: draws from the rest, for forward KL (0).")] = None,
    draws: Annotated[int | None, typer.Option(help="sampled: how many draws (50).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws (0).")] = None,
    data: Annotated[list[str] | None, typer.Option(help=f"With a model: {DATA}")] = None,
    text: Annotated[str | None, typer.Option(help="With --data: column with the text.")] = None,
    messages: Annotated[str | None, typer.Option(help="With --data: column with chats.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="With --data: column with prompts.")] = None,
    completion_column: Annotated[str | None, typer.Option(help="With --data: column with completions.")] = None,
    split: Annotated[str | None, typer.Option(help="With --data: split of a data set (train).")] = None,
    piece_bytes: Annotated[int | None, typer.Option(help="With --data: cut texts into such pieces (4096).")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="With --data: of the model's weights."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="With --data: hub revision of the model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --data: run model code from the hub.")
    ] = False,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens a forward pass; default 4096, on a GPU 16384.")
    ] = None,
    shard_seconds: Annotated[
        float, typer.Option(help="Write a shard at least so often: what a kill can cost.", min=0.0)
    ] = 60.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
) -> None:
    """Run a teacher over a data set once and keep what it says.

    A build that was killed goes on when the same command is run again; under torchrun each process does its share. What is in
    the cache already is not computed again, so documents can be added at any time.

    Example: potstill cache build recipes/cached.yaml --out runs/cache
    """
    from potstill.teachers.command import build_cache

    build_cache(
        what,
        out=out,
        source=_source(
            data, text=text, messages=messages, prompt=prompt_column, completion=completion_column, split=split
        ),
        store={"kind": kind, "k": k, "temperatures": temperature, "rest": rest, "draws": draws, "seed": seed},
        teacher=teacher,
        overrides=overrides or [],
        piece_bytes=piece_bytes,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        batch_tokens=batch_tokens,
        shard_seconds=shard_seconds,
        device_name=device,
    )


@cache_app.command(name="verify")
def cache_verify(
    folder: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    teacher: Annotated[str | None, typer.Option(help="Also compute some documents again with this model.")] = None,
    sample: Annotated[int | None, typer.Option(help="With --teacher: how many documents (32).")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="With --teacher: of its weights; default: that of the cache."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    json_out: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Check every checksum, id and sum of a cache, and with the teacher what it says. Exit code 1 when something is wrong."""
    from potstill.teachers.command import verify_cache

    well = verify_cache(folder, teacher=teacher, sample=sample, dtype=dtype, device_name=device, as_json=json_out)
    if not well:
        raise typer.Exit(1)


@cache_app.command(name="info")
def cache_info(
    folder: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    data: Annotated[list[str] | None, typer.Option(help=f"Also say how much of this is in it. {DATA}")] = None,
    text: Annotated[str | None, typer.Option(help="With --data: column with the text.")] = None,
    messages: Annotated[str | None, typer.Option(help="With --data: column with chats.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="With --data: column with prompts.")] = None,
    completion_column: Annotated[str | None, typer.Option(help="With --data: column with completions.")] = None,
    split: Annotated[str | None, typer.Option(help="With --data: split of a data set (train).")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """What a cache is, how large, and how much of a data set is in it. Exit code 1 when a shard cannot be read."""
    from potstill.teachers.command import show_info

    source = _source(
        data, text=text, messages=messages, prompt=prompt_column, completion=completion_column, split=split
    )
    if not show_info(folder, source, json_out):
        raise typer.Exit(1)


@cache_app.command(name="convert")
def cache_convert(
    sources: Annotated[list[Path], typer.Argument(help="A cache, or array_record or parquet files of another system.")],
    out: Annotated[Path, typer.Option(help="Folder of the new cache.")],
    k: Annotated[int | None, typer.Option(help="Keep so many entries a token; default: all.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="A temperature to keep, or to import for; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of files: the teacher's tokenizer (model folder, shipped:NAME or hub id).")
    ] = None,
    teacher_name: Annotated[
        str | None, typer.Option(help="Of files: what the manifest is to call the teacher.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="Of files: write the texts here (jsonl), to train on.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Of parquet: tokens=…, ids=…, values=…, text=…, normaliser=…; may be repeated."),
    ] = None,
    values: Annotated[
        Literal["auto", "logits", "logprobs"], typer.Option(help="Of files: what the values are.")
    ] = "auto",
    predicts: Annotated[
        Literal["next", "this"], typer.Option(help="Of files: entries stand before the token they are for, or at it.")
    ] = "next",
) -> None:
    """A smaller cache from a larger one, without the teacher; or a cache from another system's files."""
    from potstill.teachers.convert import convert

    wrong = [pair for pair in column or [] if "=" not in pair]
    if wrong:
        raise PotstillError(f"--column {wrong[0]}: write NAME=COLUMN, such as ids=top_k_ids")
    convert(
        sources,
        out,
        k=k,
        temperatures=temperature,
        tokenizer=tokenizer,
        teacher_name=teacher_name,
        texts=texts,
        columns=dict(pair.split("=", 1) for pair in column or []),
        values=values,
        predicts=predicts,
    )


@app.command()
def align(
    student: Annotated[
        str, typer.Argument(metavar="A", help="The student's tokenizer: folder, shipped:NAME or hub id.")
    ],
    teacher: Annotated[str, typer.Argument(metavar="B", help="The teacher's.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]…", help=f"Statistics of a corpus, and its worst places. {DATA}"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text to show token by token.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Try the losses on this pair: what must hold, holds.")] = False,
    column: Annotated[str | None, typer.Option(help="With FILE: column with the text.")] = None,
    split: Annotated[str, typer.Option(help="With FILE: split of a data set.")] = "train",
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how two tokenizers line up, byte by byte.

    Example: potstill align shipped:tokenizers/pieces-1k shipped:tokenizers/bytes-2k --text "The café"
    """
    from potstill.evals.command import source_of
    from potstill.teachers.pair import align_pair

    source = source_of(data, text=column, split=split) if data else None
    align_pair(student, teacher, source=source, text=text, check=check, html=html, as_json=json_out)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the curves, samples, evaluation and recipes of one or more runs."""
    from potstill.report import write_report

    Console(soft_wrap=True).print(f"report: {write_report(runs, out)}", highlight=False, markup=False)


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for editors that complete and check YAML."""
    from potstill.recipe import recipe_schema

    print(recipe_schema())


def main() -> None:
    """The `potstill` command: an error a person can mend is one sentence on stderr, and exit code 1."""
    debug = "--debug" in sys.argv
    try:
        app([argument for argument in sys.argv[1:] if argument != "--debug"])  # so that it may stand anywhere
    except PotstillError as error:
        if debug:
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escaped(error)}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _escaped(error: PotstillError) -> str:
    from rich.markup import escape

    return escape(str(error))
