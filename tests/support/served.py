"""`potstill serve` in a process of its own, to be asked, killed and started again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from warm import Command

SECONDS = 240.0  # that a server may take to be ready, or to end
READY = re.compile(r"^ready: http://[^:]+:(\d+) ", re.MULTILINE)


class Served:
    """A running server. `restart` starts another one at the same address."""

    def __init__(self, model: Path | str, *options: object, env: dict[str, str] | None = None) -> None:
        self._model, self._options, self._env = model, options, env
        self.port = 0
        self._start()

    def _start(self, model: Path | str | None = None) -> None:
        words = ["serve", model or self._model, "--port", self.port, "--device", "cpu", *self._options]
        self.process = Command(*words, env=self._env)
        ready = self.process.wait_for(lambda: READY.search(self.process.said()) is not None, SECONDS)
        found = READY.search(self.process.said())
        assert ready and found, f"the server ended: {self.process.said()}"
        self.port = int(found[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> list[str]:
        """Line by line."""
        return self.process.said().splitlines(keepends=True)

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        self.process.wait(SECONDS)

    def restart(self, model: Path | str | None = None) -> None:
        """At the same address, perhaps with another model."""
        self._start(model)

    def end(self) -> int:
        """With SIGTERM, as an operator does; gives the exit code."""
        self.process.send(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
