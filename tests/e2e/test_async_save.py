"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_runs import TinyRuns

import potstill
from potstill.training import state
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

SAVING = ("checkpoint.every=2", "checkpoint.async_save=true", "train.steps=6")


class Watch(Callback):
    """Holds back the first save until a later step has been taken; what was there when it was told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
        self.until, self.go, self.saved_at = until, threading.Event(), []
        usual = state.Snapshot.write

        def waits(snapshot: state.Snapshot, checkpoint: Path) -> state.WrittenFiles:
            assert self.go.wait(60)
            return usual(snapshot, checkpoint)

        monkeypatch.setattr(state.Snapshot, "write", waits)

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step == self.until:
            assert run.checkpoint is None  # it is not there yet, and training went on
            self.go.set()

    def saved(self, run: Run, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").exists() and run.checkpoint == checkpoint
        self.saved_at.append(int(checkpoint.name[-8:]))


def weights(folder: Path, step: int) -> dict[str, Any]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors")


def test_a_step_is_taken_while_a_checkpoint_is_written_and_does_not_show_in_it(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    potstill.train(runs.recipe("plain", "checkpoint.every=2", "checkpoint.keep=9", "train.steps=6"))
    watch = Watch(monkeypatch, until=3)
    run = potstill.train(runs.recipe("beside", *SAVING, "checkpoint.keep=9"), callbacks=[watch])
    assert watch.saved_at == [2, 4, 6] and run.checkpoint is not None and run.checkpoint.name == "step-00000006"
    for step in (2, 4, 6):
        mine, its = weights(run.folder, step), weights(runs.folder / "plain", step)
        assert all((mine[name] == tensor).all() for name, tensor in its.items())


def test_a_save_that_fails_is_an_error_of_the_run(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(PotstillError, match=r"could not write .*step-00000002: No space left on device"):
        potstill.train(runs.recipe("full", *SAVING))
    monkeypatch.undo()
    assert not list((runs.folder / "full" / "checkpoints").iterdir())
    assert potstill.train(runs.recipe("full", *SAVING)).step == 6
