"""A run's folder: opened for this process alone, checked against the recipe, and resumed from its newest checkpoint."""

from __future__ import annotations

import fcntl
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from potstill.config import Recipe
from potstill.config.recipe import changed_keys, load_recipe, recipe_yaml
from potstill.data import check_there, count_left
from potstill.files import json_lines, lock, remove_unfinished, write_text
from potstill.parallel.agree import first_alone, together
from potstill.parallel.markers import Markers, restarted
from potstill.parallel.mesh import ranks
from potstill.students.average import load_averages
from potstill.training.checkpoint import Checkpoints
from potstill.training.feed import count_steps
from potstill.training.logging import EVALS, METRICS
from potstill.training.run import Progress, Run
from potstill.training.setup import Parts
from potstill.training.state import load_state
from potstill.types import PotstillError

RECIPE = "recipe.yaml"
SHARED_SECONDS = 60.0  # that a network file system may take to show a file to other hosts
LEAVING = 60.0  # … that a rank may take to end, once train.timeout is over
OTHER_FOLDER = "run= of a recipe, --out of the quickstart"
# What may differ when a run is resumed: it does not change the steps already taken.
MAY_CHANGE = re.compile(
    r"train\.(steps|device|optimizer\.offload|micro_batch_size|tokens_per_micro_batch):|parallel\.|checkpoint\.|eval[.:]|log\.|run:|data\.workers:|teachers\.\d+\.(server|remote\.(concurrency|timeout|"
    r"retry_timeout|token)):|rollouts\.engine\.(server|folder|batch_size):"
)
_locks: dict[Path, int] = {}  # held until the process ends, however it ends


def open_run(recipe: Recipe, warn: Callable[[str], None]) -> tuple[Recipe, Checkpoints]:
    """Lock the run's folder. Gives its checkpoints, and the recipe with the size of pieces and the repeat_weight that the run
    began with, where the recipe does not say: a run is never measured twice. The first rank has the lock; all must see its
    folder."""
    folder = Path(recipe.run)
    checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint.keep, warn)
    recipe, nonce = first_alone(lambda: _opened(recipe, folder, checkpoints))
    checkpoints.markers = Markers(folder, checkpoints.last_step, nonce)
    together(lambda: _check_shared(checkpoints.markers))
    return recipe, checkpoints


