"""Real processes over gloo, and what each of them found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing


def found_by(work: Callable[..., None], world: int, folder: Path, *more: str, timeout: float) -> list[Any]:
    """Start `work(rank, world, folder, *more)` on every rank and read the `{rank}.pt` that each leaves in `folder`. A child's
    exit code says little on gloo: what it wrote is the verdict."""
    arguments = (world, str(folder), *more)
    started = torch.multiprocessing.start_processes(work, arguments, nprocs=world, join=False, start_method="spawn")
    files = [folder / f"{rank}.pt" for rank in range(world)]
    end = time.monotonic() + timeout
    try:
        while not all(file.exists() for file in files):
            there = [file.name for file in files if file.exists()]
            assert time.monotonic() < end, f"after {timeout} s only {there} are written"
            started.join(timeout=0.2)  # raises with the traceback of a child that failed
        for process in started.processes:
            process.join(timeout=30)
    finally:
        for process in started.processes:
            process.kill()
    return [torch.load(file, weights_only=True) for file in files]
