"""What the recipe asks of the machine: processes, disk, memory, time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from potstill.doctor.findings import Finding, Patient, error, ok, warning
from potstill.dry_run import FirstStep
from potstill.memory import Memory, count_memory, weight_bytes
from potstill.models.libraries import reason
from potstill.models.loading import hollow_student
from potstill.parallel.mesh import AXES, checked_sizes
from potstill.teachers.live import LiveModel
from potstill.teachers.placed import own_ranks
from potstill.training.metrics import Stopwatch
from potstill.training.setup import step_to_count
from potstill.training.step import optimizer_step
from potstill.types import PotstillError

BESIDES = 2  # checkpoints beyond checkpoint.keep: the best one, and the one that is being written
FAR = 100.0  # times the other, from which on the smaller of two losses hardly counts


def fitting_processes(patient: Patient) -> int:
    """How many a recipe asks for, where nobody says how many there are."""
    sizes = [getattr(patient.recipe.parallel, name) for name in AXES]
    return math.prod(size for size in sizes if size != "auto") + own_ranks(patient.recipe)


def world(patient: Patient) -> Iterator[Finding]:
    recipe, count = patient.recipe, patient.processes or fitting_processes(patient)
    try:
        sizes = checked_sizes(recipe.parallel, count - own_ranks(recipe), recipe.train.batch_size)
    except PotstillError as refused:
        yield error(str(refused), "see docs/scaling.md")
        return
    said = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    yield ok(f"{count} process{'es' if count > 1 else ''}{f': {said}' if said else ''}")


def disk(patient: Patient) -> Iterator[Finding]:
    """Room for the checkpoints that there may be at once."""
    recipe = patient.recipe
    if recipe.student.lora is not None:
        return  # adapters are small
    model = hollow_student(recipe.student, patient.tokenizer, getattr(torch, recipe.student.dtype))
    weights = sum(p.numel() for p in model.parameters())
    size = {"float32": 4, "bfloat16": 2, "float64": 8}[recipe.student.dtype]
    each = weights * (size + 2 * max(4, size) + (4 if size == 2 else 0))  # two moments, and float32 masters of bfloat16
    needed, free = each * (recipe.checkpoint.keep + BESIDES), free_disk(Path(recipe.run))
    said = f"checkpoints take about {_size(needed)} ({_size(each)} each), and {_size(free)} are free for {recipe.run}"
    if needed > free:
        yield error(said, "make room, lower checkpoint.keep, or choose another folder (run)")
    else:
        yield ok(said)


def free_disk(folder: Path) -> int:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def memory(patient: Patient, first: FirstStep) -> Iterator[Finding]:
    """Of one rank, counted on tensors without contents; spread over ranks it is an estimate."""
    parts = first.parts
    if parts.recipe.train.compile:
        return
    live = [teacher.source.language_model for teacher in parts.teachers if isinstance(teacher.source, LiveModel)]
    try:
        counted = count_memory(parts.student, live, step_to_count(parts.recipe, parts.data, parts.device))
    except Exception as failed:  # the code of each architecture, on tensors without contents
        yield ok(f"the memory of a step could not be counted ({reason(failed)})")
        return
    shards = _shards(patient)
    needed = counted.total if shards == 1 else _of_rank(counted, shards)
    there = free_memory(parts.device) + sum(map(weight_bytes, [parts.student, *live]))
    counted_as = "" if shards == 1 else f" per rank of {shards}, an estimate"
    said = f"a step takes about {_size(needed)}{counted_as}, and there are {_size(there)}"
    if needed > there:
        yield error(
            said,
            "lower train.micro_batch_size or data.max_length, set train.gradient_checkpointing, take student.dtype bfloat16, "
            "or more ranks (parallel)",
        )
    else:
        yield ok(said)


def _shards(patient: Patient) -> int:
    count = (patient.processes or fitting_processes(patient)) - own_ranks(patient.recipe)
    return max(1, count // patient.recipe.parallel.dp_replicate)


def _of_rank(counted: Memory, shards: int) -> int:
    spread = counted.weights + counted.gradients + counted.optimizer
    return spread // shards + counted.activations + counted.loss + counted.teacher


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    file = Path("/proc/meminfo")
    if not file.exists():
        return 2**62  # unknown: nothing is refused
    kilobytes = dict(line.split(":") for line in file.read_text().splitlines())["MemAvailable"].split()[0]
    return int(kilobytes) * 1024


def one_step(patient: Patient, first: FirstStep) -> Iterator[Finding]:
    """Take one, in memory alone: how long it takes, and how large the two losses are beside each other."""
    parts, prepared = first.parts, first.prepared
    tokens = sum(batch.supervised_tokens for batch in prepared.step.batches)
    found = optimizer_step(parts, prepared, tokens, first.run, Stopwatch())
    seconds = sum(value for name, value in found.items() if name.startswith("seconds_"))
    total = first.run.total_steps
    yield ok(
        f"a step takes {seconds:.2g} s, so {total:,} take about {_duration(seconds * total)} (an estimate, from one)"
    )
    kd, ce = found["kd"], found["ce"]
    if kd is None or not (found["kd_weight"] and found["ce_weight"]):
        yield ok(f"loss {found['loss']:.3g} at the first step")
        return
    shares = abs(found["kd_weight"] * kd), abs(found["ce_weight"] * ce)
    said = f"at the first step the divergence counts {shares[0]:.3g} and the cross-entropy {shares[1]:.3g}"
    if min(shares) * FAR < max(shares):
        yield warning(said, "set loss.kd_weight and loss.ce_weight so that both count, or leave the small one out")
    else:
        yield ok(said)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _size(count: float) -> str:
    return f"{count / 10**9:.2f} GB" if count >= 10**8 else f"{count / 10**6:.1f} MB"
