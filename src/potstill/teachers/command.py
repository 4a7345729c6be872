"""`potstill cache`, from the command line's words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.models import load_teacher, load_tokenizer
from potstill.parallel.mesh import pick_device
from potstill.recipe import checked, load_recipe
from potstill.teachers.build import Progress, build, ranks
from potstill.teachers.inspect import Report, coverage, describe, verify
from potstill.teachers.store import Cache
from potstill.types import PotstillError

RECIPES = (".yaml", ".yml", ".json")
HEAVY_REST = 0.05  # of the mass: worth a word
LINE_SECONDS = 30.0  # between two lines of a log file


def console_of() -> Console:
    return Console(soft_wrap=True, highlight=False)


def build_cache(
    what: str,
    *,
    out: Path | None,
    source: dict[str, Any] | None,
    store: dict[str, Any],
    teacher: int,
    overrides: Sequence[str],
    piece_bytes: int | None,
    dtype: str | None,
    revision: str | None,
    trust_remote_code: bool,
    batch_tokens: int | None,
    shard_seconds: float,
    device_name: str,
) -> None:
    """Build from a recipe's teacher and data, or from a model and `--data`."""
    config, data, key = (
        _from_recipe(what, source, teacher, overrides)
        if what.endswith(RECIPES)
        else _from_model(what, source, overrides, piece_bytes, dtype, revision, trust_remote_code)
    )
    folder = out or (Path(config.cache) if config.cache else None)
    if folder is None:
        raise PotstillError("--out: say where the cache is to be, or give the teacher a cache in the recipe")
    if config.model is None:
        raise PotstillError(f"teachers[{teacher}] has no model to run: give it a model beside its cache")
    kept = checked(
        StoreConfig, {**config.store.model_dump(), **{k: v for k, v in store.items() if v is not None}}, "store"
    )
    rank, world = ranks()
    device = pick_device(device_name)
    if device.type == "cuda" and world > 1:
        device = torch.device("cuda", rank % torch.cuda.device_count())
    console = console_of()
    model = load_teacher(config, device, key, key)
    with _shown(console, rank, world) as show:
        built = build(
            model,
            kept,
            data,
            folder,
            name=config.model,
            batch_tokens=batch_tokens or (4096 if device.type == "cpu" else 16384),
            rank=rank,
            world=world,
            shard_seconds=shard_seconds,
            progress=show,
            say=lambda message: console.print(message, style="yellow", markup=False),
        )
    who = f"process {rank} of {world}: " if world > 1 else ""
    speed = built.tokens / built.seconds if built.seconds else 0.0
    console.print(
        f"{who}{built.documents:,} documents added ({built.tokens:,} tokens, {speed:,.0f} a second); {built.there:,} were there"
        + (f"; {built.unpredictable:,} have nothing to predict in them" if built.unpredictable else ""),
        markup=False,
    )
    if built.rest is not None:
        hint = (
            ""
            if kept.rest or built.rest < HEAVY_REST
            else "; with --rest 32 forward KL learns what is in it (docs/cache.md)"
        )
        console.print(f"{who}beyond the top {kept.k} lies {built.rest:.1%} of the mass{hint}", markup=False)
    if rank == 0:
        cache = Cache(folder)
        console.print(f"cache: {folder}, {_sizes(cache)}", markup=False)


def _sizes(cache: Cache) -> str:
    each = cache.size / max(1, cache.tokens)
    return f"{len(cache):,} documents, {cache.tokens:,} tokens, {cache.size / 2**20:,.1f} MB ({each:.1f} bytes a token)"


def _from_recipe(
    what: str, source: dict[str, Any] | None, teacher: int, overrides: Sequence[str]
) -> tuple[TeacherConfig, DataConfig, str]:
    if source is not None:
        raise PotstillError("--data goes with a model; a recipe has its own data")
    recipe = load_recipe(what, list(overrides))
    if teacher >= len(recipe.teachers):
        raise PotstillError(f"--teacher {teacher}: the recipe has {len(recipe.teachers)} teachers, numbered from 0")
    return recipe.teachers[teacher], recipe.data, f"teachers[{teacher}].model"


def _from_model(
    what: str,
    source: dict[str, Any] | None,
    overrides: Sequence[str],
    piece_bytes: int | None,
    dtype: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[TeacherConfig, DataConfig, str]:
    if source is None:
        raise PotstillError(f"--data: say which text {what} is to read (or give a recipe, which ends in .yaml)")
    if overrides:
        raise PotstillError(f"{overrides[0]}: key=value goes with a recipe; a model takes options")
    options = {"revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    given = {key: value for key, value in options.items() if value is not None}
    config = checked(TeacherConfig, {"model": what, **given}, "MODEL")
    return config, checked(DataConfig, {"sources": [source], "piece_bytes": piece_bytes}, "--data"), "MODEL"


@contextmanager
def _shown(console: Console, rank: int, world: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; in a log file a line now and then."""
    share = f", process {rank} of {world}" if world > 1 else ""
    if not console.is_terminal:
        said = time.monotonic()

        def line(now: Progress) -> None:
            nonlocal said
            if time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                console.print(f"{_done(now)}{_left(now)}{share}", markup=False)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("looking for what is missing", total=None)
        yield lambda now: bar.update(
            task, description=f"{_done(now)}{share}", completed=now.text_bytes, total=now.total_text_bytes or None
        )


def _done(now: Progress) -> str:
    each = now.bytes / max(1, now.tokens)
    speed = now.tokens / max(1e-9, now.seconds)
    return f"{now.documents:,} documents, {now.tokens:,} tokens, {speed:,.0f} a second, {each:.1f} bytes a token"


def _left(now: Progress) -> str:
    if not now.total_text_bytes or not now.text_bytes:
        return ""
    seconds = now.seconds * (now.total_text_bytes / now.text_bytes - 1)
    return f", about {max(0, seconds) / 60:.0f} min left"


def verify_cache(
    folder: Path, *, teacher: str | None, sample: int, dtype: str | None, device_name: str, as_json: bool
) -> bool:
    """Print what was found; whether all is well."""
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    config = TeacherConfig(model=teacher, **({"dtype": dtype} if dtype else {})) if teacher else None
    model = load_teacher(config, pick_device(device_name), "--teacher", "--teacher") if config else None
    with Bar(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task("checking shards", total=None)
        found: Report = verify(folder, model, sample, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print(json.dumps(found.numbers | {"damage": found.damage}, ensure_ascii=False))
        return not found.damage
    for name, value in found.numbers.items():
        console.print(
            f"{name.replace('_', ' '):<32} {value:,}"
            if isinstance(value, int)
            else f"{name.replace('_', ' '):<32} {value:.3g}"
        )
    for what in found.damage:
        console.print(f"damaged: {what}", style="red", markup=False)
    console.print(
        "all is well" if not found.damage else "remove the damaged files, and run the build again", markup=False
    )
    return not found.damage


def show_info(folder: Path, source: dict[str, Any] | None, as_json: bool) -> None:
    cache = Cache(folder)
    facts = describe(cache)
    if source is not None:
        data = checked(DataConfig, {"sources": [source]}, "--data")
        found = coverage(cache, data, load_tokenizer(str(folder / "tokenizer"), str(folder)))
        facts |= {"coverage": str(found)} | ({"first missing": found.first} if found.missing else {})
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    for name, value in facts.items():
        console_of().print(f"{name:<18} {value}", markup=False)
