"""The one training loop: whatever the teacher, the text or the number of processes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.config.sections import value_at
from potstill.data import StoppedWaiting
from potstill.parallel.mesh import count_over_ranks, sum_over_ranks
from potstill.teachers.combine import compute_targets
from potstill.teachers.open import Prepared
from potstill.training.checkpoint import Progress
from potstill.training.diagnosis import Diverged, diagnose
from potstill.training.feed import count_steps, open_feed
from potstill.training.metrics import Stopwatch, peak_memory_bytes, watchers
from potstill.training.optimizer import lr_factor, set_lr
from potstill.training.run import Callback, Run
from potstill.training.saver import Saver
from potstill.training.setup import Parts, as_begun, assemble, open_run, resume
from potstill.training.state import random_state, set_random_state
from potstill.training.stop import StopSignal
from potstill.training.student import SAMPLED, SUMS, LossKnobs
from potstill.types import Batch, PotstillError, Target, Teacher


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    callbacks: Sequence[Callback] = (),
    seconds: Callable[[], float] = time.monotonic,
) -> Run:
    """Run a recipe to its end, or from where it stopped to its end. `seconds`: the clock of checkpoint.every_minutes."""
    recipe, console = as_begun(load_recipe(recipe)), Console(soft_wrap=True)

    def warn(message: str) -> None:
        console.print(message, style="yellow", highlight=False, markup=False)

    run, checkpoints = open_run(recipe, warn)
    parts = assemble(recipe)
    recipe = parts.recipe
    for note in parts.notes:
        warn(note)
    progress = resume(recipe, run, parts, checkpoints, console, count_steps)
    watching = [*watchers(recipe, console, warn), *callbacks]
    clock = Stopwatch()

    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        waiting = open_feed(recipe, parts, progress, run.folder, run.checkpoint, lambda: stop.signal is not None)
        feed = stack.enter_context(waiting)
        for note in feed.notes:
            warn(note)
        for teacher in parts.teachers:  # before the feed, whose threads may wait for a server
            stack.callback(teacher.close)
        for watcher in watching:
            watcher.started(run)
            stack.callback(watcher.ended, run)
        saver = Saver(recipe.checkpoint, run, parts, checkpoints, feed, watching, seconds)

        while run.step < run.total_steps and not run.stopped_by:
            if stop.signal:  # since the last look; before the first step there is nothing to save
                run.stopped_by = stop.signal
                saver.keep(progress)
                break
            random = random_state(parts.device)  # of which the micro-batches of a step that is not taken draw
            try:
                with clock.of("data"):
                    following = next(feed, None)
                if following is None and recipe.rollouts.writes and recipe.train.epochs is not None:
                    run.total_steps = run.step  # fewer than were counted: some answers had nothing in them
                    progress = replace(progress, total_steps=run.step)
                    if run.evaluation is None or run.evaluation["step"] != run.step:
                        progress = _evaluated(recipe, run, parts, progress, saver, watching, stop)
                    saver.keep(progress)
                    break
                if following is None:
                    raise PotstillError(
                        f"data: it ended after step {run.step} of {run.total_steps}: there is less of it than when the run "
                        "began; put back what was there, or begin anew with run="
                    )
                window = following.window
                metrics = optimizer_step(recipe, parts, following, run, clock)
            except StoppedWaiting:  # for a server that is away, say. The step is not taken
                run.stopped_by = stop.signal
                set_random_state(random, parts.device)
                saver.keep(progress)
                break
            except Diverged:
                raise
            except PotstillError as error:  # of a server that stays away, of a record: the steps so far are sound
                set_random_state(random, parts.device)
                raise saver.kept(progress, error) from error
            run.step, run.counts = run.step + 1, window.counts
            feed.advance(run.step)
            progress = replace(
                progress,
                step=run.step,
                data=window.state,
                counts=window.counts,
                tokens=metrics["tokens"],
                kd_scale=run.kd_scale,
            )
            for watcher in watching:
                watcher.stepped(run, metrics)

            last = run.step == run.total_steps
            ends = last or (run.asked_to_stop and not stop.signal)  # after a signal there is no time to evaluate
            if recipe.eval is not None and (ends or _due(run.step, recipe.eval.every)):
                progress = _evaluated(recipe, run, parts, progress, saver, watching, stop)
            # Read once: the step a run ends at is a step it saves.
            run.stopped_by = None if last else stop.signal or run.asked_to_stop
            if last or run.stopped_by or progress.best_step == run.step or saver.due():
                saver.save(progress)
    if recipe.checkpoint.push_to_hub and run.step == run.total_steps:
        _push(parts, recipe.checkpoint.push_to_hub)
    return run


def _evaluated(
    recipe: Recipe,
    run: Run,
    parts: Parts,
    progress: Progress,
    saver: Saver,
    watching: Sequence[Callback],
    stop: StopSignal,
) -> Progress:
    """The run's progress after an evaluation of its present step. One that fails loses no steps; one that a signal finds
    waiting for a server is given up."""
    if recipe.eval is None:
        return progress
    try:
        run.evaluation = {"step": run.step, **parts.evaluate(lambda: stop.signal is not None)}
    except StoppedWaiting:
        return progress
    except PotstillError as error:
        raise saver.kept(progress, error) from error
    for watcher in watching:
        watcher.evaluated(run, run.evaluation)
    return _with_best(progress, run.evaluation["bits_per_byte"])


def optimizer_step(recipe: Recipe, parts: Parts, step: Prepared, run: Run, clock: Stopwatch) -> dict[str, Any]:
    """All micro-batches of a window, one division, one optimizer step. Gives the step's metrics."""
    window = step.window
    knobs = loss_knobs(recipe, run.step / max(1, run.total_steps - 1))
    scaled = replace(knobs, kd_weight=knobs.kd_weight * run.kd_scale)
    tokens = _supervised_tokens(window.batches)
    sums = torch.zeros(len(SUMS), device=parts.device)
    stat_rows = recipe.log.stat_rows
    teachers = parts.teachers if knobs.kd_weight else []  # a teacher without weight is not asked
    counts: Counter[str] = Counter()
    for batch, targets in _ahead(recipe, step, teachers, parts.device, clock, counts):
        with clock.of("student"):
            with parts.autocast():
                loss, micro_sums = parts.module(batch, targets, tokens, scaled, stat_rows)
            loss.backward()
            sums += micro_sums
            stat_rows = 0  # a sample of the first micro-batch is enough
    with clock.of("optimizer"):
        norm = torch.nn.utils.clip_grad_norm_(parts.module.parameters(), recipe.train.max_grad_norm or math.inf)
        *totals, norm_value = read(torch.cat([sum_over_ranks(sums), norm.float().view(1)]))
        if not (math.isfinite(totals[0]) and math.isfinite(norm_value)):
            raise Diverged(diagnose(recipe.loss, parts, step, scaled, run.step + 1))
        lr = set_lr(parts.optimizers, lr_factor(run.step, run.total_steps, recipe.train.lr_schedule))
        for optimizer in parts.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    of = dict(zip(SUMS, totals, strict=True))
    used_scale = run.kd_scale
    if recipe.loss.dynamic_scaling and of["kd"] > 0:
        run.kd_scale = of["ce"] / of["kd"]
    return {
        "step": run.step + 1,
        "epoch": window.epoch,
        "loss": of["loss"],
        "kd": of["kd"] / tokens if teachers else None,
        "ce": of["ce"] / tokens,
        "temperature": knobs.temperature,
        "kd_weight": knobs.kd_weight if teachers else 0.0,
        **({"kd_scale": used_scale} if recipe.loss.dynamic_scaling else {}),
        "ce_weight": knobs.ce_weight,
        **_means(of),
        **_alignment(counts, of),
        **_own(of, knobs.divergence if teachers else None),
        **window.facts,
        "grad_norm": norm_value,
        "lr": lr,
        "tokens": window.counts["supervised_tokens"],
        **_speed(clock.read(), tokens),
        "peak_memory_bytes": peak_memory_bytes(parts.device),
    }


