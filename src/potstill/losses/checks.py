"""What the loss refuses, from shapes, types and settings alone: no device value is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from potstill.losses.divergences import DIVERGENCES
from potstill.types import DenseTarget, SampledTarget, Target, TopKTarget


def check_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Sequence[tuple[float, Target]],
    labels: Tensor | None,
    row_weight: Tensor | None,
    divergence: str,
    temperature: float,
    beta: float,
    alpha: float,
    ce_weight: float,
    group: object | None,
) -> None:
    check_settings(divergence, temperature, beta, alpha)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, H] and [V, H]")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point, not {hidden.dtype} and {weight.dtype}")
    n, v = hidden.shape[0], weight.shape[0]
    if ce_weight and labels is None:
        raise ValueError("ce_weight needs labels")
    if labels is not None and (labels.shape != (n,) or labels.dtype != torch.int64):
        raise ValueError(f"labels {list(labels.shape)} of {labels.dtype} must be [{n}] of torch.int64, one a row")
    if row_weight is not None and row_weight.shape != (n,):
        raise ValueError(f"row_weight {list(row_weight.shape)} must be [{n}], one a row")
    for _, target in targets:
        if isinstance(target, DenseTarget):
            _check_dense(target, n, v, group is not None)
        elif isinstance(target, TopKTarget):
            _check_entries(target.ids, target.logprobs, n, "logprobs")
            if target.tail.shape != (n,):
                raise ValueError(f"target tail {list(target.tail.shape)} must be [{n}], one a row")
        elif isinstance(target, SampledTarget):
            _check_entries(target.ids, target.weights, n, "weights")
            if divergence != "forward_kl":
                raise ValueError(f"sampled targets are unbiased for forward_kl only, not for {divergence}")
        else:
            raise ValueError(f"{type(target).__name__} is not a DenseTarget, TopKTarget or SampledTarget")


def check_settings(divergence: str, temperature: float, beta: float, alpha: float) -> None:
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; there are {', '.join(DIVERGENCES)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 and 1, not {beta}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}")


def _check_entries(ids: Tensor, values: Tensor, n: int, name: str) -> None:
    if ids.dim() != 2 or ids.shape[0] != n or ids.shape != values.shape or not ids.shape[1]:
        shapes = f"target ids {list(ids.shape)} and {name} {list(values.shape)}"
        raise ValueError(f"{shapes} must both be [{n}, K], with K at least 1")
    if ids.dtype != torch.int64:
        raise ValueError(f"target ids must be torch.int64, not {ids.dtype}")


def _check_dense(target: DenseTarget, n: int, v: int, sharded: bool) -> None:
    source = target.logits if target.logits is not None else target.hidden
    if source is None or (target.logits is None and target.weight is None):
        raise ValueError("a DenseTarget needs hidden and weight, or logits")
    if source.shape[0] != n:
        raise ValueError(f"the teacher has {source.shape[0]} rows and the student {n}")
    if target.width > v:
        raise ValueError(
            f"the teacher has {target.width} ids and the student's head {v}: narrow the teacher to the shared ids"
        )
