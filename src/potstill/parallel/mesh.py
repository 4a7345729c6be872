"""The world of a run: which rank this process is, with whom it shares what, and sums over those who hold other rows.

With one process there is no group, every size is 1 and every sum is the value itself. Data-parallel sums go over dp × cp,
never over the world: tp ranks hold copies of the same rows, and a teacher's own ranks hold none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from potstill.config import ParallelConfig
from potstill.transfer import use_device
from potstill.types import PotstillError

AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # tp innermost: it stays within a host
MESH = ("dp_replicate", "fsdp", "tp")  # what DTensors are laid out over: parameters are sharded over dp_shard × cp
EXPERT_MESH = ("dp_replicate", "efsdp", "ep")
LOADING = timedelta(hours=2)  # that ranks wait for each other before the first step is taken


@dataclass(frozen=True)
class Axis:
    """This rank's place among the ranks it shares something with, their number, and their group (None: it is alone)."""

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Ranks:
    """What this process is in the world of its run."""

    rank: int = 0
    world: int = 1
    dp: Axis = Axis()  # the rows of a step are dealt among them
    cp: Axis = Axis()  # each has a part of every sequence
    tp: Axis = Axis()  # each has a part of every matrix
    sums: Axis = Axis()  # dp × cp: over these goes what is summed over rows
    mesh: DeviceMesh | None = None  # the student's ranks, by MESH; None: one process
    experts: DeviceMesh | None = None  # the same ranks, by EXPERT_MESH; None: experts are where everything else is
    control: dist.ProcessGroup | None = None  # the student's ranks, for values of the host; of the main thread alone
    data: dist.ProcessGroup | None = None  # the same for the thread that plans the data
    saving: dist.ProcessGroup | None = None  # … and for the one that saves
    texts: dist.ProcessGroup | None = None  # … and for the one that writes text

    @property
    def many(self) -> bool:
        return self.world > 1

    @property
    def first(self) -> bool:
        """It has the console, the run's folder and the callbacks."""
        return self.rank == 0

    @property
    def leader(self) -> bool:
        """Of the ranks that have the same rows."""
        return self.cp.index == 0 and self.tp.index == 0

    @property
    def student(self) -> bool:
        """Whether the student, or a part of it, is here: a teacher may have ranks of its own, the last of the world."""
        return self.mesh is None or self.mesh.get_coordinate() is not None

    @property
    def students(self) -> int:
        """How many ranks have the student, or a part of it."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def fsdp(self) -> DeviceMesh:
        """Over which the student's parameters are sharded; with replicas, these first."""
        assert self.mesh is not None
        return self.mesh["dp_replicate", "fsdp"] if self.mesh["dp_replicate"].size() > 1 else self.mesh["fsdp"]


_here = Ranks()


def ranks() -> Ranks:
    """Those of this process."""
    return _here


@contextmanager
def world(parallel: ParallelConfig, device: torch.device, batch_size: int = 0, teaching: int = 0) -> Iterator[Ranks]:
    """The groups of a run, by torchrun's environment; destroyed at the end. `teaching`: how many of the last ranks belong to
    teachers. `batch_size`: of which every data-parallel rank needs a row."""
    global _here
    count = processes()
    sizes = checked_sizes(parallel, count - teaching, batch_size)
    if count == 1:
        yield _here
        return
    begun = not dist.is_initialized()
    if begun:
        _begin(device)
    try:
        _here = _formed(sizes, parallel.ep, device)
        yield _here
    finally:
        _here = Ranks()
        if begun:
            dist.destroy_process_group()


