"""The rows of a step, dealt to the ranks that share them.

The plan is the same on every rank: all of them deal all rows, and each takes its own. Every rank makes equally many passes, for
they wait for each other in each; one without rows reads a single token, of which nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potstill.data.layout import collate
from potstill.types import Batch, Example

PASS_COST = 1 / 8  # of a pass by itself, as a share of the tokens that one may have
FURTHER_PASSES = 3  # that are tried


@dataclass(frozen=True)
class Share:
    """Which of the ranks among which rows are dealt this is, and how many rows a pass of one rank has at most; or, with
    `tokens`, how many positions, padding included."""

    micro_batch_size: int
    index: int = 0
    size: int = 1
    tokens: int | None = None


def deal(lengths: Sequence[int], share: Share) -> list[list[list[int]]]:
    """The rows of each rank in each of its passes: passes × ranks × rows. One rank takes them in their order. Several take them
    longest first, each into the lightest bin that has room; ranks of one pass then have bins of like weight."""
    micro, count = share.micro_batch_size, len(lengths)
    if share.tokens is not None:
        return _by_tokens(lengths, share.size, share.tokens)
    if share.size == 1:
        return [[list(range(i, min(i + micro, count)))] for i in range(0, count, micro)]
    passes = -(-count // (micro * share.size))
    most = -(-count // (passes * share.size))  # rows a bin: as even as they can be
    bins: list[list[int]] = [[] for _ in range(passes * share.size)]
    weights = [0] * len(bins)
    for row in sorted(range(count), key=lambda i: (-lengths[i], i)):
        lightest = min((i for i in range(len(bins)) if len(bins[i]) < most), key=lambda i: (weights[i], i))
        bins[lightest].append(row)
        weights[lightest] += lengths[row]
    order = sorted(range(len(bins)), key=lambda i: (-weights[i], i))
    return [[sorted(bins[i]) for i in order[p * share.size : (p + 1) * share.size]] for p in range(passes)]


def _by_tokens(lengths: Sequence[int], size: int, tokens: int) -> list[list[list[int]]]:
    """As `deal`, in about as few passes as bins of `tokens` positions allow: a further pass is made where it saves more padding
    than it costs. Rows lie beside others of like length."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fewest = -(-len(_filled(order, lengths, tokens)) // size)
    plans = [_evened(order, lengths, passes * size, tokens) for passes in range(fewest, fewest + FURTHER_PASSES + 1)]
    dealt = [[bins[i : i + size] for i in range(0, len(bins), size)] for bins in plans]
    return min(
        dealt, key=lambda passes: sum(_positions(lengths, by_rank[0]) + tokens * PASS_COST for by_rank in passes)
    )


def _evened(order: Sequence[int], lengths: Sequence[int], count: int, tokens: int) -> list[list[int]]:
    """So many bins, the fullest first, none fuller than there must be one."""
    low, high = lengths[order[0]] if order else 0, tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(order, lengths, middle)) <= count else (middle + 1, high)
    bins = sorted(_filled(order, lengths, low), key=lambda some: -_positions(lengths, some))
    return bins + [[] for _ in range(count - len(bins))]


def _filled(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The fewest bins of so many positions, from rows that come longest first."""
    bins: list[list[int]] = []
    for row in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _positions(lengths: Sequence[int], some: Sequence[int]) -> int:
    return len(some) * max((lengths[i] for i in some), default=0)


def own_rows(lengths: Sequence[int], share: Share) -> list[list[int]]:
    """This rank's rows of a step, by pass."""
    return [by_rank[share.index] for by_rank in deal(lengths, share)]


def dealt(rows: Sequence[Sequence[Example]], share: Share, pad_id: int) -> tuple[Batch, ...]:
    """This rank's micro-batches of a step."""
    own = own_rows([sum(len(example.ids) for example in row) for row in rows], share)
    return tuple(collate([rows[i] for i in some], pad_id) for some in own)


def padding(lengths: Sequence[int], share: Share) -> int:
    """Positions of a step without a token, over all ranks."""
    bins = (some for by_rank in deal(lengths, share) for some in by_rank)
    return sum(_positions(lengths, some) for some in bins) - sum(lengths)
