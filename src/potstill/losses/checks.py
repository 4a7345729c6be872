"""What the loss refuses, from shapes, types and settings alone: no device value is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from potstill.losses.divergences import DIVERGENCES
from potstill.types import CrossTarget, DenseTarget, SampledTarget, Target, TokenLogprobsTarget, TopKTarget

CROSS_METHODS = ("common_vocab", "projection", "span_likelihood", "uld")  # those of losses/cross_tokenizer.py


def check_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Sequence[tuple[float | Tensor, Target]],
    *,
    labels: Tensor | None,
    row_weight: Tensor | None,
    divergence: str,
    temperature: float,
    beta: float,
    alpha: float,
    ce_weight: float | Tensor,
    bias: Tensor | None,
    softcap: float | None,
    entropy_gate: float | None,
    chunk_rows: int | None,
    sharded: bool,
) -> None:
    check_settings(divergence, temperature, beta, alpha)
    _check_cap(softcap, "softcap")
    if entropy_gate is not None and not entropy_gate > 0:
        raise ValueError(f"entropy_gate must be above 0, not {entropy_gate}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, H] and [V, H]")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point, not {hidden.dtype} and {weight.dtype}")
    n, v = hidden.shape[0], weight.shape[0]
    if not v:
        raise ValueError("weight has no columns of the vocabulary: it must be [V, H] with V at least 1")
    _check_bias(bias, v, "bias")
    if isinstance(ce_weight, Tensor) and (ce_weight.shape != (n,) or not ce_weight.is_floating_point()):
        what = f"{list(ce_weight.shape)} of {ce_weight.dtype}"
        raise ValueError(f"ce_weight {what} must be a number, or [{n}], one a row, and floating point")
    if (isinstance(ce_weight, Tensor) or ce_weight) and labels is None:
        raise ValueError("ce_weight needs labels")
    if labels is not None and (labels.shape != (n,) or labels.dtype != torch.int64):
        raise ValueError(f"labels {list(labels.shape)} of {labels.dtype} must be [{n}] of torch.int64, one a row")
    if row_weight is not None and row_weight.shape != (n,):
        raise ValueError(f"row_weight {list(row_weight.shape)} must be [{n}], one a row")
    if row_weight is not None and not row_weight.is_floating_point():
        raise ValueError(f"row_weight must be floating point, not {row_weight.dtype}")
    for share, target in targets:
        if isinstance(share, Tensor) and share.shape != (n,):
            raise ValueError(f"the weight of a target {list(share.shape)} must be a number, or [{n}], one a row")
        if isinstance(target, DenseTarget):
            _check_dense(target, n, v, sharded)
        elif isinstance(target, TopKTarget | SampledTarget) and target.width is not None and target.width < 1:
            raise ValueError(f"the target's width must be at least 1, not {target.width}")
        elif isinstance(target, TopKTarget):
            _check_entries(target.ids, target.logprobs, n, "logprobs")
            if target.tail.shape != (n,) or not target.tail.is_floating_point():
                tail = f"{list(target.tail.shape)} of {target.tail.dtype}"
                raise ValueError(f"target tail {tail} must be [{n}], one a row, and floating point")
            if target.tail_samples is not None and (
                target.tail_samples.dim() != 2 or target.tail_samples.shape[0] != n or not target.tail_samples.shape[1]
            ):
                raise ValueError(f"target rest {list(target.tail_samples.shape)} must be [{n}, M], with M at least 1")
        elif isinstance(target, SampledTarget):
            _check_entries(target.ids, target.weights, n, "weights")
            if target.entropy is not None and target.entropy.shape != (n,):
                raise ValueError(f"target entropy {list(target.entropy.shape)} must be [{n}], one a row")
            if divergence != "forward_kl":
                raise ValueError(f"sampled targets are unbiased for forward_kl only, not for {divergence}")
        elif isinstance(target, CrossTarget):
            _check_cross(target, labels, temperature)
        elif isinstance(target, TokenLogprobsTarget):
            raise ValueError(
                "a TokenLogprobsTarget tells only how likely the text's own tokens are, and a divergence needs a "
                "distribution: "
                "losses.policy_gradient_kl learns from such targets"
            )
        else:
            raise ValueError(f"{type(target).__name__} is not a DenseTarget, TopKTarget, SampledTarget or CrossTarget")


def check_settings(divergence: str, temperature: float, beta: float, alpha: float) -> None:
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; there are {', '.join(DIVERGENCES)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature}")
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
    if not values.is_floating_point():
        raise ValueError(f"target {name} must be floating point, not {values.dtype}")


def _check_dense(target: DenseTarget, n: int, v: int, sharded: bool) -> None:
    if target.mean:
        shares, widths = sum(share for share, _ in target.mean), {part.width for _, part in target.mean}
        if abs(shares - 1) > 1e-6 or min(share for share, _ in target.mean) <= 0 or len(widths) > 1:
            raise ValueError(
                f"the distributions of a mean must have shares above 0 that sum to 1, not to {shares:g}, and be over as many "
                f"ids, not over {sorted(widths)}"
            )
        for _, part in target.mean:
            _check_dense(part, n, v, sharded)
        return
    if target.spelled is not None:
        rows = target.spelled.place.shape[0]
        if rows != n:
            raise ValueError(f"the teacher has {rows} rows and the student {n}")
        if not sharded and target.width > v:
            _refuse_wide(target.width, v)
        return
    source = target.logits if target.logits is not None else target.hidden
    if source is None or (target.logits is None and target.weight is None):
        raise ValueError("a DenseTarget needs hidden and weight, or logits")
    if source.dim() != 2 or not source.is_floating_point():
        what = f"{list(source.shape)} of {source.dtype}"
        raise ValueError(f"the teacher's hidden states or logits must be [N, …] and floating point, not {what}")
    if source.shape[0] != n:
        raise ValueError(f"the teacher has {source.shape[0]} rows and the student {n}")
    head = target.weight
    if target.logits is None and head is not None and (head.dim() != 2 or head.shape[1] != source.shape[1]):
        shapes = f"hidden {list(source.shape)} and weight {list(head.shape)}"
        raise ValueError(f"the teacher's {shapes} must be [N, H] and [V, H]")
    _check_bias(target.bias, target.width, "the teacher's bias")
    _check_cap(target.softcap, "the teacher's softcap")
    if not sharded and target.width > v:
        _refuse_wide(target.width, v)


def _check_cross(target: CrossTarget, labels: Tensor | None, temperature: float) -> None:
    count = target.chunks.first.shape[0]
    if target.method not in CROSS_METHODS:
        raise ValueError(f"unknown method {target.method!r} for two tokenizers; there are {', '.join(CROSS_METHODS)}")
    if labels is None:
        raise ValueError("a target of another tokenizer needs labels: the chunks' own tokens")
    if target.method == "span_likelihood" and temperature != 1.0:
        raise ValueError(
            f"the method chunk compares likelihoods of text, which are at temperature 1, not {temperature}"
        )
    if target.method != "span_likelihood" and target.start is None:
        raise ValueError(f"the method {target.method} needs what the teacher expects, not only how likely the text was")
    if isinstance(target.start, SampledTarget):
        raise ValueError("draws do not serve a teacher with another tokenizer: use top-k or dense targets")
    for name in ("token", "logprob", "inner"):
        if getattr(target, name).shape != (count,):
            raise ValueError(f"target {name} {list(getattr(target, name).shape)} must be [{count}], one a chunk")


def _check_bias(bias: Tensor | None, v: int, name: str) -> None:
    if bias is not None and bias.shape != (v,):
        raise ValueError(f"{name} {list(bias.shape)} must be [{v}], one an id")


def _check_cap(softcap: float | None, name: str) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name} must be above 0, not {softcap}")


def _refuse_wide(width: int, v: int) -> None:
    raise ValueError(f"the teacher has {width} ids and the student's head {v}: narrow the teacher to the shared ids")


def check_slices(sizes: Sequence[int], widths: Sequence[int], whole: int | None = None) -> None:
    """Every rank's number of the student's ids and of a dense teacher's: both cut at the same ids, the teacher's perhaps
    ending earlier. `whole`: how many ids the teacher has, where each rank has all of it."""
    if whole is not None and whole > sum(sizes):
        _refuse_wide(whole, sum(sizes))
    for rank, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        if width > size or (width < size and any(widths[rank + 1 :])):
            cuts = f"the teacher's vocabulary is cut into {list(widths)} and the student's into {list(sizes)}"
            raise ValueError(
                f"{cuts}: rank {rank} has other ids of the two. Cut both alike, or give each rank the whole teacher"
            )
