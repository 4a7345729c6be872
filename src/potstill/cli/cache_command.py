"""`potstill cache`, from the command line's words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from potstill.cache.build import Progress, Terminated, build, ranks, sigterm_interrupts
from potstill.cache.manifest import IMPORTED, Manifest, read_manifest, signal_keys, tokenizer_of
from potstill.cache.origin import TeacherBackend
from potstill.cache.reading import as_cached, weights_fingerprint
from potstill.cache.store import Cache, begun_cache
from potstill.cache.together import origin_of
from potstill.cache.verify import Report, coverage, describe, described, verify
from potstill.cli.options import in_words_of_options
from potstill.config import DataConfig, ParallelConfig, StoreConfig, TeacherConfig
from potstill.config.recipe import checked, load_recipe
from potstill.data import with_pieces
from potstill.errors import PotstillError
from potstill.models import LanguageModel, load_student_tokenizer, load_teacher, load_tokenizer
from potstill.parallel.mesh import Axis, Ranks, pick_device, world
from potstill.signals.codec import DTYPES
from potstill.signals.kinds import KINDS, SignalKind
from potstill.teachers.placed import load_in_place
from potstill.teachers.remote import open_server

RECIPES = (".yaml", ".yml", ".json")
HEAVY_REST = 0.05  # of the mass: worth a word
SAMPLE = 32  # documents to compute again
LINE_SECONDS = 30.0  # between two lines of a log file


def console_of() -> Console:
    return Console(soft_wrap=True, highlight=False)


def build_cache(
    what: str,
    overrides: Sequence[str] | None,
    out: Path | None,
    teacher: int,
    source: dict[str, Any] | None,
    store: dict[str, Any],
    of_a_model: dict[str, Any],
    batch_tokens: int | None,
    shard_seconds: float,
    device: str,
) -> None:
    """Build from a recipe's teacher and data, or from a model or a server and `--data`."""
    of_a_model = {name: value for name, value in of_a_model.items() if value}
    if what.endswith(RECIPES):
        config, data, key = _from_recipe(what, source, teacher, overrides or [], out, of_a_model)
    else:
        config, data, key = _from_model(what, source, teacher, overrides or [], of_a_model)
    folder = _folder(config, out)
    if folder is None:
        raise PotstillError("--out: say where the cache is to be, or give the teacher a cache in the recipe")
    rank, count = ranks()
    config, spread = _for_building(config, count)
    place, alone = _place(device, rank, count), Ranks(rank, count, Axis(rank, count))
    with world(ParallelConfig(tp=config.copy_ranks), place) if spread else nullcontext(alone) as here:
        there, console = begun_cache(folder), console_of()
        who = f"process {here.dp.index} of {here.dp.size}: " if here.many else ""

        def say(words: str) -> None:
            if here.leader:  # others have a part of the model, and no documents
                console.print(f"{who}{words}", markup=False)

        kept = _settled(config.store, store, there, lambda form: say(f"going on with what {folder} keeps, {form}"))
        try:
            with sigterm_interrupts(), in_words_of_options(), _shown(console, here) as show:
                built = build(
                    _load(config, there, folder, place, key, teacher, here),
                    kept,
                    data,
                    folder,
                    key="data" if source is None else "--data",
                    batch_tokens=batch_tokens or (4096 if place.type == "cpu" else 16384),
                    rank=here.dp.index,
                    world=here.dp.size,
                    shard_seconds=shard_seconds,
                    progress=show,
                    say=lambda message: console.print(message, style="yellow", markup=False),
                )
        except KeyboardInterrupt as stop:
            say("stopped: what was computed until now is kept, and the same command goes on from there")
            raise SystemExit(143 if isinstance(stop, Terminated) else 130) from None
        _tell(built, kept, say)
        if here.first:
            _tell_cache(Cache(folder), data, say)


def _for_building(config: TeacherConfig, processes: int) -> tuple[TeacherConfig, bool]:
    """A teacher that all processes are for, and whether it lies over them: else each has it whole, and they know nothing of
    each other."""
    asked = config.placement != "replicate" or config.copy_ranks > 1
    spread = processes > 1 and config.model is not None and asked
    placed = {"ranks": 0} if spread else {"ranks": 0, "placement": "replicate", "tp": 1}
    return config.model_copy(update=placed), spread


def _place(device: str, rank: int, world: int) -> torch.device:
    place = pick_device(device)
    return torch.device("cuda", rank % torch.cuda.device_count()) if place.type == "cuda" and world > 1 else place


def _tell(built: Progress, kept: StoreConfig, say: Callable[[str], None]) -> None:
    speed = built.tokens / built.seconds if built.seconds else 0.0
    empty = f"; {built.unpredictable:,} have nothing to predict in them" if built.unpredictable else ""
    say(
        f"{built.documents:,} documents added ({built.tokens:,} tokens, {speed:,.0f} per second); {built.there:,} were there"
        + empty
    )
    if built.rest is not None:
        draws = not kept.tail_samples and built.rest >= HEAVY_REST and 1.0 in kept.temperatures  # which draws are at
        hint = "; with --tail-samples 32 forward KL learns what is in it (docs/cache.md)" if draws else ""
        say(f"beyond the top {kept.k} lies {built.rest:.1%} of the mass{hint}")


