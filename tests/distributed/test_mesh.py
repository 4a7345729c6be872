"""The world of a run: places and groups of every rank, sums, and sizes that do not fit; and the pool the tests run on."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, on_ranks

from potstill.config import ParallelConfig
from potstill.parallel.mesh import checked_sizes, count_over_ranks, ranks, sum_over_ranks, world
from potstill.types import PotstillError

CPU = torch.device("cpu")


def places(keys: dict[str, Any], teaching: int = 0) -> tuple[Any, ...]:
    """Of this rank: dp, cp, tp and sums as (index, size, members), and what the sums are."""
    with world(ParallelConfig(**keys), CPU, teaching=teaching) as here:
        assert ranks() is here
        axes = [here.dp, here.cp, here.tp, here.sums]
        members = [[] if axis.group is None else dist.get_process_group_ranks(axis.group) for axis in axes]
        found = [(axis.index, axis.size, who) for axis, who in zip(axes, members, strict=True)]
        total = sum_over_ranks(torch.tensor([1.0, here.rank])).tolist()
        shape = None if here.mesh is None else tuple(here.mesh.shape)
        counted = count_over_ranks(here.rank)
        result = (here.rank, here.first, here.leader, here.student, found, total, counted, shape)
    assert not ranks().many
    return result


def test_data_parallel_ranks_hold_other_rows() -> None:
    for rank, found in enumerate(on_ranks(2, places, {})):
        alone = (0, 1, [])
        assert found[:4] == (rank, rank == 0, True, True)
        assert found[4] == [(rank, 2, [0, 1]), alone, alone, (rank, 2, [0, 1])]
        assert found[5:] == ([2.0, 1.0], 1, (1, 2, 1))


def test_tensor_parallel_is_innermost_and_no_part_of_the_sums() -> None:
    found = on_ranks(4, places, {"dp_replicate": 2, "tp": 2})
    assert [one[2] for one in found] == [True, False, True, False]
    assert [one[4][0][2] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [one[4][2][2] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one[5] for one in found] == [[2.0, 2.0], [2.0, 4.0]] * 2
    assert found[0][7] == (2, 1, 2)


def test_context_parallel_is_part_of_the_sums_and_of_the_sharding() -> None:
    found = on_ranks(4, places, {"cp": 2})
    assert [one[4][0] for one in found] == [(0, 2, [0, 2]), (0, 2, [1, 3]), (1, 2, [0, 2]), (1, 2, [1, 3])]
    assert [one[4][1][2] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one[4][3][2] for one in found] == [[0, 1, 2, 3]] * 4
    assert found[0][7] == (1, 4, 1)


def test_the_last_ranks_may_be_a_teachers() -> None:
    found = on_ranks(4, places, {}, 1)
    assert [one[3] for one in found] == [True, True, True, False]
    assert [one[5] for one in found] == [[3.0, 3.0]] * 3 + [[1.0, 3.0]]


def test_one_process_has_no_group() -> None:
    with world(ParallelConfig(), CPU) as here:
        assert not here.many and here.first and here.leader and here.student and here.mesh is None
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    "keys, count, batch_size, words",
    [
        ({"tp": 2}, 1, 8, "parallel: dp_replicate 1 × dp_shard 1 × cp 1 × tp 2 are 2 ranks, and there is 1"),
        ({"tp": 2}, 3, 8, "are 2 ranks, and there are 3 for the student: start 2 processes"),
        ({"dp_shard": 4}, 2, 8, "set sizes whose product is 2"),
        ({}, 4, 3, "train.batch_size 3 has no row for each of 4 data-parallel ranks: raise it to 4"),
        ({"ep": 3}, 4, 8, "parallel.ep 3 does not divide dp_shard × tp, which is 4"),
    ],
)
def test_sizes_that_do_not_fit(keys: dict[str, Any], count: int, batch_size: int, words: str) -> None:
    with pytest.raises(PotstillError, match=re.escape(words)):
        checked_sizes(ParallelConfig(**keys), count, batch_size)


def test_auto_is_what_is_left() -> None:
    assert checked_sizes(ParallelConfig(dp_replicate=2, tp=2), 16)["dp_shard"] == 4


# The pool


def fails_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("this one")
    dist.barrier()
    return dist.get_rank()


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_an_error_is_raised_with_its_rank_and_the_pool_goes_on() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2: .*ValueError: this one"):
        on_ranks(2, fails_on, 1)
    assert on_ranks(4, fails_on, 9) == [0, 1, 2, 3]


def test_a_dead_process_is_replaced() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2: its process died"):
        on_ranks(2, dies)
    assert on_ranks(2, fails_on, 9) == [0, 1]
