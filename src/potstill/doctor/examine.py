"""All checks, in one table, and those who run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from potstill.config import ParallelConfig, Recipe
from potstill.doctor import machine, teachers, texts, tokenizers
from potstill.doctor.findings import Check, Finding, Patient, StepCheck, error, ok, warning
from potstill.dry_run import FirstStep, at_first_step
from potstill.types import PotstillError

# Without weights, in a second or two: `train` runs these too
QUICK: dict[str, Check] = {
    "processes": machine.world,
    "disk": machine.disk,
    "tokenizer": tokenizers.student_tokenizer,
    "teachers' tokenizers": tokenizers.teacher_tokenizers,
    "ends": tokenizers.ends,
    "teachers' ends": tokenizers.teacher_ends,
    "chat templates": tokenizers.chat_templates,
    "thinking": tokenizers.thinking,
}
# A sample of the data is read
OF_DATA: dict[str, Check] = {"lengths": texts.lengths, "cache": texts.caches}
# The models are loaded, and everything is ready for the first step; the last of these takes it
OF_STEP: dict[str, StepCheck] = {
    "headroom": teachers.headroom,
    "top-k mass": teachers.top_k_mass,
    "server": teachers.servers,
    "memory": machine.memory,
    "first step": machine.one_step,
}
Found = tuple[str, Finding]  # by which check


def examine(recipe: Recipe, processes: int, console: Console) -> list[Found]:
    """Every finding. The models are loaded only if nothing is wrong before. `processes`: 0, as many as the recipe asks for."""
    patient = Patient(recipe, processes)
    found = [each for name, check in {**QUICK, **OF_DATA}.items() for each in _of(name, partial(check, patient))]
    if any(each.status == "error" for _, each in found):
        said = "the models were not loaded, for something is wrong already"
        return [*found, ("set-up", warning(said, "mend the errors, and ask again"))]
    return found + _of_models(patient, console)


def _of(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Found]:
    try:
        yield from ((name, finding) for finding in check())
    except (PotstillError, OSError, ValueError) as refused:  # the last two of libraries, over names and files
        yield name, error(str(refused), "mend what it names")


def _of_models(patient: Patient, console: Console) -> list[Found]:
    def look(first: FirstStep) -> list[Found]:
        found = [("set-up", ok("student, teachers and data load, and fit each other"))]
        for name, check in OF_STEP.items():
            if name == "first step" and any(each.status == "error" for _, each in found):
                break
            found += _of(name, partial(check, patient, first))
        return found

    try:
        return at_first_step(in_one_process(patient.recipe), look, console) or []
    except PotstillError as refused:
        return [("set-up", error(str(refused), "mend what it names"))]


def in_one_process(recipe: Recipe) -> Recipe:
    """The same work, with nothing spread over ranks."""
    plain: dict[str, Any] = {"ranks": 0, "placement": "replicate", "tp": "auto"}
    teachers = [config.model_copy(update=plain) if config.model else config for config in recipe.teachers]
    return recipe.model_copy(update={"parallel": ParallelConfig(), "teachers": teachers})


def quick_warnings(recipe: Recipe) -> list[str]:
    """What a run says before it begins. What it cannot do without is refused by whoever needs it, and not said here."""
    patient = Patient(recipe, 0, quick=True)
    found: list[Found] = []
    for name, check in QUICK.items():
        with suppress(Exception):  # a check is no reason not to train; libraries raise anything over odd files
            found += [(name, finding) for finding in check(patient)] if name != "processes" else []
    return [f"{name}: {each.said}; {each.advice}" for name, each in found if each.status != "ok"]
