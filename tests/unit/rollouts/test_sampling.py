"""Tokens drawn from logits, against loops over probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from potstill.config import SamplingConfig
from potstill.rollouts.sampling import CANDIDATES, draw, rollout_seed, uniforms

LOGITS = torch.tensor([[2.0, 0.5, -1.0, 1.9, -3.0], [0.1, 0.2, 0.3, 0.2, 0.05]])
SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 2},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"min_p": 0.3},
    {"temperature": 1.5, "min_p": 0.4, "top_k": 3, "top_p": 0.75},
]


def naive(row: list[float], s: SamplingConfig) -> list[float]:
    """The distribution that is drawn from, one rule after the other."""
    weights = [math.exp(x / s.temperature) for x in row]
    p = [w / sum(weights) for w in weights]
    p = [x if x >= s.min_p * max(p) else 0.0 for x in p]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if s.top_k:
        for i in order[s.top_k :]:
            p[i] = 0.0
    p = [x / sum(p) for x in p]
    before = 0.0
    for i in order:
        kept = before < s.top_p
        before += p[i]
        p[i] = p[i] if kept else 0.0
    return [x / sum(p) for x in p]


@pytest.mark.parametrize("keys", SETTINGS, ids=str)
def test_every_token_comes_as_often_as_it_should_and_says_how_likely_it_was(keys) -> None:
    sampling = SamplingConfig(**keys)
    n = 4000
    random = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # evenly spread: a share of them is a probability
    for row in LOGITS:
        expected = naive(row.tolist(), sampling)
        ids, logprobs = draw(row.expand(n, -1).clone(), random, sampling)
        shares = np.bincount(ids.numpy(), minlength=5) / n
        np.testing.assert_allclose(shares, expected, atol=1.01 / n)
        np.testing.assert_allclose(logprobs, np.log(np.array(expected)[ids.numpy()]), atol=2e-6)


def test_temperature_zero_takes_the_likeliest_with_certainty() -> None:
    ids, logprobs = draw(LOGITS.clone(), torch.tensor([0.9, 0.1], dtype=torch.float64), SamplingConfig(temperature=0.0))
    assert ids.tolist() == [0, 2] and logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_top_p_in_a_large_vocabulary_is_that_of_a_full_sort(spread) -> None:
    """Nearly flat: more tokens than are looked at first are needed."""
    width = 4 * CANDIDATES
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(0)) * spread
    sampling = SamplingConfig(top_p=0.9)
    expected = [naive(row.tolist(), sampling) for row in logits.double()]
    for u in (0.0, 0.3, 0.999999):
        ids, logprobs = draw(logits.clone(), torch.full((3,), u, dtype=torch.float64), sampling)
        for row in range(3):
            p = expected[row][int(ids[row])]
            assert p > 0 and float(logprobs[row]) == pytest.approx(math.log(p), abs=1e-4)
        order = [np.argsort(-logits[row].numpy(), kind="stable") for row in range(3)]
        if u == 0.0:
            assert ids.tolist() == [int(o[0]) for o in order]


def test_rounding_never_leads_to_a_token_without_mass() -> None:
    logits = torch.full((1, 4096), -torch.inf)
    logits[0, :3] = torch.tensor([1.0, 0.5, 0.25])
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for keys in ({}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 0.01}):
        ids, logprobs = draw(logits.clone(), last, SamplingConfig(**keys))
        assert int(ids) < 3 and math.isfinite(float(logprobs))


def test_seeds_depend_on_run_prompt_and_generation_and_nothing_else() -> None:
    assert rollout_seed(0, 0, 0) == 14680368682093457738  # a change of this number changes every run that is resumed
    seeds = {rollout_seed(s, p, g) for s in range(4) for p in range(50) for g in range(8)}
    assert len(seeds) == 4 * 50 * 8
    alone, together = uniforms([rollout_seed(0, 7, 1)], 6), uniforms([3, rollout_seed(0, 7, 1)], 6)
    assert np.array_equal(alone[0], together[1]) and not np.array_equal(together[0], together[1])
    assert np.array_equal(uniforms([5], 3)[0], uniforms([5], 9)[0, :3])  # a longer limit does not change the beginning
