"""What two processes do with one cache, and with a loss cut into slices of the vocabulary whose target is narrower."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


def work(rank: int, world: int, folder: str, teacher: str, text: str) -> None:
    torch.set_num_threads(1)
    here = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    columns = slice(0, SLICES[0]) if rank == 0 else slice(SLICES[0], VOCABULARY)
    found: dict[str, Any] = {"calls": {name: run_call(name, columns, dist.group.WORLD) for name in width_calls()}}

    data = {"sources": [{"files": text}], "max_length": 64}
    model = load_teacher(TeacherConfig(model=teacher), torch.device("cpu"), "teacher", "teacher")
    dist.barrier()
    built = build(
        model,
        StoreConfig(kind="hidden"),
        DataConfig.model_validate(data),
        here / "built",
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
    usual, computed = CacheWriter.__init__, []

    def often(self: CacheWriter, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **{**options, "shard_seconds": 0.0})

    write = CacheWriter.write

    def counted(self: CacheWriter, examples: Any) -> Any:
        computed.extend(example.key for example in examples)
        return write(self, examples)

    CacheWriter.__init__, CacheWriter.write = often, counted
    potstill.train(recipe(here, teacher, data, seed=rank))
    found["computed"] = computed
    found["losses"] = [json.loads(x)["loss"] for x in (here / f"run-{rank}" / "metrics.jsonl").read_text().splitlines()]
    draft = here / f"{rank}.draft"
    torch.save(found, draft)
    draft.rename(here / f"{rank}.pt")
