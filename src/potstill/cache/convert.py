"""A smaller cache out of a larger one, without the teacher, shard by shard.

What a smaller k leaves out is known, so the new rest is exact: the entries that were dropped, and the rest they stood beside.
R rows, K kept entries, k those that are left of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from potstill.cache.manifest import new_manifest, part
from potstill.cache.store import Cache, create
from potstill.signals.document import Document, SignalRows
from potstill.types import Example, PotstillError

AT_ONCE = 16  # documents


@dataclass(frozen=True)
class Converted:
    documents: int  # added
    there: int  # were in the new cache already
    tokens: int
    draws_left_out: int  # per token: draws from the rest, which is another one beside fewer entries

    def lines(self) -> list[str]:
        """What to tell of it."""
        already = f"; {self.there:,} were there" if self.there else ""
        lines = [f"{self.documents:,} documents converted ({self.tokens:,} tokens){already}"]
        if self.draws_left_out:
            lines.append(
                "the draws from the rest were left out: they are of the rest beside all entries, at temperature 1"
            )
        return lines


def convert_cache(
    source: Path,
    out: Path,
    *,
    k: int | None = None,
    temperatures: Sequence[float] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write to `out` what `source` holds, with fewer entries per token or for fewer temperatures. A conversion that was
    interrupted resumes when it is run again."""
    cache = Cache(source)
    cache.check_files()
    try:
        form = cache.form.smaller(k, temperatures)
    except ValueError as error:
        raise PotstillError(f"{source} cannot be made smaller so: {error}") from error
    if out.resolve() == source.resolve():
        raise PotstillError(f"--out: {out} is the cache itself: choose another folder")
    kept = cache.manifest.facts(include={"teacher", "tokenizer", "chat", "piece_bytes", "imported"})
    if form.k < cache.form.k and cache.manifest.imported and cache.manifest.imported.rest == "none":
        kept["imported"]["rest"] = "partial"

    def beside(folder: Path) -> None:
        for name in cache.manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part(cache.folder, name), folder / name)

    with closing(create(out, new_manifest(out, form, **kept), beside)) as writer:
        there, done = Cache(out), 0
        for shard in cache.shards:
            missing = np.flatnonzero(there.find([bytes(key).hex() for key in shard.keys]) < 0).tolist()
            for begin in range(0, len(missing), AT_ONCE):
                numbers = missing[begin : begin + AT_ONCE]
                documents = [shard.document(number, cache.form) for number in numbers]
                examples = [_example(bytes(shard.keys[n]).hex(), d) for n, d in zip(numbers, documents, strict=True)]
                rows = SignalRows([(document, np.arange(int(document.predicted.sum()))) for document in documents])
                stored = {name: np.concatenate([d.arrays[name] for d in documents]) for name in cache.form.streams()}
                writer.add_rows(form, examples, cache.form.convert(rows, stored, form))
            done += len(shard.keys)
            progress(done, len(cache))
        writer.flush()
    left_out = cache.form.tail_samples - form.tail_samples
    return Converted(writer.documents, done - writer.documents, writer.tokens, left_out)


def _example(key: str, document: Document) -> Example:
    return Example(key, "", document.tokens.astype(np.int32), document.predicted, 0, ends=document.ends)
