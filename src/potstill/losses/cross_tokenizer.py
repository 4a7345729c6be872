"""Divergences between models with different tokenizers, at chunks of tokens that cover the same bytes.

Each side gives a proper distribution over *the chunk*, *every other first token* and *began as the chunk does, but left it*.
How these are matched is the method. The chunk's likelihood is the product of its tokens' probabilities (chain rule), so a chunk
teaches all of its rows: its first row by the buckets, the others by the likelihood alone.

F chunks that begin in a block, V student ids (this rank's), W teacher ids, K kept entries, P pairs, B buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from potstill.losses.dense import log_probs, target_logits
from potstill.losses.divergences import LOG_FLOOR, Block, LossParams, compared
from potstill.losses.rows import Call, Comparison, softmax
from potstill.parallel.vocab import VocabShard
from potstill.types import ChunkTarget, Dense, Relation, TopKTarget

ULD_ENTRIES = 256
INNER_BYTES = 8 * 2**20  # of the rows within chunks that are looked at together


class ChunkRows(Comparison):
    """A target of chunks, with what is found out while its rows go by."""

    def __init__(self, target: ChunkTarget) -> None:
        self.target, self.joined = target, target.chunks.inner_host
        self._inner = torch.zeros(0)  # [C]; sum of the student's log-probabilities of a chunk's tokens after the first
        self._pull = torch.zeros(0)  # [C]; the loss's derivative with respect to that sum
        self._ready: Tensor | None = None  # a dense teacher's logits at the chunks that begin in these rows …
        self._offset = 0  # … of which this is the first

    def scale(self, params: LossParams) -> float:
        return params.temperature if self.target.method == "uld" else super().scale(params)

    def begin(self, logits: Tensor, chunk: slice, call: Call) -> None:
        chunks, start = self.target.chunks, self.target.start
        begin, end = np.searchsorted(chunks.first_host, (chunk.start, chunk.stop))
        self._offset = int(begin)
        if isinstance(start, Dense):
            self._ready = target_logits(start, slice(begin, end))
        if not len(self._inner):
            self._inner, self._pull = torch.zeros(2, len(chunks.first), dtype=logits.dtype, device=logits.device)
        begin, end = np.searchsorted(chunks.inner_host, (chunk.start, chunk.stop))
        step = max(1, INNER_BYTES // (logits.element_size() * call.shard.widest))  # the same on every rank
        for here in range(int(begin), int(end), step):
            some = slice(here, min(here + step, int(end)))
            rows = chunks.inner[some]
            logq = _label_logq(logits.index_select(0, rows - chunk.start), rows, call, self.target.relation)
            self._inner.index_add_(0, chunks.owner[some], logq)

    def loss(self, z: Tensor, rows: slice, call: Call) -> tuple[Tensor, float]:
        """Per-row values, each chunk's at its first row, and in place of the logits the gradient."""
        target, shard, chunks = self.target, call.shard, self.target.chunks
        assert call.labels is not None
        labels = call.labels[rows]
        z[:, shard.held(target.relation.sizes[0]) :] = -math.inf
        q = call.buffers("q", *z.shape)
        (mass,), _ = softmax(shard, (z, q))
        z.sub_(mass.log()[:, None])
        values = z.new_zeros(z.shape[0])
        begin, end = map(int, np.searchsorted(chunks.first_host, (rows.start, rows.stop)))
        first_rows, gradient = chunks.first[begin:end] - rows.start, None
        if begin < end:
            logq, token = z.index_select(0, first_rows), labels[first_rows]
            (own,) = shard.total(shard.gather(logq, token[:, None], 0.0).squeeze(-1))
            ours = Student(own, self._inner[begin:end], token, logq, q.index_select(0, first_rows), shard)
            teacher = self._expected(slice(begin, end), call.params.temperature, z.dtype)
            values[first_rows], gradient, self._pull[begin:end] = METHODS[target.method](
                ours, teacher, target, call.params
            )
        z.zero_()
        if gradient is not None:
            z[first_rows] = gradient
        begin, end = map(int, np.searchsorted(chunks.inner_host, (rows.start, rows.stop)))
        if begin < end:
            at = chunks.inner[begin:end] - rows.start
            z[at] = _towards(q.index_select(0, at), labels[at], self._pull[chunks.owner[begin:end]], shard)
        return shard.once(values), 1.0

    def _expected(self, at: slice, temperature: float, dtype: torch.dtype) -> Expected:
        target, start = self.target, self.target.start
        token, inner, logprob = target.token[at], target.inner[at].to(dtype), target.logprob[at].to(dtype)
        if self._ready is not None:
            logp = log_probs(self._ready[at.start - self._offset : at.stop - self._offset].to(dtype) / temperature)
            return Expected(logp.gather(-1, token[:, None]).squeeze(-1), inner, token, logp)
        if isinstance(start, TopKTarget):
            logp = start.logprobs[at].to(dtype).clamp(min=LOG_FLOOR)
            return Expected(logprob, inner, token, logp, start.ids[at], start.tail[at].to(dtype))
        return Expected(logprob, inner, token, logprob.new_zeros(len(logprob), 0))


