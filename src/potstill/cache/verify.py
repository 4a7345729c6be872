"""What a cache holds, whether it is whole, and how much of a data set is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potstill.cache.codec import (
    Document,
    Format,
    read_sampled,
    read_tail_samples,
    read_token_logprobs,
    read_top_k,
    wrong_ids,
)
from potstill.cache.manifest import IMPORTED
from potstill.cache.reading import dtype_name, examples_of, tokenizer_fingerprint, weights_fingerprint
from potstill.cache.scored import read_hidden
from potstill.cache.shard import Shard, whole
from potstill.cache.signal import signal_of, uniforms
from potstill.cache.store import Cache, beside_differs
from potstill.config import DataConfig
from potstill.data import collate
from potstill.models import LanguageModel
from potstill.types import Example, PotstillError

AT_ONCE = 4096
RESTS = {
    "known": "rest known: the mass beyond the top k",
    "partial": "rest partial: the mass of the files' other entries; that of all the others is taken to be none",
    "none": "rest none: the mass beyond the top k is not known, and is taken to be none",
}
NO_MASS = -64.0  # a log-probability that stands for all that are smaller
# What a document computed again may differ by, on the mean of its rows: more is another teacher, or damage. Sums come out
# in another order, and a short float has few digits. Of top_k and chosen nats; of sampled a share of the draws; of hidden
# relative to the largest number of a row.
MOST = {"top_k": 0.05, "token_logprobs": 0.05, "sampled": 0.1, "hidden": 0.01}
COMMON = (
    0.5  # of an import's entries: the same teacher's are nearly all the same ids, and its probabilities may be small
)
MOST_SHORT = {"top_k": 0.3, "token_logprobs": 0.3, "sampled": 0.5, "hidden": 0.1}  # of bfloat16 and float16


@dataclass(frozen=True)
class Coverage:
    documents: int
    missing: int
    first: str = ""  # where the first missing one is

    def __str__(self) -> str:
        return f"{self.documents - self.missing:,} of {self.documents:,} documents"


def coverage(
    cache: Cache, data: DataConfig, tokenizer: Any, progress: Callable[[int], None] = lambda _: None, key: str = "data"
) -> Coverage:
    """How many documents of a data set the cache has."""
    documents = missing = 0
    first = ""
    data = data.model_copy(update={"piece_bytes": cache.manifest["piece_bytes"]})
    pieces = examples_of(data, tokenizer, key)
    while some := list(islice(pieces, AT_ONCE)):
        found = cache.find([piece.key for piece in some])
        lacking = [piece for piece, at in zip(some, found, strict=True) if at < 0]
        first = first or (f"{lacking[0].source} ({lacking[0].key})" if lacking else "")
        documents, missing = documents + len(some), missing + len(lacking)
        progress(documents)
    return Coverage(documents, missing, first)


def describe(cache: Cache) -> dict[str, Any]:
    """The facts of a cache, for programs."""
    manifest = cache.manifest
    return {
        "kind": cache.form.kind,
        "signal": manifest["signal"],
        "teacher": manifest["teacher"],
        "imported": manifest.get("imported"),
        "tokenizer": manifest["tokenizer"],
        "chat template": manifest["chat"]["template"],
        "piece bytes": manifest["piece_bytes"],
        "documents": len(cache),
        "tokens": cache.tokens,
        "shards": len(cache.shards),
        "bytes": cache.size,
        "bytes a token": cache.size / max(1, cache.tokens),
    }


def described(cache: Cache) -> dict[str, str]:
    """The same, for people."""
    facts, form = describe(cache), cache.form
    teacher, imported = facts["teacher"], facts["imported"]
    lines = {
        "signal": signal_in_words(form),
        "teacher": f"{teacher['model']}, {teacher['dtype']}, weights {teacher['weights']}",
        "vocabulary": f"{form.vocabulary:,} ids, {form.id_bits} bits each",
        "tokenizer": facts["tokenizer"],
        "chat template": facts["chat template"] or "none",
        "pieces": f"at most {facts['piece bytes']:,} bytes of text",
        "documents": f"{facts['documents']:,}",
        "tokens": f"{facts['tokens']:,}",
        "size": f"{facts['bytes'] / 2**20:,.1f} MB in {facts['shards']:,} shards",
        "bytes a token": f"{facts['bytes a token']:.1f}",
    }
    if imported:
        lines["imported"] = f"from {imported['layout']} files of {imported['values']}; {RESTS[imported['rest']]}"
    return lines


def signal_in_words(form: Format) -> str:
    temperatures = ", ".join(f"{t:g}" for t in form.temperatures)
    signals = {
        "top_k": f"top {form.k} and the rest, at temperatures {temperatures}"
        + (f"; {form.tail_samples} draws from the rest, seed {form.seed}" if form.tail_samples else ""),
        "sampled": f"{form.num_samples} draws, seed {form.seed}",
        "hidden": f"hidden states of width {form.width} in {form.dtype}, and the head",
        "token_logprobs": "log-probabilities of the text's own tokens",
    }
    return f"{form.kind}: {signals[form.kind]}"


@dataclass
class Report:
    numbers: dict[str, int | float] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    mismatch: list[str] = field(default_factory=list)  # how the teacher it was compared with is not that of the cache


def verify(
    folder: Path,
    teacher: LanguageModel | None = None,
    sample: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Checksums, index, ranges and sums of mass; with the teacher, `sample` documents computed again and compared."""
    report = Report()
    cache = Cache(folder, report.damage)
    worst = 0.0
    duplicates = len(cache) - len(np.unique(cache.keys(), axis=0))
    try:
        if what := beside_differs(folder, cache.manifest):
            report.damage.append(what)
    except PotstillError as error:
        report.damage.append(str(error))
    for number, shard in enumerate(cache.shards):
        progress(number, len(cache.shards))
        if not whole(folder, shard.name):
            report.damage.append(f"{shard.name}: its checksum is not the one in its name")
        worst = max(worst, _check_shard(cache, shard, report))
    report.numbers |= {"documents": len(cache), "tokens": cache.tokens, "shards": len(cache.shards)}
    report.numbers |= {"written_twice": duplicates, "largest_error_of_mass": worst}
    if teacher is not None and not report.damage:
        report.mismatch, comparable = _other_teacher(cache, teacher)
        if comparable:
            _recompute(cache, teacher, sample, progress, report)
    return report