def _opened(recipe: Recipe, folder: Path, checkpoints: Checkpoints) -> tuple[Recipe, str]:
    """On the first rank: the recipe, and the word by which the run is ours."""
    if checkpoints.all():
        recipe = as_begun(recipe, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # On a host that was cut off, the first rank of before lives until it has noticed.
        _lock(folder, recipe.train.timeout + LEAVING if restarted() else 0.0, checkpoints.warn)
        for name in (RECIPE, METRICS, EVALS):  # which only the holder of the lock writes
            remove_unfinished(folder, f"*-{name}")
        checkpoints.prepare()
        return recipe, Markers.begin(folder, checkpoints.last_step).nonce
    except OSError as error:
        raise PotstillError(f"run: cannot write to {folder} ({error.strerror or error})") from error


def _check_shared(markers: Markers) -> None:
    """Ranks on other hosts write into the same checkpoints. A network file system may take a while to show a new file."""
    end = time.monotonic() + SHARED_SECONDS
    while not markers.ours():
        if time.monotonic() > end:
            raise PotstillError(
                f"run: rank {ranks().rank} on {socket.gethostname()} does not see what rank 0 wrote into {markers.folder}: "
                "choose a folder on a file system that all hosts share"
            )
        time.sleep(0.1)


def as_begun(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe of a run that is there, which it must be the recipe of; what was measured then is not measured again."""
    if recipe.checkpoint.resume == "never":
        raise PotstillError(
            f"{folder} holds a run already and checkpoint.resume is never: choose another folder ({OTHER_FOLDER})"
        )
    forced = recipe.checkpoint.resume == "force"
    try:
        begun = load_recipe(folder / RECIPE)
    except PotstillError:
        if forced:
            return recipe
        raise
    if recipe.data.piece_bytes is None:
        pieces = {"piece_bytes": begun.data.piece_bytes}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=pieces)})
    if recipe.loss.repeat_weight is None:
        if begun.loss.repeat_weight == begun.train.fading_repeat():  # so many steps, however many more there are now
            begun = begun.with_repeat_weight(recipe.train.fading_repeat())
        recipe = recipe.with_repeat_weight(begun.loss.repeat_weight)
    changed = [c for c in changed_keys(begun, recipe) if not MAY_CHANGE.match(c)]
    if changed and not forced:
        raise PotstillError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}): choose another folder ({OTHER_FOLDER}), or "
            "resume it with the new settings by checkpoint.resume=force"
        )
    return recipe


def _lock(folder: Path, patience: float, warn: Callable[[str], None]) -> None:
    """`patience`: seconds in which who has the lock may end."""
    path, end = (folder / ".lock").resolve(), time.monotonic() + patience
    while path not in _locks:
        try:
            _locks[path] = lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise PotstillError(
                    f"another process is training in {folder}: wait for it, or choose another folder ({OTHER_FOLDER})"
                ) from None
            warn(f"waiting for the process to end that was training in {folder}")
            time.sleep(0.1)


def resume(parts: Parts, checkpoints: Checkpoints, console: Console) -> Run:
    """The run, with the newest whole checkpoint put into its parts; without one, at its start. Saves the resolved recipe."""
    recipe, folder = parts.recipe, Path(parts.recipe.run)
    steps, found = recipe.train.steps, checkpoints.newest()
    if found is None:
        run = Run(folder, total_steps=planned_steps(parts, console), teachers=parts.identities, base=parts.base)
    else:
        path, progress = found
        _check_fits(parts, progress, folder)
        load_state(path, parts.module, parts.optimizers)
        together(lambda: load_averages(parts.averages, path))
        best = None if progress.best_step is None else checkpoints.at(progress.best_step)
        told = first_alone(lambda: [record for _, record in json_lines(folder / EVALS) if record])
        evaluations = [record for record in told if record["step"] <= progress.step]
        run = Run(folder, evaluations[-1] if evaluations else None, path, best, **vars(progress))
        run.total_steps = steps or run.total_steps
    # Not earlier: a recipe that does not fit is not the run's.
    first_alone(lambda: write_text(folder / RECIPE, recipe_yaml(recipe)))
    return run


def planned_steps(parts: Parts, console: Console) -> int:
    """Of a run that begins, once a cache without a model has been seen to hold what it reads first."""
    total = parts.recipe.train.steps or first_alone(lambda: _count_steps(parts, console))
    if not parts.recipe.rollouts.writes and not any(source.streaming for source in parts.data.sources):
        check_there(lambda: parts.step_batches(None), parts.teachers, total)
    return total


def _check_fits(parts: Parts, progress: Progress, folder: Path) -> None:
    recipe = parts.recipe
    if recipe.train.steps is not None and recipe.train.steps < progress.step:
        raise PotstillError(
            f"train.steps is {recipe.train.steps} and the run in {folder} is at step {progress.step} already: choose another "
            f"folder ({OTHER_FOLDER})"
        )
    changed = [now for then, now in zip(progress.teachers, parts.identities, strict=False) if then != now]
    if changed and recipe.checkpoint.resume == "auto":
        raise PotstillError(
            f"the run in {folder} began with another model behind its server ({progress.teachers}, now {parts.identities}): "
            "start the one it had again, choose another folder with run=, or resume all the same with "
            "checkpoint.resume=force"
        )
    if progress.base not in (None, parts.base) and recipe.checkpoint.resume == "auto":
        raise PotstillError(
            f"the adapters of the run in {folder} were put into another model than student.model or student.from gives now "
            "(its weights have changed): put back what was there, or choose another folder with run="
        )


def _count_steps(parts: Parts, console: Console) -> int:
    """With `train.epochs`, the schedule needs to know how many steps they are."""
    recipe = parts.recipe
    with console.status("counting the steps of train.epochs …") as status:

        def progress(steps: int) -> None:
            status.update(f"counting the steps of train.epochs: {steps:,} …")

        if recipe.rollouts.writes:
            return count_steps(parts, progress)
        if any(teacher.on_missing == "skip" for teacher in recipe.teachers):
            return count_left(parts.step_batches(None, whole=True), parts.teachers, progress)
        return parts.step_batches(None, whole=True).count(progress)
