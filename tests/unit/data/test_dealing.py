"""The rows of a step, dealt to ranks: each row once, equally many passes, like lengths in a pass."""

from __future__ import annotations

import numpy as np
import pytest

from potstill.data.dealing import FURTHER_PASSES, Share, deal, dealt, padding
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


def by_tokens(tokens: int, index: int = 0, size: int = 1) -> Share:
    return Share(1, index, size, tokens)


@pytest.mark.parametrize(("rows", "tokens", "size"), [(1, 99, 1), (8, 100, 1), (64, 160, 1), (64, 160, 4), (5, 400, 3)])
def test_passes_by_tokens_hold_every_row_once_and_no_more_than_fits(rows: int, tokens: int, size: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, 99, rows).tolist()
    passes = deal(lengths, by_tokens(tokens, 0, size))
    assert all(len(by_rank) == size for by_rank in passes)
    bins = [some for by_rank in passes for some in by_rank]
    assert sorted(row for some in bins for row in some) == list(range(rows))
    assert all(len(some) * max(lengths[i] for i in some) <= tokens for some in bins if some)
    fewest = -(-fewest_bins(lengths, tokens) // size)
    assert fewest <= len(passes) <= fewest + FURTHER_PASSES
    assert sum(map(bool, bins)) >= (len(passes) - 1) * size + 1, "no pass is empty"


def fewest_bins(lengths: list[int], tokens: int) -> int:
    """By trying all of them: sorted rows are cut into runs, for a bin of like lengths is never worse."""
    ordered = sorted(lengths, reverse=True)
    fewest = [0]  # of the first so many rows
    for end in range(1, len(ordered) + 1):
        fits = (begin for begin in range(end) if (end - begin) * ordered[begin] <= tokens)
        fewest.append(1 + min(fewest[begin] for begin in fits))
    return fewest[-1]


def test_passes_by_tokens_have_rows_of_like_length() -> None:
    lengths = [10, 90, 10, 45, 10, 10, 45, 10]
    assert deal(lengths, by_tokens(90)) == [[[1]], [[3, 6]], [[0, 2, 4, 5, 7]]]
    assert padding(lengths, by_tokens(90)) == 0
    assert padding(lengths, Share(3)) == 2 * 80 + 2 * 35 + 35


def test_a_further_pass_is_made_where_it_saves_padding() -> None:
    lengths = [60, 33, 31, 12, 9, 8, 7, 5, 4]
    assert deal(lengths, by_tokens(600)) == [[[0, 1, 2]], [[3, 4, 5, 6, 7, 8]]]  # 180 + 72 positions, not 540
    assert deal([60, 58, 55], by_tokens(600)) == [[[0, 1, 2]]]


def test_ranks_share_what_one_pass_can_hold() -> None:
    """Eight rows fit into one rank's pass; two ranks make it half as long."""
    assert deal([10] * 8, by_tokens(80)) == [[list(range(8))]]
    assert deal([10] * 8, by_tokens(80, 0, 2)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert deal([10], by_tokens(80, 0, 2)) == [[[0], []]]
