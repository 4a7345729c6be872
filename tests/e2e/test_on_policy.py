"""Whole runs on text that the student, or its teacher, writes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_killed import Process
from safetensors.torch import load_file
from tiny_models import make_model, write_jsonl
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run, lines, metrics

import potstill
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e

OWN = {"on_policy_fraction": 1.0, "prompt_tokens": 6, "sampling": {"max_new_tokens": 10}}
CHAT = [
    [
        {"role": "user", "content": f"How many are {i} and {i}?"},
        {"role": "assistant", "content": f"They are {2 * i}."},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "Quite."},
    ]
    for i in range(12)
]

VARIANTS: dict[str, dict[str, Any]] = {
    "strict": OWN,
    "mixed, two a prompt": OWN | {"on_policy_fraction": 0.5, "num_generations": 2},
    "several steps a generation": OWN | {"steps_per_generation": 3, "max_staleness": 2, "num_generations": 2},
    "written ahead": OWN | {"max_staleness": 1},
    "written ahead, several steps": OWN | {"steps_per_generation": 2, "max_staleness": 3, "on_policy_fraction": 0.7},
    "the teacher writes": OWN | {"on_policy_fraction": 0.3, "teacher_fraction": 0.5},
}


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model" / "model.safetensors")


@pytest.mark.parametrize("rollouts", VARIANTS.values(), ids=VARIANTS)
def test_interrupted_run_ends_with_the_same_bits(runs: TinyRuns, rollouts: dict[str, Any]) -> None:
    dropout = "student.dropout=0.1"  # so that the random state counts
    potstill.train(runs.recipe("whole", dropout, rollouts=rollouts, loss={"divergence": "reverse_kl"}))
    broken = runs.recipe("broken", dropout, rollouts=rollouts, loss={"divergence": "reverse_kl"})
    for step in (1, 4, 7):
        with pytest.raises(Interrupted):
            potstill.train(broken, [InterruptAt(step)])
    potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    saved = [path.parent.name for path in (runs.folder / "broken").rglob("rollouts.safetensors")]
    overlaps = rollouts.get("max_staleness", 0) >= 2 * rollouts.get("steps_per_generation", 1) - 1
    assert bool(saved) == (overlaps or rollouts.get("steps_per_generation", 1) == 3)  # 8 steps end within three


def test_dropout_is_off_where_the_student_writes_unless_the_recipe_has_it(runs: TinyRuns, capsys: Any) -> None:
    gaps = {}
    for name, dropout in (("default", "null"), ("kept", "0.1"), ("off", "0")):
        potstill.train(runs.recipe(name, f"student.dropout={dropout}", "train.steps=2", rollouts=OWN))
        gaps[name] = [line["sampling_logprob_gap"] for line in metrics(runs.folder / name)]
        said = capsys.readouterr().out.splitlines()
        gaps[name].append([line for line in said if line.startswith("student.dropout")])
    assert max(gaps["default"][:2]) < 1e-5 and max(gaps["off"][:2]) < 1e-5
    assert min(gaps["kept"][:2]) > 1e-4
    assert gaps["default"][2] == [
        "student.dropout: the student is trained with 0 in place of its own 0.1, for it writes without "
        "(student.dropout keeps "
        "it)"
    ]
    assert gaps["off"][2] == ["student.dropout: the student is trained with 0 in place of its own 0.1"]
    assert gaps["kept"][2] == [
        "student.dropout: 0.1 is on while the student trains and off while it writes, so what it says of its own text "
        "differs "
        "between the two (sampling_logprob_gap): 0 takes the difference away"
    ]
    config = json.loads((runs.folder / "default/checkpoints/latest/model/config.json").read_text())
    assert config["attention_dropout"] == 0.0
    potstill.train(runs.recipe("data", "train.steps=1"))  # nothing is written: the model's own stays
    config = json.loads((runs.folder / "data/checkpoints/latest/model/config.json").read_text())
    assert config["attention_dropout"] == 0.1 and "student.dropout" not in capsys.readouterr().out


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits(runs: TinyRuns) -> None:
    options = ["train.steps=40", "checkpoint.every=3", "checkpoint.keep=3", "student.dropout=0.1"]
    rollouts = VARIANTS["written ahead, several steps"]
    undisturbed = potstill.train(runs.recipe("whole", *options, rollouts=rollouts)).folder
    recipe = runs.file("killed", *options, rollouts=rollouts)
    run = runs.folder / "killed"
    for steps in (4, 10, 15, 20):  # far from the end: a busy machine looks late
        process = Process(recipe, run)
        process.wait_for(lambda process=process, steps=steps: process.steps() >= steps)
        process.send(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    potstill.train(recipe)
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("packing", [True, False])
def test_any_split_into_micro_batches_takes_the_same_steps(runs: TinyRuns, packing: bool) -> None:
    rollouts = OWN | {"on_policy_fraction": 0.5, "num_generations": 2}
    found = []
    for micro in (1, 2, 4):
        options = [f"train.micro_batch_size={micro}", f"data.packing={str(packing).lower()}", "train.steps=3"]
        run = potstill.train(runs.recipe(f"micro-{micro}", *options, rollouts=rollouts)).folder
        found.append(final(run))
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-4)  # a step is 1e-2


def test_the_log_tells_what_was_written(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", rollouts=OWN)).folder
    for line in lines(run / "metrics.jsonl"):
        assert (
            line["rollout_length"] == 10.0 and line["completions_clipped"] == 1.0 and line["completions_ended"] == 0.0
        )
        assert (
            line["rollout_tokens_per_second"] > 0 and 0 < line["rollout_distinct_1"] <= line["rollout_distinct_2"] <= 1
        )
        assert line["rollout_staleness"] == 0 and line["kd"] > 0


def test_chats_and_prompts_are_answered(runs: TinyRuns, tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "chat.jsonl", [{"m": chat} for chat in CHAT])
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"q": f"Question {i}: "} for i in range(12)])
    for name, source in (
        ("chat", {"files": str(chats), "messages": "m"}),
        ("asked", {"files": str(asked), "prompt": "q"}),
    ):
        data = {"sources": [source], "max_length": 96}
        run = potstill.train(runs.recipe(name, "train.epochs=1", "train.steps=null", rollouts=OWN, data=data))
        assert run.step == run.total_steps == 3 and run.counts["written_examples"] == 12
        assert run.counts["supervised_tokens"] == run.counts["written_tokens"] == 120


@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld"])
def test_a_teacher_with_other_tokens_corrects_what_the_student_wrote(
    runs: TinyRuns, tmp_path: Path, method: str, other_teacher: Path
) -> None:
    chats = write_jsonl(tmp_path / "chat.jsonl", [{"m": chat} for chat in CHAT])
    sources = [{"files": str(runs.text)}, {"files": str(chats), "messages": "m"}]
    run = potstill.train(
        runs.recipe(
            method,
            rollouts=OWN | {"on_policy_fraction": 0.5, "teacher_fraction": 0.25},
            teachers=[{"model": str(other_teacher), "cross_tokenizer": {"method": method}}],
            data={"sources": sources, "max_length": 96, "shuffle_buffer": 32},
        )
    ).folder
    found = metrics(run)
    assert len(found) == 8
    for line in found:
        assert line["kd"] > 0 and line["align_bytes"] > 0.5


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the shipped Unigram vocabulary, and the chat template of the other."""
    from transformers import AutoTokenizer

    from potstill.shipped import locate

    folder = tmp_path_factory.mktemp("other") / "teacher"
    make_model(folder, vocab_size=1024)
    tokenizer = AutoTokenizer.from_pretrained(locate("shipped:tokenizers/pieces-1k"))
    tokenizer.chat_template = AutoTokenizer.from_pretrained(locate("shipped:tokenizers/bytes-2k")).chat_template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_teacher_that_cannot_write_is_told_of(runs: TinyRuns) -> None:
    rollouts = OWN | {"on_policy_fraction": 0.0, "teacher_fraction": 1.0}
    with pytest.raises(PotstillError, match="a cache alone cannot know fresh text"):
        runs.recipe("x", rollouts=rollouts, teachers=[{"cache": "nowhere"}])


