"""What the teachers are worth: whether they read the text better than the student, and how much of it their signal holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from potstill.config import DataConfig
from potstill.doctor.findings import Finding, Patient, error, ok, warning
from potstill.dry_run import FirstStep
from potstill.evals.fidelity import evaluate, evaluation_batches
from potstill.models import LanguageModel, difference
from potstill.teachers.live import LiveModel
from potstill.teachers.teacher import Teacher
from potstill.training.checkpoint import read_progress
from potstill.types import PotstillError, TopKTarget

READ = 24  # examples that both are measured on
FEWEST_MASS = 0.9  # of the teacher's probability that its k likeliest tokens should hold
CHANCE = 0.98  # of ln(ids): nats per token from which on a model reads text no better than noise


def headroom(patient: Patient, first: FirstStep) -> Iterator[Finding]:
    """Bits per byte of both, which do not depend on the tokenizer."""
    parts, recipe = first.parts, first.parts.recipe
    key, data = ("data", parts.data) if recipe.eval is None else ("eval.data", recipe.eval.data)
    live = [(i, t.source.language_model) for i, t in enumerate(parts.teachers) if isinstance(t.source, LiveModel)]
    own = {i for i, config in enumerate(recipe.teachers) if config.student is not None}
    live = [(i, model) for i, model in live if i not in own]
    if not live or any(source.kind == "completion" and not source.completion for source in data.sources):
        return
    student = _bits(parts.student, data, key)
    if recipe.student.config is None and (noise := _noise(parts.student, student, "the student")) is not None:
        yield noise
    for i, model in live:
        taught = _bits(model, data, key)
        if (noise := _noise(model, taught, f"teachers[{i}]")) is not None:
            yield noise
        said = (
            f"teachers[{i}] has {taught['bits_per_byte']:.3f} bits per byte on {READ} examples of {key}, the student "
        )
        said += f"{student['bits_per_byte']:.3f}"
        if taught["bits_per_byte"] >= student["bits_per_byte"]:
            yield warning(f"{said}: the teacher is not better", "take a better teacher, or text that it knows better")
        else:
            yield ok(said)


def _bits(model: LanguageModel, data: DataConfig, key: str) -> dict[str, Any]:
    limit = model.positions
    if limit is not None and data.max_length > limit:
        data = data.model_copy(update={"max_length": limit})
    return evaluate(model, None, evaluation_batches(data, model, 4, READ, key), model.device, key=key)


def _noise(model: LanguageModel, found: dict[str, Any], who: str) -> Finding | None:
    if found["perplexity"] < len(model.tokenizer) ** CHANCE:
        return None
    return error(
        f"{who} reads the text no better than noise (perplexity {found['perplexity']:,.0f} of {len(model.tokenizer):,} ids)",
        "see whether its tokenizer is the one that it was trained with, and its weights are whole",
    )


@torch.no_grad()
def top_k_mass(patient: Patient, first: FirstStep) -> Iterator[Finding]:
    """Of caches and servers that give the k likeliest tokens."""
    parts = first.parts
    batch, ready = first.prepared.step.batches[0].to(parts.device), next(first.prepared.ready)
    for index, (teacher, prepared) in enumerate(zip(parts.teachers, ready, strict=True)):
        target, _ = teacher.answer(batch, prepared)
        if not isinstance(target, TopKTarget):
            continue
        mass = 1 - float(target.tail.double().exp().mean())
        said = f"the {target.ids.shape[1]} likeliest tokens of teachers[{index}] hold {mass:.0%} of its probability"
        if mass < FEWEST_MASS:
            yield warning(
                said, "raise k (store.k of a cache, remote.k of a server), or take kind hidden, which is exact"
            )
        else:
            yield ok(said)


def servers(patient: Patient, first: FirstStep) -> Iterator[Finding]:
    """One that answers, and how fast; that it is what it should be was tried when it was opened."""
    parts = first.parts
    begun = sorted((first.run.folder / "checkpoints").glob("step-????????"))
    then = read_progress(begun[-1]).teachers if begun else parts.identities
    for index, (was, now) in enumerate(zip(then, parts.identities, strict=False)):
        if was != now:
            yield error(
                f"teachers[{index}]: its server has another model than when the run in {first.run.folder} began",
                "start the one it had again, or choose another folder (run)",
            )
    for index, (config, teacher) in enumerate(zip(parts.recipe.teachers, parts.teachers, strict=True)):
        if config.server is None or config.cache is not None:
            continue
        yield _asked(f"teachers[{index}]", teacher, first)


def _asked(where: str, teacher: Teacher[Any], first: FirstStep) -> Finding:
    batch = first.prepared.step.batches[0]
    begun = time.monotonic()
    try:
        teacher.prepare(batch)
    except PotstillError as refused:
        return error(str(refused), "see docs/remote.md")
    seconds = time.monotonic() - begun
    tokens = sum(len(example.ids) for example in batch.examples)
    same = difference(first.parts.student.tokenizer, teacher.source.origin.tokenizer) is None
    return ok(f"{where} answers about {tokens:,} tokens in {seconds:.2g} s{'' if same else ', across tokenizers'}")