def _tell_cache(cache: Cache, data: DataConfig, say: Callable[[str], None]) -> None:
    if any(source.kind == "text" for source in data.sources):
        size = cache.manifest.piece_bytes
        say(
            f"texts were cut into pieces of at most {size:,} bytes (piece_bytes): students need a data.max_length of about a "
            f"quarter of that, {-(-size // 4):,}, or more; with less the ends of long pieces are lost to them"
        )
    say(f"cache: {cache.folder}, {cache.sizes()}")


def _folder(config: TeacherConfig, out: Path | None) -> Path | None:
    return out or (Path(config.cache) if config.cache else None)


def _settled(
    store: StoreConfig, options: Mapping[str, Any], there: Manifest | None, go_on: Callable[[str], None]
) -> StoreConfig:
    """What to keep: as the options say, else the recipe, else the cache that is there. A recipe's value that is the default
    says nothing: recipes that were saved spell out all of them."""
    given = {
        {"temperature": "temperatures"}.get(name, name): value for name, value in options.items() if value is not None
    }
    plain = StoreConfig()
    wanted = {name: value for name, value in store.model_dump().items() if value != getattr(plain, name)}
    before = {} if there is None else _settings(there.form)
    kept = checked(StoreConfig, {**before, **wanted, **given}, "store")
    _check_used(given, kept)
    if there is not None and kept != checked(StoreConfig, {**store.model_dump(), **given}, "store"):
        go_on(f"{there.form.kind}: {there.form.describe()}")
    return kept


def _check_used(given: Mapping[str, Any], kept: StoreConfig) -> None:
    for name in given:
        users = sorted(kind for kind, form in KINDS.items() if name in form.parameters)
        if users and kept.kind not in users:
            option = {"temperatures": "temperature"}.get(name, name.replace("_", "-"))
            raise PotstillError(
                f"--{option} goes with kind {' and '.join(users)}, and this cache is of kind {kept.kind}: leave it out"
            )
    if "seed" in given and kept.kind == "top_k" and not kept.tail_samples:
        raise PotstillError("--seed is that of draws, and a top_k cache without --tail-samples has none: leave it out")


def _settings(form: SignalKind) -> dict[str, Any]:
    """Those of a cache that is there, as a recipe's store has them."""
    named = {name: value for name, value in signal_keys(form).items() if name in form.parameters}
    return {"kind": form.kind} | {name: value for name, value in named.items() if name in StoreConfig.model_fields}


def _load(
    config: TeacherConfig,
    there: Manifest | None,
    folder: Path,
    device: torch.device,
    key: str,
    number: int,
    here: Ranks,
) -> TeacherBackend:
    """The teacher; where the recipe names none, the one that the cache was built with."""
    if config.server is not None:
        return open_server(config, key.removesuffix(".model"))
    known = None if there is None else there.teacher
    lacks, say_which = f"teachers[{number}] has no model to run", f"add teachers.{number}.model=MODEL to the command"
    if known is not None and config.dtype == "auto" and known.dtype in DTYPES:
        config = config.model_copy(update={"dtype": known.dtype})
    load = partial(
        load_in_place,
        device=device,
        where=key.removesuffix(".model"),
        here=here,
        fingerprint=weights_fingerprint,
        key=key,
    )
    if config.model is not None:
        return origin_of(load(config), config.name)
    if known is None:
        raise PotstillError(f"{lacks}: {say_which}")
    if known.weights == IMPORTED:
        raise PotstillError(
            f"{lacks}, and {folder} was imported, to which no model adds: import more, or {say_which} and choose another folder"
        )
    config = config.model_copy(update={"model": known.model, "revision": config.revision or known.revision})
    try:
        return origin_of(load(config), config.name)
    except PotstillError as error:
        raise PotstillError(
            f"{lacks}, and {known.model}, with which {folder} was built, cannot be loaded ({error}): {say_which}"
        ) from error


def _from_recipe(
    what: str,
    source: dict[str, Any] | None,
    teacher: int,
    overrides: Sequence[str],
    out: Path | None,
    of_a_model: dict[str, Any],
) -> tuple[TeacherConfig, DataConfig, str]:
    for name in of_a_model:
        raise PotstillError(f"--{name.replace('_', '-')} goes with a model and --data; a recipe has a key for it")
    if source is not None:
        raise PotstillError("--data goes with a model; a recipe has its own data")
    recipe = load_recipe(what, list(overrides))
    if teacher >= len(recipe.teachers):
        raise PotstillError(f"--teacher {teacher}: the recipe has {len(recipe.teachers)} teachers, numbered from 0")
    config, data = recipe.teachers[teacher], recipe.data
    folder = _folder(config, out)
    there = None if folder is None else begun_cache(folder)
    if there is not None:
        data = as_cached(data, there)
    elif data.piece_bytes is None:  # cut as the run that the recipe is of would
        data = with_pieces(data, load_student_tokenizer(recipe.student))
    return config, data, f"teachers[{teacher}].model"


