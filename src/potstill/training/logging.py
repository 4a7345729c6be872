"""Those who watch a run: metrics.jsonl, TensorBoard, Weights & Biases, and the bar or the lines a person sees."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from potstill.config import Recipe
from potstill.data import lost_in
from potstill.extras import missing_extra
from potstill.files import could_not_write, json_lines, open_log, write_bytes
from potstill.parallel.agree import raise_together, tried
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LEAST_COVERED = 0.9  # of the bytes, below which a user should know
METRICS, EVALS = "metrics.jsonl", "evals.jsonl"

Warn = Callable[[str], None]


class JsonLines(Callback):
    """metrics.jsonl, one object per step, and evals.jsonl, one per evaluation."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn

    def started(self, run: Run) -> None:
        keep_until(run.folder, run.step, self._warn)
        self._metrics, self._evals = open_log(run.folder / METRICS), open_log(run.folder / EVALS)

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


def keep_until(folder: Path, step: int, warn: Warn) -> None:
    """Drop the logs' lines of steps that will be taken again after a resume. Those of an attempt that had no checkpoint yet
    are kept under another name."""
    logs = {name: _good_lines(folder / name, warn) for name in (METRICS, EVALS)}
    if step == 0 and any(logs.values()):
        _set_aside(folder, {name: lines for name, lines in logs.items() if lines}, warn)
    for name, lines in logs.items():
        if (folder / name).exists():
            write_bytes(folder / name, b"".join(line for line, taken in lines if taken <= step))


def _good_lines(path: Path, warn: Warn) -> list[tuple[bytes, int]]:
    """The lines of a log with their steps. Those that cannot be read are set aside."""
    damaged = path.with_name(f"{path.name}.damaged")
    for log in (path, damaged):
        if log.is_symlink():
            raise PotstillError(
                f"{log} is a link, and may lead out of the run: remove it, or put a copy of the file in its place"
            )
    good, bad = [], {}
    for number, (line, record) in enumerate(json_lines(path), 1):
        line = line.removesuffix(b"\n") + b"\n"  # the last line of a file may lack its end
        if record is None:
            bad[number] = line
        else:
            good.append((line, record["step"]))
    if bad:
        before = damaged.read_bytes() if damaged.exists() else b""
        write_bytes(damaged, before + b"".join(bad.values()))
        first = next(iter(bad))
        which = f"line {first} is" if len(bad) == 1 else f"{len(bad)} lines, from line {first} on, are"
        warn(f"{path}: {which} damaged and set aside in {damaged.name}")
    return good


def _set_aside(folder: Path, logs: Mapping[str, list[tuple[bytes, int]]], warn: Warn) -> None:
    """The logs of an attempt that had no checkpoint yet, as metrics.1.jsonl and so on; said once for all of them."""
    numbered = ({name: folder / name.replace(".", f".{number}.") for name in logs} for number in count(1))
    asides = next(paths for paths in numbered if not any(path.exists() for path in paths.values()))
    for name, aside in asides.items():
        write_bytes(aside, b"".join(line for line, _ in logs[name]))
    last = max(taken for lines in logs.values() for _, taken in lines)
    steps = f"steps 1–{last}" if last > 1 else "step 1"
    are = "is" if len(logs) == 1 else "are"
    warn(
        f"{steps} of an earlier attempt had no checkpoint: starting again at step 1; its {' and '.join(logs)} {are} kept as "
        f"{' and '.join(map(str, asides.values()))}"
    )


def _numbers(section: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{section}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


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
            for name, value in _numbers(section, record).items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, record["step"])

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
            raise missing_extra("log.wandb", "wandb") from None
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
        self._log.log(_numbers("train", metrics), step=metrics["step"])

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self._log.log(_numbers("eval", evaluation), step=evaluation["step"])

    def ended(self, run: Run) -> None:
        self._log.finish()


