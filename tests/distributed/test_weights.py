"""Whole tensors, norms and clipped gradients of students that are spread over ranks equal those of one process."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sharded_students import backward, in_world, sharded
from tiny_families import V, make_model

from potstill.models.adapters import plain_weights
from potstill.objective.student_loss import StudentLoss
from potstill.parallel.gradients import clip
from potstill.parallel.mesh import Ranks, ranks
from potstill.parallel.weights import whole

TWO = [("llama-tied", {}), ("llama-tied", {"tp": 2}), ("phi3", {"tp": 2})]
FOUR = [
    ("llama-tied", {"tp": 2}),
    ("qwen3", {"tp": 4}),
    ("phi3", {"tp": 2}),
    ("llama", {"dp_replicate": 2}),
    ("gemma3", {}),
    ("qwen3-moe", {"ep": 2}),
    ("qwen3-moe", {"tp": 2, "ep": 4}),
]


def gathered(family: str, sizes: dict[str, int]) -> None:
    with in_world(**sizes):
        module = sharded(family)
        found = dict(plain_weights(module.model))
    alone = make_model(family).model
    expected = alone.state_dict()
    if alone.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert list(found) == list(expected)
    assert found["model.embed_tokens.weight"].shape[0] == V
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def clipped(family: str, sizes: dict[str, int]) -> None:
    """A norm far above the largest allowed, and one below; the last data-parallel rank has fewer passes."""
    assert ranks() == Ranks()
    alone = StudentLoss(make_model(family)).train()
    backward(alone, ranks())
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
    assert expected > 0.06
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    with in_world(**sizes):
        module = sharded(family)
        backward(module, ranks())
        for p in module.parameters():
            assert p.grad is not None
            assert not hasattr(p, "placements") or p.grad.placements == p.placements
        norm = clip(module, 0.05)
        assert abs(float(norm / expected) - 1) < 1e-12
        assert abs(float(clip(module, 9.0)) - 0.05) < 1e-6
        for name, p in module.named_parameters():
            torch.testing.assert_close(whole(p.grad), gradients[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("work", [gathered, clipped])
def test_on_two_ranks(work):
    on_ranks(2, each, work, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("work", [gathered, clipped])
def test_on_four_ranks(work):
    on_ranks(4, each, work, FOUR)


def each(work, layouts):
    for family, sizes in layouts:
        try:
            work(family, sizes)
        except Exception as error:
            raise AssertionError(f"{family} on {sizes}: {error}") from error


def test_of_one_process_nothing_is_copied_and_the_norm_is_that_of_torch():
    module = StudentLoss(make_model("llama-tied")).train()
    found = dict(plain_weights(module))
    assert found["model.model.norm.weight"].data_ptr() == module.model.model.norm.weight.data_ptr()
    backward(module, ranks())
    twin = StudentLoss(make_model("llama-tied")).train()
    backward(twin, ranks())
    assert torch.equal(clip(module, 0.05), torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05))
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
