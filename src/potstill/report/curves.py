"""Curves: thinned so that a long run still makes a small page, and drawn still for readers without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.report import formats
from potstill.report.panels import EVALUATED, FURTHER, KEYS, PANELS, Panel, one
from potstill.report.runs import Log, Run

POINTS = 600  # of a run, in each curve: more than a panel is wide
POINTS_IN_ALL = 3600  # shared by the runs when there are many
STILL_POINTS = 160  # in a curve of the page without JavaScript
STILL_UNITS: dict[str, Callable[[float], str]] = {
    "percent": formats.percent, "bytes": formats.size, "count": formats.count,
}  # fmt: skip
COLOURS = 6  # page.css has so many; runs beyond them repeat the colours with dashes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels that have something to show, then one for every further column of numbers that some run logged."""
    shown = list(PANELS)
    shown += [
        one(key, FURTHER, key, "") for key in sorted({k for run in runs for k in run.metrics.columns} - KEYS["metrics"])
    ]
    for key in sorted({key for run in runs for key in run.evals.columns} - KEYS["evals"]):
        shown.append(Panel(f"evals.{key}", FURTHER, key, "at evaluations", ((key, ""),), **EVALUATED))
    return [panel for panel in shown if _has_data(panel, runs)]


def _has_data(panel: Panel, runs: Sequence[Run]) -> bool:
    if any(key in log_of(run, panel).odd for run in runs for key, _ in panel.lines):
        return True
    columns = [values[~np.isnan(values)] for _, _, _, values in _columns(panel, runs)]
    return any(len(values) and (not panel.only_moving or np.ptp(values) > 0) for values in columns)


def log_of(run: Run, panel: Panel) -> Log:
    return run.evals if panel.source == "evals" else run.metrics


def _columns(panel: Panel, runs: Sequence[Run]) -> Iterator[tuple[int, int, Ints, Floats]]:
    """(run, line, steps, values) of every curve in the panel."""
    for number, run in enumerate(runs):
        log = log_of(run, panel)
        for line, (key, _) in enumerate(panel.lines):
            if key in log.columns:
                yield number, line, log.steps, log.columns[key]


def payload(runs: Sequence[Run], shown: Sequence[Panel]) -> dict[str, Any]:
    """What page.js draws from."""
    limit = max(60, min(POINTS, POINTS_IN_ALL // len(runs)))
    keys = {source: [k for p in shown if p.source == source for k, _ in p.lines] for source in KEYS}
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


def _starts(length: int, limit: int) -> Ints:
    """Where each bucket begins. The first holds one step, so that the very first value is kept as it is."""
    if length <= limit:
        return np.arange(length)
    return np.append(0, np.linspace(1, length, limit, dtype=np.int64)[:-1])


def _means(values: Floats, starts: Ints) -> Floats:
    there = ~np.isnan(values)
    counts = np.add.reduceat(there.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(there, values, 0.0), starts)
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return means


def _short(values: Floats) -> list[float | int | None]:
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


def still(panel: Panel, runs: Sequence[Run]) -> dict[str, Any] | None:
    """The panel without JavaScript: means over the steps, and the ends of both axes written out; None if it is empty."""
    width, height, left, bottom = 380, 200, 62, 20
    drawn = [
        (run, line, steps[starts], _means(values, starts))
        for run, line, steps, values in _columns(panel, runs)
        if len(starts := _starts(len(steps), STILL_POINTS))
    ]
    drawn = [curve for curve in drawn if not np.isnan(curve[3]).all()]
    if not drawn:
        return None
    x0, x1 = min(int(c[2][0]) for c in drawn), max(int(c[2][-1]) for c in drawn)
    y0, y1 = min(float(np.nanmin(c[3])) for c in drawn), max(float(np.nanmax(c[3])) for c in drawn)
    x_scale, y_scale = (width - left - 6) / max(x1 - x0, 1), (height - bottom - 12) / ((y1 - y0) or 1.0)
    show = STILL_UNITS.get(panel.unit, "{:.4g}".format)
    lines = []
    for run, line, steps, values in drawn:
        there = ~np.isnan(values)
        points = (
            f"{left + (x - x0) * x_scale:.1f},{height - bottom - (y - y0) * y_scale:.1f}"
            for x, y in zip(steps[there].tolist(), values[there].tolist(), strict=True)
        )
        lines.append((line_class(run, line), " ".join(points)))
    ends = {"low": show(y0), "high": show(y1), "first": f"{x0:,}", "last": f"{x1:,}"}
    return {"width": width, "height": height, "left": left, "bottom": bottom, "lines": lines, **ends}


def line_class(run: int, line: int = 0) -> str:
    """Colour by run, dashes when the colours have been used up, dots for a panel's second line."""
    dash = " dots" if line else f" dash{min(run // COLOURS, 2)}" if run >= COLOURS else ""
    return f"s{run % COLOURS}{dash}"
