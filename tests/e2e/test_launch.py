"""What `potstill launch` prints is what bash, SLURM, torchrun and Kubernetes take."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tiny_runs import TinyRuns, steps_on_disk

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "distil.yaml"
LARGE = "train.batch_size=64"  # a row for every rank
SCHEDULERS = [["slurm"], ["torchrun"], ["kubernetes", "--image", "registry.example/potstill:1"]]


def is_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda words: words[0])
def test_every_process_gets_the_recipe_and_its_overrides(command: Command, scheduler: list[str], nodes: int) -> None:
    overrides = ["run=runs/it's here", LARGE]
    said = command("launch", RECIPE, *overrides, "--nodes", nodes, "--gpus", 4, "--for", *scheduler)
    assert said.code == 0, said.err
    text = said.out
    if scheduler[0] == "kubernetes":
        _, job = yaml.safe_load_all(text)
        text = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    is_bash(text)
    lines = [line for line in text.splitlines() if "torchrun" in line and not line.startswith("#")]
    assert len(lines) == (nodes if scheduler[0] == "torchrun" else 1)
    for line in lines:
        (agent,) = re.findall(r"torchrun .*", shlex.split(line)[-2] if scheduler[0] == "slurm" else line)
        words = shlex.split(agent.split(";")[0])
        assert words[words.index("-m") :] == ["-m", "potstill", "train", str(RECIPE), *overrides]
        assert words[words.index("--nnodes") + 1] == str(nodes) and words[words.index("--nproc-per-node") + 1] == "4"
        assert ("--standalone" in words) == (nodes == 1)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_only_the_first_host_holds_the_store(command: Command) -> None:
    told = command("launch", RECIPE, LARGE, "--nodes", 3, "--for", "torchrun").out
    assert re.findall(r"is_host=(\d)", told) == ["1", "0", "0"]
    assert re.findall(r"^# host (\d) of 3$", told, re.M) == ["1", "2", "3"]


@pytest.mark.parametrize("further", [[], ["--time", "1-02:00:00", "--volume", "shared:/data"]])
def test_kubernetes_takes_the_job(command: Command, further: list[str]) -> None:
    asked = ["--nodes", 2, "--gpus", 8, "--for", "kubernetes", "--image", "registry.example/potstill:1", *further]
    service, job = yaml.safe_load_all(command("launch", RECIPE, LARGE, *asked).out)
    for each in (service, job):
        kubernetes_validate.validate(each, "1.31", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert job["spec"].get("activeDeadlineSeconds") == (26 * 3600 if further else None)
    assert service["metadata"]["name"] == pod["subdomain"]  # by which pods have names
    container = pod["containers"][0]
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:" in container["command"][2]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container.get("workingDir") == ("/data" if further else None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--for", "kubernetes"], "name an image in which potstill is installed, with --image"),
        (["--for", "slurm", "--image", "x"], "--image means nothing with --for slurm: leave it out"),
        (["--for", "torchrun", "--time", "01:00:00"], "--time means nothing with --for torchrun: leave it out"),
        (["--for", "slurm", "--time", "1 day"], "--time: 1 day should be hours:minutes:seconds"),
        (["--for", "kubernetes", "--image", "x", "--volume", "y"], "--volume: y should be CLAIM:/FOLDER"),
        (["train.batch_size=0"], "train.batch_size"),
        (["--nodes", "64"], "has no row for each of 512 data-parallel ranks"),
        (["parallel.dp_shard=3"], "dp_replicate 1 × dp_shard 3 × cp 1 × tp 1 are 3 ranks, and there are 8"),
    ],
)
def test_what_cannot_be_launched_is_said(command: Command, arguments: list[str], sentence: str) -> None:
    said = command("launch", RECIPE, LARGE, *arguments)
    assert said.code == 1 and sentence in said.err and said.out == ""


def test_every_launch_of_the_docs_can_be_given(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^potstill (launch .*)$", (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), re.M)
    assert len(lines) >= 3
    for line in lines:
        assert command(*shlex.split(line.split(" > ")[0])).code == 0


# SLURM's own commands, as far as the script uses them, on this machine.
SRUN = """#!/bin/bash
shift # --kill-on-bad-exit
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=1; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$SAID"; fi
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the file with what scontrol was asked for."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": str(os.getpid()), "JOB_NODELIST": "here", "CPUS_ON_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    (tmp_path / "said").touch()
    return tmp_path / "said"


@pytest.mark.slow
@pytest.mark.races
@pytest.mark.parametrize("nodes", [1])
def test_a_job_whose_time_is_over_is_queued_again_until_it_has_finished(
    command: Command, runs: TinyRuns, slurm: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(nodes))
    recipe = runs.file("run", "train.steps=300", "checkpoint.every=50", "teachers=[]")
    run = runs.folder / "run"
    script = runs.folder / "job.sh"
    script.write_text(
        command("launch", recipe, "--nodes", nodes, "--gpus", 1, "--for", "slurm", "--max-restarts", 1).out
    )
    job = subprocess.Popen(["bash", script], cwd=runs.folder)
    while not (run / "checkpoints").is_dir() or not steps_on_disk(run):
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(300) == 0
    reached = steps_on_disk(run)[-1]
    assert 50 <= reached < 300 and not (run / "finished").exists()
    assert slurm.read_text().split() == ["requeue", str(os.getpid())]
    assert subprocess.run(["bash", script], cwd=runs.folder, timeout=300).returncode == 0
    assert steps_on_disk(run)[-1] == 300 and (run / "finished").exists()
    assert len(slurm.read_text().splitlines()) == 1
    # A mistake is not tried again: by torchrun at once, by SLURM not at all.
    recipe.write_text(recipe.read_text().replace("steps: 300", "steps: 299"))
    assert subprocess.run(["bash", script], cwd=runs.folder, timeout=300).returncode == 1
    assert "train.steps is 299" in (run / "error.json").read_text()
    assert len(slurm.read_text().splitlines()) == 1
