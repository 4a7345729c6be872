"""`potstill.train` from Python, what a run leaves behind, and the kinds of training one loop does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model, write_jsonl
from tiny_runs import LLAMA, TinyRuns, assert_same_run, lines, metrics, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import potstill
from potstill.config.recipe import load_recipe
from potstill.shipped import locate
from potstill.training import loop
from potstill.training.metrics import peak_memory_bytes
from potstill.training.run import Callback, Run

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]


class Diary(Callback):
    """What happened, in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []

    def started(self, run: Run) -> None:
        self.entries.append(("started", run.step))

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        assert metrics["step"] == run.step
        self.entries.append(("stepped", run.step))

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        assert evaluation["step"] == run.step
        self.entries.append(("evaluated", run.step))

    def saved(self, run: Run, checkpoint: Path) -> None:
        assert checkpoint.name == f"step-{run.step:08d}" and (checkpoint / "manifest.json").exists()
        self.entries.append(("saved", run.step))

    def ended(self, run: Run) -> None:
        self.entries.append(("ended", run.step))


def test_python_and_the_command_line_are_one(runs: TinyRuns, command: Command) -> None:
    evaluation = runs.evaluation(every=3, prompts=["The people"])
    recipe = runs.file("command", "train.steps=4", "checkpoint.every=3", eval=evaluation)
    said = command("train", recipe)
    assert said.code == 0 and said.err == ""
    assert said.out.splitlines()[-1] == f"student: {runs.folder}/command/checkpoints/step-00000004/model"

    keys = runs.recipe("python", "train.steps=4", "checkpoint.every=3", eval=evaluation).model_dump(by_alias=True)
    diary = Diary()
    run = potstill.train(keys, callbacks=[diary])
    assert_same_run(runs.folder / "python", runs.folder / "command")
    assert lines(run.folder / "evals.jsonl") == lines(runs.folder / "command" / "evals.jsonl")
    at_3 = [("stepped", 3), ("evaluated", 3), ("saved", 3)]
    best_at_4 = [("stepped", 4), ("evaluated", 4), ("saved", 4), ("ended", 4)]
    assert diary.entries == [("started", 0), ("stepped", 1), ("stepped", 2), *at_3, *best_at_4]
    assert (run.step, run.total_steps, run.stopped_by) == (4, 4, None)
    assert run.model == run.folder / "checkpoints" / "step-00000004" / "model"

    # The recipe a run leaves is whole: nothing in it depends on what it was made from.
    again = command("train", run.folder / "recipe.yaml", f"run={runs.folder / 'again'}")
    assert again.code == 0
    assert weights(runs.folder / "again") == weights(run.folder)
    left = load_recipe(run.folder / "recipe.yaml")
    assert left.data.piece_bytes is not None  # as it was measured
    assert left == load_recipe(keys, [f"data.piece_bytes={left.data.piece_bytes}"])


def test_callbacks_end_when_the_run_fails(runs: TinyRuns) -> None:
    class Fails(Callback):
        def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
            raise ZeroDivisionError

    diary = Diary()
    with pytest.raises(ZeroDivisionError):
        potstill.train(runs.recipe("run"), [diary, Fails()])
    assert diary.entries == [("started", 0), ("stepped", 1), ("ended", 1)]


def test_the_export_is_the_trained_model(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    assemble = loop.assemble
    monkeypatch.setattr(loop, "assemble", lambda recipe, askers: parts.append(assemble(recipe)) or parts[0])
    run = potstill.train(runs.recipe("run", "train.steps=3"))
    loaded = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    assert not loaded.training
    ids = tokenizer("The people of the union", return_tensors="pt").input_ids
    trained = parts[0].student.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained(ids).logits)
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)


def losses(run: Run, key: str = "loss") -> list[float]:
    return [line[key] for line in metrics(run.folder)]


