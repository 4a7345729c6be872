"""Real processes over gloo, kept for the whole test session: importing torch and transformers takes longer than most tests.

    found = on_ranks(2, work, "argument")    # what work("argument") gave on rank 0 and on rank 1

`work` is a function of a module that can be imported (a test's own will do). While it runs there is a process group of that
many ranks, and torchrun's environment; so `potstill.parallel.mesh.world` finds its ranks, and `potstill.train` its world.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from warm import warm_context

MOST = 5  # four of the student, and one of a teacher
LAST_WORDS = 20.0  # seconds that the others have once a rank failed: gloo tells them when its group is gone
SAID = 20_000  # characters of a process's last words
MEETING = (
    400.0  # that ranks wait for each other: on a busy machine one may take minutes to import torch and transformers
)


class RankFailed(AssertionError):
    """With the rank's number and its traceback."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    log: Path  # what it, or a library in it, says to the console: the last words of one that crashes


_workers: list[_Worker] = []


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """What `work(*arguments)` gives on each of `world` ranks. Nobody's error is lost: that of the lowest rank that failed is
    raised, and after one the processes are replaced for the next call."""
    assert 1 <= world <= MOST
    _start(world)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        for rank in range(world):
            message = pickle.dumps((work, arguments))
            _workers[rank].pipe.send_bytes(
                pickle.dumps((list(sys.path), os.getcwd(), rank, world, str(folder / "meet"), message))
            )
        answers = _answers(world, timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = {rank: answer[1] for rank, answer in answers.items() if not answer[0]}
    if failed:
        raise RankFailed("\n".join(f"rank {rank} of {world}: {said}" for rank, said in sorted(failed.items())))
    return [pickle.loads(answers[rank][1]) for rank in range(world)]


def _start(world: int) -> None:
    context = warm_context()
    while len(_workers) < world:
        ours, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(handle)
        process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        process.start()
        theirs.close()
        _workers.append(_Worker(process, ours, Path(name)))


def _answers(world: int, timeout: float) -> dict[int, tuple[bool, Any]]:
    """(True, pickled value) or (False, traceback) of each rank."""
    found: dict[int, tuple[bool, Any]] = {}
    end = time.monotonic() + timeout
    while len(found) < world:
        pipes = {_workers[rank].pipe: rank for rank in range(world) if rank not in found}
        ready = wait(list(pipes), max(0.0, end - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = _workers[pipes[pipe]].process
                process.join(LAST_WORDS)  # its end of the pipe is closed before its exit code is known
                answer = (False, f"its process died (exit code {process.exitcode}){_last_words(pipes[pipe])}")
            found[pipes[pipe]] = answer
            if not answer[0]:
                end = min(end, time.monotonic() + LAST_WORDS)
        if not ready:
            break
    for rank in range(world):
        if rank not in found:
            found[rank] = (False, f"gave no answer in time{_last_words(rank, stacks=True)}")
    if not all(good for good, _ in found.values()):
        _stop()
    return found


def _last_words(rank: int, stacks: bool = False) -> str:
    """What its process has said. `stacks`: it lives, and shall say where its threads are."""
    worker = _workers[rank]
    if stacks and worker.process.is_alive() and worker.process.pid is not None:
        before, end = worker.log.stat().st_size, time.monotonic() + LAST_WORDS
        os.kill(worker.process.pid, signal.SIGUSR1)
        while worker.log.stat().st_size == before and time.monotonic() < end:
            time.sleep(0.05)
    said = worker.log.read_text(encoding="utf-8", errors="replace")[-SAID:]
    return f"; it said:\n{said}" if said else ", and said nothing"


@atexit.register
def _stop() -> None:
    for worker in _workers:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        worker.log.unlink(missing_ok=True)
    _workers.clear()


def _forget_groups() -> None:
    """DTensors keep plans by meshes, and meshes of the same ranks are equal: the next call's would find groups that are gone,
    or others of the same name."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def _meet(where: str, rank: int, world: int) -> None:
    """None goes on before all are there: if its work fails at once, those that still connect would meet nobody, and number
    their groups otherwise from then on."""
    import torch.distributed as dist

    dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=MEETING))
    dist.barrier()


def _serve(pipe: Connection, log: str) -> None:
    """One process of the pool. Its console is a file: that of the process it was forked from is nobody's by now."""
    console = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(console, descriptor)
    import torch
    import torch.distributed as dist

    faulthandler.enable(2)  # where it was, should it crash
    faulthandler.register(signal.SIGUSR1, 2)  # … or hang
    torch.set_num_threads(1)
    environment = dict(os.environ)
    while True:
        try:
            sys.path[:], folder, rank, world, meet, message = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the session is over
            return
        os.chdir(folder)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        try:
            work, arguments = pickle.loads(message)
            if world > 1:
                _meet(f"file://{meet}", rank, world)
            answer = (True, pickle.dumps(work(*arguments)))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                _forget_groups()
            os.environ.clear()
            os.environ.update(environment)
        pipe.send_bytes(pickle.dumps(answer))
