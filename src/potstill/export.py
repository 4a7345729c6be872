"""The student as one model, at the end of a run that trained adapters."""

from __future__ import annotations

from pathlib import Path

import torch

from potstill.files import new_folder, remove_folder
from potstill.models.language_model import LanguageModel
from potstill.models.whole_copy import take_weights, whole_copy
from potstill.parallel.agree import together
from potstill.parallel.mesh import ranks


def export_merged(student: LanguageModel, folder: Path) -> Path:
    """RUN/merged: the student with its adapters added to its weights, as a folder that transformers loads. Collective."""
    path, first = folder / "merged", ranks().first
    made = together(lambda: whole_copy(student, torch.device("cpu")) if first else None)
    take_weights(made, student)

    def write() -> None:
        assert made is not None
        if path.exists():  # of an earlier end of this run
            remove_folder(path)
        with new_folder(path) as beside:
            made.save(beside)

    together(lambda: write() if first else None)
    return path
