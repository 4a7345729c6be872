"""The student as a recipe wants it, before it is spread over ranks: loaded, and with what learns of it chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from potstill.config import Recipe
from potstill.config.models import WidthConfig
from potstill.models import LanguageModel, compile_layers, keep_layers, load_student
from potstill.models.adapters import adapter_base, add_lora, freeze
from potstill.models.loading import check_layers
from potstill.models.spread import Filling, load_student_by_first
from potstill.parallel.mesh import ranks
from potstill.parallel.team import students
from potstill.shipped import locate
from potstill.students.dropout import check_dropout, set_dropout
from potstill.students.pruning import Kept, calibration, cut, kept, measured, pruned
from potstill.types import PotstillError


def open_student(recipe: Recipe, device: torch.device) -> tuple[LanguageModel, list[str], Callable[[], Filling] | None]:
    """The student as the recipe's train section wants it, what is worth a word, and where its weights come from, if not with
    it."""
    filling = None
    if _read_by_first(recipe):
        student, filling = load_student_by_first(recipe.student, device, recipe.train.seed, students(ranks()))
    elif recipe.student.width is not None:
        student = _narrower(recipe, recipe.student.width, device)
    else:
        student = load_student(recipe.student, device, recipe.train.seed)
    notes = [*student.notes, *_set_dropout(recipe, student), *_choose_trained(recipe, student)]
    if recipe.train.gradient_checkpointing:
        if not student.model.supports_gradient_checkpointing:
            raise PotstillError(
                f"train.gradient_checkpointing: transformers has none for {student.model.config.model_type} models: set it to "
                "false"
            )
        student.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recipe.train.compile:
        compile_layers(student.model)
    return student, notes, filling


def _read_by_first(recipe: Recipe) -> bool:
    """Whether one rank reads the student and the others are sent their parts. Not where something is made of its weights before
    they are spread (adapters, a narrower student, a teacher that it is itself), nor where experts are cut."""
    student, name = recipe.student, recipe.student.model or recipe.student.from_
    plain = (
        student.lora is None
        and student.width is None
        and (name is None or adapter_base(name, student.revision) is None)
    )
    return ranks().many and ranks().experts is None and plain and not any(each.student for each in recipe.teachers)


def _narrower(recipe: Recipe, width: WidthConfig, device: torch.device) -> LanguageModel:
    """What matters is measured by the first rank, before layers are taken out: the others cut the same."""
    config = recipe.student
    whole = load_student(config.model_copy(update={"layers": None, "width": None}), device, recipe.train.seed)
    layers = config.layers or list(range(check_layers(whole.model, [])))
    check_layers(whole.model, layers)

    def chosen() -> Kept:
        importance = measured(whole, calibration(recipe.data, whole.tokenizer, width.examples))
        return kept(importance.of_layers(layers), width, whole.model)

    stays = students(ranks()).of_first(chosen)
    if config.layers is not None:
        keep_layers(whole.model, config.layers)
    return pruned(whole, cut(whole.model, stays))


def _choose_trained(recipe: Recipe, student: LanguageModel) -> list[str]:
    """Adapters, or what is frozen; what is worth a word."""
    config = recipe.student
    freeze(student.model, config.freeze)
    if config.lora is None:
        return []
    name = config.model or config.from_
    assert name is not None
    base = locate(name)
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    said = [add_lora(student.model, config.lora, base if config.from_ is None else None, config.revision)]
    if config.lora.dropout and recipe.rollouts.on_policy_fraction:
        said.append(
            "student.lora.dropout is on while the student trains and off while it writes, so what it says of its own text "
            "differs between the two (sampling_logprob_gap): 0 takes the difference away"
        )
    return said


def _set_dropout(recipe: Recipe, student: LanguageModel) -> list[str]:
    """As the recipe says, and off where the student writes and the recipe does not say; what is worth a word."""
    asked, writes = recipe.student.dropout, recipe.rollouts.on_policy_fraction > 0
    wanted = asked is not None or writes
    changed = ", ".join(f"{each:g}" for each in set_dropout(student.model, asked or 0.0)) if wanted else ""
    check_dropout(student.model)
    if asked and writes:
        return [
            f"student.dropout: {asked:g} is on while the student trains and off while it writes, so what it says of its own "
            "text differs between the two (sampling_logprob_gap): 0 takes the difference away"
        ]
    why = ", for it writes without (student.dropout keeps it)" if asked is None else ""
    said = f"student.dropout: the student is trained with {asked or 0:g} in place of its own {changed}{why}"
    return [said] if changed else []