class Display(Callback):
    """A progress bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, every: int) -> None:
        self._console, self._every = console, every
        self._bar: Progress | None = None

    def started(self, run: Run) -> None:
        self._begin, self._first = time.perf_counter(), run.step
        if run.step == run.total_steps:
            self._print(f"{run.folder} is finished, at step {run.step}: more with train.steps=, another run with run=")
        elif run.step:
            self._print(f"going on at step {run.step} of {run.total_steps} in {run.folder}")
        if self._console.is_terminal:
            bar = (
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                "{task.fields[numbers]}",
                TimeRemainingColumn(),
            )
            self._bar = Progress(*bar, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(run.folder.name, total=run.total_steps, completed=run.step, numbers="")

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        kl = "" if metrics["kl"] is None else f"  KL {metrics['kl']:.4f}"
        numbers = f"loss {metrics['loss']:.4f}{kl}  {metrics['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, numbers=numbers)
        elif run.step % self._every == 0 or run.step == run.total_steps:
            rate = (time.perf_counter() - self._begin) / (run.step - self._first)
            left = timedelta(seconds=round(rate * (run.total_steps - run.step)))
            self._print(f"step {run.step}/{run.total_steps}  {numbers}  {left} left")

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        parts = [f"{evaluation['bits_per_byte']:.4f} bits per byte", f"perplexity {evaluation['perplexity']:.2f}"]
        if evaluation["kl"] is not None:
            parts += [f"KL to teacher {evaluation['kl']:.4f}", f"agreement {evaluation['agreement']:.1%}"]
        if "on_policy_reverse_kl" in evaluation:
            parts.append(f"reverse KL on its own text {evaluation['on_policy_reverse_kl']:.4f}")
        self._print(f"step {run.step}  held-out: {', '.join(parts)}, ECE {evaluation['ece']:.3f}")

    def ended(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()
        data = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in run.counts.items() if count)
        if data:
            self._print(f"data so far: {data}")

    def _print(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False)


class TextWarnings(Callback):
    """Warns of text that teaches less than its user thinks: once each, when it is noticed or at the end."""

    def __init__(self, warn: Warn, num_generations: int = 1) -> None:
        self._warn, self._generations = warn, num_generations
        self._warned: set[str] = set()

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        covered = metrics.get("align_bytes", 1.0)
        if covered < LEAST_COVERED:
            self._once(
                "coverage",
                f"step {run.step}: only {covered:.0%} of the text's bytes are the same in the student's tokens and in the "
                "teacher's, and the rest is not taught: one of the tokenizers changes the text. `potstill align` shows where",
            )
        cut, written = run.counts.get("cut_prompts", 0), run.counts.get("written_examples", 0) / self._generations
        if cut > 0.5 * written:
            self._once(
                "prompts",
                f"step {run.step}: {cut:,} of {written:,.0f} prompts were cut, for data.max_length leaves no more room before "
                "rollouts.sampling.max_new_tokens: raise the one or lower the other",
            )

    def ended(self, run: Run) -> None:
        if said := lost_in(run.counts):  # max_length has lost more than a little of the data
            self._warn(said)

    def _once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._warn(message)


def watchers(recipe: Recipe, console: Console, warn: Warn) -> list[Callback]:
    """What every run is watched by, as the recipe's log section says. They end in reverse."""
    return [
        JsonLines(warn),
        *([TensorBoard(warn)] if recipe.log.tensorboard else []),
        *([Wandb(recipe.log.wandb, recipe)] if recipe.log.wandb is not None else []),
        TextWarnings(warn, recipe.rollouts.num_generations),  # after the last line of the display
        Display(console, recipe.log.every),
    ]


def tell(watching: Sequence[Callback], what: Callable[[Callback], None]) -> None:
    """Those who watch are on the first rank; a disk that is full there is everybody's trouble."""
    raise_together(told(watching, what))


def told(watching: Sequence[Callback], what: Callable[[Callback], None]) -> Exception | None:
    """As `tell`, for a caller who asks all ranks whether it went well."""

    def work() -> None:
        for watcher in watching:
            what(watcher)

    return tried(work, PotstillError)[1]
