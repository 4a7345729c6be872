"""Two real processes: a build shared between them, two training runs that fill one cache at once, and the loss of a target
over fewer ids than a student whose vocabulary is cut into slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_ranks import SLICES, VOCABULARY, recipe, run_call, width_calls, work
from ranks import on_ranks

import potstill
from potstill.cache.build import build
from potstill.cache.store import Cache
from potstill.cache.verify import verify
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.models import load_teacher


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, tiny_text: Path) -> tuple[Path, list[Any]]:
    """The folder and what each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(2, work, folder, str(tiny_teacher), str(tiny_text))


def documents(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for shard in Cache(folder).shards:
        for number, key in enumerate(shard.keys):
            data = shard.data[shard.offsets[number] : shard.offsets[number + 1]].tobytes()
            assert shard.whole(number)
            found[bytes(key).hex()] = data
    return found


def test_a_target_over_fewer_ids_than_the_slices(ranks):
    """Equal to a student that has only these ids, in value and gradient; the others' gradient is exactly zero."""
    _, found = ranks
    for name, (target, _) in width_calls().items():
        alone = run_call(name, slice(0, target.width), None)
        assert alone["kd"].abs().min() > 1e-6, name
        weight = torch.zeros(VOCABULARY, alone["weight"].shape[1], dtype=torch.float64)
        weight[: target.width] = alone["weight"]
        parts = {0: slice(0, SLICES[0]), 1: slice(SLICES[0], VOCABULARY)}
        for rank, columns in parts.items():
            ours = found[rank]["calls"][name]
            for key in ("loss", "kd", "hidden"):
                torch.testing.assert_close(ours[key], alone[key], rtol=1e-9, atol=1e-10, msg=f"{name}: {key}")
            torch.testing.assert_close(ours["weight"], weight[columns], rtol=1e-9, atol=1e-10, msg=f"{name}: weight")
            assert not ours["weight"][max(0, target.width - columns.start) :].any(), name


def test_a_build_shared_by_two_processes_is_that_of_one(ranks, tiny_teacher, tiny_text, tmp_path):
    folder, found = ranks
    teacher = load_teacher(TeacherConfig(model=str(tiny_teacher)), torch.device("cpu"), "teacher", "teacher")
    data = DataConfig.model_validate({"sources": [{"files": str(tiny_text)}], "max_length": 64})
    build(teacher, StoreConfig(kind="hidden"), data, tmp_path / "alone", name="teacher", batch_tokens=40)
    assert documents(folder / "built") == documents(tmp_path / "alone")
    added = [rank["built"][0] for rank in found]
    assert sum(added) == 60 and min(added) >= 20
    report = verify(folder / "built", teacher)
    assert report.damage == [] and report.numbers["written_twice"] == 0


def test_two_runs_that_fill_one_cache(ranks, tiny_teacher, tiny_text, monkeypatch):
    """Each document is computed by one of them, or by both at once; what is there in the end serves both again, without the
    teacher. Computed in two batches, a document is the same but for rounding."""
    folder, found = ranks
    report = verify(folder / "filled")
    assert report.damage == [] and len(documents(folder / "filled")) == 60
    computed = [set(rank["computed"]) for rank in found]
    assert all(len(rank["computed"]) == len(keys) for rank, keys in zip(found, computed, strict=True))  # none twice
    assert computed[0] | computed[1] == set(documents(folder / "filled"))
    assert report.numbers["written_twice"] <= len(computed[0] & computed[1])

    monkeypatch.setattr("potstill.teachers.placed.load_teacher", lambda *_: pytest.fail("the teacher was loaded"))
    data = {"sources": [{"files": str(tiny_text)}], "max_length": 64}
    for rank in range(2):
        keys = recipe(folder, str(tiny_teacher), data, seed=rank)
        alone = keys | {"run": str(folder / f"alone-{rank}"), "teachers": [{"cache": str(folder / "filled")}]}
        potstill.train(alone)
        lines = (folder / f"alone-{rank}" / "metrics.jsonl").read_text().splitlines()
        again = [json.loads(line)["loss"] for line in lines]
        assert again == pytest.approx(found[rank]["losses"], rel=1e-5)
