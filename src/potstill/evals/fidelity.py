"""Bits per byte, perplexity, KL to the teacher, top-1 agreement and calibration on held-out text, and what the student
writes. Bits per byte does not depend on the tokenizer: nats of all supervised tokens over the bytes they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from potstill.config import DataConfig
from potstill.data import Windows
from potstill.losses import compare_rows
from potstill.models import LanguageModel
from potstill.teachers.live import LiveTeacher
from potstill.types import Batch, PotstillError

CALIBRATION_BINS = 15


@torch.no_grad()
def evaluate(
    student: LanguageModel,
    teacher: LiveTeacher | None,
    batches: Iterable[Batch],
    device: torch.device,
    progress: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """The student on held-out batches; against the teacher when there is one."""
    training = student.model.training
    student.model.eval()
    total_bytes = 0
    sums = torch.zeros(5, dtype=torch.float64)  # rows, nll, kl, agreement, correct
    bins = torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64)  # rows, confidence, correct
    for host_batch in batches:
        batch = host_batch.to(device)
        head = student.at_rows(student.hidden(batch, batch.rows.student))
        target = teacher.targets(batch) if teacher is not None else None
        stats = compare_rows(head, batch.rows.labels, target)
        columns = [torch.ones_like(stats.nll), stats.nll, stats.kl, stats.agreement, stats.correct]
        sums += torch.stack([stats.nll.new_zeros(()) if c is None else c.double().sum() for c in columns]).cpu()
        bins += _binned(stats.confidence, stats.correct).cpu()
        total_bytes += sum(example.supervised_bytes for example in batch.examples)
        progress(len(batch.rows))
    student.model.train(training)
    rows, nll, kl, agreement, correct = sums.tolist()
    if not rows or not total_bytes:
        raise PotstillError("eval.data: there is no supervised text to evaluate on")
    return {
        "bits_per_byte": nll / math.log(2) / total_bytes,
        "perplexity": math.exp(min(nll / rows, 700.0)),
        "kl": kl / rows if teacher is not None else None,
        "agreement": agreement / rows if teacher is not None else None,
        "accuracy": correct / rows,
        "ece": _expected_calibration_error(bins),
        "tokens": int(rows),
        "bytes": total_bytes,
    }


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
