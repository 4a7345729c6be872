"""A run that is ended at any moment and started again ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from planted import Planted
from tiny_models import TOKENIZER, write_jsonl
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run, lines, steps_on_disk, weights

import potstill
from potstill import files
from potstill.config.recipe import load_recipe
from potstill.data import loader
from potstill.training import checkpoint
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def small_groups() -> Iterator[None]:
    """The data is laid out 3 steps at a time instead of 16, so that runs of 8 end within, between and at the end of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "GROUP_STEPS", 3)
        yield


SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
VARIANTS: dict[str, list[str]] = {
    "packed, adamw": [],
    "padded, muon": ["data.packing=false", "train.optimizer.name=muon"],
    "packed, muon, no shuffle": ["train.optimizer.name=muon", "data.shuffle=false"],
    "epochs": ["train.steps=null", "train.epochs=2"],
    "bf16, checkpointed activations": ["train.precision=bf16", "train.gradient_checkpointing=true"],
    "bf16 weights, float32 masters": ["student.dtype=bfloat16"],
    "schedules": ["loss.temperature={start: 4, end: 1}", "loss.ce_weight={start: 0, end: 1, shape: cosine}"],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_interrupted_run_ends_with_the_same_bits(runs: TinyRuns, overrides: list[str]) -> None:
    potstill.train(runs.recipe("whole", *overrides))
    broken = runs.recipe("broken", *overrides)
    for step in (1, 4, 7):  # before the first checkpoint, at a step that was about to be saved, and between two
        with pytest.raises(Interrupted):
            potstill.train(broken, [InterruptAt(step)])
    run = potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    assert run.step == run.total_steps >= 7


UNUSED_WEIGHTS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {  # a bias of its router; its experts are saved in other pieces than they are trained in
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0,
    },
    "gemma3": {  # all of its vision tower
        "text_config": {**SIZES, "head_dim": 8},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSED_WEIGHTS)
def test_a_student_with_weights_that_never_have_a_gradient_goes_on(runs: TinyRuns, kind: str) -> None:
    student = {"tokenizer": TOKENIZER, "config": {"model_type": kind, **UNUSED_WEIGHTS[kind]}}
    potstill.train(runs.recipe("whole", "train.steps=4", student=student))
    broken = runs.recipe("broken", "train.steps=4", student=student)
    with pytest.raises(Interrupted):
        potstill.train(broken, [InterruptAt(3)])
    assert potstill.train(broken).step == 4
    assert_same_run(runs.folder / "broken", runs.folder / "whole")


def test_mixture_goes_on_in_its_place(runs: TinyRuns, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", [{"body": f"Another text, number {i}."} for i in range(7)])
    sources = [
        {"files": str(runs.text), "weight": 1.0, "fraction": 0.8},
        {"files": str(other), "text": "body", "weight": 3.0},
    ]
    data = {"sources": sources, "max_length": 64, "packing": False, "shuffle_buffer": 5}
    potstill.train(runs.recipe("whole", data=data))
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("broken", data=data), [InterruptAt(5)])
    potstill.train(runs.recipe("broken", data=data))
    assert_same_run(runs.folder / "broken", runs.folder / "whole")


def test_data_that_became_less_is_an_error(runs: TinyRuns) -> None:
    text = runs.folder / "text.jsonl"
    text.write_text(runs.text.read_text())
    recipe = runs.recipe("run", "train.steps=null", "train.epochs=2", f"data.sources.0.files={text}")
    with pytest.raises(Interrupted):
        potstill.train(recipe, [InterruptAt(5)])
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:30]))
    with pytest.raises(PotstillError, match=r"data\.sources\[0\] is not what the run began with"):
        potstill.train(recipe)
    anyway = load_recipe(recipe, ["checkpoint.resume=force"])
    with pytest.raises(
        PotstillError, match=r"data: it ended after step \d+ of \d+: there is less of it than when the run"
    ):
        potstill.train(anyway)


def test_evaluations_are_not_told_twice_and_the_best_is_kept(runs: TinyRuns) -> None:
    evaluation = runs.evaluation(every=3, prompts=["The union"])
    whole = potstill.train(runs.recipe("whole", "checkpoint.every=4", eval=evaluation))
    broken = runs.recipe("broken", "checkpoint.every=4", eval=evaluation)
    with pytest.raises(Interrupted):
        potstill.train(broken, [InterruptAt(8)])
    run = potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    assert lines(runs.folder / "broken" / "evals.jsonl") == lines(runs.folder / "whole" / "evals.jsonl")
    evals = lines(runs.folder / "whole" / "evals.jsonl")
    assert [e["step"] for e in evals] == [3, 6, 8]
    assert run.evaluation == whole.evaluation == evals[-1]


