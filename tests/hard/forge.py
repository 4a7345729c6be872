"""A process that has imported everything once and does each job in a fork of itself.

A fork begins in milliseconds where a process takes seconds to import torch, and it is a process all the same: it can be
killed at any moment, may crash, has limits of its own and leaves nothing behind. One job a line as JSON on stdin (see
`Job`), what came of it on stdout.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Threads do not survive a fork: libraries are told to start none.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE = 300.0  # seconds that a job may take before it counts as hanging


@dataclass(frozen=True)
class Job:
    """`call`: a name in CALLS, with its arguments."""

    call: str
    arguments: list[str]
    folder: str  # it is done there, and what it says is kept beside
    seconds: float = PATIENCE
    memory_mb: int | None = None  # of address space, more than the forge has
    file_bytes: int | None = None  # the longest file it can write
    kill_after: float | None = None  # seconds
    kill_at: int | None = None  # a line that is run of `traced`
    traced: list[str] = field(default_factory=list)  # modules (how their names begin) whose lines are counted


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: by a signal
    signal: int
    out: str
    err: str
    seconds: float
    lines: int = 0  # that were run of `traced`
    hung: bool = False


def _command(*words: str) -> int:
    """The command line, from its arguments to its exit code."""
    from potstill.cli.main import main

    sys.argv = ["potstill", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _calls() -> dict[str, Callable[..., int]]:
    import subjects

    return {"command": _command, **subjects.CALLS}


def warm_up() -> None:
    """Import what jobs will need, so that forks find it there."""
    import importlib

    for name in WANTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    _calls()


WANTED = [
    "datasets",
    "pyarrow.parquet",
    "httpx",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "potstill.cli.main",
    "potstill.cli.eval",
    "potstill.report",
    "potstill.cli.cache_command",
    "potstill.migrate.cache",
    "potstill.cache.convert",
    "potstill.serving.server",
    "potstill.training.loop",
    "potstill.rollouts.transformers",
]


def _trace(job: Job, lines: list[int]) -> None:
    """Count the lines that are run of some modules, on all threads, and die at one of them."""
    prefixes = tuple(job.traced)
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(prefixes)}

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == job.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def _within(job: Job, log: Path, call: Callable[..., int]) -> None:
    """In the fork: never returns."""
    code = 1
    lines = [0]
    try:
        for number, path in ((1, f"{log}.out"), (2, f"{log}.err")):
            handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
            os.dup2(handle, number)
            os.close(handle)
        os.chdir(job.folder)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if job.memory_mb is not None:
            most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (most + job.memory_mb * 2**20,) * 2)
        if job.traced:
            _trace(job, lines)
        if job.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        code = call(*job.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.settrace(None)
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if job.traced:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
                Path(f"{log}.lines").write_text(str(lines[0]))
        finally:
            os._exit(code)


def do(job: Job, calls: dict[str, Callable[..., int]]) -> Ended:
    log = Path(job.folder).with_name(f".said-{os.getpid()}")
    Path(f"{log}.lines").unlink(missing_ok=True)
    begin = time.monotonic()
    child = os.fork()
    if not child:
        _within(job, log, calls[job.call])
    ended = os.pidfd_open(child)
    limit = job.seconds if job.kill_after is None else min(job.kill_after, job.seconds)
    in_time = bool(select.select([ended], [], [], limit)[0])
    if not in_time:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(ended)
    lines = Path(f"{log}.lines")
    return Ended(
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        out=Path(f"{log}.out").read_text(errors="replace"),
        err=Path(f"{log}.err").read_text(errors="replace"),
        seconds=round(time.monotonic() - begin, 3),
        lines=int(lines.read_text()) if lines.exists() else 0,
        hung=not in_time and job.kill_after is None,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warm_up()
    calls = _calls()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len([n for n in names if n != "jemalloc_bg_thd"]) == 1, names  # jemalloc starts its own anew after a fork
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(do(Job(**json.loads(line)), calls))), file=answers, flush=True)


if __name__ == "__main__":
    main()
