"""From a recipe to the parts of a run, with everything that can be refused before the first step refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from potstill.cache.reading import weights_fingerprint
from potstill.config import DataConfig, Recipe
from potstill.data import StepBatches, check_lengths, with_pieces
from potstill.evals.reference import RunEvaluation
from potstill.memory import WORTH_COUNTING, Step, said_memory, weight_bytes
from potstill.models import LanguageModel, check_fit, compile_layers, difference
from potstill.models.precision import pick_precision, said_precision, set_precision
from potstill.models.spread import Filling
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.parallel.agree import Rounds, together
from potstill.parallel.channel import Asker
from potstill.parallel.mesh import Axis, pick_device, ranks
from potstill.parallel.shard import shard, split
from potstill.rollouts.prompts import stop_ids
from potstill.students.average import MovingAverage
from potstill.students.experts import Routers
from potstill.students.opening import open_student
from potstill.teachers.live import LiveModel
from potstill.teachers.open import TeacherSet, as_teachers_need, open_teachers
from potstill.teachers.remote import RemoteOrigin
from potstill.teachers.teacher import Teacher
from potstill.training.metrics import reset_peak_memory
from potstill.training.optimizer import make_optimizers
from potstill.types import PotstillError


@dataclass
class Parts:
    """Everything a run is made of."""

    recipe: Recipe  # with the size of the pieces, where that was measured, and a fresh student's repeat_weight
    device: torch.device
    student: LanguageModel
    module: StudentLoss
    teachers: Sequence[Teacher[Any]]
    optimizers: list[Optimizer]
    data: DataConfig  # as the teachers need it
    evaluate: Callable[..., dict[str, Any]]  # may be given when to stop waiting for a teacher
    writer: LanguageModel | RemoteOrigin | None = None  # the first teacher, where it can be asked to write
    writer_shares_tokens: bool = True  # … in the student's own tokens
    identities: list[str | None] = field(default_factory=list)  # of teachers behind servers: which model they are
    notes: Sequence[str] = ()  # what is worth a word before the first step
    facts: Sequence[str] = ()  # the run's first lines
    averages: Sequence[MovingAverage] = ()  # of the student's weights, that it learns from
    base: str | None = None  # with student.lora: the fingerprint of what the adapters were put into

    @property
    def bf16(self) -> bool:
        """Whether products are in bfloat16."""
        return pick_precision(self.recipe, self.device) == "bf16"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def step_batches(
        self, state: dict[str, Any] | None, rounds: Rounds | None = None, whole: bool = False
    ) -> StepBatches:
        """The steps of the data set, from a position in it. `rounds`: ranks tokenize for each other; `whole`: all rows, on this
        rank."""
        train, here = self.recipe.train, Axis() if whole else ranks().dp
        return StepBatches(
            self.data,
            self.student.tokenizer,
            batch_size=train.batch_size,
            micro_batch_size=train.micro(here.size),
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            rank=(here.index, here.size),
            seed=train.seed,
            epochs=train.epochs,
            state=state,
            changed_data_ok=self.recipe.checkpoint.resume == "force",
            rounds=rounds,
            token_weights=self.recipe.loss.token_weights,
        )


def assemble(recipe: Recipe, askers: Mapping[int, Asker] | None = None) -> Parts:
    """Load the models, check that they, the data and the recipe fit together, and spread the student over the ranks. `askers`:
    of teachers with ranks of their own."""
    device = pick_device(recipe.train.device)
    reset_peak_memory(device)  # the models are the run's
    set_precision(pick_precision(recipe, device))
    student, notes, filling = together(lambda: open_student(recipe, device))
    if any(source.messages for source in recipe.data.sources):  # so that whoever loads it ends where it learnt to end
        student.model.generation_config.eos_token_id = list(stop_ids(student, chats=True)) or None
    base = None if recipe.student.lora is None else weights_fingerprint(student)  # while it is whole
    recipe, data, lengths = together(lambda: _cut(recipe, student))
    teacher_set = together(lambda: open_teachers(recipe.teachers, student, data, recipe.loss, device, askers))
    together(lambda: _check_fit(recipe, data, student, teacher_set))
    if recipe.train.compile:
        for teacher in teacher_set.live:
            if teacher.source.language_model.placed is None:  # it is whole, and computed here
                compile_layers(teacher.source.language_model.model)
    recipe, repeat = _set_repeat_weight(recipe, teacher_set)
    facts = [said_precision(recipe, device), *_said_memory(recipe, student, data, teacher_set, device)]
    module = _spread(recipe, student, device, filling)
    evaluation = together(
        lambda: RunEvaluation(recipe, student, teacher_set, device, module.measure, module.completion)
    )
    writer = teacher_set.writer
    return Parts(
        recipe,
        device,
        student,
        module,
        teacher_set.teachers,
        make_optimizers(student.model, student.model.get_output_embeddings(), recipe.train.optimizer),
        data,
        evaluation,
        writer,
        writer is not None and difference(student.tokenizer, writer.tokenizer) is None,
        teacher_set.identities,
        [*notes, *teacher_set.notes, *repeat, *lengths, *evaluation.notes],
        facts,
        teacher_set.averages,
        base,
    )


def _said_memory(
    recipe: Recipe, student: LanguageModel, data: DataConfig, teacher_set: TeacherSet, device: torch.device
) -> list[str]:
    """The memory of a step, where the models are large enough for it to matter and the student is whole in this process."""
    live = [teacher.source.language_model for teacher in teacher_set.teachers if isinstance(teacher.source, LiveModel)]
    if ranks().many or recipe.train.compile or sum(map(weight_bytes, [student, *live])) < WORTH_COUNTING:
        return []
    return [said_memory(student, live, step_to_count(recipe, data, device))]


def step_to_count(recipe: Recipe, data: DataConfig, device: torch.device) -> Step:
    """A step of the recipe with rows as long as they may be, whose memory can be counted."""
    train = recipe.train
    settings = LossSettings(recipe.loss.divergence, 0.5, 0.1, 1.0, 1.0, 1.0)
    rows = (train.tokens_per_micro_batch or 0) // data.max_length or train.micro(1)
    return Step(
        rows,
        data.max_length,
        -(-train.batch_size // rows),
        lambda made, batch, targets: StudentLoss(made).train()(batch, targets, 1.0, settings)[0],
        lambda made: make_optimizers(made.model, made.model.get_output_embeddings(), train.optimizer),
        partial(torch.autocast, device.type, torch.bfloat16, enabled=pick_precision(recipe, device) == "bf16"),
    )


def _cut(recipe: Recipe, student: LanguageModel) -> tuple[Recipe, DataConfig, list[str]]:
    """The recipe, which keeps the size of the pieces where that is measured here; the data as teachers need it; and what is
    worth a word about lengths."""
    asked = as_teachers_need(recipe.with_columns().data, recipe.teachers)
    data = with_pieces(asked, student.tokenizer)
    if data is not asked:
        pieces = {"piece_bytes": data.piece_bytes}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=pieces)})
    # A data set of which only the prompts are read may be as long as it likes.
    return recipe, data, check_lengths(data, student.tokenizer) if recipe.rollouts.data_share else []


def _set_repeat_weight(recipe: Recipe, teacher_set: TeacherSet) -> tuple[Recipe, list[str]]:
    """The recipe with the repeat_weight that it does not say itself, where one was measured to help; what is worth a word."""
    train, loss = recipe.train, recipe.loss
    learns = teacher_set.other_tokenizer and loss.kd_weight != 0 and not recipe.rollouts.writes
    fresh = recipe.student.config is not None and train.optimizer.name == "adamw"
    if loss.repeat_weight is not None or not learns or not fresh:
        return recipe, []
    weight = train.fading_repeat()
    return recipe.with_repeat_weight(weight), [
        f"loss.repeat_weight: {weight.start:g}, which fades to 0 over the first {weight.over:.3g} of the steps: the student is "
        "fresh, and a teacher has another tokenizer (docs/losses.md; 0: without)"
    ]


def _spread(
    recipe: Recipe, student: LanguageModel, device: torch.device, filling: Callable[[], Filling] | None
) -> StudentLoss:
    """The student and its loss, over the ranks of the run."""
    here = ranks()
    student.context, student.group = split(student.model, here), here.tp.group
    routers = Routers.of(student, recipe.student.router_aux_loss_coef)
    module = StudentLoss(student, routers).train()
    bf16, fill = pick_precision(recipe, device) == "bf16", (lambda part: None) if filling is None else filling().fill
    shard(module, student.model, here, StudentLoss.METHODS, bf16=bf16, fill=fill)
    return module


def _check_fit(recipe: Recipe, data: DataConfig, student: LanguageModel, teacher_set: TeacherSet) -> None:
    """That the models can read texts of max_length, and those that write can write them: keys and values that were computed
    with the rotary factors for short texts do not fit those for long ones."""
    texts = [("data", data), *([] if recipe.eval is None else [("eval.data", recipe.eval.data)])]
    live = [(f"the teacher {teacher.name}", teacher.source.language_model) for teacher in teacher_set.live]
    for who, language_model in [("the student", student), *live]:
        for key, text in texts:
            check_fit(text, key, who, language_model)
    writers = [(*texts[0], "the student", student)] if recipe.rollouts.on_policy_fraction else []
    if recipe.rollouts.teacher_fraction and isinstance(teacher_set.writer, LanguageModel):
        writers.append((*texts[0], "the teacher", teacher_set.writer))
    if recipe.eval is not None and recipe.eval.on_policy_samples:
        writers.append((*texts[1], "the student", student))
    for key, text, who, writer in writers:
        short = writer.short_positions
        if short is not None and text.max_length > short:
            raise PotstillError(
                f"{key}.max_length is {text.max_length} and {who} cannot write texts beyond {short} tokens, where its rotary "
                f"factors change (longrope): set {key}.max_length to {short} or less"
            )
