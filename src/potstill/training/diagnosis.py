"""Why a loss is not finite: looked into only once it has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from potstill.teachers.combine import compute_targets
from potstill.types import Batch, PotstillError

if TYPE_CHECKING:
    from potstill.data import PreparedStep
    from potstill.training.setup import Parts
    from potstill.training.student import LossSettings


class Diverged(PotstillError):
    """A step that would have led to NaN or infinite weights."""


@torch.no_grad()
def diagnose(parts: Parts, prepared: PreparedStep, settings: LossSettings, step: int) -> str:
    """One sentence: step, micro-batch, documents, and the likely cause."""
    refuse_broken_weights(parts.module, step - 1)
    batches = prepared.step.batches
    for number, (host_batch, ready) in enumerate(zip(batches, prepared.ready, strict=True), 1):
        batch = host_batch.to(parts.device)
        cause = _cause(parts, batch, ready, settings)
        if cause is not None:
            found = (
                f"the loss is not finite at step {step}, micro-batch {number} of {len(batches)} ({_documents(batch)})"
            )
            break
    else:
        found = f"step {step}: the loss is finite but its gradient is not"
        cause = "try a lower train.optimizer.lr, a longer warmup, or precision fp32"
    return f"{found}: {cause}; the step was not taken and the last checkpoint is untouched"


def _cause(parts: Parts, batch: Batch, ready: Any, settings: LossSettings) -> str | None:
    """Whose output is not finite in this micro-batch, and what to try."""
    targets = compute_targets(parts.teachers, ready, batch, parts.recipe.loss)
    for index, (_, target) in enumerate(targets):
        if what := target.not_finite():
            return f"the teacher's {what} not finite: try teachers[{index}].dtype: float32, or another teacher"
    with parts.autocast():
        value, _ = parts.module(batch, targets, batch.supervised_tokens, settings)
    if torch.isfinite(value):
        return None
    return "the student's own output is not finite: try a lower train.optimizer.lr, or precision fp32"


def refuse_broken_weights(module: nn.Module, step: int) -> None:
    """Weights that are NaN or infinite are not saved over those that were not."""
    bad = [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise PotstillError(
            f"step {step} left weights in the student that are not finite ({bad[0]}): try a lower train.optimizer.lr or a "
            "longer train.lr_schedule.warmup_steps; the last checkpoint is untouched"
        )


def _documents(batch: Batch) -> str:
    names = [example.source or example.key for example in batch.examples]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
