"""All of a model's dropouts at once: of modules, and of functions that read their probability from a module or its config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel

from potstill.types import PotstillError

OF_OTHER_HEADS = ("classif", "summary")  # in names of a config: dropouts that a language model has none of
OF_LAYERS = ("layer", "path")  # in names such as layerdrop: whole layers are left out, which is only ever turned off


def set_dropout(model: PreTrainedModel, probability: float) -> list[float]:
    """Set the probability of every dropout. Gives those that some had and that are others now."""
    changed: set[float] = set()
    for attributes, name in list(_dropouts(model)):
        if not (probability and any(part in name for part in OF_LAYERS)):
            changed.add(float(attributes[name]))
            attributes[name] = probability
    return sorted(changed - {probability})


def check_dropout(model: PreTrainedModel) -> None:
    """A config's probabilities are looked at by transformers when the model first trains, or never."""
    for attributes, name in _dropouts(model):
        if not 0 <= attributes[name] <= 1:
            raise PotstillError(
                f"student: {name} is {attributes[name]:g} in its config, and a probability of dropout is between 0 and 1: mend "
                "it there, or set student.dropout"
            )


def _dropouts(model: PreTrainedModel) -> Iterator[tuple[dict[str, Any], str]]:
    """Where each probability is kept: attributes, and a name in them."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            yield vars(module), "p"
        yield from _named(vars(module))
        if isinstance(vars(module).get("config"), PretrainedConfig):
            yield from _of_config(vars(module)["config"])


def _of_config(config: PretrainedConfig) -> Iterator[tuple[dict[str, Any], str]]:
    yield from _named(vars(config))
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            yield from _of_config(part)


def _named(attributes: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for name, value in attributes.items():
        if "drop" in name and type(value) in (int, float) and not any(part in name for part in OF_OTHER_HEADS):
            yield attributes, name
