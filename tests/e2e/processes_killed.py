"""`potstill train` in a process of its own, to be watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 300.0  # seconds; nothing here takes so long on a machine with other work to do


class Process:
    """`potstill train RECIPE` in a process of its own, to be watched and killed."""

    def __init__(self, recipe: Path, run: Path) -> None:
        self.run = run
        line = [sys.executable, "-m", "potstill", "train", str(recipe)]
        self._log = run.with_name(f"{run.name}.log")
        with self._log.open("w") as out:
            self._process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until it is so: looked at every millisecond, so that the moments are as many as the machine is uneven."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert self._process.poll() is None, f"the run ended too early:\n{self.said()}"
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def half_written(self) -> bool:
        """Stopped in the middle of writing a checkpoint. Looked at again once stopped: it may just have been renamed."""
        if not self._unfinished():
            return False
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if not self._unfinished():
            self.send(signal.SIGCONT)
            return False
        return True

    def _unfinished(self) -> bool:
        return any((self.run / "checkpoints").glob(".unfinished-step-*"))

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and all it said."""
        self._process.wait(PATIENCE)
        return self._process.returncode, self.said()
