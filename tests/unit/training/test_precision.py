"""What train.precision comes to on a device, and what the run says of it."""

import pytest
import torch
from tiny import LLAMA, TOKENIZER

from potstill.config import Recipe
from potstill.models.precision import pick_precision, said_precision, set_precision
from potstill.types import PotstillError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


def recipe(dtype="float32", **train):
    return Recipe.model_validate(
        {
            "student": {"config": LLAMA, "tokenizer": TOKENIZER, "dtype": dtype},
            "data": {"sources": [{"files": "unused"}]},
            "train": {"steps": 3, **train},
        }
    )


@pytest.mark.parametrize(
    ("device", "dtype", "new_gpu", "expected"),
    [
        (CPU, "float32", True, "fp32"),
        (MPS, "float32", True, "fp32"),
        (CUDA, "float32", True, "bf16"),
        (CUDA, "bfloat16", True, "bf16"),
        (CUDA, "float64", True, "fp32"),
        (CUDA, "float32", False, "fp32"),  # a GPU that only emulates bfloat16
    ],
)
def test_auto_is_bf16_on_cuda_and_fp32_elsewhere(device, dtype, new_gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: new_gpu)
    assert pick_precision(recipe(dtype), device) == expected
    assert said_precision(recipe(dtype), device).startswith(f"train.precision: {expected} (auto on {device.type}): ")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", [CPU, CUDA, MPS])
def test_what_the_recipe_says_is_done(device, precision):
    assert pick_precision(recipe(precision=precision), device) == precision
    assert said_precision(recipe("bfloat16", precision=precision), device).endswith("float32 masters")


def test_tf32_is_refused_off_cuda_and_set_on_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for device in (CPU, MPS):
        with pytest.raises(PotstillError, match=r"train\.precision: tf32 .* on (cpu|mps): choose auto, fp32 or bf16"):
            pick_precision(recipe(precision="tf32"), device)
    assert asked == []
    set_precision(pick_precision(recipe(precision="tf32"), CUDA))
    assert asked == ["high"]
    for precision in ("fp32", "bf16"):
        set_precision(precision)
    assert asked == ["high"]
