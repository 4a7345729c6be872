"""What a student learns by beside its teachers, over ranks: the same losses and the same model as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equal_runs import compare, write_inputs

SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "dp2tp2": (4, {"tp": 2}),
    "ep2": (2, {"ep": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2tp2ep2": (4, {"tp": 2, "ep": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("students")
    write_inputs(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["dp2", "ep2", "cp2", "dp2tp2ep2"])
def test_experts_are_balanced_alike(folder: Path, spread: str) -> None:
    """With micro-batches of one row, which are the same however many ranks share them."""
    world, parallel = SPREAD[spread]
    changes: dict[str, Any] = {
        "family": "qwen3-moe",
        "train": {"steps": 8, "batch_size": 8, "micro_batch_size": 1, "optimizer": {"lr": 3e-3}},
        "student": {"router_aux_loss_coef": 0.5},
    }
    losses, weights = compare(folder, f"experts-{spread}", world, changes, {"parallel": parallel})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["dp2", "tp2", "dp2tp2"])
def test_a_narrower_student_is_cut_and_learns_alike(folder: Path, spread: str) -> None:
    world, parallel = SPREAD[spread]
    width = {"hidden": 24, "intermediate": 40, "heads": 2, "kv_heads": 2, "examples": 16}
    student = {"config": None, "tokenizer": None, "from": str(folder / "teacher"), "width": width}
    changes: dict[str, Any] = {"student": student}
    losses, weights = compare(folder, f"narrower-{spread}", world, changes, {"parallel": parallel})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)
