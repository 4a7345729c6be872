"""The rows of a step, dealt to ranks: each row once, equally many passes, like lengths in a pass."""

from __future__ import annotations

import numpy as np
import pytest

from potstill.data.dealing import Share, deal, dealt, padding
from potstill.types import Example


def example(length: int, key: int = 0) -> Example:
    supervised = np.ones(length, dtype=np.bool_)
    supervised[0] = False
    return Example(f"{key:032x}", "x", np.full(length, key, dtype=np.int32), supervised, length)


def test_one_rank_takes_rows_in_their_order() -> None:
    assert deal([5, 9, 1, 7, 3], Share(2)) == [[[0, 1]], [[2, 3]], [[4]]]


@pytest.mark.parametrize(("rows", "micro", "size"), [(8, 2, 2), (7, 2, 4), (6, 4, 4), (5, 1, 3), (3, 8, 2), (64, 3, 5)])
def test_every_row_is_dealt_once_and_all_ranks_make_equally_many_passes(rows: int, micro: int, size: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, 99, rows).tolist()
    passes = deal(lengths, Share(micro, 0, size))
    assert len(passes) == -(-rows // (micro * size))
    assert all(len(by_rank) == size for by_rank in passes)
    found = [row for by_rank in passes for some in by_rank for row in some]
    assert sorted(found) == list(range(rows))
    assert max(len(some) for by_rank in passes for some in by_rank) <= micro


def test_ranks_that_wait_for_each_other_have_like_lengths() -> None:
    lengths = [100, 100, 100, 100, 10, 10, 10, 10]
    assert [[sum(lengths[i] for i in some) for some in by_rank] for by_rank in deal(lengths, Share(1, 0, 4))] == [
        [100] * 4,
        [10] * 4,
    ]
    weights = [sum(lengths[i] for i in some) for some in deal(lengths, Share(2, 0, 4))[0]]
    assert weights == [110] * 4


def test_a_rank_without_rows_reads_one_position_and_learns_nothing() -> None:
    rows = [[example(4, 1)], [example(3, 2)], [example(2, 3)]]
    everyone = [dealt(rows, Share(1, rank, 4), pad_id=9) for rank in range(4)]
    assert [len(batches) for batches in everyone] == [1] * 4
    (nothing,) = everyone[3]
    assert nothing.input_ids.tolist() == [[9]] and len(nothing.rows) == 0 and nothing.supervised_tokens == 0
    assert sum(batch.supervised_tokens for batches in everyone for batch in batches) == 3 + 2 + 1


def test_padding_is_that_of_all_ranks() -> None:
    lengths = [7, 3, 5, 5, 2]
    for share in (Share(2), Share(2, 0, 2), Share(1, 1, 3)):
        micro, size, rows = share.micro_batch_size, share.size, [[example(n)] for n in lengths]
        made = [dealt(rows, Share(micro, rank, size), 0) for rank in range(size)]
        positions = sum(batch.input_ids.numel() for batches in made for batch in batches if batch.examples)
        assert padding(lengths, share) == positions - sum(lengths)
