"""Gradients of bfloat16 operands beside float64: for every divergence and kind of target, and however near the student is.

Logits that are rounded to bfloat16 would be a quarter of the gradient off at a KL of 0.006. What is left here is the rounding
of the gradient itself, which has 8 bits too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from tiny_cross import chunks, relation
from tiny_prefix import made_up_table
from torch import Tensor

from potstill.losses import DIVERGENCES, KDLoss, fused_linear_kd
from potstill.losses.dense import target_logits
from potstill.signals.kinds import Hidden
from potstill.types import (
    CHUNK_METHODS,
    ChunkTarget,
    Head,
    HiddenTarget,
    LogitsTarget,
    MeanTarget,
    PrefixMarginalTarget,
    SampledTarget,
    Target,
    TopKTarget,
)

ROWS, WIDTH, IDS, TWICE, KEPT = 32, 96, 768, 8, 16
NOISE = {0.006: 0.0307, 0.07: 0.105, 6.0: 1.12}  # of the student, by the forward KL that comes of it
MOST = 0.005


@dataclass(frozen=True)
class Operands:
    """bfloat16 numbers, in any dtype."""

    hidden: Tensor  # of the student [ROWS, WIDTH]
    head: Tensor  # [IDS, WIDTH]
    theirs: Tensor  # of the teacher
    their_head: Tensor

    def to(self, dtype: torch.dtype) -> Operands:
        return Operands(*(x.to(dtype) for x in vars(self).values()))


@cache
def operands(kl: float) -> Operands:
    g = torch.Generator().manual_seed(0)

    def near(x: Tensor, share: float) -> Tensor:
        return x + share * torch.randn(x.shape, generator=g)

    theirs, head = torch.randn(ROWS, WIDTH, generator=g), torch.randn(IDS, WIDTH, generator=g)
    noise, scale = NOISE[kl], 4.0 / WIDTH**0.5
    made = near(theirs, noise), near(head, 0.1 * noise) * scale, theirs, head * scale
    return Operands(*(x.bfloat16() for x in made))


@cache
def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Labels [ROWS], ids that a teacher keeps [ROWS, KEPT] and draws [ROWS, 2 · KEPT]."""
    g, one = torch.Generator().manual_seed(1), operands(0.07).to(torch.float64)
    logp = (one.theirs @ one.their_head.t()).log_softmax(-1)
    labels, drawn = (logp.exp().multinomial(n, replacement=True, generator=g) for n in (1, 2 * KEPT))
    return labels.squeeze(-1), logp.topk(KEPT).indices, drawn


def taught(one: Operands) -> HiddenTarget:
    return HiddenTarget(one.theirs, Head(one.their_head))


def logprobs(target: HiddenTarget) -> Tensor:
    return target_logits(target, slice(0, len(target.hidden))).log_softmax(-1)


def cached_hidden(one: Operands) -> HiddenTarget:
    """By way of a cache's bytes, which keep bfloat16 as it is."""
    kind = Hidden(IDS, width=WIDTH, dtype="bfloat16")
    code, live = kind.streams()["hidden"], taught(one)
    stored = code.encode(kind.compute(replace(live, hidden=one.theirs.bfloat16()), texts()[0])["hidden"])
    return replace(live, hidden=kind.states({"hidden": code.decode(stored)}).to(one.theirs.dtype))


def top_k(target: HiddenTarget, drawn: bool = False) -> TopKTarget:
    logp, (_, ids, _) = logprobs(target), texts()
    rest = logp.scatter(-1, ids, -math.inf)
    tail = rest.logsumexp(-1)
    if not drawn:
        return TopKTarget(ids, logp.gather(-1, ids), tail)
    samples = (IDS - 1 - ids).where((IDS - 1 - ids)[:, :, None].ne(ids[:, None]).all(-1), rest.argmax(-1)[:, None])
    return TopKTarget(ids, logp.gather(-1, ids), tail, tail_samples=samples)


def doubled(one: Operands) -> HiddenTarget:
    """A teacher that has some of the student's ids twice, each with half of the probability."""
    bias = torch.zeros(IDS + TWICE, dtype=torch.promote_types(one.theirs.dtype, torch.float32))
    bias[:TWICE] = bias[IDS:] = -math.log(2)
    return HiddenTarget(one.theirs, Head(torch.cat([one.their_head, one.their_head[:TWICE]]), bias))


