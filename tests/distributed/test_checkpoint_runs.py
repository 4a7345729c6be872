"""Runs that are saved by some ranks and resumed by others end where one process ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks
from safetensors.torch import load_file
from tiny_runs import LLAMA, TinyRuns, lines

import potstill

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
NO_DROPOUT = LLAMA | HEADS | {"attention_dropout": 0.0}  # whose draws depend on the rank


def train(runs: TinyRuns, name: str, *overrides: str) -> None:
    student = runs.recipe(name).student.model_dump(exclude_unset=True) | {"config": NO_DROPOUT}
    potstill.train(runs.recipe(name, "checkpoint.async_save=true", *overrides, student=student))


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> None:
    """Two steps each by dp 2 × tp 2, one process, dp 4 and tp 4."""
    runs = TinyRuns(tmp_path, tiny_teacher, tiny_text)
    for count, steps, sizes in [(4, 2, ("parallel.tp=2",)), (1, 4, ()), (4, 6, ()), (4, 8, ("parallel.tp=4",))]:
        on_ranks(count, train, runs, "moved", f"train.steps={steps}", "train.lr_schedule.shape=constant", *sizes)
    on_ranks(1, train, runs, "alone-constant", "train.lr_schedule.shape=constant")
    moved, alone = tmp_path / "moved", tmp_path / "alone-constant"
    losses = [[line["loss"] for line in lines(run / "metrics.jsonl")] for run in (moved, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 8
    mine, its = (
        {
            name: tensor
            for path in (run / "checkpoints" / "latest" / "model").glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for run in (moved, alone)
    )
    assert mine.keys() == its.keys()
    assert max(float((mine[name] - tensor).abs().max()) for name, tensor in its.items()) < 1e-4
