"""Optimizers and the learning rate as a plain function of the step: nothing to save but the optimizers' own state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from potstill.config import LrScheduleConfig, OptimizerConfig


def make_optimizers(model: nn.Module, head: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """AdamW, or Muon on the hidden matrices and AdamW on the rest (embeddings, head, norms, biases).

    Each parameter group carries its peak learning rate as `peak`.
    """
    hidden = _hidden_matrices(model, head) if config.name == "muon" else []
    taken = {id(p) for p in hidden}
    rest: dict[float, list[nn.Parameter]] = {config.weight_decay: [], 0.0: []}  # by weight decay
    for p in model.parameters():
        if p.requires_grad and id(p) not in taken:
            rest[config.weight_decay if p.dim() >= 2 else 0.0].append(p)
    fused = all(
        p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for some in rest.values() for p in some
    )
    groups = [{"params": some, "weight_decay": decay, "peak": config.lr} for decay, some in rest.items() if some]
    optimizers: list[Optimizer] = [AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)]
    if hidden:
        group = {"params": hidden, "peak": config.muon_lr}
        kind = Float32Muon if hidden[0].device.type == "cpu" else Muon
        optimizers.append(kind([group], lr=config.muon_lr, weight_decay=config.weight_decay, momentum=config.momentum))
    return optimizers


def _hidden_matrices(model: nn.Module, head: nn.Module) -> list[nn.Parameter]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(p) for module in (*embeddings, head) for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tables]


class Float32Muon(Muon):
    """torch's Muon with the orthogonalisation in float32 and matrices of one shape together. torch does it in bfloat16, one
    by one, which is right for a GPU and some eight times slower on a CPU without bfloat16 arithmetic. The state is the same.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                by_shape.setdefault(p.shape, []).append((p, update))
            for shape, pairs in by_shape.items():
                updates = _orthogonalised(torch.stack([u for _, u in pairs]), group)
                ratio = max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), update in zip(pairs, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * ratio)


def _orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton–Schulz iteration towards the nearest orthogonal matrices, [n, rows, columns]."""
    a, b, c = group["ns_coefficients"]
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
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
