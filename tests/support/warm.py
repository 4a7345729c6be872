"""Processes that have torch and transformers from the start: forks of one process of the session that has imported them, for
that takes longer than most tests. In all else they are processes like others: they can be killed, stopped and waited for."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = [
    "potstill.cli.main",
    "potstill.cli.cache_command",
    "potstill.cli.eval",
    "potstill.serving.server",
    "potstill.training.loop",
    "tensorboard.compat.proto.event_pb2",
    "transformers.models.llama.modeling_llama",
]


def warm_context() -> ForkServerContext:
    """Starts processes with all that is `IMPORTED`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Command:
    """`potstill …` in a process of its own, as a shell would start it, with one file for all that it says."""

    def __init__(self, *words: object, log: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        if log is None:
            handle, name = tempfile.mkstemp(prefix="potstill-", suffix=".log")
            os.close(handle)
            log = Path(name)
            atexit.register(log.unlink, missing_ok=True)
        log.write_text("")
        self._log = log
        line = [str(word) for word in words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        arguments = (line, str(log), environment, os.getcwd(), list(sys.path))
        self._process = warm_context().Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Until it has ended."""
        self._process.join(seconds)
        code = self.poll()
        assert code is not None, f"it did not end within {seconds:g} s:\n{self.said()}"
        return code

    def wait_for(self, what: Callable[[], bool], seconds: float) -> bool:
        """Until it is so, or the process has ended, or so long. Looked at every millisecond, so that the moments are as many as
        the machine is uneven."""
        deadline = time.monotonic() + seconds
        while not what():
            if self.poll() is not None or time.monotonic() > deadline:
                return what()
            time.sleep(0.001)
        return True

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """With SIGSTOP, and not before it stands still; or it has ended."""
        self.send(signal.SIGSTOP)
        while self.poll() is None and _state(self.pid) not in "Tt":
            time.sleep(0.001)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _run(words: list[str], log: str, environment: dict[str, str], folder: str, path: list[str]) -> None:
    """What a shell and `python -m potstill` do, in a process that has imported it."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 -- to the process's end
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    sys.argv = ["potstill", *words]
    try:
        runpy.run_module("potstill", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