def test_distillation_lowers_the_divergence(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", "train.steps=25", "train.optimizer.lr=0.03", "checkpoint.every=null"))
    kl = losses(run, "kl")
    assert kl[-1] < 0.8 * kl[0]
    assert losses(run) == pytest.approx(losses(run, "kd"))  # forward KL at T = 1 without cross-entropy
    assert all(0 <= line["agreement"] <= 1 for line in metrics(run.folder))


def test_teacherless_training_is_the_same_loop(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", "train.steps=20", "train.optimizer.lr=0.03", teachers=[]))
    steps = metrics(run.folder)
    assert [line["loss"] for line in steps] == pytest.approx([line["ce"] for line in steps])
    assert steps[0]["ce"] == pytest.approx(7.62, abs=0.1)  # ln 2048: it knows nothing yet
    assert steps[-1]["ce"] < 5
    assert {(line["kd"], line["kl"], line["kd_weight"]) for line in steps} == {(None, None, 0.0)}


def test_a_student_made_of_layers_begins_as_its_model(runs: TinyRuns) -> None:
    """All layers kept, it is its teacher: nothing to learn. With fewer it is another model, and learns."""
    same = {"from": str(runs.teacher), "layers": [0, 1, 2]}
    run = potstill.train(runs.recipe("same", "train.steps=1", student=same))
    assert losses(run, "kl")[0] == pytest.approx(0, abs=1e-6)
    assert losses(run, "agreement")[0] == 1
    fewer = {"from": str(runs.teacher), "layers": [0, 2]}
    run = potstill.train(runs.recipe("fewer", "train.steps=12", "train.optimizer.lr=3e-3", student=fewer))
    assert losses(run)[-1] < 0.9 * losses(run)[0]
    loaded, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (run.model, runs.teacher))
    assert loaded.config.num_hidden_layers == len(loaded.model.layers) == 2
    first, last = (loaded.model.layers[i].mlp.up_proj.weight for i in (0, 1))
    assert torch.dist(last, teacher.model.layers[2].mlp.up_proj.weight) < torch.dist(last, first)


def test_prompts_are_read_and_not_learnt(runs: TinyRuns) -> None:
    records = [{"question": f"What came in {year}?", "answer": "Peace."} for year in range(1800, 1820)]
    file = write_jsonl(runs.folder / "pairs.jsonl", records)
    data = {"sources": [{"files": str(file), "prompt": "question", "completion": "answer"}], "max_length": 64}
    run = potstill.train(runs.recipe("run", "train.steps=3", "train.batch_size=2", data=data))
    answer = len(AutoTokenizer.from_pretrained(runs.teacher)("Peace.", add_special_tokens=False).input_ids) + 1  # eos
    counts = run.counts
    assert counts["supervised_tokens"] == answer * counts["examples"] < counts["tokens"]
    assert losses(run, "tokens")[-1] == counts["supervised_tokens"]


def test_every_assistant_turn_of_a_chat_is_learnt(runs: TinyRuns) -> None:
    turns = [("user", "Who?"), ("assistant", "Congress."), ("user", "When?"), ("assistant", "In 1812.")]
    chat = [{"role": role, "content": content} for role, content in turns]
    file = write_jsonl(runs.folder / "chats.jsonl", [{"chat": chat}] * 8)
    tokenizer = AutoTokenizer.from_pretrained(runs.teacher)
    assert tokenizer.chat_template
    data = {"sources": [{"files": str(file), "messages": "chat"}], "max_length": 64, "packing": False}
    run = potstill.train(runs.recipe("run", "train.steps=2", "train.batch_size=2", data=data))
    said = sum(len(tokenizer(turn, add_special_tokens=False).input_ids) for turn in ("Congress.", "In 1812."))
    assert run.counts["examples"] == 4
    assert run.counts["supervised_tokens"] == 4 * (said + 2)  # and the mark that ends each turn


def test_schedules_are_followed_and_told(runs: TinyRuns) -> None:
    loss = {
        "temperature": {"start": 4.0, "end": 1.0, "over": 0.5},
        "kd_weight": {"start": 1.0, "end": 0.0},
        "ce_weight": {"start": 0.0, "end": 1.0, "shape": "cosine"},
    }
    train = {"steps": 5, "batch_size": 2, "lr_schedule": {"shape": "linear", "warmup_steps": 1, "min_lr_ratio": 0.0}}
    run = potstill.train(runs.recipe("run", loss=loss, train=train))
    steps = metrics(run.folder)
    assert [line["temperature"] for line in steps] == [4.0, 2.5, 1.0, 1.0, 1.0]
    assert [line["kd_weight"] for line in steps] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [line["ce_weight"] for line in steps] == pytest.approx([0, 0.1464466, 0.5, 0.8535534, 1])
    assert [line["lr"] / 3e-4 for line in steps] == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0])
    for line in steps[:-1]:  # at the last step the teacher has no weight and is not asked
        assert line["loss"] == pytest.approx(line["kd_weight"] * line["kd"] + line["ce_weight"] * line["ce"], rel=1e-5)
    assert steps[-1]["kd"] is None and steps[-1]["loss"] == pytest.approx(steps[-1]["ce"])


NO_DROPOUT = "student.config.attention_dropout=0.0"


def test_other_ways_to_the_same_curve(runs: TinyRuns) -> None:
    """Recomputed activations change nothing, other micro-batches only the order of sums, bfloat16 only digits."""
    plain = losses(potstill.train(runs.recipe("plain", NO_DROPOUT, "train.steps=5")))
    recomputed = runs.recipe("recomputed", NO_DROPOUT, "train.steps=5", "train.gradient_checkpointing=true")
    assert losses(potstill.train(recomputed)) == plain
    whole = runs.recipe("whole", NO_DROPOUT, "train.steps=5", "train.micro_batch_size=4")
    assert losses(potstill.train(whole)) == pytest.approx(plain, rel=1e-5)
    short = losses(potstill.train(runs.recipe("short", NO_DROPOUT, "train.steps=5", "train.precision=bf16")))
    assert short == pytest.approx(plain, rel=2e-2) and short != plain