def _other_teacher(cache: Cache, teacher: LanguageModel) -> tuple[list[str], bool]:
    """How a teacher is not the one that a cache is of, and whether the numbers of the two can be compared all the same."""
    known, form = cache.manifest["teacher"], cache.form
    name = known["model"]
    if tokenizer_fingerprint(teacher.tokenizer) != cache.manifest["tokenizer"]:
        return [f"it has another tokenizer than the cache's, {name}"], False
    embeddings, head = teacher.model.get_input_embeddings().weight, teacher.model.get_output_embeddings().weight
    rows = min(len(embeddings), len(head))
    if rows < form.vocabulary:
        return [f"it has {rows:,} ids and the cache's, {name}, has {form.vocabulary:,}"], False
    if form.kind == "hidden" and head.shape[1] != form.width:
        return [f"its hidden states are {head.shape[1]} wide and those of the cache's, {name}, are {form.width}"], False
    longest = max((int(shard.tokens.max(initial=0)) for shard in cache.shards), default=0)
    if teacher.positions is not None and teacher.positions < longest:
        return [f"it reads {teacher.positions:,} tokens and the cache's, {name}, has read {longest:,} at once"], False
    if known["weights"] == IMPORTED:
        return [], True  # what is not known of it, the numbers tell
    dtype = dtype_name(teacher.model.dtype)
    if dtype != known["dtype"]:  # rounded weights have another fingerprint too
        return [f"its dtype is {dtype} and that of the cache's, {name}, was {known['dtype']}"], True
    if weights_fingerprint(teacher) != known["weights"]:
        return [f"its weights are not those of the cache's, {name}"], True
    return [], True


