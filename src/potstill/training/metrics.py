"""Those who watch a run: metrics.jsonl, TensorBoard, Weights & Biases, and the bar or the lines a person sees."""

from __future__ import annotations

import json
import resource
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from potstill.config import Recipe
from potstill.data import lost_in
from potstill.extras import lacking
from potstill.files import could_not_write, json_lines, open_log, write_bytes
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LEAST_COVERED = 0.9  # of the bytes, below which a user should know
METRICS, EVALS = "metrics.jsonl", "evals.jsonl"

Warn = Callable[[str], None]


class Stopwatch:
    """Seconds by what they went into. Reading resets."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def peak_memory_bytes(device: torch.device) -> int:
    """Of the device's memory, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class JsonLines(Callback):
    """metrics.jsonl, an object a step, and evals.jsonl, an object an evaluation."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn

    def started(self, run: Run) -> None:
        for name in (METRICS, EVALS):
            keep_until(run.folder / name, run.step, self._warn)
        self._metrics = open_log(run.folder / METRICS)
        self._evals = open_log(run.folder / EVALS)

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self._write(self._metrics, metrics)

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self._write(self._evals, evaluation)

    def ended(self, run: Run) -> None:
        for file in (self._metrics, self._evals):
            with suppress(OSError):  # only what could not be written, and was reported, is still in the buffer
                file.close()

    def _write(self, file: TextIO, record: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise could_not_write(Path(file.name), error) from error


def keep_until(path: Path, step: int, warn: Warn) -> None:
    """Drop lines of steps that will be taken again after a resume. Lines that cannot be read are set aside, and so are those of
    an attempt that had no checkpoint yet."""
    damaged = path.with_name(f"{path.name}.damaged")
    for log in (path, damaged):
        if log.is_symlink():
            raise PotstillError(
                f"{log} is a link, and may lead out of the run: remove it, or put a copy of the file in its place"
            )
    if not path.exists():
        return
    lines = list(json_lines(path))
    if bad := [number for number, (_, record) in enumerate(lines, 1) if record is None]:
        before = damaged.read_bytes() if damaged.exists() else b""
        write_bytes(damaged, before + b"".join(_ended(lines[number - 1][0]) for number in bad))
        which = f"line {bad[0]} is" if len(bad) == 1 else f"{len(bad)} lines, from line {bad[0]} on, are"
        warn(f"{path}: {which} damaged and set aside in {damaged.name}")
    good = [(line, record["step"]) for line, record in lines if record is not None]
    if step == 0 and good:
        aside = next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
        write_bytes(aside, b"".join(_ended(line) for line, _ in good))
        last = max(taken for _, taken in good)
        steps = f"steps 1–{last}" if last > 1 else "step 1"
        warn(
            f"{steps} of an earlier attempt had no checkpoint: starting again at step 1; its {path.name} is kept as {aside}"
        )
    write_bytes(path, b"".join(_ended(line) for line, taken in good if taken <= step))


def _ended(line: bytes) -> bytes:
    """The last line of a file may lack its end."""
    return line if line.endswith(b"\n") else line + b"\n"


class TensorBoard(Callback):
    """What it cannot write ends no run: it is told once, and metrics.jsonl has the same numbers."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._writer: SummaryWriter | None = None

    def started(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._before, threading.excepthook = threading.excepthook, self._in_thread
        with self._watched():
            self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.step + 1)

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self._write("train", metrics)

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self._write("eval", evaluation)

    def ended(self, run: Run) -> None:
        with self._watched():
            if self._writer is not None:
                self._writer.close()
        threading.excepthook = self._before

    def _write(self, section: str, record: Mapping[str, Any]) -> None:
        with self._watched():
            for key, value in record.items():
                if self._writer is not None and key != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(f"{section}/{key}", value, record["step"])

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a library, which raises what the file system and its own thread do
            self._writer = None
            self._warn(f"log.tensorboard: writing its events failed ({error}); this run goes on without them")

    def _in_thread(self, thrown: threading.ExceptHookArgs) -> None:
        """Its thread raises what `_watched` tells."""
        if thrown.thread is None or not type(thrown.thread).__module__.startswith("tensorboard"):
            self._before(thrown)


class Wandb(Callback):
    def __init__(self, project: str, recipe: Recipe) -> None:
        try:
            import wandb
        except ImportError:
            raise lacking("log.wandb", "wandb") from None
        self._wandb, self._project, self._recipe = wandb, project, recipe

    def started(self, run: Run) -> None:
        # Kept in the run's folder: a resumed run goes on in its own curves, and no other run of that name joins them.
        kept = run.folder / "wandb-id"
        if not kept.is_file():
            write_bytes(kept, secrets.token_hex(8).encode())
        self._log = self._wandb.init(
            project=self._project,
            name=run.folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=self._recipe.model_dump(mode="json", by_alias=True),
        )

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self._log.log({f"train/{k}": v for k, v in metrics.items()}, step=metrics["step"])

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        numbers = {f"eval/{k}": v for k, v in evaluation.items() if isinstance(v, int | float)}
        self._log.log(numbers, step=evaluation["step"])

    def ended(self, run: Run) -> None:
        self._log.finish()


