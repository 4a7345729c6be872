"""Curves: which there are, thinned so that a long run still makes a small page, and drawn still for readers without JS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from potstill.report import formats
from potstill.report.runs import EVAL_KEYS, STEP_KEYS, Log, Run

POINTS = 600  # of a run, in each curve: more than a panel is wide
POINTS_IN_ALL = 3600  # shared by the runs when there are many
STILL_POINTS = 160  # in a curve of the page without JavaScript
STILL_UNITS: dict[str, Callable[[float], str]] = {
    "percent": formats.percent, "bytes": formats.size, "count": formats.count,
}  # fmt: skip
COLOURS = 6  # page.css has so many; runs beyond them repeat the colours with dashes


@dataclass(frozen=True)
class Panel:
    key: str  # also its id in the page
    group: str
    title: str
    about: str
    lines: tuple[tuple[str, str], ...]  # (column, name); the second and later are drawn dotted
    source: Literal["metrics", "evals"] = "metrics"
    unit: Literal["number", "percent", "bytes", "seconds", "count"] = "number"
    smooth: bool = True  # a schedule or a high-water mark is exact: averaging would only blur it
    only_moving: bool = False  # left out when it never changes


def _one(key: str, group: str, title: str, about: str, **more: Any) -> Panel:
    return Panel(key, group, title, about, ((key, ""),), **more)


LEARNING, WRITTEN, OPTIMISATION = "Learning", "Completion text", "Optimisation"
COST, FURTHER = "Time and memory", "Further metrics"

PANELS: tuple[Panel, ...] = (
    _one("loss", LEARNING, "Loss", "what is minimised, per supervised token"),
    _one("kd", LEARNING, "Distillation loss", "divergence from the teacher, before its weight"),
    _one("ce", LEARNING, "Cross-entropy", "to the text, nats per token, before its weight"),
    _one("kl", LEARNING, "KL to the teacher", "at temperature 1, nats per token"),
    _one("agreement", LEARNING, "Top-1 agreement", "share of tokens with the teacher's first choice", unit="percent"),
    _one(
        "spelled_kl", LEARNING, "KL to the teacher, prefix_marginal",
        "for a teacher with other tokens: to its next token spelled in the student's, at temperature 1",
    ),
    _one(
        "spelled_agreement", LEARNING, "Top-1 agreement, prefix_marginal",
        "for a teacher with other tokens: with its first choice, spelled in the student's", unit="percent",
    ),
    Panel(
        "bits_per_byte", LEARNING, "Bits per byte", "on held-out text", (("bits_per_byte", ""),),
        source="evals", smooth=False,
    ),
    Panel(
        "on_policy_reverse_kl", WRITTEN, "KL on its own text",
        "reverse KL to the teacher on what the student writes, at evaluations",
        (("on_policy_reverse_kl", ""),), source="evals", smooth=False,
    ),
    _one("rollout_length", WRITTEN, "Length", "tokens an answer", unit="count"),
    Panel(
        "rollout_ends", WRITTEN, "How answers end", "line: by an eos, dots: cut at the limit",
        (("completions_ended", "eos"), ("completions_clipped", "cut")), unit="percent",
    ),
    Panel(
        "rollout_distinct", WRITTEN, "Distinct n-grams", "share of different ones; line: pairs, dots: triples",
        (("rollout_distinct_2", "pairs"), ("rollout_distinct_3", "triples")), unit="percent",
    ),
    _one("sampling_logprob_gap", WRITTEN, "Behaviour gap", "between a token's log-probability now and when it was drawn"),
    _one("rollout_staleness", WRITTEN, "Staleness", "steps since the weights that wrote", smooth=False, only_moving=True),
    _one("rollout_tokens_per_second", WRITTEN, "Writing", "tokens a second", unit="count"),
    Panel(
        "entropy", OPTIMISATION, "Entropy", "nats per token; line: student, dots: teacher",
        (("student_entropy", "student"), ("teacher_entropy", "teacher")),
    ),
    _one("grad_norm", OPTIMISATION, "Gradient norm", "before clipping"),
    _one("lr", OPTIMISATION, "Learning rate", "as the schedule sets it", smooth=False),
    _one("temperature", OPTIMISATION, "Temperature", "of both softmaxes", smooth=False, only_moving=True),
    Panel(
        "weights", OPTIMISATION, "Loss weights", "line: distillation, dots: cross-entropy",
        (("kd_weight", "distillation"), ("ce_weight", "cross-entropy")), smooth=False, only_moving=True,
    ),
    _one("tokens_per_second", COST, "Tokens per second", "supervised tokens", unit="count"),
    _one("seconds_data", COST, "Data", "seconds a step", unit="seconds"),
    _one("seconds_teacher", COST, "Teacher", "seconds a step", unit="seconds"),
    _one("seconds_student", COST, "Student", "seconds a step, forward and backward", unit="seconds"),
    _one("seconds_optimizer", COST, "Optimizer", "seconds a step", unit="seconds"),
    _one("peak_memory_bytes", COST, "Peak memory", "so far", unit="bytes", smooth=False),
)  # fmt: skip


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels that have something to show, then one for every further column of numbers that some run logged."""
    shown = [panel for panel in PANELS if _has_data(panel, runs)]
    further = sorted({key for run in runs for key in run.metrics.columns} - STEP_KEYS)
    shown += [_one(key, FURTHER, key, "") for key in further]
    further = sorted({key for run in runs for key in run.evals.columns} - EVAL_KEYS)
    shown += [
        Panel(f"evals.{key}", FURTHER, key, "at evaluations", ((key, ""),), source="evals", smooth=False)
        for key in further
    ]
    return [panel for panel in shown if _has_data(panel, runs)]


