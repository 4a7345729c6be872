"""A few steps of a student whose teachers are anywhere: parameters and losses, to be compared with those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from spread_students import full
from taught import sentence
from tiny_models import make_model, write_jsonl
from transformers import PreTrainedModel

from potstill.config import ParallelConfig, Recipe
from potstill.data import StepBatches
from potstill.models import load_student, loading
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.parallel.channel import Asker
from potstill.parallel.context import Context, split_context
from potstill.parallel.mesh import Ranks, world
from potstill.parallel.tensor import split_tensors
from potstill.teachers.combine import compute_targets
from potstill.teachers.open import as_teachers_need, open_teachers
from potstill.teachers.placed import asking, own_ranks, serve_teacher

CPU = torch.device("cpu")
ROWS = 2051  # ids of the student's head; nothing that is tried divides them
SMALL = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": ROWS,
}
SETTINGS = LossSettings("jsd", 0.3, 0.1, 1.7, 0.8, 0.2)
STEPS = 3
Found = dict[str, Any]


def write_models(folder: Path) -> Path:
    """Texts of two languages, and teachers: as wide as the student's head; narrower, and tied; and one whose heads 2 ranks do
    not divide."""
    records = [{"text": f"{sentence(i, 4 + i * 5 % 14)}.", "lang": "de" if i % 3 else "fr"} for i in range(20)]
    write_jsonl(folder / "text.jsonl", records)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    make_model(folder / "one", seed=1, dtype="float64", vocab_size=ROWS, **heads)
    make_model(folder / "two", seed=2, dtype="float64", hidden_size=16, tie_word_embeddings=True, **heads)
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    make_model(folder / "three", seed=3, dtype="float64", **odd)
    return folder


def recipe(folder: Path, teachers: Sequence[Mapping[str, Any]], tokenizer: str = "bytes-2k", **more: Any) -> Found:
    """Three rows of one document or more a step, one a pass: on two data-parallel ranks one has nothing in the last pass."""
    return {
        "student": {"config": SMALL, "tokenizer": f"shipped:tokenizers/{tokenizer}"},
        "teachers": list(teachers),
        "data": {
            "sources": [{"files": str(folder / "text.jsonl")}],
            "max_length": 48,
            "piece_bytes": 150,
            "packing": True,
        },
        "loss": {"temperature": 1.7, "divergence": "jsd"},
        "train": {"steps": STEPS, "batch_size": 3, "micro_batch_size": 1},
        **more,
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


def in_place(keys: Found) -> Found:
    """The same with one process."""
    elsewhere = ("ranks", "placement", "tp")
    teachers = [{k: v for k, v in teacher.items() if k not in elsewhere} for teacher in keys["teachers"]]
    for teacher in teachers:
        if "cache" in teacher and "model" in teacher:
            teacher["cache"] += "-alone"  # to be filled by it
    return {key: value for key, value in keys.items() if key != "parallel"} | {"teachers": teachers}


def compare(count: int, cases: list[Found], atol: float = 1e-10) -> list[list[Found | None]]:
    """What each rank found, of each case, after it was compared with one process."""
    alone = on_ranks(1, trained, [in_place(keys) for keys in cases])[0]
    found = on_ranks(count, trained, cases)
    for number, keys in enumerate(cases):
        here = [each[number] for each in found if each[number] is not None]
        assert len(here) == count - sum(teacher.get("ranks", 0) for teacher in keys["teachers"])
        for each in here:
            assert each["losses"] == pytest.approx(alone[number]["losses"], abs=atol, rel=0)
            for ours, theirs in zip(each["parameters"], alone[number]["parameters"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    return [list(each) for each in zip(*found, strict=True)]


def trained(all_keys: Sequence[Found]) -> list[Found | None]:
    """Of each recipe the parameters after a few steps and the losses, on a rank that trains."""
    return [_trained(parsed(keys)) for keys in all_keys]


def parsed(keys: Found) -> Recipe:
    parallel = ParallelConfig.model_validate(keys.get("parallel", {}))
    made = Recipe.model_validate({key: value for key, value in keys.items() if key != "parallel"})
    return made.model_copy(update={"parallel": parallel})


def _trained(made: Recipe) -> Found | None:
    with doubles(), world(made.parallel, CPU, teaching=own_ranks(made)) as here:
        if not here.student:
            serve_teacher(made, here, CPU)
            return None
        with asking(made, here, CPU, 60.0) as askers:
            return steps(made, askers, here)


def steps(made: Recipe, askers: Mapping[int, Asker], here: Ranks) -> Found:
    student = load_student(made.student, CPU, 0)
    if here.tp.size > 1:
        assert here.mesh is not None
        split_tensors(student.model, here.mesh["tp"])
        student.group = here.tp.group
    if here.cp.group is not None:
        student.context = Context(here.cp.group, here.cp.size, here.cp.index)
        split_context(student.model)
    data = as_teachers_need(made.data, made.teachers)
    teacher_set = open_teachers(made.teachers, student, data, made.loss, CPU, askers)
    teachers = teacher_set.teachers
    module = StudentLoss(student).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    sizes = {"batch_size": made.train.batch_size, "micro_batch_size": made.train.micro_batch_size or 1}
    dealt = (here.dp.index, here.dp.size)
    losses, silent = [], 0
    batches = StepBatches(data, student.tokenizer, **sizes, seed=0, epochs=9, state=None, rank=dealt)
    for _, step in zip(range(STEPS), batches, strict=False):
        ready = [[teacher.prepare(batch) for teacher in teachers] for batch in step.batches]
        tokens = summed(torch.tensor(sum(batch.supervised_tokens for batch in step.batches)), here.dp.group)
        total = torch.zeros((), dtype=torch.float64)
        for batch, prepared in zip(step.batches, ready, strict=True):
            silent += not batch.supervised_tokens
            targets = compute_targets(teachers, prepared, batch, made.loss)
            loss, _ = module(batch, targets, int(tokens), SETTINGS)
            loss.backward()
            total += loss.detach()
        losses.append(float(summed(total, here.sums.group)))
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            summed(local(p.grad), here.sums.group)
        optimizer.step()
        optimizer.zero_grad()
    waited = [teacher.waited for teacher in teachers]
    for teacher in teachers:
        teacher.close()
    return {
        "parameters": [full(p).detach() for p in module.parameters()],
        "losses": losses,
        "silent": silent,  # passes without rows
        "notes": teacher_set.notes,
        "waited": waited,
        "held": [held(teacher.source.language_model.model) for teacher in teacher_set.live],
    }


def held(model: PreTrainedModel) -> int:
    """Weights of it that this rank has in its memory."""
    return sum(local(p).numel() for p in model.parameters() if not p.is_meta)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def summed(values: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values
