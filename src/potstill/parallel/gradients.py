"""Norm and clipping of gradients that lie on different meshes, which torch's own clipping refuses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from potstill.parallel.weights import here

Spread = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and those of its dimensions over which a tensor is cut


@torch.no_grad()
def clip(module: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to `max_norm` all together; gives their norm before, the same on every rank. Collective."""
    groups: dict[Spread, list[Tensor]] = {}
    for parameter in module.parameters():  # also those without a gradient: all ranks must sum over the same groups
        if parameter.requires_grad:
            grads = groups.setdefault(spread(parameter), [])
            if parameter.grad is not None:
                grads.append(here(parameter.grad))
    norms = [_norm(grads, where) for where, grads in groups.items() if grads or where[1]]
    norm = norms[0] if len(norms) == 1 else torch.stack([each.double().to(norms[0].device) for each in norms]).norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def spread(tensor: Tensor) -> Spread:
    """Tensors that lie alike, and so can be handed to one fused kernel, give the same."""
    if not isinstance(tensor, DTensor):
        return None, ()
    assert not any(placement.is_partial() for placement in tensor.placements)
    cut = (number for number, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh, tuple(cut)


def _norm(grads: list[Tensor], where: Spread) -> Tensor:
    mesh, dimensions = where
    norm = get_total_norm(grads)
    if mesh is None or not dimensions:
        return norm
    square = norm.to(mesh.device_type, torch.float64).square()  # a rank without a gradient knows no dtype
    for dimension in dimensions:
        dist.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt()
