"""`potstill cache`, from the command line's words."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from potstill.cache.build import Progress, Terminated, build, ranks, sigterm_interrupts
from potstill.cache.codec import DTYPES
from potstill.cache.kinds import KINDS, SignalKind
from potstill.cache.manifest import IMPORTED, Manifest, read_manifest, signal_keys, tokenizer_of
from potstill.cache.origin import LiveOrigin, Origin
from potstill.cache.reading import as_cached
from potstill.cache.store import Cache, begun_cache
from potstill.cache.verify import Report, coverage, describe, described, verify
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.config.recipe import checked, load_recipe
from potstill.data import with_pieces
from potstill.models import load_student_tokenizer, load_teacher, load_tokenizer
from potstill.parallel.mesh import pick_device
from potstill.teachers.remote import open_server
from potstill.types import PotstillError

RECIPES = (".yaml", ".yml", ".json")
OPTIONS = {"files": "data", "dataset": "data", "prompt": "prompt-column", "completion": "completion-column"}
LAYOUT_OPTIONS = {  # longer words first
    "max_length": "--max-length",
    "packing to false": "--no-packing",
    "packing": "--packing",
    "piece_bytes": "--piece-bytes",
    "sources[0]": "--data",
    "sources": "--data",
}
HEAVY_REST = 0.05  # of the mass: worth a word
SAMPLE = 32  # documents to compute again
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
    token_env: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Build from a recipe's teacher and data, or from a model or a server and `--data`."""
    if what.endswith(RECIPES):
        of_models = {"--piece-bytes": piece_bytes, "--dtype": dtype, "--revision": revision}
        of_models |= {"--trust-remote-code": trust_remote_code or None, "--token-env": token_env}
        of_models |= {"--tokenizer": tokenizer}
        if wrong := [name for name, value in of_models.items() if value is not None]:
            raise PotstillError(f"{wrong[0]} goes with a model and --data; a recipe has a key for it")
        config, data, key = _from_recipe(what, source, teacher, overrides, out)
    else:
        if teacher:
            raise PotstillError(f"--teacher {teacher} goes with a recipe, and {what} is a model: leave it out")
        options: dict[str, Any] = {"revision": revision, "dtype": dtype}
        options |= {"trust_remote_code": trust_remote_code or None}
        options |= {"remote": None if token_env is None else {"api_key_env": token_env}, "tokenizer": tokenizer}
        config, data, key = _from_model(what, source, overrides, piece_bytes, options)
    folder = out or (Path(config.cache) if config.cache else None)
    if folder is None:
        raise PotstillError("--out: say where the cache is to be, or give the teacher a cache in the recipe")
    there = begun_cache(folder)
    given = {name: value for name, value in store.items() if value is not None}
    kept = _settled(config.store, given, there)
    rank, world = ranks()
    device = pick_device(device_name)
    if device.type == "cuda" and world > 1:
        device = torch.device("cuda", rank % torch.cuda.device_count())
    console = console_of()
    who = f"process {rank} of {world}: " if world > 1 else ""
    if there is not None and kept != checked(StoreConfig, {**config.store.model_dump(), **given}, "store"):
        form = there.form
        console.print(f"{who}going on with what {folder} keeps, {form.kind}: {form.describe()}", markup=False)
    try:
        with sigterm_interrupts(), in_words_of_options(source is not None):
            origin = _load(config, there, folder, device, key, teacher)
            with _shown(console, rank, world) as show:
                built = build(
                    origin,
                    kept,
                    data,
                    folder,
                    key="data" if source is None else "--data",
                    batch_tokens=batch_tokens or (4096 if device.type == "cpu" else 16384),
                    rank=rank,
                    world=world,
                    shard_seconds=shard_seconds,
                    progress=show,
                    say=lambda message: console.print(message, style="yellow", markup=False),
                )
    except KeyboardInterrupt as stop:
        console.print(
            f"{who}stopped: what was computed until now is kept, and the same command goes on from there", markup=False
        )
        raise SystemExit(143 if isinstance(stop, Terminated) else 130) from None
    speed = built.tokens / built.seconds if built.seconds else 0.0
    console.print(
        f"{who}{built.documents:,} documents added ({built.tokens:,} tokens, {speed:,.0f} a second); {built.there:,} "
        "were there" + (f"; {built.unpredictable:,} have nothing to predict in them" if built.unpredictable else ""),
        markup=False,
    )
    if built.rest is not None:
        hint = (
            ""
            if kept.tail_samples or built.rest < HEAVY_REST or 1.0 not in kept.temperatures  # which draws are at
            else "; with --tail-samples 32 forward KL learns what is in it (docs/cache.md)"
        )
        console.print(f"{who}beyond the top {kept.k} lies {built.rest:.1%} of the mass{hint}", markup=False)
    if rank == 0:
        cache = Cache(folder)
        if any(source.kind == "text" for source in data.sources):
            size = cache.manifest.piece_bytes
            console.print(
                f"texts were cut into pieces of at most {size:,} bytes (piece_bytes): students need a data.max_length "
                "of about "
                f"a quarter of that, {-(-size // 4):,}, or more; with less the ends of long pieces are lost to them",
                markup=False,
            )
        console.print(f"cache: {folder}, {cache.sizes()}", markup=False)


