"""In what a run computes."""

from __future__ import annotations

import torch

from potstill.config import Recipe
from potstill.types import PotstillError

WORDS = {
    "bf16": "products in bfloat16, sums and logits in float32",
    "tf32": "products of float32 matrices rounded to TF32",
    "fp32": "products in the dtype of the weights",
}


def pick_precision(recipe: Recipe, device: torch.device) -> str:
    """`fp32`, `tf32` or `bf16`, as the recipe says, or by the device."""
    asked = recipe.train.precision
    if asked == "tf32" and device.type != "cuda":
        raise PotstillError(
            f"train.precision: tf32 is a format of CUDA devices, and the run is on {device.type}: choose auto, fp32 or bf16"
        )
    if asked != "auto":
        return asked
    exact = recipe.student.dtype == "float64"  # asked for to compare digits
    return "bf16" if device.type == "cuda" and not exact and torch.cuda.is_bf16_supported(False) else "fp32"


def set_precision(precision: str) -> None:
    """For products that autocast does not rule: those of float32 matrices."""
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")


def said_precision(recipe: Recipe, device: torch.device) -> str:
    """A line for the beginning of a run."""
    precision, dtype = pick_precision(recipe, device), recipe.student.dtype
    why = "" if recipe.train.precision == precision else f" (auto on {device.type})"
    masters = ", moved by float32 masters" if dtype == "bfloat16" else ""
    return f"train.precision: {precision}{why}: {WORDS[precision]}; weights in {dtype}{masters}"
