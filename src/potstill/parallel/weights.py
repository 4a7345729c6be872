"""Whole tensors of a model that may be spread over ranks, one by one: for engines, exports and fingerprints."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything in a model's state dict by name, each tensor once however many names it has, whole on every rank that has a
    part of the model. All of them must go through all of it together: each tensor is gathered when it is asked for, and none
    is kept. Buffers outside the state dict are whole on every rank as they are."""
    for name, tensor in weights_of(model).items():
        yield name, whole(tensor)


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
