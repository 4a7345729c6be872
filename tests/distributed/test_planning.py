"""Ranks that tokenize for each other: the plan is that of one process, whoever stops when, and an error is everybody's."""

from __future__ import annotations

import json
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from placed_runs import doubles, recipe, write_models
from ranks import on_ranks
from tiny_tokenizer import tiny_tokenizer

import potstill
from potstill.cache.build import build
from potstill.cache.together import origin_of
from potstill.config import DataConfig, ParallelConfig, StoreConfig, TeacherConfig
from potstill.data import Feed, StepBatches, planning
from potstill.data.encoding import Encoder
from potstill.models import load_teacher
from potstill.parallel.agree import Rounds
from potstill.parallel.mesh import ranks, world
from potstill.types import PotstillError

CPU = torch.device("cpu")
STEPS = 9


def written(folder: Path, many: int = 150) -> DataConfig:
    """Texts of many lengths, some without a token to learn, some too long."""
    folder.mkdir(exist_ok=True)
    path = folder / "texts.jsonl"
    lines = [{"text": "" if i % 11 == 5 else f"d{i} " + "x" * (i * 7 % 29)} for i in range(many)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(sources=[{"files": str(path)}], max_length=24, shuffle_buffer=40)


def opened(data: DataConfig, size: int, rounds: Rounds | None, **more: Any) -> StepBatches:
    settings = {"batch_size": 5, "micro_batch_size": 2, "seed": 3, "epochs": None, "rank": (ranks().dp.index, size)}
    return StepBatches(data, tiny_tokenizer(), rounds=rounds, **settings | more)


def plan(data: DataConfig, state: Any = None, packing: bool = True, at_once: int = 4) -> dict[str, Any]:
    """This rank's batches of some steps, their states and counts, and how many texts it tokenized."""
    data = data.model_copy(update={"packing": packing})
    tokenized, encode = [0], Encoder.__call__

    def counted(self: Encoder, examples: Any) -> Any:
        tokenized[0] += len(examples)
        return encode(self, examples)

    Encoder.__call__, usual = counted, planning.TOKENIZED_AT_ONCE
    planning.TOKENIZED_AT_ONCE = at_once
    try:
        with world(ParallelConfig(), CPU) as here:
            rounds = None if here.data is None else Rounds(here.data)
            steps = opened(data, here.dp.size, rounds, state=state)
            found = [
                ([batch.input_ids.tolist() for batch in step.batches], texts(step), step.state, dict(step.counts))
                for step in islice(steps, STEPS)
            ]
            steps.leave()
    finally:
        Encoder.__call__, planning.TOKENIZED_AT_ONCE = encode, usual
    return {"steps": found, "tokenized": tokenized[0]}


def texts(step: Any) -> list[str]:
    return [example.text for batch in step.batches for example in batch.examples]


def without_padding(counts: dict[str, int]) -> dict[str, int]:
    """Which depends on who has what."""
    return {name: count for name, count in counts.items() if name != "padding_tokens"}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_the_plan_is_that_of_one_process(tmp_path: Path, packing: bool) -> None:
    data = written(tmp_path / "data")
    alone = plan(data, packing=packing)["steps"]
    assert any(counts["dropped_examples"] for _, _, _, counts in alone) and alone[-1][3]["cut_tokens"]
    for size in (3, 4):
        found = on_ranks(size, plan, data, None, packing)
        for number, (_, expected, state, counts) in enumerate(alone):
            step = [rank["steps"][number] for rank in found]
            assert sorted(text for _, own, _, _ in step for text in own) == sorted(expected)
            for _, _, theirs, counted in step:
                assert without_padding(counted) == without_padding(counts)
                assert {**theirs, "counts": {}} == {**state, "counts": {}}


def test_a_rank_tokenizes_its_share_and_its_own_rows(tmp_path: Path) -> None:
    data = written(tmp_path / "data", 400)
    alone = plan(data)
    found = on_ranks(4, plan, data)
    own = [sum(len(step[1]) for step in rank["steps"]) for rank in found]
    read = alone["tokenized"] + 4 * 4  # they read ahead by at most a block
    for rank, rows in zip(found, own, strict=True):
        assert rank["tokenized"] <= -(-read // 4) + rows
    assert max(rank["tokenized"] for rank in found) < 0.6 * alone["tokenized"]


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    data = written(tmp_path / "data")
    three = on_ranks(3, plan, data)
    state = three[0]["steps"][3][2]
    four, alone = on_ranks(4, plan, data, state), plan(data, state)
    for number in range(STEPS):
        expected = sorted(alone["steps"][number][1])
        assert sorted(text for rank in four for text in rank["steps"][number][1]) == expected
        if number + 4 < STEPS:
            assert sorted(text for rank in three for text in rank["steps"][number + 4][1]) == expected


def read_and_leave(data: DataConfig, counts: list[int]) -> list[str]:
    """Threads run ahead as far as they can; each rank reads a number of steps of its own, then leaves."""
    with world(ParallelConfig(), CPU) as here:
        assert here.data is not None
        with Feed(opened(data, here.dp.size, Rounds(here.data)), []) as feed:
            return [text for ready in islice(feed, counts[here.rank]) for text in texts(ready.step)]


def test_ranks_leave_when_they_like(tmp_path: Path) -> None:
    """Also one that never read, and all at once, with no thread left behind: the same ranks plan again afterwards."""
    data = written(tmp_path / "data")
    for counts in ([0, 0, 0], [3, 1, 2], [0, 2, 1]):
        found = on_ranks(3, read_and_leave, data, counts, timeout=120)
        assert [bool(own) for own in found] == [count > 0 for count in counts]


def failing(data: DataConfig, on: int, other: DataConfig | None) -> str:
    """What a rank says when another one fails in its third round, or reads `other`."""
    numbers, calls = planning._numbers, count()

    def fails(encoded: Any) -> Any:
        if ranks().rank == on and next(calls) == 2:
            raise PotstillError("this text has no tokens")
        return numbers(encoded)

    planning._numbers, usual, planning.TOKENIZED_AT_ONCE = fails, planning.TOKENIZED_AT_ONCE, 4
    try:
        with world(ParallelConfig(), CPU) as here:
            assert here.data is not None
            reads = other if here.rank == 1 and other is not None else data
            with Feed(opened(reads, here.dp.size, Rounds(here.data)), []) as feed:
                for _ in feed:
                    pass
    except PotstillError as error:
        return str(error)
    finally:
        planning._numbers, planning.TOKENIZED_AT_ONCE = numbers, usual
    return ""


def test_an_error_of_one_rank_is_everybodys(tmp_path: Path) -> None:
    data = written(tmp_path / "data")
    for rank in range(3):
        assert on_ranks(3, failing, data, rank, None, timeout=120) == ["this text has no tokens"] * 3


def test_ranks_that_read_other_texts_are_refused(tmp_path: Path) -> None:
    data, other = written(tmp_path / "data"), written(tmp_path / "other", 149)
    said = on_ranks(2, failing, data, -1, other, timeout=120)
    assert said[0] == said[1] and "rank 1 reads other texts than rank 0" in said[0]


def run_of(keys: dict[str, Any]) -> tuple[int, list[float], int]:
    """Steps, losses, and texts that were skipped."""
    with doubles():
        run = potstill.train(keys)
    lines = [json.loads(line) for line in (Path(keys["run"]) / "metrics.jsonl").read_text().splitlines()]
    return run.step, [line["loss"] for line in lines], run.counts["skipped_examples"]


def test_epochs_of_a_cache_that_lacks_texts(tmp_path: Path) -> None:
    """Rank 0 counts the steps of all ranks, by itself; texts that are not in the cache are counted by all."""
    write_models(tmp_path)
    lines = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "half.jsonl").write_text("".join(lines[::2]))
    data = DataConfig.model_validate({"sources": [{"files": str(tmp_path / "half.jsonl")}]})
    with doubles():
        teacher = load_teacher(TeacherConfig(model=str(tmp_path / "one")), CPU, "teachers[0]")
    build(origin_of(teacher, "one"), StoreConfig(k=8), data, tmp_path / "cache", rank=0, world=1)
    more = {"train": {"epochs": 2, "batch_size": 3, "micro_batch_size": 1}, "loss": {}, "log": {"tensorboard": False}}
    keys = recipe(tmp_path, [{"cache": str(tmp_path / "cache"), "on_missing": "skip"}], **more)
    keys["data"] = {**keys["data"], "packing": False, "piece_bytes": None}
    alone = run_of(keys | {"run": str(tmp_path / "alone")})
    first, second = on_ranks(2, run_of, keys | {"run": str(tmp_path / "two")}, timeout=240)
    assert first == second and (alone[0], alone[2]) == (first[0], first[2]) == (12, 19)  # a last one is not reached
    assert first[1] == pytest.approx(alone[1], abs=1e-8)