def _settled(store: StoreConfig, given: Mapping[str, Any], there: Manifest | None) -> StoreConfig:
    """What to keep: as the options say, else the recipe, else the cache that is there. A recipe's value that is the default
    says nothing: recipes that were saved spell out all of them."""
    plain = StoreConfig()
    wanted = {name: value for name, value in store.model_dump().items() if value != getattr(plain, name)}
    before = {} if there is None else _settings(there.form)
    kept = checked(StoreConfig, {**before, **wanted, **given}, "store")
    for name in given:
        users = sorted(kind for kind, form in KINDS.items() if name in form.parameters)
        if users and kept.kind not in users:
            raise PotstillError(
                f"--{name.removesuffix('s') if name == 'temperatures' else name.replace('_', '-')} goes with kind "
                f"{' and '.join(users)}, and this cache is of kind {kept.kind}: leave it out"
            )
    if "seed" in given and kept.kind == "top_k" and not kept.tail_samples:
        raise PotstillError("--seed is that of draws, and a top_k cache without --tail-samples has none: leave it out")
    return kept


def _settings(form: SignalKind) -> dict[str, Any]:
    """Those of a cache that is there, as a recipe's store has them."""
    named = {name: value for name, value in signal_keys(form).items() if name in form.parameters}
    return {"kind": form.kind} | {name: value for name, value in named.items() if name in StoreConfig.model_fields}


def _load(
    config: TeacherConfig, there: Manifest | None, folder: Path, device: torch.device, key: str, number: int
) -> Origin:
    """The teacher; where the recipe names none, the one that the cache was built with."""

    def load(config: TeacherConfig) -> Origin:
        return LiveOrigin(load_teacher(config, device, key, key), config.name)

    if config.server is not None:
        return open_server(config, key.removesuffix(".model"))
    say_which = f"add teachers.{number}.model=MODEL to the command"
    if there is None:
        if config.model is None:
            raise PotstillError(f"teachers[{number}] has no model to run: {say_which}")
        return load(config)
    known = there.teacher
    if config.dtype == "auto" and known.dtype in DTYPES:
        config = config.model_copy(update={"dtype": known.dtype})
    if config.model is not None:
        return load(config)
    if known.weights == IMPORTED:
        raise PotstillError(
            f"teachers[{number}] has no model to run, and {folder} was imported, to which no model adds: import more, or "
            f"{say_which} and choose another folder"
        )
    config = config.model_copy(update={"model": known.model, "revision": config.revision or known.revision})
    try:
        return load(config)
    except PotstillError as error:
        raise PotstillError(
            f"teachers[{number}] has no model to run, and {known.model}, with which {folder} was built, cannot be loaded "
            f"({error}): {say_which}"
        ) from error


@contextmanager
def in_words_of_options(data: bool) -> Iterator[None]:
    """Errors about `--data` name the options of the command, not the keys that they become."""
    try:
        yield
    except PotstillError as error:
        found = re.match(r"--data\.sources\[0\]\.(\w+)", str(error)) if data else None
        if found is None:
            words = str(error)
            for key, option in LAYOUT_OPTIONS.items():
                words = words.replace(f"--data.{key}", option)
            if words == str(error) or not data:
                raise
            raise PotstillError(words) from error
        role = found[1]
        option = f"--{OPTIONS.get(role, role)}"
        words = option + str(error)[found.end() :]
        words = words.replace(f"did you mean {role}: ", f"did you mean {option} ")
        words = words.replace(f"; set {role} to one of them", f"; name one of them with {option}")
        raise PotstillError(re.sub(r"(\S+) \(looked in \1\)", r"\1", words)) from error


