"""The small files by which schedulers and torchrun come to terms with a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TinyRuns, assert_same_run, steps_on_disk

import potstill
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e


class At(Callback):
    """Does something in the run's folder after a step."""

    def __init__(self, step: int, act: Callable[[Path], object]) -> None:
        self.step, self.act = step, act

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step == self.step:
            self.act(run.folder)


def touch_stop(folder: Path) -> None:
    (folder / "stop").touch()


def no_more_text(folder: Path) -> None:
    raise PotstillError("the data are gone")


def test_a_file_saves_and_ends_the_run(runs: TinyRuns) -> None:
    whole = potstill.train(runs.recipe("whole"))
    assert (whole.folder / "finished").exists()
    run = potstill.train(runs.recipe("stopped"), [At(3, touch_stop)])
    assert (run.step, run.stopped_by, run.exit_code) == (3, "RUN/stop", 0)
    assert steps_on_disk(run.folder)[-1] == 3
    assert (run.folder / "stop").exists() and not (run.folder / "finished").exists()
    potstill.train(runs.recipe("stopped"))
    assert not (run.folder / "stop").exists() and (run.folder / "finished").exists()
    assert_same_run(run.folder, whole.folder)


def test_a_restart_does_not_forget_that_the_run_was_asked_to_stop(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    potstill.train(runs.recipe("run"), [At(3, touch_stop)])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = potstill.train(runs.recipe("run"))
    assert (again.step, again.stopped_by) == (3, "RUN/stop")


def test_more_steps_take_the_word_back(runs: TinyRuns) -> None:
    potstill.train(runs.recipe("run"))
    run = potstill.train(runs.recipe("run", "train.steps=10"), [At(9, touch_stop)])
    assert run.step == 9 and not (run.folder / "finished").exists()


def test_a_restart_at_the_step_of_an_error_ends_at_once(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded. Whoever starts it anew may have mended it, and a restart that lost steps finds others."""
    folder = runs.folder / "run"
    with pytest.raises(PotstillError, match="the data are gone"):
        potstill.train(runs.recipe("run"), [At(4, no_more_text)])
    assert json.loads((folder / "error.json").read_text()) == {"step": 2, "error": "the data are gone"}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with monkeypatch.context() as patch, pytest.raises(PotstillError, match="the data are gone"):
        patch.setattr("potstill.training.loop.assemble", lambda recipe, askers: pytest.fail("it was loaded"))
        potstill.train(runs.recipe("run"))
    (folder / "error.json").write_text('{"step": 1, "error": "the data were gone earlier"}')
    assert potstill.train(runs.recipe("run")).step == 8
    assert not (folder / "error.json").exists()


@pytest.mark.parametrize("taken", ["another's", None])
def test_who_was_replaced_saves_nothing(runs: TinyRuns, taken: str | None) -> None:
    def take_over(folder: Path) -> None:
        (folder / ".owner").write_text(taken) if taken else (folder / ".owner").unlink()

    with pytest.raises(PotstillError, match="nothing was saved"):
        potstill.train(runs.recipe("run"), [At(3, take_over)])
    folder = runs.folder / "run"
    assert steps_on_disk(folder) == [2] and not list((folder / "checkpoints").glob(".unfinished*"))
    assert not (folder / "error.json").exists()  # which is the other's to write
    assert potstill.train(runs.recipe("run")).step == 8