def _check_shard(cache: Cache, shard: Shard, report: Report) -> float:
    """The largest distance of a row's mass from 1."""
    worst, form = 0.0, cache.form
    words = np.ascontiguousarray(shard.keys).view(">u8").astype(np.uint64)
    high, low = words[:, 0], words[:, 1]
    if np.any((high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] < low[:-1]))):
        report.damage.append(f"{shard.name}: its keys are not in order")
    if shard.offsets[0] or np.any(np.diff(shard.offsets) < 0) or shard.offsets[-1] != len(shard.data):
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
        report.damage += [f"{shard.name}: document {key} has {what}" for what in _wrong(document, rows)]
        worst = max(worst, _error_of_mass(document, rows))
    return worst


def _wrong(document: Document, rows: npt.NDArray[np.int64]) -> Iterator[str]:
    """What no teacher says, whatever the checksums."""
    form, chosen = document.form, [(document, rows)]
    if int(document.tokens.max(initial=0)) >= form.vocabulary:
        yield "an id beyond the vocabulary"
    if document.predicted[:1].any():
        yield "a prediction of its first token"
    if form.kind == "top_k":
        if what := wrong_ids(read_top_k(chosen, form.temperatures[0])[0], form.vocabulary):
            yield what
        if form.tail_samples and int(read_tail_samples(chosen)[0].max(initial=0)) >= form.vocabulary:
            yield "an id beyond the vocabulary"
        if form.tail_samples and _entries_drawn(document, rows):
            yield "draws from the rest that are not of the rest"
    if form.kind == "sampled":
        ids = document.streams["ids"].astype(np.int64)
        row = np.nonzero(document.streams["first"])[0]
        if int(ids.max(initial=0)) >= form.vocabulary:
            yield "an id beyond the vocabulary"
        if (np.diff(ids)[row[1:] == row[:-1]] <= 0).any():
            yield "draws that are not in the order of their ids"
    if form.kind == "hidden" and not read_hidden(chosen).isfinite().all():
        yield "hidden states that are not finite"


def _error_of_mass(document: Document, rows: npt.NDArray[np.int64]) -> float:
    """The largest distance of a row's mass from 1."""
    form, chosen = document.form, [(document, rows)]
    if form.kind == "top_k":
        read = (read_top_k(chosen, temperature) for temperature in form.temperatures)
        return max(
            float(np.abs(np.exp(logprobs).sum(-1) + np.exp(tail) - 1).max(initial=0.0)) for _, logprobs, tail in read
        )
    if form.kind == "sampled":
        return float(np.abs(read_sampled(chosen)[1].sum(-1) - 1).max(initial=0.0))
    return 0.0


def _entries_drawn(document: Document, rows: npt.NDArray[np.int64]) -> bool:
    """Whether a draw from the rest is one of the entries."""
    ids, _, tail = read_top_k([(document, rows)], document.form.temperatures[0])
    drawn, there = read_tail_samples([(document, rows)])[0], np.isfinite(tail)
    row = np.arange(len(ids), dtype=np.int64)[:, None] << 32
    return bool(np.isin((row + drawn)[there], (row + ids)[there]).any())


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
def _recompute(
    cache: Cache, teacher: LanguageModel, sample: int, progress: Callable[[int, int], None], report: Report
) -> None:
    """Differences between what is stored and what the teacher says now, over documents spread through the cache."""
    kind = cache.form.kind
    short = cache.manifest["teacher"]["dtype"] not in ("float32", "float64")  # of an import it is not known
    imported = cache.manifest.get("imported")
    most = (MOST_SHORT if short else MOST)[kind]
    count = min(sample, len(cache))
    places = np.unique(np.linspace(0, max(0, len(cache) - 1), count).astype(np.int64))
    differences, wrong, shares = [np.zeros(0)], [], list[float]()
    for number, at in enumerate(places if len(cache) else ()):
        progress(number, len(places))
        document = cache.document(int(at))
        if not document.predicted.any():
            continue
        key = "".join(f"{int(word):016x}" for word in cache.keys()[at])
        unknown = imported is not None and imported["rest"] != "known"
        found, common = _difference(document, key, teacher, unknown)
        shares.append(common)
        differences.append(found)
        if not found.mean() <= most or (imported is not None and common < COMMON):
            wrong.append(key)
    values = np.concatenate(differences)
    name = {"hidden": "difference_of_hidden_states", "sampled": "share_of_draws_that_differ"}.get(
        kind, "difference_of_log_probabilities"
    )
    report.numbers |= {"compared": len(differences) - 1, "allowed_mean_of_a_document": most}
    report.numbers |= {
        f"largest_{name}": float(values.max(initial=0)),
        f"mean_{name}": float(values.sum() / max(1, values.size)),
    }
    report.numbers |= {"documents_that_differ": len(wrong)}
    if imported is not None:
        report.numbers |= {"share_of_entries_in_common": sum(shares) / max(1, len(shares))}
    what = (
        f"{len(wrong)} of {len(differences) - 1} documents are not what the teacher says now: they differ by more than "
        f"{most:g} (the first is {wrong[0] if wrong else ''})"
    )
    if wrong and imported is not None:
        what = what.replace("(the first", f"or have less than {COMMON:.0%} of their entries in common (the first")
        report.mismatch.append(f"{what}; or what was imported was taken for something else (--values, --predicts)")
    elif wrong and not report.mismatch:
        report.damage.append(what)


