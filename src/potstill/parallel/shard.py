"""A student over the ranks of a run: its matrices, experts and sequences are split, then FSDP2 shards what is left around its
layers and around the loss. Teachers are sharded by models/spread.py, which asks for the same layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from potstill.parallel.context import Context, split_context
from potstill.parallel.experts import expert_modules, split_experts
from potstill.parallel.mesh import Ranks
from potstill.parallel.tensor import split_tensors

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def split(model: PreTrainedModel, here: Ranks) -> Context | None:
    """Spread the matrices, experts and sequences of a model, in place, as far as the run's sizes say. Gives the ranks that
    read the parts of a sequence."""
    if here.mesh is None:
        return None
    if here.experts is not None:
        split_experts(model, here.experts, here.mesh["tp"])
    if here.tp.size > 1:
        split_tensors(model, here.mesh["tp"], experts=here.experts is not None)
    if here.cp.group is None:
        return None
    split_context(model)
    return Context(here.cp.group, here.cp.size, here.cp.index)


def shard(
    root: nn.Module,
    model: PreTrainedModel,
    here: Ranks,
    methods: tuple[str, ...],
    *,
    bf16: bool = False,
    fill: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Shard `root`, which calls the model and its head, over the ranks that hold other rows. Gradients are summed: the loss
    has been divided by the tokens of all ranks. `methods`: those by which the root is called besides forward. `fill`: gives a
    part its weights, just before it is sharded."""
    if here.sums.size == 1:
        fill(model)
        return
    policy = BF16 if bf16 else MixedPrecisionPolicy(reduce_dtype=_sum_dtype(model))
    if here.experts is not None:
        experts = here.experts
        mesh = experts["dp_replicate", "efsdp"] if experts["dp_replicate"].size() > 1 else experts["efsdp"]
        for module in expert_modules(model):
            fill(module)
            fully_shard(module, mesh=mesh, mp_policy=policy)
    for layer in layers(model):
        fill(layer)
        fully_shard(layer, mesh=here.fsdp, mp_policy=policy)
    fill(model)
    fully_shard(root, mesh=here.fsdp, mp_policy=policy)
    for part in fsdp_modules(root):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no product before a sum
    for name in methods:
        register_fsdp_forward_method(root, name)


def _sum_dtype(model: nn.Module) -> torch.dtype | None:
    """In what gradients are summed over ranks: float32 where parameters are narrower, else in their own."""
    return torch.float32 if any(p.dtype.itemsize < 4 for p in model.parameters()) else None


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of which a model is a stack, inner ones first."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        found = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return found[::-1]


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def last_pass(root: nn.Module, last: bool) -> None:
    """Before each backward pass: only after the last one do replicas need each other's gradients."""
    for module in fsdp_modules(root):
        module.set_requires_all_reduce(last, recurse=False)


def reshard(root: nn.Module) -> None:
    """After passes without gradients, which leave the root's own parameters whole."""
    for module in fsdp_modules(root):
        module.reshard()
