"""`torchrun … -m potstill train` as a process of its own, whose ranks are found, watched, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE = 240.0  # seconds; nothing here takes so long on a machine with other work to do
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    """An agent with its ranks. `before`: words in front of the command, which become the command's in the end (`exec`)."""

    def __init__(
        self,
        recipe: Path,
        run: Path,
        *options: str,
        before: Sequence[str] = (),
        name: str = "torchrun",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.run, self._log = run, run.with_name(f"{run.name}-{name}.log")
        agent = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "potstill", "train", str(recipe)]
        with self._log.open("a") as out:
            self._process = subprocess.Popen(
                [*before, *agent],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, what: Callable[[], bool], every: float = 0.01, patience: float = PATIENCE) -> None:
        """Until it is so."""
        deadline = time.monotonic() + patience
        while not what():
            assert self.running(), f"torchrun ended too early:\n{self.said()}"
            assert time.monotonic() < deadline, f"waited {patience:g} s for nothing:\n{self.said()}"
            time.sleep(every)

    def end(self, patience: float = PATIENCE) -> tuple[int, str]:
        """Exit code and all that was said."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun did not end in {patience:g} s:\n{self.said()}") from None
        return self._process.returncode, self.said()

    def ranks(self) -> dict[int, int]:
        """Process ids of those that live, by their rank."""
        found: dict[int, int] = {}
        for child in _children(self._process.pid):
            with suppress(OSError):  # it has just ended
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
                if rank is not None and state not in "ZX":
                    found[rank] = child
        return found

    def kill(self) -> None:
        """The agent first, so that it starts none anew."""
        ranks = list(self.ranks().values())
        self._process.kill()
        for pid in [*ranks, *self.ranks().values()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for path in Path(f"/proc/{pid}/task").iterdir()
            for child in (path / "children").read_text().split()
        ]
    except OSError:
        return []


def step_reached(run: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        whole = [line for line in (run / "metrics.jsonl").read_text().split("\n")[:-1] if line]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole[-1])["step"]) if whole else 0


def unfinished(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((run / "checkpoints").glob(".unfinished-step-*"))


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it holds: no thread of the process does anything any more."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def exported(run: Path) -> dict[str, bytes]:
    """The files of the student as it was saved last."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / "latest" / "model").glob("*.safetensors")}
