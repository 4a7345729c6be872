"""What is looked at before a run: the resolved recipe, its records, everything up to the first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_jsonl
from tiny_runs import TinyRuns

from potstill.config.recipe import load_recipe

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
CHATS = [
    {
        "messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Eight."}],
        "hint": "Be brief.",
    },
    {"messages": [{"role": "user", "content": "Nothing follows."}], "hint": "None."},
]


def previewed(command: Command, *arguments: object) -> list[dict[str, Any]]:
    said = command("preview", *arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def spelled(reading: dict[str, Any], supervised: bool) -> str:
    return "".join(token["text"] for token in reading["tokens"] if token["supervised"] == supervised)


def test_config_prints_what_train_would_take(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    said = command("config", runs.file("one"), "train.steps=3", "loss.temperature=2")
    assert said.code == 0
    written = tmp_path / "resolved.yaml"
    written.write_text(said.out)
    assert load_recipe(written) == runs.recipe("one", "train.steps=3", "loss.temperature=2")
    refused = command("config", runs.file("one"), "train.stepz=3")
    assert refused.code == 1 and "did you mean steps" in refused.err


def test_preview_shows_what_is_supervised(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """The answer and the mark that ends it, and nothing of the question; a record without an answer is named as dropped."""
    chats = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    keys = {"sources": [{"files": str(chats), "messages": "messages"}], "max_length": 64}
    first, second = previewed(command, runs.file("chat", data=keys))
    student, teacher = first["readings"]
    assert spelled(student, True) == "Eight.<|im_end|>"
    assert spelled(student, False).startswith("<|bos|><|im_start|>user↵How·many?<|im_end|>")
    assert teacher["note"] == "reads the student's tokens" and teacher["tokens"] == []
    begin, end = first["spans"][0]
    assert first["text"][begin:end] == "Eight.<|im_end|>" and first["writer"] == "data set"
    assert second["readings"] == [
        {"reader": "student", "tokens": [], "note": "nothing is supervised: the record is dropped"}
    ]

    shown = command("preview", runs.file("chat", data=keys), "--records", 1)
    assert "⟦Eight.<|im_end|>⟧" in shown.out and "12 supervised" not in shown.out


def test_preview_shows_teachers_that_read_otherwise(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """Another tokenizer, a context of its own, a filter; and a cut text."""
    text = write_jsonl(
        tmp_path / "texts.jsonl", [{"q": "Two and two?", "a": " Four, of course.", "hint": "A hint:", "of": "sums"}]
    )
    path = runs.file(
        "other",
        student={"tokenizer": "shipped:tokenizers/pieces-1k", "config": runs.recipe("x").student.config},
        teachers=[
            {"model": str(runs.teacher)},
            {"model": str(runs.teacher), "context_column": "hint"},
            {"model": str(runs.teacher), "filter": {"of": "verbs"}},
        ],
        data={"sources": [{"files": str(text), "prompt": "q", "completion": "a"}], "max_length": 12},
    )
    (shown,) = previewed(command, path)
    student, other, hinted, filtered = shown["readings"]
    assert "are cut" in student["note"] and len(student["tokens"]) == 12
    assert spelled(other, True) == "·Four,·of·course.<|eos|>" and "not the student's" in other["note"]
    assert spelled(other, False) == "<|bos|>Two·and·two?"
    assert spelled(hinted, True) == spelled(other, True) and spelled(hinted, False) == "<|bos|>A·hint:"
    assert filtered["note"] == "its filter leaves this record out"


def test_preview_writes_one_generation(command: Command, runs: TinyRuns) -> None:
    """As a page: answers are supervised, and the run's folder is not made."""
    path = runs.file(
        "rolled", rollouts={"on_policy_fraction": 1.0, "prompt_tokens": 4, "sampling": {"max_new_tokens": 5}}
    )
    page = runs.folder / "pages" / "preview.html"
    said = command("preview", path, "--records", 2, "--html", page)
    assert said.code == 0 and said.out == f"page: {page}\n"
    html = page.read_text()
    assert html.count("<section>") == 4 and html.count("answered by the student") == 2
    assert "<script" not in html and not (runs.folder / "rolled").exists()

    answers = [one for one in previewed(command, path, "--records", 2) if one["writer"] == "student"]
    assert len(answers) == 2
    for answer in answers:
        assert 1 <= sum(token["supervised"] for token in answer["readings"][0]["tokens"]) <= 5


def test_a_dry_run_trains_nothing(command: Command, runs: TinyRuns) -> None:
    said = command("train", runs.file("dry"), "--dry-run")
    assert said.code == 0, said.err
    assert "steps: 8; the first has" in said.out and "nothing was trained or saved" in said.out
    assert not (runs.folder / "dry").exists()
    epochs = command("train", runs.file("dry"), "train.steps=null", "train.epochs=1", "--dry-run")
    assert epochs.code == 0 and "steps: " in epochs.out
    refused = command("train", runs.file("dry"), "data.max_length=500", "--dry-run")
    assert refused.code == 1 and "has 128 positions" in refused.err


def test_a_dry_run_knows_the_run_that_is_there(command: Command, runs: TinyRuns) -> None:
    assert command("train", runs.file("begun"), "train.steps=2").code == 0
    said = command("train", runs.file("begun"), "train.optimizer.lr=1", "--dry-run")
    assert said.code == 1 and "holds a run with other settings" in said.err


@pytest.mark.slow
def test_a_dry_run_of_two_processes(runs: TinyRuns) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "potstill", "train"]
    ended = subprocess.run(
        [sys.executable, *words, str(runs.file("two")), "--dry-run"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("nothing was trained or saved") == 1 and not (runs.folder / "two").exists()


@pytest.mark.parametrize(("typed", "completed"), [("prev", "preview"), ("conf", "config")])
def test_the_shell_completes_commands(typed: str, completed: str) -> None:
    asked = {"_POTSTILL_COMPLETE": "complete_bash", "COMP_WORDS": f"potstill {typed}", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'potstill'; from potstill.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **asked}
    )
    assert ended.stdout.split() == [completed]
