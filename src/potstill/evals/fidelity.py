"""Bits per byte, perplexity, KL to the teacher, top-1 agreement and calibration on held-out text, and what the student
writes. Bits per byte does not depend on the tokenizer: nats of all supervised tokens over the bytes they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from potstill.config import DataConfig
from potstill.data import Windows
from potstill.losses import compare_rows
from potstill.losses.compare import RowStats
from potstill.models import LanguageModel
from potstill.types import Batch, PotstillError, Teacher

CALIBRATION_BINS = 15


@dataclass
class Sums:
    """What is added up over batches, in float64: rows and their values."""

    rows: int = 0
    values: dict[str, float] = field(
        default_factory=dict
    )  # a value that is not known for some rows is not there at all

    def add(self, columns: Mapping[str, Tensor | None]) -> None:
        found = {name: column for name, column in columns.items() if column is not None}
        if not self.rows:
            self.values = dict.fromkeys(found, 0.0)
        totals = torch.stack([column.double().sum() for column in found.values()]).tolist()
        self.rows += len(next(iter(found.values())))
        for name, total in zip(found, totals, strict=True):
            if name in self.values:
                self.values[name] += total

    def mean(self, name: str) -> float | None:
        return self.values[name] / self.rows if self.rows and name in self.values else None


@torch.no_grad()
def evaluate(
    student: LanguageModel,
    teacher: Teacher | None,
    batches: Iterable[Batch],
    device: torch.device,
    progress: Callable[[int], None] = lambda rows: None,
    *,
    asked: Sequence[Batch] | None = None,
    key: str = "eval.data",
) -> dict[str, Any]:
    """The student on held-out batches; against the teacher when there is one. `asked`: what the teacher is asked about, where
    that is other text than these, or less."""
    training = student.model.training
    student.model.eval()
    total_bytes = 0
    own, close = Sums(), Sums()
    bins = torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64)  # rows, confidence, correct
    for host_batch in batches:
        stats = _compared(student, teacher if asked is None else None, host_batch, device)
        own.add({"nll": stats.nll, "correct": stats.correct})
        close.add({"rows": torch.ones_like(stats.nll), "kl": stats.kl, "agreement": stats.agreement})
        bins += _binned(stats.confidence, stats.correct).cpu()
        total_bytes += sum(example.supervised_bytes for example in host_batch.examples)
        progress(len(host_batch.rows))
    if asked is not None:
        close = Sums()
        for host_batch in asked:
            stats = _compared(student, teacher, host_batch, device)
            close.add({"rows": torch.ones_like(stats.nll), "kl": stats.kl, "agreement": stats.agreement})
    student.model.train(training)
    if not own.rows or not total_bytes:
        raise PotstillError(f"{key}: there is no supervised text to evaluate on")
    nll = own.values["nll"]
    return {
        "bits_per_byte": nll / math.log(2) / total_bytes,
        "perplexity": math.exp(min(nll / own.rows, 700.0)),
        "kl": close.mean("kl"),
        "agreement": close.mean("agreement"),
        "accuracy": own.mean("correct"),
        "ece": _expected_calibration_error(bins),
        "tokens": own.rows,
        "bytes": total_bytes,
    }


def _compared(student: LanguageModel, teacher: Teacher | None, host_batch: Batch, device: torch.device) -> RowStats:
    batch = host_batch.to(device)
    head = student.at_rows(student.hidden(batch, batch.rows.student))
    target = None
    if teacher is not None:
        target = teacher.targets(batch, teacher.complete(batch, teacher.prepare(host_batch)))
    return compare_rows(head, batch.rows.labels, target)


def _binned(confidence: Tensor, correct: Tensor) -> Tensor:
    which = (confidence * CALIBRATION_BINS).long().clamp_(max=CALIBRATION_BINS - 1)
    columns = torch.stack([torch.ones_like(confidence), confidence, correct], -1).double()
    return torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64, device=which.device).index_add_(0, which, columns)


def _expected_calibration_error(bins: Tensor) -> float:
    """Mean gap between how sure the student is of its first choice and how often that choice is right."""
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())


def evaluation_batches(
    data: DataConfig, student: LanguageModel, batch_size: int, limit: int | None, key: str = "eval.data"
) -> Iterator[Batch]:
    """Held-out text in order, once."""
    data = data.model_copy(update={"shuffle": False})
    windows = Windows(
        data,
        student.tokenizer,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=0,
        epochs=1,
        limit=limit,
        key=key,
        evaluation=True,
    )
    return (batch for window in windows for batch in window.batches)


@torch.no_grad()
def complete(student: LanguageModel, prompts: Sequence[str], max_new_tokens: int) -> list[dict[str, str]]:
    """Greedy completions, one prompt at a time: no padding, no randomness."""
    training = student.model.training
    student.model.eval()
    samples = []
    for prompt in prompts:
        encoded = student.tokenizer(prompt, return_tensors="pt").input_ids.to(student.model.device)
        written = student.model.generate(
            encoded,
            attention_mask=torch.ones_like(encoded),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=student.tokenizer.pad_token_id or student.tokenizer.eos_token_id or 0,
        )
        text = student.tokenizer.decode(written[0, encoded.shape[1] :], skip_special_tokens=True)
        samples.append({"prompt": prompt, "text": text})
    student.model.train(training)
    return samples
