"""A fresh student of a teacher with another tokenizer begins with a little of loss.repeat_weight, and ends without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import TOKENIZER
from tiny_runs import LLAMA, InterruptAt, Interrupted, TinyRuns, lines

import potstill
from potstill.config import Recipe, TrainConfig
from potstill.config.recipe import load_recipe
from potstill.training.setup import assemble
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e

OTHER = {"tokenizer": "shipped:tokenizers/pieces-1k", "config": LLAMA}


def weight_of(recipe: Recipe) -> Any:
    return assemble(recipe).recipe.loss.repeat_weight


def test_it_fades_is_said_and_is_saved(runs: TinyRuns, command: Callable[..., Any]) -> None:
    said = command("train", runs.file("fresh", student=OTHER))
    assert said.code == 0 and "loss.repeat_weight: 0.3, which fades to 0 over the first 0.5 of the steps" in said.out
    weights = [step["repeat_weight"] for step in lines(runs.folder / "fresh" / "metrics.jsonl")]
    assert weights == pytest.approx([0.3 * max(0.0, 1 - step / 3.5) for step in range(8)])
    saved = load_recipe(runs.folder / "fresh" / "recipe.yaml")
    assert saved.loss.repeat_weight == saved.train.fading_repeat()


@pytest.mark.parametrize(
    ("overrides", "student"),
    [
        ((), {"tokenizer": TOKENIZER, "config": LLAMA}),
        (("train.optimizer.name=muon",), OTHER),
        (("loss.kd_weight=0", "loss.ce_weight=1"), OTHER),
    ],
    ids=["its own tokenizer", "muon", "text alone"],
)
def test_where_it_is_off(runs: TinyRuns, overrides: tuple[str, ...], student: dict[str, Any]) -> None:
    assert weight_of(runs.recipe("off", *overrides, student=student)) is None


def test_a_recipe_that_says_is_obeyed_and_a_trained_student_has_none(runs: TinyRuns) -> None:
    assert weight_of(runs.recipe("said", "loss.repeat_weight=0", student=OTHER)) == 0
    potstill.train(runs.recipe("first", "train.steps=2", student=OTHER))
    trained = {"model": str(runs.folder / "first" / "checkpoints" / "latest" / "model")}
    assert weight_of(runs.recipe("second", student=trained)) is None


def test_in_a_run_that_is_made_longer_it_lasts_so_many_steps_all_the_same(runs: TinyRuns) -> None:
    potstill.train(runs.recipe("longer", student=OTHER))
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("longer", "train.steps=400", student=OTHER), callbacks=[InterruptAt(9)])
    saved = load_recipe(runs.folder / "longer" / "recipe.yaml")
    assert saved.loss.repeat_weight == TrainConfig(steps=400).fading_repeat()
    with pytest.raises(PotstillError, match=r"other settings \(loss\.repeat_weight"):
        potstill.train(runs.recipe("longer", "train.steps=400", "loss.repeat_weight=0.2", student=OTHER))


def test_how_long_it_lasts() -> None:
    lasts = {steps: TrainConfig(steps=steps).fading_repeat().over * steps for steps in (50, 200, 1000)}
    assert lasts == pytest.approx({50: 25, 200: 100, 1000: 100})
    assert TrainConfig(epochs=1).fading_repeat().over == 0.1
