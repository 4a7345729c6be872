"""The numbers that a step is logged with, by name."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from potstill.teachers.teacher import Teacher

PHASES = ("data", "teacher", "student", "optimizer")  # what the time of a step goes into
# The means of the log, by the number of rows that they are over. A step without such rows does not have them, but for those
# over the sampled rows, which are None then.
MEANS = {
    "stat_rows": ("kl", "teacher_entropy", "student_entropy", "agreement"),
    "shared_rows": ("shared_mass",),
    "support_rows": ("support_mass",),
    "on_policy_rows": ("sampling_logprob_gap",),
    "policy_gradient_rows": ("ratio_mean", "ratio_clipped", "advantage"),
}
# All that a forward pass may sum up over its rows. Ranks add up the same names in the same order, whatever each of them has.
SUMS = ("loss", "kd", "ce", "router_aux", *MEANS, *(name for names in MEANS.values() for name in names))


def means(sums: Mapping[str, float]) -> dict[str, float | None]:
    """MEANS, from the sums of a step. NaN: not known for all rows."""
    found: dict[str, float | None] = {}
    for rows, names in MEANS.items():
        if sums[rows]:
            found |= {name: None if math.isnan(sums[name]) else sums[name] / sums[rows] for name in names}
        elif rows == "stat_rows":
            found |= dict.fromkeys(names)
    return found


def alignment(counts: Mapping[str, int]) -> dict[str, float]:
    """How well the tokens of teachers with another tokenizer align with the student's, in this process's part of the step."""
    if not counts.get("tokens"):
        return {}
    return {
        "align_chunks_per_token": counts["chunks"] / counts["tokens"],
        "align_exact": counts["tokens_in_chunks"] / counts["tokens"],
        "align_bytes": counts["bytes_in_chunks"] / max(1, counts["bytes"]),
        "align_one_to_one": counts["one_to_one"] / max(1, counts["chunks"]),
    }


def seconds_waited(teachers: Sequence[Teacher[Any]]) -> float:
    """For teachers with ranks of their own, since the run began, in this process."""
    return sum(teacher.waited for teacher in teachers)


class Stopwatch:
    """Seconds by phase. Reading resets."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return {f"seconds_{phase}": spent for phase, spent in seconds.items()}


def reset_peak_memory(device: torch.device) -> None:
    """From here on, `peak_memory_bytes` is of what follows. Only Linux can forget the peak of a process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The most since the last reset: allocated on a CUDA device, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
