"""`potstill eval`: a model on given text, from the command line's words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from potstill.config import DataConfig, StudentConfig, TeacherConfig
from potstill.config.recipe import checked
from potstill.evals.fidelity import evaluate, evaluation_batches, greedy_completions
from potstill.evals.reference import Reference, behind_server, in_cache, own_share
from potstill.files import MANIFEST
from potstill.models import LanguageModel, check_fit, load_student
from potstill.parallel.mesh import pick_device, ranks
from potstill.teachers.live import LiveModel
from potstill.teachers.open import open_live
from potstill.teachers.placed import load_in_place
from potstill.teachers.remote import RemoteOrigin, open_server
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, PotstillError

Opened = Teacher[LiveModel] | RemoteOrigin | Path | None  # a model, a server, the folder of a cache


def evaluate_model(
    model: str,
    source: dict[str, Any] | None,
    teacher: str | None,
    token_env: str | None,
    dtype: Literal["float32", "bfloat16"] | None,
    revision: str | None,
    trust_remote_code: bool,
    max_length: int | None,
    piece_bytes: int | None,
    examples: int | None,
    batch_size: int,
    packing: bool,
    prompt: Sequence[str] | None,
    max_new_tokens: int,
    tp: int,
    shard: bool,
    device: str,
    json_out: bool,
) -> dict[str, Any]:
    """Evaluate, print, and give back the numbers. Under torchrun the text is dealt; every process has the models whole, or its
    part of them (`tp`, `shard`)."""
    first = ranks().first
    console = Console(stderr=json_out, soft_wrap=True, quiet=not first)
    keys = {"sources": [source], "max_length": max_length or 1024, "piece_bytes": piece_bytes, "packing": packing}
    data = checked(DataConfig, keys, "--data")
    place = pick_device(device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code} | ({"dtype": dtype} if dtype else {})
    spread = {"placement": "shard" if shard else "replicate"}
    if tp == 1 and not shard:
        student = load_student(StudentConfig(model=model, revision=revision, **options), place, seed=0, key="MODEL")
    elif prompt:
        raise PotstillError("--prompt goes without --tp and --shard: leave one of them out")
    else:
        config = TeacherConfig(model=model, revision=revision, **{"dtype": "float32", **options, **spread})
        student = load_in_place(config, place, "MODEL", ranks(), key="MODEL")
    opened = None if teacher is None else _opened(teacher, student, {**options, **spread}, token_env, place)
    for note in student.notes:
        console.print(note, style="yellow", highlight=False, markup=False)
    data = _fitting(data, max_length, {model: student}, opened)
    sizes = {"batch_size": batch_size, "limit": examples}
    reference = _reference(opened, teacher, student, data, sizes)
    if reference.note:
        console.print(reference.note, style="yellow", highlight=False, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluating", total=None)
        batches: Iterable[Batch] = evaluation_batches(data, student, batch_size, examples, "--data")
        batches = own_share(list(batches)) if ranks().many else batches
        advance = lambda rows: bar.advance(task, rows)  # noqa: E731
        result = evaluate(student, reference.teacher, batches, place, advance, asked=reference.batches, key="--data")
    result["samples"] = greedy_completions(student, prompt or [], max_new_tokens)
    if first:
        print(json.dumps(result, ensure_ascii=False)) if json_out else show(console, result)
    return result


def _opened(
    teacher: str, student: LanguageModel, options: dict[str, Any], token_env: str | None, device: torch.device
) -> Opened:
    """A model, a server, or the folder of a cache."""
    if teacher.startswith(("http://", "https://")):
        keys = {"server": teacher, "trust_remote_code": options["trust_remote_code"]}  # the dtype is the server's own
        remote = {"remote": {"api_key_env": token_env}} if token_env else {}
        return open_server(checked(TeacherConfig, keys | remote, "--teacher"), "--teacher")
    if token_env is not None:
        raise PotstillError(f"--token-env goes with a server, and {teacher} is none: leave it out")
    if (Path(teacher) / MANIFEST).exists():
        return Path(teacher)
    return open_live(TeacherConfig(model=teacher, **options), student, device, "--teacher", "--teacher")


def _fitting(
    data: DataConfig, max_length: int | None, models: Mapping[str, LanguageModel], opened: Opened
) -> DataConfig:
    """With sequences that every reader can take, unless their length was chosen; refused where one cannot."""
    if isinstance(opened, Teacher):
        models = {**models, opened.name: opened.source.language_model}
    if max_length is None:
        limits = [language_model.positions for language_model in models.values()]
        limits += [opened.positions] if isinstance(opened, RemoteOrigin) else []
        length = min([1024, *filter(None, limits)])
        data = data.model_copy(update={"max_length": length})
    for who, language_model in models.items():
        check_fit(data, "--data", who, language_model)
    return data


def _reference(
    opened: Opened, teacher: str | None, student: LanguageModel, data: DataConfig, sizes: Mapping[str, Any]
) -> Reference:
    if isinstance(opened, Path):
        return in_cache(opened, student, data, **sizes, where="--teacher", key="--data")
    if isinstance(opened, RemoteOrigin):
        return behind_server(TeacherConfig(server=teacher), opened, student, data, "--teacher", "--data", exact=True)
    return Reference(opened)


def show(console: Console, result: dict[str, Any]) -> None:
    for key, value in result.items():
        if key != "samples" and value is not None:
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            console.print(f"{key.replace('_', ' '):<16} {number}", highlight=False)
    for sample in result["samples"]:
        console.print(f"\n{sample['prompt']}|{sample['text']}", highlight=False, markup=False)
