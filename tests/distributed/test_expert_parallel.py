"""A student with experts, spread over processes, equals the one of one process."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from spread_students import FAMILY_TARGET, apart, full
from test_tensor_parallel import wrong
from tiny_families import batches, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from potstill.objective.student_loss import StudentLoss
from potstill.parallel.experts import check_experts, expert_modules, split_experts
from potstill.parallel.mesh import expert_mesh
from potstill.parallel.tensor import split_tensors
from potstill.types import PotstillError

PATIENCE = 300  # seconds


def spread(family: str, dp: int, tp: int, ep: int) -> dict[str, dict[str, float]]:
    """Two passes; each data-parallel rank has a batch of each, the last one of the last pass nothing to learn from."""
    mesh = init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
    experts = expert_mesh(mesh, ep)
    settings, make = FAMILY_TARGET
    made = batches(2 * dp)
    divisor = sum(batch.supervised_tokens for batch in made)
    student = make_model(family)
    split_experts(student.model, experts, mesh["tp"])
    if tp > 1:
        split_tensors(student.model, mesh["tp"], experts=True)
        student.group = mesh["tp"].get_group()
    module = StudentLoss(student).train()
    for part in expert_modules(student.model):
        fully_shard(part, mesh=experts["efsdp"])
    for layer in student.model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(module, mesh=mesh["fsdp"])
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    whole = StudentLoss(make_model(family)).train()
    found, alone = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(made):
        loss, _ = whole(batch, make(batch), divisor, settings)
        loss.backward()
        alone += loss.detach()
        if number % dp == mesh["fsdp"].get_local_rank():
            loss, _ = module(batch, make(batch), divisor, settings)
            loss.backward()
            found += loss.detach()
    if dp > 1:
        torch.distributed.all_reduce(found, group=mesh["fsdp"].get_group())
    gradients = [{name: full(p.grad) for name, p in each.model.named_parameters()} for each in (module, whole)]
    return {
        family: apart(
            {"sums": {"loss": found}, "gradients": gradients[0]}, {"sums": {"loss": alone}, "gradients": gradients[1]}
        )
    }


def test_two_ranks_with_half_of_the_experts_each():
    assert not wrong(on_ranks(2, spread, "qwen3-moe", 2, 1, 2, timeout=PATIENCE))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize(("dp", "tp", "ep"), [(4, 1, 2), (4, 1, 4), (2, 2, 2), (2, 2, 4), (1, 2, 2)])
def test_experts_beside_rows_and_matrices(family, dp, tp, ep):
    assert not wrong(on_ranks(dp * tp, spread, family, dp, tp, ep, timeout=PATIENCE))


def test_what_does_not_fit_is_one_sentence():
    model = make_model("qwen3-moe").model
    with pytest.raises(
        PotstillError, match=r"parallel.ep 3 does not divide the 4 experts .*: set it to one of 1, 2, 4"
    ):
        check_experts(model, 3, 1)
    with pytest.raises(PotstillError, match=r"set it to one of 2, 4"):
        check_experts(model, 1, 2)
    with pytest.raises(PotstillError, match=r"no plan to spread experts of llama models: set parallel.ep to 1"):
        check_experts(make_model("llama").model, 2, 1)
