"""What each token counts, and what is learnt beside the divergence: over ranks as in one process, over 20 steps in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equal_runs import compare, write_inputs

SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "dp2tp2": (4, {"tp": 2}),
}
OWN = {"on_policy_fraction": 1.0, "num_generations": 1, "sampling": {"max_new_tokens": {"start": 3, "end": 9}}}
WEIGHTS = {"skip": 1, "window": 12, "decay": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "weights": {"loss": {"token_weights": WEIGHTS, "token_clip": 0.3}},
    "policy gradient": {
        "loss": {"divergence": "policy_gradient_kl", "temperature": 1.0, "discount": 0.5, "token_clip": 0.5}
        | {"token_weights": {"by_position": [[0, 0.5], [2, 1.0]]}},
        "rollouts": OWN,
    },
    # A function that every process has: how long the answer is.
    "rewards": {
        "loss": {"divergence": "policy_gradient_kl", "temperature": 1.0, "reward_weight": 0.5},
        "rollouts": OWN | {"num_generations": 7, "reward": "equal_runs:letters"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("equal")
    write_inputs(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["dp2", "cp2"])
def test_the_students_own_support_equals_one_process(folder: Path, spread: str) -> None:
    """Under tensor parallelism it is refused."""
    world, parallel = (2, {"cp": 2} if spread == "cp2" else {})
    changes = {"loss": {"divergence": "reverse_kl", "student_top_k": 16}}
    losses, weights = compare(folder, f"support-{spread}", world, changes, {"parallel": parallel})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(folder: Path, kind: str, spread: str) -> None:
    world, parallel = SPREAD[spread]
    losses, weights = compare(folder, f"{kind}-{spread}".replace(" ", "-"), world, KINDS[kind], {"parallel": parallel})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)
