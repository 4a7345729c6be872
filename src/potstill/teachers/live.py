"""A teacher that runs in the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from potstill.models import LanguageModel
from potstill.types import Batch, DenseTarget


class LiveTeacher:
    """A frozen model read at every batch. It gives hidden states and its head, not logits."""

    ahead = 1

    def __init__(self, language_model: LanguageModel, width: int, name: str, weight: float = 1.0) -> None:
        self.language_model = language_model
        self.width = width  # ids that student and teacher share; the rest take no part
        self.name = name
        self.weight = weight

    def missing(self, batch: Batch) -> Sequence[int]:
        return ()

    def prepare(self, batch: Batch) -> None:
        """There is nothing to do without the device."""

    def complete(self, batch: Batch, prepared: Any) -> Any:
        return prepared

    @torch.no_grad()  # not inference_mode: its tensors could not enter the student's backward
    def targets(self, batch: Batch, prepared: Any = None) -> DenseTarget:
        hidden = self.language_model.hidden(batch, batch.rows.teacher)
        return self.language_model.at_rows(hidden, self.width)

    def close(self) -> None:
        """It keeps nothing."""