def read(values: Tensor) -> list[float]:
    """The one place, once a step, where the host waits for the device."""
    return values.tolist()


def loss_knobs(recipe: Recipe, progress: float) -> LossKnobs:
    """The loss section with its schedules read at `progress` (0 at the first step, 1 at the last)."""
    loss = recipe.loss
    return LossKnobs(
        divergence=loss.divergence,
        beta=loss.beta,
        alpha=loss.alpha,
        temperature=value_at(loss.temperature, progress),
        kd_weight=value_at(loss.kd_weight, progress),
        ce_weight=value_at(recipe.ce_weight, progress),
        entropy_gate=loss.entropy_gate,
        discount=loss.discount,
        ratio_clip=loss.ratio_clip,
    )


def _supervised_tokens(batches: Sequence[Batch]) -> int:
    """Of the whole step, over all micro-batches and ranks: the only divisor."""
    return count_over_ranks(sum(batch.supervised_tokens for batch in batches))


def _ahead(
    recipe: Recipe,
    step: Prepared,
    teachers: Sequence[Teacher],
    device: torch.device,
    clock: Stopwatch,
    counts: Counter[str],
) -> Iterator[tuple[Batch, list[tuple[float | Tensor, Target]]]]:
    """Each micro-batch on the device, with its targets; what the teachers counted is added up."""
    for host_batch, ready in zip(step.window.batches, step.ready, strict=True):
        batch = host_batch.to(device)
        with clock.of("teacher"):
            targets = compute_targets(teachers, ready if teachers else [], batch, recipe.loss, counts)
        yield batch, targets


