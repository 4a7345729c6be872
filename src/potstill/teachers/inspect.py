"""What a cache holds, whether it is whole, and how much of a data set is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potstill.config import DataConfig
from potstill.data import collate
from potstill.files import checksums_differ
from potstill.models import LanguageModel
from potstill.teachers.codec import Document, read_chosen, read_hidden, read_sampled, read_top_k
from potstill.teachers.reading import pieces_of, weights_fingerprint
from potstill.teachers.shard import Shard, whole
from potstill.teachers.signal import signal_of, uniforms
from potstill.teachers.store import Cache
from potstill.types import Example, PotstillError

AT_ONCE = 4096
NO_MASS = -64.0  # a log-probability that stands for all that are smaller


@dataclass(frozen=True)
class Coverage:
    documents: int
    missing: int
    first: str = ""  # where the first missing one is

    def __str__(self) -> str:
        return f"{self.documents - self.missing:,} of {self.documents:,} documents"


def coverage(
    cache: Cache, data: DataConfig, tokenizer: Any, progress: Callable[[int], None] = lambda _: None
) -> Coverage:
    """How many documents of a data set the cache has."""
    documents = missing = 0
    first = ""
    data = data.model_copy(update={"piece_bytes": cache.manifest["piece_bytes"]})
    pieces = pieces_of(data, tokenizer)
    while some := list(islice(pieces, AT_ONCE)):
        found = cache.find([piece.key for piece in some])
        lacking = [piece for piece, at in zip(some, found, strict=True) if at < 0]
        first = first or (f"{lacking[0].source} ({lacking[0].key})" if lacking else "")
        documents, missing = documents + len(some), missing + len(lacking)
        progress(documents)
    return Coverage(documents, missing, first)


def describe(cache: Cache) -> dict[str, Any]:
    """The facts of a cache, for people."""
    manifest, form = cache.manifest, cache.form
    temperatures = ", ".join(f"{t:g}" for t in form.temperatures)
    signals = {
        "top_k": f"top {form.k} and the rest, at temperatures {temperatures}"
        + (f"; {form.rest} draws from the rest, seed {form.seed}" if form.rest else ""),
        "sampled": f"{form.draws} draws, seed {form.seed}",
        "hidden": f"hidden states of width {form.width} in {form.dtype}, and the head",
        "chosen": "log-probabilities of the text's own tokens",
    }
    teacher = manifest["teacher"]
    return {
        "signal": f"{form.kind}: {signals[form.kind]}",
        "teacher": f"{teacher['model']}, {teacher['dtype']}, weights {teacher['weights']}",
        "vocabulary": f"{form.vocabulary:,} ids, {form.id_bits} bits each",
        "tokenizer": manifest["tokenizer"],
        "chat template": manifest["chat"]["template"] or "none",
        "pieces": f"at most {manifest['piece_bytes']:,} bytes of text",
        "documents": f"{len(cache):,}",
        "tokens": f"{cache.tokens:,}",
        "size": f"{cache.size / 2**20:,.1f} MB in {len(cache.shards):,} shards",
        "bytes a token": f"{cache.size / max(1, cache.tokens):.1f}",
    }


@dataclass
class Report:
    numbers: dict[str, int | float] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)


def verify(
    folder: Path,
    teacher: LanguageModel | None = None,
    sample: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Checksums, index, ranges and sums of mass; with the teacher, `sample` documents computed again and compared."""
    cache = Cache(folder)
    report = Report()
    worst = 0.0
    duplicates = len(cache) - len(np.unique(cache.keys(), axis=0))
    if what := checksums_differ(folder, cache.manifest["files"]):
        report.damage.append(what)
    for number, shard in enumerate(cache.shards):
        progress(number, len(cache.shards))
        if not whole(folder, shard.name):
            report.damage.append(f"{shard.name}: its checksum is not the one in its name")
        worst = max(worst, _check_shard(cache, shard, report))
    report.numbers |= {"documents": len(cache), "tokens": cache.tokens, "shards": len(cache.shards)}
    report.numbers |= {"written_twice": duplicates, "largest_error_of_mass": worst}
    if teacher is not None and not report.damage:
        if weights_fingerprint(teacher) != cache.manifest["teacher"]["weights"]:
            report.damage.append(f"the teacher is not the one of the cache ({cache.manifest['teacher']['model']})")
        report.numbers |= _recomputed(cache, teacher, sample, progress)
    return report


def _check_shard(cache: Cache, shard: Shard, report: Report) -> float:
    """The largest distance of a row's mass from 1."""
    worst, form = 0.0, cache.form
    if np.any(np.diff(shard.offsets) < 0) or shard.offsets[-1] != len(shard.data):
        report.damage.append(f"{shard.name}: its index does not fit its data")
        return worst
    for number in range(len(shard.keys)):
        key = bytes(shard.keys[number]).hex()
        if not shard.whole(number):
            report.damage.append(f"{shard.name}: document {key} is not what was written")
            continue
        try:
            document = shard.document(number, form, cache.folder)
        except PotstillError as error:
            report.damage.append(str(error))
            continue
        rows = np.arange(int(document.predicted.sum()))
        mass, largest = _mass_and_largest(document, rows)
        if max(largest, int(document.tokens.max(initial=0))) >= form.vocabulary:
            report.damage.append(f"{shard.name}: document {key} has an id beyond the vocabulary")
        worst = max(worst, mass)
    return worst


