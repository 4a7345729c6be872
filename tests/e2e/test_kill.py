"""Real processes and real signals, since the disk and the kernel take part: SIGKILL, SIGTERM, a second process, a full
disk. Most of what can go wrong with a resume is in test_resume.py, where no process has to be started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes_killed import Process
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run, lines, metrics, steps_on_disk

import potstill
from potstill.files import damage
from potstill.training.checkpoint import Checkpoints
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits(runs: TinyRuns, command: Callable[..., Any]) -> None:
    options = ["train.steps=60", "checkpoint.every=5", "train.optimizer.name=muon", "log.tensorboard=true"]
    undisturbed = potstill.train(runs.recipe("whole", *options, eval=runs.evaluation(every=20))).folder
    recipe = runs.file("killed", *options, eval=runs.evaluation(every=20))
    run = runs.folder / "killed"

    first = Process(recipe, run)
    first.wait_for(lambda: first.steps() >= 3)
    with pytest.raises(
        PotstillError, match=r"another process is training in .*/killed: wait for it, or choose another"
    ):
        potstill.train(recipe)
    first.wait_for(lambda: steps_on_disk(run) != [] and first.half_written())
    first.send(signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    assert list((run / "checkpoints").glob(".unfinished-step-*"))

    second = Process(recipe, run)
    before = lines(run / "metrics.jsonl")[-1]["step"]
    second.wait_for(lambda: second.steps() >= before + 7)
    second.send(signal.SIGKILL)
    assert second.end()[0] == -signal.SIGKILL
    assert steps_on_disk(run)[-1] < 60

    third = command("train", recipe)
    assert third.code == 0
    assert "going on at step " in third.out and "step-00000060/model" in third.out
    assert_same_run(run, undisturbed)
    assert lines(run / "evals.jsonl") == lines(undisturbed / "evals.jsonl")
    assert not list((run / "checkpoints").glob(".unfinished-*"))
    assert steps_on_disk(run) == steps_on_disk(undisturbed)


def test_sigterm_saves_and_says_so(runs: TinyRuns) -> None:
    options = ["train.steps=400", "checkpoint.every=1000", "data.packing=false"]
    recipe = runs.file("stopped", *options)
    process = Process(recipe, runs.folder / "stopped")
    process.wait_for(lambda: process.steps() >= 4)
    process.send(signal.SIGTERM)
    code, said = process.end()
    assert code == 143
    (step,) = steps_on_disk(runs.folder / "stopped")
    assert 4 <= step < 400
    assert f"stopped by SIGTERM at step {step}; the same command goes on from there" in said
    assert said.endswith("the same command goes on from there\n")
    # What it goes on to is what it would have been; a few steps tell, of the 400 its schedule is for.
    for name in ("stopped", "whole"):
        with pytest.raises(Interrupted):
            potstill.train(runs.recipe(name, *options), [InterruptAt(step + 3)])
    assert metrics(runs.folder / "stopped") == metrics(runs.folder / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_loses_nothing(runs: TinyRuns, command: Callable[..., Any], small_disk: Path) -> None:
    """A checkpoint of this student takes more than 1 MB: with the disk filled up to 0.3 MB, the next does not fit."""
    potstill.train(runs.recipe("whole", "train.steps=4"))
    run = small_disk / "run"
    recipe = runs.file("run", "train.steps=4", f"run={run}", "log.tensorboard=true")
    with pytest.raises(Interrupted):
        potstill.train(recipe, [InterruptAt(3)])
    free = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 300_000))

    full = command("train", recipe)
    assert full.code == 1
    assert full.err == (
        f"error: could not write {run}/checkpoints/step-00000004: No space left on device; "
        "what was there before is untouched\n"
    )
    assert steps_on_disk(run) == [2] and damage(run / "checkpoints" / "step-00000002") is None
    assert not list(run.rglob(".unfinished-*"))
    assert Checkpoints(run / "checkpoints", 2, pytest.fail).newest()[1].step == 2

    filler.write_bytes(b"x" * (filler.stat().st_size + 290_000))  # not even a line of the log fits any more
    fuller = command("train", recipe)
    assert fuller.code == 1 and "No space left on device" in fuller.err and len(fuller.err.splitlines()) == 1
    assert damage(run / "checkpoints" / "step-00000002") is None

    filler.unlink()
    assert command("train", recipe).code == 0
    assert_same_run(run, runs.folder / "whole")
