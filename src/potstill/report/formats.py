"""Numbers as a reader wants them in a table."""

from __future__ import annotations

import math
from collections.abc import Callable

MISSING = "–"


def _stated(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """A dash for what was not measured, and the plain words for what is not finite."""

    def shown(value: float | None) -> str:
        if value is None:
            return MISSING
        return show(value) if math.isfinite(value) else "not finite"

    return shown


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _count(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.2f} {unit}"
    return f"{value:,.0f}"


def _size(value: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.2f} {unit}"
    return f"{value:.0f} B"


duration = _stated(_duration)
count = _stated(_count)
size = _stated(_size)
whole = _stated(lambda value: f"{value:,.0f}")
percent = _stated(lambda value: f"{100 * value:.1f}%")
fixed = _stated(lambda value: f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}")
perplexity = _stated(lambda value: f"{value:,.2f}" if abs(value) < 1e9 else f"{value:.3e}")