class Display(Callback):
    """A progress bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, every: int) -> None:
        self._console, self._every = console, every
        self._bar: Progress | None = None
        self._begin, self._first = time.perf_counter(), 0

    def started(self, run: Run) -> None:
        self._begin, self._first = time.perf_counter(), run.step
        if run.step:
            says = f"going on at step {run.step} of {run.total_steps} in {run.folder}"
            if run.step == run.total_steps:
                says = f"{run.folder} is finished, at step {run.step}: more with train.steps=, another run with run="
            self._console.print(says, highlight=False, markup=False)
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(run.folder.name, total=run.total_steps, completed=run.step, numbers="")

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        numbers = f"loss {metrics['loss']:.4f}"
        if metrics["kl"] is not None:
            numbers += f"  KL {metrics['kl']:.4f}"
        numbers += f"  {metrics['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, numbers=numbers)
        elif run.step % self._every == 0 or run.step == run.total_steps:
            rate = (time.perf_counter() - self._begin) / (run.step - self._first)
            left = rate * (run.total_steps - run.step)
            self._console.print(f"step {run.step}/{run.total_steps}  {numbers}  {_clock(left)} left", highlight=False)

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self._console.print(f"step {run.step}  {evaluation_line(evaluation)}", highlight=False)

    def ended(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()
        data = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in run.counts.items() if count)
        if data:
            self._console.print(f"data so far: {data}", highlight=False)


class Coverage(Callback):
    """Says once when a teacher with another tokenizer has too little to say."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, False

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        covered = metrics.get("align_bytes", 1.0)
        if covered < LEAST_COVERED and not self._said:
            self._said = True
            self._console.print(
                f"step {run.step}: only {covered:.0%} of the text's bytes are the same in the student's tokens and in the "
                "teacher's, and the rest is not taught: one of the tokenizers changes the text. `potstill align` shows where",
                style="yellow",
                highlight=False,
                markup=False,
            )


class CutPrompts(Callback):
    """Says once when most prompts are too long."""

    def __init__(self, console: Console, num_generations: int) -> None:
        self._console, self._each, self._said = console, num_generations, False

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        cut, written = run.counts.get("cut_prompts", 0), run.counts.get("written_examples", 0) / self._each
        if cut > 0.5 * written and not self._said:
            self._said = True
            self._console.print(
                f"step {run.step}: {cut:,} of {written:,.0f} prompts were cut, for data.max_length leaves no more room "
                "before "
                "rollouts.sampling.max_new_tokens: raise the one or lower the other",
                style="yellow",
                highlight=False,
                markup=False,
            )


class CutTexts(Callback):
    """Says at the end when max_length has lost more than a little of the data."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn

    def ended(self, run: Run) -> None:
        said = lost_in(run.counts)
        if said is not None:
            self._warn(said)


def evaluation_line(evaluation: Mapping[str, Any]) -> str:
    parts = [f"{evaluation['bits_per_byte']:.4f} bits per byte", f"perplexity {evaluation['perplexity']:.2f}"]
    if evaluation["kl"] is not None:
        parts += [f"KL to teacher {evaluation['kl']:.4f}", f"agreement {evaluation['agreement']:.1%}"]
    if "on_policy_reverse_kl" in evaluation:
        parts.append(f"reverse KL on its own text {evaluation['on_policy_reverse_kl']:.4f}")
    return "held-out: " + ", ".join([*parts, f"ECE {evaluation['ece']:.3f}"])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def watchers(recipe: Recipe, console: Console, warn: Warn) -> list[Callback]:
    """What every run is watched by, as the recipe's log section says."""
    makers: list[tuple[bool, Callable[[], Callback]]] = [
        (True, lambda: JsonLines(warn)),
        (recipe.log.tensorboard, lambda: TensorBoard(warn)),
        (recipe.log.wandb is not None, lambda: Wandb(recipe.log.wandb or "", recipe)),
        (True, lambda: CutTexts(warn)),  # they end in reverse: after the last line of the display
        (True, lambda: Display(console, recipe.log.every)),
        (bool(recipe.teachers), lambda: Coverage(console)),
        (recipe.rollouts.writes, lambda: CutPrompts(console, recipe.rollouts.num_generations)),
    ]
    return [make() for wanted, make in makers if wanted]