def test_the_last_n_and_the_best_are_kept(runs: TinyRuns) -> None:
    """A learning rate that ruins what the first steps learnt: the best is an old one."""
    train = {"steps": 8, "batch_size": 4, "optimizer": {"lr": 1.0}, "lr_schedule": {"shape": "constant"}}
    recipe = runs.recipe("run", "checkpoint.every=1", "checkpoint.keep=3", train=train, eval=runs.evaluation(every=1))
    run = potstill.train(recipe)
    scores = {e["step"]: e["bits_per_byte"] for e in lines(run.folder / "evals.jsonl")}
    best = min(scores, key=scores.__getitem__)
    assert best < 6
    assert steps_on_disk(run.folder) == [best, 6, 7, 8]
    links = {name: (run.folder / "checkpoints" / name).resolve().name for name in ("latest", "best")}
    assert links == {"latest": "step-00000008", "best": f"step-{best:08d}"}
    assert run.best is not None and run.best.name == f"step-{best:08d}"


def test_a_finished_run_is_left_alone(runs: TinyRuns, command: Callable[..., Any]) -> None:
    recipe = runs.file("run", "train.steps=2")
    assert command("train", recipe).code == 0
    before = {p: p.stat().st_mtime_ns for p in (runs.folder / "run" / "checkpoints").rglob("*") if p.is_file()}
    log = (runs.folder / "run" / "metrics.jsonl").read_text()
    again = command("train", recipe)
    assert again.code == 0 and again.err == ""
    assert "step-00000002/model" in again.out and "loss" not in again.out
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (runs.folder / "run" / "metrics.jsonl").read_text() == log


def test_more_steps_go_on_from_the_end(runs: TinyRuns) -> None:
    potstill.train(runs.recipe("run", "train.steps=2"))
    run = potstill.train(runs.recipe("run", "train.steps=4"))
    assert (run.step, run.total_steps) == (4, 4)
    assert [line["step"] for line in lines(run.folder / "metrics.jsonl")] == [1, 2, 3, 4]


