"""`potstill quickstart`: the main job end to end on what ships with the project, in a few minutes on two CPU cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.errors import PotstillError
from potstill.parallel.mesh import processes
from potstill.report import write_report
from potstill.shipped import locate
from potstill.training.loop import train
from potstill.training.setup import assemble

PROMPT = "The people of the United States"
OTHER_TOKENIZER = ["student.tokenizer=shipped:tokenizers/pieces-1k", "loss.ce_weight=0.3"]


def quickstart(out: Path, seed: int = 0, steps: int = 400) -> dict[str, dict[str, Any]]:
    """Train the same student on the text alone and from the teacher, and one with another tokenizer from the same teacher; give
    the evaluations by name."""
    if processes() != 1:  # each would run it alone, and all but one be locked out of its folder
        raise PotstillError(
            f"the quickstart runs in one process, and this is one of {processes()} (WORLD_SIZE): start it without torchrun; "
            "`potstill train` runs in many"
        )
    console = Console(soft_wrap=True)
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose much where cores are shared
    console.print(
        "A teacher of 3.5 million parameters, which ships with potstill, has read all of the training text (10 MB of State "
        "of the Union addresses). The students, of 0.4 million, get 5 % of it: one the text alone, one the teacher, and one, "
        "whose tokenizer is another, the teacher too. None of them has seen the held-out text.",
        highlight=False,
    )
    distil = load_recipe(locate("shipped:quickstart.yaml"), [f"train.seed={seed}", f"train.steps={steps}"])
    recipes = {
        "text only": load_recipe(distil, [f"run={out / 'text-only'}", "loss.kd_weight=0", "loss.ce_weight=1"]),
        "distilled": load_recipe(distil, [f"run={out / 'distilled'}"]),
        "other tokenizer": load_recipe(distil, [f"run={out / 'other-tokenizer'}", *OTHER_TOKENIZER]),
    }
    results = {"before": assemble(distil).evaluate()}
    runs = {}
    for name, recipe in recipes.items():
        console.rule(name)
        runs[name] = train(recipe)
        if runs[name].exit_code:
            raise SystemExit(runs[name].exit_code)
        results[name] = runs[name].evaluation or {}
    results["teacher"] = _of_teacher(distil)
    others = {name: results[name] for name in ("before", "teacher")}
    page = write_report([run.folder for run in runs.values()], out / "report.html", others)

    console.rule("result")
    console.print(_table(results))
    for name, result in results.items():
        console.print(f"[bold]{name}:[/] {PROMPT}[dim]{_one_line(result['samples'][0]['text'])}[/]", highlight=False)
    model = runs["distilled"].folder / "checkpoints" / "latest" / "model"
    console.print(f"\nreport:  {page}\nstudent: {model}", highlight=False)
    console.print(
        f'load it: transformers.AutoModelForCausalLM.from_pretrained("{model}")', highlight=False, soft_wrap=True
    )
    return results


def _of_teacher(recipe: Recipe) -> dict[str, Any]:
    """The teacher on the same held-out text, as what can be hoped for."""
    model = recipe.teachers[0].model
    as_student = load_recipe(recipe, ["student.config=null", f"student.model={model}", "teachers=[]"])
    return assemble(as_student).evaluate()


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="on held-out text")
    table.add_column("student", no_wrap=True)
    for column in ("bits per byte", "KL to teacher", "top-1 agreement", "calibration error"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        close = ["–", "–"] if result["kl"] is None else [f"{result['kl']:.3f}", f"{result['agreement']:.1%}"]
        table.add_row(name, f"{result['bits_per_byte']:.3f}", *close, f"{result['ece']:.3f}")
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split("\n")).replace("[", r"\[")