def _label_logq(z: Tensor, rows: Tensor, call: Call, relation: Relation) -> Tensor:
    """Log-probabilities of the tokens that come next, from raw logits, which are used up."""
    assert call.labels is not None
    if call.softcap is not None:
        z.div_(call.softcap).tanh_().mul_(call.softcap)
    z.div_(call.params.temperature)
    z[:, call.shard.held(relation.sizes[0]) :] = -math.inf
    (own,) = call.shard.total(call.shard.gather(z, call.labels[rows, None], 0.0).squeeze(-1))
    (largest,) = call.shard.largest(z.amax(-1))
    (mass,) = call.shard.total(z.sub_(largest[:, None]).exp_().sum(-1))
    return (own - largest - mass.log()).clamp_(min=LOG_FLOOR)


@dataclass(frozen=True)
class Side:
    """One of the models where F chunks begin."""

    log_first: Tensor  # [F]; log-probability of the chunk's first token …
    inner: Tensor  # [F]; … and of its others
    token: Tensor  # [F]; the first, a global id

    @property
    def log_chunk(self) -> Tensor:
        return self.log_first + self.inner

    @property
    def leaving(self) -> Tensor:
        """Mass that begins as the chunk does and then leaves it; not by a subtraction, which would lose small ones."""
        return -self.log_first.exp() * torch.expm1(self.inner)


@dataclass(frozen=True)
class Student(Side):
    logq: Tensor  # [F, V]
    q: Tensor  # [F, V]
    shard: VocabShard

    def put(self, matrix: Tensor, ids: Tensor, values: Tensor) -> None:
        """matrix[f, ids[f]] = values[f], where the id is one of this rank's."""
        where, inside = self.shard.local(ids[:, None])
        if inside is not None:
            values = torch.where(inside.squeeze(-1), values, matrix.gather(-1, where).squeeze(-1))
        matrix.scatter_(-1, where, values[:, None])


@dataclass(frozen=True)
class Expected(Side):
    """The teacher."""

    logp: Tensor  # [F, W], or [F, K] at `ids`
    ids: Tensor | None = None
    tail: Tensor | None = None  # [F]; log-mass of the rest of a truncated one

    @property
    def own(self) -> Tensor:
        """Of a truncated one: which entries are the chunk's first token."""
        assert self.ids is not None
        return self.ids == self.token[:, None]


Gradient = tuple[Tensor, Tensor, Tensor]  # values [F], gradient at the first rows' logits [F, V], pull [F]


def _towards(q: Tensor, labels: Tensor, pull: Tensor, shard: VocabShard) -> Tensor:
    """pull · ∂ log q(label) / ∂ logits, in place of q."""
    return shard.scatter_add(q.mul_(-pull[:, None]), labels[:, None], pull[:, None])