def _from_model(
    what: str, source: dict[str, Any] | None, teacher: int, overrides: Sequence[str], options: dict[str, Any]
) -> tuple[TeacherConfig, DataConfig, str]:
    if teacher:
        raise PotstillError(f"--teacher {teacher} goes with a recipe, and {what} is a model: leave it out")
    if source is None:
        raise PotstillError(f"--data: say which text {what} is to read (or give a recipe, which ends in .yaml)")
    if overrides:
        raise PotstillError(f"{overrides[0]}: key=value goes with a recipe; a model takes options")
    served = what.startswith(("http://", "https://"))
    for name in (name for name in options if name in (("revision", "dtype") if served else ("token_env", "tokenizer"))):
        other = "model" if served else "server"
        raise PotstillError(f"--{name.replace('_', '-')} goes with a {other}, and {what} is none: leave it out")
    data = checked(DataConfig, {"sources": [source], "piece_bytes": options.pop("piece_bytes", None)}, "--data")
    if "token_env" in options:
        options["remote"] = {"api_key_env": options.pop("token_env")}
    return checked(TeacherConfig, {"server" if served else "model": what, **options}, "MODEL"), data, "MODEL"


@contextmanager
def _shown(console: Console, here: Ranks) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; in a log file a line now and then."""
    share = f", process {here.dp.index} of {here.dp.size}" if here.many else ""
    if not here.leader:
        yield lambda now: None
        return
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
    return f"{now.documents:,} documents, {now.tokens:,} tokens, {speed:,.0f} per second, {each:.1f} bytes per token"


def _left(now: Progress) -> str:
    if not now.total_text_bytes or not now.text_bytes:
        return ""
    seconds = now.seconds * (now.total_text_bytes / now.text_bytes - 1)
    return f", about {max(0, seconds) / 60:.0f} min left"


def verify_cache(
    folder: Path, teacher: str | None, sample: int | None, dtype: str | None, device: str, json_out: bool
) -> bool:
    """Print what was found; whether all is well."""
    for option, given in {"--sample": sample, "--dtype": dtype}.items():
        if given is not None and teacher is None:
            raise PotstillError(f"{option} {given} goes with --teacher, which says what to compare with")
    if sample is not None and sample < 1:
        raise PotstillError(f"--sample {sample}: choose how many documents to compare, at least 1")
    console = Console(stderr=json_out, soft_wrap=True, highlight=False)
    model = None if teacher is None else _to_compare(folder, teacher, dtype, device)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking shards", total=None)
        found: Report = verify(
            folder, model, sample or SAMPLE, lambda done, total: bar.update(task, completed=done, total=total)
        )
    well = not found.damage and not found.mismatch
    if json_out:
        print(json.dumps(found.numbers | {"damage": found.damage, "mismatch": found.mismatch}, ensure_ascii=False))
        return well
    for name, value in found.numbers.items():
        console.print(f"{name.replace('_', ' '):<32} {format(value, ',' if isinstance(value, int) else '.3g')}")
    said = [f"damaged: {what}" for what in found.damage]
    said += [f"{teacher} is not the cache's teacher: {what}" for what in found.mismatch]
    for words in said:
        console.print(words, style="red", markup=False)
    console.print(_advice(found), markup=False)
    return well


def _to_compare(folder: Path, teacher: str, dtype: str | None, device: str) -> LanguageModel:
    """In the dtype that the cache was built with, where none is said."""
    known = read_manifest(folder).teacher.dtype
    chosen = dtype or (known if known in DTYPES else "auto")
    config = checked(TeacherConfig, {"model": teacher, "dtype": chosen}, "--teacher")
    return load_teacher(config, pick_device(device), "--teacher", "--teacher")


def _advice(found: Report) -> str:
    if found.damage:
        return "remove the damaged files, and run the build again"
    if found.mismatch:
        return "the cache itself is whole: compare it with the teacher that it is of (`potstill cache info` names it)"
    return "all is well"


def show_info(folder: Path, source: dict[str, Any] | None, json_out: bool) -> bool:
    """Print what a cache is; whether all of its shards can be read."""
    damage: list[str] = []
    cache = Cache(folder, damage)
    facts: dict[str, Any] = describe(cache) if json_out else described(cache)
    if source is not None:
        data = checked(DataConfig, {"sources": [source]}, "--data")
        cache.check_files()
        tokenizer = load_tokenizer(str(tokenizer_of(folder)), str(folder))
        with in_words_of_options():
            found = coverage(cache, data, tokenizer, key="--data")
        facts["coverage"] = asdict(found) if json_out else str(found)
        if found.missing and not json_out:
            facts["first missing"] = found.first
    if json_out:
        print(json.dumps(facts | {"damage": damage}, ensure_ascii=False))
        return not damage
    for name, value in facts.items():
        console_of().print(f"{name:<18} {value}", markup=False)
    for what in damage:
        console_of().print(f"damaged: {what}", style="red", markup=False)
    return not damage
