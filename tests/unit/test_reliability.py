"""docs/reliability.md shows the figures that were measured, and they are of enough."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hard"))

import figures

LEAST = {"kills": 40, "damages": 500, "fuzz": 2000, "load": 300, "soak": 1000, "full disk": 20, "races": 20}


def test_the_page_has_the_figures() -> None:
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.with_table(text) == text, "run python tests/hard/figures.py"


def test_each_was_done_whole_and_found_nothing() -> None:
    results = json.loads(figures.RESULT.read_text(encoding="utf-8"))
    assert results and results.keys() <= LEAST.keys()
    assert [name for name, found in results.items() if found["cases"] < LEAST[name]] == []
    assert [name for name, found in results.items() if "findings" in found["outcomes"]] == []
    assert "kills" not in results or results["kills"]["outcomes"]["killed"] >= 40
