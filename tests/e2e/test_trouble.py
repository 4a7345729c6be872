"""What a run goes on in spite of, each with a sentence: damaged logs, no links, what cannot be removed, TensorBoard."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run, lines, steps_on_disk

import potstill
from potstill.shipped import locate
from potstill.training import loop
from potstill.training.logging import Display
from potstill.training.run import Callback, Run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    """A finished run of 6 steps with evaluations, to be copied and damaged."""
    runs = TinyRuns(tmp_path_factory.mktemp("finished"), tiny_teacher, tiny_text)
    potstill.train(runs.recipe("whole", "train.steps=6", eval=runs.evaluation(every=3)))
    return runs


@pytest.fixture
def copied(finished: TinyRuns, tmp_path: Path) -> Callable[..., potstill.Run]:
    """Copies the run, does something to the copy, and goes on with it to step 8."""

    def go_on(hurt: Callable[[Path], object], symlinks: bool = True) -> potstill.Run:
        folder = tmp_path / "run"
        shutil.copytree(finished.folder / "whole", folder, symlinks=symlinks)
        hurt(folder)
        options = ["train.steps=8", f"run={folder}"]
        return potstill.train(finished.recipe("whole", *options, eval=finished.evaluation(every=3)))

    return go_on


def damage_line(path: Path, number: int) -> bytes:
    """One byte of a line."""
    content = path.read_bytes().splitlines(keepends=True)
    content[number - 1] = b"\xff" + content[number - 1][1:]
    path.write_bytes(b"".join(content))
    return content[number - 1]


def test_damaged_lines_are_set_aside(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bad: dict[str, bytes] = {}

    def hurt(folder: Path) -> None:
        bad["metrics"] = damage_line(folder / "metrics.jsonl", 4)
        bad["evals"] = damage_line(folder / "evals.jsonl", 2)

    run = copied(hurt)
    said = capsys.readouterr().out
    assert f"{run.folder}/metrics.jsonl: line 4 is damaged and set aside in metrics.jsonl.damaged" in said
    assert f"{run.folder}/evals.jsonl: line 2 is damaged and set aside in evals.jsonl.damaged" in said
    assert [line["step"] for line in lines(run.folder / "metrics.jsonl")] == [1, 2, 3, 5, 6, 7, 8]
    assert [line["step"] for line in lines(run.folder / "evals.jsonl")] == [3, 8]
    for name, line in bad.items():
        assert (run.folder / f"{name}.jsonl.damaged").read_bytes() == line


def test_a_copy_that_followed_links_goes_on(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(lambda folder: None, symlinks=False)
    said = capsys.readouterr().out
    for name in ("latest", "best"):
        link, aside = run.folder / "checkpoints" / name, run.folder / "checkpoints" / f"copied-{name}"
        assert said.count(f"{link} was a folder and no link, as copies have it: it is now {aside}, which may be") == 1
        assert link.is_symlink() and not aside.is_symlink() and (aside / "model" / "config.json").is_file()
    assert (run.folder / "checkpoints" / "latest").resolve().name == "step-00000008"


def test_a_file_system_without_links(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*arguments: Any, **options: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuses)
    run = potstill.train(runs.recipe("run", "train.steps=6"))
    said = capsys.readouterr().out
    link = run.folder / "checkpoints" / "latest"
    assert said.count(f"{link} cannot be made a link (Operation not supported): the latest checkpoint is ") == 1
    assert steps_on_disk(run.folder) == [4, 6] and run.checkpoint == run.folder / "checkpoints" / "step-00000006"
    (link / "model").mkdir(parents=True)  # a copy that followed links would go on to stand for the latest
    (link / "model" / "config.json").touch()
    assert potstill.train(runs.recipe("run", "train.steps=7")).step == 7
    assert locate(str(run.folder)) == str(run.folder / "checkpoints" / "step-00000007" / "model")


def test_an_old_checkpoint_that_cannot_be_removed(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename = Path.rename

    def refuses(path: Path, target: Path) -> Path:
        if ".unfinished-removed-" in str(target):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuses)
        run = potstill.train(runs.recipe("run"))
    said = capsys.readouterr().out
    assert said.count(f"old checkpoints in {run.folder}/checkpoints cannot be removed (Permission denied)") == 1
    assert steps_on_disk(run.folder) == [2, 4, 6, 8]
    potstill.train(runs.recipe("run"))
    assert steps_on_disk(run.folder) == [6, 8]


def test_what_a_kill_left_in_the_run_folder_is_removed(copied: Any) -> None:
    names = [".unfinished-123-recipe.yaml", ".unfinished-7-metrics.jsonl", ".unfinished-9-evals.jsonl"]
    run = copied(lambda folder: [(folder / name).write_text("half") for name in [*names, ".unfinished-5-report.html"]])
    left = [path.name for path in run.folder.glob(".unfinished-*")]
    assert left == [".unfinished-5-report.html"]  # another command may be writing it


def test_tensorboard_that_cannot_be_written(runs: TinyRuns, capfd: pytest.CaptureFixture[str]) -> None:
    """A file where its folder should be; then a device that is full, which its own thread meets later."""
    folder = runs.folder / "run"
    folder.mkdir()
    (folder / "tensorboard").touch()
    assert potstill.train(runs.recipe("run", "log.tensorboard=true", "train.steps=2")).step == 2
    said = capfd.readouterr()
    assert said.out.count("log.tensorboard: writing its events failed (") == 1 and "Traceback" not in said.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_tensorboard_on_a_full_disk(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch.utils import tensorboard

    class Full(tensorboard.SummaryWriter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            record_writer = self.file_writer.event_writer._async_writer._writer
            record_writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    monkeypatch.setattr(tensorboard, "SummaryWriter", Full)
    assert potstill.train(runs.recipe("run", "log.tensorboard=true")).step == 8
    said = capfd.readouterr()
    assert said.out.count("log.tensorboard: writing its events failed (") == 1
    assert "No space left on device" in said.out and "Traceback" not in said.err


class Minutes(Callback):
    """A clock that goes on by so many minutes a step."""

    def __init__(self, a_step: float) -> None:
        self.a_step, self.minutes = a_step, 0.0

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.minutes += self.a_step

    def __call__(self) -> float:
        return 60 * self.minutes


def test_a_run_is_saved_by_the_clock(runs: TinyRuns) -> None:
    """By default every 15 minutes: of steps that take 7, every third, and the last."""
    recipe = runs.recipe("run", checkpoint={"keep": 9})
    assert recipe.checkpoint.every is None and recipe.checkpoint.every_minutes == 15
    clock = Minutes(7)
    loop.train(recipe, [clock], seconds=clock)
    assert steps_on_disk(runs.folder / "run") == [3, 6, 8]
    clock = Minutes(7)
    loop.train(runs.recipe("both", checkpoint={"keep": 9, "every": 2}), [clock], seconds=clock)
    assert steps_on_disk(runs.folder / "both") == [2, 4, 6, 8]  # whatever saves it, a step sets the clock
    clock = Minutes(70)
    loop.train(runs.recipe("never", checkpoint={"every_minutes": None}), [clock], seconds=clock)
    assert steps_on_disk(runs.folder / "never") == [8]


def test_an_attempt_without_a_checkpoint_is_told_and_kept(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.recipe("run", checkpoint={})
    for step in (5, 1):
        with pytest.raises(Interrupted):
            potstill.train(recipe, [InterruptAt(step)])
    first = lines(runs.folder / "run" / "metrics.1.jsonl")
    assert [line["step"] for line in first] == [1, 2, 3, 4, 5]
    said = capsys.readouterr().out
    aside = runs.folder / "run" / "metrics.1.jsonl"
    assert (
        "steps 1–5 of an earlier attempt had no checkpoint: starting again at step 1; its metrics.jsonl is kept as "
        f"{aside}\n" in said
    )
    potstill.train(recipe)
    assert "step 1 of an earlier attempt had no checkpoint" in capsys.readouterr().out
    assert [line["step"] for line in lines(runs.folder / "run" / "metrics.2.jsonl")] == [1]
    potstill.train(runs.recipe("whole", checkpoint={}))
    assert_same_run(runs.folder / "run", runs.folder / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_exit_code_says_that_a_signal_ended_it(
    runs: TinyRuns, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    stepped = Display.stepped

    def signalled(self: Display, run: Run, metrics: Mapping[str, Any]) -> None:
        stepped(self, run, metrics)
        if run.step == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(Display, "stepped", signalled)
    recipe = runs.file("run", "train.steps=4", eval=runs.evaluation())
    said = command("train", recipe)
    assert said.code == code and not said.err
    name = signal.Signals(number).name
    assert said.out.endswith(f"stopped by {name} at step 3; the same command goes on from there\n")
    assert steps_on_disk(runs.folder / "run") == [2, 3]
    assert lines(runs.folder / "run" / "evals.jsonl") == []  # no time for that
    assert command("train", recipe).code == 0


def test_a_run_that_a_callback_stops_is_evaluated(runs: TinyRuns) -> None:
    class Enough(Callback):
        def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
            if run.step == 3:
                run.stop("enough")

    run = potstill.train(runs.recipe("run", eval=runs.evaluation()), [Enough()])
    assert (run.step, run.stopped_by, run.exit_code) == (3, "enough", 0)
    assert run.evaluation is not None and run.evaluation["step"] == 3
    assert lines(run.folder / "evals.jsonl") == [run.evaluation]
    assert run.best == run.checkpoint == run.folder / "checkpoints" / "step-00000003"


class EnoughEvaluated(Callback):
    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        run.stop("it is good enough")


def test_a_run_stopped_at_an_evaluation_is_evaluated_once(runs: TinyRuns) -> None:
    run = potstill.train(runs.recipe("run", eval=runs.evaluation(every=3)), [EnoughEvaluated()])
    assert (run.step, run.stopped_by) == (3, "it is good enough")
    assert [line["step"] for line in lines(run.folder / "evals.jsonl")] == [3]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("way", ["model", "teacher", "student"])
def test_a_damaged_checkpoint_is_no_model(
    finished: TinyRuns, command: Callable[..., Any], tmp_path: Path, file: str, way: str
) -> None:
    """Of `eval`, of its teacher, or of another run's student: a sentence that names the file, not other numbers."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder / "whole", folder, symlinks=True)
    path = folder / "checkpoints" / "latest" / "model" / file
    content = bytearray(path.read_bytes())
    content[-100 if file == "model.safetensors" else -3] ^= 1
    path.write_bytes(content)
    if way == "student":
        said = command("train", finished.file("other", "student={model: " + str(folder) + "}", "train.steps=1"))
    else:
        models = {"model": finished.teacher, "teacher": finished.teacher} | {way: path.parent}
        said = command("eval", models["model"], "--teacher", models["teacher"], "--data", finished.text)
    assert said.code == 1 and len(said.err.splitlines()) == 1
    assert f"is damaged (model/{file} is not what was written): use another" in said.err
