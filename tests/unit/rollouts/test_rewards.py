"""What rewards are worth among the answers to one prompt, and how they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from potstill.config import RolloutsConfig
from potstill.rollouts.buffer import FILE, Generation, as_file, load_saved
from potstill.rollouts.engine import Completion
from potstill.rollouts.rewards import advantages


def test_advantages_by_hand() -> None:
    assert advantages([1.0, 3.0]) == [-1.0, 1.0]
    assert advantages([0.0, 0.0, 3.0, 3.0]) == [-1.0, -1.0, 1.0, 1.0]
    assert advantages([2.5] * 3) == [0.0] * 3
    assert advantages([0.0, 1.0, 5.0]) == pytest.approx(
        [-2 / 14**0.5 * 3**0.5, -1 / 14**0.5 * 3**0.5, 3 / 14**0.5 * 3**0.5]
    )


def test_a_checkpoint_keeps_rewards(tmp_path: Path) -> None:
    text = Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), "eos")
    made = [
        Generation("a", {(0, 0): text, (0, 1): text}, 3, 0.5, {(0, 0): 1.25}),
        Generation("b", {(1, 0): text}, 4, 0.5),
    ]
    (tmp_path / FILE).write_bytes(as_file(made))
    assert [one.rewards for one in load_saved(tmp_path)] == [{(0, 0): 1.25}, {}]


def test_a_reward_needs_answers_to_compare() -> None:
    with pytest.raises(ValueError, match="num_generations is 1: set it to 2 or more"):
        RolloutsConfig(on_policy_fraction=1.0, reward="m:f")
