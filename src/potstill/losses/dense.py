"""A dense teacher's logits at some rows: its head's product, ready ones, the mean of several distributions, or one over another
vocabulary spelled in the student's.

b rows of a block, V student ids (this rank's), W teacher ids.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.vocab_parallel import VocabShard
from potstill.types import DenseTarget, Spelling

UNLIKELY = 20.0  # nats below the likeliest: an id of the student's that no token of the teacher's leads to
SPELLED_BYTES = 32 * 2**20  # of the teacher's probabilities that are spelled at once


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """softcap(scale · (hidden · weightᵀ + bias)), in float32 at least."""
    if out is None or out.dtype != hidden.dtype:
        product = hidden @ weight.t()
        logits = product.to(torch.promote_types(hidden.dtype, torch.float32)) if out is None else out.copy_(product)
    else:
        logits = torch.mm(hidden, weight.t(), out=out)
    if bias is not None:
        logits += bias
    if logit_scale != 1.0:
        logits *= logit_scale
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def target_logits(
    target: DenseTarget,
    rows: slice,
    out: Tensor | None = None,
    temperature: float = 1.0,
    columns: VocabShard | None = None,
) -> Tensor:
    """A dense teacher's logits at some rows. The mean of several is one at a temperature."""
    if target.mean:
        mean = _mean_log_probs(target, rows, temperature, columns).mul_(temperature)
        return mean if out is None else out.copy_(mean)
    if target.spelled is not None:
        return spelled_logits(target.spelled, rows, temperature, columns, out)
    if target.logits is not None:
        logits = target.logits[rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) if out is None else out.copy_(logits)
    assert target.hidden is not None and target.weight is not None
    weight = target.weight.to(target.hidden.dtype)
    return head_logits(target.hidden[rows], weight, target.bias, target.softcap, target.logit_scale, out)


def _mean_log_probs(target: DenseTarget, rows: slice, temperature: float, columns: VocabShard | None) -> Tensor:
    columns = columns or VocabShard(target.width, target.width)
    total: Tensor | None = None
    for share, part in target.mean:
        logp = target_logits(part, rows) / temperature  # a copy: ready logits are not ours
        (largest,) = columns.largest(logp.amax(-1) if logp.shape[1] else logp.new_full(logp.shape[:1], -math.inf))
        (mass,) = columns.total(logp.sub_(largest[:, None]).exp().sum(-1))
        logp.sub_(mass.log_()[:, None]).add_(math.log(share))
        total = logp if total is None else torch.logaddexp(total, logp, out=total)
    assert total is not None
    return total


