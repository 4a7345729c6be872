"""Which of a student's weights learn: low-rank adapters in place of its own (LoRA, by peft), or all but some that are frozen.

Adapters are put into the model in place, so it stays the model that transformers made: its head, its backbone and its layers
are found as before. `plain_weights` gives it as if there were none, each matrix with what its adapter adds.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from potstill.config.models import LoraConfig
from potstill.errors import PotstillError
from potstill.extras import missing_extra
from potstill.models.libraries import quiet, reason
from potstill.models.tokenizer import optional_file
from potstill.parallel.weights import weights_of, whole

NAME = "default"  # of the one adapter, as peft calls it
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in an adapter's file
PARTS = re.compile(rf"(.*)\.(lora_A|lora_B|lora_magnitude_vector)\.{NAME}\.weight")


def freeze(model: PreTrainedModel, patterns: list[str], key: str = "student.freeze") -> None:
    """Parameters whose name, or a part of it between dots, matches one of the patterns learn nothing."""
    named = list(model.named_parameters())
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")]
        if not found:
            few = ", ".join(name for name, _ in named[:3])
            raise PotstillError(f"{key}: nothing in the student is called {pattern!r}; its names are like {few}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise PotstillError(f"{key}: it freezes everything, so the student would learn nothing")


def add_lora(model: PreTrainedModel, config: LoraConfig, base: str | None, revision: str | None = None) -> str:
    """Put adapters into the model, and freeze all else. `base`: what the model was loaded from; None: it is saved nowhere.
    Gives what is worth a word."""
    peft = _peft("student.lora")
    head, names = model.get_output_embeddings(), set(model.state_dict())
    if config.peft.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise PotstillError(
            "student.lora.peft.init_lora_weights: one that changes the student's own weights is refused"
        )
    try:
        with quiet():
            made = peft.LoraConfig(
                r=config.r,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=config.target_modules,
                use_dora=config.use_dora,
                use_rslora=config.use_rslora,
                task_type="CAUSAL_LM",
                base_model_name_or_path=base,
                revision=revision,
                **config.peft,
            )
            peft.inject_adapter_in_model(made, model)
    except Exception as error:  # peft's own checks, and those of the architecture
        raise PotstillError(f"student.lora: peft makes no adapter of it ({reason(error)})") from error
    if model.get_output_embeddings() is not head:
        raise PotstillError(
            "student.lora.target_modules names the head, whose product with the hidden states is part of the loss: leave it "
            "out, or train it whole with student.lora.modules_to_save"
        )
    _check_plain(peft, model, names)
    # Not peft's wrapper for these, which keeps the old weights beside the new. peft reads a name as an ending: whole ones are
    # no other's.
    whole_modules = [path for name in config.modules_to_save for path in _train_whole(model, name)]
    made.modules_to_save = whole_modules or None
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"student.lora: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})"


def _peft(key: str) -> Any:
    try:
        import peft
    except ImportError:
        raise missing_extra(key, "lora") from None
    return peft


def _check_plain(peft: Any, model: PreTrainedModel, names: set[str]) -> None:
    """That what the adapters add can be added to the student's matrices: else no copy of it would be right."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)}
    others = [name for name, layer in layers.items() if type(layer) is not peft.tuners.lora.Linear]
    others += [name for name, p in model.named_parameters() if p.requires_grad and not PARTS.fullmatch(name)]
    others += sorted(set(plain_names(model)) ^ names)
    if others:
        raise PotstillError(
            f"student.lora: {others[0]} would learn otherwise than by two matrices beside a linear layer: leave it out of "
            "target_modules and peft"
        )


def _train_whole(model: PreTrainedModel, name: str) -> list[str]:
    """All modules of that name; gives their paths."""
    there = {path: module for path, module in model.named_modules() if path == name or path.endswith(f".{name}")}
    found = list(there.values())
    if any("base_layer" in part._modules for module in found for part in module.modules()):
        raise PotstillError(
            f"student.lora.modules_to_save: {name!r} has adapters in it: leave it out of target_modules"
        )
    if not found:
        raise PotstillError(f"student.lora.modules_to_save: the student has no module {name!r}")
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    if tables[0].weight is tables[1].weight and any(module in tables for module in found):
        raise PotstillError(
            f"student.lora.modules_to_save: {name!r} shares its weights (the embedding is the head), which an adapter's file "
            "cannot say: leave it out"
        )
    for module in found:
        module.requires_grad_(True)
    return list(there)


