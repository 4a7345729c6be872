"""A model on ranks of its own: what it is asked by the ranks that train, and both ends of that.

The head travels once; then ids and the positions that are wanted go one way, and hidden states of just these come back.
B rows, L positions, N wanted positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from potstill.config import TeacherConfig
from potstill.models.language_model import LanguageModel
from potstill.models.loading import load_hollow
from potstill.parallel.channel import STARTING, Asker, as_numbers, as_text
from potstill.parallel.team import Lockstep, Team
from potstill.types import Batch, Example, PotstillError, Rows

ABOUT, WEIGHT, BIAS, HIDDEN = range(4)


@dataclass
class OwnRanks:
    """Hidden states that other ranks compute: asked for ahead of the step, by one of those that have the same rows."""

    asker: Asker | None  # None: this rank is told what another one was
    team: Team  # those that have the same rows
    row_bytes: int  # of a hidden state
    ahead: bool = True
    waited: float = 0.0

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        if self.asker is None:
            return partial(self._wait, _asked_elsewhere)
        asked = self.asker.begin(HIDDEN, request_of(batch, positions), len(positions) * self.row_bytes)
        return partial(self._wait, asked)

    def _wait(self, asked: Callable[[], Tensor]) -> Tensor:
        begin = time.perf_counter()
        try:
            return self.team.tensor_of_first(asked) if self.team.many else asked()
        finally:
            self.waited += time.perf_counter() - begin


def _asked_elsewhere() -> Tensor:
    raise AssertionError("the first rank of a team has a channel")


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
    where it cannot be loaded, everybody who asks is told. `team`: the ranks that the model lies over, of which this is the
    first; the others `follow`."""

    def __init__(
        self,
        loading: Future[LanguageModel],
        fingerprint: Callable[[LanguageModel], str | None],
        team: Team = Team(()),  # noqa: B008
    ) -> None:
        self._loading, self._fingerprint, self._team = loading, fingerprint, team
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
        with self._computing:
            self._team.told(request)
            return _hidden_of(model, request)

    def end(self, error: BaseException | None) -> None:
        """Nobody asks any more: tell the others of the team, and why."""
        wait_for([self._loading])  # it talks to them too
        with self._computing:
            self._team.told(None if error is None else (isinstance(error, PotstillError), str(error)))

    def _about(self, model: LanguageModel) -> dict[str, Any]:
        head = model.model.get_output_embeddings()
        return {
            "head": dict(model.head),
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "attention": model.attention,
            "rows": model.rows,
            "notes": list(model.notes),
            "bias": isinstance(head, nn.Linear) and head.bias is not None,
            "fingerprint": self._fingerprint(model),
        }


def follow(load: Callable[[], LanguageModel], team: Team) -> None:
    """A rank that a model lies over, but not the first: makes the passes that `Answers` makes, until that ends, and as it
    ends."""
    model: LanguageModel | None = None
    with suppress(PotstillError):  # the first rank has it too, and says so to those who ask
        model = load()
    while isinstance(job := team.told(), Tensor):
        assert model is not None
        with suppress(PotstillError):  # as above
            _hidden_of(model, job)
    if job is not None:
        ours, words = job
        raise (PotstillError if ours else RuntimeError)(words)


@torch.no_grad()
def _hidden_of(model: LanguageModel, request: Tensor) -> Tensor:
    batch, positions = batch_of(request)
    return model.hidden(batch.to(model.device), positions.to(model.device))


def load_elsewhere(
    config: TeacherConfig, asker: Asker | None, team: Team, device: torch.device, where: str
) -> LanguageModel:
    """A teacher whose weights, but for the head, are on the other end of `asker`, which the first rank of `team` has."""

    def asked(what: int, seconds: float | None = None) -> Tensor:
        assert asker is not None
        return asker.begin(what, torch.zeros(0, dtype=torch.int64), seconds=seconds)()

    about = json.loads(team.of_first(lambda: as_text(asked(ABOUT, STARTING)[0])))
    model, tokenizer = load_hollow(config, getattr(torch, about["dtype"]), where)
    head = model.get_output_embeddings()
    weight = team.tensor_of_first(lambda: asked(WEIGHT)).to(device)
    head.weight = nn.Parameter(weight, requires_grad=False)
    if about["bias"]:
        head.bias = nn.Parameter(team.tensor_of_first(lambda: asked(BIAS))[0].to(device), requires_grad=False)
    found = {key: about[key] for key in ("head", "attention", "rows", "notes", "fingerprint")}
    placed = OwnRanks(asker, team, weight.shape[1] * weight.element_size())
    return LanguageModel(model, tokenizer, **found, placed=placed, lockstep=Lockstep(team))
