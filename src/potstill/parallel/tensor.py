"""Tensor parallelism: transformers' own plan of a model, but for what it leaves to us.

Ours are the head and the embedding, both over the vocabulary (the plan would gather logits, refuse vocabularies that ranks do
not divide and break the tie of tied ones), and norms over sharded heads (the plan sums `.grad` after each pass, and so the
passes before it once more).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from potstill.parallel.vocab import local, shard_targets
from potstill.types import PotstillError

OWN_HEADS = "replicated_with_grad_allreduce"  # norms of which each rank has the gradient of its own heads alone
EXPERTS = "moe_tp_experts"


def split_tensors(model: PreTrainedModel, mesh: DeviceMesh, *, experts: bool = False, head: bool = True) -> None:
    """Spread a model over the ranks of a one-dimensional mesh, in place; it may be on meta. `experts`: they are spread
    otherwise (`parallel.experts`). `head`: embedding and head too; a teacher keeps them whole."""
    check_tensors(model, mesh.size(), experts=experts)
    plan = _plan(model, experts)
    norms = {name for name, style in plan.items() if style == OWN_HEADS}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in norms})
    for name, module in model.named_modules():
        if replace_layer_number_by_wildcard(name) in norms:
            _sum_gradients(module, mesh.get_group())
    if head:
        _split_vocabulary(model, mesh)


def _plan(model: PreTrainedModel, experts: bool) -> dict[str, str]:
    """The model's, less the head and the embedding, and less experts that are spread otherwise."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name for name, module in model.named_modules() if module in tables}
    other = re.compile("|".join(re.escape(name) + r"(\..+)?" for name in model.ep_plan)) if experts else None
    plan = {
        name: style
        for name, style in model.tp_plan.items()
        if name not in names and not (other is not None and other.fullmatch(name))
    }
    return _with_adapters(model, plan)


def _with_adapters(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """A matrix that is cut by columns has an adapter whose second matrix is, one that is cut by rows one whose first is; the
    other of the two is a copy on every rank, and so are its gradients."""
    cut = {"colwise": "lora_B", "rowwise": "lora_A"}
    adapted = {replace_layer_number_by_wildcard(n) for n, m in model.named_modules() if "base_layer" in m._modules}
    found: dict[str, str] = {}
    for name, style in plan.items():
        if name not in adapted:
            found[name] = style
        elif style in cut:
            found |= {f"{name}.base_layer": style, f"{name}.{cut[style]}.default": style}
        else:
            raise PotstillError(
                f"student.lora: parallel.tp cuts {name} of {model.config.model_type} models ({style}) in a way that an "
                "adapter cannot follow: leave it out of student.lora.target_modules, or set parallel.tp to 1"
            )
    return found


def check_tensors(model: PreTrainedModel, tp: int, *, experts: bool = False) -> None:
    """One sentence on what does not divide, and what would."""
    plan, kind = _plan(model, experts), model.config.model_type
    if not plan:
        raise PotstillError(
            f"parallel.tp {tp}: transformers has no tensor-parallel plan for {kind} models: set parallel.tp to 1 and use "
            "parallel.dp_shard"
        )
    if EXPERTS in plan.values():
        raise PotstillError(
            f"parallel.tp {tp}: the experts of {kind} models are spread whole over ranks: set parallel.ep to a multiple of "
            f"{tp} that divides the number of experts"
        )
    sizes = dict(_sizes(model, plan))
    fitting = [n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
    for what, size in sizes.items():
        if size % tp:
            raise PotstillError(
                f"parallel.tp {tp} does not divide {size}, {what} of the {kind} model: set it to one of "
                f"{', '.join(map(str, fitting))}"
            )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if (tp - 1) * -(-vocabulary // tp) >= vocabulary:
        raise PotstillError(
            f"parallel.tp {tp} leaves a rank without any of the {vocabulary} ids: set it to a smaller one"
        )


def _sizes(model: PreTrainedModel, plan: dict[str, str]) -> Iterator[tuple[str, int]]:
    """What is cut, in words, and into how many at most: features, or heads where a head must stay whole."""
    config = model.config.get_text_config().to_dict()
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name, module in model.named_modules():
        generic = replace_layer_number_by_wildcard(name)
        style = plan.get(generic)
        if style is None or not isinstance(module, nn.Linear):
            continue
        size = module.out_features if style.startswith("colwise") else module.in_features
        if "attn" in name and style in ("colwise", "rowwise"):
            yield f"the heads of {generic}", size // head
        else:
            yield f"the width of {generic}", size


class _SumGradient(torch.autograd.Function):
    """Itself; its gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """A module whose parameters every rank has whole, and sees a part of the heads with."""
    inner: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        try:
            for name, weight in own.items():
                if weight is not None:
                    module._parameters[name] = _SumGradient.apply(weight, group)
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = forward


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Embedding and head, each rank with some of the ids; tied stays tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    _over_ids(embedding, "weight", mesh)
    if tied:
        head.weight = embedding.weight
    else:
        _over_ids(head, "weight", mesh)
    if isinstance(head, nn.Linear) and head.bias is not None:
        _over_ids(head, "bias", mesh)
    _embed(embedding, mesh)
    _give_all_logits(head, mesh.get_group())


def _over_ids(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    whole = getattr(module, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


class _Summed(torch.autograd.Function):
    """The sum over the ranks of a group, whose gradient every rank already has whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _embed(module: Any, mesh: DeviceMesh) -> None:
    """Look up the ids that are here; the others come from their ranks. What a model does besides (Gemma multiplies) it does to
    this rank's part: the sum is of all parts."""
    inner: Callable[..., Any] = module.forward
    group, rank = mesh.get_group(), mesh.get_local_rank()

    def forward(ids: Tensor) -> Tensor:
        weight, padding = module.weight, module.padding_idx
        start = -(-weight.shape[0] // mesh.size()) * rank
        part = local(weight)
        columns = ids - start
        here = (columns >= 0) & (columns < part.shape[0])
        module._parameters["weight"] = part
        # Of the ids of a rank, the one that never learns is counted from its first.
        module.padding_idx = padding - start if padding is not None and 0 <= padding - start < part.shape[0] else None
        try:
            found = inner(columns.clamp(0, part.shape[0] - 1))
        finally:
            module._parameters["weight"], module.padding_idx = weight, padding
        return _Summed.apply(found * here[..., None], group)

    module.forward = forward


def _give_all_logits(module: Any, group: dist.ProcessGroup) -> None:
    """For `generate`, which asks for all logits; the loss never does."""

    def forward(hidden: Tensor) -> Tensor:
        bias = None if module.bias is None else local(module.bias)
        logits = nn.functional.linear(hidden, local(module.weight), bias)
        shard, _, _ = shard_targets(logits.shape[-1], (), group, logits.device)
        return shard.whole(logits.flatten(0, -2)).unflatten(0, logits.shape[:-1])

    module.forward = forward
