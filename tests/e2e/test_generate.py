"""Answers as a data set: written, checked, resumed, and trained on."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_jsonl
from tiny_runs import TinyRuns

from potstill.generation import answers as module

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
SAMPLING = {"sampling": {"max_new_tokens": 5}}


@pytest.fixture
def asked(runs: TinyRuns, tmp_path: Path) -> Path:
    """A recipe of 20 prompts."""
    records = [{"q": f"The year {1790 + i} and", "right": f"{i}", "a": ""} for i in range(20)]
    pairs = write_jsonl(tmp_path / "prompts.jsonl", records)
    data = {"sources": [{"files": str(pairs), "prompt": "q"}], "max_length": 64}
    return runs.file("asked", data=data, rollouts={"on_policy_fraction": 1.0, **SAMPLING})


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_come_with_their_log_probabilities(
    command: Command, asked: Path, runs: TinyRuns, tmp_path: Path
) -> None:
    """Several to a prompt, none the same; and what is said of their likelihood is what the teacher says of them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out" / "answers.jsonl"
    said = command("generate", asked, "--out", out, "--answers", 2, "--limit", 3)
    assert said.code == 0, said.err
    found = records(out)
    assert len(found) == 6 and [record["answer"] for record in found] == [0, 1] * 3
    assert found[0]["prompt"] == found[1]["prompt"] == "The year 1790 and"
    assert found[0]["completion"] != found[1]["completion"]
    model = AutoModelForCausalLM.from_pretrained(runs.teacher)
    tokenizer = AutoTokenizer.from_pretrained(runs.teacher)
    whole = [
        r
        for r in found
        if tokenizer.decode(tokenizer(r["completion"], add_special_tokens=False).input_ids) == r["completion"]
    ]
    compared = 0
    for record in whole:
        prompt = tokenizer(record["prompt"]).input_ids
        ids = tokenizer(record["completion"], add_special_tokens=False).input_ids
        if len(ids) != len(record["logprobs"]):  # the text is cut otherwise than it was written
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        own = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]
        assert own == pytest.approx(record["logprobs"], abs=1e-3)
        compared += 1
    assert compared


def test_an_interrupted_file_is_resumed_to_the_same_bytes(
    command: Command, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 4)
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert command("generate", asked, "--out", whole).code == 0
    assert command("generate", asked, "--out", part, "--limit", 8).code == 0
    with part.open("a") as file:
        file.write('{"torn": ')  # what a kill may leave
    said = command("generate", asked, "--out", part)
    assert said.code == 0 and "20 prompts, 20 answers" in said.out
    assert part.read_bytes() == whole.read_bytes() and len(records(part)) == 20

    other = command("generate", asked, "--out", part, "rollouts.sampling.temperature=0.5")
    assert other.code == 1 and "was begun with other data, models, sampling or checks" in other.err
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    assert "is not of `potstill generate`" in command("generate", asked, "--out", taken).err
    assert taken.read_text() == "mine"


def test_answers_are_checked(command: Command, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = tmp_path / "checks.py"
    checks.write_text("def even(record):\n    return int(record['reference']) % 2 == 0\n")
    out = tmp_path / "even.jsonl"
    said = command("generate", asked, "--out", out, "--check", f"{checks}:even", "--answer", "right")
    assert said.code == 0 and said.out.endswith("10 of 20 answers; left out: 10 wrong\n")
    assert [record["reference"] for record in records(out)] == [str(i) for i in range(0, 20, 2)]

    said = command("generate", asked, "--out", tmp_path / "exact.jsonl", "--check", "exact", "--answer", "right")
    assert "0 of 20 answers; left out: 20 wrong" in said.out
    said = command("generate", asked, "--out", tmp_path / "ended.jsonl", "--ended", "--min-tokens", 9)
    assert "0 of 20 answers; left out: " in said.out and "not ended" in said.out
    for words, reason in (
        (["--check", "exact"], "name the column of the right answers with --answer"),
        (["--check", "nothing"], "it is exact, math, or a function of a file"),
        (["--check", "math", "--answer", "right"], "--check math needs math-verify"),
    ):
        monkeypatch.setitem(sys.modules, "math_verify", None)
        refused = command("generate", asked, "--out", tmp_path / f"{len(words)}.jsonl", *words)
        assert refused.code == 1 and reason in refused.err
    stand_in = types.SimpleNamespace(parse=lambda text: text.split()[:1], verify=lambda right, found: right == ["4"])
    monkeypatch.setitem(sys.modules, "math_verify", stand_in)
    said = command("generate", asked, "--out", tmp_path / "math.jsonl", "--check", "math", "--answer", "right")
    assert "1 of 20 answers" in said.out


@pytest.mark.slow
def test_answers_are_trained_on(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """Of chats by the student, and of prompts by a teacher with another tokenizer."""
    chats = [{"messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(6)]
    data = {
        "sources": [{"files": str(write_jsonl(tmp_path / "c.jsonl", chats)), "messages": "messages"}],
        "max_length": 64,
    }
    out = tmp_path / "chats.jsonl"
    assert (
        command("generate", runs.file("chats", data=data, rollouts=SAMPLING), "--out", out, "--by", "student").code == 0
    )
    assert [message["role"] for message in records(out)[0]["messages"]] == ["user", "assistant"]
    assert len(records(out)) == 6
    learnt = {"sources": [{"files": str(out), "messages": "messages"}], "max_length": 64}
    assert command("train", runs.file("learnt", "train.steps=1", data=learnt)).code == 0

    student = {"tokenizer": "shipped:tokenizers/pieces-1k", "config": runs.recipe("x").student.config}
    texts, out = (
        runs.file("texts", student=student, rollouts={"prompt_tokens": 4, **SAMPLING}),
        tmp_path / "texts.jsonl",
    )
    assert command("generate", texts, "--out", out, "--limit", 8).code == 0 and len(records(out)) == 8
    pairs = {"sources": [{"files": str(out), "prompt": "prompt", "completion": "completion"}], "max_length": 64}
    assert command("train", runs.file("pairs", "train.steps=1", student=student, data=pairs)).code == 0
