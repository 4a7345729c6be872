"""A model in the process as a source of signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potstill.data import collate
from potstill.models import LanguageModel
from potstill.teachers.protocols import Asked, Reading, Signal, SignalSource
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.teacher import Teacher
from potstill.transfer import to_device
from potstill.types import Batch, Example, PotstillError


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
            return Reading(batch.examples, batch)
        examples = self._reader(batch.examples)
        return Reading(examples, collate([[example] for example in examples], pad_id=0))

    def prepare(self, reading: Reading, asked: Sequence[Asked]) -> list[Signal]:
        if not self.language_model.ahead:
            return []
        assert reading.batch is not None
        return [Signal(begun=self._begin(reading.batch, asked))]

    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        device = batch.input_ids.device
        assert reading.batch is not None
        there = batch if self._reader is None else reading.batch.to(device)
        try:
            begun = host[0].begun if host else self._begin(there, asked)
        except PotstillError:  # the other ranks make their pass
            self.idle(device)
            raise
        assert begun is not None
        hidden = begun().to(device).split([len(one.place) for one in asked])
        return [Signal(self.language_model.at_rows(part, self._width)) for part in hidden]

    def idle(self, device: torch.device) -> None:
        if self.language_model.lockstep.dp.size > 1:
            nothing = collate([], pad_id=0).to(device)
            self.language_model.hidden(nothing, nothing.rows.teacher)

    @property
    def waited(self) -> float:
        return self.language_model.waited

    def _begin(self, batch: Batch, asked: Sequence[Asked]) -> Callable[[], Tensor]:
        if self._reader is None:
            return self.language_model.begin(batch, batch.rows.teacher)
        width = batch.input_ids.shape[1]
        places = np.concatenate([one.document * width + one.place - 1 for one in asked])
        return self.language_model.begin(batch, to_device(places, batch.input_ids.device))


def live_teacher(language_model: LanguageModel, width: int, name: str, weight: float = 1.0) -> Teacher[LiveModel]:
    """A model with the student's tokenizer, over the ids that the two share."""
    return Teacher(LiveModel(language_model, width), SameTokenizerView(), name, weight)
