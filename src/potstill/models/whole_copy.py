"""A model once more, whole in this process, whatever ranks the first is spread over: text is written with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from potstill.models.adapters import plain_names, plain_weights
from potstill.models.language_model import LanguageModel
from potstill.models.libraries import quiet


def whole_copy(original: LanguageModel, device: torch.device | None = None) -> LanguageModel:
    """A model of the same config, with room for the weights: `take_weights` fills it. Its buffers are filled: those outside a
    state dict (rotary frequencies, say) never change. `device`: default, that of the original."""
    model = original.model
    with quiet(), torch.device("meta"):
        built = type(model)._from_config(copy.deepcopy(model.config))
    made: dict[int, nn.Parameter] = {}  # what shares its weights does so again
    for name, own in plain_names(model).items():  # not by name: after a pass FSDP may leave a layer whole
        if not isinstance(own, nn.Parameter):
            continue
        if id(own) not in made:
            room = torch.empty(own.shape, dtype=own.dtype, device=device or original.device)
            made[id(own)] = nn.Parameter(room, requires_grad=False)
        _put(built, name, made[id(own)])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        _put(built, name, buffer.detach().clone().to(device or original.device))
    built.generation_config = copy.deepcopy(model.generation_config)
    return replace(original, model=built.eval(), group=None, context=None, placed=None)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    held: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    assert leaf in held, name
    held[leaf] = tensor


@torch.no_grad()
def take_weights(made: LanguageModel | None, original: LanguageModel) -> None:
    """Together with all ranks that hold a part of the original. None: this one has no copy."""
    mine = {} if made is None else made.model.state_dict()
    for name, tensor in plain_weights(original.model):
        if made is not None:
            mine[name].copy_(tensor)
