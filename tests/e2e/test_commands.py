"""The other commands, from their arguments to what they print."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny_models import write_jsonl
from tiny_runs import TinyRuns, lines, steps_on_disk

import potstill as package
from potstill.cli.main import app
from potstill.cli.unforeseen import Unforeseen, explain, traces_in
from potstill.config import Recipe
from potstill.extras import EXTRAS, missing_extra
from potstill.training.logging import Wandb
from potstill.types import PotstillError

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(command: Command, name: str) -> None:
    said = command(name, "--help")
    assert said.code == 0 and said.err == ""
    assert f"potstill {name}" in said.out
    assert name in command("--help").out


def test_no_command_shows_the_help(command: Command) -> None:
    said = command()
    assert said.code == 2 and "quickstart" in said.out + said.err


def test_an_unknown_command_is_refused(command: Command) -> None:
    said = command("trian")
    assert said.code == 2 and "No such command 'trian'" in said.err


def test_schema_is_the_recipe(command: Command, runs: TinyRuns) -> None:
    said = command("schema")
    schema = json.loads(said.out)
    assert said.code == 0
    assert set(schema["properties"]) == {field.alias or name for name, field in Recipe.model_fields.items()}
    assert schema["additionalProperties"] is False and schema["required"] == ["student", "data", "train"]
    student = schema["$defs"]["StudentConfig"]["properties"]
    assert "from" in student and "from_" not in student


def test_eval_measures_a_model_against_itself(command: Command, runs: TinyRuns) -> None:
    """Against itself the KL is 0 and the agreement 1; bits per byte is perplexity in another unit."""
    text = write_jsonl(runs.folder / "few.jsonl", [{"body": "The people of the union."}, {"body": "Peace in 1812."}])
    arguments = ["eval", runs.teacher, "--data", text, "--text", "body", "--teacher", runs.teacher]
    said = command(*arguments, "--json", "--prompt", "The people", "--max-new-tokens", 3)
    assert said.code == 0
    result = json.loads(said.out)
    assert result["kl"] == pytest.approx(0, abs=1e-6) and result["agreement"] == 1
    assert result["bits_per_byte"] == pytest.approx(
        math.log2(result["perplexity"]) * result["tokens"] / result["bytes"], rel=1e-6
    )
    assert result["bytes"] == len("The people of the union.") + len("Peace in 1812.")
    assert [sample["prompt"] for sample in result["samples"]] == ["The people"]

    plain = command(*arguments, "--no-packing", "--max-length", 64)
    assert plain.code == 0
    assert re.search(r"^bits per byte +[0-9.]+$", plain.out, re.MULTILINE)
    shown = float(re.search(r"bits per byte +([0-9.]+)", plain.out)[1])
    assert shown == pytest.approx(result["bits_per_byte"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-length", "500"], "has 128 positions"),
        (["--text", "none"], "has no column none (there: text)"),
        (["--data", "none.jsonl"], "there is no file none.jsonl"),
        (["--teacher", "./none"], "cannot load ./none: there is no such folder"),
        (["--device", "abacus"], "'abacus' cannot be used here"),
    ],
)
def test_eval_refuses_what_it_cannot_do(command: Command, runs: TinyRuns, arguments: list[str], sentence: str) -> None:
    said = command("eval", runs.teacher, "--data", runs.text, *arguments)
    assert said.code == 1 and sentence in said.err and len(said.err.splitlines()) == 1


def test_report_of_two_runs(command: Command, runs: TinyRuns) -> None:
    for name in ("one", "two"):
        package.train(runs.recipe(name, "train.steps=2", eval=runs.evaluation(prompts=["The union"])))
    page = runs.folder / "pages" / "page.html"
    said = command("report", runs.folder / "one", runs.folder / "two", "--out", page)
    assert said.code == 0 and said.out == f"report: {page}\n"
    html = page.read_text()
    score = lines(runs.folder / "one" / "evals.jsonl")[-1]["bits_per_byte"]
    assert html.startswith("<!DOCTYPE html>") and f"{score:.3f}" in html and "The union" in html
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)
    missing = command("report", runs.folder / "three")
    assert missing.code == 1 and missing.err.startswith("error: there is no run folder ")


def test_quickstart_shows_what_it_promises(command: Command, runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny teacher and few steps: the table, both runs, the report, and a line of Python that is true."""
    import transformers

    from potstill.cli import quickstart as module
    from potstill.config.recipe import load_recipe as load

    small = [f"teachers.0.model={runs.teacher}", "data.max_length=64", "eval.data.max_length=64", "eval.examples=8"]
    small += ["data.piece_bytes=120"]
    small += ["data.sources.0.fraction=0.002", "student.config.hidden_size=16", "eval.max_new_tokens=4", "eval.every=2"]

    def load_small(recipe: Any, overrides: Any = ()) -> Recipe:
        return load(recipe, [*(small if isinstance(recipe, str) else []), *overrides])

    monkeypatch.setattr(module, "load_recipe", load_small)
    said = command("quickstart", "--out", runs.folder / "quick", "--steps", 3)
    assert said.code == 0, said.err
    assert steps_on_disk(runs.folder / "quick" / "text-only")[-1] == 3
    rows = {row.split("│")[1].strip(): row.split("│")[2:-1] for row in said.out.splitlines() if row.startswith("│")}
    assert list(rows) == ["before", "text only", "distilled", "other tokenizer", "teacher"]
    evaluation = lines(runs.folder / "quick" / "distilled" / "evals.jsonl")[-1]
    shown = [cell.strip() for cell in rows["distilled"]]
    assert shown[:3] == [
        f"{evaluation['bits_per_byte']:.3f}",
        f"{evaluation['kl']:.3f}",
        f"{evaluation['agreement']:.1%}",
    ]
    text_only, distilled = (
        lines(runs.folder / "quick" / name / "metrics.jsonl")[-1] for name in ("text-only", "distilled")
    )
    assert (text_only["kd_weight"], text_only["ce_weight"], distilled["kd_weight"], distilled["ce_weight"]) == (
        0,
        1,
        1,
        0,
    )
    other = lines(runs.folder / "quick" / "other-tokenizer" / "metrics.jsonl")[-1]
    assert (other["kd_weight"], other["ce_weight"], other["align_bytes"]) == (
        1,
        0.3,
        pytest.approx(1.0, abs=0.01),
    ) and other["kl"] > 0
    assert (runs.folder / "quick" / "report.html").stat().st_size > 10_000
    (line,) = re.findall(r"^load it: (.*)$", said.out, re.MULTILINE)
    model = eval(line, {"transformers": transformers})
    assert model.config.hidden_size == 16
    assert f"student: {Path(model.config._name_or_path)}" in said.out
    assert len(re.findall(rf"^(?:{'|'.join(rows)}): {module.PROMPT}", said.out, re.MULTILINE)) == 5


