"""From a recipe to the parts of a run, with everything that can be refused before the first step refused here."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import Optimizer

from potstill.config import DataConfig, Recipe
from potstill.config.recipe import changed_keys, load_recipe, recipe_yaml
from potstill.data import StepBatches, check_lengths, count_windows, with_pieces
from potstill.evals.fidelity import complete, evaluation_batches
from potstill.evals.on_policy import OnPolicyEval
from potstill.evals.reference import measured_against, reference_of
from potstill.files import json_lines, lock, remove_unfinished, write_text
from potstill.models import LanguageModel, backbone, check_fit, difference, load_student
from potstill.models.dropout import set_dropout
from potstill.parallel.mesh import pick_device
from potstill.teachers.open import TeacherSet, as_teachers_need, check_there, count_left, open_teachers
from potstill.teachers.remote import RemoteOrigin
from potstill.training.checkpoint import Checkpoints, Progress, saved_steps
from potstill.training.metrics import EVALS, METRICS
from potstill.training.optimizer import make_optimizers
from potstill.training.run import Run
from potstill.training.state import load_state
from potstill.training.student import StudentLoss
from potstill.types import Batch, PotstillError, Teacher

RECIPE, CHECKPOINTS = "recipe.yaml", "checkpoints"
OTHER_FOLDER = "run= of a recipe, --out of the quickstart"
# What may differ when a run goes on: it does not change the steps already taken.
MAY_CHANGE = re.compile(
    r"train\.(steps|device):|checkpoint\.|eval[.:]|log\.|run:|data\.workers:|teachers\.\d+\.(server|remote\.(concurrency|timeout|"
    r"retry_timeout|token)):|rollouts\.engine\.(server|folder|batch_size):"
)


@dataclass
class Parts:
    """Everything a run is made of."""

    device: torch.device
    student: LanguageModel
    module: StudentLoss
    teachers: Sequence[Teacher]
    optimizers: list[Optimizer]
    precision: str  # fp32 or bf16
    windows: Callable[[dict[str, Any] | None], StepBatches]  # from a position in the data
    evaluate: Callable[..., dict[str, Any]]  # may be given when to stop waiting for a teacher
    data: DataConfig  # as the teachers need it
    recipe: Recipe  # with the size of the pieces, where that was measured
    writer: LanguageModel | RemoteOrigin | None = None  # the first teacher, where it can be asked to write
    writer_shares_tokens: bool = True  # … in the student's own tokens
    identities: list[str | None] = field(default_factory=list)  # of teachers behind servers: which model they are
    notes: Sequence[str] = ()  # what is worth a word before the first step

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def open_run(recipe: Recipe, warn: Callable[[str], None]) -> tuple[Run, Checkpoints]:
    """The run's folder, locked for this process."""
    folder = Path(recipe.run)
    checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.checkpoint.keep, warn)
    used = bool(checkpoints.all())
    if used and recipe.checkpoint.resume == "never":
        raise PotstillError(
            f"{folder} holds a run already and checkpoint.resume is never: choose another folder ({OTHER_FOLDER})"
        )
    if used and recipe.checkpoint.resume == "auto":
        changed = [c for c in changed_keys(load_recipe(folder / RECIPE), recipe) if not MAY_CHANGE.match(c)]
        if changed:
            raise PotstillError(
                f"{folder} holds a run with other settings ({'; '.join(changed)}): choose another folder "
                f"({OTHER_FOLDER}), or "
                "go on with the new settings with checkpoint.resume=force"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        for name in (RECIPE, METRICS, EVALS):  # which only the holder of the lock writes
            remove_unfinished(folder, f"*-{name}")
        checkpoints.prepare()
    except OSError as error:
        raise PotstillError(f"run: cannot write to {folder} ({error.strerror or error})") from error
    return Run(folder), checkpoints


def as_begun(recipe: Recipe) -> Recipe:
    """The recipe with the size of pieces that its run began with, where it does not say: a run is never measured twice."""
    saved = Path(recipe.run) / RECIPE
    if recipe.data.piece_bytes is not None or not saved.exists() or not saved_steps(Path(recipe.run) / CHECKPOINTS):
        return recipe
    try:
        pieces = {"piece_bytes": load_recipe(saved).data.piece_bytes}
    except PotstillError:
        if recipe.checkpoint.resume == "force":
            return recipe
        raise
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=pieces)})


_locks: dict[Path, int] = {}  # held until the process ends, however it ends


