"""Every command and every piece of Python in the README and the docs is run, in order, in an empty folder beside the recipes.

What would take long is made short by what is appended to the command: see `shorter`. Targets of make are looked up in the
Makefile, since they install; what `make quickstart` ends in has a test of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potstill.cli.main import app
from potstill.config.recipe import load_recipe
from potstill.training.loop import train

ROOT = Path(__file__).resolve().parents[2]
STEPS, MORE_STEPS = 2, 3
QUICK = [
    "train.batch_size=2",
    "train.micro_batch_size=null",
    "eval.examples=4",
    "eval.max_new_tokens=4",
    "eval.every=null",
    "log.tensorboard=false",
]


def shorter(words: list[str]) -> list[str]:
    """The same command with a few steps and examples. One that sets train.steps itself is given one step more."""
    command = words[0]
    some = ["data.sources.0.fraction=0.001"]  # of what a teacher would have to read
    if words[:2] == ["cache", "build"]:
        return [*words, *some]
    if command in ("train", "doctor"):
        steps = MORE_STEPS if any(word.startswith("train.steps=") for word in words) else STEPS
        has_eval = load_recipe(ROOT / words[1]).eval is not None
        less = some if words[1].endswith("cached.yaml") else []
        quick = [q for q in QUICK if has_eval or "eval" not in q]
        return [*words, f"train.steps={steps}", "train.epochs=null", *quick, *less]
    if command == "generate":
        return [*words, "--limit", "2", "rollouts.sampling.max_new_tokens=4"]
    return [*words, "--examples", "4", "--max-new-tokens", "4"] if command == "eval" else words


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block of bash or Python, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S)


def run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets), line
        return
    if line == "source .venv/bin/activate":
        assert "VENV   := .venv" in (ROOT / "Makefile").read_text()
        return
    if words[0] == "torchrun":
        launch, command = words[1 : words.index("potstill") + 1], words[words.index("potstill") + 1 :]
        run_torchrun([*launch, *shorter(command), "run=runs/torchrun"])
        return
    assert words[0] == "potstill", f"the test does not know how to run {line!r}"
    if words[1] == "quickstart":  # its own test runs it; here only that it can be called like this
        words.append("--help")
    target = None
    if ">" in words:
        *words, _, target = words
    result = CliRunner().invoke(app, shorter(words[1:]))
    assert result.exit_code == 0, f"{line}: {result.output} {result.exception}"
    if target is not None:
        Path(target).write_text(result.output)


def run_torchrun(words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def beside_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md", "docs/losses.md", "docs/students.md"])
def test_commands_and_python(name: str, beside_the_recipes: Path) -> None:
    found = blocks(ROOT / name)
    assert found
    for language, text in found:
        if language == "bash":
            for line in text.splitlines():
                run_command(line)
        else:
            quick = "".join(f', "{q}"' for q in QUICK)
            exec(compile(text.replace('"train.steps=200"', f'"train.steps={STEPS}"{quick}'), name, "exec"), {})


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["distil", "chat", "cross-tokenizer", "draft", "lora"])
def test_recipes_run(name: str, beside_the_recipes: Path) -> None:
    recipe = load_recipe(f"recipes/{name}.yaml", ["train.steps=2", "train.epochs=null", *QUICK])
    run = train(recipe)
    assert run.step == 2 and run.model.is_dir() and run.evaluation is not None
    assert run.counts["supervised_tokens"] > 0 and not run.counts["cut_tokens"] and not run.counts["dropped_examples"]
    assert load_recipe(run.folder / "recipe.yaml") == recipe


@pytest.mark.e2e
def test_the_recipe_in_the_readme_runs(beside_the_recipes: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert train(load_recipe("mine.yaml", ["train.steps=2", "train.batch_size=2"])).model.is_dir()


def test_other_documents_hold_no_commands() -> None:
    """So that none is written there that no test runs."""
    # The last three by test_use_elsewhere.py, test_cache_convert.py and test_extending.py.
    tested = {"getting-started.md", "losses.md", "students.md", "use-elsewhere.md", "cache-format.md", "extending.md"}
    assert not [d.name for d in (ROOT / "docs").glob("*.md") if d.name not in tested and blocks(d)]
