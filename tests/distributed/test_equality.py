"""One recipe over 2 and 4 ranks equals the same recipe in one process: losses and weights, over 20 steps in float64.

The matrix is covered in pairs: every way of spreading the student, every family, every place of the teacher, whose text and
whose tokenizer stand at least once beside every value of the others that is not refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import compare, write_inputs
from served import Served

from potstill.cache.build import build
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.models import load_teacher

SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "dp2tp2": (4, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2tp2": (4, {"cp": 2, "tp": 2}),
    "ep2": (2, {"ep": 2}),
    "dp2tp2ep2": (4, {"tp": 2, "ep": 2}),
}
ROLLOUTS = {
    "off-policy": {},
    "on-policy": {"on_policy_fraction": 1.0, "num_generations": 1, "sampling": {"max_new_tokens": 8}},
    "mixed": {"on_policy_fraction": 0.5, "num_generations": 1, "sampling": {"max_new_tokens": 8}},
}
QUICK = [
    ("tp2", "qwen3", "live", "off-policy", "same"),
    ("dp2", "llama", "live", "mixed", "same"),
]
SLOW = [
    ("dp2", "llama", "live", "off-policy", "same"),
    ("cp2", "gemma3", "live", "off-policy", "same"),
    ("dp4", "qwen3", "cached", "off-policy", "same"),
    ("dp4", "llama", "sharded", "off-policy", "cross"),
    ("hsdp", "phi3", "live", "mixed", "same"),
    ("hsdp", "llama", "remote", "off-policy", "same"),
    ("hsdp", "qwen3", "sharded", "off-policy", "same"),
    ("tp2", "phi3", "cached", "off-policy", "cross"),
    ("tp2", "llama", "own ranks", "on-policy", "same"),
    ("tp2", "phi3", "remote", "mixed", "same"),
    ("dp2", "phi3", "own ranks", "off-policy", "cross"),
    ("dp2", "gemma3", "own ranks", "off-policy", "same"),
    ("dp2tp2", "llama", "live", "off-policy", "cross"),
    ("dp2tp2", "llama", "sharded", "on-policy", "same"),
    ("dp2tp2", "qwen3", "live", "mixed", "same"),
    ("cp2", "llama", "cached", "off-policy", "same"),
    ("cp2", "qwen3", "own ranks", "off-policy", "same"),
    ("cp2tp2", "llama", "live", "off-policy", "cross"),
    ("cp2tp2", "qwen3", "remote", "off-policy", "same"),
    ("ep2", "qwen3-moe", "live", "off-policy", "same"),
    ("ep2", "qwen3-moe", "cached", "off-policy", "cross"),
    ("dp2tp2ep2", "qwen3-moe", "sharded", "off-policy", "same"),
    ("dp4", "qwen3", "write-through", "off-policy", "same"),
    ("dp4", "llama", "write-through", "on-policy", "same"),
    ("dp2tp2", "qwen3", "write-through", "mixed", "same"),
    ("cp2", "llama", "write-through", "mixed", "same"),
    ("cp2", "phi3", "sharded", "mixed", "cross"),
    ("cp2", "qwen3-moe", "remote", "on-policy", "cross"),
    ("cp2tp2", "gemma3", "sharded", "on-policy", "cross"),
    ("cp2tp2", "phi3", "cached", "off-policy", "cross"),
    ("cp2tp2", "phi3", "own ranks", "mixed", "same"),
    ("cp2tp2", "phi3", "write-through", "on-policy", "same"),
    ("dp2", "gemma3", "sharded", "off-policy", "same"),
    ("dp2", "phi3", "cached", "off-policy", "same"),
    ("dp2", "qwen3", "write-through", "on-policy", "cross"),
    ("dp2", "qwen3-moe", "remote", "on-policy", "same"),
    ("dp2tp2", "gemma3", "cached", "off-policy", "cross"),
    ("dp2tp2", "phi3", "remote", "on-policy", "same"),
    ("dp2tp2", "qwen3", "own ranks", "off-policy", "same"),
    ("dp4", "gemma3", "remote", "mixed", "same"),
    ("dp4", "phi3", "live", "on-policy", "cross"),
    ("dp4", "qwen3-moe", "own ranks", "mixed", "cross"),
    ("ep2", "qwen3-moe", "own ranks", "off-policy", "cross"),
    ("ep2", "qwen3-moe", "remote", "on-policy", "cross"),
    ("ep2", "qwen3-moe", "sharded", "mixed", "same"),
    ("ep2", "qwen3-moe", "write-through", "on-policy", "same"),
    ("hsdp", "gemma3", "write-through", "mixed", "cross"),
    ("hsdp", "llama", "cached", "off-policy", "cross"),
    ("hsdp", "qwen3-moe", "own ranks", "on-policy", "cross"),
    ("tp2", "gemma3", "sharded", "off-policy", "cross"),
    ("tp2", "qwen3", "write-through", "off-policy", "same"),
]
AXES = (
    ("dp2", "dp4", "hsdp", "tp2", "dp2tp2", "cp2", "cp2tp2", "ep2"),
    ("llama", "qwen3", "gemma3", "phi3", "qwen3-moe"),
    ("live", "sharded", "own ranks", "cached", "write-through", "remote"),
    tuple(ROLLOUTS),
    ("same", "cross"),
)
REFUSED = {  # the sentences are held to in test_tensor_parallel.py, test_expert_parallel.py and in the table's own test
    *((spread, "qwen3-moe") for spread in ("tp2", "dp2tp2", "cp2tp2")),  # experts are spread whole, by ep
    *(("ep2", family) for family in ("llama", "qwen3", "gemma3", "phi3")),  # which have none
    *(("cached", text) for text in ("on-policy", "mixed")),  # a cache alone does not know fresh text
}


# What is sent or kept is float32, where two batches may round a number apart. AdamW divides a gradient by its own size, and so
# would make a step of the difference where there is next to none: not with a larger epsilon.
ROUNDED = ("remote", "write-through")


def pairs(case: tuple[str, ...]) -> set[tuple[str, ...]]:
    return set(itertools.combinations(case, 2))


def test_every_pair_is_run_or_refused() -> None:
    wanted = {pair for axes in itertools.combinations(AXES, 2) for pair in itertools.product(*axes)}
    run = set().union(*map(pairs, [*QUICK, *SLOW]))
    assert wanted - run == REFUSED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("equal")
    write_inputs(made)
    return made


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    """All of the texts, as hidden states."""
    config = TeacherConfig(model=str(folder / "teacher"))
    data = DataConfig.model_validate({"sources": [{"files": str(folder / "texts.jsonl")}], "max_length": 64})
    model = load_teacher(config, torch.device("cpu"), "teacher", "teacher")
    build(model, StoreConfig(kind="hidden"), data, folder / "cache", name="teacher")
    return folder / "cache"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with Served(folder / "teacher", "--dtype", "float64") as served:
        yield served.address


def run(folder: Path, case: tuple[str, ...], teacher: dict[str, Any]) -> tuple[float, float]:
    spread, family, placed, text, tokenizer = case
    world, parallel = SPREAD[spread]
    model = {"model": str(folder / "teacher"), "dtype": "float64"}
    alone = {"cached": teacher, "remote": teacher}.get(placed, model)
    name = "-".join(case).replace(" ", "-")
    if placed == "write-through":  # each fills a cache of its own
        alone = model | {"cache": str(folder / f"filled-alone-{name}"), "store": {"kind": "hidden"}}
    over = {
        "write-through": alone | {"cache": str(folder / f"filled-{name}")},
        "sharded": model | {"placement": "shard"},
        "own ranks": model | {"ranks": 1},
    }.get(placed, alone)
    changes: dict[str, Any] = {"family": family, "teachers": [alone], "rollouts": ROLLOUTS[text]}
    if tokenizer == "cross":
        changes |= {"student": {"tokenizer": "shipped:tokenizers/pieces-1k"}}
        changes["family"] = "llama-1k" if family == "llama" else family
    if placed in ROUNDED:
        changes["train"] = {"optimizer": {"lr": 3e-3, "eps": 1e-4}}
    # Of 7 rows over 4 ranks, one in a pass, one rank has none in the last.
    rows = {"micro_batch_size": 1} if spread in ("dp4", "hsdp") else {}
    more = {"parallel": parallel, "teachers": [over], "train": changes.get("train", {}) | rows}
    return compare(folder, name, world + (placed == "own ranks"), changes, more)


@pytest.mark.parametrize("case", QUICK, ids=" ".join)
def test_a_run_over_ranks_equals_one_process(folder: Path, case: tuple[str, ...]) -> None:
    losses, weights = run(folder, case, {})
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=" ".join)
def test_every_way_equals_one_process(folder: Path, case: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    teacher: dict[str, Any] = {}
    if case[2] == "cached":
        teacher = {"cache": str(request.getfixturevalue("cache"))}
    elif case[2] == "remote":
        kind = "hidden" if case[4] == "cross" else "top_k"  # which a teacher with another tokenizer gives at T = 1 only
        teacher = {"server": request.getfixturevalue("server"), "remote": {"kind": kind}}
    losses, weights = run(folder, case, teacher)
    near = 1e-10 if case[2] == "own ranks" else 1e-8
    assert losses < near and weights < near, (losses, weights)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["off-policy", "mixed"])
def test_ranks_with_a_budget_of_tokens_equal_one_process_with_fixed_rows(folder: Path, text: str) -> None:
    """Two ranks make equally many passes of at most 100 positions, however many rows there are in each."""
    changes = {"data": {"packing": False}, "rollouts": ROLLOUTS[text]}
    filled = {"train": {"tokens_per_micro_batch": 100, "micro_batch_size": None}}
    losses, weights = compare(folder, f"tokens-{text}", 2, changes, filled)
    assert losses < 1e-8 and weights < 1e-8, (losses, weights)
