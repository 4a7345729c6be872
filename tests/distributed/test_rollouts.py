"""Text that several ranks write is the text that one process writes."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks
from spread_writers import (
    PROMPTS,
    Texts,
    buffered,
    by_vllm,
    evaluated,
    exact_tiny,
    failing,
    generations,
    refused_vllm,
    stepped,
)
from tiny_models import make_model
from vllm_stand_in import StandIn


def same(found: list[Texts], alone: list[Texts], atol: float) -> None:
    assert len(found) == len(alone)
    for some, expected in zip(found, alone, strict=True):
        assert [(ids, end) for ids, _, end in some] == [(ids, end) for ids, _, end in expected]
        for (_, ours, _), (_, theirs, _) in zip(some, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("family", "world", "keys"),
    [
        ("llama-tied", 2, {}),
        ("gemma3", 2, {}),
        ("qwen3", 4, {"tp": 2}),
        ("phi3", 4, {"dp_replicate": 2}),
        ("llama", 4, {"cp": 2}),
    ],
    ids=str,
)
def test_every_rank_has_the_texts_of_one_process(family, world, keys) -> None:
    alone = generations(family, {})
    assert len({str(ids) for ids, _, _ in alone[0]}) > 5 and alone[0] != alone[2]
    assert {end for some in alone for _, _, end in some} == {"eos", "length"}
    for found in on_ranks(world, generations, family, keys):
        same(found, alone, 1e-6 if family == "gemma3" else 1e-10)  # Gemma's norms are float32 always


def test_one_process_without_overlap_writes_with_the_student_itself() -> None:
    itself, copied = generations("qwen3", {}, False), generations("qwen3", {})
    assert itself[0] == copied[0] and itself[2] == copied[2]


def test_a_rank_that_fails_while_it_writes_is_everybodys_error() -> None:
    for said, count in on_ranks(4, failing, {}, True):
        assert (said, count) == ("Agreed: the disk is full", "4")
    found = [said for said, _ in on_ranks(2, failing, {}, False)]
    assert found == ["RuntimeError: rank 1: ZeroDivisionError('by nothing')", "ZeroDivisionError: by nothing"]


MIXES: dict[str, dict[str, Any]] = {
    "mixed": {"on_policy_fraction": 0.5, "teacher_fraction": 0.3, "num_generations": 2},
    "overlap": {"on_policy_fraction": 0.8, "max_staleness": 1},
    "generation of three steps": {"on_policy_fraction": 1.0, "steps_per_generation": 3, "max_staleness": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    records = ({"q": f"Question {i} {'is ' * (i % 5)}", "a": f"answer {i}."} for i in range(40))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = [
        "The people of the United States",
        "Once upon a time",
        "It is the duty of Congress",
        "I have",
        "When in the",
    ]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps({"text": f"{t} and more"}) + "\n" for t in texts))
    return str(tmp_path)


def same_steps(ranks: list[list[Any]], alone: list[Any], dp: int) -> None:
    """All ranks together have the rows of one process; those that share rows have the same."""
    by_dp = [ranks[i * len(ranks) // dp] for i in range(dp)]
    assert all(found == by_dp[rank * dp // len(ranks)] for rank, found in enumerate(ranks))
    for number, expected in enumerate(alone):
        own = [found[number] for found in by_dp]
        for counts, state, staleness, _ in own:
            assert [counts, state, staleness] == expected[:3]
        assert len({len(rows) for *_, rows in own}) == 1  # every rank makes every pass
        rows = sorted((row for *_, passes in own for some in passes for row in some), key=str)
        theirs = sorted((row for some in expected[3] for row in some), key=str)
        assert [row[:3] for row in rows] == [row[:3] for row in theirs]
        for ours, other in zip(rows, theirs, strict=True):
            if other[3] is not None:
                np.testing.assert_allclose(ours[3], other[3], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mix", MIXES)
def test_steps_are_those_of_one_process_and_any_number_of_ranks_goes_on(folder: str, mix: str, tmp_path: Path) -> None:
    keys = MIXES[mix]
    whole = buffered(folder, {}, keys, 0, 5)
    shutil.rmtree(tmp_path / "step-5")
    same_steps(on_ranks(2, buffered, folder, {}, keys, 0, 2), whole[:2], 2)
    saved = (tmp_path / "step-2" / "rollouts.safetensors").exists()
    assert saved == (mix != "mixed")
    same_steps(on_ranks(4, buffered, folder, {"tp": 2}, keys, 2, 2), whole[2:4], 2)
    same_steps([buffered(folder, {}, keys, 4, 1)], whole[4:], 1)


def test_evaluation_on_own_samples_gives_the_same_numbers(folder: str) -> None:
    alone = evaluated(folder, {})
    assert alone["on_policy_reverse_kl"] > 0.01
    for world, keys in ((2, {}), (4, {}), (4, {"tp": 2}), (4, {"cp": 2})):
        for found in on_ranks(world, evaluated, folder, keys):
            assert found == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize(("world", "keys", "count"), [(2, {}, 1), (4, {"tp": 2}, 2)], ids=str)
def test_servers_write_what_the_student_writes(tmp_path: Path, world: int, keys: dict[str, int], count: int) -> None:
    """Two ranks write through a server that fails once and begins again with other weights; four through two servers."""
    alone = by_vllm(str(tmp_path), [], {})
    checks = 4 * 2  # texts of the first comparison, at both samplings
    servers = [StandIn(exact_tiny(2), 48, checks + 3 if count == 1 else None) for _ in range(count)]
    with servers[0] as one, servers[-1] if count > 1 else nullcontext():
        found = on_ranks(world, by_vllm, str(tmp_path), [server.address for server in servers], keys)
        assert one.paths == (["00000005", "00000005", "00000006"] if count == 1 else ["00000005", "00000006"])
    for texts in found:
        same(texts, alone, 1e-6)
    if count > 1:  # each has been asked for some of them, and to compare
        asked = [[seed for seed in server.seeds if seed >= 100] for server in servers]
        assert sorted(asked[0] + asked[1]) == [100 + i for i in range(2 * len(PROMPTS))] and all(asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here: tests/with_vllm")
def test_vllm_that_is_not_there_is_said_by_several_ranks_in_the_same_words() -> None:
    said = set(on_ranks(2, refused_vllm, {}))
    assert len(said) == 1 and "rollouts.engine.kind vllm: vLLM cannot be imported" in said.pop()


def test_steps_on_what_ranks_wrote_are_those_of_one_process(folder: str, tmp_path: Path) -> None:
    make_model(tmp_path / "teacher")
    alone = stepped(folder, {}, 3)
    for found in on_ranks(2, stepped, folder, {}, 3):
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)  # float32
