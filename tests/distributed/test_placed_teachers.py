"""Teachers with ranks of their own: the student that other ranks train has the parameters of one process, whatever the
tokenizers, over however many ranks a teacher lies, and however many teachers there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from placed_runs import CPU, compare, doubles, parsed, recipe, write_models
from ranks import on_ranks

import potstill
from potstill.parallel.mesh import world
from potstill.teachers.open import open_teachers
from potstill.teachers.placed import asking, own_ranks, serve_teacher
from potstill.types import PotstillError

OTHER = "pieces-1k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("placed"))


def test_one_rank_for_two(folder: Path) -> None:
    one, two = {"model": str(folder / "one"), "ranks": 1}, {"model": str(folder / "two"), "weight": 0.5}
    found = compare(3, [recipe(folder, [one]), recipe(folder, [one, two | {"placement": "shard"}], OTHER)])
    for each in found[1][:2]:  # the one elsewhere was waited for, the other was not
        assert each is not None and each["waited"][0] > 0 and each["waited"][1] == 0


def test_copies_and_matrices_over_several_ranks(folder: Path) -> None:
    one, two = str(folder / "one"), str(folder / "two")
    cases = [
        recipe(folder, [{"model": one, "ranks": 2, "tp": 2}]),
        recipe(folder, [{"model": one, "ranks": 2}], OTHER),
        recipe(folder, [{"model": one, "ranks": 1}, {"model": two, "ranks": 1, "weight": 0.5}]),
        recipe(folder, [{"model": one, "ranks": 2, "tp": 2}], parallel={"tp": 2}),
        recipe(folder, [{"model": two, "ranks": 2, "tp": 2}], OTHER, parallel={"cp": 2}),
    ]
    compare(4, cases)


def logged(all_keys: list[dict]) -> None:
    for keys in all_keys:
        potstill.train(keys)


def test_the_log_says_how_long_the_student_waited(folder: Path) -> None:
    """For a model elsewhere, and for what is computed elsewhere for a cache."""
    own = {"model": str(folder / "one"), "ranks": 1}
    teachers = {"own": own, "cached": own | {"cache": str(folder / "waited"), "store": {"kind": "hidden"}}}
    runs = [recipe(folder, [one], run=str(folder / name), log={"tensorboard": False}) for name, one in teachers.items()]
    on_ranks(2, logged, runs)
    placed = recipe(folder, [{"model": str(folder / "one")}], run=str(folder / "placed"), log={"tensorboard": False})
    on_ranks(1, logged, [placed])

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

    for name in teachers:
        assert all(0 <= line["seconds_teacher_wait"] <= line["seconds_teacher"] for line in lines(name))
        assert sum(line["seconds_teacher_wait"] for line in lines(name)) > 0
    assert not any("seconds_teacher_wait" in line for line in lines("placed"))


def refused(keys: dict) -> str:
    """What a rank raises."""
    made = parsed(keys)
    with doubles(), world(made.parallel, CPU, teaching=own_ranks(made)) as here:
        try:
            if not here.student:
                serve_teacher(made, here, CPU)
            else:
                with asking(made, here, CPU, 60.0) as askers:
                    open_teachers(made.teachers, None, made.data, made.loss, CPU, askers)  # type: ignore[arg-type]
        except PotstillError as error:
            return str(error)
    return "nothing"


def test_what_is_refused_is_refused_on_all_ranks(folder: Path) -> None:
    """A teacher that is not there, one that cannot be cut, and more copies than ranks that ask."""
    nowhere = on_ranks(4, refused, recipe(folder, [{"model": str(folder / "no"), "ranks": 2, "tp": 2}]))
    assert len(set(nowhere)) == 1 and "teachers[0].model" in nowhere[0]
    uneven = recipe(folder, [{"model": str(folder / "three"), "ranks": 2, "tp": 2}], parallel={"tp": 2})
    said = set(on_ranks(4, refused, uneven))
    assert len(said) == 1 and "teachers[0].tp 2 does not divide 3, the heads of" in said.pop()
    many = recipe(folder, [{"model": str(folder / "one"), "ranks": 2}], parallel={"tp": 2})
    assert all("2 copies of it, more than the 1 ranks" in each for each in on_ranks(4, refused, many))
