"""A source of signal that somebody else wrote: one class, one line, and a recipe trains with it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from taught import data_of, write_files
from tiny import LLAMA, batch_of, examples

import potstill
from potstill.config.registry import TEACHER_SOURCES
from potstill.losses import DenseTarget
from potstill.losses.dense import target_logits
from potstill.teachers.open import Opened, Opening
from potstill.teachers.protocols import Signal, SignalSource
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.teacher import Teacher
from potstill.types import PotstillError


class Sharp(SignalSource):
    """Every token is the one that follows in the text, but for one in `odds`."""

    def __init__(self, vocabulary: int, odds: float) -> None:
        self.vocabulary, self.odds = vocabulary, odds

    def signal(self, batch, reading, asked, host):
        tokens = [torch.from_numpy(one.token).to(batch.input_ids.device) for one in asked]
        rows = [torch.nn.functional.one_hot(some, self.vocabulary).float() for some in tokens]
        return [Signal(DenseTarget(logits=some * math.log(self.odds))) for some in rows]


def open_sharp(opening: Opening) -> Opened:
    source = Sharp(opening.student.vocabulary, opening.config.options["odds"])
    return Opened(opening.teacher(source, SameTokenizerView()))


def recipe(folder: Path, **teacher):
    data = data_of(write_files(folder))
    return {
        "run": str(folder / "run"),
        "student": {"config": {**LLAMA, "max_position_embeddings": 128}, "tokenizer": "shipped:tokenizers/bytes-2k"},
        "teachers": [teacher],
        "data": data,
        "train": {"steps": 2, "batch_size": 4},
    }


def test_a_recipe_trains_with_it(tmp_path, monkeypatch):
    monkeypatch.setitem(TEACHER_SOURCES, "sharp", f"{__name__}:open_sharp")
    run = potstill.train(recipe(tmp_path, source="sharp", options={"odds": 1000.0}))
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["kd"] > 0 for step in steps)


def test_what_it_says_reaches_the_rows():
    batch = batch_of(*examples([9, 17, 4]))
    target = Teacher(Sharp(2048, 9.0), SameTokenizerView(), "sharp").targets(batch)
    assert torch.equal(target_logits(target, slice(None)).argmax(-1), batch.rows.labels)


def test_a_name_that_nobody_added(tmp_path):
    with pytest.raises(
        PotstillError, match=r"teachers\[0\]\.source: there is no nobody; there are model, server, cache"
    ):
        potstill.train(recipe(tmp_path, source="nobody"))
    with pytest.raises(PotstillError, match="source goes without model, server and cache"):
        potstill.train(recipe(tmp_path, source="sharp", model="shipped:teacher"))