def _difference(
    document: Document, key: str, teacher: LanguageModel, of_entries: bool
) -> tuple[npt.NDArray[Any], float]:
    """By how much each row differs, and of top_k the share of entries that are the same ids. `of_entries`: the mass beyond
    them is not known, so they are compared as all there is."""
    form = document.form
    ids = document.tokens.astype(np.int32)
    example = Example(key, "", ids, document.predicted, 0)
    batch = collate([[example]], pad_id=0).to(teacher.model.device)
    hidden = teacher.hidden(batch, batch.rows.teacher)
    draws = form.num_samples or form.tail_samples
    random = uniforms(form.seed, key, len(batch.rows), draws) if draws else None
    now = signal_of(form, teacher.at_rows(hidden, form.vocabulary), batch.rows.labels, random)
    chosen = [(document, np.arange(len(batch.rows)))]
    if form.kind == "top_k":
        stored_ids, stored, _ = read_top_k(chosen, form.temperatures[0])
        exact = now["logprobs"] / form.temperatures[0]
        exact = exact - np.logaddexp.reduce(exact, -1)[:, None] - np.logaddexp(0, now["odds"][:, :1])
        exact = _at_ids(stored_ids, now["ids"], np.maximum(exact, NO_MASS), form.vocabulary)
        if of_entries:
            stored, exact = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (stored, exact))
        difference: npt.NDArray[Any] = (np.abs(stored - exact) * np.exp(np.maximum(stored, exact))).sum(-1)
        row = np.arange(len(stored_ids), dtype=np.int64)[:, None] * form.vocabulary
        return difference, float(np.isin(row + stored_ids, row + now["ids"]).mean())
    if form.kind == "sampled":
        stored_ids, shares, _ = read_sampled(chosen)
        stored_draws = np.repeat(stored_ids, np.rint(shares * form.num_samples).astype(np.int64).ravel()).reshape(
            -1, form.num_samples
        )
        return share_that_differs(stored_draws, now["samples"], form.vocabulary), 1.0
    if form.kind == "hidden":
        live = torch.from_numpy(now["hidden"])
        live = (live.view(torch.bfloat16) if form.dtype == "bfloat16" else live).float()
        stored_states = read_hidden(chosen).float()
        largest = live.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        return ((stored_states - live).abs().amax(-1) / largest).numpy(), 1.0
    difference = np.abs(read_token_logprobs(chosen) - now["token_logprobs"])
    return difference, 1.0


def share_that_differs(one: npt.NDArray[Any], other: npt.NDArray[Any], vocabulary: int) -> npt.NDArray[np.float64]:
    """Of two times N draws, in the order of their ids [R, N], the share of one that has no partner in the other [R]."""
    rows, draws = one.shape

    def numbered(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """A number for each draw: its row, its id, and how often that was drawn before."""
        here = (np.arange(rows, dtype=np.int64)[:, None] * vocabulary + ids).ravel()
        before: npt.NDArray[np.int64] = np.arange(len(here)) - np.searchsorted(here, here)
        return here * draws + before

    partner = np.isin(numbered(one), numbered(other)).reshape(rows, draws)
    share: npt.NDArray[np.float64] = 1 - partner.mean(-1)
    return share
