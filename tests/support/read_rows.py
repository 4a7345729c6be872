"""Rows of documents, read one array after another: the chosen ones are documents with some rows of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from potstill.signals.document import SignalRows


def read_top_k(chosen: Any, temperature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, log-probabilities and the log-mass of the rest."""
    rows = SignalRows(chosen)
    return rows.form.entries(rows, temperature)


def read_sampled(chosen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, their shares of the draws, and the entropy."""
    rows = SignalRows(chosen)
    return *rows.form.shares(rows), rows["entropy"]


def read_tail_samples(chosen: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = SignalRows(chosen)
    return rows["tail_samples"], rows["tail_entropy"]


def read_hidden(chosen: Any) -> torch.Tensor:
    rows = SignalRows(chosen)
    return rows.form.states(rows)


def read_token_logprobs(chosen: Any) -> np.ndarray:
    return SignalRows(chosen)["token_logprobs"]