class Signal(Callback):
    """Sends this process a signal at a moment of the run."""

    def __init__(self, moment: str, step: int, number: int = signal.SIGTERM) -> None:
        self.moment, self.step, self.number = moment, step, number

    def started(self, run: Run) -> None:
        self._send("started", run)

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self._send("stepped", run)

    def saved(self, run: Run, checkpoint: Path) -> None:
        self._send("saved", run)

    def _send(self, moment: str, run: Run) -> None:
        if (moment, run.step) == (self.moment, self.step):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("moment", "step", "saved_at"),
    [("stepped", 3, 3), ("saved", 2, 2), ("started", 0, 0), ("stepped", 8, 8)],
)
def test_a_signal_saves_and_ends_the_run(runs: TinyRuns, moment: str, step: int, saved_at: int) -> None:
    """Wherever the signal comes in, the step it ends at is saved, and none is taken after it; one in the last step does not
    count as a stop. Before the first step there is nothing to save."""
    potstill.train(runs.recipe("whole"))
    run = potstill.train(runs.recipe("stopped"), [Signal(moment, step)])
    assert run.stopped_by == ("SIGTERM" if saved_at < 8 else None)
    assert run.step == saved_at
    assert steps_on_disk(run.folder)[-1:] == [saved_at][:saved_at]
    assert run.checkpoint == (run.folder / "checkpoints" / f"step-{saved_at:08d}" if saved_at else None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # handlers are put back
    potstill.train(runs.recipe("stopped"))
    assert_same_run(runs.folder / "stopped", runs.folder / "whole")


def test_a_second_interrupt_does_not_wait(runs: TinyRuns) -> None:
    signals = [Signal("stepped", 3, signal.SIGINT), Signal("stepped", 3, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        potstill.train(runs.recipe("run"), signals)
    assert steps_on_disk(runs.folder / "run") == [2]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda c: _flip(next((c / "state").glob("*"))), "state/00000-0.safetensors is not what was"),
    "truncated": (lambda c: os.truncate(c / "model" / "model.safetensors", 1000), "model.safetensors is not what was"),
    "no progress": (lambda c: (c / "progress.json").unlink(), "progress.json is missing"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "its manifest is missing"),
    "torn manifest": (lambda c: os.truncate(c / "manifest.json", 30), "its manifest cannot be read"),
    "empty folder": (lambda c: (shutil.rmtree(c), c.mkdir()), "its manifest is missing"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    """One finished run, to be copied and damaged."""
    runs = TinyRuns(tmp_path_factory.mktemp("finished"), tiny_teacher, tiny_text)
    potstill.train(runs.recipe("whole"))
    return runs


@pytest.mark.parametrize(("hurt", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(
    finished: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], hurt: Callable[[Path], object], reason: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)
    hurt(run / "checkpoints" / "step-00000008")
    potstill.train(finished.recipe("whole", f"run={run}"))
    said = capsys.readouterr().out
    assert "step-00000008 is damaged (" in said
    assert reason in said and "trying the one before" in said
    assert "going on at step 6 of 8" in said
    assert_same_run(run, finished.folder / "whole")


def test_no_whole_checkpoint_is_an_error(finished: TinyRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)
    for step in (run / "checkpoints").glob("step-*"):
        (step / "progress.json").write_text("{}")
    with pytest.raises(
        PotstillError, match=r"no checkpoint in .*/run/checkpoints is whole; to start the run anew, rem"
    ):
        potstill.train(finished.recipe("whole", f"run={run}"))
    assert len(list((run / "checkpoints").glob("step-*"))) == 2  # nothing that might be rescued is removed


def test_what_a_killed_writer_left_is_removed(finished: TinyRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)
    left = run / "checkpoints" / ".unfinished-step-00000010" / "state"
    left.mkdir(parents=True)
    (left / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    (run / "checkpoints" / ".unfinished-latest").symlink_to("step-00000008")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    potstill.train(finished.recipe("whole", f"run={run}"))
    assert not list((run / "checkpoints").glob(".unfinished-*"))
    assert_same_run(run, finished.folder / "whole")


def test_links_are_mended_after_a_kill_between_checkpoint_and_link(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is in place and the process dies: the same command has no step to take, but `latest` to set."""

    def dies(link: Path, target: Path) -> None:
        raise Interrupted

    potstill.train(runs.recipe("run", "train.steps=2", "checkpoint.keep=1"))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "point", dies)
        with pytest.raises(Interrupted):
            potstill.train(runs.recipe("run", "train.steps=4", "checkpoint.keep=1"))
    run = potstill.train(runs.recipe("run", "train.steps=4", "checkpoint.keep=1"))
    assert (run.folder / "checkpoints" / "latest").resolve().name == "step-00000004"
    assert steps_on_disk(run.folder) == [4]


def test_a_used_folder_is_not_run_with_other_settings(runs: TinyRuns, command: Callable[..., Any]) -> None:
    recipe = runs.file("run", "train.steps=2")
    assert command("train", recipe).code == 0
    before = weights(runs.folder / "run")

    changed = command("train", recipe, "train.optimizer.lr=0.5", "data.packing=false", "log.every=1", "train.steps=3")
    assert changed.code == 1
    assert "holds a run with other settings (data.packing: True → False; train.optimizer.lr: 0.01 → 0.5)" in changed.err
    assert "run=" in changed.err and "checkpoint.resume=force" in changed.err
    assert len(changed.err.splitlines()) == 1

    never = command("train", recipe, "checkpoint.resume=never")
    assert never.code == 1 and "holds a run already and checkpoint.resume is never" in never.err
    assert weights(runs.folder / "run") == before

    anyway = command("train", recipe, "train.optimizer.lr=0.5", "train.steps=3", "checkpoint.resume=force")
    assert anyway.code == 0 and "going on at step 2 of 3" in anyway.out
    steps = lines(runs.folder / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[-1]["lr"] == pytest.approx(0.1 * 0.5)  # the new one, at the end of its schedule

    other = command("train", recipe, "student.config.hidden_size=32", "train.steps=4", "checkpoint.resume=force")
    assert other.code == 1 and "does not fit this recipe's student and optimizer" in other.err
    assert len(other.err.splitlines()) == 1
    # What could not run has left no trace: the settings of before are still the run's.
    same = command("train", recipe, "train.optimizer.lr=0.5", "train.steps=3")
    assert same.code == 0 and "step-00000003/model" in same.out


def test_nothing_in_a_run_folder_is_unpickled(finished: TinyRuns, tmp_path: Path) -> None:
    """A prepared run folder: pickles under all the names that something might look for."""
    run, mark = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)
    names = (".metadata", "__0_0.distcp", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
    weights_names = ("pytorch_model.bin", "model.pt", "adapter_model.bin", "model.pkl")
    for folder in [
        run,
        run / "checkpoints",
        *(run / "checkpoints").glob("step-*/"),
        *run.glob("checkpoints/step-*/*/"),
    ]:
        for name in names + weights_names:
            (folder / name).write_bytes(pickle.dumps(Planted(mark)))
    potstill.train(finished.recipe("whole", "train.steps=9", f"run={run}"))
    assert steps_on_disk(run) == [8, 9]
    assert not mark.exists()
    pickle.loads((run / "checkpoints" / "step-00000008" / "state" / ".metadata").read_bytes())
    assert mark.exists()  # it would have


def test_progress_says_where_the_data_stands(finished: TinyRuns) -> None:
    progress = json.loads((finished.folder / "whole" / "checkpoints" / "latest" / "progress.json").read_text())
    last = lines(finished.folder / "whole" / "metrics.jsonl")[-1]
    assert (progress["step"], progress["total_steps"]) == (8, 8)
    assert progress["tokens"] == last["tokens"] == progress["counts"]["supervised_tokens"] > 8 * 4 * 20


def test_a_disk_that_does_not_answer_is_no_damage(
    finished: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)

    def refuses(path: Path, sync: bool) -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_checksum", refuses)
        with pytest.raises(
            PotstillError, match=r"cannot read .*step-00000008 \(Input/output error\): nothing was changed"
        ):
            potstill.train(finished.recipe("whole", f"run={run}"))
    assert steps_on_disk(run) == [6, 8]


def test_a_damaged_checkpoint_is_moved_aside_not_removed(finished: TinyRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", run, symlinks=True)
    newest = run / "checkpoints" / "step-00000008"
    (newest / "progress.json").unlink()
    potstill.train(finished.recipe("whole", f"run={run}"))
    assert (run / "checkpoints" / "damaged-step-00000008" / "model" / "model.safetensors").exists()
    assert steps_on_disk(run) == [6, 8]


def test_fewer_steps_than_were_taken_are_refused(finished: TinyRuns) -> None:
    with pytest.raises(PotstillError, match=r"train\.steps is 4 and the run in .* is at step 8 already"):
        potstill.train(finished.recipe("whole", "train.steps=4"))


def test_the_size_of_pieces_is_measured_once_and_kept(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on with it, whatever would be measured now; a run beside it that is told to has the same pieces."""
    folder = runs.folder / "measured"
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("measured"), callbacks=[InterruptAt(5)])
    size = load_recipe(folder / "recipe.yaml").data.piece_bytes
    assert size is not None and size != 4 * 64
    monkeypatch.setattr("potstill.training.setup.with_pieces", lambda data, tokenizer: data)  # now nothing is measured
    potstill.train(runs.recipe("measured"))
    assert load_recipe(folder / "recipe.yaml").data.piece_bytes == size
    potstill.train(runs.recipe("told", f"data.piece_bytes={size}"))
    assert_same_run(folder, runs.folder / "told")


def test_a_run_that_would_lose_most_of_its_data_does_not_begin(
    runs: TinyRuns, command: Callable[..., Any], tmp_path: Path
) -> None:
    def pairs(long: int, short: int) -> dict[str, Any]:
        records = [{"q": "The people " * 40, "a": "of"}] * long + [{"q": "The people", "a": " of"}] * short
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        source = {"files": str(tmp_path / "pairs.jsonl"), "prompt": "q", "completion": "a"}
        return {"sources": [source], "max_length": 64, "shuffle_buffer": 16}

    said = command("train", runs.file("most", data=pairs(36, 4)))
    assert said.code == 1 and "data.max_length: 64 tokens cut 36 of 40 sampled examples" in said.err
    assert not (runs.folder / "most" / "metrics.jsonl").exists()
    said = command("train", runs.file("some", "train.epochs=1", "train.steps=null", data=pairs(4, 36)))
    assert said.code == 0
    first, last = (
        said.out.index("data.max_length: 64 tokens cut 4 of 40"),
        said.out.index("of 40 examples 4 were longer"),
    )
    assert first < said.out.index("data so far:") < last
