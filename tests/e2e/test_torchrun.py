"""`torchrun … -m potstill train`: the same files as one process writes, one sentence for what is wrong, and ranks that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_model

pytestmark = pytest.mark.e2e
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RECIPE = Path(__file__).parents[2] / "recipes" / "distil.yaml"
SMALL = ["train.batch_size=4", "eval.every=25", "eval.examples=8", "eval.max_new_tokens=4"]


def started(processes: int, *words: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "--nproc-per-node", str(processes), *options, "-m", "potstill"] if processes > 1 else []
    return subprocess.run(
        [*(command or [sys.executable, "-m", "potstill"]), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def records(run: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_four_processes_write_what_one_writes(tmp_path: Path) -> None:
    """The README's command, over 50 steps in float32."""
    runs = {1: tmp_path / "one", 4: tmp_path / "four"}
    for processes, more in ((1, ()), (4, ("parallel.tp=2",))):
        ended = started(processes, "train", RECIPE, f"run={runs[processes]}", "train.steps=50", *SMALL, *more)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("student: ") == 1
    one, four = (records(runs[n], "metrics.jsonl") for n in (1, 4))
    assert [line["step"] for line in four] == list(range(1, 51))
    assert max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(one, four, strict=True)) < 1e-5
    assert [line.keys() for line in one] == [line.keys() for line in four]
    assert [line["tokens"] for line in one] == [line["tokens"] for line in four]
    for a, b in zip(records(runs[1], "evals.jsonl"), records(runs[4], "evals.jsonl"), strict=True):
        assert a.keys() == b.keys() and a["tokens"] == b["tokens"] and a["bytes"] == b["bytes"]
        assert a["bits_per_byte"] == pytest.approx(b["bits_per_byte"], rel=1e-5)
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-4)
    assert {path.name for path in runs[1].iterdir()} == {path.name for path in runs[4].iterdir()}
    said = started(1, "report", runs[1], runs[4], "--out", tmp_path / "report.html")
    assert said.returncode == 0, said.stderr
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "latest" / "model") for run in runs.values()]
    for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert float((mine - theirs).abs().max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("spread", [[], ["--tp", 2], ["--shard"]], ids=["dealt", "tp", "shard"])
def test_two_processes_evaluate_as_one(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, spread: list[object]
) -> None:
    """`potstill eval` deals 7 texts among them, or cuts the models; the first says the numbers."""
    student = make_model(tmp_path / "student", seed=3)
    words = ["eval", student, "--teacher", tiny_teacher, "--data", tiny_text, "--examples", 7, "--json"]
    one, two = started(1, *words), started(2, *words, *spread)
    assert one.returncode == 0 and two.returncode == 0, two.stderr
    found, expected = json.loads(two.stdout), json.loads(one.stdout)
    assert found["tokens"] == expected["tokens"] and found["bytes"] == expected["bytes"]
    for name in ("bits_per_byte", "perplexity", "kl", "agreement", "accuracy", "ece"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tp=3"], "are 3 ranks, and there are 2 for the student"),
        (["train.batch_size=1"], "train.batch_size 1 has no row for each of 2 data-parallel ranks"),
    ],
)
def test_what_is_refused_is_refused_by_all(words: list[str], says: str, tmp_path: Path) -> None:
    ended = started(2, "train", RECIPE, f"run={tmp_path / 'run'}", "train.steps=2", *words)
    assert ended.returncode == 1
    assert says in " ".join(ended.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_one_rank_meets_is_said_once(tmp_path: Path) -> None:
    """A model that is not there is found by every rank; the first says it."""
    ended = started(2, "train", RECIPE, f"run={tmp_path / 'run'}", "train.steps=2", f"teachers.0.model={tmp_path}/none")
    assert ended.returncode == 1
    assert ended.stderr.count("error: ") == 1 and "teachers[0].model" in ended.stderr
