"""The student writes, and its teacher is behind a server that comes and goes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from processes_killed import Process
from served import Served
from tiny_runs import TinyRuns, assert_same_run, lines, steps_on_disk

import potstill

pytestmark = pytest.mark.e2e

ROLLOUTS = {"on_policy_fraction": 0.6, "prompt_tokens": 6, "sampling": {"max_new_tokens": 8}, "num_generations": 2}


def recipe(runs: TinyRuns, name: str, server: Served, *options: str, **rollouts: Any) -> Path:
    student = runs.recipe("x").student.model_dump(by_alias=True)
    student["config"]["attention_dropout"] = 0.0  # what a step that was not finished drew of it is not put back
    teacher = {"server": server.address, "remote": {"kind": "top_k", "k": 16}}
    return runs.file(name, *options, student=student, teachers=[teacher], rollouts=ROLLOUTS | rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("generations", [1, 2])
def test_a_run_that_waits_for_its_server_ends_when_told_and_goes_on_later(runs: TinyRuns, generations: int) -> None:
    options = ["train.steps=80", "checkpoint.every=null"]
    rollouts = {"steps_per_generation": generations, "max_staleness": generations - 1}
    # A document a pass: in whatever order requests come in, its numbers are the same to the last bit.
    with Served(runs.teacher, "--batch-tokens", 1) as server:
        undisturbed = potstill.train(recipe(runs, "whole", server, *options, **rollouts)).folder
        process = Process(recipe(runs, "waits", server, *options, **rollouts), runs.folder / "waits")
        process.wait_for(lambda: process.steps() >= 3)
        server.kill()
        process.wait_for(lambda: "waiting for the server" in process.said())
        process.send(signal.SIGTERM)
        code, said = process.end()
        assert code == 143, said
        (saved,) = steps_on_disk(runs.folder / "waits")
        assert saved == len(lines(runs.folder / "waits" / "metrics.jsonl")) >= 3
        server.restart()
        potstill.train(recipe(runs, "waits", server, *options, **rollouts))
    assert_same_run(runs.folder / "waits", undisturbed)