def _mass_and_largest(document: Document, rows: npt.NDArray[np.int64]) -> tuple[float, int]:
    form, chosen = document.form, [(document, rows)]
    if form.kind == "top_k":
        error, largest = 0.0, 0
        for temperature in form.temperatures:
            ids, logprobs, tail = read_top_k(chosen, temperature)
            error = max(error, float(np.abs(np.exp(logprobs).sum(-1) + np.exp(tail) - 1).max(initial=0.0)))
            largest = int(ids.max(initial=0))
        return error, largest
    if form.kind == "sampled":
        ids, shares, _ = read_sampled(chosen)
        return float(np.abs(shares.sum(-1) - 1).max(initial=0.0)), int(ids.max(initial=0))
    return 0.0, 0


def _at_ids(
    wanted: npt.NDArray[Any], ids: npt.NDArray[Any], values: npt.NDArray[Any], vocabulary: int
) -> npt.NDArray[Any]:
    """The values [R, K] of some ids, largest first, at other ids [R, K]. What is not among them is at most the smallest; with
    equally likely ids, which of them is kept is chance."""
    row = np.arange(len(ids), dtype=np.int64)[:, None] * vocabulary
    here = (row + ids).ravel()
    order = np.argsort(here)
    at = np.searchsorted(here[order], row + wanted).clip(max=max(0, here.size - 1))
    return np.where(here[order][at] == row + wanted, values.ravel()[order][at], values[:, -1:])


@torch.no_grad()
def _recomputed(
    cache: Cache, teacher: LanguageModel, sample: int, progress: Callable[[int, int], None]
) -> dict[str, int | float]:
    """Differences between what is stored and what the teacher says now, over documents spread through the cache."""
    count = min(sample, len(cache))
    places = np.unique(np.linspace(0, max(0, len(cache) - 1), count).astype(np.int64))
    differences: list[npt.NDArray[Any]] = []
    for number, at in enumerate(places):
        progress(number, len(places))
        document = cache.document(int(at))
        key = "".join(f"{int(word):016x}" for word in cache.keys()[at])
        differences.append(_difference(document, key, teacher))
    values = np.concatenate(differences) if differences else np.zeros(1)
    name = {
        "hidden": "difference_of_hidden_states",
        "sampled": "share_of_draws_that_differ",
    }.get(cache.form.kind, "difference_of_log_probabilities")
    return {"compared": len(places), f"largest_{name}": float(values.max()), f"mean_{name}": float(values.mean())}


def _difference(document: Document, key: str, teacher: LanguageModel) -> npt.NDArray[Any]:
    form = document.form
    ids = document.tokens.astype(np.int32)
    example = Example(key, "", ids, document.predicted, 0)
    batch = collate([[example]], pad_id=0).to(teacher.model.device)
    hidden = teacher.hidden(batch, batch.rows.teacher)
    draws = form.draws or form.rest
    random = uniforms(form.seed, key, len(batch.rows), draws) if draws else None
    now = signal_of(form, teacher.at_rows(hidden, form.vocabulary), batch.rows.labels, random)
    chosen = [(document, np.arange(len(batch.rows)))]
    if form.kind == "top_k":
        stored_ids, stored, _ = read_top_k(chosen, form.temperatures[0])
        exact = now["logprobs"] / form.temperatures[0]
        exact = exact - np.logaddexp.reduce(exact, -1)[:, None] - np.logaddexp(0, now["odds"][:, :1])
        exact = _at_ids(stored_ids, now["ids"], np.maximum(exact, NO_MASS), form.vocabulary)
        difference: npt.NDArray[Any] = (np.abs(stored - exact) * np.exp(np.maximum(stored, exact))).sum(-1)
        return difference
    if form.kind == "sampled":
        stored_ids, shares, _ = read_sampled(chosen)
        counts = np.zeros((len(stored_ids), form.vocabulary), dtype=np.float32)
        np.add.at(counts, (np.arange(len(counts))[:, None], stored_ids), shares)
        np.subtract.at(counts, (np.arange(len(counts))[:, None], now["draws"]), 1 / form.draws)
        difference = np.abs(counts).sum(-1) / 2
        return difference
    if form.kind == "hidden":
        stored_states = torch.from_numpy(read_hidden(chosen).copy())
        live = torch.from_numpy(now["hidden"])
        if form.dtype == "bfloat16":
            stored_states, live = stored_states.view(torch.bfloat16), live.view(torch.bfloat16)
        return (stored_states.float() - live.float()).abs().amax(-1).numpy()
    difference = np.abs(read_chosen(chosen) - now["chosen"])
    return difference
