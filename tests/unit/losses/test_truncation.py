"""What a token is drawn from: computed by hand, and beside transformers' own truncation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from potstill.config.rollouts import SamplingConfig
from potstill.rollouts.sampling import drawn_from

PROBS = [0.5, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [8 / 11, 2 / 11, 1 / 22, 1 / 22]),  # squares: 16, 4, 1, 1 of 22
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # of the two that are left, the first alone has 0.67
        ({"min_p": 0.4, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_by_hand(keys: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([[math.log(p) + 3 for p in PROBS]])
    torch.testing.assert_close(drawn_from(logits, SamplingConfig(**keys)).exp()[0], torch.tensor(expected).float())


@pytest.mark.parametrize("seed", range(3))
def test_beside_transformers(seed: int) -> None:
    logits = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(seed))
    sampling = SamplingConfig(temperature=0.8, min_p=0.01, top_k=20, top_p=0.85)
    theirs = logits / 0.8
    for warp in (MinPLogitsWarper(0.01), TopKLogitsWarper(20), TopPLogitsWarper(0.85)):
        theirs = warp(None, theirs)
    torch.testing.assert_close(drawn_from(logits, sampling), theirs.log_softmax(-1))
    assert drawn_from(logits.bfloat16(), sampling).dtype == torch.float32
