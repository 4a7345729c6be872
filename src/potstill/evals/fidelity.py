"""Bits per byte, perplexity, KL to the teacher, top-1 agreement and calibration on held-out text, and what the student
writes. Bits per byte does not depend on the tokenizer: nats of all supervised tokens over the bytes they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from potstill.config import DataConfig
from potstill.data import Prefetched, StepBatches
from potstill.losses import compare_rows
from potstill.losses.compare import RowStats
from potstill.models import LanguageModel, evaluating
from potstill.parallel.agree import of_leaders, together
from potstill.transfer import exact
from potstill.types import Batch, PotstillError, Target, Teacher

CALIBRATION_BINS = 15
Measure = Callable[[Batch, Target | None], RowStats]  # a student at the rows of a batch, beside a teacher
Complete = Callable[[str, int], str]  # a prompt, how many tokens at most, and what the student writes


@dataclass
class Sums:
    """What is added up over batches, in float64 (within a batch in float32, on a device that has no other). A value that is
    not known for all rows is not there."""

    rows: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, rows: int, columns: Mapping[str, Tensor | None]) -> None:
        """Values [rows] by name; None: not known."""
        found = {name: exact(column).sum() for name, column in columns.items() if column is not None}
        totals = torch.stack(list(found.values())).tolist() if found else []
        before = self.values if self.rows else dict.fromkeys(found, 0.0)
        self.values = {name: before[name] + total for name, total in zip(found, totals, strict=True) if name in before}
        self.rows += rows

    def gathered(self) -> Sums:
        """Of all ranks that hold other rows."""
        found = [(sums.rows, sums.values) for sums in of_leaders(self) if sums.rows]
        names = set.intersection(*(set(values) for _, values in found)) if found else set()
        return Sums(sum(rows for rows, _ in found), {name: sum(values[name] for _, values in found) for name in names})

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
    interrupted: Callable[[], bool] = lambda: False,
    measure_by: Measure | None = None,
) -> dict[str, Any]:
    """The student on held-out batches; against the teacher when there is one. `asked`: what the teacher is asked about, where
    that is other text than these, or less. `interrupted`: whether to stop waiting for the teacher (StoppedWaiting).
    `measure_by`: in place of the student's own pass, where it is spread over ranks; the batches are then this rank's."""
    total_bytes = 0
    own = Sums()
    bins = torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64)  # rows, confidence, correct
    measured = measure_by or partial(measure, student)
    with evaluating(student.model):
        for rows, stats, scored in _compared(
            measured, teacher if asked is None else None, batches, device, interrupted
        ):
            own.add(rows, vars(stats))
            bins += _binned(stats.confidence, stats.correct).cpu()
            total_bytes += scored
            progress(rows)
        close = own
        if asked is not None:
            close = Sums()
            for rows, stats, _ in _compared(measured, teacher, asked, device, interrupted):
                close.add(rows, vars(stats))
    own, close = own.gathered(), close.gathered()
    total_bytes, bins = sum(of_leaders(total_bytes)), torch.stack(of_leaders(bins)).sum(0)
    if not own.rows or not total_bytes:
        raise PotstillError(f"{key}: there is no supervised text to evaluate on")
    nll = own.values["nll"]
    return {
        "bits_per_byte": nll / math.log(2) / total_bytes,
        "perplexity": math.exp(min(nll / own.rows, 700.0)),
        "kl": close.mean("kl"),
        "agreement": close.mean("agreement"),
        "acceptance": close.mean("acceptance"),
        "accuracy": own.mean("correct"),
        "ece": _expected_calibration_error(bins),
        "tokens": own.rows,
        "bytes": total_bytes,
    }


def measure(student: LanguageModel, batch: Batch, target: Target | None) -> RowStats:
    return compare_rows(student.at_rows(student.hidden(batch, batch.rows.student)), batch.rows.labels, target)


def _compared(
    measure: Measure,
    teacher: Teacher | None,
    batches: Iterable[Batch],
    device: torch.device,
    interrupted: Callable[[], bool],
) -> Iterator[tuple[int, RowStats, int]]:
    """Of each batch: its rows, what is found at them, and the bytes they stand for. All ranks have as many batches."""
    made = ((batch, None if teacher is None else teacher.prepare(batch)) for batch in batches)
    with Prefetched(made, depth=1, interrupted=interrupted) as ready:  # a server is asked ahead
        # What goes wrong with one rank's teacher is known to all before they read the batch together.
        while (pair := together(lambda: next(ready, None))) is not None:
            host_batch, prepared = pair
            batch = host_batch.to(device)
            target = None if teacher is None or prepared is None else teacher.answer(batch, prepared)[0]
            scored = sum(example.supervised_bytes for example in host_batch.examples)
            yield len(batch.rows), measure(batch, target), scored


def _binned(confidence: Tensor, correct: Tensor) -> Tensor:
    which = (confidence * CALIBRATION_BINS).long().clamp_(max=CALIBRATION_BINS - 1)
    columns = exact(torch.stack([torch.ones_like(confidence), confidence, correct], -1))
    return columns.new_zeros(CALIBRATION_BINS, 3).index_add_(0, which, columns)


def _expected_calibration_error(bins: Tensor) -> float:
    """Mean gap between how sure the student is of its first choice and how often that choice is right."""
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())


def evaluation_batches(
    data: DataConfig,
    student: LanguageModel,
    batch_size: int,
    limit: int | None,
    key: str = "eval.data",
    *,
    as_trained: bool = False,
) -> Iterator[Batch]:
    """Held-out text in order, once: every byte of it or, `as_trained`, cut at max_length."""
    steps = StepBatches(
        data.model_copy(update={"shuffle": False}),
        student.tokenizer,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=0,
        epochs=1,
        limit=limit,
        key=key,
        evaluation=not as_trained,
    )
    return (batch for step in steps for batch in step.batches)


@torch.no_grad()
def greedy_completions(
    student: LanguageModel, prompts: Sequence[str], max_new_tokens: int, complete_by: Complete | None = None
) -> list[dict[str, str]]:
    """Greedy completions, one prompt at a time: no padding, no randomness. `complete_by`: as `evaluate` has it."""
    completed = complete_by or partial(completion, student)
    with evaluating(student.model):
        return [{"prompt": prompt, "text": completed(prompt, max_new_tokens)} for prompt in prompts]


def completion(student: LanguageModel, prompt: str, max_new_tokens: int) -> str:
    encoded = student.tokenizer(prompt, return_tensors="pt").input_ids.to(student.model.device)
    written = student.model.generate(
        encoded,
        attention_mask=torch.ones_like(encoded),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=student.tokenizer.pad_token_id or student.tokenizer.eos_token_id or 0,
    )
    text: str = student.tokenizer.decode(written[0, encoded.shape[1] :], skip_special_tokens=True)
    return text
