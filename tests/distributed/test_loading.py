"""One rank reads the student's and a spread teacher's weights; the others are sent their parts, and have the same run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from equal_runs import SIZES, apart, recipe, trained, write_inputs
from ranks import on_ranks
from tiny_models import make_model
from transformers import GenerationConfig, PreTrainedModel

SPREAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "dp2": (2, {}, "shard"),
    "tp2": (2, {"tp": 2}, "replicate"),
    "dp2tp2": (4, {"tp": 2}, "shard"),
}


def trained_blind(keys: dict[str, Any]) -> Any:
    """As `trained`, where no rank but the first can read weights."""
    if os.environ.get("RANK", "0") == "0":
        return trained(keys)
    read = vars(PreTrainedModel)["from_pretrained"]  # not bound: the processes go on to other tests

    def refuses(cls: type, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"rank {os.environ['RANK']} reads the weights of {arguments[0]}")

    PreTrainedModel.from_pretrained = classmethod(refuses)  # type: ignore[method-assign, assignment]
    try:
        return trained(keys)
    finally:
        PreTrainedModel.from_pretrained = read  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loading")
    write_inputs(made)
    make_model(
        made / "student", seed=5, dtype="float64", **{**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True}
    )
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(made / "student")
    return made


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "dp2tp2" else ()) for n in SPREAD])
def test_the_first_rank_alone_reads_weights(folder: Path, name: str) -> None:
    """Of a student that is made of some layers of a model, with ties, buffers outside its state dict, and a way to write."""
    world, parallel, placement = SPREAD[name]

    def keys(run: str, place: str = "replicate", **more: Any) -> dict[str, Any]:
        made = recipe(folder, run, train={"steps": 4}, **more)
        student = {"from": str(folder / "student"), "layers": [0, 2], "dtype": "float64"}
        teacher = {"model": str(folder / "teacher"), "dtype": "float64", "placement": place}
        return {**made, "student": student, "teachers": [teacher]}

    (alone,) = on_ranks(1, trained, keys(f"alone-{name}"))
    found = on_ranks(world, trained_blind, keys(name, placement, parallel=parallel))
    losses, weights = apart(found[0], alone)
    assert losses < 1e-8 and weights < 1e-8
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (
            json.loads(next((folder / run).glob(f"checkpoints/*/model/{file}")).read_text())
            for run in (name, f"alone-{name}")
        )
        assert ours == theirs, file
