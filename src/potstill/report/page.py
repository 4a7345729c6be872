"""The page: page.html filled with tables, samples and recipes, the curves' numbers as JSON, style and script inlined."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from potstill.files import write_text
from potstill.report import curves, formats, tables
from potstill.report.runs import Run, read_runs
from potstill.types import PotstillError

Evaluations = Mapping[str, Mapping[str, Any]]


def write_report(runs: Sequence[Path], out: Path, others: Evaluations = MappingProxyType({})) -> Path:
    """Write one self-contained HTML page about the run folders to `out`, and return `out`. `others`: evaluations that are of no
    run, by name, to be listed beside those of the runs."""
    page = _page(read_runs([Path(run) for run in runs]), others)
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


def _page(runs: list[Run], others: Evaluations) -> str:
    shown = curves.panels(runs)
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The one script may run because its hash is named: text that broke out of its place still could not run.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_without_nul
    )
    return environment.from_string(_part("page.html")).render(
        runs=runs,
        others={name: [score.show(found.get(score.key)) for score in tables.SCORES] for name, found in others.items()},
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=_subtitle(runs),
        groups={panel.group: None for panel in shown},
        shown=shown,
        tables=tables,
        curves=curves,
        missing=formats.MISSING,
        policy=Markup(policy),
        style=Markup(_part("page.css")),
        script=Markup(script),
        data=Markup(embedded(curves.payload(runs, shown))),
    )


def _part(name: str) -> str:
    return files("potstill.report").joinpath(name).read_text(encoding="utf-8")


def _without_nul(value: Any) -> Any:
    """A NUL is not allowed in HTML, and a parser would drop it."""
    return value.replace("\0", "�") if isinstance(value, str) else value


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
