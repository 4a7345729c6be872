"""`potstill cache convert`: a smaller cache out of a larger one, without the teacher, shard by shard; or one out of the
files of another system, which is in imports.py.

What a smaller k leaves out is known, so the new rest is exact: the entries that were dropped, and the rest they stood beside.
R rows, K kept entries, k those that are left of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from potstill.cache.document import Document, SignalRows, to_bytes
from potstill.cache.imports import LAST_TOKENS, REASONS, Imported, Values, import_cache
from potstill.cache.kinds import SignalKind
from potstill.cache.manifest import IDENTITY, part, signal_keys
from potstill.cache.store import SHARD_BYTES, Cache, Writer, create
from potstill.types import PotstillError

ROWS_AT_ONCE = 2**15


@dataclass(frozen=True)
class Converted:
    documents: int  # added
    there: int  # were in the new cache already
    tokens: int
    draws_left_out: int  # a token: draws from the rest, which is another one beside fewer entries


def convert_cache(
    source: Path,
    out: Path,
    *,
    k: int | None = None,
    temperatures: Sequence[float] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write to `out` what `source` holds, with fewer entries a token or for fewer temperatures. A conversion that was
    interrupted goes on when it is run again."""
    cache = Cache(source)
    cache.check_files()
    try:
        form = cache.form.smaller(k, temperatures)
    except ValueError as error:
        raise PotstillError(f"{source} cannot be made smaller so: {error}") from error
    if out.resolve() == source.resolve():
        raise PotstillError(f"--out: {out} is the cache itself: choose another folder")
    kept = {key: value for key, value in cache.manifest.items() if key in (*IDENTITY, "imported")}
    identity = {**kept, "signal": signal_keys(form)}
    if form.k < cache.form.k and kept.get("imported", {}).get("rest") == "none":
        identity["imported"] = {**kept["imported"], "rest": "partial"}
    del identity["format"], identity["version"]

    with closing(create(out, identity, lambda folder: _copy_beside(cache, folder))) as writer:
        added, old, tokens = _convert(cache, form, writer, progress)
    return Converted(added, old, tokens, cache.form.tail_samples - form.tail_samples)


def _convert(
    cache: Cache, form: SignalKind, writer: Writer, progress: Callable[[int, int], None]
) -> tuple[int, int, int]:
    """Documents added, documents that were there, and tokens."""
    there = Cache(writer.folder)
    added = old = tokens = 0
    for shard in cache.shards:
        keys = [bytes(key).hex() for key in shard.keys]
        missing = [i for i, at in enumerate(there.find(keys)) if at < 0] if keys else []
        old += len(keys) - len(missing)
        waiting: list[tuple[str, Document]] = []
        rows = 0
        for number in missing:
            document = shard.document(number, cache.form, cache.folder)
            waiting.append((keys[number], document))
            rows += int(document.predicted.sum())
            if rows >= ROWS_AT_ONCE:
                _add(writer, form, waiting)
                waiting, rows = [], 0
            tokens += len(document.tokens)
        _add(writer, form, waiting)
        added += len(missing)
        if writer.size >= SHARD_BYTES:
            writer.flush()
        progress(added + old, len(cache))
    writer.flush()
    return added, old, tokens


def _copy_beside(cache: Cache, folder: Path) -> None:
    """What stands beside the shards: of top_k the tokenizer."""
    for name in cache.manifest["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part(cache.folder, name), folder / name)


def _add(writer: Writer, form: SignalKind, documents: Sequence[tuple[str, Document]]) -> None:
    if not documents:
        return
    old = documents[0][1].form
    signal = SignalRows([(document, np.arange(int(document.predicted.sum()))) for _, document in documents])
    stored = {name: np.concatenate([d.arrays[name] for _, d in documents]) for name in old.streams()}
    streams = old.convert(signal, stored, form)
    begin = 0
    for key, document in documents:
        end = begin + int(document.predicted.sum())
        rows = {name: stream[begin:end] for name, stream in streams.items()}
        data = to_bytes(form, document.tokens, document.ends, document.predicted, rows)
        writer.add(key, len(document.tokens), data)
        begin = end


def convert(
    sources: Sequence[Path],
    out: Path,
    *,
    k: int | None,
    temperatures: Sequence[float] | None,
    tokenizer: str | None,
    teacher_name: str | None,
    texts: Path | None,
    columns: Mapping[str, str],
    values: Values,
    predicts: Literal["next", "this"],
) -> None:
    """The command: a cache folder, or files to import; what was done is printed."""
    console = Console(soft_wrap=True, highlight=False)
    absent = [path for path in sources if not path.exists()]
    if absent:
        raise PotstillError(f"there is no {absent[0]}")
    if sources[0].is_dir():
        if len(sources) > 1:
            raise PotstillError("one cache at a time can be converted: name one folder, or files to import")
        if tokenizer or teacher_name or texts or columns:
            raise PotstillError(
                "--tokenizer, --teacher-name, --texts and --column are for files to import; a cache has its own"
            )
        with _shown(console, "documents") as progress:
            made = convert_cache(sources[0], out, k=k, temperatures=temperatures, progress=progress)
        already = f"; {made.there:,} were there" if made.there else ""
        console.print(f"{made.documents:,} documents converted ({made.tokens:,} tokens){already}", markup=False)
        if made.draws_left_out:
            console.print(
                "the draws from the rest were left out: they are of the rest beside all entries, at temperature 1",
                markup=False,
            )
    else:
        if tokenizer is None or teacher_name is None:
            raise PotstillError(
                "--tokenizer and --teacher-name: say which teacher the files are of; they do not say it themselves"
            )
        with _shown(console, "files") as progress:
            found = import_cache(
                sources,
                out,
                layout="parquet" if sources[0].suffix == ".parquet" else "maxtext",
                tokenizer=tokenizer,
                teacher_name=teacher_name,
                texts=texts,
                columns=columns,
                k=k,
                values=values,
                temperatures=temperatures or (1.0,),
                predicts=predicts,
                progress=progress,
            )
        _report(console, found, texts)
    cache = Cache(out)
    each = cache.size / max(1, cache.tokens)
    console.print(
        f"cache: {out}, {len(cache):,} documents, {cache.tokens:,} tokens, {cache.size / 2**20:,.1f} MB ({each:.1f} bytes a "
        "token)",
        markup=False,
    )


def _report(console: Console, found: Imported, texts: Path | None) -> None:
    already = f"; {found.there:,} were there" if found.there else ""
    lines = [f"{found.documents:,} documents imported ({found.tokens:,} tokens){already}"]
    lines += [f"{count:,} documents {REASONS[reason]} were left out" for reason, count in found.left_out.items()]
    if found.shortened:
        lines.append(f"{found.shortened:,} documents lost up to {LAST_TOKENS} tokens at their end, where they were cut")
    if found.without_end:
        lines.append(
            f"{found.without_end:,} documents have no entries for what follows them: train with data.append_eos=false"
        )
    if not found.rest:
        lines.append(
            "the values are logits without their normaliser: the mass of what is not among them is not known, and is taken "
            "to be none"
        )
    if texts is not None:
        lines.append(f"texts to train on: {texts}")
    for line in lines:
        console.print(line, markup=False)


@contextmanager
def _shown(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.completed:,} of {task.total:,} " + what), BarColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)
