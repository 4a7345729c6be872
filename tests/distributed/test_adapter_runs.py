"""Students with adapters, with frozen parameters, and as their own teachers, over ranks: the same losses and the same model as
in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equal_runs import compare, write_inputs
from tiny_models import make_model

SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "dp2tp2": (4, {"tp": 2}),
}
MIXED = {"on_policy_fraction": 0.5, "num_generations": 1, "sampling": {"max_new_tokens": 8}}
STUDENTS: dict[str, dict[str, Any]] = {
    "lora": {
        "lora": {"r": 4, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    },
    "frozen": {"freeze": ["embed_tokens", "layers.0.*", "norm"]},
}
QUICK = [("tp2", "lora", "mixed", "model")]
SLOW = [
    ("dp2", "lora", "mixed", "model"),
    ("dp2tp2", "lora", "off", "model"),
    ("dp2tp2", "frozen", "off", "model"),
    ("tp2", "frozen", "off", "model"),
    ("dp2", "lora", "off", "frozen"),
    ("dp2tp2", "lora", "off", "ema"),
    ("tp2", "frozen", "off", "ema"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    write_inputs(made)
    make_model(made / "base", seed=5, dtype="float64", num_attention_heads=4)
    return made


@pytest.mark.parametrize(
    ("spread", "kind", "text", "teacher"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_what_learns_over_ranks_is_what_learns_in_one_process(
    folder: Path, spread: str, kind: str, text: str, teacher: str
) -> None:
    world, parallel = SPREAD[spread]
    student = {"config": None, "tokenizer": None, "model": str(folder / "base"), **STUDENTS[kind]}
    changes: dict[str, Any] = {"student": student, "rollouts": MIXED if text == "mixed" else {}}
    if teacher != "model":
        changes["teachers"] = [{"student": teacher, **({"decay": 0.8} if teacher == "ema" else {})}]
    losses, weights = compare(folder, f"{spread}-{kind}-{text}-{teacher}", world, changes, {"parallel": parallel})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)
