"""What the loss refuses, from shapes, types and settings alone: no device value is read. What a target must be like, it says
itself (`Target.check`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from potstill.losses.divergences import DIVERGENCES
from potstill.types import Head, Target, TargetCheck, expect, refuse_wide


def check_call(
    hidden: Tensor,
    head: Head,
    targets: Sequence[tuple[float | Tensor, Target]],
    *,
    labels: Tensor | None,
    row_weight: Tensor | None,
    divergence: str,
    temperature: float,
    beta: float,
    alpha: float,
    ce_weight: float | Tensor,
    entropy_gate: float | None,
    chunk_rows: int | None,
    sharded: bool,
) -> None:
    check_settings(divergence, temperature, beta, alpha)
    if entropy_gate is not None and not entropy_gate > 0:
        raise ValueError(f"entropy_gate must be above 0, not {entropy_gate}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
    head.check(hidden)
    if not head.width:
        raise ValueError("weight has no columns of the vocabulary: it must be [V, H] with V at least 1")
    n = hidden.shape[0]
    if (isinstance(ce_weight, Tensor) or ce_weight) and labels is None:
        raise ValueError("ce_weight needs labels")
    if labels is not None:
        expect("labels", labels, n, integer=True)
    shares = [("the weight of a target", share) for share, _ in targets]
    for name, value in (("row_weight", row_weight), ("ce_weight", ce_weight), *shares):
        if isinstance(value, Tensor):
            expect(name, value, n)
    fit = TargetCheck(n, None if sharded else head.width, divergence, temperature, labels is not None)
    for _, target in targets:
        if not isinstance(target, Target):
            raise ValueError(f"{type(target).__name__} is not a Target: DenseTarget(…), TopKTarget, SampledTarget, …")
        target.check(fit)


def check_settings(divergence: str, temperature: float, beta: float, alpha: float) -> None:
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; there are {', '.join(DIVERGENCES)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 and 1, not {beta}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}")


def check_slices(sizes: Sequence[int], widths: Sequence[int], whole: int | None = None) -> None:
    """Every rank's number of the student's ids and of a dense teacher's: both cut at the same ids, the teacher's perhaps
    ending earlier. `whole`: how many ids the teacher has, where each rank has all of it."""
    if whole is not None and whole > sum(sizes):
        refuse_wide(whole, sum(sizes))
    for rank, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        if width > size or (width < size and any(widths[rank + 1 :])):
            cuts = f"the teacher's vocabulary is cut into {list(widths)} and the student's into {list(sizes)}"
            raise ValueError(
                f"{cuts}: rank {rank} has other ids of the two. Cut both alike, or give each rank the whole teacher"
            )
