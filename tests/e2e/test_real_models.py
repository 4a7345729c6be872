"""Really pretrained models and real text, where the folder of assets is there (POTSTILL_ASSETS, or ../shared/assets)."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from potstill import train
from potstill.config import DataConfig, StudentConfig
from potstill.evals.fidelity import evaluate, evaluation_batches
from potstill.models import load_student

ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "data" / "tinystories" / "stories_clean.jsonl"

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason=f"no real models and text at {ASSETS}")


def stories(**changes):
    return {"sources": [{"files": str(STORIES)}], "max_length": 256, "piece_bytes": 450, **changes}


@pytest.mark.parametrize(("name", "most"), [("stories260K", 1.2), ("stories15M", 0.75)])
def test_bits_per_byte_is_what_transformers_own_loss_says(name, most):
    """A shift by one, a lost bos or a wrong head would be far off, and a model read wrongly far above `most`."""
    student = load_student(StudentConfig(model=str(ASSETS / "models" / name)), torch.device("cpu"), 0)
    data = DataConfig.model_validate(stories())
    batches = list(evaluation_batches(data, student, 4, 8))
    result = evaluate(student, None, batches, torch.device("cpu"))
    nats = size = 0.0
    for example in (example for batch in batches for example in batch.examples):
        ids = student.tokenizer(example.text, return_tensors="pt").input_ids
        with torch.no_grad():
            nats += student.model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        size += len(example.text.encode())
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert result["bits_per_byte"] < most


def test_a_student_of_some_of_its_layers_comes_closer_to_the_teacher(tmp_path):
    teacher = str(ASSETS / "models" / "stories260K")
    run = train(
        {
            "run": tmp_path / "run",
            "student": {"from": teacher, "layers": [0, 2, 4]},
            "teachers": [{"model": teacher}],
            "data": stories(),
            "train": {"steps": 30, "batch_size": 4, "optimizer": {"lr": 3e-3}},
            "eval": {"data": stories(), "examples": 12, "every": 15},
            "log": {"tensorboard": False},
        }
    )
    evaluations = [json.loads(line) for line in (run.folder / "evals.jsonl").read_text().splitlines()]
    assert evaluations[1]["kl"] < 0.9 * evaluations[0]["kl"]
    assert evaluations[1]["bits_per_byte"] < evaluations[0]["bits_per_byte"]