def test_version(command: Callable[..., Any]) -> None:
    said = command("--version")
    assert said.code == 0 and said.out.strip() == package.__version__


def test_eval_of_prompts_and_completions(command: Callable[..., Any], tmp_path: Path, tiny_teacher: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"q": "The state of the Union", "a": " is strong."}) + "\n")
    columns = ("--prompt-column", "q", "--completion-column", "a", "--max-length", "64")
    said = command("eval", str(tiny_teacher), "--data", str(pairs), *columns, "--json")
    assert said.code == 0 and json.loads(said.out)["bytes"] == len(" is strong.")


# What nobody foresaw


def test_an_error_that_nobody_foresaw_is_a_sentence_and_a_file(
    command: Command, runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a NUL in it is no path to Python, which no command looks for."""
    monkeypatch.setattr(tempfile, "tempdir", str(runs.folder))
    recipe = runs.file("run")
    said = command("train", recipe, r'run="a\0b"')
    assert said.code == 70 and said.out == "" and len(said.err.splitlines()) == 1
    (trace,) = runs.folder.glob("potstill-*-trace-*.txt")
    said_of_it = f"ValueError: embedded null byte (the trace is in {trace}; please report it, or see it with --debug)"
    assert said.err == f"error: potstill did not expect this: {said_of_it}\n"
    text = trace.read_text()
    assert text.startswith(f"potstill {package.__version__}, Python ") and "Traceback (most recent call last):" in text
    assert text.endswith("ValueError: embedded null byte\n")
    trace.unlink()
    said = command("train", recipe, r'run="a\0b"', "--debug")
    assert said.code == 70 and said.err.endswith("ValueError: embedded null byte\n") and "Traceback" in said.err
    assert list(runs.folder.glob("potstill-*")) == []


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), RecursionError("deep"), EOFError(), BrokenPipeError()])
def test_the_trace_of_a_run_is_in_its_folder(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(Unforeseen) as caught, traces_in(tmp_path):
        raise error
    sentence = explain(error, caught.value.folder, "0")
    (trace,) = tmp_path.iterdir()
    assert f"the trace is in {trace}; please report it" in sentence and len(sentence.splitlines()) == 1
    assert f"raise error\n{type(error).__name__}" in trace.read_text()
    assert ("there was not enough memory" in sentence) == isinstance(error, MemoryError)


def test_what_typer_and_people_raise_goes_through(tmp_path: Path) -> None:
    for error in (PotstillError("x"), typer.BadParameter("x"), typer.Exit(3)):
        with pytest.raises(type(error)), traces_in(tmp_path):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "potstill", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_what_a_terminal_obeys_is_shown_and_not_obeyed(command: Callable[..., Any]) -> None:
    said = command("train", "none\x1b[2J\udcff.yaml")
    assert said.err == "error: there is no recipe none\\x1b[2J\\udcff.yaml\n"


# Details of single commands


def test_align_checks_and_writes_the_page(command: Command, tmp_path: Path) -> None:
    pair = ("shipped:tokenizers/pieces-1k", "shipped:tokenizers/bytes-2k")
    said = command("align", *pair, "--check", "--html", tmp_path / "a.html")
    assert said.code == 0 and said.out.rstrip().endswith("all is well")
    assert f"page: {tmp_path / 'a.html'}" in said.out and "118 of 118" in (tmp_path / "a.html").read_text()
    said = command("align", *pair, "--check", "--html", tmp_path / "b.html", "--text", "two words", "--json")
    assert json.loads(said.out)["bytes"] == len("two words") and said.err.rstrip().endswith("all is well")
    assert "9 of 9" in (tmp_path / "b.html").read_text()


def test_runs_of_one_name_do_not_join_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: TinyRuns) -> None:
    """A stand-in for the package, which keeps what it is told."""
    told: list[dict[str, Any]] = []
    standing_in = types.ModuleType("wandb")
    standing_in.init = lambda **keys: told.append(keys)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", standing_in)
    for project in ("one", "two", "one"):
        folder = tmp_path / project / "run"
        folder.mkdir(parents=True, exist_ok=True)
        Wandb("p", runs.recipe("run")).started(package.Run(folder))
    first, second, again = (each["id"] for each in told)
    assert first == again != second and len(first) == 16
    assert {each["name"] for each in told} == {"run"} and told[0]["resume"] == "allow"


@pytest.mark.parametrize("extra", EXTRAS)
def test_advice_names_packages_that_can_be_installed(extra: str) -> None:
    """potstill is on no index: `potstill[…]` would install nothing."""
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["project"]["optional-dependencies"][extra]
    assert [re.split("[>=<]", each)[0] for each in declared] == list(EXTRAS[extra])
    sentence = str(missing_extra("this", extra))
    assert f"pip install {' '.join(EXTRAS[extra])} (or, in a checkout: pip install -e '.[{extra}]')" in sentence
    sources = [path.read_text(encoding="utf-8") for path in Path(package.__file__).parent.rglob("*.py")]
    assert not [source for source in sources if f"potstill[{extra}]" in source]


def test_the_quickstart_is_of_one_process(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = command("quickstart", "--out", tmp_path / "out")
    assert said.code == 1 and "the quickstart runs in one process, and this is one of 2" in " ".join(said.err.split())
    assert not (tmp_path / "out").exists()


def test_help_and_a_mistake_in_a_recipe_need_no_torch() -> None:
    """They are there at once: importing torch and transformers takes seconds."""
    code = """
import sys
from potstill.cli.main import app
from potstill.config.recipe import load_recipe
from potstill.errors import PotstillError
try:
    load_recipe({"student": {"modle": "x"}})
except PotstillError as error:
    assert "student.modle" in str(error), error
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[]\n", ended.stderr
