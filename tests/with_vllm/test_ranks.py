"""Two ranks with a real vLLM each, in their processes: the run is that of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks
from test_training import metrics, recipe, written_by

import potstill

pytestmark = pytest.mark.vllm


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def trained(keys: dict[str, Any]) -> int:
    return potstill.train(keys).step


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=["dp 2", "tp 2"])
def test_every_rank_writes_its_share_in_its_process(needs_vllm: None, tmp_path: Path, parallel: dict[str, int]) -> None:
    """Each has a whole copy, which takes the weights of a student that is spread over both. Twice, so that what vLLM leaves
    behind in a process is in nobody's way."""
    rollouts = written_by(None, tmp_path)
    student = {"tokenizer": "shipped:teacher", "config": SMALL}
    loss = {"divergence": "forward_kl"}  # of reverse KL a token that rounding draws otherwise shows more
    alone = on_ranks(1, trained, recipe(tmp_path / "alone", rollouts=rollouts, loss=loss, student=student), timeout=500)
    runs = [tmp_path / "two", tmp_path / "again"]
    for run in runs:
        keys = recipe(run, rollouts=rollouts, loss=loss, student=student, parallel=parallel)
        assert on_ranks(2, trained, keys, timeout=500) == [*alone, *alone] == [4, 4]
    expected = metrics(tmp_path / "alone")
    for run in runs:
        found = metrics(run)
        assert all(line["sampling_logprob_gap"] < 1e-3 for line in found)
        assert [line["loss"] for line in found[:2]] == pytest.approx([line["loss"] for line in expected[:2]], rel=1e-4)
