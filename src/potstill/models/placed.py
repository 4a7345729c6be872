"""A model on ranks of its own: what it is asked by the ranks that train, and both ends of that.

The head travels once; then ids and the positions that are wanted go one way, and hidden states of just these come back.
B rows, L positions, N wanted positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from potstill.config import TeacherConfig
from potstill.models.language_model import LanguageModel
from potstill.models.loading import load_hollow
from potstill.parallel.channel import STARTING, Asker, as_numbers, as_text
from potstill.types import Batch, Example, Rows

ABOUT, WEIGHT, BIAS, HIDDEN = range(4)


@dataclass(frozen=True)
class OwnRanks:
    """Hidden states that other ranks compute: asked for ahead of the step."""

    asker: Asker
    row_bytes: int  # of a hidden state
    ahead: bool = True

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        return self.asker.begin(HIDDEN, request_of(batch, positions), len(positions) * self.row_bytes)


def request_of(batch: Batch, positions: Tensor) -> Tensor:
    """All that a model needs to know of a batch, as integers."""
    shape = torch.tensor([*batch.input_ids.shape, batch.packed])
    parts = (shape, batch.input_ids.flatten(), batch.position_ids.flatten(), batch.document.flatten(), positions)
    return torch.cat([part.to("cpu", torch.int64) for part in parts])


def batch_of(request: Tensor) -> tuple[Batch, Tensor]:
    """What `request_of` wrote."""
    rows, width, packed = request[:3].tolist()
    ids, places, document = request[3 : 3 + 3 * rows * width].view(3, rows, width)
    positions = request[3 + 3 * rows * width :]
    lengths = (document > 0).sum(1).tolist()
    # Of texts that stand alone in a row the model asks how long each is.
    examples = tuple(Example("", "", ids[i, :length].int().numpy()) for i, length in enumerate(lengths))
    rows_ = Rows(positions, positions, positions)
    return Batch(ids, places, document.int(), bool(packed), rows_, len(positions), examples), positions


class Answers:
    """The end that computes, for any number of askers, one at a time. `loading`: the model, which may not be there yet;
    where it cannot be loaded, everybody who asks is told."""

    def __init__(self, loading: Future[LanguageModel], fingerprint: Callable[[LanguageModel], str | None]) -> None:
        self._loading, self._fingerprint = loading, fingerprint
        self._computing = threading.Lock()

    def __call__(self, what: int, request: Tensor) -> Tensor:
        model = self._loading.result()
        if what == ABOUT:
            return as_numbers(json.dumps(self._about(model)))[None].to(torch.uint8)
        head = model.model.get_output_embeddings()
        if what == WEIGHT:
            return head.weight.detach()
        if what == BIAS:
            return head.bias.detach()[None]
        batch, positions = batch_of(request)
        with self._computing, torch.no_grad():
            return model.hidden(batch.to(model.device), positions.to(model.device))

    def _about(self, model: LanguageModel) -> dict[str, Any]:
        head = model.model.get_output_embeddings()
        return {
            "head": dict(model.head),
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "masks": model.masks,
            "rows": model.rows,
            "notes": list(model.notes),
            "bias": isinstance(head, nn.Linear) and head.bias is not None,
            "fingerprint": self._fingerprint(model),
        }


def load_elsewhere(config: TeacherConfig, asker: Asker, device: torch.device, where: str) -> LanguageModel:
    """A teacher whose weights, but for the head, are on the other end of `asker`."""
    nothing = torch.zeros(0, dtype=torch.int64)
    about = json.loads(as_text(asker.begin(ABOUT, nothing, seconds=STARTING)()[0]))
    model, tokenizer = load_hollow(config, getattr(torch, about["dtype"]), where)
    head = model.get_output_embeddings()
    weight = asker.begin(WEIGHT, nothing)().to(device)
    head.weight = nn.Parameter(weight, requires_grad=False)
    if about["bias"]:
        head.bias = nn.Parameter(asker.begin(BIAS, nothing)()[0].to(device), requires_grad=False)
    found = {key: about[key] for key in ("head", "masks", "rows", "notes", "fingerprint")}
    placed = OwnRanks(asker, weight.shape[1] * weight.element_size())
    return LanguageModel(model, tokenizer, **found, placed=placed)
