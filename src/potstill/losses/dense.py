"""A dense teacher's logits at some rows: its head's product, ready ones, the mean of several distributions, or one over another
vocabulary spelled in the student's.

b rows of a block, V student ids (this rank's), W teacher ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.vocab_parallel import Columns
from potstill.types import DenseTarget, Spelling

SPELLED_BYTES = 16 * 2**20  # of the teacher's probabilities that are spelled at once


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
    columns: Columns | None = None,
) -> Tensor:
    """A dense teacher's logits at some rows. The mean of several is one at a temperature."""
    if target.mean:
        mean = _mean_log_probs(target, rows, temperature, columns).mul_(temperature)
        return mean if out is None else out.copy_(mean)
    if target.spelled is not None:
        return spelled_log_probs(target.spelled, rows, temperature, columns, out).mul_(temperature)
    if target.logits is not None:
        logits = target.logits[rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) if out is None else out.copy_(logits)
    assert target.hidden is not None and target.weight is not None
    weight = target.weight.to(target.hidden.dtype)
    return head_logits(target.hidden[rows], weight, target.bias, target.softcap, target.logit_scale, out)


def _mean_log_probs(target: DenseTarget, rows: slice, temperature: float, columns: Columns | None) -> Tensor:
    columns = columns or Columns(target.width, target.width)
    total: Tensor | None = None
    for share, part in target.mean:
        logp = target_logits(part, rows) / temperature  # a copy: ready logits are not ours
        (largest,) = columns.largest(logp.amax(-1) if logp.shape[1] else logp.new_full(logp.shape[:1], -math.inf))
        (mass,) = columns.total(logp.sub_(largest[:, None]).exp().sum(-1))
        logp.sub_(mass.log_()[:, None]).add_(math.log(share))
        total = logp if total is None else torch.logaddexp(total, logp, out=total)
    assert total is not None
    return total


def spelled_log_probs(
    spelling: Spelling, rows: slice, temperature: float, columns: Columns | None, out: Tensor | None
) -> Tensor:
    """A teacher's probabilities as ones of the student's tokens: each teacher id's goes to the student's first token of what is
    left of it, among those that begin with what is already written."""
    columns = columns or Columns(spelling.students, spelling.students)
    start, stop, _ = rows.indices(len(spelling.place_host))
    if out is None:
        width = min(max(spelling.students - columns.start, 0), columns.size)
        out = torch.empty(stop - start, width, device=spelling.place.device)
    step = max(1, SPELLED_BYTES // (4 * max(spelling.source.width, columns.widest)))  # the same on every rank
    for first in range(start, stop, step):
        some = slice(first, min(first + step, stop))
        here = out[first - start : some.stop - start]
        mass = _spell(spelling, some, temperature, columns.start, here)
        (total,) = columns.total(mass)
        here.div_(total.clamp(min=torch.finfo(out.dtype).tiny)[:, None]).log_()
    return out


def _spell(spelling: Spelling, rows: slice, temperature: float, start: int, out: Tensor) -> Tensor:
    """Probabilities of some rows in columns from `start` on, up to a factor, in `out` [b, V]; and their sums."""
    width = out.shape[1]

    def column(ids: Tensor) -> Tensor:
        """One more column takes what belongs nowhere, or elsewhere."""
        here = ids - start
        return torch.where((ids >= 0) & (here >= 0) & (here < width), here, width)

    low, high = int(spelling.place_host[rows.start]), int(spelling.place_host[rows.stop - 1]) + 1
    p = torch.softmax(target_logits(spelling.source, slice(low, high)) / temperature, -1).to(out.dtype)
    at, nodes = spelling.place[rows] - low, spelling.node_host[rows]
    spread = p.new_zeros(p.shape[0], width + 1).scatter_add_(1, column(spelling.first).expand_as(p), p)
    each = len(nodes) == p.shape[0] and bool((np.diff(spelling.place_host[rows]) == 1).all())
    found = spread if each else spread.index_select(0, at)
    if nodes.any():
        _spell_begun(spelling, rows, p, at, found, column)
    # What was really written may be spelled otherwise than usual, or go on into the teacher's further tokens.
    chosen = (p[at, spelling.actual[rows]] * spelling.beyond[rows].to(p.dtype).exp())[:, None]
    found.scatter_add_(1, column(spelling.usual[rows])[:, None], -chosen)
    found.scatter_add_(1, column(spelling.own[rows])[:, None], chosen)
    out.copy_(found[:, :width]).clamp_(min=0.0)
    return out.sum(-1)


def _spell_begun(
    spelling: Spelling, rows: slice, p: Tensor, at: Tensor, found: Tensor, column: Callable[[Tensor], Tensor]
) -> None:
    """The rows of `found` where some of the teacher's next token is written: of the tokens that begin so, the rests."""
    nodes = spelling.node_host[rows]
    places = np.flatnonzero(nodes)
    sizes = spelling.sizes_host[nodes[places]]
    begun, counts, ends = (torch.from_numpy(x).to(p.device) for x in (places, sizes, np.cumsum(sizes)))
    found[begun] = 0.0
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=p.device), counts, output_size=int(sizes.sum()))
    shift = spelling.begin[spelling.node[rows][begun]] - (ends - counts)
    entry = torch.arange(len(owner), device=p.device) + shift[owner]
    mass = p[at[begun][owner], spelling.token[entry]]
    found.view(-1).index_add_(0, begun[owner] * found.shape[1] + column(spelling.then[entry]), mass)


def log_probs(logits: Tensor) -> Tensor:
    """log softmax, floored: see divergences.LOG_FLOOR."""
    return torch.log_softmax(logits, -1).clamp_(min=LOG_FLOOR)
