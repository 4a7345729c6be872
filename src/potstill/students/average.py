"""The moving average of a student's weights, as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from potstill.models.adapters import plain_weights
from potstill.models.language_model import LanguageModel
from potstill.types import PotstillError


@dataclass(frozen=True)
class MovingAverage:
    """Of a student's weights: W ← decay·W + (1 − decay)·student, after every optimizer step. In float32 at least: what is added
    at a step would be lost in fewer bits."""

    model: LanguageModel
    student: LanguageModel
    decay: float

    @torch.no_grad()
    def update(self, masters: Mapping[int, Tensor]) -> None:
        """Together with all ranks that hold a part of the student. `masters`: what its parameters are rounded from, by their
        id: what is added at a step is mostly below the rounding."""
        mine, model = self.model.model.state_dict(), self.student.model
        named = {name: masters[id(p)] for name, p in model.named_parameters() if id(p) in masters}
        for name, tensor in plain_weights(model, named):
            if tensor.is_floating_point():
                mine[name].lerp_(tensor.to(mine[name]), 1 - self.decay)
            else:
                mine[name].copy_(tensor)


def _file(folder: Path, number: int) -> Path:
    return folder / f"average-{number}.safetensors"


def save_averages(averages: Sequence[MovingAverage], folder: Path) -> None:
    for number, average in enumerate(averages):
        weights = {name: tensor.cpu().contiguous() for name, tensor in plain_weights(average.model.model)}
        save_file(weights, _file(folder, number))


@torch.no_grad()
def load_averages(averages: Sequence[MovingAverage], folder: Path) -> None:
    for number, average in enumerate(averages):
        mine, path = average.model.model.state_dict(), _file(folder, number)
        if not path.is_file():
            raise PotstillError(f"{path} is missing, so the run cannot resume: choose another folder with run=")
        for name, tensor in load_file(path).items():
            mine[name].copy_(tensor)
