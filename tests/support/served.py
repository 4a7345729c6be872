"""`potstill serve` in a process of its own, to be asked, killed and started again."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

SECONDS = 240.0  # that a server may take to be ready, or to end


class Served:
    """A running server. `restart` starts another one at the same address."""

    def __init__(self, model: Path | str, *options: object, env: dict[str, str] | None = None) -> None:
        self._model, self._options, self._env = model, options, env or {}
        self.port = 0
        self._start()

    def _start(self, model: Path | str | None = None) -> None:
        words = ["serve", model or self._model, "--port", self.port, "--device", "cpu", *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "potstill", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self._env},
        )
        self.said: list[str] = []
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.said.append(line)
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while found := lines.get(timeout=SECONDS):
            if ready := re.match(r"ready: http://[^:]+:(\d+) ", found):
                self.port = int(ready[1])
                return
        raise AssertionError(f"the server ended: {''.join(self.said)}")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self, model: Path | str | None = None) -> None:
        """At the same address, perhaps with another model."""
        self._start(model)

    def end(self) -> int:
        """With SIGTERM, as an operator does; gives the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(SECONDS)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
