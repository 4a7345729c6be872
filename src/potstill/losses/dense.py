"""A dense teacher's logits at some rows: its head's product, ready ones, the mean of several distributions, or one over another
vocabulary in the student's ids.

b rows of a block, V student ids (this rank's), W teacher ids.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.parallel.vocab import VocabShard
from potstill.transfer import to_device
from potstill.types import Dense, HiddenTarget, MeanTarget, PrefixMarginalTarget, PrefixTensors

UNLIKELY = 20.0  # nats below the likeliest: an id of the student's that no token of the teacher's leads to
MARGINAL_BYTES = 32 * 2**20  # of the teacher's probabilities that are summed up at once


def target_logits(
    target: Dense, rows: slice, out: Tensor | None = None, temperature: float = 1.0, shard: VocabShard | None = None
) -> Tensor:
    """A dense teacher's logits at some rows, of this rank's ids. The mean of several is one at a temperature."""
    if isinstance(target, HiddenTarget):
        return target.head.logits(target.hidden[rows], out)
    if isinstance(target, PrefixMarginalTarget):
        return prefix_marginal_logits(target, rows, temperature, shard, out)
    if isinstance(target, MeanTarget):
        logits = _mean_log_probs(target, rows, temperature, shard).mul_(temperature)
    else:
        logits = target.logits[rows]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) if out is None else logits
    return logits if out is None else out.copy_(logits)


def _mean_log_probs(target: MeanTarget, rows: slice, temperature: float, shard: VocabShard | None) -> Tensor:
    shard = shard or VocabShard(target.width, target.width)
    total: Tensor | None = None
    for share, part in zip(target.shares, target.parts, strict=True):
        logp = target_logits(part, rows, None, temperature, shard) / temperature  # a copy: ready logits are not ours
        (largest,) = shard.largest(logp.amax(-1) if logp.shape[1] else logp.new_full(logp.shape[:1], -math.inf))
        (mass,) = shard.total(logp.sub_(largest[:, None]).exp().sum(-1))
        logp.sub_(mass.log_()[:, None]).add_(math.log(share))
        total = logp if total is None else torch.logaddexp(total, logp, out=total)
    assert total is not None
    return total


def prefix_marginal_logits(
    target: PrefixMarginalTarget, rows: slice, temperature: float, shard: VocabShard | None, out: Tensor | None
) -> Tensor:
    """A teacher's logits as ones of the student's tokens: each teacher id's probability goes to the student's first token of
    what is left of it, among those that begin with what is already written. They are not normalised, as no logits are."""
    shard = shard or VocabShard(target.width, target.width)
    start, stop, _ = rows.indices(len(target.place_host))
    if out is None:
        width = shard.held(target.width)
        out = torch.empty(stop - start, width, device=target.place.device, dtype=target.beyond.dtype)
    step = max(1, MARGINAL_BYTES // (4 * max(target.source.width, shard.widest)))
    for first in range(start, stop, step):
        some = slice(first, min(first + step, stop))
        _marginalise(target, some, temperature, shard.start, out[first - start : some.stop - start])
    return out


def _marginalise(target: PrefixMarginalTarget, rows: slice, temperature: float, start: int, out: Tensor) -> None:
    """Logits of some rows in the student's columns from `start` on, in `out` [b, V]."""
    width = out.shape[1]
    low, high = int(target.place_host[rows.start]), int(target.place_host[rows.stop - 1]) + 1
    z = target_logits(target.source, slice(low, high)).to(out.dtype)
    if temperature != 1.0:
        z = z / temperature
    largest, at = z.amax(-1, keepdim=True), target.place[rows] - low
    if width:
        spread = _spread_whole(target.table, z, largest, slice(start, start + width))
        # Where every row has a place of its own, in order, there is nothing to choose.
        each = len(at) == len(z) and bool((np.diff(target.place_host[rows]) == 1).all())
        out.copy_(spread if each else spread.index_select(0, at))
    odd = np.flatnonzero((target.node_host[rows] > 0) | target.odd_host[rows])
    if len(odd) and width:
        _marginalise_odd(target, rows, odd, z, largest, at, start, out)
    if temperature != 1.0:
        out.mul_(temperature)


