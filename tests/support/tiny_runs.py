"""Runs of a second: a recipe to vary, ways to interrupt it, and what is compared afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_models import TOKENIZER

from potstill.config import Recipe
from potstill.config.recipe import load_recipe, recipe_yaml
from potstill.training.run import Callback, Run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,  # so that a run that restores all but the random state is found out
}


class TinyRuns:
    """Makes recipes whose runs lie in one folder."""

    def __init__(self, folder: Path, teacher: Path, text: Path) -> None:
        self.folder, self.teacher, self.text = folder, teacher, text

    def recipe(self, name: str, *overrides: str, **sections: Any) -> Recipe:
        """A distillation of 8 steps with a checkpoint every 2, changed by sections, then by `key.sub=value`."""
        keys = {
            "run": str(self.folder / name),
            "student": {"tokenizer": TOKENIZER, "config": LLAMA},
            "teachers": [{"model": str(self.teacher)}],
            "data": {"sources": [{"files": str(self.text)}], "max_length": 64, "shuffle_buffer": 16},
            "train": {"steps": 8, "batch_size": 4, "micro_batch_size": 2, "optimizer": {"lr": 1e-2}},
            "checkpoint": {"every": 2},
            "log": {"tensorboard": False},
        }
        return load_recipe(keys | sections, overrides)

    def file(self, name: str, *overrides: str, **sections: Any) -> Path:
        """The same as a YAML file, for the command line."""
        path = self.folder / f"{name}.yaml"
        path.write_text(recipe_yaml(self.recipe(name, *overrides, **sections)), encoding="utf-8")
        return path

    def evaluation(self, **keys: Any) -> dict[str, Any]:
        """An `eval` section over a few of the texts."""
        data = {"sources": [{"files": str(self.text)}], "max_length": 64}
        return {"data": data, "examples": 4, "max_new_tokens": 4} | keys


class Interrupted(Exception):
    """Stands for whatever ends a process."""


class InterruptAt(Callback):
    """Ends the run in the middle of things: after a step was taken, before anything about it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step == self.step:
            raise Interrupted


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "latest" / "model" / "model.safetensors").read_bytes()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The steps of a run without what a clock or the machine decides."""
    timing = ("seconds_", "tokens_per_second", "peak_memory", "rollout_seconds", "rollout_tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(timing)} for line in lines(run / "metrics.jsonl")]


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """The same steps, each once, with the same numbers, and the same bits in the end."""
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(undisturbed)]
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)


def steps_on_disk(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").glob("step-*"))]
