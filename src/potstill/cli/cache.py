"""`potstill cache …` on the command line, and the options that other commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from potstill.types import PotstillError

DATA = "Files (jsonl, parquet, arrow, txt; globs), or a data set folder or name."
AnyDtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code from the hub.")]
BatchTokens = Annotated[int | None, typer.Option(help="Tokens a forward pass; default 4096, on a GPU 16384.", min=1)]


cache_app = typer.Typer(
    no_args_is_help=True, help="A teacher's signal on disk: build once, distil any student from it."
)


def _source(data: list[str] | None, **columns: str | None) -> dict[str, Any] | None:
    from potstill.evals.command import source_of

    given = [name for name, value in columns.items() if value is not None]
    if given and not data:
        named = given[0] if given[0] in ("text", "messages", "split") else f"{given[0]}-column"
        raise PotstillError(f"--{named} goes with --data, which says what to read; a recipe has its own data")
    return source_of(data, **columns) if data else None


@cache_app.command(name="build")
def cache_build(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe (.yaml), or a model or server with --data.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …, over the recipe's own.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cache; default: the recipe's teachers[…].cache.")
    ] = None,
    teacher: Annotated[int, typer.Option(help="Which of the recipe's teachers, from 0.")] = 0,
    kind: Annotated[
        Literal["top_k", "sampled", "hidden", "token_logprobs"] | None,
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
    text: Annotated[str | None, typer.Option(help="With --data: column with the text.")] = None,
    messages: Annotated[str | None, typer.Option(help="With --data: column with chats.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="With --data: column with prompts.")] = None,
    completion_column: Annotated[str | None, typer.Option(help="With --data: column with completions.")] = None,
    split: Annotated[str | None, typer.Option(help="With --data: split of a data set (train).")] = None,
    piece_bytes: Annotated[int | None, typer.Option(help="With --data: cut texts into such pieces (4096).")] = None,
    dtype: Annotated[AnyDtype | None, typer.Option(help="With --data: of the model's weights.")] = None,
    revision: Annotated[str | None, typer.Option(help="With --data: hub revision of the model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --data: run model code from the hub.")
    ] = False,
    token_env: Annotated[str | None, typer.Option(help="With a server: environment variable with its token.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With a server that does not hand it out: its tokenizer.")
    ] = None,
    batch_tokens: BatchTokens = None,
    shard_seconds: Annotated[
        float, typer.Option(help="Write a shard at least so often: what a kill can cost.", min=0.0)
    ] = 60.0,
    device: Device = "auto",
) -> None:
    """Run a teacher over a data set once and keep what it says.

    A build that was killed goes on when the same command is run again; under torchrun each process does its share. What is in
    the cache already is not computed again, so documents can be added at any time.

    Example: potstill cache build recipes/cached.yaml --out runs/cache
    """
    from potstill.cli.cache_command import build_cache

    build_cache(
        what,
        out=out,
        source=_source(
            data, text=text, messages=messages, prompt=prompt_column, completion=completion_column, split=split
        ),
        store={
            "kind": kind,
            "k": k,
            "temperatures": temperature,
            "tail_samples": tail_samples,
            "num_samples": num_samples,
            "seed": seed,
        },
        teacher=teacher,
        overrides=overrides or [],
        piece_bytes=piece_bytes,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        batch_tokens=batch_tokens,
        shard_seconds=shard_seconds,
        device_name=device,
        token_env=token_env,
        tokenizer=tokenizer,
    )


@cache_app.command(name="verify")
def cache_verify(
    folder: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    teacher: Annotated[str | None, typer.Option(help="Also compute some documents again with this model.")] = None,
    sample: Annotated[int | None, typer.Option(help="With --teacher: how many documents (32).")] = None,
    dtype: Annotated[
        AnyDtype | None, typer.Option(help="With --teacher: of its weights; default: that of the cache.")
    ] = None,
    device: Device = "auto",
    json_out: Json = False,
) -> None:
    """Check every checksum, id and sum of a cache, and with the teacher what it says. Exit code 1 when something is wrong."""
    from potstill.cli.cache_command import verify_cache

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
    from potstill.cli.cache_command import show_info

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
    from potstill.cache.convert import convert

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
