"""The rows of a step, dealt to the ranks that share them.

The plan is the same on every rank: all of them deal all rows, and each takes its own. Every rank makes equally many passes, for
they wait for each other in each; one without rows reads a single token, of which nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potstill.data.layout import collate
from potstill.types import Batch, Example


@dataclass(frozen=True)
class Share:
    """Which of the ranks among which rows are dealt this is, and how many rows a pass of one rank has at most."""

    micro_batch_size: int
    index: int = 0
    size: int = 1


def deal(lengths: Sequence[int], share: Share) -> list[list[list[int]]]:
    """The rows of each rank in each of its passes: passes × ranks × rows. One rank takes them in their order. Several take them
    longest first, each into the lightest bin that has room; ranks of one pass then have bins of like weight."""
    micro, count = share.micro_batch_size, len(lengths)
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


def dealt(rows: Sequence[Sequence[Example]], share: Share, pad_id: int) -> tuple[Batch, ...]:
    """This rank's micro-batches of a step."""
    passes = deal([sum(len(example.ids) for example in row) for row in rows], share)
    own = [by_rank[share.index] for by_rank in passes]
    return tuple(collate([rows[i] for i in some], pad_id) for some in own)


def padding(lengths: Sequence[int], share: Share) -> int:
    """Positions of a step without a token, over all ranks."""
    bins = (some for by_rank in deal(lengths, share) for some in by_rank if some)
    return sum(len(some) * max(lengths[i] for i in some) - sum(lengths[i] for i in some) for some in bins)
