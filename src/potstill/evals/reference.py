"""What a student is measured against: a model in the process, one behind a server, or what a cache holds of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from potstill.cache.reader import CacheReader
from potstill.cache.reading import as_cached
from potstill.cache.store import Cache
from potstill.config import DataConfig, EvalConfig, LossConfig, TeacherConfig
from potstill.data import StepBatches, without
from potstill.evals.fidelity import evaluate
from potstill.models import LanguageModel, difference
from potstill.teachers.open import TeacherSet
from potstill.teachers.remote import RemoteOrigin, open_remote
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import StoredSignal, check_cache
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, PotstillError
from potstill.types import Teacher as AnyTeacher


@dataclass(frozen=True)
class Reference:
    """A teacher, and the text that it is asked about where that is not the one that is scored."""

    teacher: AnyTeacher
    batches: Sequence[Batch] | None = None
    note: str | None = None  # what is worth a word
    away: bool = False  # it may be: a server


def measured_against(
    reference: Reference | None,
    student: LanguageModel,
    batches: Sequence[Batch],
    device: torch.device,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The student's evaluation within a run, which a server that stays away does not end: then there is no KL, and a word."""
    if reference is None:
        return evaluate(student, None, batches, device)
    try:
        return evaluate(student, reference.teacher, batches, device, asked=reference.batches, interrupted=interrupted)
    except PotstillError as error:
        if not reference.away:
            raise
        Console(soft_wrap=True).print(
            f"this evaluation has no KL: {error}", style="yellow", highlight=False, markup=False
        )
        return evaluate(student, None, batches, device)


def reference_of(
    configs: Sequence[TeacherConfig], teacher_set: TeacherSet, student: LanguageModel, evaluation: EvalConfig | None
) -> tuple[Reference | None, list[str]]:
    """Of a run: its first model in the process with the student's tokenizer, else its first teacher. And notes."""
    if evaluation is None or not configs:
        return None, []
    if teacher_set.live:
        return Reference(teacher_set.live[0]), []
    config, data = configs[0], evaluation.data
    try:
        found = None
        if isinstance(teacher_set.writer, RemoteOrigin):
            if difference(student.tokenizer, teacher_set.writer.tokenizer) is None:
                found = behind_server(config, teacher_set.writer, student, data, "teachers[0]", "eval.data")
        elif config.cache is not None:
            size, limit = evaluation.batch_size, evaluation.examples
            found = in_cache(Path(config.cache), student, data, batch_size=size, limit=limit, where="teachers[0].cache")
    except PotstillError as error:
        return None, [f"evaluations have no KL: {error}"]
    return found, [found.note] if found is not None and found.note else []


def behind_server(
    config: TeacherConfig,
    origin: RemoteOrigin,
    student: LanguageModel,
    data: DataConfig,
    where: str,
    key: str,
    exact: bool = False,
) -> Reference:
    """At temperature 1, whatever is trained. Of a server that gives no more than k tokens, and without `exact` of one that is
    asked for them, over these and all others as one."""
    if origin.positions is not None and data.max_length > origin.positions:
        raise PotstillError(
            f"{key}.max_length is {data.max_length} and the teacher at {config.server} reads {origin.positions} tokens: set "
            f"{key}.max_length to {origin.positions} or less"
        )
    kind = "hidden" if origin.server.whole and (exact or config.remote.kind != "top_k") else "top_k"
    asked = config.model_copy(update={"remote": config.remote.model_copy(update={"kind": kind})})
    teacher = open_remote(asked, origin, student, data, LossConfig(), where, other=False)
    return Reference(teacher, away=True)


def in_cache(
    folder: Path,
    student: LanguageModel,
    data: DataConfig,
    *,
    batch_size: int,
    limit: int | None,
    where: str,
    key: str = "eval.data",
) -> Reference:
    """What it holds of the text, read as in training: in the cache's own pieces, up to max_length."""
    cache = Cache(folder)
    data = as_cached(data, cache.manifest).model_copy(update={"shuffle": False})
    width, temperature = check_cache(cache, student, data, LossConfig(), where)
    source = StoredSignal(CacheReader(cache, skip_missing=True), width, temperature)
    teacher = Teacher(source, SameTokenizerView(), str(folder))
    windows = StepBatches(
        data,
        student.tokenizer,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=0,
        epochs=1,
        limit=limit,
        key=key,
    )
    batches: list[Batch] = []
    examples = lacking = 0
    for batch in (batch for window in windows for batch in window.batches):
        lacks = teacher.missing(batch)
        examples, lacking = examples + len(batch.examples), lacking + len(lacks)
        if len(lacks) < len(batch.examples):
            batches.append(without(batch, lacks) if lacks else batch)
    if not batches:
        raise PotstillError(
            f"{where}: the cache has none of the {examples:,} held-out examples; add them with `potstill cache build`, in "
            f"pieces of {cache.manifest['piece_bytes']:,} bytes as the rest of it is"
        )
    note = f"{where}: the cache has {examples - lacking:,} of {examples:,} held-out examples, and KL is of these"
    return Reference(teacher, batches, note if lacking else None)