def trains_adapters_alone(model: nn.Module) -> bool:
    return all(PARTS.fullmatch(name) for name, p in model.named_parameters() if p.requires_grad)


def adapter(model: nn.Module) -> Any | None:
    """peft's config of the adapters in a model; None: it has none."""
    return vars(model).get("peft_config", {}).get(NAME)


def saved_weights(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint keeps: of a module with adapters what learns, else all of it. Nothing is gathered."""
    weights = weights_of(module)
    if all(adapter(part) is None for part in module.modules()):
        return weights
    learns = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in weights.items() if name in learns}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapters were put into it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # not enable_adapters(False), which also freezes them
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def as_in_file(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of adapters under the names that peft gives them in a file."""
    return {PREFIX + name.replace(f".{NAME}.", "."): tensor for name, tensor in weights.items()}


def save_description(model: PreTrainedModel, folder: Path) -> None:
    """All of a saved model but its weights: a folder that transformers loads, or peft where the model has adapters."""
    config = adapter(model)
    with quiet():
        if config is None:
            model.save_pretrained(folder, state_dict={})
        else:
            folder.mkdir()
            training, config.inference_mode = config.inference_mode, True
            config.save_pretrained(folder)
            config.inference_mode = training


def plain_names(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without adapters: names as transformers has them, with the tensors that lie there. Nothing is gathered,
    and what adapters add is not in it."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not PARTS.fullmatch(name)
    }


@torch.no_grad()
def plain_weights(model: nn.Module, masters: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Everything in a model's state dict by name, with what its adapters add and without them; each tensor once however many
    names it has, whole on every rank that has a part of the model. All of them must go through all of it together: each tensor
    is gathered when it is asked for, and none is kept. Buffers outside the state dict are whole on every rank as they are.
    `masters`: by name, what parameters are rounded from; nothing is then rounded."""
    weights = weights_of(model)
    weights |= {name: master.detach() for name, master in (masters or {}).items() if name in weights}
    for name, tensor in weights.items():
        if PARTS.fullmatch(name):
            continue
        layer, _, leaf = name.rpartition(".base_layer.")
        found = whole(tensor)
        if layer and leaf == "weight" and f"{layer}.lora_A.{NAME}.weight" in weights:
            merged = _merged(model.get_submodule(layer), found, weights, layer)
            found = merged.to(found.dtype) if masters is None else merged
        yield name.replace(".base_layer.", "."), found


def _merged(module: Any, weight: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """W + s·B·A; with DoRA each of its rows scaled to the length that was learnt."""
    a, b = (whole(weights[f"{layer}.{part}.{NAME}.weight"]) for part in ("lora_A", "lora_B"))
    added = (b.float() @ a.float() if b.dtype in (torch.bfloat16, torch.float16) else b @ a) * module.scaling[NAME]
    found = weight + (added.T if module.fan_in_fan_out else added)
    length = weights.get(f"{layer}.lora_magnitude_vector.{NAME}.weight")
    if length is not None:
        rows = found.T if module.fan_in_fan_out else found
        rows = rows * (whole(length) / rows.norm(dim=1))[:, None]
        found = rows.T if module.fan_in_fan_out else rows
    return found.contiguous()


def adapter_base(name: str, revision: str | None) -> tuple[str, str | None] | None:
    """Of a folder or hub id that holds an adapter alone: the model that it goes with, and its revision. None: it is a model."""
    path = optional_file(name, CONFIG, revision)
    if path is None or optional_file(name, "config.json", revision) is not None:
        return None
    keys = json.loads(Path(path).read_text(encoding="utf-8"))
    base = keys.get("base_model_name_or_path")
    if not base:
        raise PotstillError(
            f"{name} holds an adapter of a model that is saved nowhere (some layers of another): use RUN/merged, which is whole"
        )
    return str(base), keys.get("revision")


def with_adapter(model: PreTrainedModel, folder: str, where: str, revision: str | None) -> PreTrainedModel:
    """A base model with an adapter of a folder added to its weights."""
    peft = _peft(where)
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        merged: PreTrainedModel = peft.PeftModel.from_pretrained(model, folder, revision=revision).merge_and_unload()
    return merged