def _compared(logp: Tensor, logq: Tensor, params: LossParams, unreached: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The divergence over buckets [F, B] that are the same on every rank, and its gradient at the bucket logits. `unreached`:
    buckets that no token of the student's leads to: forward KL is then that of the other buckets, times the teacher's mass on
    them, which has the same gradient and not the cost of what cannot be learnt."""
    logp, logq = logp.clamp(min=LOG_FLOOR), logq.clamp(min=LOG_FLOOR)
    q, p = logq.exp(), logp.exp()
    if unreached is not None:
        beyond = torch.where(unreached, p, 0.0).sum(-1, keepdim=True).clamp(max=1.0)
        reached = (1 - beyond) * torch.log1p(-beyond).clamp(
            min=LOG_FLOOR
        )  # what the others' sum lacks to be a divergence
        shift = reached / beyond.clamp(min=torch.finfo(p.dtype).tiny)
        logq = torch.where(unreached, logp + torch.where(beyond > 0, shift, 0.0), logq)
    block = Block(logp, logq, p, q, torch.empty_like(logp))
    value, factor = compared(block, (logp > LOG_FLOOR).to(logp.dtype), params)
    # No token of the student's leads to an empty bucket: what pulls towards it pulls on nothing.
    gradient = (block.logq * factor).masked_fill_(q == 0, 0.0)
    return value, gradient - q * gradient.sum(-1, keepdim=True)


def _log(mass: Tensor) -> Tensor:
    return mass.clamp(min=0.0).log()


def _over(gradient: Tensor, mass: Tensor) -> Tensor:
    """Gradient for each unit of a bucket's mass; an empty bucket has none."""
    return torch.where(mass > 0, gradient / mass.clamp(min=torch.finfo(mass.dtype).tiny), 0.0)


def shared(first: Student, teacher: Expected, target: ChunkTarget, params: LossParams) -> Gradient:
    """The chunk · each pair of ids that mean the same · all else."""
    return (
        _shared_dense(first, teacher, target.relation, params)
        if teacher.ids is None
        else _shared_top_k(first, teacher, target.relation, params)
    )


def _shared_dense(first: Student, teacher: Expected, relation: Relation, params: LossParams) -> Gradient:
    shard = first.shard
    pairs, alone = (_here(relation, name, shard) for name in ("student", "student_alone"))
    ours, our_alone = relation.student[pairs] - shard.start, relation.student_alone[alone] - shard.start
    count = relation.student.shape[0]
    # A bucket's logarithm is on the rank that has its id: the largest over the ranks is it.
    logq = first.q.new_full((first.q.shape[0], count), -math.inf)
    logq[:, pairs] = first.logq.index_select(1, ours)
    (logq,) = shard.largest(logq)
    logp = teacher.logp.index_select(1, relation.teacher)
    # The pairs of the chunk's own first tokens are no buckets: their mass is the chunk's, or the rest's.
    place_s, place_t = relation.place_student[first.token], relation.place_teacher[teacher.token]
    partner = relation.student[place_t.clamp(min=0)]  # of the teacher's first token
    rest_q = first.leaving + _other(logq, place_t, place_s)
    rest_p = teacher.leaving + _other(logp, place_s, place_t)
    for place in (place_s, place_t):
        dropped = place.clamp(min=0)[:, None]
        for matrix in (logq, logp):
            matrix.scatter_(
                -1, dropped, torch.where(place >= 0, LOG_FLOOR, matrix.gather(-1, dropped).squeeze(-1))[:, None]
            )
    rest_q = rest_q + shard.total(_without(first.q.index_select(1, our_alone), -1 - place_s - alone.start).sum(-1))[0]
    p_alone = teacher.logp.index_select(1, relation.teacher_alone).exp()
    rest_p = rest_p + _without(p_alone, -1 - place_t).sum(-1)
    value, g = _compared(
        torch.cat([teacher.log_chunk[:, None], logp, _log(rest_p)[:, None]], -1),
        torch.cat([first.log_chunk[:, None], logq, _log(rest_q)[:, None]], -1),
        params,
    )
    for_rest = _over(g[:, -1], rest_q)
    gradient = first.q * for_rest[:, None]
    aside = gradient.gather(-1, shard.local(partner[:, None])[0]).squeeze(-1)
    gradient.index_copy_(1, ours, g[:, 1:-1][:, pairs])
    held = gradient.gather(-1, shard.local(partner[:, None])[0]).squeeze(-1)
    first.put(gradient, partner, torch.where(place_t >= 0, aside, held))
    first.put(gradient, first.token, g[:, 0] + first.leaving * for_rest)
    return value, gradient, g[:, 0] - first.log_chunk.exp() * for_rest


def _other(logs: Tensor, place: Tensor, but: Tensor) -> Tensor:
    """The mass of the pair at `place`, where there is one and it is not the one at `but`."""
    mass = logs.gather(-1, place.clamp(min=0)[:, None]).squeeze(-1).exp()
    return torch.where((place >= 0) & (place != but), mass, 0.0)


def _without(matrix: Tensor, column: Tensor) -> Tensor:
    """The matrix with one column of each row set to 0, where there is such a column."""
    if not matrix.shape[1]:
        return matrix
    inside = (column >= 0) & (column < matrix.shape[1])
    where = column.clamp(0, matrix.shape[1] - 1)[:, None]
    return matrix.scatter(-1, where, torch.where(inside[:, None], 0.0, matrix.gather(-1, where)))


def _shared_top_k(first: Student, teacher: Expected, relation: Relation, params: LossParams) -> Gradient:
    assert teacher.ids is not None
    place = relation.place_teacher[teacher.ids]
    ours = relation.student[place.clamp(min=0)]
    valid = (place >= 0) & ~teacher.own & (ours != first.token[:, None])
    ours = torch.where(valid, ours, first.token[:, None])  # harmless: that column is set last
    (logq,) = first.shard.largest(first.shard.gather(first.logq, ours, -math.inf))
    logq = logq.masked_fill(~valid, LOG_FLOOR)
    where, inside = first.shard.local(ours)
    kept = valid if inside is None else valid & inside
    rest = first.q.scatter_reduce(-1, where, torch.where(kept, 0.0, math.inf).to(first.q.dtype), "amin")
    first.put(rest, first.token, torch.zeros_like(first.leaving))
    rest_q = first.leaving + first.shard.total(rest.sum(-1))[0]
    value, g = _compared(
        torch.cat(
            [teacher.log_chunk[:, None], teacher.logp.masked_fill(~valid, LOG_FLOOR), _rest_of(teacher, valid)], -1
        ),
        torch.cat([first.log_chunk[:, None], logq, _log(rest_q)[:, None]], -1),
        params,
    )
    for_rest = _over(g[:, -1], rest_q)
    gradient = rest.mul_(for_rest[:, None])
    gradient.scatter_add_(-1, where, g[:, 1:-1].masked_fill(~kept, 0.0))
    first.put(gradient, first.token, g[:, 0] + first.leaving * for_rest)
    return value, gradient, g[:, 0] - first.log_chunk.exp() * for_rest


def _rest_of(teacher: Expected, buckets: Tensor) -> Tensor:
    """Log-mass [F, 1] of a truncated teacher's rest: its tail, the entries that are no bucket, and what left the chunk."""
    assert teacher.tail is not None
    own = teacher.own
    others = teacher.logp.masked_fill(buckets | own, -math.inf).exp().sum(-1)
    # Where the first token is none of the entries, it is in the tail, and the chunk has to be taken out of it.
    began = torch.where(own.any(-1), teacher.leaving, -teacher.log_chunk.exp())
    return _log(teacher.tail.exp() + others + began)[:, None]


def projection(first: Student, teacher: Expected, target: ChunkTarget, params: LossParams) -> Gradient:
    """The chunk · the teacher's ids, with the student's mass sent to them through the map · the rest."""
    relation, shard = target.relation, first.shard
    entries, lost = _here(relation, "start", shard), _here(relation, "unmapped", shard)
    start, end = relation.start[entries] - shard.start, relation.end[entries]
    value_of = relation.value[entries].to(first.q.dtype)
    mass = first.q.clone()  # all of the student's but the chunk's
    first.put(mass, first.token, first.leaving)
    sent = mass.new_zeros(mass.shape[0], relation.sizes[1]).index_add_(1, end, mass.index_select(1, start) * value_of)
    nowhere = mass.index_select(1, relation.unmapped[lost] - shard.start).sum(-1)
    sent, nowhere = shard.total(torch.cat([sent, nowhere[:, None]], -1))[0].split([relation.sizes[1], 1], -1)
    if teacher.ids is None:
        logp = teacher.logp.scatter(-1, teacher.token[:, None], _log(teacher.leaving)[:, None])
        logp = torch.cat([teacher.log_chunk[:, None], logp, torch.full_like(nowhere, -math.inf)], -1)
        masses = torch.cat([sent, nowhere], -1)
    else:
        own = teacher.own
        kept = torch.where(own, _log(teacher.leaving)[:, None], teacher.logp)
        out_of_tail = torch.where(own.any(-1), 0.0, teacher.log_chunk.exp())
        assert teacher.tail is not None
        rest = _log(teacher.tail.exp() - out_of_tail)
        logp = torch.cat([teacher.log_chunk[:, None], kept, rest[:, None]], -1)
        others = sent.scatter(-1, teacher.ids, 0.0).sum(-1, keepdim=True) + nowhere
        masses = torch.cat([sent.gather(-1, teacher.ids), others], -1)
    logq = torch.cat([first.log_chunk[:, None], _log(masses)], -1)
    value, g = _compared(logp, logq, params, torch.nn.functional.pad(masses == 0, (1, 0)))
    each = _over(g[:, 1:], masses)
    per_id = each[:, :-1]
    if teacher.ids is not None:
        per_id = each[:, -1:].expand(-1, relation.sizes[1]).scatter(-1, teacher.ids, each[:, :-1])
    back = mass.new_zeros(mass.shape).index_add_(1, start, per_id.index_select(1, end) * value_of)
    back[:, relation.unmapped[lost] - shard.start] = each[:, -1:]
    (of_first,) = shard.total(shard.gather(back, first.token[:, None], 0.0).squeeze(-1))
    gradient = back.mul_(mass)
    first.put(gradient, first.token, g[:, 0] + first.leaving * of_first)
    return value, gradient, g[:, 0] - first.log_chunk.exp() * of_first


def _here(relation: Relation, name: str, shard: VocabShard) -> slice:
    """The part of a list of student ids, which increase, that this rank has columns for."""
    begin, end = np.searchsorted(relation.hosts[name], (shard.start, shard.start + shard.size))
    return slice(int(begin), int(end))


def chunk(first: Student, teacher: Expected, target: ChunkTarget, params: LossParams) -> Gradient:
    """{the chunk, anything else}, with both likelihoods raised to 1 / τ."""
    tau = target.chunk_temperature
    ours, theirs = ((side.log_chunk / tau).clamp(LOG_FLOOR, -1e-7) for side in (first, teacher))
    logq, logp = (torch.stack([x, _log(-torch.expm1(x))], -1) for x in (ours, theirs))
    value, g = _compared(logp, logq, params)
    pull = _over(g[:, 0], -torch.expm1(ours)) / tau
    return value, _towards(first.q.clone(), first.token, pull, first.shard), pull


def uld(first: Student, teacher: Expected, target: ChunkTarget, params: LossParams) -> Gradient:
    """L1 between the largest probabilities of both sides, in order, and the rest."""
    shard, theirs = first.shard, teacher.logp.exp()
    kept = min(ULD_ENTRIES, target.relation.sizes[0], theirs.shape[1])
    # Any rank may hold all of the largest; one with fewer ids than that fills up with what is never chosen.
    count = min(kept, shard.widest)
    mine = min(count, shard.size)
    values, places = first.q.new_full((len(first.q), count), -1.0), first.token.new_full((len(first.q), count), -1)
    values[:, :mine], found = first.q.topk(mine, -1)
    places[:, :mine] = found + shard.start
    values, places = shard.joined(values, places)
    values, order = values.topk(kept, -1)
    places = places.gather(-1, order)
    top = theirs.topk(kept, -1).values
    q = torch.cat([values, (1 - values.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
    p = torch.cat([top, (1 - top.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
    sign = torch.sign(q - p)
    mean = (q * sign).sum(-1, keepdim=True)
    gradient = first.q * (sign[:, -1:] - mean)
    own = values * (sign[:, :-1] - mean)
    shard.scatter_add(gradient, places, own - shard.gather(gradient, places, 0.0))
    return (q - p).abs().sum(-1), gradient, torch.zeros_like(first.inner)


METHODS: dict[str, Callable[[Student, Expected, ChunkTarget, LossParams], Gradient]] = {
    "common_vocab": shared,
    "projection": projection,
    "span_likelihood": chunk,
    "uld": uld,
}
