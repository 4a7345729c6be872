"""What a cache holds, whether it is whole, and how much of a data set is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from potstill.cache.manifest import IMPORTED
from potstill.cache.origin import signal_of_examples
from potstill.cache.reading import dtype_name, examples_of, tokenizer_fingerprint, weights_fingerprint
from potstill.cache.shard import Shard, whole
from potstill.cache.store import Cache, beside_differs
from potstill.config import DataConfig
from potstill.models import LanguageModel
from potstill.signals.document import Document
from potstill.signals.kinds import Signal, wrong_ids
from potstill.types import Example, PotstillError

AT_ONCE = 4096
RESTS = {
    "known": "rest known: the mass beyond the top k",
    "partial": "rest partial: the mass of the files' other entries; that of all the others is taken to be none",
    "none": "rest none: the mass beyond the top k is not known, and is taken to be none",
}
# Of an import's entries: the same teacher's are nearly all the same ids, and its probabilities may be small.
COMMON = 0.5


@dataclass(frozen=True)
class Coverage:
    documents: int
    missing: int
    first: str = ""  # where the first missing one is
    missing_bytes: int = 0  # of text

    def __str__(self) -> str:
        return f"{self.documents - self.missing:,} of {self.documents:,} documents"


def coverage(cache: Cache, data: DataConfig, tokenizer: Any, key: str = "data") -> Coverage:
    """How many documents of a data set the cache has."""
    documents, missing, size, first = 0, 0, 0, ""
    data = data.model_copy(update={"piece_bytes": cache.manifest.piece_bytes})
    examples = examples_of(data, tokenizer, key)
    while some := list(islice(examples, AT_ONCE)):
        lost = [example for example, at in zip(some, cache.find([e.key for e in some]), strict=True) if at < 0]
        first = first or (f"{lost[0].source} ({lost[0].key})" if lost else "")
        documents, missing = documents + len(some), missing + len(lost)
        size += sum(len(example.text.encode()) for example in lost)
    return Coverage(documents, missing, first, size)


def describe(cache: Cache) -> dict[str, Any]:
    """The facts of a cache, for programs."""
    manifest = cache.manifest
    return {
        "kind": cache.form.kind,
        "signal": manifest.signal,
        "teacher": manifest.teacher.facts(),
        "imported": manifest.imported and manifest.imported.facts(),
        "tokenizer": manifest.tokenizer,
        "chat template": manifest.chat.template,
        "piece bytes": manifest.piece_bytes,
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
        "signal": f"{form.kind}: {form.describe()}",
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
    known, form = cache.manifest.teacher, cache.form
    name = known.model
    if tokenizer_fingerprint(teacher.tokenizer) != cache.manifest.tokenizer:
        return [f"it has another tokenizer than the cache's, {name}"], False
    embeddings, head = teacher.model.get_input_embeddings().weight, teacher.model.get_output_embeddings().weight
    rows = min(len(embeddings), len(head))
    if rows < form.vocabulary:
        return [f"it has {rows:,} ids and the cache's, {name}, has {form.vocabulary:,}"], False
    if form.has_head and head.shape[1] != form.width:
        return [f"its hidden states are {head.shape[1]} wide and those of the cache's, {name}, are {form.width}"], False
    longest = max((int(shard.tokens.max(initial=0)) for shard in cache.shards), default=0)
    if teacher.positions is not None and teacher.positions < longest:
        return [f"it reads {teacher.positions:,} tokens and the cache's, {name}, has read {longest:,} at once"], False
    if known.weights == IMPORTED:
        return [], True  # what is not known of it, the numbers tell
    dtype = dtype_name(teacher.model.dtype)
    if dtype != known.dtype:  # rounded weights have another fingerprint too
        return [f"its dtype is {dtype} and that of the cache's, {name}, was {known.dtype}"], True
    if weights_fingerprint(teacher) != known.weights:
        return [f"its weights are not those of the cache's, {name}"], True
    return [], True


def _check_shard(cache: Cache, shard: Shard, report: Report) -> float:
    """The largest distance of a row's mass from 1."""
    worst, form = 0.0, cache.form
    keys = [key.tobytes() for key in shard.keys]
    if keys != sorted(keys):
        report.damage.append(f"{shard.name}: its keys are not in order")
    if shard.offsets[0] or np.any(np.diff(shard.offsets) < 0) or shard.offsets[-1] != len(shard.data):
        report.damage.append(f"{shard.name}: its index does not fit its data")
        return worst
    for number, key in enumerate(keys):
        if not shard.whole(number):
            report.damage.append(f"{shard.name}: document {key.hex()} is not what was written")
            continue
        try:
            document = shard.document(number, form)
        except PotstillError as error:
            report.damage.append(str(error))
            continue
        signal = dict(document.all_rows())
        report.damage += [f"{shard.name}: document {key.hex()} has {what}" for what in _problems(document, signal)]
        worst = max(worst, float(np.abs(form.total_mass(signal) - 1).max(initial=0.0)))
    return worst


def _problems(document: Document, signal: Signal) -> Iterator[str]:
    """What no teacher says, whatever the checksums."""
    if problem := wrong_ids(document.tokens[:, None], document.form.vocabulary):
        yield problem
    if document.predicted[:1].any():
        yield "a prediction of its first token"
    yield from document.form.problems(signal)


def _recompute(
    cache: Cache, teacher: LanguageModel, sample: int, progress: Callable[[int, int], None], report: Report
) -> None:
    """Differences between what is stored and what the teacher says now, over documents spread through the cache."""
    form, imported = cache.form, cache.manifest.imported
    short = cache.manifest.teacher.dtype not in ("float32", "float64")  # of an import it is not known
    most, unknown = form.tolerance[short], imported is not None and imported.rest != "known"
    places = np.unique(np.linspace(0, len(cache) - 1, min(sample, len(cache))).astype(np.int64))
    differences, wrong, shares = [np.zeros(0)], [], list[float]()
    for number, at in enumerate(places):
        progress(number, len(places))
        document = cache.document(int(at))
        if not document.predicted.any():
            continue
        key = "".join(f"{int(word):016x}" for word in cache.keys()[at])
        example = Example(key, "", document.tokens.astype(np.int32), document.predicted, 0)
        now = signal_of_examples(teacher, form, [example])
        found, common = form.difference(document.all_rows(), now, unknown)
        shares.append(common)
        differences.append(found)
        if not found.mean() <= most or (imported is not None and common < COMMON):
            wrong.append(key)
    values, compared = np.concatenate(differences), len(shares)
    report.numbers |= {
        "compared": compared,
        "allowed_mean_of_a_document": most,
        f"largest_{form.differs_by}": float(values.max(initial=0)),
        f"mean_{form.differs_by}": float(values.sum() / max(1, values.size)),
        "documents_that_differ": len(wrong),
    }
    by = f"they differ by more than {most:g}"
    if imported is not None:
        report.numbers |= {"share_of_entries_in_common": sum(shares) / max(1, compared)}
        by += f" or have less than {COMMON:.0%} of their entries in common"
    if not wrong:
        return
    what = f"{len(wrong)} of {compared} documents are not what the teacher says now: {by} (the first is {wrong[0]})"
    if imported is not None:
        report.mismatch.append(f"{what}; or what was imported was taken for something else (--values, --predicts)")
    elif not report.mismatch:
        report.damage.append(what)
