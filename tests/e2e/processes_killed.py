"""`potstill train` in a process of its own, to be watched and killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from warm import Command

PATIENCE = 300.0  # seconds; nothing here takes so long on a machine with other work to do


class Process:
    """`potstill train RECIPE` in a process of its own, to be watched and killed."""

    def __init__(self, recipe: Path, run: Path) -> None:
        self.run = run
        self._command = Command("train", recipe, log=run.with_name(f"{run.name}.log"))

    def said(self) -> str:
        return self._command.said()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until it is so."""
        assert self._command.wait_for(what, PATIENCE), f"the run ended too early, or took too long:\n{self.said()}"

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def half_written(self) -> bool:
        """Stopped in the middle of writing a checkpoint. Looked at again once stopped: it may just have been renamed."""
        if not self._unfinished():
            return False
        self._command.stop()
        if not self._unfinished():
            self.send(signal.SIGCONT)
            return False
        return True

    def _unfinished(self) -> bool:
        return any((self.run / "checkpoints").glob(".unfinished-step-*"))

    def send(self, number: int) -> None:
        self._command.send(number)

    def end(self) -> tuple[int, str]:
        """Exit code and all it said."""
        return self._command.wait(PATIENCE), self.said()