def test_dropout_is_on_in_training(runs: TinyRuns) -> None:
    config = {**LLAMA, "attention_dropout": 0.5}
    student = {"tokenizer": "shipped:tokenizers/bytes-2k", "config": config}
    dropped = losses(potstill.train(runs.recipe("dropped", "train.steps=2", student=student)))
    assert dropped != losses(potstill.train(runs.recipe("plain", NO_DROPOUT, "train.steps=2")))


@pytest.mark.slow
def test_compiled_training_has_the_same_curve(runs: TinyRuns) -> None:
    plain = losses(potstill.train(runs.recipe("plain", NO_DROPOUT, "train.steps=4")))
    compiled = losses(potstill.train(runs.recipe("compiled", NO_DROPOUT, "train.steps=4", "train.compile=true")))
    assert compiled == pytest.approx(plain, abs=1e-4)


def test_two_teachers_weigh_as_told(runs: TinyRuns) -> None:
    """Twice the same teacher with weights that sum to one is that teacher."""
    one = potstill.train(runs.recipe("one", "train.steps=2"))
    twice = [{"model": str(runs.teacher), "weight": weight} for weight in (0.25, 0.75)]
    two = potstill.train(runs.recipe("two", "train.steps=2", teachers=twice))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    other = [twice[0], {"model": str(make_model(runs.folder / "other", seed=2)), "weight": 0.75}]
    assert losses(potstill.train(runs.recipe("other-run", "train.steps=2", teachers=other))) != pytest.approx(
        losses(one), rel=1e-2
    )


def test_what_a_step_tells(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", "train.steps=2", "log.tensorboard=true"))
    expected = {"step", "epoch", "loss", "kd", "ce", "temperature", "kd_weight", "ce_weight", "kl", "teacher_entropy"}
    expected |= {"student_entropy", "agreement", "grad_norm", "lr", "tokens", "tokens_per_second", "peak_memory_bytes"}
    expected |= {f"seconds_{part}" for part in ("data", "teacher", "student", "optimizer")}
    (first, second) = lines(run.folder / "metrics.jsonl")
    assert set(first) == set(second) == expected
    assert first["peak_memory_bytes"] > 50_000_000 and first["seconds_student"] > 0
    events = list((run.folder / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1 and events[0].stat().st_size > 500
    assert json.loads((run.checkpoint / "progress.json").read_text())["tokens"] == second["tokens"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be forgotten here")
def test_the_peak_memory_is_the_runs_and_not_the_processs(runs: TinyRuns) -> None:
    block = torch.ones(1 << 27)  # 512 MB, before the run
    peak = peak_memory_bytes(block.device)
    del block
    (step,) = lines(potstill.train(runs.recipe("run", "train.steps=1")).folder / "metrics.jsonl")
    assert 50_000_000 < step["peak_memory_bytes"] < peak - (300 << 20)


def test_a_callback_stops_a_run_which_then_goes_on(runs: TinyRuns) -> None:
    class Enough(Callback):
        def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
            if run.step == 3:
                run.stop("enough")

    stopped = potstill.train(runs.recipe("run"), [Enough()])
    assert (stopped.step, stopped.stopped_by, stopped.model.parent.name) == (3, "enough", "step-00000003")
    finished = potstill.train(runs.recipe("run"), overrides=["log.every=1"])
    assert (finished.step, finished.stopped_by) == (8, None)


def test_a_run_or_checkpoint_folder_stands_for_its_model(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", "train.steps=2"))
    model = str(run.folder / "checkpoints" / "latest" / "model")
    assert locate(str(run.folder)) == model
    assert locate(str(run.folder / "checkpoints" / "latest")) == model
    assert locate(model) == model and locate("org/name") == "org/name"


def test_the_entropy_gate_of_a_recipe_reaches_the_loss(runs: TinyRuns) -> None:
    """Forward KL mixed with forward KL is forward KL; mixed into reverse KL it is something else."""
    first = {}
    for divergence in ("forward_kl", "reverse_kl"):
        for gate in ("null", "1.0"):
            options = [f"loss.divergence={divergence}", f"loss.entropy_gate={gate}", "train.steps=1"]
            run = potstill.train(runs.recipe(f"{divergence}-{gate}", *options))
            first[divergence, gate] = metrics(run.folder)[0]["kd"]
    assert first["forward_kl", "1.0"] == pytest.approx(first["forward_kl", "null"], rel=1e-5)
    assert abs(first["reverse_kl", "1.0"] - first["reverse_kl", "null"]) > 1e-4
