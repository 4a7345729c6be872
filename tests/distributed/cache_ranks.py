"""What two processes do with one cache, and with a loss cut into slices of the vocabulary whose target is narrower."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor

import potstill
from potstill.cache.build import CacheWriter, build
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.losses import DIVERGENCES, SampledTarget, TopKTarget, fused_linear_kd
from potstill.models import load_teacher

VOCABULARY, ROWS = 30, 6
SLICES = [17, 13]
WIDTHS = [22, 17, 9, 30]  # within the second slice, at its edge, within the first (the second has none), and all


def width_calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name → target with a width, and options."""
    found = {}
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(width)
        logp = torch.randn(ROWS, width, dtype=torch.float64, generator=generator).log_softmax(-1)
        top = logp.topk(4)
        kept = TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1)), width=width)
        sampled = SampledTarget(top.indices, torch.full((ROWS, 4), 0.25, dtype=torch.float64), width=width)
        for temperature in (1.0, 2.0):
            for divergence in DIVERGENCES:
                options = {"divergence": divergence, "temperature": temperature}
                found[f"{divergence} {temperature} {width}"] = (kept, options)
            found[f"sampled {temperature} {width}"] = (sampled, {"temperature": temperature})
    return found


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    double = {"dtype": torch.float64, "generator": generator}
    return torch.randn(ROWS, 5, **double), torch.randn(VOCABULARY, 5, **double)


def run_call(name: str, columns: slice, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    target, options = width_calls()[name]
    hidden, weight = inputs()
    hidden, weight = hidden.requires_grad_(), weight[columns].clone().requires_grad_()
    if columns == slice(0, target.width) and group is None:
        target = replace(target, width=None)
    out = fused_linear_kd(hidden, weight, target, group=group, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), "kd": out.kd, "hidden": hidden.grad, "weight": weight.grad}


def recipe(folder: Path, teacher: str, data: dict[str, Any], seed: int) -> dict[str, Any]:
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return {
        "run": str(folder / f"run-{seed}"),
        "student": {
            "tokenizer": "shipped:tokenizers/bytes-2k",
            "config": {**llama, "num_attention_heads": 2, "max_position_embeddings": 128},
        },
        "teachers": [{"model": teacher, "cache": str(folder / "filled"), "store": {"kind": "hidden"}}],
        "data": data,
        "train": {"epochs": 2, "batch_size": 4, "seed": seed},
        "log": {"tensorboard": False},
    }


def work(folder: Path, teacher: str, text: str) -> dict[str, Any]:
    """What one of two ranks finds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = slice(0, SLICES[0]) if rank == 0 else slice(SLICES[0], VOCABULARY)
    found: dict[str, Any] = {"calls": {name: run_call(name, columns, dist.group.WORLD) for name in width_calls()}}

    data = {"sources": [{"files": text}], "max_length": 64}
    model = load_teacher(TeacherConfig(model=teacher), torch.device("cpu"), "teacher", "teacher")
    dist.barrier()
    built = build(
        model,
        StoreConfig(kind="hidden"),
        DataConfig.model_validate(data),
        folder / "built",
        name="teacher",
        batch_tokens=40,
        rank=rank,
        world=world,
        shard_seconds=0.0,
    )
    found["built"] = [built.documents, built.there]

    # A training run each, over the same documents in other orders, into one cache; no group, they know nothing of each other.
    dist.barrier()
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "1"
    with MonkeyPatch.context() as patched:
        found["computed"] = _watched(patched)
        potstill.train(recipe(folder, teacher, data, seed=rank))
    metrics = (folder / f"run-{rank}" / "metrics.jsonl").read_text(encoding="utf-8")
    return found | {"losses": [json.loads(line)["loss"] for line in metrics.splitlines()]}


def _watched(patched: MonkeyPatch) -> list[str]:
    """The keys of what this process computes for the cache, from now on; a shard is written for every few."""
    usual, write, computed = CacheWriter.__init__, CacheWriter.write, []

    def often(self: CacheWriter, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **{**options, "shard_seconds": 0.0})

    def counted(self: CacheWriter, examples: Any) -> Any:
        computed.extend(example.key for example in examples)
        return write(self, examples)

    patched.setattr(CacheWriter, "__init__", often)
    patched.setattr(CacheWriter, "write", counted)
    return computed
