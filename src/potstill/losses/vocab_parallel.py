"""The columns of the vocabulary that this rank holds, and sums over all of them.

Only row-sized vectors travel: a maximum and a sum for the softmax, and what the divergence itself sums up. The reduced loss
is the same on every rank, so nothing is reduced in the backward pass but the gradient of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """One rank's slice of the vocabulary; without a group, all of it."""

    size: int
    group: dist.ProcessGroup | None = None
    start: Tensor | None = None  # first global id held here, on the device: nothing is read from it

    @staticmethod
    def of(size: int, group: dist.ProcessGroup | None, device: torch.device) -> Columns:
        if group is None:
            return Columns(size)
        sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(sizes, torch.tensor([size], device=device), group=group)
        return Columns(size, group, sizes[: dist.get_rank(group)].sum())

    @property
    def first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def largest(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(rows, dist.ReduceOp.MAX)

    def total(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(rows, dist.ReduceOp.SUM)

    def _reduced(self, rows: tuple[Tensor, ...], operation: dist.ReduceOp.RedOpType) -> tuple[Tensor, ...]:
        if self.group is None:
            return rows
        together = torch.stack(rows)
        dist.all_reduce(together, operation, group=self.group)
        return tuple(together)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Global ids as columns of this slice (any column where they are elsewhere), and which are here (None: all)."""
        if self.start is None:
            return ids, None
        columns = ids - self.start
        inside = (columns >= 0) & (columns < self.size)
        return columns.clamp(0, self.size - 1), inside

    def gather(self, logits: Tensor, ids: Tensor, elsewhere: float) -> Tensor:
        """Logits at global ids; `elsewhere` for those of other ranks."""
        columns, inside = self.local(ids)
        values = logits.gather(-1, columns)
        return values if inside is None else values.masked_fill(~inside, elsewhere)
