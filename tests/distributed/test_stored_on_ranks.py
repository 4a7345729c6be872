"""Caches and servers with several ranks: one of those that have the same rows asks, and tells the others; models that lie over
ranks fill caches together. The student has the parameters of one process, and the cache its content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_content import content
from placed_runs import CPU, Found, compare, doubles, recipe, write_models
from ranks import on_ranks
from served import Served

from potstill.cache.build import build
from potstill.cache.reading import weights_fingerprint
from potstill.cache.store import Cache
from potstill.cache.together import SharedOrigin, origin_of
from potstill.cli.cache_command import build_cache
from potstill.config import DataConfig, ParallelConfig, StoreConfig, TeacherConfig
from potstill.parallel.mesh import world
from potstill.teachers.placed import load_in_place
from potstill.teachers.remote import open_server

OTHER = "pieces-1k"
TOP_K = {"kind": "top_k", "k": 8, "temperatures": [1.0, 1.7]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("stored"))


def beside(folder: Path, name: str, **more: Any) -> Found:
    return {"model": str(folder / "one"), "cache": str(folder / name), "store": TOP_K, **more}


def test_caches_that_are_filled_by_ranks_together(folder: Path) -> None:
    """Each twice: the second time there is nothing to compute, and all ranks know it."""
    sharded = recipe(folder, [beside(folder, "sharded", placement="shard"), {"model": str(folder / "two")}])
    split = recipe(folder, [beside(folder, "split")], parallel={"tp": 2})
    alone = recipe(folder, [{"cache": str(folder / "split")}], parallel={"tp": 2})
    cut = recipe(
        folder, [beside(folder, "cut", placement="shard")], OTHER, parallel={"cp": 2}, loss={"temperature": 1.0}
    )
    compare(2, [sharded, sharded, split, split, cut])
    compare(2, [alone])
    for name in ("split", "cut"):
        assert content(folder / name) == content(folder / f"{name}-alone"), name
    # Two ranks with rows of their own may compute one document at a time.
    keys = [
        {bytes(key) for shard in Cache(folder / name).shards for key in shard.keys}
        for name in ("sharded", "sharded-alone")
    ]
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_a_cache_filled_from_ranks_of_its_own(folder: Path) -> None:
    split = recipe(folder, [beside(folder, "own", ranks=2, tp=2)], parallel={"tp": 2})
    compare(4, [split, split])
    assert content(folder / "own") == content(folder / "own-alone")


def test_a_server_that_one_of_two_ranks_asks(folder: Path) -> None:
    with Served(folder / "one") as server:
        asked = {"server": server.address, "remote": {"kind": "hidden"}}
        cases = [recipe(folder, [asked], parallel={"tp": 2}), recipe(folder, [asked], OTHER, parallel={"cp": 2})]
        compare(2, cases, atol=1e-7)  # what it answers is float32
        assert on_ranks(2, concurrency, server.address, 5) == [3, 2]
        assert on_ranks(2, concurrency, server.address, 1) == [1, 1]


def concurrency(address: str, of_run: int) -> int:
    with world(ParallelConfig(), CPU):
        config = TeacherConfig.model_validate({"server": address, "remote": {"concurrency": of_run}})
        origin = open_server(config, "teachers[0]")
        origin.close()
        return origin.at_once


def built(folder: str, placement: str, tp: int, out: str) -> tuple[int, str]:
    """Documents that this rank added, and the fingerprint of the teacher."""
    config = TeacherConfig.model_validate({"model": f"{folder}/one", "placement": placement, "tp": tp})
    data = DataConfig.model_validate({"sources": [{"files": f"{folder}/text.jsonl"}]})
    with doubles(), world(ParallelConfig(tp=tp), CPU) as here:
        model = load_in_place(config, CPU, "teachers[0]", here, fingerprint=weights_fingerprint)
        origin = origin_of(model, "one")
        assert isinstance(origin, SharedOrigin) == here.many
        share = {"rank": here.dp.index, "world": here.dp.size, "batch_tokens": 60}
        return build(origin, StoreConfig(k=8), data, Path(out), **share).documents, origin.identity.weights


def test_a_build_by_ranks_together_is_that_of_one(folder: Path, tmp_path: Path) -> None:
    ((count, weights),) = on_ranks(1, built, str(folder), "replicate", 1, str(tmp_path / "alone"))
    sharded = on_ranks(2, built, str(folder), "shard", 1, str(tmp_path / "sharded"))
    split = on_ranks(2, built, str(folder), "replicate", 2, str(tmp_path / "split"))
    assert {found for _, found in [*sharded, *split]} == {weights}
    assert sum(added for added, _ in sharded) == count and min(added for added, _ in sharded) > 0
    assert [added for added, _ in split] == [count, 0]
    assert content(tmp_path / "alone") == content(tmp_path / "sharded") == content(tmp_path / "split")


def commanded(recipe_file: str, out: str, *overrides: str) -> None:
    store = {"kind": "top_k", "k": 8}
    build_cache(recipe_file, overrides, Path(out), 0, None, store, {}, 60, 60.0, "cpu")


def test_the_command_builds_with_a_teacher_over_ranks(folder: Path, tmp_path: Path) -> None:
    keys = recipe(folder, [{"model": str(folder / "one"), "ranks": 2}])
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(keys | {"run": str(tmp_path / "run")}), encoding="utf-8")
    on_ranks(1, commanded, str(path), str(tmp_path / "alone"), "teachers.0.tp=2")
    on_ranks(2, commanded, str(path), str(tmp_path / "plain"))
    on_ranks(2, commanded, str(path), str(tmp_path / "split"), "teachers.0.tp=2")
    on_ranks(2, commanded, str(path), str(tmp_path / "sharded"), "teachers.0.ranks=0", "teachers.0.placement=shard")
    wanted = content(tmp_path / "alone")
    assert len(wanted) == 20
    for name in ("plain", "split", "sharded"):
        found = content(tmp_path / name)
        assert {key: tokens for key, (tokens, _) in found.items()} == {
            key: tokens for key, (tokens, _) in wanted.items()
        }, name


def broken(folder: str, out: str) -> str:
    """What each rank raises where one of them finds its folder unusable in the midst of a build."""
    with doubles(), world(ParallelConfig(), CPU) as here:
        config = TeacherConfig.model_validate({"model": f"{folder}/one", "placement": "shard"})
        origin = origin_of(load_in_place(config, CPU, "teachers[0]", here), "one")
        data = {"sources": [{"files": f"{folder}/text.jsonl" if here.first else f"{folder}/gone.jsonl"}]}
        try:
            build(
                origin,
                StoreConfig(k=8),
                DataConfig.model_validate(data),
                Path(out),
                rank=here.dp.index,
                world=here.dp.size,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_one_rank_ends_the_build_of_all(folder: Path, tmp_path: Path) -> None:
    said = on_ranks(2, broken, str(folder), str(tmp_path / "out"))
    assert len(set(said)) == 1 and "gone.jsonl" in said[0] and said[0].startswith("PotstillError")
