"""A model in the process as a source of signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from potstill.data import collate
from potstill.models import LanguageModel
from potstill.teachers.protocols import Asked, Reading, Signal, SignalSource
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, Example


class LiveModel(SignalSource):
    """A frozen model that is run on every batch. It gives hidden states and its head, not logits. `width`: the ids that take
    part. `reader`: gives examples in its own tokens; None: it reads the student's."""

    def __init__(
        self,
        language_model: LanguageModel,
        width: int,
        reader: Callable[[Sequence[Example]], list[Example]] | None = None,
    ) -> None:
        self.language_model, self._width, self._reader = language_model, width, reader

    def read(self, batch: Batch, compute: bool) -> Reading:
        if self._reader is None:
            return Reading(batch.examples)
        examples = self._reader(batch.examples)
        return Reading(examples, collate([[example] for example in examples], pad_id=0))

    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        positions = batch.rows.teacher
        if reading.batch is not None:
            batch, width = reading.batch.to(positions.device), reading.batch.input_ids.shape[1]
            places = np.concatenate([one.document * width + one.place - 1 for one in asked])
            positions = torch.from_numpy(places).to(positions.device)
        hidden = self.language_model.hidden(batch, positions).split([len(one.place) for one in asked])
        return [Signal(self.language_model.at_rows(part, self._width)) for part in hidden]


def live_teacher(language_model: LanguageModel, width: int, name: str, weight: float = 1.0) -> Teacher[LiveModel]:
    """A model with the student's tokenizer, over the ids that the two share."""
    return Teacher(LiveModel(language_model, width), SameTokenizerView(), name, weight)
