"""`potstill cache …` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from potstill.cli import options as opt
from potstill.cli.options import DATA, with_source
from potstill.errors import PotstillError

STORE = ("kind", "k", "temperature", "tail_samples", "num_samples", "seed")  # options that say what a cache keeps
# … and those that a recipe has keys for
OF_A_MODEL = ("piece_bytes", "dtype", "revision", "trust_remote_code", "token_env", "tokenizer")

cache_app = typer.Typer(
    no_args_is_help=True, help="A teacher's signal on disk: build once, distil any student from it."
)


@cache_app.command(name="build")
def cache_build(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe (.yaml), or a model or server with --data.")
    ],
    overrides: opt.Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cache; default: the recipe's teachers[…].cache.")
    ] = None,
    teacher: Annotated[int, typer.Option(help="Which of the recipe's teachers, from 0.")] = 0,
    kind: Annotated[
        opt.Kind | None,
        typer.Option(help="What to keep; default: as the cache that is there, else the recipe's store, else top_k."),
    ] = None,
    k: Annotated[int | None, typer.Option(help="top_k: how many tokens (64).")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="top_k: a temperature to learn at (1); may be repeated.")
    ] = None,
    tail_samples: Annotated[int | None, typer.Option(help="top_k: draws from the rest, for forward KL (0).")] = None,
    num_samples: Annotated[int | None, typer.Option(help="sampled: how many draws (50).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws (0).")] = None,
    data: Annotated[list[str] | None, typer.Option(help=f"With a model: {DATA}")] = None,
    text: opt.Text = None,
    messages: opt.Messages = None,
    prompt_column: opt.PromptColumn = None,
    completion_column: opt.CompletionColumn = None,
    split: opt.Split = None,
    piece_bytes: Annotated[int | None, typer.Option(help="With --data: cut texts into such pieces (4096).")] = None,
    dtype: Annotated[opt.AnyDtype | None, typer.Option(help="With --data: of the model's weights.")] = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    token_env: opt.TokenEnv = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With a server that does not hand it out: its tokenizer.")
    ] = None,
    batch_tokens: opt.BatchTokens = None,
    shard_seconds: Annotated[
        float, typer.Option(help="Write a shard at least so often: what a kill can cost.", min=0.0)
    ] = 60.0,
    device: opt.Device = "auto",
) -> None:
    """Run a teacher over a data set once and keep what it says.

    A build that was killed goes on when the same command is run again; under torchrun each process does its share. What is in
    the cache already is not computed again, so documents can be added at any time.

    Example: potstill cache build recipes/cached.yaml --out runs/cache
    """
    options = with_source(locals())
    store, of_a_model = ({name: options.pop(name) for name in names} for names in (STORE, OF_A_MODEL))
    from potstill.cli.cache_command import build_cache

    build_cache(**options, store=store, of_a_model=of_a_model)


@cache_app.command(name="verify")
def cache_verify(
    folder: opt.Folder,
    teacher: Annotated[str | None, typer.Option(help="Also compute some documents again with this model.")] = None,
    sample: Annotated[int | None, typer.Option(help="With --teacher: how many documents (32).")] = None,
    dtype: Annotated[
        opt.AnyDtype | None, typer.Option(help="With --teacher: of its weights; default: that of the cache.")
    ] = None,
    device: opt.Device = "auto",
    json_out: opt.Json = False,
) -> None:
    """Check every checksum, id and sum of a cache, and with the teacher what it says. Exit code 1 when something is wrong."""
    options = locals()
    from potstill.cli.cache_command import verify_cache

    if not verify_cache(**options):
        raise typer.Exit(1)


@cache_app.command(name="info")
def cache_info(
    folder: opt.Folder,
    data: Annotated[list[str] | None, typer.Option(help=f"Also say how much of this is in it. {DATA}")] = None,
    text: opt.Text = None,
    messages: opt.Messages = None,
    prompt_column: opt.PromptColumn = None,
    completion_column: opt.CompletionColumn = None,
    split: opt.Split = None,
    json_out: opt.Json = False,
) -> None:
    """What a cache is, how large, and how much of a data set is in it. Exit code 1 when a shard cannot be read."""
    options = with_source(locals())
    from potstill.cli.cache_command import show_info

    if not show_info(**options):
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
    options = locals()
    from potstill.cli.convert import convert

    columns, temperatures = options.pop("column") or [], options.pop("temperature")
    for wrong in (pair for pair in columns if "=" not in pair):
        raise PotstillError(f"--column {wrong}: write NAME=COLUMN, such as ids=top_k_ids")
    named = dict(pair.split("=", 1) for pair in columns)
    convert(**options, temperatures=temperatures, columns=named)
