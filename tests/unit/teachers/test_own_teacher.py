"""The student itself as its teacher: as it began, as an average of its weights, as it is now, without its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model, write_jsonl
from tiny_runs import InterruptAt, Interrupted, TinyRuns, lines, metrics

import potstill
from potstill.config.recipe import load_recipe
from potstill.training.optimizer import moved
from potstill.training.run import Callback, Run
from potstill.training.setup import assemble
from potstill.types import PotstillError

DECAY = 0.7
PLAIN = ["checkpoint.every=null", "loss.ce_weight=0.5"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("own") / "model", seed=3, hidden_size=16, intermediate_size=24)


@pytest.fixture
def runs(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


def numbers(run: Run) -> list[tuple[float, float]]:
    return [(line["loss"], line["kd"]) for line in lines(run.folder / "metrics.jsonl")]


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_frozen_is_the_same_model_given_as_a_teacher(runs: TinyRuns, base: Path, lora: Any) -> None:
    """Bit for bit; and so is, with adapters, the model without them, which takes no memory."""
    student = {"model": str(base), "lora": lora}
    teachers: dict[str, dict[str, Any]] = {"given": {"model": str(base)}, "frozen": {"student": "frozen"}}
    if lora is not None:
        teachers["off"] = {"student": "frozen", "adapter": False}
    found = {
        name: numbers(potstill.train(runs.recipe(name, *PLAIN, student=student, teachers=[teacher])))
        for name, teacher in teachers.items()
    }
    assert found["given"][-1][1] > 1e-4, "the student has moved away"
    assert all(each == found["given"] for each in found.values())


def test_without_the_adapter_there_is_one_model(runs: TinyRuns, base: Path) -> None:
    teachers = [{"student": "frozen", "adapter": False}]
    parts = assemble(runs.recipe("run", student={"model": str(base), "lora": {"r": 4}}, teachers=teachers))
    (teacher,) = parts.teachers
    assert teacher.source.language_model.model is parts.student.model


class Weights(Callback):
    """Keeps the weights of every checkpoint."""

    def __init__(self) -> None:
        self.student: list[dict[str, torch.Tensor]] = []
        self.average: list[dict[str, torch.Tensor]] = []

    def saved(self, run: Run, checkpoint: Path) -> None:
        self.student.append(load_file(checkpoint / "model" / "model.safetensors"))
        self.average.append(load_file(checkpoint / "average-0.safetensors"))


def test_an_average_follows_its_formula_and_resumes_exactly(runs: TinyRuns, base: Path) -> None:
    keys = {"student": {"model": str(base)}, "teachers": [{"student": "ema", "decay": DECAY}]}
    options = ["loss.ce_weight=0.5", "checkpoint.every=1"]
    seen = Weights()
    whole = potstill.train(runs.recipe("whole", *options, **keys), [seen])
    expected = load_file(base / "model.safetensors")
    for student, average in zip(seen.student, seen.average, strict=True):
        expected = {name: DECAY * value + (1 - DECAY) * student[name] for name, value in expected.items()}
        assert all(torch.allclose(average[name], value, atol=1e-6) for name, value in expected.items())
    assert len(seen.average) == 8 and numbers(whole)[0][1] == pytest.approx(0.0, abs=1e-6)
    assert numbers(whole)[-1][1] > 1e-5
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("again", *options, **keys), [InterruptAt(5)])
    again = potstill.train(runs.recipe("again", *options, **keys))
    assert metrics(again.folder) == metrics(whole.folder)
    files = [run.checkpoint / "average-0.safetensors" for run in (whole, again) if run.checkpoint is not None]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_average_of_bfloat16_weights_moves(runs: TinyRuns, base: Path) -> None:
    """By a thousandth of a step, which bfloat16 would round away."""
    keys = {"student": {"model": str(base), "dtype": "bfloat16"}, "teachers": [{"student": "ema"}]}
    run = potstill.train(runs.recipe("run", "loss.ce_weight=0.5", "train.steps=3", **keys))
    assert run.checkpoint is not None
    average, began = load_file(run.checkpoint / "average-0.safetensors"), load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert average[name].dtype == torch.float32
    moved = (average[name] != began[name].bfloat16().float()).float().mean()
    assert moved > 0.9, moved


def test_an_average_of_bfloat16_weights_is_that_of_their_masters(runs: TinyRuns, base: Path) -> None:
    """With steps so small that the rounded weights mostly stay where they are."""
    keys = {"student": {"model": str(base), "dtype": "bfloat16"}, "teachers": [{"student": "ema", "decay": 0.5}]}
    options = ["loss.ce_weight=0.5", "train.steps=3", "train.optimizer.lr=1e-5"]
    parts = assemble(runs.recipe("run", *options, **keys))
    (average,) = parts.averages
    name = "model.layers.0.mlp.up_proj.weight"
    weight = parts.student.model.get_parameter(name)
    (master,) = [m for each in parts.optimizers for m, w in moved(each) if w is weight]
    before = average.model.model.get_parameter(name).clone()
    with torch.no_grad():
        master.add_(1e-6)  # which no bfloat16 weight of this size shows
    average.update({id(w): m for each in parts.optimizers for m, w in moved(each)})
    after = average.model.model.get_parameter(name)
    torch.testing.assert_close(after - before, torch.full_like(after, 5e-7), rtol=0.05, atol=1e-8)


def test_the_student_of_now_with_a_hint_is_a_copy_of_it_with_that_hint(
    runs: TinyRuns, base: Path, tmp_path: Path
) -> None:
    """At the first step, before it has moved; afterwards its teacher moves with it."""
    records = [
        {"q": f"In {1790 + i} the law", "a": f" was kept {i} times.", "hint": f"It was kept {i} times."}
        for i in range(20)
    ]
    source = {"files": str(write_jsonl(tmp_path / "qa.jsonl", records)), "prompt": "q", "completion": "a"}
    data = {"sources": [source], "max_length": 96}
    found = {}
    for kind in ("live", "frozen"):
        teachers = [{"student": kind, "context_column": "hint"}]
        recipe = runs.recipe(kind, *PLAIN, student={"model": str(base)}, teachers=teachers, data=data)
        found[kind] = numbers(potstill.train(recipe))
    assert found["live"][0] == pytest.approx(found["frozen"][0], rel=1e-6) and found["live"][0][1] > 1e-3
    assert abs(found["live"][-1][1] - found["frozen"][-1][1]) > 1e-4


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"student": "live"}, "student: live would say what the student says"),
        ({"student": "ema", "adapter": False}, "adapter: false goes with student: frozen or live"),
        ({"student": "ema", "model": "x"}, "student goes without model"),
        ({"student": "frozen", "adapter": False}, "there is no adapter to leave out"),
        ({"student": "frozen", "decay": 0.5}, "decay goes with student: ema"),
        ({"model": "x", "adapter": False}, "decay and adapter go with student"),
        ({"student": "frozen", "dtype": "bfloat16"}, "student goes without revision, dtype"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(teacher: dict[str, Any], said: str) -> None:
    keys = {"student": {"model": "x"}, "data": {"sources": [{"files": "x"}]}, "train": {"steps": 1}}
    with pytest.raises(PotstillError) as caught:
        load_recipe({**keys, "teachers": [teacher]})
    assert said in str(caught.value)


def test_over_ranks_a_student_that_trains_cannot_teach() -> None:
    keys = {"student": {"model": "x"}, "data": {"sources": [{"files": "x"}]}, "train": {"steps": 1}}
    teachers = [{"student": "live", "context_column": "hint"}]
    with pytest.raises(PotstillError, match="spread over the ranks of the run"):
        load_recipe({**keys, "teachers": teachers, "parallel": {"tp": 2}})


def test_a_head_that_learns_is_not_that_of_the_model_without_adapters(runs: TinyRuns, base: Path) -> None:
    student = {"model": str(base), "lora": {"r": 2, "modules_to_save": ["lm_head"]}}
    with pytest.raises(PotstillError, match="changes weights that are the teacher's too"):
        assemble(runs.recipe("run", student=student, teachers=[{"student": "frozen", "adapter": False}]))
