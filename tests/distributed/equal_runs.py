"""Whole runs in float64, in one process and over ranks: the same losses step by step, and the same weights at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from safetensors.torch import load_file
from spread_students import exact
from tiny_models import TOKENIZER, make_model, write_jsonl

STEPS = 20
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 2051},  # nothing divides it
    "llama-1k": {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 1029},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 8},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, **WINDOW},
    "phi3": {"model_type": "phi3", "resid_pdrop": 0.0},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,  # which depends on how a step is cut into micro-batches
    },
}
WORDS = tuple("the people of the united states have a government by consent and a law that all must keep".split())  # noqa: SIM905


def write_inputs(folder: Path) -> None:
    """Texts of very different lengths, and two teachers in float64."""
    texts = [" ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(2 + (7 * i) % 19)) + f" {i}" for i in range(60)]
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in texts])
    make_model(folder / "teacher", seed=1, dtype="float64", num_attention_heads=4)
    make_model(folder / "second", seed=2, dtype="float64", num_attention_heads=4, hidden_size=16)


def recipe(folder: Path, name: str, family: str = "llama", **changes: Any) -> dict[str, Any]:
    """T ≠ 1, accumulation, checkpointed activations, and 7 rows a step, which no number of ranks divides."""
    keys: dict[str, Any] = {
        "run": str(folder / name),
        "student": {"tokenizer": TOKENIZER, "dtype": "float64", "config": SIZES | FAMILIES[family]},
        "teachers": [{"model": str(folder / "teacher"), "dtype": "float64"}],
        "data": {"sources": [{"files": str(folder / "texts.jsonl")}], "max_length": 64, "shuffle_buffer": 16},
        "loss": {"divergence": "jsd", "temperature": 1.7, "ce_weight": 0.2},
        "train": {
            "steps": STEPS,
            "batch_size": 7,
            "micro_batch_size": 2,
            "gradient_checkpointing": True,
            "optimizer": {"lr": 3e-3},
        },
        "log": {"tensorboard": False},
    }
    for key, value in changes.items():
        keys[key] = {**keys.get(key, {}), **value} if isinstance(value, Mapping) else value
    return keys


def trained(keys: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]] | None:
    """On one of the ranks: the first gives the losses and the exported weights."""
    import os

    import potstill

    with exact() if "gemma" in str(keys["student"]) else nullcontext():
        run = potstill.train(keys)
    if os.environ.get("RANK", "0") != "0":
        return None
    lines = (Path(keys["run"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    weights = {name: tensor for path in run.model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return [json.loads(line)["loss"] for line in lines], weights


def letters(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """A reward (`rollouts.reward`)."""
    return float(len(completion))


def apart(found: Any, alone: Any) -> tuple[float, float]:
    """The largest differences of losses and of weights."""
    losses = max(abs(a - b) for a, b in zip(found[0], alone[0], strict=True))
    assert found[1].keys() == alone[1].keys()
    return losses, max(float((found[1][name] - alone[1][name]).abs().max()) for name in alone[1])


_alone: dict[str, Any] = {}


def compare(
    folder: Path, name: str, world: int, changes: dict[str, Any], spread: dict[str, Any]
) -> tuple[float, float]:
    """A run with `changes`, in one process and, with `spread` on top, over so many ranks."""
    key = json.dumps(changes, sort_keys=True)
    if key not in _alone:
        (_alone[key],) = on_ranks(1, trained, recipe(folder, f"alone-{len(_alone)}", **changes))
    found = on_ranks(world, trained, recipe(folder, name, **{**changes, **spread}))
    return apart(found[0], _alone[key])
