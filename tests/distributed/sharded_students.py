"""A tiny student spread over ranks in every way, made whole from a seed on each of them: without the loading of a run."""

from __future__ import annotations

import torch
from spread_students import FAMILY_TARGET
from tiny_families import batches, make_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from potstill.config import OptimizerConfig, ParallelConfig
from potstill.parallel.experts import expert_mesh, expert_modules, split_experts
from potstill.parallel.mesh import Ranks, ranks, world
from potstill.parallel.tensor import split_tensors
from potstill.training.optimizer import make_optimizers
from potstill.training.student import StudentLoss

HERE = torch.device("cpu")


def in_world(**sizes: int):
    return world(ParallelConfig(**sizes), HERE)


def sharded(family: str, seed: int = 0, ep: int = 1) -> StudentLoss:
    """As the ranks of this process have it."""
    student, here = make_model(family, seed), ranks()
    if here.mesh is None:
        return StudentLoss(student).train()
    experts = expert_mesh(here.mesh, ep) if ep > 1 else None
    if experts is not None:
        split_experts(student.model, experts, here.mesh["tp"])
    if here.tp.size > 1:
        split_tensors(student.model, here.mesh["tp"], experts=ep > 1)
        student.group = here.tp.group
    module = StudentLoss(student).train()
    if experts is not None:
        for part in expert_modules(student.model):
            fully_shard(part, mesh=experts["efsdp"])
    if here.dp.size > 1:
        for layer in student.model.model.layers:
            fully_shard(layer, mesh=here.fsdp)
        fully_shard(module, mesh=here.fsdp)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def backward(module: StudentLoss, here: Ranks, passes: int = 4, first: int = 0) -> None:
    """Over batches that data-parallel ranks deal among themselves."""
    settings, make = FAMILY_TARGET
    made = batches(first + passes)[first:]
    divisor = sum(batch.supervised_tokens for batch in made)
    for batch in made[here.dp.index :: here.dp.size]:
        loss, _ = module(batch, make(batch), divisor, settings)
        loss.backward()


def optimizers_of(module: StudentLoss, name: str = "adamw") -> list[Optimizer]:
    config = OptimizerConfig(name=name, lr=1e-2, muon_lr=1e-2)  # type: ignore[arg-type]
    return make_optimizers(module.model, module.model.get_output_embeddings(), config)


def step(module: StudentLoss, optimizers: list[Optimizer], number: int) -> None:
    backward(module, ranks(), first=number)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, without the code that is tested."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in module.named_parameters()
    }