def processes() -> int:
    """How many were started, as torchrun tells each of them."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=LOADING)
    except ValueError as error:  # an environment that torchrun did not make
        raise PotstillError(
            f"this is one of {processes()} processes (WORLD_SIZE), which cannot find each other ({error}): start them with "
            "torchrun"
        ) from error


def checked_sizes(parallel: ParallelConfig, count: int, batch_size: int = 0) -> dict[str, int]:
    """The size of each of AXES for `count` ranks of the student; an error, with what would fit, where there is none."""
    sizes = {name: getattr(parallel, name) for name in AXES}
    fixed = math.prod(size for size in sizes.values() if size != "auto")
    if sizes["dp_shard"] == "auto":
        sizes["dp_shard"] = count // fixed or 1
    total, said = math.prod(sizes.values()), " × ".join(f"{name} {size}" for name, size in sizes.items())
    if total != count:
        raise PotstillError(
            f"parallel: {said} are {total} ranks, and there {'is 1' if count == 1 else f'are {count}'} for the student: start "
            f"{total} processes (torchrun --nproc-per-node), or set sizes whose product is {count}"
        )
    deals = sizes["dp_replicate"] * sizes["dp_shard"]
    if 0 < batch_size < deals:
        raise PotstillError(
            f"train.batch_size {batch_size} has no row for each of {deals} data-parallel ranks: raise it to {deals} at least, "
            "or start fewer processes"
        )
    if (sizes["dp_shard"] * sizes["tp"]) % parallel.ep:
        raise PotstillError(
            f"parallel.ep {parallel.ep} does not divide dp_shard × tp, which is {sizes['dp_shard'] * sizes['tp']}: set it to a "
            "divisor of that"
        )
    return sizes


def _formed(sizes: dict[str, int], ep: int, device: torch.device) -> Ranks:
    """Every rank makes every group, also those that it is not in, in this order."""
    grid = torch.arange(math.prod(sizes.values())).view(tuple(sizes.values()))
    mesh = DeviceMesh(device.type, grid.flatten(1, 2), mesh_dim_names=MESH)
    experts = None if ep == 1 else expert_mesh(mesh, ep)
    students = grid.flatten().tolist()
    host = [dist.new_group(students, backend="gloo", timeout=LOADING) for _ in range(4)]
    here, count = dist.get_rank(), dist.get_world_size()
    host = host if here in students else [None] * 4
    tp, cp = grid.flatten(0, 2), grid.movedim(2, 3).flatten(0, 2)
    dp, sums = grid.flatten(0, 1).movedim(0, 2).flatten(0, 1), grid.flatten(0, 2).T
    return Ranks(here, count, _axis(dp), _axis(cp), _axis(tp), _axis(sums), mesh, experts, *host)


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """The student's ranks (dp_replicate, fsdp, tp) as (dp_replicate, efsdp, ep): all of a replica hold other tokens, but for
    the tp ranks of one batch, which deal them among themselves."""
    members = mesh.mesh
    return DeviceMesh(mesh.device_type, members.reshape(members.shape[0], -1, ep), mesh_dim_names=EXPERT_MESH)


def _axis(groups: Tensor) -> Axis:
    """A row for each group of ranks; this rank is in one of them, or in none."""
    found = Axis()
    for members in groups.tolist() if groups.shape[1] > 1 else ():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            found = Axis(members.index(dist.get_rank()), len(members), group)
    return found


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over the ranks that hold other rows, in place."""
    if (group := ranks().sums.group) is not None:
        dist.all_reduce(values, group=group)
    return values


def count_over_ranks(count: int) -> int:
    """A number that the host knows, summed over the ranks that hold other rows; with one process no tensor is made."""
    return int(sum_over_ranks(torch.tensor(count))) if ranks().sums.group is not None else count


def pick_device(name: str) -> torch.device:
    """`auto`: cuda, mps or cpu, whichever there is; of several GPUs the one that torchrun's LOCAL_RANK says. It is this
    thread's from here on."""
    device = _named_device(name)
    use_device(device)
    return device


def _named_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise PotstillError(
                f"train.device: {name!r} cannot be used here ({reason}); auto takes what there is"
            ) from None
    if torch.cuda.is_available():
        return (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK") or "0")) if processes() > 1 else torch.device("cuda")
        )
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