def _lock(folder: Path) -> None:
    path = (folder / ".lock").resolve()
    if path in _locks:
        return
    try:
        _locks[path] = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PotstillError(
            f"another process is training in {folder}: wait for it, or choose another folder ({OTHER_FOLDER})"
        ) from None


def assemble(recipe: Recipe) -> Parts:
    """Load the models and check that they, the data and the recipe fit together."""
    device = pick_device(recipe.train.device)
    student = load_student(recipe.student, device, recipe.train.seed)
    dropout_notes = _set_dropout(recipe, student)
    data = as_teachers_need(recipe.data, recipe.teachers)
    measured = with_pieces(data, student.tokenizer)
    if measured is not data:
        pieces = {"piece_bytes": measured.piece_bytes}
        data, recipe = measured, recipe.model_copy(update={"data": recipe.data.model_copy(update=pieces)})
    # A data set of which only the prompts are read may be as long as it likes.
    lengths = check_lengths(data, student.tokenizer) if recipe.rollouts.data_share else []
    teacher_set = open_teachers(recipe.teachers, student, data, recipe.loss, device)
    for who, language_model in [
        ("the student", student),
        *((f"the teacher {t.name}", t.source.language_model) for t in teacher_set.live),
    ]:
        check_fit(data, "data", who, language_model)
        if recipe.eval is not None:
            check_fit(recipe.eval.data, "eval.data", who, language_model)
    _check_writes(recipe, data, student, teacher_set.writer)
    if recipe.train.gradient_checkpointing:
        if not student.model.supports_gradient_checkpointing:
            raise PotstillError(
                f"train.gradient_checkpointing: transformers has none for {student.model.config.model_type} models: set "
                "it to "
                "false"
            )
        student.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recipe.train.compile:
        backbone(student.model).compile()
    module = StudentLoss(student).train()
    optimizers = make_optimizers(student.model, student.model.get_output_embeddings(), recipe.train.optimizer)
    on_policy_eval = _on_policy_eval(recipe, student, teacher_set)
    reference, notes = reference_of(recipe.teachers, teacher_set, student, recipe.eval)
    held_out: list[Batch] = []

    def windows(state: dict[str, Any] | None) -> StepBatches:
        return StepBatches(
            data,
            student.tokenizer,
            batch_size=recipe.train.batch_size,
            micro_batch_size=recipe.train.micro,
            seed=recipe.train.seed,
            epochs=recipe.train.epochs,
            state=state,
            changed_data_ok=recipe.checkpoint.resume == "force",
        )

    def evaluate_student(interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        assert recipe.eval is not None
        if not held_out:
            held_out.extend(evaluation_batches(recipe.eval.data, student, recipe.eval.batch_size, recipe.eval.examples))
        result = measured_against(reference, student, held_out, device, interrupted)
        if on_policy_eval is not None:
            result |= on_policy_eval()
        return {**result, "samples": complete(student, recipe.eval.prompts, recipe.eval.max_new_tokens)}

    precision = recipe.train.precision
    return Parts(
        device,
        student,
        module,
        teacher_set.teachers,
        optimizers,
        precision,
        windows,
        evaluate_student,
        data,
        recipe,
        writer=teacher_set.writer,
        writer_shares_tokens=teacher_set.writer is not None
        and difference(student.tokenizer, teacher_set.writer.tokenizer) is None,
        identities=teacher_set.identities,
        notes=[*student.notes, *dropout_notes, *teacher_set.notes, *lengths, *notes],
    )


def _check_writes(recipe: Recipe, data: DataConfig, student: LanguageModel, teacher: Any) -> None:
    """Keys and values that were computed with the factors for short texts do not fit those for long ones."""
    writers = [("data", data, "the student", student)] if recipe.rollouts.on_policy_fraction else []
    if recipe.rollouts.teacher_fraction and isinstance(teacher, LanguageModel):
        writers.append(("data", data, "the teacher", teacher))
    if recipe.eval is not None and recipe.eval.on_policy_samples:
        writers.append(("eval.data", recipe.eval.data, "the student", student))
    for key, text, who, writer in writers:
        short = writer.short_positions
        if short is not None and text.max_length > short:
            raise PotstillError(
                f"{key}.max_length is {text.max_length} and {who} cannot write texts beyond {short} tokens, where its rotary "
                f"factors change (longrope): set {key}.max_length to {short} or less"
            )


def _set_dropout(recipe: Recipe, student: LanguageModel) -> list[str]:
    """As the recipe says; what is worth a word."""
    probability, own = recipe.student.dropout, recipe.rollouts.on_policy_fraction > 0
    if probability is None and own:
        probability = 0.0
    if probability is None:
        return []
    changed = ", ".join(f"{each:g}" for each in set_dropout(student.model, probability))
    if probability and own:
        return [
            f"student.dropout: {probability:g} is on while the student trains and off while it writes, so what it says "
            "of its "
            "own text differs between the two (sampling_logprob_gap): 0 takes the difference away"
        ]
    if not changed:
        return []
    why = ", for it writes without (student.dropout keeps it)" if recipe.student.dropout is None else ""
    return [f"student.dropout: the student is trained with {probability:g} in place of its own {changed}{why}"]


def _on_policy_eval(recipe: Recipe, student: LanguageModel, teacher_set: TeacherSet) -> OnPolicyEval | None:
    if recipe.eval is None or not recipe.eval.on_policy_samples:
        return None
    if not teacher_set.live:
        raise PotstillError(
            "eval.on_policy_samples needs a live teacher (model) with the student's tokenizer to be compared with: set "
            "it to 0"
        )
    return OnPolicyEval(
        student,
        teacher_set.live[0],
        recipe.eval.data,
        texts=recipe.eval.on_policy_samples,
        prompt_tokens=recipe.rollouts.prompt_tokens,
        max_new_tokens=recipe.rollouts.sampling.max_new_tokens,
        batch_size=recipe.eval.batch_size,
    )


CountSteps = Callable[[Recipe, Parts, Callable[[int], None]], int]


def resume(
    recipe: Recipe, run: Run, parts: Parts, checkpoints: Checkpoints, console: Console, count_written: CountSteps
) -> Progress:
    """Put the newest whole checkpoint into the parts; without one, a fresh start. Saves the resolved recipe."""
    found = checkpoints.newest()
    if found is None:
        total = recipe.train.steps or _count_steps(recipe, parts, console, count_written)
        if not recipe.rollouts.writes and not any(source.streaming for source in parts.data.sources):
            check_there(lambda: parts.windows(None), parts.teachers, total)
        progress = Progress(0, 0, None, {}, total, None, None, teachers=parts.identities)
    else:
        path, progress = found
        if recipe.train.steps is not None and recipe.train.steps < progress.step:
            raise PotstillError(
                f"train.steps is {recipe.train.steps} and the run in {run.folder} is at step {progress.step} already: choose "
                f"another folder ({OTHER_FOLDER})"
            )
        changed = [now for then, now in zip(progress.teachers, parts.identities, strict=False) if then != now]
        if changed and recipe.checkpoint.resume == "auto":
            raise PotstillError(
                f"the run in {run.folder} began with another model behind its server ({progress.teachers}, now "
                f"{parts.identities}): start the one it had again, choose another folder with run=, or go on all the "
                "same with "
                "checkpoint.resume=force"
            )
        load_state(path, parts.module, parts.optimizers)
        if recipe.train.steps is not None:
            progress = Progress(**{**vars(progress), "total_steps": recipe.train.steps})
        run.checkpoint = path
        run.best = None if progress.best_step is None else checkpoints.at(progress.best_step)
        run.evaluation = _last_evaluation(run.folder / EVALS, progress.step)
    run.step, run.total_steps, run.counts = progress.step, progress.total_steps, progress.counts
    run.kd_scale = progress.kd_scale
    write_text(run.folder / RECIPE, recipe_yaml(recipe))  # not earlier: a recipe that does not fit is not the run's
    return progress


def _last_evaluation(path: Path, step: int) -> dict[str, Any] | None:
    records = [record for _, record in json_lines(path) if record is not None and record["step"] <= step]
    return records[-1] if records else None


def _count_steps(recipe: Recipe, parts: Parts, console: Console, count_written: CountSteps) -> int:
    """With `train.epochs`, the schedule needs to know how many steps they are. `count_written`: where text is written."""
    data, train = as_teachers_need(recipe.data, recipe.teachers), recipe.train
    assert train.epochs is not None
    with console.status("counting the steps of train.epochs …") as status:

        def progress(steps: int) -> None:
            status.update(f"counting the steps of train.epochs: {steps:,} …")

        if recipe.rollouts.writes:
            return count_written(recipe, parts, progress)
        if any(teacher.on_missing == "skip" for teacher in recipe.teachers):
            return count_left(parts.windows(None), parts.teachers, progress)
        return count_windows(
            data,
            parts.student.tokenizer,
            batch_size=train.batch_size,
            seed=train.seed,
            epochs=train.epochs,
            progress=progress,
        )
