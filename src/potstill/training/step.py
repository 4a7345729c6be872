"""One optimizer step: all its micro-batches, one division, one update; and why a loss is not finite, once that has happened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from potstill.config import Recipe
from potstill.config.sections import value_at
from potstill.data import PreparedStep
from potstill.objective.student_loss import LossSettings
from potstill.parallel.agree import everyones, raise_together
from potstill.parallel.gradients import clip
from potstill.parallel.mesh import ranks, sum_over_ranks
from potstill.parallel.shard import last_pass
from potstill.parallel.weights import here
from potstill.students.experts import said_load
from potstill.teachers.combine import compute_targets
from potstill.teachers.placed import own_ranks
from potstill.training.metrics import SUMS, Stopwatch, alignment, means, peak_memory_bytes, seconds_waited
from potstill.training.optimizer import lr_factor, moved, set_lr
from potstill.training.run import Run
from potstill.training.setup import Parts
from potstill.types import Batch, PotstillError, Teacher


def optimizer_step(parts: Parts, prepared: PreparedStep, tokens: int, run: Run, clock: Stopwatch) -> dict[str, Any]:
    """Take the step after `run.step`; gives its metrics. `tokens`: supervised ones of the whole step, over all micro-batches
    and ranks, the only divisor."""
    recipe, step = parts.recipe, prepared.step
    settings = loss_settings(recipe, run.step / max(1, run.total_steps - 1))
    kd_scale = run.kd_scale
    scaled = replace(settings, kd_weight=settings.kd_weight * kd_scale)
    teachers = parts.teachers if settings.kd_weight else []  # a teacher without weight is not asked
    waited = -seconds_waited(parts.teachers)
    sums, counts = _accumulate(parts, prepared, teachers, tokens, scaled, clock)
    with clock.of("optimizer"):
        norm = clip(parts.module, recipe.train.max_grad_norm or math.inf)
        zero = torch.zeros((), device=parts.device)
        loads = sums.get("expert_load", zero)
        totals = sum_over_ranks(torch.cat([torch.stack([sums.get(name, zero) for name in SUMS]), loads.flatten()]))
        *values, grad_norm = read(torch.cat([totals, norm.float().view(1)]))
        total = dict(zip(SUMS, values, strict=False))  # and the loads, of whatever size
        if not (math.isfinite(total["loss"]) and math.isfinite(grad_norm)):
            raise Diverged(diagnose(parts, prepared, scaled, run.step + 1))
        lr = set_lr(parts.optimizers, lr_factor(run.step, run.total_steps, recipe.train.lr_schedule))
        for optimizer in parts.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for average in parts.averages:
            average.update({id(weight): master for each in parts.optimizers for master, weight in moved(each)})
    if recipe.loss.dynamic_scaling and total["kd"] > 0:
        run.kd_scale = total["ce"] / total["kd"]
    seconds = clock.read()
    return {
        "step": run.step + 1,
        "epoch": step.epoch,
        "loss": total["loss"],
        "kd": total["kd"] / tokens if teachers else None,
        "ce": total["ce"] / tokens,
        "temperature": settings.temperature,
        "kd_weight": settings.kd_weight if teachers else 0.0,
        **({"kd_scale": kd_scale} if recipe.loss.dynamic_scaling else {}),
        "ce_weight": settings.ce_weight,
        **({"repeat_weight": settings.repeat_weight} if recipe.loss.repeat_weight else {}),
        **means(total),
        **({"router_aux": total["router_aux"]} | said_load(values[len(SUMS) :], loads.shape) if loads.dim() else {}),
        **alignment(counts),
        **step.facts,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": step.counts["supervised_tokens"],
        "tokens_per_second": tokens / sum(seconds.values()),
        **seconds,
        **({"seconds_teacher_wait": waited + seconds_waited(parts.teachers)} if own_ranks(recipe) else {}),
        "peak_memory_bytes": peak_memory_bytes(parts.device),
    }


def _accumulate(
    parts: Parts,
    prepared: PreparedStep,
    teachers: Sequence[Teacher],
    tokens: int,
    settings: LossSettings,
    clock: Stopwatch,
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Forward and backward over the micro-batches: the sums over their rows, and what the teachers counted."""
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()
    stat_rows = -(-parts.recipe.log.stat_rows // ranks().sums.size)
    passes = len(prepared.step.batches)
    for number, (batch, ready) in enumerate(prepared.on(parts.device), 1):
        last_pass(parts.module, number == passes)
        with clock.of("teacher"):
            targets = compute_targets(teachers, ready if teachers else [], batch, parts.recipe.loss, counts)
        with clock.of("student"):
            with parts.autocast():
                loss, found = parts.module(batch, targets, tokens, settings, stat_rows)
            loss.backward()
            sums |= {name: sums[name] + value if name in sums else value for name, value in found.items()}
            stat_rows = 0  # a sample of the first micro-batch is enough
    return sums, counts


def read(values: Tensor) -> list[float]:
    """The one place, once per step, where the host waits for the device."""
    return values.tolist()


def loss_settings(recipe: Recipe, progress: float) -> LossSettings:
    """The loss section with its schedules read at `progress` (0 at the first step, 1 at the last)."""
    keys: dict[str, Any] = {each.name: getattr(recipe.loss, each.name) for each in fields(LossSettings)}
    keys |= {"ce_weight": recipe.ce_weight, "repeat_weight": recipe.loss.repeat_weight or 0.0}
    keys |= {
        key: value_at(keys[key], progress)
        for key in ("temperature", "kd_weight", "ce_weight", "repeat_weight", "reward_weight")
    }
    return LossSettings(**keys)


class Diverged(PotstillError):
    """A step that would have led to NaN or infinite weights."""


@torch.no_grad()
def diagnose(parts: Parts, prepared: PreparedStep, settings: LossSettings, step: int) -> str:
    """One sentence: step, micro-batch, documents, and the likely cause."""
    refuse_broken_weights(parts.module, step - 1)
    batches, said = prepared.step.batches, None
    # Every rank makes every pass, for they wait for each other in each.
    for number, (batch, ready) in enumerate(prepared.on(parts.device), 1):
        cause = _cause(parts, batch, ready, settings)
        if cause is not None and said is None:
            names = [example.source or example.key for example in batch.examples]
            documents = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            where = f"the loss is not finite at step {step}, micro-batch {number} of {len(batches)} ({documents})"
            said = f"{where}: {cause}"
    otherwise = (
        f"step {step}: the loss is finite but its gradient is not: try a lower train.optimizer.lr, a longer warmup, or "
        "precision fp32"
    )
    found = next((each for each in everyones(said) if each is not None), otherwise)
    return f"{found}; the step was not taken and the last checkpoint is untouched"


def _cause(parts: Parts, batch: Batch, ready: Any, settings: LossSettings) -> str | None:
    """Whose output is not finite in this micro-batch, and what to try."""
    targets = compute_targets(parts.teachers, ready, batch, parts.recipe.loss)
    teachers = [
        f"the teacher's {what} not finite: try teachers[{index}].dtype: float32, or another teacher"
        for index, (_, target) in enumerate(targets)
        if (what := target.not_finite())
    ]
    with parts.autocast():
        value, _ = parts.module(batch, targets, max(1, batch.supervised_tokens), settings)
    if teachers or torch.isfinite(value):
        return teachers[0] if teachers else None
    return "the student's own output is not finite: try a lower train.optimizer.lr, or precision fp32"


def refuse_broken_weights(module: nn.Module, step: int) -> None:
    """Weights that are NaN or infinite are not saved over those that were not."""
    bad = [name for name, p in module.named_parameters() if not torch.isfinite(here(p)).all()]
    raise_together(
        PotstillError(
            f"step {step} left weights in the student that are not finite ({bad[0]}): try a lower train.optimizer.lr or a "
            "longer train.lr_schedule.warmup_steps; the last checkpoint is untouched"
        )
        if bad
        else None
    )
