"""An evaluation over ranks whose teacher goes away for one of them: all go on without it, on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks
from taught import data_of, write_files
from tiny import CPU, tiny

from potstill.config import ParallelConfig
from potstill.evals import fidelity
from potstill.evals.fidelity import evaluate, evaluation_batches
from potstill.evals.reference import Reference, measured_against, own_share
from potstill.parallel.mesh import world
from potstill.teachers.live import live_teacher
from potstill.types import Batch, PotstillError, Target


def evaluated(files: Path, parallel: dict[str, int], fails_on: int | None) -> tuple[dict[str, Any], int]:
    """On each rank: what is found, and how many passes it took."""
    student, teacher, passes = tiny(0), live_teacher(tiny(1), 2048, "tiny"), 0
    with world(ParallelConfig(**parallel), CPU) as here:
        batches = own_share(list(evaluation_batches(data_of(files), student, 4, None)))
        prepare = teacher.prepare

        def away(batch: Batch) -> Any:
            if batch is batches[-1]:
                raise PotstillError("the server is away")
            return prepare(batch)

        def measure(batch: Batch, target: Target | None) -> Any:
            nonlocal passes
            passes += 1
            if here.many:  # as ranks that hold parts of one model do
                dist.barrier(group=here.control)
            return fidelity.measure(student, batch, target)

        if here.rank == fails_on:
            teacher.prepare = away  # type: ignore[method-assign]
        return measured_against(Reference(teacher, away=True), student, batches, CPU, measure=measure), passes


@pytest.mark.parametrize(("parallel", "fails_on"), [({"tp": 2}, 0), ({}, 1)])
def test_a_teacher_that_is_away_for_one_rank_is_away_for_all(tmp_path, parallel, fails_on) -> None:
    files = write_files(tmp_path)
    alone, _ = evaluated(files, {}, None)
    student = tiny(0)
    expected = evaluate(student, None, list(evaluation_batches(data_of(files), student, 4, None)), CPU)
    (first, passes), (second, also) = on_ranks(2, evaluated, files, parallel, fails_on)
    assert first == second and passes == also
    assert first["kl"] is None and alone["kl"] > 0
    assert first["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)
    (there, _), _ = on_ranks(2, evaluated, files, parallel, None)
    assert there["kl"] == pytest.approx(alone["kl"], rel=1e-5)
