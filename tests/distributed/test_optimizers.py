"""Optimizers of students that are spread over ranks take the steps of one process."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sharded_students import in_world, optimizers_of, parameters, sharded, step
from tiny_families import make_model

from potstill.training.student import StudentLoss

TWO = [("llama-tied", {}), ("qwen3", {"tp": 2})]
FOUR = [("llama-tied", {"tp": 2}), ("phi3", {"tp": 2}), ("llama-tied", {"dp_replicate": 2}), ("llama", {})]


def trained(family: str, sizes: dict[str, int], name: str) -> float:
    """How far the parameters are apart after three steps, as a share of how far they have moved."""
    alone, start = StudentLoss(make_model(family)).train(), parameters(make_model(family).model)
    optimizers = optimizers_of(alone, name)
    for number in range(3):
        step(alone, optimizers, number)
    with in_world(**sizes):
        module = sharded(family)
        optimizers = optimizers_of(module, name)
        assert optimizers[0].defaults["fused"]
        for number in range(3):
            step(module, optimizers, number)
        found = parameters(module.model)
    far = [
        float((found[key] - value).abs().max() / (value - start[key]).abs().max())
        for key, value in parameters(alone.model).items()
    ]
    return max(far)


def all_of(layouts, name):
    return {f"{family} on {sizes}": trained(family, sizes, name) for family, sizes in layouts}


def exactly(layouts, name):
    """Muon orthogonalises in float32, where the order of a sum shows: here in float64."""
    usual = torch.Tensor.to
    torch.Tensor.to = lambda x, *to, **more: x if to == (torch.float32,) else usual(x, *to, **more)
    try:
        return all_of(layouts, name)
    finally:
        torch.Tensor.to = usual


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_steps_equal_those_of_one_process(ranks, layouts, name):
    for found in on_ranks(ranks, exactly, layouts, name):
        assert not {where: far for where, far in found.items() if not far < 1e-8}
