"""A teacher that runs in the process."""

from __future__ import annotations

import torch

from potstill.config import TeacherConfig
from potstill.models import LanguageModel, load_teacher, shared_ids
from potstill.types import Batch, DenseTarget


class LiveTeacher:
    """A frozen model read at every batch. It gives hidden states and its head, not logits."""

    def __init__(self, language_model: LanguageModel, width: int, name: str, weight: float = 1.0) -> None:
        self.language_model = language_model
        self.width = width  # ids that student and teacher share; the rest take no part
        self.name = name
        self.weight = weight

    @torch.no_grad()  # not inference_mode: its tensors could not enter the student's backward
    def targets(self, batch: Batch) -> DenseTarget:
        hidden = self.language_model.hidden(batch, batch.rows.teacher)
        return self.language_model.at_rows(hidden, self.width)


def open_teachers(
    configs: list[TeacherConfig], student: LanguageModel, device: torch.device, key: str | None = None
) -> list[LiveTeacher]:
    """`key`: what messages call a teacher that is from no recipe."""
    teachers = []
    for index, config in enumerate(configs):
        where = key or f"teachers[{index}]"
        language_model = load_teacher(config, device, where, key)
        width = shared_ids(student, language_model, where)
        teachers.append(LiveTeacher(language_model, width, config.model, config.weight))
    return teachers
