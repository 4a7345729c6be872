"""Teachers with ranks of their own: the student that 2 ranks train has the parameters of one process, whatever the tokenizers,
and however many teachers there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from taught import write_files
from tiny_models import make_model

from potstill.config import Recipe
from potstill.models import load_student, loading
from potstill.parallel.mesh import world
from potstill.teachers.combine import compute_targets
from potstill.teachers.open import as_teachers_need, open_teachers
from potstill.teachers.placed import asking, open_channels, own_ranks, serve
from potstill.training.student import LossSettings, StudentLoss

CPU = torch.device("cpu")
SMALL = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SETTINGS = LossSettings("jsd", 0.3, 0.1, 1.7, 0.8, 0.2)
MICRO_BATCHES, STEPS = 4, 3


def recipe(folder: Path, teachers: list[dict[str, Any]], tokenizer: str = "bytes-2k") -> dict[str, Any]:
    files = folder / "text.jsonl"
    return {
        "student": {"config": SMALL, "tokenizer": f"shipped:tokenizers/{tokenizer}"},
        "teachers": teachers,
        "data": {"sources": [{"files": str(files)}], "max_length": 48, "piece_bytes": 150, "packing": True},
        "loss": {"temperature": 1.7, "divergence": "jsd"},
        "train": {"steps": STEPS, "batch_size": 2 * MICRO_BATCHES, "micro_batch_size": 2},
    }


@contextmanager
def doubles() -> Iterator[None]:
    """All models in float64."""
    before = loading._pretrained, loading._fresh
    loading._pretrained = lambda *a, **k: before[0](*a, **k).double()
    loading._fresh = lambda *a, **k: before[1](*a, **k).double()
    try:
        yield
    finally:
        loading._pretrained, loading._fresh = before


def trained(keys: dict[str, Any]) -> list[torch.Tensor] | None:
    """The parameters after a few steps, of a rank that trains; the micro-batches of a step are dealt."""
    made = Recipe.model_validate(keys)
    with doubles(), world(made.parallel, CPU, teaching=own_ranks(made)) as here:
        channels = open_channels(made, here.world) if here.many else []
        if not here.student:
            serve(made, channels, CPU)
            return None
        with asking(made, channels, 60.0) as askers:
            return steps(made, askers, here.dp.index, here.dp.size, here.sums.group)


def steps(made: Recipe, askers: Any, index: int, size: int, group: Any) -> list[torch.Tensor]:
    from potstill.data import StepBatches

    student = load_student(made.student, CPU, 0)
    data = as_teachers_need(made.data, made.teachers)
    teachers = open_teachers(made.teachers, student, data, made.loss, CPU, askers).teachers
    module = StudentLoss(student).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches = StepBatches(
        data, student.tokenizer, batch_size=2 * MICRO_BATCHES, micro_batch_size=2, seed=0, epochs=9, state=None
    )
    for _, step in zip(range(STEPS), batches, strict=False):
        mine = step.batches[index::size]
        ready = [[teacher.prepare(batch) for teacher in teachers] for batch in mine]
        for batch, prepared in zip(mine, ready, strict=True):
            targets = compute_targets(teachers, prepared, batch, made.loss)
            loss, _ = module(batch, targets, sum(b.supervised_tokens for b in step.batches), SETTINGS)
            loss.backward()
        for p in module.parameters():
            assert p.grad is not None
            if group is not None:
                dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
    for teacher in teachers:
        teacher.close()
    return [p.detach() for p in module.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_files(tmp_path_factory.mktemp("placed"))
    make_model(made / "one", seed=1, dtype="float64")
    make_model(made / "two", seed=2, dtype="float64", hidden_size=16, tie_word_embeddings=True)
    return made


def compare(world: int, folder: Path, teachers: list[dict[str, Any]], **keys: Any) -> None:
    in_place = [
        {key: value for key, value in teacher.items() if key not in ("ranks", "placement")} for teacher in teachers
    ]
    (wanted,) = on_ranks(1, trained, recipe(folder, in_place, **keys))
    found = [each for each in on_ranks(world, trained, recipe(folder, teachers, **keys)) if each is not None]
    assert len(found) == world - sum(teacher.get("ranks", 0) for teacher in teachers)
    for each in found:
        for ours, theirs in zip(each, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_one_tokenizer(folder: Path) -> None:
    compare(3, folder, [{"model": str(folder / "one"), "ranks": 1}])


def test_two_copies_and_another_tokenizer(folder: Path) -> None:
    compare(4, folder, [{"model": str(folder / "one"), "ranks": 2}], tokenizer="pieces-1k")


def test_several_teachers_with_places_of_their_own(folder: Path) -> None:
    teachers = [{"model": str(folder / "one"), "ranks": 1}, {"model": str(folder / "two"), "ranks": 1, "weight": 0.5}]
    compare(3, folder, teachers)
    compare(4, folder, [teachers[0], {"model": str(folder / "two"), "weight": 0.5}])
