"""`potstill eval`: a model on given text, from the command line's words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from potstill.config import DataConfig, StudentConfig, TeacherConfig
from potstill.evals.fidelity import complete, evaluate, evaluation_batches
from potstill.models import check_fit, load_student
from potstill.parallel.mesh import pick_device
from potstill.recipe import checked
from potstill.teachers.several import open_live
from potstill.types import PotstillError

SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".arrow", ".txt")


def evaluate_model(
    model: str,
    *,
    teacher: str | None,
    dtype: Literal["float32", "bfloat16"] | None,
    revision: str | None,
    trust_remote_code: bool,
    source: dict[str, Any],
    max_length: int | None,
    piece_bytes: int | None,
    packing: bool,
    examples: int | None,
    batch_size: int,
    prompts: Sequence[str],
    max_new_tokens: int,
    device_name: str,
    as_json: bool,
) -> dict[str, Any]:
    """Evaluate, print, and give back the numbers."""
    keys = {"sources": [source], "max_length": max_length or 1024, "piece_bytes": piece_bytes, "packing": packing}
    data = checked(DataConfig, keys, "--data")
    device = pick_device(device_name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code} | ({"dtype": dtype} if dtype else {})
    student = load_student(StudentConfig(model=model, revision=revision, **options), device, seed=0, key="MODEL")
    opened = (
        open_live(TeacherConfig(model=teacher, **options), student, device, "--teacher", "--teacher")
        if teacher
        else None
    )
    models = [(model, student), *([(opened.name, opened.language_model)] if opened is not None else [])]
    if max_length is None:
        data = data.model_copy(update={"max_length": min([1024, *(m.positions for _, m in models if m.positions)])})
    for who, language_model in models:
        check_fit(data, "--data", who, language_model)
    console = Console(stderr=as_json, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluating", total=None)
        batches = evaluation_batches(data, student, batch_size, examples, "--data")
        result = evaluate(student, opened, batches, device, lambda n: bar.advance(task, n))
    result["samples"] = complete(student, prompts, max_new_tokens)
    print(json.dumps(result, ensure_ascii=False)) if as_json else show(console, result)
    return result


def source_of(data: Sequence[str], **columns: Any) -> dict[str, Any]:
    """--data as a source: files where they look like files or are some, else a data set (org/data-v1.5, say)."""
    sets = [d for d in data if not (d.startswith("shipped:") or d.endswith(SUFFIXES) or "*" in d or Path(d).is_file())]
    if sets and len(data) > 1:
        raise PotstillError(
            f"--data: {sets[0]} is a data set and can only be given alone; files exist, have a * or end in {' '.join(SUFFIXES)}"
        )
    where = {"dataset": sets[0]} if sets else {"files": list(data)}
    return {**where, **{key: value for key, value in columns.items() if value is not None}}


def show(console: Console, result: dict[str, Any]) -> None:
    for key, value in result.items():
        if key != "samples" and value is not None:
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            console.print(f"{key.replace('_', ' '):<16} {number}", highlight=False)
    for sample in result["samples"]:
        console.print(f"\n{sample['prompt']}|{sample['text']}", highlight=False, markup=False)