def _means(of: Mapping[str, float]) -> dict[str, float | None]:
    """Means over the step's sampled rows; None where nothing was sampled, or it is not known."""
    rows = of["stat_rows"]
    keys = ("kl", "teacher_entropy", "student_entropy", "agreement")
    return {key: of[key] / rows if rows and not math.isnan(of[key]) else None for key in keys}


def _own(of: Mapping[str, float], divergence: str | None) -> dict[str, float]:
    """Means over the tokens that the student wrote itself."""
    rows = of["on_policy_rows"]
    if not rows:
        return {}
    means = {"sampling_logprob_gap": of["sampling_logprob_gap"] / rows}
    if divergence == SAMPLED:
        means |= {
            "ratio_mean": of["ratio"] / rows,
            "ratio_clipped": of["clipped"] / rows,
            "advantage": of["advantage"] / rows,
        }
    return means


def _alignment(counts: Counter[str], of: Mapping[str, float]) -> dict[str, float]:
    """How well the tokens of teachers with another tokenizer lie over the student's, in this process's share of the step."""
    if not counts["tokens"]:
        return {}
    found = {
        "align_chunks_per_token": counts["chunks"] / counts["tokens"],
        "align_exact": counts["tokens_in_chunks"] / counts["tokens"],
        "align_bytes": counts["bytes_in_chunks"] / max(1, counts["bytes"]),
        "align_one_to_one": counts["one_to_one"] / max(1, counts["chunks"]),
    }
    return found | ({"shared_mass": of["shared_mass"] / of["shared_rows"]} if of["shared_rows"] else {})


def _speed(seconds: Mapping[str, float], tokens: int) -> dict[str, float]:
    parts = {f"seconds_{what}": seconds.get(what, 0.0) for what in ("data", "teacher", "student", "optimizer")}
    return {"tokens_per_second": tokens / sum(parts.values()), **parts}


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _with_best(progress: Progress, bits_per_byte: float) -> Progress:
    if progress.best_bits_per_byte is not None and progress.best_bits_per_byte <= bits_per_byte:
        return progress
    return replace(progress, best_step=progress.step, best_bits_per_byte=bits_per_byte)


def _push(parts: Parts, repository: str) -> None:
    try:
        parts.student.model.push_to_hub(repository)
        parts.student.tokenizer.push_to_hub(repository)
    except Exception as error:  # the hub's client raises many kinds; the run itself is saved and whole
        raise PotstillError(
            f"checkpoint.push_to_hub: could not push to {repository} ({error}); the run is saved"
        ) from error
