"""The one place that reduces over ranks. With one process every reduction is the value itself."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.types import PotstillError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over the data-parallel ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def count_over_ranks(count: int) -> int:
    """A number that the host knows, summed over the data-parallel ranks; with one process no tensor is made."""
    return int(sum_over_ranks(torch.tensor(count))) if dist.is_initialized() else count


def refuse_many_processes() -> None:
    """Each would train alone, and all but one be locked out of the run's folder."""
    processes = os.environ.get("WORLD_SIZE") or "1"
    if processes != "1":
        raise PotstillError(
            f"training runs in one process, and this is one of {processes} (WORLD_SIZE): start it without torchrun, or with "
            "--nproc-per-node 1 --nnodes 1"
        )


def pick_device(name: str) -> torch.device:
    """`auto`: cuda, mps or cpu, whichever there is."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise PotstillError(
                f"train.device: {name!r} cannot be used here ({reason}); auto takes what there is"
            ) from None
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
