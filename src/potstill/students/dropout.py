"""All of a model's dropouts at once: of modules, and of functions that read their probability from a module or its config."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel

OF_OTHER_HEADS = ("classif", "summary")  # in names of a config: dropouts that a language model has none of
OF_LAYERS = ("layer", "path")  # in names such as layerdrop: whole layers are left out, which is only ever turned off


def set_dropout(model: PreTrainedModel, probability: float) -> list[float]:
    """Set the probability of every dropout. Gives those that some had and that are others now."""
    changed: set[float] = set()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            changed.add(float(module.p))
            module.p = probability
        changed |= _set_named(vars(module), probability)
        if isinstance(vars(module).get("config"), PretrainedConfig):
            changed |= _set_config(vars(module)["config"], probability)
    return sorted(changed - {probability})


def _set_config(config: PretrainedConfig, probability: float) -> set[float]:
    changed = _set_named(vars(config), probability)
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            changed |= _set_config(part, probability)
    return changed


def _set_named(attributes: dict[str, Any], probability: float) -> set[float]:
    changed = set()
    for name, value in attributes.items():
        if "drop" not in name or type(value) not in (int, float) or any(part in name for part in OF_OTHER_HEADS):
            continue
        if probability and any(part in name for part in OF_LAYERS):
            continue
        changed.add(float(value))
        attributes[name] = probability
    return changed
