"""Whole runs, by the command, in which tokens count differently: weights, clamps, a horizon that moves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_jsonl
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run, metrics

import potstill

pytestmark = pytest.mark.e2e

OWN = {
    "on_policy_fraction": 1.0,
    "prompt_tokens": 6,
    "sampling": {"max_new_tokens": {"start": 2, "end": 9}, "temperature": 1.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "data": {
        "loss": {"token_weights": {"skip": 2, "decay": 0.9, "column": "quality"}, "token_clip": 1.0},
    },
    "on-policy": {"loss": {"divergence": "reverse_kl", "token_weights": {"window": 4}}, "rollouts": OWN},
    "policy gradient": {
        "loss": {"divergence": "policy_gradient_kl", "discount": 0.5, "token_clip": 0.5, "token_weights": {"skip": 1}},
        "rollouts": OWN | {"max_staleness": 1},
    },
}


KINDS["support"] = {"loss": {"divergence": "reverse_kl", "student_top_k": 32, "temperature": 2.0}, "rollouts": OWN}


def sections(folder: Path, kind: str) -> dict[str, Any]:
    records = [{"text": f"The year {1790 + i} brought peace and commerce to all.", "quality": i % 3} for i in range(30)]
    write_jsonl(folder / "weighed.jsonl", records)
    data = {"sources": [{"files": str(folder / "weighed.jsonl")}], "max_length": 64, "shuffle_buffer": 16}
    return {"data": data} | KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_run_ends_with_the_same_bits(runs: TinyRuns, command: Callable[..., Any], kind: str) -> None:
    said = command("train", runs.file("whole", **sections(runs.folder, kind)))
    assert said.code == 0, said.err
    broken = runs.recipe("broken", **sections(runs.folder, kind))
    with pytest.raises(Interrupted):
        potstill.train(broken, [InterruptAt(5)])
    potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    steps = metrics(runs.folder / "whole")
    if kind == "support":
        assert all(0 < step["support_mass"] < 1 and step["kd"] > 0 for step in steps)
    if kind == "data":
        assert 0.5 < max(step["kd"] for step in steps) < 1.0001  # the clamp; without it the mean is above 1
        return
    assert all(step["rollout_length"] <= step["rollout_horizon"] for step in steps)
    # Written ahead, a text has the horizon of the weights that wrote it.
    ahead = [2, 2, 3, 4, 5, 6, 7, 8] if kind == "policy gradient" else [2, 3, 4, 5, 6, 7, 8, 9]
    assert [step["rollout_horizon"] for step in steps] == ahead


JUDGE = """
def short(prompt, completion, record):
    assert record["quality"] in "012" and prompt.startswith("The year")
    return -float(len(completion))


def broken(prompt, completion, record):
    return 1 / 0
