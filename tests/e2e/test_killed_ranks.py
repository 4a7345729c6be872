"""Ranks under torchrun that are killed, and one that hangs: the run ends with the weights it would have had, or says who."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest
from processes_torchrun import Torchrun, exported, step_reached, stop, unfinished
from tiny_runs import TinyRuns, metrics

from potstill.files import damage

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]  # minutes become many on a busy machine
FOUR = ("--standalone", "--nproc-per-node", "4")
MOST = 6  # steps that the run comes forward between two kills


def killed_while_saving(torchrun: Torchrun, victim: int) -> bool:
    """Kills a rank if a checkpoint is being written just now. The first rank, which puts it in place, stands still for it."""
    ranks = torchrun.ranks()
    if len(ranks) < 4 or not unfinished(torchrun.run):
        return False
    stop(ranks[0])
    saving = unfinished(torchrun.run)
    if saving:
        os.kill(ranks[victim], signal.SIGKILL)
    os.kill(ranks[0], signal.SIGCONT)
    return saving


@pytest.mark.parametrize(
    ("kills", "layout"),
    [(10, ["parallel.tp=2", "checkpoint.async_save=true"]), (3, [])],
    ids=["dp2-tp2-async", "dp4"],
)
def test_killed_ranks_and_the_weights_of_an_undisturbed_run(kills: int, layout: list[str], runs: TinyRuns) -> None:
    options = [f"train.steps={kills * MOST + 30}", "checkpoint.every=3", *layout]
    with Torchrun(runs.file("whole", *options), runs.folder / "whole", *FOUR) as whole:
        code, said = whole.end()
        assert code == 0, said
    seed = int(os.environ.get("POTSTILL_HARD_SEED") or 14)  # a change is not refused for what it did not do
    print(f"seed {seed}")
    draw, run, seconds = random.Random(seed), runs.folder / "killed", []
    log, latest, while_saving = run / "metrics.jsonl", run / "checkpoints" / "latest", draw.randrange(kills)
    with Torchrun(runs.file("killed", *options), run, *FOUR, "--max-restarts", str(kills)) as torchrun:
        torchrun.wait_for(latest.exists)
        for number in range(kills):
            wanted, victim = step_reached(run) + draw.randint(1, MOST), draw.randrange(4)
            torchrun.wait_for(lambda step=wanted: step_reached(run) >= step)
            before = log.stat().st_ino  # written anew where the run resumes
            if number == while_saving:
                torchrun.wait_for(lambda rank=victim: killed_while_saving(torchrun, rank), every=0.001)
            else:
                os.kill(torchrun.ranks()[victim], signal.SIGKILL)
            kill = time.monotonic()
            torchrun.wait_for(lambda old=before: log.stat().st_ino != old)
            resumed_at = int(os.readlink(latest).removeprefix("step-"))
            torchrun.wait_for(lambda step=resumed_at: step_reached(run) > step)
            seconds.append(time.monotonic() - kill)
        code, said = torchrun.end()
    print("seconds from a kill to the next step:", *(f"{each:.1f}" for each in sorted(seconds)))
    assert code == 0, said
    assert said.count("failed (exitcode: -9)") == kills and "potstill did not expect" not in said, said
    assert metrics(run) == metrics(runs.folder / "whole")
    assert len(exported(run)) > 1 and exported(run) == exported(runs.folder / "whole")
    assert damage(latest) is None
    assert not list(run.rglob(".unfinished-*"))
    assert (run / "finished").exists() and not (run / "error.json").exists()


@pytest.mark.parametrize("culprit", [2, 0])
def test_who_hangs_is_named_by_the_command(culprit: int, runs: TinyRuns) -> None:
    """Also where it is the first, whose process all ranks meet at."""
    run, timeout = runs.folder / "run", 10
    options = ["train.steps=100000", "checkpoint.every=3", "checkpoint.async_save=true", f"train.timeout={timeout}"]
    with Torchrun(runs.file("run", *options), run, *FOUR) as torchrun:
        torchrun.wait_for(lambda: step_reached(run) >= 4)
        hung, began = torchrun.ranks()[culprit], time.monotonic()
        stop(hung)
        names = re.compile(
            rf"error: (?:rank [123]: )?step \d+: (?:waited \d+ s \(train\.timeout is {timeout}\) for|lost) "
            rf"rank {culprit} \(process {hung} on {re.escape(os.uname().nodename)}\).*; the same command resumes"
        )
        torchrun.wait_for(lambda: names.search(torchrun.said()) is not None)
        named = time.monotonic() - began
        code, said = torchrun.end()
    print(f"named after {named:.1f} s, all over after {time.monotonic() - began:.1f} s")
    assert code == 1 and "potstill did not expect" not in said, said


@pytest.mark.parametrize("how", ["hangs", "dies"])
@pytest.mark.parametrize("culprit", [2, 1], ids=["teacher", "student"])
def test_who_is_lost_is_named_where_a_teacher_has_a_rank_of_its_own(culprit: int, how: str, runs: TinyRuns) -> None:
    """The teacher's rank takes no steps: it is named if it is the one, and only then."""
    run, timeout = runs.folder / "run", 10
    options = ["train.steps=100000", "checkpoint.every=3", f"train.timeout={timeout}"]
    teachers = [{"model": str(runs.teacher), "ranks": 1}]
    three = ("--standalone", "--nproc-per-node", "3")
    with Torchrun(runs.file("run", *options, teachers=teachers), run, *three) as torchrun:
        torchrun.wait_for(lambda: step_reached(run) >= 4)
        lost = torchrun.ranks()[culprit]
        if how == "hangs":
            stop(lost)
            torchrun.wait_for(lambda: "the same command resumes" in torchrun.said())
            said = torchrun.said()
            named = re.findall(rf"step \d+: waited \d+ s \(train\.timeout is {timeout}\) for (.*?)\)", said)
        else:
            os.kill(lost, signal.SIGKILL)
            code, said = torchrun.end()
            assert code == 1 and f"failed (exitcode: -9) local_rank: {culprit}" in said, said
            # torchrun ends the others as soon as it sees it, which may be before they have said so.
            named = re.findall(r"step \d+: (.*?)\)", said) or [f"rank {culprit} (process {lost} on "]
    assert named and all(each.startswith(f"rank {culprit} (process {lost} on ") for each in named), said
    assert "potstill did not expect" not in said, said
