"""The columns of the vocabulary that this rank holds, and sums over all of them.

Only row-sized vectors travel: a maximum and a sum for the softmax, and what the gradient needs of the divergence. The reduced
loss is the same on every rank, so nothing is reduced in the backward pass but the gradient of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.types import Dense, PrefixMarginalTarget, Target, refuse_wide


@dataclass(frozen=True)
class VocabShard:
    """One rank's slice of the vocabulary; without a group, all of it."""

    size: int
    widest: int  # size of the largest slice of any rank
    start: int = 0  # first global id held here
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.start == 0

    def held(self, width: int | None) -> int:
        """How many of this slice's ids a target over the first `width` ids has."""
        return self.size if width is None else min(max(width - self.start, 0), self.size)

    def largest(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(rows, dist.ReduceOp.MAX)

    def total(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(rows, dist.ReduceOp.SUM)

    def once(self, values: Tensor) -> Tensor:
        """What every rank has, as a summand of `total`."""
        return values if self.first else torch.zeros_like(values)

    def _reduced(self, rows: tuple[Tensor, ...], operation: dist.ReduceOp.RedOpType) -> tuple[Tensor, ...]:
        if self.group is None:
            return rows
        together = torch.stack(rows)
        dist.all_reduce(together, operation, group=self.group)
        return tuple(together)

    def joined(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Matrices [n, …] of equal width on every rank, side by side."""
        if self.group is None:
            return rows
        world = dist.get_world_size(self.group)
        parts = []
        for matrix in rows:
            everyone = [torch.empty_like(matrix) for _ in range(world)]
            dist.all_gather(everyone, matrix.contiguous(), group=self.group)
            parts.append(torch.cat(everyone, -1))
        return tuple(parts)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Global ids as columns of this slice (any column where they are elsewhere), and which are here (None: all)."""
        if self.group is None:
            return ids, None
        columns = ids - self.start
        inside = (columns >= 0) & (columns < self.size)
        return columns.clamp(0, self.size - 1), inside

    def scatter_add(self, matrix: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add values at global ids, in place; those of other ranks are left to them."""
        columns, inside = self.local(ids)
        return matrix.scatter_add_(-1, columns, values if inside is None else values * inside)

    def gather(self, logits: Tensor, ids: Tensor, elsewhere: float) -> Tensor:
        """Logits at global ids; `elsewhere` for those of other ranks."""
        columns, inside = self.local(ids)
        values = logits.gather(-1, columns)
        return values if inside is None else values.masked_fill(~inside, elsewhere)

    def lookup(self, values: Tensor, ids: Tensor, missing: float) -> Tensor:
        """Values [n, k] at global ids [n, k], the same on every rank; `missing`, the least there is, at ids nobody has."""
        if self.group is None:
            found = values.gather(-1, ids.clamp(max=values.shape[1] - 1))
            return torch.where(ids < values.shape[1], found, missing)
        return self.largest(self.gather(values, ids, missing))[0]

    def drop_(self, logits: Tensor, ids: Tensor) -> Tensor:
        """−inf at global ids, in place."""
        columns, inside = self.local(ids)
        if inside is None:
            return logits.scatter_(-1, columns, -math.inf)
        # Ids of other ranks must not overwrite a column here.
        return logits.scatter_reduce_(-1, columns, torch.where(inside, -math.inf, math.inf).to(logits.dtype), "amin")

    def logsumexp(self, logits: Tensor) -> Tensor:
        """[n], over the ids of all ranks."""
        if self.group is None:
            return logits.logsumexp(-1)
        (largest,) = self.largest(_widened(logits).amax(-1))
        (mass,) = self.total((logits - largest[:, None]).exp_().sum(-1))
        return largest + mass.log()

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1) if self.group is None else logits - self.logsumexp(logits)[:, None]

    def first_choice(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each row [n] and its global id [n]; of equal ones the first."""
        best, place = _widened(values).max(-1)
        if self.group is None:
            return best, place
        (largest,) = self.largest(best)
        (before,) = self.largest(-torch.where(best == largest, place + self.start, torch.iinfo(place.dtype).max))
        return largest, -before

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of all ranks' ids, on every rank."""
        if self.group is None:
            return logits
        room = logits.new_full((logits.shape[0], self.widest), -math.inf)
        room[:, : logits.shape[1]] = logits
        (everyone,) = self.joined(room)
        sizes = self._sizes(logits.shape[1], logits.device)
        return torch.cat(
            [part[:, :size] for part, size in zip(everyone.split(self.widest, -1), sizes, strict=True)], -1
        )

    def _sizes(self, width: int, device: torch.device) -> list[int]:
        assert self.group is not None
        everyone = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=device)
        everyone[dist.get_rank(self.group)] = width
        dist.all_reduce(everyone, group=self.group)
        found: list[int] = everyone.tolist()
        return found


def _widened(values: Tensor) -> Tensor:
    """A rank may hold none of a target's ids, and the largest of nothing is an error."""
    return values if values.shape[1] else values.new_full((values.shape[0], 1), -math.inf)


def sliced(
    weight: Tensor, bias: Tensor | None, width: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None, int | None]:
    """A head's rows that this rank holds, and how many of them are among its first `width` ids (None: all). With a group, head
    and bias are DTensors that are cut as `torch.chunk` cuts."""
    if group is None:
        return weight, bias, width
    most = -(-weight.shape[0] // dist.get_world_size(group))
    start = most * dist.get_rank(group)
    held = None if width is None else max(0, width - start)
    return local(weight), None if bias is None else local(bias), held


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, with its gradient."""
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def shard_targets(
    size: int, targets: Sequence[tuple[float | Tensor, Target]], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[VocabShard, tuple[tuple[float | Tensor, Target], ...], bool]:
    """This rank's ids, the targets cut to them, and whether every dense target is over all of the student's ids.

    A dense target that is whole on every rank (wider than any slice of the head) is narrowed to this rank's ids. The host
    waits here, once a call, for every rank's sizes: ranks must cut chunks alike, share a softmax alike and refuse alike, or
    they would wait for each other for ever.
    """
    widths = [target.width for _, target in targets if isinstance(target, Dense)]
    if group is None:
        return VocabShard(size, size), tuple(targets), all(width == size for width in widths)
    rank = dist.get_rank(group)
    everyone = torch.zeros(1 + len(widths), dist.get_world_size(group), dtype=torch.int64, device=device)
    everyone[:, rank] = torch.tensor([size, *widths])
    dist.all_reduce(everyone, group=group)
    sizes, *widths_of = everyone.tolist()
    starts = [0, *accumulate(sizes)]
    shard = VocabShard(size, max(sizes), starts[rank], group)
    cut, same_ids = [], True
    for share, target in targets:
        if isinstance(target, Dense):
            held = widths_of.pop(0)
            if isinstance(target, PrefixMarginalTarget) or min(held) > shard.widest:
                whole = held[rank]
                held = [min(max(whole - at, 0), n) for at, n in zip(starts, sizes, strict=False)]
                check_slices(sizes, held, whole)
                target = target.narrow(shard.start, held[rank])
            else:
                check_slices(sizes, held)
            same_ids = same_ids and held == sizes
        cut.append((share, target))
    return shard, tuple(cut), same_ids


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