"""
REWARDED = {
    "rollouts": OWN | {"num_generations": 4, "max_staleness": 1, "reward": "my_judge:short"},
    "loss": {"divergence": "policy_gradient_kl", "reward_weight": 2.0},
}


def rewarded(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (runs.folder / "my_judge.py").write_text(JUDGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(runs.folder))
    monkeypatch.delitem(sys.modules, "my_judge", raising=False)
    keys = sections(runs.folder, "data") | REWARDED
    return keys | {"data": keys["data"] | {"columns": ["quality"]}}


def test_rewards_beside_distillation(
    runs: TinyRuns, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = rewarded(runs, monkeypatch)
    said = command("train", runs.file("whole", **keys))
    assert said.code == 0, said.err
    broken = runs.recipe("broken", **keys)
    with pytest.raises(Interrupted):
        potstill.train(broken, [InterruptAt(5)])
    potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    without = keys | {"rollouts": keys["rollouts"] | {"reward": None}}
    command("train", runs.file("without", **without))
    ours, plain = metrics(runs.folder / "whole"), metrics(runs.folder / "without")
    assert all(step["reward_mean"] < 0 for step in ours) and "reward_mean" not in plain[0]
    assert ours[0]["ce"] == plain[0]["ce"] and ours[0]["kd"] != plain[0]["kd"]  # the same texts, other advantages


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reward": "my_judge:broken"}, "rollouts.reward: it failed for"),
        ({"reward": "my_judge:none"}, "rollouts.reward: cannot load my_judge:none"),
        ({"reward": "no_such_module:short"}, "rollouts.reward: cannot load no_such_module:short"),
    ],
)
def test_a_reward_that_fails_is_told_in_a_sentence(
    runs: TinyRuns, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], why: str
) -> None:
    keys = rewarded(runs, monkeypatch)
    said = command("train", runs.file("run", **keys | {"rollouts": keys["rollouts"] | change}))
    assert said.code == 1 and why in said.err and "Traceback" not in said.err, said.err


def test_records_that_count_nothing_are_dropped_and_counted(runs: TinyRuns, command: Callable[..., Any]) -> None:
    keys = sections(runs.folder, "data") | {"loss": {"token_weights": {"column": "quality"}}}
    said = command("train", runs.file("run", "train.steps=null", "train.epochs=1", **keys))
    assert said.code == 0, said.err
    assert "30 documents, 20 examples" in said.out and "10 dropped examples" in said.out


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ({"token_clip": 1.0}, "compares chunks of several tokens: leave token_clip out"),
        ({"token_weights": {"decay": 0.9}}, "decay and by_position weigh the tokens of a chunk differently"),
    ],
)
def test_what_does_not_go_together_is_refused(
    runs: TinyRuns, command: Callable[..., Any], loss: dict[str, Any], why: str
) -> None:
    hint = {"model": str(runs.teacher), "context_column": "text", "cross_tokenizer": {"method": "uld"}}
    keys = runs.recipe("refused").model_dump(mode="json", by_alias=True) | {"teachers": [hint], "loss": loss}
    path = runs.folder / "refused.yaml"
    path.write_text(json.dumps(keys), encoding="utf-8")
    said = command("train", path)
    assert said.code == 1 and why in said.err, said.err


CHAT = [
    [
        {"role": "user", "content": f"How many are {i} and {i}?"},
        {"role": "assistant", "content": f"They are {2 * i}."},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "Quite."},
    ]
    for i in range(12)
]


@pytest.mark.parametrize("turn", ["random", "all"])
def test_any_turn_of_a_chat_is_written(runs: TinyRuns, command: Callable[..., Any], turn: str) -> None:
    chats = write_jsonl(runs.folder / "chat.jsonl", [{"m": chat} for chat in CHAT])
    source = {"files": str(chats), "messages": "m"}
    keys = {
        "data": {"sources": [source], "max_length": 128, "shuffle_buffer": 4},
        "rollouts": OWN | {"turn": turn, "on_policy_fraction": 0.6},
        "teachers": [{"model": str(runs.teacher), "system": "Be right.", "chat_template_kwargs": {"year": 1790}}],
    }
    said = command("train", runs.file("whole", **keys))
    assert said.code == 0, said.err
    broken = runs.recipe("broken", **keys)
    with pytest.raises(Interrupted):
        potstill.train(broken, [InterruptAt(5)])
    run = potstill.train(broken)
    assert_same_run(runs.folder / "broken", runs.folder / "whole")
    assert run.counts["written_examples"] > 8 and all(step["kd"] > 0 for step in metrics(run.folder))


def test_the_last_turn_alone_is_learnt(runs: TinyRuns, command: Callable[..., Any]) -> None:
    chats = write_jsonl(runs.folder / "chat.jsonl", [{"m": chat, "keep": [False, True] * 2} for chat in CHAT])
    counts = {}
    for name, supervise in (("all", "all"), ("last", "last"), ("column", {"column": "keep"})):
        data = {"sources": [{"files": str(chats), "messages": "m"}], "max_length": 128, "supervise": supervise}
        said = command("train", runs.file(name, "train.steps=null", "train.epochs=1", data=data))
        assert said.code == 0, said.err
        counts[name] = metrics(runs.folder / name)[-1]["tokens"]
    assert counts["column"] == counts["all"] > 2 * counts["last"] > 0


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"rollouts": {"turn": "all"}}, "rollouts.turn goes with chats"),
        ({"teachers": [{"model": "m", "system": "s"}]}, "teachers[0].system and chat_template_kwargs go with chats"),
        (
            {"teachers": [{"model": "m", "cache": "c", "system": "s"}]},
            "system and chat_template_kwargs go without cache",
        ),
    ],
)
def test_turns_and_system_messages_are_of_chats(
    runs: TinyRuns, command: Callable[..., Any], keys: dict[str, Any], why: str
) -> None:
    path = runs.folder / "refused.yaml"
    whole = runs.recipe("refused").model_dump(mode="json", by_alias=True) | keys
    path.write_text(json.dumps(whole), encoding="utf-8")
    said = command("train", path)
    assert said.code == 1 and why in said.err, said.err
