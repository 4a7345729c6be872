"""docs/reliability.md shows the figures that were measured, and they are of enough."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hard"))

import figures
import pytest

# The file comes into being with the first whole `make test-hard`, and the page's table with it.
pytestmark = pytest.mark.skipif(not figures.RESULT.exists(), reason="no whole `make test-hard` has been kept")
LEAST = {"kills": 40, "damages": 500, "fuzz": 2000, "load": 300, "soak": 1000, "full disk": 20}


def test_the_page_has_the_figures() -> None:
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.with_table(text) == text, "run python tests/hard/figures.py"


def test_a_whole_one_was_done_and_found_nothing() -> None:
    results = json.loads(figures.RESULT.read_text(encoding="utf-8"))
    assert {name: results[name]["cases"] >= least for name, least in LEAST.items()} == dict.fromkeys(LEAST, True)
    assert results["kills"]["outcomes"]["killed"] >= 40
    assert not any("findings" in results[name]["outcomes"] for name in LEAST)
