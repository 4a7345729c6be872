"""Optimizers of students that are spread over ranks take the steps of one process."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sharded_students import backward, in_world, optimizers_of, parameters, sharded, step
from tiny_families import make_model

from potstill.objective.student_loss import StudentLoss
from potstill.parallel.mesh import ranks
from potstill.training.optimizer import moved
from potstill.training.state import load_state, take_snapshot

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
@pytest.mark.parametrize(("count", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_steps_equal_those_of_one_process(count, layouts, name):
    for found in on_ranks(count, exactly, layouts, name):
        assert not {where: far for where, far in found.items() if not far < 1e-8}


def masters_of(module, optimizers):
    """Whole, by the names of the parameters that they are the masters of."""
    names = {id(p): name for name, p in module.named_parameters()}
    found = {names[id(weight)]: master for optimizer in optimizers for master, weight in moved(optimizer)}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in found.items()}


def narrow(layouts, name, folder):
    """Of bfloat16 students: how far the masters are from those of one process after three steps, as a share of how far they
    have moved, and whether one process finds the same bits in the ranks' checkpoint."""
    found = {}
    for number, (family, sizes) in enumerate(layouts):
        alone = StudentLoss(make_model(family)).bfloat16().train()
        optimizers = optimizers_of(alone, name)
        start = {key: master.clone() for key, master in masters_of(alone, optimizers).items()}
        for at in range(3):
            step(alone, optimizers, at)
        expected = masters_of(alone, optimizers)
        with in_world(**sizes):
            module = sharded(family, dtype=torch.bfloat16)
            its = optimizers_of(module, name)
            for at in range(3):
                backward(module, ranks(), first=at)
                assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
                for optimizer in its:
                    optimizer.step()
                    optimizer.zero_grad()
            masters, weights = masters_of(module, its), parameters(module)
            assert all(torch.equal(weights[key], master.bfloat16()) for key, master in masters.items())
            where = folder / str(number)
            saved(module, its, where)
        far = sum(float((masters[key] - value).square().sum()) for key, value in expected.items())
        moved_by = sum(float((value - start[key]).square().sum()) for key, value in expected.items())
        again = StudentLoss(make_model(family, 5)).bfloat16().train()
        resumed = optimizers_of(again, name)
        load_state(where, again, resumed)
        same = all(torch.equal(masters[key], value) for key, value in masters_of(again, resumed).items())
        found[f"{family} on {sizes}"] = (far / moved_by) ** 0.5, same
    return found


def saved(module, optimizers, folder):
    if ranks().first:
        for name in ("model", "state"):
            (folder / name).mkdir(parents=True)
    torch.distributed.barrier()
    take_snapshot(module.model, module, optimizers).write(folder)
    torch.distributed.barrier()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(("count", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_masters_of_a_bfloat16_student_are_spread_as_it_is(count, layouts, name, tmp_path):
    for found in on_ranks(count, narrow, layouts, name, tmp_path):
        assert not {where: (far, same) for where, (far, same) in found.items() if not (far < 0.15 and same)}
