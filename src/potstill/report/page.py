"""The page: tables, samples and recipes as plain HTML, the curves' numbers as JSON, style and script inlined."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from potstill.files import write_text
from potstill.report import curves, formats, tables
from potstill.report.runs import Run, read_runs
from potstill.types import PotstillError


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page about the run folders to `out`, and return `out`."""
    page = _page(read_runs([Path(run) for run in runs]))
    out = Path(out)
    if out.is_dir():
        raise PotstillError(f"{out} is a folder: name a file for the page, such as {out / 'report.html'}")
    # Models emit half surrogate pairs; they cannot be written as UTF-8 and become question marks.
    page = page.encode("utf-8", "replace").decode("utf-8")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise PotstillError(f"cannot write {out}: {error.strerror}; choose another place for the page") from None
    return out


def _page(runs: list[Run]) -> str:
    shown = curves.panels(runs)
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    return _filled(
        _part("page.html"),
        {
            # The one script may run because its hash is named: text that broke out of its place still could not run.
            "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
            "base-uri 'none'; form-action 'none'",
            "title": escape(title),
            "subtitle": escape(_subtitle(runs)),
            "style": _part("page.css"),
            "script": script,
            "data": embedded(curves.payload(runs, shown)),
            "runs": tables.summary(runs) + tables.time_shares(runs),
            "evaluation": tables.evaluation(runs),
            "legend": _legend(runs),
            "curves": _curves(shown, runs),
            "samples": tables.samples(runs),
            "recipes": tables.recipes(runs),
        },
    )


def _part(name: str) -> str:
    return files("potstill.report").joinpath(name).read_text(encoding="utf-8")


def _filled(template: str, values: dict[str, str]) -> str:
    # One pass, so that nothing in a value is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def embedded(value: Any) -> str:
    """JSON for a <script> element: without `<` in it, no text can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _subtitle(runs: list[Run]) -> str:
    tokens = sum(run.metrics.last("tokens") or 0 for run in runs)
    parts = [f"{formats.count(tokens)} supervised tokens"] if tokens else []
    bits = tables.SCORES[0]
    alone, best = runs[0].evals.last(bits.key), tables.best_of(bits, runs)
    if len(runs) == 1 and alone is not None and not math.isnan(alone):
        parts.append(f"{formats.fixed(alone)} bits per byte")
    if best is not None:
        whose = next(run.label for run in runs if run.evals.last(bits.key) == best)
        parts.append(f"best bits per byte {formats.fixed(best)}, {whose}")
    return " · ".join(parts) or "No step has been logged yet"


def _legend(runs: list[Run]) -> str:
    box = '<input type="checkbox" class="needs-js" data-run="{}" checked>' if len(runs) > 1 else ""
    return "".join(
        f'<label class="run">{box.format(number)}{tables.swatch(number)}<span>{escape(run.label)}</span></label>'
        for number, run in enumerate(runs)
    )


def _curves(shown: Sequence[curves.Panel], runs: list[Run]) -> str:
    if not shown:
        return '<p class="empty">No step has been logged yet.</p>'
    groups = list(dict.fromkeys(panel.group for panel in shown))
    return "".join(
        f'<h3 class="group">{group}</h3><div class="panels">'
        + "".join(_figure(number, panel, runs) for number, panel in enumerate(shown) if panel.group == group)
        + "</div>"
        for group in groups
    )


def _figure(number: int, panel: curves.Panel, runs: list[Run]) -> str:
    said = "".join(f"<li>{escape(note)}</li>" for note in curves.notes(panel, runs))
    about = f' <span class="about">{escape(panel.about)}</span>' if panel.about else ""
    return (
        f'<figure class="panel" data-panel="{number}"><figcaption><h4>{escape(panel.title)}{about}</h4>'
        f'<span class="buttons needs-js"><button type="button" class="full" aria-pressed="false" hidden>full range</button>'
        f'<button type="button" class="log" aria-pressed="false">log</button></span></figcaption>'
        f'<div class="plot"><noscript>{curves.still_svg(panel, runs)}</noscript></div>'
        f'<ul class="notes">{said}</ul></figure>'
    )
