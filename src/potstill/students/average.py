"""The moving average of a student's weights, as a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
    def update(self) -> None:
        """Together with all ranks that hold a part of the student."""
        mine = self.model.model.state_dict()
        for name, tensor in plain_weights(self.student.model):
            if tensor.is_floating_point():
                mine[name].lerp_(tensor.to(mine[name].dtype), 1 - self.decay)
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
