"""Numbers as a reader wants them in a table: a dash for what was not measured, plain words for what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

MISSING = "–"
COUNTS = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from, in units of, unit
SIZES = tuple((1024.0**n, 1024.0**n, unit) for n, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")))


def _stated(show: Callable[[float], str]) -> Callable[[float | None], str]:
    def shown(value: float | None) -> str:
        if value is None:
            return MISSING
        return show(value) if math.isfinite(value) else "not finite"

    return shown


def _scaled(value: float, units: tuple[tuple[float, float, str], ...], plain: str) -> str:
    found = next(((size, unit) for least, size, unit in units if value >= least), None)
    return plain.format(value) if found is None else f"{value / found[0]:.2f} {found[1]}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


duration = _stated(_duration)
count = _stated(lambda value: _scaled(value, COUNTS, "{:,.0f}"))
size = _stated(lambda value: _scaled(value, SIZES, "{:.0f} B"))
percent = _stated(lambda value: f"{100 * value:.1f}%")
fixed = _stated(lambda value: f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}")
perplexity = _stated(lambda value: f"{value:,.2f}" if abs(value) < 1e9 else f"{value:.3e}")
