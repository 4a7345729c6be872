"""Rows of a call as the kernels see them: what every kind of target asks about them, and how a program is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.rows import LOG2_E, Call
from potstill.parallel.vocab import VocabShard

BLOCK, WARPS = 4096, 8  # columns at a time, and the warps that share them: at most 128 registers on every target
LN_2 = math.log(2)
TINY = torch.finfo(torch.float32).tiny
Stats = tuple[Tensor, Tensor]  # [n] each: the maximum of a side's logits, and the mass above it; in base 2


@dataclass(frozen=True)
class KernelChunk:
    """n rows with raw logits `z` [n, V], of which each row has room for one more column."""

    z: Tensor
    grad: Tensor | None  # where the gradient goes, which may be `z`; None: none is wanted
    rows: slice
    call: Call

    @property
    def shard(self) -> VocabShard:
        return self.call.shard

    @property
    def scale(self) -> float:
        return LOG2_E / self.call.params.temperature

    @property
    def cap(self) -> float:
        return self.call.softcap or 1.0

    def run(self, program: Any, *arguments: Any, **constants: Any) -> None:
        """One instance for each row."""
        capped = self.call.softcap is not None
        with _on(self.z.device):
            program[(len(self.z),)](*arguments, CAP=capped, BLOCK=BLOCK, num_warps=WARPS, **constants)

    def of_rows(self, weight: float | Tensor) -> Tensor:
        """A weight as a vector."""
        if isinstance(weight, Tensor):
            return weight[self.rows].float()
        return self.z.new_full((len(self.z),), weight)

    def kd(self, value: Tensor) -> Tensor:
        ((share, comparison),) = self.call.comparisons
        return value * comparison.scale(self.call.params) * self.of_rows(share)

    def kd_weight(self, factor: float) -> Tensor:
        """What the divergence's gradient is multiplied by, given the factor that it lacks."""
        call, ((share, comparison),) = self.call, self.call.comparisons
        factor *= comparison.scale(call.params) / call.params.temperature * call.kd_weight * call.logit_scale
        return self.of_rows(call.row_weight) * self.of_rows(share) * factor

    @property
    def ce_weighs(self) -> bool:
        given = isinstance(self.call.ce_weight, Tensor) or bool(self.call.ce_weight)
        return given and self.call.labels is not None

    def ce_weight(self) -> Tensor:
        return self.of_rows(self.call.row_weight) * self.of_rows(self.call.ce_weight) * self.call.logit_scale

    def label(self) -> tuple[Tensor, Tensor]:
        """Each row's label as a column here (−1: another rank's, or none), and its logit, 0 on other ranks."""
        if self.call.labels is None:
            return torch.full((len(self.z),), -1, device=self.z.device), self.z.new_zeros(len(self.z))
        ids = self.call.labels[self.rows]
        column, inside = self.shard.local(ids)
        logit = self.shard.gather(self.z, ids[:, None], 0.0).squeeze(-1)
        return column if inside is None else torch.where(inside, column, -1), self.capped(logit)

    def cross_entropy(self, stats: Stats, label: Tensor, logit: Tensor) -> Tensor:
        """From the softmax over all ids at T = 1, at the labels that are here."""
        found = (stats[1].log() + (stats[0] * LN_2 - logit)).clamp_(max=-LOG_FLOOR)
        return torch.where(label >= 0, found, 0.0)

    def capped(self, raw: Tensor) -> Tensor:
        cap = self.call.softcap
        return raw if cap is None else raw.div(cap).tanh_().mul_(cap)

    def slope(self, raw: Tensor) -> Tensor | float:
        """Of the cap, at raw logits."""
        cap = self.call.softcap
        return 1.0 if cap is None else 1.0 - raw.div(cap).tanh_().square_()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton starts programs on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def reduced(
    shard: VocabShard, pairs: Sequence[Stats], *sums: Callable[[Sequence[Tensor]], Tensor]
) -> tuple[list[Stats], list[Tensor]]:
    """The statistics of this rank's ids as those of all ranks' ids, and sums over the ranks: each a function of the pairs'
    maxima over all ranks, since the weights in it are relative to one of them."""
    if shard.group is None:
        return [(m, z.clamp(min=TINY)) for m, z in pairs], [part([m for m, _ in pairs]) for part in sums]
    maxima = shard.largest(*(m for m, _ in pairs))
    masses = [z * torch.exp2(m - largest) for (m, z), largest in zip(pairs, maxima, strict=True)]
    total = shard.total(*masses, *(part(maxima) for part in sums))
    found = [(m, z.clamp(min=TINY)) for m, z in zip(maxima, total, strict=False)]
    return found, list(total[len(pairs) :])
