"""A narrower student made of a model: the channels, neurons and attention heads that matter least on the run's own text are cut
(as in Minitron, arXiv 2407.14679).

What matters is measured by activations: the mean of their absolute value over a sample of the data, of what each norm gives
(channels), of what enters the last product of an MLP (neurons) and of attention (heads).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from potstill.config import DataConfig
from potstill.config.models import WidthConfig
from potstill.data import collate
from potstill.data.encoding import Encoder
from potstill.data.sample import sampled, with_pieces
from potstill.models import LanguageModel, backbone, evaluating, hidden_states, quiet
from potstill.models.attention import choose
from potstill.models.libraries import reason
from potstill.parallel.context import plain_kind
from potstill.types import Batch, PotstillError

KEY = "student.width"
ROWS = 8  # texts per pass
# The parts of a layer by what their rows and columns are. Biases go with the rows.
MATRICES = {
    "q_proj": ("heads", "hidden"),
    "k_proj": ("kv_heads", "hidden"),
    "v_proj": ("kv_heads", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
}
NORMS = {"q_norm": "heads", "k_norm": "kv_heads"}  # where they are as wide as all heads; else they are as wide as one
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([^.]+)\.(weight|bias)")
CONFIG = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}


@dataclass(frozen=True)
class Importance:
    """How much each part of a model matters; the latter two by layer."""

    hidden: Tensor  # [H]
    intermediate: list[Tensor]  # [I]
    heads: list[Tensor]  # [heads]

    def of_layers(self, layers: Sequence[int]) -> Importance:
        return replace(self, intermediate=[self.intermediate[i] for i in layers], heads=[self.heads[i] for i in layers])


@dataclass(frozen=True)
class Kept:
    """What stays, as indices in their old order; the latter three by layer."""

    hidden: list[int]
    intermediate: list[list[int]]
    heads: list[list[int]]
    kv_heads: list[list[int]]
    sizes: Mapping[str, int] = field(default_factory=dict)  # by CONFIG


def calibration(data: DataConfig, tokenizer: Any, examples: int) -> list[Batch]:
    """A sample of the run's own texts, in which seeds have no part."""
    data = with_pieces(data, tokenizer)
    encode = Encoder(tokenizer, max_length=data.max_length, append_eos=data.append_eos)
    found = [each.example for each in encode(list(sampled(data, tokenizer, "data"))) if each.example is not None]
    if not found:
        raise PotstillError(f"{KEY}: there is no text in data.sources to measure on what matters in the student")
    chosen = found[:: max(1, len(found) // examples)][:examples]
    rows = [chosen[start : start + ROWS] for start in range(0, len(chosen), ROWS)]
    return [collate([[example] for example in some], 0) for some in rows]


@torch.no_grad()
def measured(student: LanguageModel, batches: Iterable[Batch]) -> Importance:
    """Over the tokens of the batches that are no padding."""
    layers = _layers(student.model)
    sizes = _sizes(student.model)
    hidden = torch.zeros(sizes["hidden"], dtype=torch.float64)
    intermediate = [torch.zeros(sizes["intermediate"], dtype=torch.float64) for _ in layers]
    heads = [torch.zeros(sizes["heads"], dtype=torch.float64) for _ in layers]
    read: list[Tensor] = []  # which positions of the batch under way are text

    def add(total: Tensor, activations: Tensor, per_head: bool = False) -> None:
        found = activations.flatten(0, -2)[read[0]].abs().double()
        found = found.unflatten(-1, (total.shape[0], -1)).mean(-1) if per_head else found
        total += found.sum(0).cpu()

    watches = []
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            leaf = name.rpartition(".")[2]
            if leaf == "down_proj":
                watches.append(module.register_forward_pre_hook(_seeing(add, intermediate[number])))
            elif leaf == "o_proj":
                watches.append(module.register_forward_pre_hook(_seeing(add, heads[number], True)))
            elif "norm" in leaf and leaf not in NORMS:
                watches.append(module.register_forward_hook(lambda _, __, given: add(hidden, given)))
    try:
        with evaluating(student.model):
            for batch in batches:
                batch = batch.to(student.device)
                read[:] = [batch.document.flatten() > 0]
                hidden_states(student.model, batch, student.attention)
    finally:
        for watch in watches:
            watch.remove()
    return Importance(hidden, intermediate, heads)


def _seeing(add: Callable[..., None], total: Tensor, per_head: bool = False) -> Callable[[nn.Module, Any], None]:
    return lambda _, inputs: add(total, inputs[0], per_head)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those of a model whose parts have the names of MATRICES, as in Llama and those like it."""
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in backbone(model).modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    names = [{name.rpartition(".")[2] for name, _ in layer.named_modules()} for stack in stacks[:1] for layer in stack]
    if not names or not all({"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"} <= each for each in names):
        raise PotstillError(
            f"{KEY}: the layers of {model.config.model_type} models are not made of q_proj, k_proj, v_proj, o_proj, up_proj "
            "and down_proj, which it knows how to cut: use layers"
        )
    return list(stacks[0])


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    config = model.config.get_text_config()
    return {name: getattr(config, key) for name, key in CONFIG.items()}


def kept(importance: Importance, width: WidthConfig, model: PreTrainedModel) -> Kept:
    """The most important of everything, as many as are asked for. Attention keeps groups of heads whole, as those that share
    their keys and values: first groups by the sum of their heads, then heads in them."""
    sizes = _sizes(model)
    asked = {name: value for name, value in width if name in sizes and value is not None}
    for name, value in asked.items():
        if value > sizes[name]:
            raise PotstillError(
                f"{KEY}.{name}: {value} is more than the {sizes[name]} of {model.config.model_type} model"
            )
    wanted = sizes | asked
    group, per_group = sizes["heads"] // sizes["kv_heads"], wanted["heads"] // wanted["kv_heads"]
    if wanted["heads"] % wanted["kv_heads"] or per_group > group:
        raise PotstillError(
            f"{KEY}: {wanted['heads']} heads over {wanted['kv_heads']} kv_heads are not 1 to {group} whole heads for each, as "
            "the model has them: give heads as such a multiple of kv_heads"
        )
    groups = [_most(each.view(-1, group).sum(-1), wanted["kv_heads"]) for each in importance.heads]
    heads = [
        [g * group + i for g in some for i in _most(each.view(-1, group)[g], per_group)]
        for each, some in zip(importance.heads, groups, strict=True)
    ]
    neurons = [_most(each, wanted["intermediate"]) for each in importance.intermediate]
    return Kept(_most(importance.hidden, wanted["hidden"]), neurons, heads, groups, wanted)


def _most(importance: Tensor, count: int) -> list[int]:
    """Indices of the largest; of equals the first."""
    order = importance.argsort(descending=True, stable=True)[:count]
    return sorted(order.tolist())


def cut(model: PreTrainedModel, stays: Kept) -> PreTrainedModel:
    """A new model of a narrower config, with the weights that stay."""
    config = copy.deepcopy(model.config)
    text, old = config.get_text_config(), _sizes(model)
    head = _head_dim(model)
    text.head_dim = head  # no longer what the config would take it for
    for name, key in CONFIG.items():
        setattr(text, key, stays.sizes[name])
    weights = {name: _cut(name, tensor, stays, old, head) for name, tensor in model.state_dict().items()}
    try:
        with quiet():
            made: PreTrainedModel = type(model)._from_config(config, dtype=model.dtype)
        made.load_state_dict(weights)
    except Exception as error:  # an architecture that is made otherwise, which says so in many ways
        raise PotstillError(
            f"{KEY}: transformers makes no narrower {model.config.model_type} model of it ({reason(error)})"
        ) from error
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.to(model.device)


def _head_dim(model: PreTrainedModel) -> int:
    for name, module in _layers(model)[0].named_modules():
        if name.rpartition(".")[2] == "o_proj":
            return int(module.weight.shape[1]) // _sizes(model)["heads"]
    raise AssertionError("o_proj was there")


def _cut(name: str, tensor: Tensor, stays: Kept, old: Mapping[str, int], head: int) -> Tensor:
    """One tensor of the state dict. What is in no layer, and norms, have the channels as their last dimension."""
    found = LAYER.fullmatch(name)
    number, part = (int(found[1]), found[2]) if found else (-1, "")
    if part in MATRICES:
        axes = MATRICES[part][: tensor.dim()]
    elif part in NORMS and tensor.shape[-1] == old[NORMS[part]] * head:
        axes = (NORMS[part],)
    elif part not in NORMS and tensor.dim() in (1, 2) and tensor.shape[-1] == old["hidden"]:
        return tensor[..., torch.tensor(stays.hidden, device=tensor.device)].clone()
    else:
        return tensor
    for dim, axis in enumerate(axes):
        tensor = tensor.index_select(dim, _places(axis, number, stays, head).to(tensor.device))
    return tensor


def _places(axis: str, layer: int, stays: Kept, head: int) -> Tensor:
    if axis == "hidden":
        return torch.tensor(stays.hidden)
    chosen = torch.tensor(getattr(stays, axis)[layer])
    if axis == "intermediate":
        return chosen
    return (chosen[:, None] * head + torch.arange(head)).flatten()


def pruned(student: LanguageModel, made: PreTrainedModel) -> LanguageModel:
    """A narrower model in the place of a student's, read the same way."""
    choose(backbone(made), student.attention, plain_kind(student.model))
    return replace(student, model=made)
