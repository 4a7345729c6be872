"""What a teacher said about documents, as a loss reads it: from a cache's bytes, or exact, as a server has just answered.

R rows (predicted tokens), K entries, N draws, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.cache import codec
from potstill.cache.codec import SIGNALS, Document, Format, Signal
from potstill.types import Example

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scored:
    """A document with the rows that were computed for it just now: nothing is rounded."""

    form: Format
    read: Example  # as the teacher read it
    signal: Signal

    @property
    def tokens(self) -> npt.NDArray[Any]:
        return self.read.ids

    @property
    def predicted(self) -> npt.NDArray[np.bool_]:
        return self.read.supervised


Documents = Sequence[Document | Scored]  # of one sort
Chosen = Sequence[tuple[Document | Scored, npt.NDArray[np.int64]]]  # documents, and rows of each


def no_rows(form: Format) -> dict[str, npt.NDArray[Any]]:
    """The signal of a document in which nothing is predicted."""
    return {name: np.zeros((0, *shape), dtype=dtype) for name, (shape, dtype) in layout(form).items()}


def layout(form: Format) -> dict[str, tuple[tuple[int, ...], str]]:
    """Of each array of a signal: what a row of it looks like, and its dtype."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "ids": ((form.k,), "int32"),
        "logprobs": ((form.k,), "float32"),
        "odds": ((len(form.temperatures),), "float32"),
        "token_logprobs": ((), "float32"),
        "tail_samples": ((form.tail_samples,), "int32"),
        "tail_entropy": ((), "float32"),
        "samples": ((form.num_samples,), "int32"),
        "entropy": ((), "float32"),
        "hidden": ((form.width,), {"bfloat16": "uint16"}.get(form.dtype, form.dtype)),
        "tail": ((), "float32"),
    }
    if form.kind == "given":  # which no cache holds: log-probabilities of ids that were asked for, and of all others
        return {name: shapes[name] for name in ("logprobs", "tail")}
    names = SIGNALS[form.kind]
    return {name: shapes[name] for name in names if form.tail_samples or not name.startswith("tail")}


def read_top_k(chosen: Chosen, temperature: float) -> tuple[npt.NDArray[Any], Floats, Floats]:
    """ids [R, K], log-probabilities [R, K] and the log-mass of the rest [R], at a temperature that is known."""
    if not _exact(chosen):
        return codec.read_top_k(_stored(chosen), temperature)
    form = chosen[0][0].form
    odds = _rows(chosen, "odds")[:, form.temperatures.index(temperature)].astype(np.float64)
    logprobs = _rows(chosen, "logprobs")
    if temperature != 1.0:
        tempered = torch.from_numpy(logprobs.astype(np.float64) / temperature)
        logprobs = (tempered.log_softmax(-1).numpy() - np.logaddexp(0.0, odds)[:, None]).astype(np.float32)
    return _rows(chosen, "ids"), logprobs, (-np.logaddexp(0.0, -odds)).astype(np.float32)


def read_sampled(chosen: Chosen) -> tuple[npt.NDArray[Any], Floats, Floats]:
    """ids [R, M] and shares of the draws [R, M], and the teacher's entropy [R]. Draws are always read from a cache."""
    assert not _exact(chosen)
    return codec.read_sampled(_stored(chosen))


def read_tail_samples(chosen: Chosen) -> tuple[npt.NDArray[Any], Floats]:
    """Draws from the rest [R, M], and the teacher's entropy within it [R]."""
    if not _exact(chosen):
        return codec.read_tail_samples(_stored(chosen))
    return _rows(chosen, "tail_samples"), _rows(chosen, "tail_entropy")


def read_token_logprobs(chosen: Chosen) -> Floats:
    """Log-probabilities [R] of the tokens that were there."""
    return _rows(chosen, "token_logprobs") if _exact(chosen) else codec.read_token_logprobs(_stored(chosen))


def read_hidden(chosen: Chosen) -> Tensor:
    """[R, H], in the teacher's dtype."""
    hidden = torch.from_numpy(_rows(chosen, "hidden") if _exact(chosen) else codec.read_hidden(_stored(chosen)))
    return hidden.view(torch.bfloat16) if chosen[0][0].form.dtype == "bfloat16" else hidden


def _exact(chosen: Chosen) -> bool:
    return isinstance(chosen[0][0], Scored)


def _stored(chosen: Chosen) -> codec.Chosen:
    return cast(codec.Chosen, chosen)


def _rows(chosen: Chosen, name: str) -> npt.NDArray[Any]:
    return np.concatenate([document.signal[name][rows] for document, rows in chosen if isinstance(document, Scored)])
