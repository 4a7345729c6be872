"""What the page says without any script: runs, evaluations, samples, recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from potstill.report import formats
from potstill.report.curves import line_class
from potstill.report.runs import Log, Run

EVALS_SHOWN = 200  # of each run, in the table of every evaluation


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
PHASES = (("seconds_data", "data"), ("seconds_teacher", "teacher"), ("seconds_student", "student"),
          ("seconds_optimizer", "optimizer"))  # fmt: skip


def swatch(run: int) -> str:
    line = f'<path class="line {line_class(run)}" d="M1 5H21"/>'
    return f'<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], css: str = "numbers") -> str:
    """Cells are HTML already. The box around it scrolls by itself on a narrow screen, also by keyboard."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{css}">'
        f'<caption class="unseen">{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _named(run: int, label: str) -> str:
    return f'<span class="name">{swatch(run)}<span>{escape(label)}</span></span>'


def summary(runs: Sequence[Run]) -> str:
    rows = []
    for number, run in enumerate(runs):
        seconds = sum(run.metrics.total(key) for key, _ in PHASES)
        tokens = run.metrics.last("tokens")
        rows.append([
            _named(number, run.label) + f'<span class="folder">{escape(str(run.folder))}</span>',
            _steps(run),
            formats.count(tokens),
            formats.duration(seconds or None),
            formats.count(tokens / seconds if tokens and seconds else None),
            formats.fixed(run.metrics.last("loss")),
            formats.size(run.metrics.last("peak_memory_bytes")),
        ])  # fmt: skip
    head = ["Run", "Steps", "Tokens", "Time", "Tokens / s", "Final loss", "Peak memory"]
    said = [note for run in runs for log, file in ((run.metrics, "metrics"), (run.evals, "evals"))
            for note in _left_out(run, log, file)]  # fmt: skip
    notes = "".join(f"<li>{escape(note)}</li>" for note in said)
    return (
        table("Runs", head, rows)
        + '<p class="hint">Time is the sum of the steps; evaluations and checkpoints are not in it.</p>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _steps(run: Run) -> str:
    taken = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0
    train = run.recipe.get("train")
    planned = train.get("steps") if isinstance(train, Mapping) else None
    # Steps may be counted from 0 or from 1: one short of the plan is the plan.
    if isinstance(planned, int) and taken < planned - 1:
        return f'{taken:,} <span class="of">of {planned:,}</span>'
    return f"{taken:,}"


def _left_out(run: Run, log: Log, file: str) -> list[str]:
    said = []
    if log.unreadable:
        first, several = log.unreadable[0], len(log.unreadable) > 1
        lines = f"{len(log.unreadable):,} lines, from line {first} on," if several else f"line {first}"
        said.append(f"{run.label}: {lines} of {file}.jsonl cannot be read and {'are' if several else 'is'} left out")
    if log.replaced:
        lines = "1 line" if log.replaced == 1 else f"{log.replaced:,} lines"
        said.append(f"{run.label}: {lines} of {file}.jsonl left out, of steps that were taken again after a resume")
    return said


def time_shares(runs: Sequence[Run]) -> str:
    """A bar a run: what its time went into."""
    bars = []
    for number, run in enumerate(runs):
        seconds = [(name, run.metrics.total(key)) for key, name in PHASES]
        whole = sum(part for _, part in seconds)
        if not whole:
            continue
        said = ", ".join(f"{name} {part / whole:.0%}" for name, part in seconds)
        pieces = "".join(
            f'<span class="share {name}" style="flex-grow:{part / whole:.4f}"><span>{name}</span></span>'
            for name, part in seconds
            if part / whole >= 0.001
        )
        bars.append(
            f'<dt>{_named(number, run.label)}</dt><dd><div class="shares" role="img" aria-label="{said}">{pieces}</div>'
            f'<p class="hint shares-said">{said}</p></dd>'
        )
    return f'<h3>Where the time went</h3><dl class="time">{"".join(bars)}</dl>' if bars else ""


def evaluation(runs: Sequence[Run]) -> str:
    if not any(len(run.evals.steps) for run in runs):
        return '<p class="empty">No evaluation yet. Give the recipe an <code>eval</code> section to have one.</p>'
    rows = [
        [
            _named(number, run.label),
            f"{run.evals.steps[-1]:,}" if len(run.evals.steps) else formats.MISSING,
            *(_scored(score, runs, number) for score in SCORES),
        ]
        for number, run in enumerate(runs)
    ]
    arrows = [
        f'{s.title} <span class="way">{"↑ more" if s.more_is_better else "↓ less"} is better</span>' for s in SCORES
    ]
    every = "".join(_every_evaluation(run) for run in runs if len(run.evals.steps) > 1)
    last = table("The last evaluation of every run", ["Run", "Step", *arrows], rows)
    return last + _not_compared(runs) + every


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


def _not_compared(runs: Sequence[Run]) -> str:
    """Why there is no best."""
    counts = [{scored for _, scored in _measured(score, runs)} for score in SCORES]
    if not any(len(scored) > 1 for scored in counts):
        return ""
    if len(counts[0]) > 1:
        return '<p class="hint">These runs were scored on different amounts of text, so none is called the best.</p>'
    return (
        '<p class="hint">These runs have different tokenizers: only bits per byte compares them. The other values are means '
        "over tokens, which are not the same.</p>"
    )


def _scored(score: Score, runs: Sequence[Run], number: int) -> str:
    value = runs[number].evals.last(score.key)
    shown = score.show(value)
    if value is None or value != best_of(score, runs):
        return shown
    mark = '<span class="mark" title="best">★</span><span class="unseen"> best</span>'
    return f'<strong class="best">{shown}{mark}</strong>'


def _every_evaluation(run: Run) -> str:
    log = run.evals
    first = max(0, len(log.steps) - EVALS_SHOWN)
    rows = []
    for at in range(first, len(log.steps)):
        cells = [f"{log.steps[at]:,}"]
        for score in SCORES:
            value = float(log.columns[score.key][at]) if score.key in log.columns else math.nan
            odd = log.steps[at] in log.odd.get(score.key, ())
            cells.append(score.show(None if math.isnan(value) and not odd else value))
        rows.append(cells)
    left_out = f'<p class="hint">The first {first:,} are not listed; the curve shows them.</p>' if first else ""
    head = ["Step", *(score.title for score in SCORES)]
    return (
        f"<details><summary>All {len(log.steps):,} evaluations of {escape(run.label)}</summary>"
        f"{table(f'Evaluations of {run.label}', head, rows)}{left_out}</details>"
    )


def samples(runs: Sequence[Run]) -> str:
    """Side by side per prompt. A prompt that a run has twice is two prompts."""
    prompts: dict[tuple[str, int], dict[int, str]] = {}
    for number, run in enumerate(runs):
        seen: dict[str, int] = {}
        for sample in run.samples:
            seen[sample.prompt] = seen.get(sample.prompt, 0) + 1
            prompts.setdefault((sample.prompt, seen[sample.prompt]), {})[number] = sample.text
    if not prompts:
        return '<p class="empty">No samples. List beginnings under <code>eval.prompts</code> to have some.</p>'
    return "".join(
        f'<section class="sample"><h3 dir="auto"><span class="unseen">Prompt: </span>{_text(prompt)}</h3><div class="answers">'
        + "".join(_answer(number, runs[number], prompt, text) for number, text in answers.items())
        + "</div></section>"
        for (prompt, _), answers in prompts.items()
    )


def _answer(number: int, run: Run, prompt: str, text: str) -> str:
    # Some writers give the continuation alone, some the whole text.
    told, new = (prompt, text[len(prompt) :]) if prompt and text.startswith(prompt) else ("", text)
    body = (f'<span class="told">{_text(told)}</span>' if told else "") + _text(new)
    return (
        f'<article><h4>{_named(number, run.label)}<span class="about">step {run.samples_step:,}</span></h4>'
        f'<p class="text" dir="auto">{body or "<em>nothing</em>"}</p></article>'
    )


def _text(text: str) -> str:
    # A NUL is not allowed in HTML, and a parser would drop it.
    return escape(text.replace("\0", "�"))


def recipes(runs: Sequence[Run]) -> str:
    whole = "".join(
        f"<details><summary>recipe.yaml of {escape(run.label)}</summary>"
        f'<pre tabindex="0"><code>{_text(run.recipe_text)}</code></pre></details>'
        for run in runs
    )
    return (_differences(runs) if len(runs) > 1 else "") + whole


def _differences(runs: Sequence[Run]) -> str:
    flat = [dotted(run.recipe) for run in runs]
    keys = list(dict.fromkeys(key for recipe in flat for key in recipe))
    # `run` is the folder, which differs by its nature and stands in the table of runs.
    differ = [key for key in keys if key != "run" and any(flat[0].get(key) != recipe.get(key) for recipe in flat)]
    if not differ:
        return '<p class="empty">The recipes are equal in every key but <code>run</code>.</p>'
    head = ["Key", *(_named(number, run.label) for number, run in enumerate(runs))]
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<code>{_text(recipe.get(key, formats.MISSING))}</code>" for recipe in flat)]
        for key in differ
    ]
    return table("Keys in which the recipes differ", head, rows, css="keys")


def dotted(value: Any, prefix: str = "") -> dict[str, str]:
    """`train.lr` → its value as text. A list of plain values is one value; a list of sections has their places as keys."""
    if isinstance(value, Mapping) and value:
        return {
            k: v
            for key, sub in value.items()
            for k, v in dotted(sub, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        return {k: v for at, sub in enumerate(value) for k, v in dotted(sub, f"{prefix}[{at}]").items()}
    return {prefix: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)}
