"""What the page says without any script: runs, evaluations, samples, recipes. Plain values; page.html has the markup."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potstill.report import formats
from potstill.report.runs import Run

EVALS_SHOWN = 200  # of each run, in the table of every evaluation
PHASES = ("data", "teacher", "student", "optimizer")
SUMMARY = ("Run", "Steps", "Tokens", "Time", "Tokens / s", "Final loss", "Peak memory")


@dataclass(frozen=True)
class Score:
    key: str
    title: str
    show: Callable[[float | None], str]
    more_is_better: bool = False
    of: tuple[str, ...] = ("tokens", "bytes")  # what must have been scored alike for two values to be compared


SCORES = (
    Score("bits_per_byte", "Bits per byte", formats.fixed, of=("bytes",)),
    Score("perplexity", "Perplexity", formats.perplexity),
    Score("kl", "KL to teacher", formats.fixed),
    Score("agreement", "Top-1 agreement", formats.percent, more_is_better=True),
    Score("ece", "ECE", formats.fixed),
)


def steps(run: Run) -> tuple[str, str]:
    """How many steps were taken, and of how many, where some are left."""
    taken = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0
    train = run.recipe.get("train")
    planned = train.get("steps") if isinstance(train, Mapping) else None
    # Steps may be counted from 0 or from 1: one short of the plan is the plan.
    return f"{taken:,}", f"of {planned:,}" if isinstance(planned, int) and taken < planned - 1 else ""


def summary(run: Run) -> list[str]:
    """The cells of a run, as in SUMMARY, after its name and its steps."""
    seconds = sum(run.metrics.total(f"seconds_{phase}") for phase in PHASES)
    tokens = run.metrics.last("tokens")
    return [
        formats.count(tokens),
        formats.duration(seconds or None),
        formats.count(tokens / seconds if tokens and seconds else None),
        formats.fixed(run.metrics.last("loss")),
        formats.size(run.metrics.last("peak_memory_bytes")),
    ]


def left_out(runs: Sequence[Run]) -> list[str]:
    """Lines of the logs that the page does not count."""
    said = []
    logs = ((run.label, getattr(run, name), f"{name}.jsonl") for run in runs for name in ("metrics", "evals"))
    for label, log, file in logs:
        if log.unreadable:
            first, several = log.unreadable[0], len(log.unreadable) > 1
            lines = f"{len(log.unreadable):,} lines, from line {first} on," if several else f"line {first}"
            said.append(f"{label}: {lines} of {file} cannot be read and {'are' if several else 'is'} left out")
        if log.replaced:
            lines = "1 line" if log.replaced == 1 else f"{log.replaced:,} lines"
            said.append(f"{label}: {lines} of {file} left out, of steps that were taken again after a resume")
    return said


def time_shares(runs: Sequence[Run]) -> list[tuple[int, dict[str, float], str]]:
    """What each run's time went into, as shares and in words, where that is known."""
    found = []
    for number, run in enumerate(runs):
        seconds = {phase: run.metrics.total(f"seconds_{phase}") for phase in PHASES}
        if whole := sum(seconds.values()):
            shares = {phase: part / whole for phase, part in seconds.items()}
            found.append((number, shares, ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items())))
    return found


def best_of(score: Score, runs: Sequence[Run]) -> float | None:
    """The best value, where there are several and they are of the same text; and, per token, of the same tokens of it."""
    measured = _measured(score, runs)
    if len({value for value, _ in measured}) < 2 or len({scored for _, scored in measured}) > 1:
        return None
    return (max if score.more_is_better else min)(value for value, _ in measured)


def _measured(score: Score, runs: Sequence[Run]) -> list[tuple[float, tuple[float | None, ...]]]:
    """The runs' values, each with how much was scored for it."""
    found = [(run.evals.last(score.key), tuple(run.evals.last(key) for key in score.of)) for run in runs]
    return [(value, scored) for value, scored in found if value is not None and not math.isnan(value)]


def not_compared(runs: Sequence[Run]) -> str | None:
    """Why there is no best."""
    counts = [{scored for _, scored in _measured(score, runs)} for score in SCORES]
    if len(counts[0]) > 1:
        return "These runs were scored on different amounts of text, so none is called the best."
    if any(len(scored) > 1 for scored in counts):
        return (
            "These runs have different tokenizers: only bits per byte compares them. The other values are means over tokens, "
            "which are not the same."
        )
    return None


def last_evaluation(run: Run, runs: Sequence[Run]) -> list[tuple[str, bool]]:
    """The run's value of each score, and whether it is the best."""
    values = [(score, run.evals.last(score.key)) for score in SCORES]
    return [(score.show(value), value is not None and value == best_of(score, runs)) for score, value in values]


def evaluations(run: Run) -> tuple[int, list[list[str]]]:
    """The last evaluations of a run, with their steps, and how many earlier ones there are."""
    log = run.evals
    first = max(0, len(log.steps) - EVALS_SHOWN)
    rows = [
        [f"{log.steps[at]:,}", *(score.show(log.at(score.key, at)) for score in SCORES)]
        for at in range(first, len(log.steps))
    ]
    return first, rows


def samples(runs: Sequence[Run]) -> list[tuple[str, dict[int, tuple[str, str]]]]:
    """Each prompt with the runs' texts, as what repeats the prompt and what is new. A prompt that a run has twice is two."""
    prompts: dict[tuple[str, int], dict[int, tuple[str, str]]] = {}
    for number, run in enumerate(runs):
        seen: Counter[str] = Counter()
        for prompt, text in run.samples:
            seen[prompt] += 1
            # Some writers give the continuation alone, some the whole text.
            told = prompt if text.startswith(prompt) else ""
            prompts.setdefault((prompt, seen[prompt]), {})[number] = told, text.removeprefix(told)
    return [(prompt, answers) for (prompt, _), answers in prompts.items()]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """The keys in which the recipes differ, with each run's value. `run` is the folder, which differs by its nature."""
    flat = [dotted(run.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    rows = [[key, *(recipe.get(key, formats.MISSING) for recipe in flat)] for key in keys if key != "run"]
    return [row for row in rows if len(set(row[1:])) > 1]


def dotted(value: Any, prefix: str = "") -> dict[str, str]:
    """`train.lr` → its value as text. A list of plain values is one value; a list of sections has their places as keys."""
    if isinstance(value, Mapping) and value:
        parts = {f"{prefix}.{key}" if prefix else str(key): sub for key, sub in value.items()}
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        parts = {f"{prefix}[{at}]": sub for at, sub in enumerate(value)}
    else:
        return {prefix: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)}
    return {key: text for name, sub in parts.items() for key, text in dotted(sub, name).items()}
