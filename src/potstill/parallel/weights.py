"""Tensors that may be spread over ranks: whole, and which part is here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from potstill.parallel.mesh import ranks

Box = tuple[slice, ...]  # from where to where in each dimension


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is here, each tensor once, under its first name. Nothing is gathered."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def whole(tensor: Tensor) -> Tensor:
    """Collective where the tensor is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def here(tensor: Tensor) -> Tensor:
    """This rank's part, in place: what is written into it is written into the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boxes(tensor: Tensor) -> Iterator[tuple[Box, Box]]:
    """The pieces of this rank's part: where each lies in the whole tensor, and where in the part. It is one piece, but where
    matrices that are packed into one (gate and up) are each cut."""
    runs = [_runs(tensor, dimension) for dimension in range(tensor.dim())]
    for piece in itertools.product(*runs):
        if all(size for _, _, size in piece):
            there = tuple(slice(start, start + size) for start, _, size in piece)
            yield there, tuple(slice(start, start + size) for _, start, size in piece)


def _runs(tensor: Tensor, dimension: int) -> list[tuple[int, int, int]]:
    """Along one dimension: start in the whole, start in the part, length."""
    size = tensor.shape[dimension]
    cut = list(_cut_along(tensor, dimension)) if isinstance(tensor, DTensor) else []
    if not any(isinstance(placement, Shard | _StridedShard) for placement in cut):
        return [(0, 0, size)]
    assert isinstance(tensor, DTensor)
    # torch cuts the numbers of the rows as it cuts the rows: that is the one definition of where they are.
    places = distribute_tensor(torch.arange(size), tensor.device_mesh, cut, src_data_rank=None).to_local().tolist()
    assert len(places) == here(tensor).shape[dimension]
    begins = [at for at, place in enumerate(places) if at == 0 or place != places[at - 1] + 1]
    return [(places[at], at, end - at) for at, end in zip(begins, [*begins[1:], len(places)], strict=True)]


def _cut_along(tensor: DTensor, dimension: int) -> Iterator[Shard | _StridedShard | Replicate]:
    for placement in tensor.placements:
        if not isinstance(placement, Shard | _StridedShard) or placement.dim % tensor.dim() != dimension:
            yield Replicate()
        elif isinstance(placement, _StridedShard):
            yield _StridedShard(0, split_factor=placement.split_factor)
        else:
            yield Shard(0)


def keeps(tensor: Tensor, number: int) -> bool:
    """Whether this rank, of those that have the same part of a tensor, is the one to write it. `number` spreads the work."""
    if not isinstance(tensor, DTensor):
        return ranks().first
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    alike = (i for i, placement in enumerate(tensor.placements) if placement.is_replicate())
    # Ranks outside the mesh, of another tp index say, may have copies on meshes of their own.
    return 0 in mesh.mesh and all(place[i] == number % mesh.size(i) for i in alike)


def make_copies_equal(tensors: Iterable[Tensor]) -> None:
    """What tp ranks have as copies (norms, say) they update by themselves, and kernels whose sums have no order may let them
    drift apart: all take what the first of them has. Collective."""
    group = ranks().tp.group
    if group is None:
        return
    sharing = set(dist.get_process_group_ranks(group))
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or len(sharing & set(tensor.device_mesh.mesh.flatten().tolist())) == 1:
            part = here(tensor)
            held = part.contiguous()
            dist.broadcast(held, group=group, group_src=0)
            part.copy_(held)
