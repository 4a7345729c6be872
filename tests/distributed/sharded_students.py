"""A tiny student spread over ranks in every way, made whole from a seed on each of them: without the loading of a run."""

from __future__ import annotations

import torch
from spread_students import FAMILY_TARGET
from tiny_families import batches, make_model
from torch import nn
from torch.optim import Optimizer

from potstill.config import OptimizerConfig, ParallelConfig
from potstill.objective.student_loss import StudentLoss
from potstill.parallel.mesh import Ranks, ranks, world
from potstill.parallel.shard import shard, split
from potstill.training.optimizer import make_optimizers

HERE = torch.device("cpu")


def in_world(**sizes: int):
    return world(ParallelConfig(**sizes), HERE)


def sharded(family: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> StudentLoss:
    """As the ranks of this process have it."""
    student, here = make_model(family, seed), ranks()
    student.model.to(dtype)
    student.context, student.group = split(student.model, here), here.tp.group
    module = StudentLoss(student).train()
    shard(module, student.model, here, StudentLoss.METHODS)
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