@pytest.mark.parametrize("name", ["on-policy", "mixed", "sequence-level"])
def test_the_recipes_run_on_what_ships(command: Any, tmp_path: Path, name: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    short = ["train.steps=3", "train.batch_size=4", "train.micro_batch_size=2", "rollouts.sampling.max_new_tokens=12"]
    evaluation = ["eval.examples=4", "eval.on_policy_samples=2", "eval.max_new_tokens=4", "log.tensorboard=false"]
    said = command("train", recipe, f"run={tmp_path / 'run'}", *short, *evaluation)
    assert said.code == 0, said.err
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["rollout_length"] for line in found if "rollout_length" in line] and len(found) == 3
    assert found[-1]["kd"] > 0
    (evaluated,) = lines(tmp_path / "run" / "evals.jsonl")
    assert evaluated["on_policy_reverse_kl"] > 0 and "reverse KL on its own text" in said.out


def test_by_drawn_tokens_what_older_weights_drew_is_corrected(runs: TinyRuns) -> None:
    """The score function on text of weights one step old. That its gradient is right is in test_score.py."""
    run = potstill.train(
        runs.recipe(
            "drawn",
            "train.steps=10",
            "train.batch_size=16",
            "train.micro_batch_size=16",
            "log.stat_rows=512",
            rollouts=OWN | {"max_staleness": 1},
            loss={"divergence": "policy_gradient_kl", "ratio_clip": 4.0},
        )
    ).folder
    found = lines(run / "metrics.jsonl")
    assert {line["rollout_staleness"] for line in found} == {0, 1}
    assert all(line["advantage"] < 0 for line in found)  # minus the reverse KL, but for chance
    assert (
        all(0 < line["ratio_mean"] < 4 for line in found)
        and 5 * found[0]["sampling_logprob_gap"] < found[1]["sampling_logprob_gap"]
    )


