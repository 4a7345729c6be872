"""The figures of the last whole `make test-hard` and `make test-races`, as the table of docs/reliability.md. As a program, it
writes the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def _counted(figures: dict[str, Any], *names: str) -> str:
    return "; ".join(f"{figures['outcomes'].get(name, 0):,} {name}" for name in names)


def _kinds(figures: dict[str, Any]) -> str:
    """Of fuzzed inputs: how many of each kind."""
    kinds = dict.fromkeys(name.split(": ")[0] for name in figures["outcomes"])
    of = {kind: sum(n for name, n in figures["outcomes"].items() if name.split(": ")[0] == kind) for kind in kinds}
    return ", ".join(f"{n:,} {kind}" for kind, n in of.items())


def _grown(figures: dict[str, Any], what: str) -> str:
    return f"{max(value for name, value in figures.items() if name.endswith(f'{what} grown')):g}"


# Campaign → what was done, what came of it
ROWS: dict[str, tuple[Callable[[dict[str, Any]], str], Callable[[dict[str, Any]], str]]] = {
    "kills": (
        lambda f: f"{f['outcomes']['killed']:,} SIGKILLs",
        lambda f: f"{f['outcomes']['compared']:,} runs and builds compared with undisturbed ones: the same bits",
    ),
    "damages": (
        lambda f: f"{f['cases']:,} damaged files",
        lambda f: _counted(f, "told in one sentence", "mended", "harmless") + "; 0 wrong",
    ),
    "full disk": (
        lambda f: f"{f['cases']:,} full disks ({f['way']})",
        lambda f: _counted(f, "refused", "had room") + "; all went on to the same bits",
    ),
    "fuzz": (
        lambda f: f"{f['cases']:,} inputs: {_kinds(f)}",
        lambda f: (
            f"{sum(n for name, n in f['outcomes'].items() if name.endswith('works')):,} work, "
            f"{sum(n for name, n in f['outcomes'].items() if name.endswith('one sentence')):,} end in one sentence"
        ),
    ),
    "load": (
        lambda f: f"{f['cases']:,} s of load on `potstill serve`",
        lambda f: (
            f"{f['outcomes']['honest, answered']:,} right answers beside "
            f"{sum(n for name, n in f['outcomes'].items() if name.startswith('hostile: ')):,} hostile clients; "
            f"{f['rss_mb']} MB before, {f['largest_rss_mb']} MB at most"
        ),
    ),
    "soak": (
        lambda f: f"{f['cases']:,} steps: live, cached, on-policy",
        lambda f: (
            f"at most {_grown(f, 'rss')} MB, {_grown(f, 'files')} open files and {_grown(f, 'threads')} threads more in "
            "the last quarter than in the second"
        ),
    ),
    "races": (
        lambda f: (
            f"{f['cases']:,} rounds of the {f['outcomes']['passed'] // f['cases']:,} tests with processes, signals, sockets or "
            "threads, four busy processes beside each"
        ),
        lambda f: f"{f['outcomes']['passed']:,} passed, 0 failed",
    ),
}


def table(results: dict[str, Any]) -> str:
    lines = ["| campaign | what was done | what came of it | seconds |", "|---|---|---|---|"]
    for name, (done, came) in ROWS.items():
        if name not in results:  # it was not done whole yet
            continue
        figures = results[name]
        lines.append(f"| {name} | {done(figures)} | {came(figures)} | {figures['seconds']:,} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with the table of the results between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(json.loads(RESULT.read_text(encoding='utf-8')))}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")