def _spread_whole(table: PrefixTensors, z: Tensor, largest: Tensor, columns: slice) -> Tensor:
    """Logits in the student's columns where nothing is written yet: most have one teacher id, the others the sum of several."""
    found = z.index_select(1, table.main[columns].clamp(min=0))
    begin, end = np.searchsorted(table.host.nowhere, (columns.start, columns.stop))
    if begin < end:
        where = table.nowhere[begin:end] - columns.start
        found.index_copy_(1, where, (largest - UNLIKELY).expand(-1, len(where)))
    begin, end = np.searchsorted(table.host.more_then, (columns.start, columns.stop))
    if begin < end:
        slots = table.more_slot[begin:end] - table.more_slot[begin]
        first, last = (int(table.host.more_slot[x]) for x in (begin, end - 1))
        where = table.several[first : last + 1] - columns.start
        mass = (z.index_select(1, table.more_token[begin:end]) - largest).exp_()
        total = (found.index_select(1, where) - largest).exp_().scatter_add_(1, slots.expand_as(mass), mass)
        found.index_copy_(1, where, total.log_().add_(largest))
    return found


def _marginalise_odd(
    target: PrefixMarginalTarget,
    rows: slice,
    odd: npt.NDArray[np.int64],
    z: Tensor,
    largest: Tensor,
    at: Tensor,
    start: int,
    out: Tensor,
) -> None:
    """The rows where some of the teacher's next token is written, or it was not written as usual."""
    width, table = out.shape[1], target.table

    def column(ids: Tensor) -> Tensor:
        """One more column takes what belongs nowhere, or elsewhere."""
        here = ids - start
        return torch.where((ids >= 0) & (here >= 0) & (here < width), here, width)

    where = to_device(odd, z.device)
    place, level = at[where], largest[at[where]]
    nodes = target.node_host[rows][odd]
    begun = np.flatnonzero(nodes)
    actual = z[place, target.actual[rows][where]] + target.beyond[rows][where].to(z.dtype)
    mass = torch.nn.functional.pad((out[where] - level).exp_(), (0, 1))
    if len(begun):
        sizes = table.host.begin[nodes[begun] + 1] - table.host.begin[nodes[begun]]
        into, counts, ends = (to_device(x, z.device) for x in (begun, sizes, np.cumsum(sizes)))
        mass[into] = 0.0
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=z.device), counts, output_size=int(sizes.sum()))
        entry = (
            torch.arange(len(owner), device=z.device)
            + (table.begin[target.node[rows][where[into]]] - (ends - counts))[owner]
        )
        each = z[place[into][owner], table.token[entry]]
        # The likeliest that begins so may be far below the likeliest of all; and what was written need not be among them.
        own_level = actual[into].scatter_reduce(0, owner, each, "amax")
        level[into] = own_level[:, None]
        each = (each - own_level[owner]).exp_()
        mass.view(-1).index_add_(0, into[owner] * (width + 1) + column(table.then[entry]), each)
    # What was really written counts as it was written, or goes on into the teacher's further tokens.
    chosen = (actual - level.squeeze(-1)).exp_()[:, None]
    mass.scatter_add_(1, column(target.usual[rows][where])[:, None], -chosen)
    mass.scatter_add_(1, column(target.own[rows][where])[:, None], chosen)
    out[where] = mass[:, :width].clamp_(min=math.exp(-UNLIKELY)).log_().add_(level)


def log_probs(logits: Tensor, shard: VocabShard | None = None) -> Tensor:
    """log softmax, floored: see divergences.LOG_FLOOR."""
    return (torch.log_softmax(logits, -1) if shard is None else shard.log_softmax(logits)).clamp_(min=LOG_FLOOR)