def spelled_logits(
    spelling: Spelling, rows: slice, temperature: float, columns: VocabShard | None, out: Tensor | None
) -> Tensor:
    """A teacher's logits as ones of the student's tokens: each teacher id's probability goes to the student's first token of
    what is left of it, among those that begin with what is already written. They are not normalised, as no logits are."""
    columns = columns or VocabShard(spelling.students, spelling.students)
    start, stop, _ = rows.indices(len(spelling.place_host))
    if out is None:
        width = min(max(spelling.students - columns.start, 0), columns.size)
        out = torch.empty(stop - start, width, device=spelling.place.device, dtype=spelling.beyond.dtype)
    step = max(1, SPELLED_BYTES // (4 * max(spelling.source.width, columns.widest)))
    for first in range(start, stop, step):
        some = slice(first, min(first + step, stop))
        _spell(spelling, some, temperature, columns.start, out[first - start : some.stop - start])
    return out


def _spell(spelling: Spelling, rows: slice, temperature: float, start: int, out: Tensor) -> None:
    """Logits of some rows in the student's columns from `start` on, in `out` [b, V]."""
    width = out.shape[1]
    low, high = int(spelling.place_host[rows.start]), int(spelling.place_host[rows.stop - 1]) + 1
    z = target_logits(spelling.source, slice(low, high)).to(out.dtype)
    if temperature != 1.0:
        z = z / temperature
    largest, at = z.amax(-1, keepdim=True), spelling.place[rows] - low
    if width:
        spread = _spread_whole(spelling, z, largest, slice(start, start + width))
        # Where every row has a place of its own, in order, there is nothing to choose.
        each = len(at) == len(z) and bool((np.diff(spelling.place_host[rows]) == 1).all())
        out.copy_(spread if each else spread.index_select(0, at))
    odd = np.flatnonzero((spelling.node_host[rows] > 0) | spelling.odd_host[rows])
    if len(odd) and width:
        _spell_odd(spelling, rows, odd, z, largest, at, start, out)
    if temperature != 1.0:
        out.mul_(temperature)


def _spread_whole(spelling: Spelling, z: Tensor, largest: Tensor, columns: slice) -> Tensor:
    """Logits in the student's columns where nothing is written yet: most have one teacher id, the others the sum of several."""
    found = z.index_select(1, spelling.main[columns].clamp(min=0))
    begin, end = np.searchsorted(spelling.nowhere_host, (columns.start, columns.stop))
    if begin < end:
        where = spelling.nowhere[begin:end] - columns.start
        found.index_copy_(1, where, (largest - UNLIKELY).expand(-1, len(where)))
    begin, end = np.searchsorted(spelling.more_then_host, (columns.start, columns.stop))
    if begin < end:
        slots = spelling.more_slot[begin:end] - spelling.more_slot[begin]
        first, last = (int(spelling.slot_host[x]) for x in (begin, end - 1))
        where = spelling.several[first : last + 1] - columns.start
        mass = (z.index_select(1, spelling.more_token[begin:end]) - largest).exp_()
        total = (found.index_select(1, where) - largest).exp_().scatter_add_(1, slots.expand_as(mass), mass)
        found.index_copy_(1, where, total.log_().add_(largest))
    return found


def _spell_odd(
    spelling: Spelling,
    rows: slice,
    odd: npt.NDArray[np.int64],
    z: Tensor,
    largest: Tensor,
    at: Tensor,
    start: int,
    out: Tensor,
) -> None:
    """The rows where some of the teacher's next token is written, or it was not spelled as usual."""
    width = out.shape[1]

    def column(ids: Tensor) -> Tensor:
        """One more column takes what belongs nowhere, or elsewhere."""
        here = ids - start
        return torch.where((ids >= 0) & (here >= 0) & (here < width), here, width)

    where = torch.from_numpy(odd).to(z.device)
    place, level = at[where], largest[at[where]]
    nodes = spelling.node_host[rows][odd]
    begun = np.flatnonzero(nodes)
    mass = torch.nn.functional.pad((out[where] - level).exp_(), (0, 1))
    if len(begun):
        sizes = spelling.sizes_host[nodes[begun]]
        into, counts, ends = (torch.from_numpy(x).to(z.device) for x in (begun, sizes, np.cumsum(sizes)))
        mass[into] = 0.0
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=z.device), counts, output_size=int(sizes.sum()))
        entry = (
            torch.arange(len(owner), device=z.device)
            + (spelling.begin[spelling.node[rows][where[into]]] - (ends - counts))[owner]
        )
        each = z[place[into][owner], spelling.token[entry]]
        # The likeliest that begins so may be far below the likeliest of all.
        own_level = level[into].squeeze(-1).scatter_reduce(0, owner, each, "amax", include_self=False)
        level[into] = own_level[:, None]
        each = (each - own_level[owner]).exp_()
        mass.view(-1).index_add_(0, into[owner] * (width + 1) + column(spelling.then[entry]), each)
    # What was really written counts as it was spelled, or goes on into the teacher's further tokens.
    actual = z[place, spelling.actual[rows][where]] - level.squeeze(-1)
    chosen = (actual + spelling.beyond[rows][where].to(z.dtype)).exp_()[:, None]
    mass.scatter_add_(1, column(spelling.usual[rows][where])[:, None], -chosen)
    mass.scatter_add_(1, column(spelling.own[rows][where])[:, None], chosen)
    out[where] = mass[:, :width].clamp_(min=math.exp(-UNLIKELY)).log_().add_(level)


def log_probs(logits: Tensor) -> Tensor:
    """log softmax, floored: see divergences.LOG_FLOOR."""
    return torch.log_softmax(logits, -1).clamp_(min=LOG_FLOOR)
