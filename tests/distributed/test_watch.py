"""A rank that hangs, dies or stays behind is named by those who wait for it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, on_ranks

from potstill.config import ParallelConfig
from potstill.parallel.mesh import world
from potstill.parallel.watch import RanksLost, Watch, restarts_cannot_succeed


def stepping(folder: Path, culprit: int, how: str) -> str:
    """What a rank says at the end of four steps, in the third of which the culprit does not take part."""
    with world(ParallelConfig(), torch.device("cpu")) as here:
        watch = Watch(here, timeout=2)
        try:
            for step in range(1, 5):
                if (here.rank, step, how) == (culprit, 3, "behind"):
                    wait_for_the_others(folder, here.world)
                with watch.step(step):
                    dist.all_reduce(torch.ones(1), group=here.control)
                    if (here.rank, step, how) == (culprit, 3, "dies"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    if (here.rank, step) == (culprit, 3):
                        wait_for_the_others(folder, here.world)
                    dist.all_reduce(torch.ones(1))
        except RanksLost as error:
            (folder / f"{here.rank}").write_text(str(error))
            if here.first:  # whose process holds the store may not be the first to leave
                wait_for_the_others(folder, here.world)
            return str(error)
    return "took four steps"


def wait_for_the_others(folder: Path, world_size: int) -> None:
    while len(list(folder.iterdir())) < world_size - 1:
        time.sleep(0.05)


@pytest.mark.parametrize(("culprit", "how"), [(2, "hangs"), (0, "hangs"), (1, "behind")])
def test_who_hangs_is_named(tmp_path: Path, culprit: int, how: str) -> None:
    found = on_ranks(3, stepping, tmp_path, culprit, how)
    for rank, said in enumerate(found):
        if rank != culprit:
            assert re.fullmatch(
                rf"step 3: waited \d+ s \(train\.timeout is 2\) for rank {culprit} \(process \d+ on "
                rf"{re.escape(os.uname().nodename)}\): see there what it does .*, or raise train\.timeout; "
                r"the same command resumes at the last checkpoint",
                said,
            ), said


def test_nothing_is_said_of_ranks_that_keep_up(tmp_path: Path) -> None:
    assert on_ranks(3, stepping, tmp_path, -1, "") == ["took four steps"] * 3


def test_who_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="its process died"):
        on_ranks(3, stepping, tmp_path, 1, "dies")
    for rank in (0, 2):
        assert re.search(r"step 3: .*\brank 1 \(process \d+ on .* left \(", (tmp_path / str(rank)).read_text())


def test_restarts_that_cannot_succeed_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    for allowed in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", allowed)
        assert (restarts_cannot_succeed() is None) == (allowed == "0")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert restarts_cannot_succeed() is None
