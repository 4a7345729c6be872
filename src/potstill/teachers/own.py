"""The student itself as a teacher: as it began, as the moving average of its weights, or as it is now; with LoRA also as the
model that its adapters were put into. Self-distillation, mostly with a `context_column` that the student does not see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from potstill.models import LanguageModel, evaluating
from potstill.models.adapters import adapters_off, trains_adapters_alone
from potstill.models.whole_copy import take_weights, whole_copy
from potstill.students.average import MovingAverage
from potstill.teachers.open import Opened, Opening, open_loaded
from potstill.types import Batch, PotstillError


@dataclass(frozen=True)
class OwnPasses:
    """Hidden states of the student that trains, without dropout and without gradients."""

    student: LanguageModel
    adapter: bool  # with what its adapters add
    ahead: bool = False
    waited: float = 0.0

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        return partial(self._computed, batch, positions)

    @torch.no_grad()
    def _computed(self, batch: Batch, positions: Tensor) -> Tensor:
        model = self.student.model
        with evaluating(model), nullcontext() if self.adapter else adapters_off(model):
            return self.student.computed(batch, positions)


def open_own(opening: Opening) -> Opened:
    config, student = opening.config, opening.student
    if config.copies:
        made = whole_copy(student)
        take_weights(made, student)
        if config.student == "ema" and made.model.dtype.itemsize < torch.float32.itemsize:
            made.model.float()
        average = MovingAverage(made, student, config.decay) if config.student == "ema" else None
        return replace(open_loaded(opening, made), average=average)
    if not config.adapter and not trains_adapters_alone(student.model):
        raise PotstillError(
            f"{opening.where}.adapter: student.lora.modules_to_save changes weights that are the teacher's too: leave it out, "
            "or adapter (the teacher is then a copy)"
        )
    opened = open_loaded(opening, replace(student, placed=OwnPasses(student, config.adapter)))
    return replace(opened, origin=None)  # it writes nothing that the student would not
