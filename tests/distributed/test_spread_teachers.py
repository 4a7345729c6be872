"""Teachers on the student's own ranks, sharded, offloaded or tensor-parallel: the student has the parameters of one process,
whatever the tokenizers, with an uneven vocabulary, T ≠ 1, and a rank that has nothing to read in a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placed_runs import ROWS, compare, recipe, trained, write_models
from ranks import on_ranks

OTHER = "pieces-1k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("spread"))


def routed(folder: Path) -> list[dict[str, Any]]:
    """Two teachers, each of which has nothing to say in some passes."""
    one = {"model": str(folder / "one"), "filter": {"lang": "de"}}
    return [one | {"placement": "shard"}, {"model": str(folder / "two"), "filter": {"lang": "fr"}, "weight": 0.5}]


def test_sharded_over_data_parallel_ranks(folder: Path) -> None:
    one, two = str(folder / "one"), str(folder / "two")
    cases = [
        recipe(folder, [{"model": one, "placement": "shard"}]),
        recipe(folder, [{"model": two, "placement": "offload"}], OTHER),
        recipe(folder, routed(folder)),
    ]
    found = compare(2, cases)
    both = [each for each in found[0] if each is not None]
    assert max(each["silent"] for each in both) > 0
    (whole,) = on_ranks(1, trained, cases[:1])[0]
    head = ROWS * 32
    for each in both:  # the head, and half of the rest
        assert abs(each["held"][0] - head - (whole["held"][0] - head) / 2) < 100


def test_tensor_parallel_beside_the_student(folder: Path) -> None:
    one, two, three = (str(folder / name) for name in ("one", "two", "three"))
    tp = {"parallel": {"tp": 2}}
    cases = [
        recipe(folder, [{"model": one}, {"model": three, "weight": 0.5}], **tp),
        recipe(folder, [{"model": one, "tp": 2}, {"model": two, "tp": 1}], OTHER, **tp),
    ]
    found = compare(2, cases)
    said = found[0][0]["notes"] if found[0][0] is not None else []
    assert sum("teachers[1].tp 2 does not divide" in note and "whole on every tp rank" in note for note in said) == 1


def test_sharded_over_context_parallel_ranks(folder: Path) -> None:
    teachers = [{"model": str(folder / "one"), "placement": "shard"}, {"model": str(folder / "two"), "weight": 0.5}]
    compare(2, [recipe(folder, teachers, parallel={"cp": 2})])


@pytest.mark.slow
def test_sharded_and_tensor_parallel(folder: Path) -> None:
    one = {"model": str(folder / "one"), "placement": "shard"}
    tp, replicas = {"parallel": {"tp": 2}}, {"parallel": {"dp_replicate": 2}}
    cases = [
        recipe(folder, [one], **tp),
        recipe(folder, [one | {"tp": 1}], OTHER, **tp),
        recipe(folder, [one], **replicas),
    ]
    compare(4, cases)
