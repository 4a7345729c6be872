"""What a student is measured against: a model in the process, one behind a server, or what a cache holds of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from potstill.cache.reader import CacheReader
from potstill.cache.reading import as_cached
from potstill.cache.store import Cache
from potstill.config import DataConfig, EvalConfig, LossConfig, Recipe, TeacherConfig
from potstill.config.compatibility import Combination, check
from potstill.data import collate, without
from potstill.evals.fidelity import Complete, Measure, evaluate, evaluation_batches, greedy_completions
from potstill.evals.on_policy import OnPolicyEval
from potstill.models import LanguageModel, difference
from potstill.parallel.mesh import ranks
from potstill.teachers.open import Opening, TeacherSet, open_served
from potstill.teachers.protocols import SignalSource
from potstill.teachers.remote import RemoteOrigin
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import CachedSignal, check_cache
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, PotstillError


@dataclass(frozen=True)
class Reference:
    """A teacher, and the text that it is asked about where that is not the one that is scored."""

    teacher: Teacher[SignalSource] | None = None  # None: there is none
    batches: Sequence[Batch] | None = None
    note: str | None = None  # what is worth a word
    away: bool = False  # it may be: a server


class RunEvaluation:
    """The evaluations of a run, all on the same text."""

    def __init__(
        self,
        recipe: Recipe,
        student: LanguageModel,
        teacher_set: TeacherSet,
        device: torch.device,
        measure: Measure | None = None,
        complete: Complete | None = None,
    ) -> None:
        config = recipe.eval
        self._config, self._student, self._device = config, student, device
        self._measure, self._complete = measure, complete
        self._reference = reference_of(recipe.teachers, teacher_set, student, config)
        self.notes = [self._reference.note] if self._reference.note else []
        self._on_policy: OnPolicyEval | None = None
        if config is not None and config.on_policy_samples:
            if not teacher_set.live:
                check(Combination(tokenizer="other", compared=True), "teachers")
            self._on_policy = OnPolicyEval(student, teacher_set.live[0], config, recipe.rollouts)
            self.notes += self._on_policy.notes

    @cached_property
    def _batches(self) -> list[Batch]:
        assert self._config is not None
        config = self._config
        return own_share(list(evaluation_batches(config.data, self._student, config.batch_size, config.examples)))

    def __call__(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """`interrupted`: whether to stop waiting for the teacher (StoppedWaiting)."""
        assert self._config is not None
        result = measured_against(
            self._reference, self._student, self._batches, self._device, interrupted, self._measure
        )
        if self._on_policy is not None:
            result |= self._on_policy()
        config = self._config
        samples = greedy_completions(self._student, config.prompts, config.max_new_tokens, self._complete)
        return {**result, "samples": samples}


def measured_against(
    reference: Reference,
    student: LanguageModel,
    batches: Sequence[Batch],
    device: torch.device,
    interrupted: Callable[[], bool] = lambda: False,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """The student's evaluation within a run, which a server that stays away does not end: then there is no KL, and a word."""
    teacher, asked = reference.teacher, reference.batches
    try:
        return evaluate(student, teacher, batches, device, asked=asked, interrupted=interrupted, measure_by=measure)
    except PotstillError as error:
        if not reference.away:
            raise
        said = f"this evaluation has no KL: {error}"
        Console(soft_wrap=True, quiet=not ranks().first).print(said, style="yellow", highlight=False, markup=False)
    return evaluate(student, None, batches, device, measure_by=measure)


def reference_of(
    configs: Sequence[TeacherConfig], teacher_set: TeacherSet, student: LanguageModel, evaluation: EvalConfig | None
) -> Reference:
    """Of a run: its first model in the process with the student's tokenizer, else its first teacher."""
    if evaluation is None or not configs:
        return Reference()
    if teacher_set.live:
        return Reference(teacher_set.live[0])
    config, data, writer = configs[0], evaluation.data, teacher_set.writer
    try:
        if isinstance(writer, RemoteOrigin) and difference(student.tokenizer, writer.tokenizer) is None:
            return behind_server(config, writer, student, data, "teachers[0]", "eval.data")
        if config.cache is not None and not isinstance(writer, RemoteOrigin):
            sizes: dict[str, Any] = {"batch_size": evaluation.batch_size, "limit": evaluation.examples}
            return in_cache(Path(config.cache), student, data, **sizes, where="teachers[0].cache")
    except PotstillError as error:
        return Reference(note=f"evaluations have no KL: {error}")
    return Reference()


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
    kind = "hidden" if origin.server.api == "potstill" and (exact or config.remote.kind != "top_k") else "top_k"
    remote = config.remote.model_copy(update={"kind": kind})
    # Held-out text has no columns: the teacher is asked about all of it, without a prompt of its own.
    own = {"context_column": None, "system": None, "chat_template_kwargs": None}
    asked = config.model_copy(update={"remote": remote, "filter": {}, **own})
    opening = Opening(asked, student, data, LossConfig(), student.model.device, where)
    return Reference(open_served(opening, origin).teacher, away=True)


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
    data = as_cached(data, cache.manifest)
    check(Combination().stored(cache.form.kind, cache.form.temperatures), where, where)
    source = CachedSignal(CacheReader(cache, skip_missing=True), check_cache(cache, student, data, where), 1.0)
    teacher = Teacher(source, SameTokenizerView(), str(folder))
    batches: list[Batch] = []
    examples = missing = 0
    for batch in evaluation_batches(data, student, batch_size, limit, key, as_trained=True):
        absent = teacher.missing(batch)
        examples, missing = examples + len(batch.examples), missing + len(absent)
        if len(absent) < len(batch.examples):
            batches.append(without(batch, absent) if absent else batch)
    if not batches:
        raise PotstillError(
            f"{where}: the cache has none of the {examples:,} held-out examples; add them with `potstill cache build`, in "
            f"pieces of {cache.manifest.piece_bytes:,} bytes as the rest of it is"
        )
    note = f"{where}: the cache has {examples - missing:,} of {examples:,} held-out examples, and KL is of these"
    return Reference(teacher, own_share(batches), note if missing else None)


def own_share(batches: Sequence[Batch]) -> list[Batch]:
    """This rank's, of all that are evaluated; as many as the others have, the last one empty where that must be."""
    here = ranks().dp
    own = list(batches[here.index :: here.size])
    return own if len(own) * here.size >= len(batches) else [*own, collate([], 0)]