def prefix_marginal(one: Operands) -> PrefixMarginalTarget:
    """What counts for which id: the one that it is. Every third row has begun with what all of the tokens begin with."""
    first = np.concatenate([np.arange(IDS), np.arange(TWICE)])
    every, node = np.arange(ROWS), (np.arange(ROWS) % 3 == 0).astype(np.int64)
    table = made_up_table(IDS, first, np.array([0, 0, len(first)]), np.arange(len(first)), first)
    labels, source = texts()[0], doubled(one)
    assert source.head.bias is not None
    return PrefixMarginalTarget(
        source,
        table.on(torch.device("cpu")),
        *map(torch.from_numpy, (every, node)),
        actual=labels,
        usual=labels,
        own=labels,
        beyond=torch.zeros(ROWS, dtype=source.head.bias.dtype),
        place_host=every,
        node_host=node,
        odd_host=node > 0,
    )


def of_chunks(one: Operands, method: str, truncated: bool = False) -> ChunkTarget:
    """Chunks of one, two and three rows. For `common_vocab` some ids have no partner, for the others some have two."""
    lengths = [1, 2, 3] * (ROWS // 6) + [1] * (ROWS - 6 * (ROWS // 6))
    where, (labels, _, _) = chunks(lengths, [0] * len(lengths)), texts()
    split = method != "common_vocab"
    source = doubled(one) if split else taught(one)
    ids = IDS + TWICE * split
    ways = {x: {x: 0.5, IDS + x: 0.5} if split and x < TWICE else {x: 1.0} for x in range(IDS)}
    pairs = {x: x for x in range(TWICE, IDS)}
    logp = logprobs(source).gather(-1, labels[:, None]).squeeze(-1)
    inner = logp.new_zeros(len(lengths)).index_add_(0, where.owner, logp[where.inner])
    start = source.select(where.first)
    some = top_k(source).select(where.first) if truncated else start
    between = relation(pairs, ways, IDS, ids)
    return ChunkTarget(method, where, between, some, labels[where.first], logp[where.first], inner, 2.0)


def mean(one: Operands) -> MeanTarget:
    return MeanTarget((0.25, 0.75), (taught(one), LogitsTarget(target_logits(taught(one), slice(0, ROWS)))))


KINDS = {
    "live head": taught,
    "logits": lambda one: LogitsTarget(target_logits(taught(one), slice(0, ROWS))),
    "cached hidden states": cached_hidden,
    "mean": mean,
    "top-k": lambda one: top_k(taught(one)),
    "top-k with draws of the rest": lambda one: top_k(taught(one), drawn=True),
    "sampled": lambda one: SampledTarget(texts()[2], torch.full((ROWS, 2 * KEPT), 0.5 / KEPT)),
    "KDLoss": taught,
    "prefix_marginal": prefix_marginal,
    **{method: lambda one, method=method: of_chunks(one, method) for method in CHUNK_METHODS},
    "common_vocab of top-k": lambda one: of_chunks(one, "common_vocab", truncated=True),
}
FORWARD_ALONE = ("sampled", "uld")  # the other divergences are refused, or make no difference
CELLS = [(kind, name) for kind in KINDS for name in DIVERGENCES if name == "forward_kl" or kind not in FORWARD_ALONE]


def gradients(kind: str, divergence: str, one: Operands, autocast: bool = False) -> tuple[list[Tensor], Tensor]:
    """Of hidden states and head, and the rows' divergence."""
    hidden, head = (x.detach().clone().requires_grad_() for x in (one.hidden, one.head))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        target, (labels, _, _) = KINDS[kind](one), texts()
        if kind == "KDLoss":
            teacher = target_logits(target, slice(0, ROWS))
            loss = KDLoss(divergence=divergence)(Head(head).logits(hidden), teacher, labels)
            rows = loss.detach()
        else:
            out = fused_linear_kd(hidden, head, target, labels=labels, divergence=divergence, chunk_rows=7)
            loss, rows = out.loss, out.kd
    loss.backward()
    assert hidden.grad is not None and head.grad is not None
    return [hidden.grad.double(), head.grad.double()], rows


@pytest.mark.parametrize(("kind", "divergence"), CELLS)
def test_gradients_are_near_those_of_float64(kind, divergence):
    for kl in NOISE:
        one = operands(kl)
        exact, rows = gradients(kind, divergence, one.to(torch.float64))
        if (kind, divergence) == ("live head", "forward_kl"):
            assert float(rows.mean()) == pytest.approx(kl, rel=0.1)
        for autocast in (False, True):
            rounded, _ = gradients(kind, divergence, one, autocast)
            for name, ours, theirs in zip(("hidden", "head"), rounded, exact, strict=True):
                off = float((ours - theirs).norm() / theirs.norm())
                assert off < MOST, (name, kl, autocast)


def test_every_kind_of_target_is_here():
    found = {type(make(operands(0.07))) for make in KINDS.values()}
    assert found == {each for each in Target.__subclasses__() if each.__name__ != "TokenLogprobsTarget"}