def _has_data(panel: Panel, runs: Sequence[Run]) -> bool:
    columns = [values[~np.isnan(values)] for _, _, _, values in _columns(panel, runs)]
    odd = any(key in log_of(run, panel).odd for run in runs for key, _ in panel.lines)
    if panel.only_moving and not any(len(values) and np.ptp(values) > 0 for values in columns):
        return odd
    return odd or any(len(values) for values in columns)


def log_of(run: Run, panel: Panel) -> Log:
    return run.evals if panel.source == "evals" else run.metrics


def _columns(
    panel: Panel, runs: Sequence[Run]
) -> Iterator[tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """(run, line, steps, values) of every curve in the panel."""
    for number, run in enumerate(runs):
        log = log_of(run, panel)
        for line, (key, _) in enumerate(panel.lines):
            if key in log.columns:
                yield number, line, log.steps, log.columns[key]


def payload(runs: Sequence[Run], shown: Sequence[Panel]) -> dict[str, Any]:
    """What page.js draws from."""
    limit = max(60, min(POINTS, POINTS_IN_ALL // len(runs)))
    keys = {source: [k for p in shown if p.source == source for k, _ in p.lines] for source in ("metrics", "evals")}
    return {
        "panels": [
            {
                "key": p.key, "title": p.title, "source": p.source, "unit": p.unit, "smooth": p.smooth,
                "lines": [{"key": key, "name": name} for key, name in p.lines],
            }
            for p in shown
        ],
        "runs": [
            {
                "label": run.label,
                "metrics": thinned(run.metrics, keys["metrics"], limit),
                "evals": thinned(run.evals, keys["evals"], limit),
            }
            for run in runs
        ],
    }  # fmt: skip


def thinned(log: Log, keys: Sequence[str], limit: int) -> dict[str, Any]:
    """The columns at about `limit` steps, the first and the last among them; whole if they are not twice as long.

    Each kept step has its true value and, when it stands for several steps, their mean, least and greatest: smoothing
    goes over the means, and no spike is lost.
    """
    starts = _starts(len(log.steps), limit if len(log.steps) > 2 * limit else 2 * limit)
    ends = np.append(starts[1:], len(log.steps)) - 1 if len(starts) else starts
    columns: dict[str, Any] = {}
    for key in keys:
        if key not in log.columns:
            continue
        values = log.columns[key]
        columns[key] = {"value": _short(values[ends])}
        if len(starts) < len(log.steps):
            columns[key] |= {
                "mean": _short(_means(values, starts)),
                "low": _short(np.fmin.reduceat(values, starts)),
                "high": _short(np.fmax.reduceat(values, starts)),
            }
    steps = log.steps[ends]
    return {"steps": steps.tolist(), "count": (ends - starts + 1).tolist(), "columns": columns}


def _starts(length: int, limit: int) -> npt.NDArray[np.int64]:
    """Where each bucket begins. The first holds one step, so that the very first value is kept as it is."""
    if length <= limit:
        return np.arange(length)
    return np.append(0, np.linspace(1, length, limit, dtype=np.int64)[:-1])


def _means(values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    there = ~np.isnan(values)
    counts = np.add.reduceat(there.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(there, values, 0.0), starts)
    means: npt.NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return means


def _short(values: npt.NDArray[np.float64]) -> list[float | int | None]:
    """Six digits are more than a curve shows. JSON has no NaN: null is a gap."""
    rounded = (None if math.isnan(v) else float(f"{v:.6g}") for v in values.tolist())
    return [int(v) if v is not None and v == int(v) and abs(v) < 1e15 else v for v in rounded]


def notes(panel: Panel, runs: Sequence[Run]) -> list[str]:
    """What the panel cannot draw: values that are not numbers, counted."""
    said = []
    for run in runs:
        for key, name in panel.lines:
            odd = log_of(run, panel).odd.get(key)
            if odd is not None:
                whose = " ".join(part for part in (run.label, name) if part)
                values = "1 value is" if len(odd) == 1 else f"{len(odd):,} values are"
                said.append(f"{whose}: {values} not finite, first at step {odd[0]:,}")
    return said


def still_svg(panel: Panel, runs: Sequence[Run]) -> str:
    """The panel without JavaScript: means over the steps, with the ends of both axes written out."""
    width, height, left, bottom = 380, 200, 62, 20
    drawn = [
        (run, line, steps[starts], _means(values, starts))
        for run, line, steps, values in _columns(panel, runs)
        if len(starts := _starts(len(steps), STILL_POINTS))
    ]
    drawn = [curve for curve in drawn if not np.isnan(curve[3]).all()]
    if not drawn:
        return ""
    x0, x1 = min(int(c[2][0]) for c in drawn), max(int(c[2][-1]) for c in drawn)
    y0, y1 = (float(pick([pick(c[3][~np.isnan(c[3])]) for c in drawn])) for pick in (np.min, np.max))
    across, down = (width - left - 6) / max(x1 - x0, 1), (height - bottom - 12) / ((y1 - y0) or 1.0)
    show = STILL_UNITS.get(panel.unit, "{:.4g}".format)
    paths = []
    for run, line, steps, values in drawn:
        there = ~np.isnan(values)
        points = " ".join(
            f"{left + (x - x0) * across:.1f},{height - bottom - (y - y0) * down:.1f}"
            for x, y in zip(steps[there].tolist(), values[there].tolist(), strict=True)
        )
        paths.append(f'<polyline class="line {line_class(run, line)}" points="{points}"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(panel.title)} over the steps">'
        f'<g class="ticks"><text x="{left - 6}" y="16" text-anchor="end">{show(y1)}</text>'
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">{show(y0)}</text>'
        f'<text x="{left}" y="{height - 4}">{x0:,}</text>'
        f'<text x="{width - 6}" y="{height - 4}" text-anchor="end">step {x1:,}</text></g>{"".join(paths)}</svg>'
    )


def line_class(run: int, line: int = 0) -> str:
    """Colour by run, dashes when the colours have been used up, dots for a panel's second line."""
    dash = " dots" if line else f" dash{min(run // COLOURS, 2)}" if run >= COLOURS else ""
    return f"s{run % COLOURS}{dash}"