def _from_recipe(
    what: str, source: dict[str, Any] | None, teacher: int, overrides: Sequence[str], out: Path | None
) -> tuple[TeacherConfig, DataConfig, str]:
    if source is not None:
        raise PotstillError("--data goes with a model; a recipe has its own data")
    recipe = load_recipe(what, list(overrides))
    if teacher >= len(recipe.teachers):
        raise PotstillError(f"--teacher {teacher}: the recipe has {len(recipe.teachers)} teachers, numbered from 0")
    config, data = recipe.teachers[teacher], recipe.data
    folder = out or (Path(config.cache) if config.cache else None)
    there = None if folder is None else begun_cache(folder)
    if there is not None:
        data = as_cached(data, there)
    elif data.piece_bytes is None:  # cut as the run that the recipe is of would
        data = with_pieces(data, load_student_tokenizer(recipe.student))
    return config, data, f"teachers[{teacher}].model"


def _from_model(
    what: str, source: dict[str, Any] | None, overrides: Sequence[str], piece_bytes: int | None, options: dict[str, Any]
) -> tuple[TeacherConfig, DataConfig, str]:
    if source is None:
        raise PotstillError(f"--data: say which text {what} is to read (or give a recipe, which ends in .yaml)")
    if overrides:
        raise PotstillError(f"{overrides[0]}: key=value goes with a recipe; a model takes options")
    served = what.startswith(("http://", "https://"))
    given = {key: value for key, value in options.items() if value is not None}
    of_the_other = ("revision", "dtype") if served else ("remote", "tokenizer")
    if wrong := [key for key in of_the_other if key in given]:
        name = {"remote": "token-env"}.get(wrong[0], wrong[0])
        raise PotstillError(f"--{name} goes with a {'model' if served else 'server'}, and {what} is none: leave it out")
    config = checked(TeacherConfig, {"server" if served else "model": what, **given}, "MODEL")
    data = checked(DataConfig, {"sources": [source], "piece_bytes": piece_bytes}, "--data")
    return config, data, "MODEL"


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
    folder: Path, *, teacher: str | None, sample: int | None, dtype: str | None, device_name: str, as_json: bool
) -> bool:
    """Print what was found; whether all is well."""
    for option, given in {"--sample": sample, "--dtype": dtype}.items():
        if given is not None and teacher is None:
            raise PotstillError(f"{option} {given} goes with --teacher, which says what to compare with")
    if sample is not None and sample < 1:
        raise PotstillError(f"--sample {sample}: choose how many documents to compare, at least 1")
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    model = None
    if teacher is not None:
        known = read_manifest(folder).teacher.dtype
        chosen = dtype or (known if known in DTYPES else "auto")
        config = checked(TeacherConfig, {"model": teacher, "dtype": chosen}, "--teacher")
        model = load_teacher(config, pick_device(device_name), "--teacher", "--teacher")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking shards", total=None)
        found: Report = verify(
            folder, model, sample or SAMPLE, lambda done, total: bar.update(task, completed=done, total=total)
        )
    well = not found.damage and not found.mismatch
    if as_json:
        print(json.dumps(found.numbers | {"damage": found.damage, "mismatch": found.mismatch}, ensure_ascii=False))
        return well
    for name, value in found.numbers.items():
        console.print(
            f"{name.replace('_', ' '):<32} {value:,}"
            if isinstance(value, int)
            else f"{name.replace('_', ' '):<32} {value:.3g}"
        )
    for what in found.damage:
        console.print(f"damaged: {what}", style="red", markup=False)
    for what in found.mismatch:
        console.print(f"{teacher} is not the cache's teacher: {what}", style="red", markup=False)
    last = "all is well"
    if found.damage:
        last = "remove the damaged files, and run the build again"
    elif found.mismatch:
        last = "the cache itself is whole: compare it with the teacher that it is of (`potstill cache info` names it)"
    console.print(last, markup=False)
    return well


def show_info(folder: Path, source: dict[str, Any] | None, as_json: bool) -> bool:
    """Print what a cache is; whether all of its shards can be read."""
    damage: list[str] = []
    cache = Cache(folder, damage)
    facts: dict[str, Any] = describe(cache) if as_json else described(cache)
    if source is not None:
        data = checked(DataConfig, {"sources": [source]}, "--data")
        cache.check_files()
        tokenizer = load_tokenizer(str(tokenizer_of(folder)), str(folder))
        with in_words_of_options(True):
            found = coverage(cache, data, tokenizer, key="--data")
        facts |= {"coverage": asdict(found)} if as_json else {"coverage": str(found)}
        if found.missing and not as_json:
            facts["first missing"] = found.first
    if as_json:
        print(json.dumps(facts | {"damage": damage}, ensure_ascii=False))
        return not damage
    for name, value in facts.items():
        console_of().print(f"{name:<18} {value}", markup=False)
    for what in damage:
        console_of().print(f"damaged: {what}", style="red", markup=False)
    return not damage
