"""Micro-batches filled up to a number of tokens: the same documents and the same gradient as of a fixed number of rows."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from taught import KD, data_of, relative, step, write_files
from tiny import examples, tiny
from tiny_runs import InterruptAt, Interrupted, TinyRuns, metrics

import potstill
from potstill.config.recipe import load_recipe
from potstill.data import StepBatches
from potstill.data.dealing import Share
from potstill.objective.student_loss import LossSettings
from potstill.rollouts.buffer import Layout, laid_out
from potstill.teachers.live import live_teacher
from potstill.types import PotstillError

MIXED = LossSettings("jsd", 0.5, 0.1, 1.7, 1.0, 0.3)


def gradients(batches, settings: LossSettings = KD):
    student, teacher = tiny(0), tiny(1, hidden_size=48)
    for model in (student.model, teacher.model):
        model.double()
    live = live_teacher(teacher, 2048, "teacher")
    return step(student, batches, [live.targets(batch) for batch in batches], settings)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gradient_of_a_step_does_not_depend_on_the_budget(tmp_path: Path, packing: bool, ranks: int) -> None:
    data, tokenizer = data_of(write_files(tmp_path), packing=packing, max_length=64), tiny().tokenizer

    def first_step(**how: Any):
        """All ranks' micro-batches of it."""
        sizes = {"batch_size": 12, "seed": 0, "epochs": 1, "micro_batch_size": 2} | how
        dealt = [StepBatches(data, tokenizer, **sizes, rank=(rank, ranks)) for rank in range(ranks)]
        made = [next(batches).batches for batches in dealt]
        assert len({len(batches) for batches in made}) == 1
        return list(chain(*made))

    loss, expected = gradients(first_step(), MIXED)
    for tokens in (64, 150, 2000):
        batches = first_step(tokens_per_micro_batch=tokens)
        assert max(batch.input_ids.numel() for batch in batches) <= tokens
        found, gradient = gradients(batches, MIXED)
        assert found == pytest.approx(loss, rel=1e-10) and relative(gradient, expected) < 1e-10


@pytest.mark.parametrize("packing", [True, False])
def test_written_text_is_dealt_by_tokens_too(packing: bool) -> None:
    texts = examples([60, 4, 9, 31, 7, 12, 5, 33, 8])
    fixed = laid_out(texts, Layout(9, Share(4), 0, packing))
    loss, expected = gradients(fixed)
    for tokens in (60, 130, 600):
        batches = laid_out(texts, Layout(9, Share(4, tokens=tokens), 0, packing))
        assert max(batch.input_ids.numel() for batch in batches) <= tokens
        assert sum(len(batch.examples) for batch in batches) == len(texts)
        found, gradient = gradients(batches)
        assert found == pytest.approx(loss, rel=1e-10) and relative(gradient, expected) < 1e-10
    room = [sum(b.input_ids.numel() for b in made) for made in (batches, fixed)]
    assert room[0] <= room[1]


def recipe(tokens: int, **train: Any) -> dict[str, Any]:
    return {
        "student": {"model": "unused"},
        "data": {"sources": [{"files": "unused"}], "max_length": 128},
        "train": {"steps": 1, "tokens_per_micro_batch": tokens, **train},
    }


def test_a_budget_without_room_for_a_document_is_refused_when_the_recipe_is_read() -> None:
    assert load_recipe(recipe(128)).train.tokens_per_micro_batch == 128
    with pytest.raises(
        PotstillError, match=r"train\.tokens_per_micro_batch 127 has no room for a row of data\.max_length 128"
    ):
        load_recipe(recipe(127))
    with pytest.raises(PotstillError, match="give micro_batch_size or tokens_per_micro_batch, not both"):
        load_recipe(recipe(128, micro_batch_size=2))


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(
    "other", [("train.micro_batch_size=4",), ("train.micro_batch_size=null", "train.tokens_per_micro_batch=70")]
)
def test_a_run_resumes_with_other_micro_batches(
    tmp_path: Path, tiny_teacher: Path, tiny_text: Path, packing: str, other: tuple[str, ...]
) -> None:
    """In float64, so that only the order of sums differs: the losses are those of a run that kept its micro-batches."""
    runs = TinyRuns(tmp_path, tiny_teacher, tiny_text)
    exact = ["student.dtype=float64", "teachers.0.dtype=float64", "student.config.attention_dropout=0.0"]
    exact += [f"data.packing={packing}", "train.steps=6", "log.stat_rows=0"]
    whole = potstill.train(runs.recipe("whole", *exact)).folder
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("changed", *exact), [InterruptAt(3)])
    changed = potstill.train(runs.recipe("changed", *exact, *other)).folder
    for ours, theirs in zip(metrics(changed), metrics(whole), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in ("loss", "kd", "ce", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), (ours["step"], name)
    filled = len(other) == 2
    read = load_recipe(changed / "recipe.yaml").train
    assert read.tokens_per_micro_batch == (70 if filled else None) and read.micro_batch_size == (None if filled else 4)
