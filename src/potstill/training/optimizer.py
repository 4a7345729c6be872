"""Optimizers, the weights they move, and the learning rate as a plain function of the step: it has no state to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import AdamW, Muon, Optimizer

from potstill.config import LrScheduleConfig, OptimizerConfig
from potstill.parallel.weights import here
from potstill.transfer import on_host
from potstill.types import PotstillError

NARROW = (torch.bfloat16, torch.float16)  # parameters of which are moved by way of float32 masters


def make_optimizers(model: nn.Module, head: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """AdamW, or Muon on the hidden matrices and AdamW on the rest (embeddings, head, norms, biases).

    Each parameter group carries its peak learning rate as `peak`, and holds parameters that are spread over ranks alike:
    torch's kernels for many tensors at once take no others. What it moves (`params`) are the model's own parameters
    (`weights`), or masters of them: in float32, or on the host (`_master`).
    """
    hidden = _hidden_matrices(model, head) if config.name == "muon" else []
    taken = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [
        {**_moved_by(alike, config), "weight_decay": decay, "peak": config.lr}
        for decay, some in ((config.weight_decay, True), (0.0, False))
        for alike in _alike(p for p in rest if (p.dim() >= 2) is some)
    ]
    optimizers = [_adamw(groups, config)] if groups else []  # of adapters alone Muon may take all
    if hidden:
        groups = [{**_moved_by(alike, config), "peak": config.muon_lr} for alike in _alike(hidden)]
        own = hidden[0].device.type == "cpu" or isinstance(hidden[0], DTensor)
        kind = StackedMuon if own else Muon
        optimizers.append(kind(groups, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=config.momentum))
    for optimizer in optimizers:
        if any(master is not weight for master, weight in moved(optimizer)):
            optimizer.register_step_pre_hook(_take_gradients)
            optimizer.register_step_post_hook(_give_weights)
    return optimizers


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for p in parameters)
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def moved(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """What an optimizer moves, each beside the parameter of the model that it is, or that it is the master of."""
    for group in optimizer.param_groups:
        yield from zip(group["params"], group["weights"], strict=True)


def _moved_by(weights: list[nn.Parameter], config: OptimizerConfig) -> dict[str, Any]:
    if config.offload and any(isinstance(p, DTensor) for p in weights):
        raise PotstillError(
            "train.optimizer.offload: it goes with one process, and the student is spread over several: leave it out, for "
            "parallel.dp_shard divides the optimizer's state among them"
        )
    kept = [_master(p, config.offload) if config.offload or p.dtype in NARROW else p for p in weights]
    return {"params": kept, "weights": weights}


def _master(weight: nn.Parameter, offload: bool) -> nn.Parameter:
    """A copy of a parameter to move: in float32 where it is narrower (in bfloat16 an update below a 256th of a weight is lost),
    as the sums of its gradients are; in the host's memory with `offload`."""
    copy = weight.detach()
    if weight.dtype in NARROW:
        weight.grad_dtype = None  # it may be another than the weight's
        weight.register_post_accumulate_grad_hook(_widen_gradient)
        copy = copy.to(torch.float32)
    return nn.Parameter(on_host(copy) if offload else copy)


def _widen_gradient(weight: Tensor) -> None:
    """After the first micro-batch; what others bring is added to a float32 gradient in float32."""
    if weight.grad is not None and weight.grad.dtype != torch.float32:
        weight.grad = weight.grad.to(torch.float32)


def _take_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: the masters' gradients are those of the model's parameters."""
    away = False
    for master, weight in moved(optimizer):
        if master is weight or weight.grad is None:
            continue
        away = away or (master.device != weight.device and weight.device.type == "cuda")
        master.grad = weight.grad if master.device == weight.device else on_host(weight.grad)
    if away:
        torch.cuda.synchronize()  # the host computes with them


@torch.no_grad()
def _give_weights(optimizer: Optimizer, *_: Any) -> None:
    """After a step: the model computes with its masters, rounded."""
    for master, weight in moved(optimizer):
        if master is not weight and weight.grad is not None:
            here(weight).copy_(here(master), non_blocking=True)
            weight.grad = None


def _alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def _hidden_matrices(model: nn.Module, head: nn.Module) -> list[nn.Parameter]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(p) for module in (*embeddings, head) for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tables]


class StackedMuon(Muon):
    """torch's Muon with matrices of one shape together, and each of those that are spread over ranks orthogonalised by one
    rank: it travels there and back, where torch's would be gathered anew for every product. In float32 on a CPU, where
    torch's bfloat16 is some eight times slower. The state is the same."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[Any, list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                placements = p.placements if isinstance(p, DTensor) else None
                by_shape.setdefault((p.shape, placements), []).append((p, update))
            for (shape, _), pairs in by_shape.items():
                ratio = max(1.0, shape[0] / shape[1]) ** 0.5
                for few in _few(pairs):
                    updates = _orthogonalised([u for _, u in few], group)
                    for (p, _), update in zip(few, updates, strict=True):
                        part = here(p)
                        part.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * ratio)


def _few(pairs: list[tuple[nn.Parameter, Tensor]]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """As many as there are ranks to share them, or all."""
    first = pairs[0][0]
    size = first.device_mesh.size() if isinstance(first, DTensor) else len(pairs)
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _orthogonalised(updates: list[Tensor], group: dict[str, Any]) -> Tensor:
    """Matrices of one shape, or this rank's part of each, stacked: [n, rows, columns]."""
    stack = torch.stack([here(update) for update in updates])
    first = updates[0]
    if not isinstance(first, DTensor):
        return _nearest_orthogonal(stack, group)
    mesh, spread = first.device_mesh, [_of_stack(placement) for placement in first.placements]
    shape = torch.Size([len(updates), *first.shape])
    stride = (first.shape[0] * first.shape[1], first.shape[1], 1)
    parts = DTensor.from_local(stack, mesh, spread, run_check=False, shape=shape, stride=stride)
    mine = parts.redistribute(placements=[Shard(0)] * mesh.ndim)
    whole = _nearest_orthogonal(mine.to_local(), group)
    back = DTensor.from_local(whole, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride)
    return back.redistribute(placements=spread).to_local()


def _of_stack(placement: Any) -> Any:
    """Where a matrix's placement is in a stack of matrices."""
    if placement.is_replicate():
        return placement
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)


def _nearest_orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton–Schulz iteration towards them, [n, rows, columns]."""
    a, b, c = group["ns_coefficients"]
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x / x.flatten(1).norm(dim=1).clamp(min=group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def lr_factor(step: int, total: int, config: LrScheduleConfig) -> float:
    """Share of the peak learning rate at 0-based `step` of `total`."""
    warmup = config.warmup_steps or round(config.warmup_ratio * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup - 1))  # 1 at the last step, total − 1
    if config.shape == "constant":
        return 1.0
    if config.shape == "wsd":
        done = max(0.0, (done - (1 - config.decay)) / config.decay)
    shape = 0.5 + 0.5 * math.cos(math.pi * done) if config.shape == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def set_lr(optimizers: list[Optimizer], factor: float) -> float:
    """Set every group's learning rate; gives back the first group's, for the log."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    return float(optimizers[0].param_groups[0]["lr"])