def test_a_run_that_goes_on_with_other_settings_says_what_cannot_be(runs: TinyRuns) -> None:
    three = OWN | {"steps_per_generation": 3, "max_staleness": 2}
    potstill.train(runs.recipe("run", "train.steps=4", rollouts=three))
    anyway = ["train.steps=6", "checkpoint.resume=force"]
    with pytest.raises(
        PotstillError, match=r"within a generation that was written with other settings \(rollouts.num_gen"
    ):
        potstill.train(runs.recipe("run", *anyway, rollouts=three | {"num_generations": 2}))
    with pytest.raises(PotstillError, match=r"the text of the run in .* is written, and the recipe's is not"):
        potstill.train(runs.recipe("run", *anyway))
    potstill.train(runs.recipe("run", *anyway, rollouts=three))
    assert [line["step"] for line in metrics(runs.folder / "run")] == [1, 2, 3, 4, 5, 6]
    potstill.train(runs.recipe("read", "train.steps=2"))
    with pytest.raises(PotstillError, match=r"the text of the run in .* is not written, and the recipe's is"):
        potstill.train(runs.recipe("read", *anyway, rollouts=OWN))


@pytest.mark.parametrize("call", [5, 6])
def test_an_error_of_a_teacher_ends_a_run_with_its_steps_saved(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """At the first or the second micro-batch of the third step."""
    from potstill.teachers.teacher import Teacher

    asked = Teacher.answer

    def answer(self: Any, batch: Any, prepared: Any) -> Any:
        calls.append(batch)
        if len(calls) == call:
            raise PotstillError("the teacher is gone")
        return asked(self, batch, prepared)

    calls: list[Any] = []
    dropout = "student.dropout=0.1"
    potstill.train(runs.recipe("whole", dropout, rollouts=OWN))
    monkeypatch.setattr(Teacher, "answer", answer)
    options = [dropout, "checkpoint.every=null"]
    with pytest.raises(PotstillError, match="the teacher is gone; the run is saved at step 2"):
        potstill.train(runs.recipe("run", *options, rollouts=OWN))
    monkeypatch.undo()
    potstill.train(runs.recipe("run", *options, rollouts=OWN))
    assert_same_run(runs.folder / "run", runs.folder / "whole")  # also what dropout had drawn of the third


def test_an_error_between_steps_leaves_the_random_state_where_it_is(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    from potstill.rollouts.transformers import TransformersEngine

    generate = TransformersEngine.generate

    def failing(self: Any, asked: Any) -> Any:
        calls.append(asked)
        if len(calls) == 4:  # of the fourth step
            raise PotstillError("it cannot write")
        return generate(self, asked)

    calls: list[Any] = []
    dropout = "student.dropout=0.1"
    potstill.train(runs.recipe("whole", dropout, rollouts=OWN))
    monkeypatch.setattr(TransformersEngine, "generate", failing)
    with pytest.raises(PotstillError, match="it cannot write; the run is saved at step 3"):
        potstill.train(runs.recipe("run", dropout, "checkpoint.every=null", rollouts=OWN))
    monkeypatch.undo()
    potstill.train(runs.recipe("run", dropout, "checkpoint.every=null", rollouts=OWN))
    assert_same_run(runs.folder / "run", runs.folder / "whole")
