"""A server that is killed in the middle of a run and started again costs a pause; one that comes back as another ends it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from served import Served
from tiny_models import make_model
from tiny_runs import TinyRuns, metrics, steps_on_disk

import potstill
from potstill import http_client as connection
from potstill.cache.store import Cache
from potstill.cache.verify import verify
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e


class KillAt(Callback):
    """Kills the server after a step; `then` is done when the run has noticed."""

    def __init__(self, server: Served, step: int, said: list[str], then: Any) -> None:
        self.server, self.step, self.said, self.then = server, step, said, then
        self.thread: threading.Thread | None = None

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step == self.step and self.thread is None:
            self.server.kill()
            self.thread = threading.Thread(target=self._go_on)
            self.thread.start()

    def _go_on(self) -> None:
        while not self.said:
            time.sleep(0.01)
        self.then()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What users are told about servers."""
    lines: list[str] = []
    monkeypatch.setattr(connection.Connection.__init__, "__defaults__", (lines.append,))
    return lines


def teacher_of(server: Served, **keys: Any) -> list[dict[str, Any]]:
    remote = {"retry_timeout": 120.0} | ({} if keys else {"kind": "hidden"})
    return [{"server": server.address, "remote": remote, **keys}]


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["nothing", "cache"])
def test_killed_and_started_again(runs: TinyRuns, said: list[str], tmp_path: Path, beside: str) -> None:
    keys = {"cache": str(tmp_path / "cache"), "store": {"kind": "hidden"}} if beside == "cache" else {}
    train = {"steps": 12, "batch_size": 4, "micro_batch_size": 2, "optimizer": {"lr": 1e-2}}
    with Served(runs.teacher) as server:
        kill = KillAt(server, 3, said, server.restart)
        run = potstill.train(runs.recipe("killed", teachers=teacher_of(server, **keys), train=train), [kill])
        assert kill.thread is not None
        kill.thread.join()
    assert run.step == 12 and not run.stopped_by
    potstill.train(runs.recipe("live", train=train))
    ours, theirs = ([line["loss"] for line in metrics(runs.folder / name)] for name in ("killed", "live"))
    assert ours == pytest.approx(theirs, rel=1e-3) and len(ours) == 12
    assert "waiting for the server at" in said[0] and "answers again, after" in said[1] and len(said) == 2
    if beside == "cache":
        assert verify(tmp_path / "cache").damage == [] and len(Cache(tmp_path / "cache")) > 10


@pytest.mark.slow
def test_it_comes_back_as_another(runs: TinyRuns, said: list[str], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=99)
    train = {"steps": 12, "batch_size": 4, "micro_batch_size": 2}
    with Served(runs.teacher) as server:
        kill = KillAt(server, 3, said, lambda: server.restart(other))
        with pytest.raises(PotstillError, match="it now serves another model than when the run began"):
            potstill.train(runs.recipe("changed", teachers=teacher_of(server), train=train), [kill])
        assert kill.thread is not None
        kill.thread.join()
    taken = [line["step"] for line in metrics(runs.folder / "changed")]
    assert taken == list(range(1, len(taken) + 1)) and 3 <= len(taken) < 12
    assert max(steps_on_disk(runs.folder / "changed")) <= len(taken)


def test_it_never_comes_back(runs: TinyRuns, said: list[str]) -> None:
    """The run stops when its retry_timeout ends; the same command goes on where it stopped."""
    train = {"steps": 12, "batch_size": 4, "micro_batch_size": 2, "optimizer": {"lr": 1e-2}}
    with Served(runs.teacher) as server:
        remote = {"kind": "hidden", "retry_timeout": 1.0}
        teachers = [{"server": server.address, "remote": remote}]
        recipe = runs.recipe("gone", teachers=teachers, train=train, checkpoint={"every": 1})
        with pytest.raises(PotstillError, match=r"given up after \d+ s \(teachers\[0\]\.remote\.retry_timeout\)"):
            potstill.train(recipe, [KillAt(server, 3, said, lambda: None)])
        server.restart()
        assert potstill.train(recipe).step == 12
    potstill.train(runs.recipe("live", train=train))
    ours, theirs = ([line["loss"] for line in metrics(runs.folder / name)] for name in ("gone", "live"))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_cache_build_from_a_server_that_is_killed(
    runs: TinyRuns, command: Any, tmp_path: Path, said: list[str]
) -> None:
    """From the command line, with the server's address in place of a model, and from a recipe that waits for it."""
    with Served(runs.teacher) as server:
        whole = command("cache", "build", server.address, "--data", runs.text, "--out", tmp_path / "whole", "--k", 8)
        assert whole.code == 0 and "60 documents added" in whole.out
        server.kill()
        restarted = threading.Thread(target=lambda: (_until(said), server.restart()))
        restarted.start()
        keys = {"cache": str(tmp_path / "killed"), "store": {"k": 8}, "remote": {"start_timeout": 120.0}}
        waiting = runs.file("waiting", teachers=[{"server": server.address, **keys}])
        found = command("cache", "build", waiting)
        restarted.join()
        assert found.code == 0 and "60 documents added" in found.out
        recipe = runs.file(
            "cached", teachers=[{"server": server.address, "cache": str(tmp_path / "third"), "store": {"k": 8}}]
        )
        by_recipe = command("cache", "build", recipe)
        assert by_recipe.code == 0 and "60 documents added" in by_recipe.out
        again = command("cache", "build", recipe)
        assert "0 documents added" in again.out and "60 were there" in again.out
        wrong = command(
            "cache", "build", server.address, "--data", runs.text, "--out", tmp_path / "w", "--dtype", "float32"
        )
        assert wrong.code == 1 and "--dtype goes with a model" in wrong.err
    checked = command("cache", "verify", tmp_path / "killed", "--teacher", runs.teacher, "--json")
    assert checked.code == 0 and json.loads(checked.out)["damage"] == []


def _until(said: list[str]) -> None:
    while not said:
        time.sleep(0.01)
