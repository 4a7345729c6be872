"""The benchmark of the loss runs, and the page that is committed is the one that its results give."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention  # noqa: E402
import cache_quality  # noqa: E402
import cross_quality  # noqa: E402
import lora  # noqa: E402
import memory_account  # noqa: E402
import pruning  # noqa: E402
import scale  # noqa: E402
from loss_page import page, plot  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "loss.json"
TINY = {"rows": 40, "vocabulary": 512, "student": 8, "teacher": 12, "top_k": 0, "divergence": "jsd", "rounds": 2}


def run_benchmark(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "loss.py"), *arguments]
    done = subprocess.run(
        [*command, "--result", str(folder / "loss.json"), "--docs", str(folder / "docs")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.slow
def test_a_tiny_case_end_to_end(tmp_path):
    ours = ["--one", json.dumps(TINY), "--contenders", "products", "potstill", "plain"]
    said = run_benchmark(tmp_path, *ours)
    assert "[5/5]" in said and "min left" in said  # two rounds of the products and of potstill, one of the peer
    results = json.loads((tmp_path / "loss.json").read_text(encoding="utf-8"))
    (entry,) = results["cases"].values()
    contenders = entry["contenders"]
    assert {name: (one["status"], one["processes"]) for name, one in contenders.items()} == {
        "products": ("ok", 2), "potstill": ("ok", 2), "plain": ("ok", 1),
    }  # fmt: skip
    assert all(run["seconds"] > 0 for one in contenders.values() for run in one["runs"])
    assert contenders["potstill"]["loss"] == pytest.approx(contenders["plain"]["loss"], rel=1e-5)
    assert contenders["potstill"]["gradient_norms"] == pytest.approx(contenders["plain"]["gradient_norms"], rel=1e-4)
    text = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "| JSD 0.5, dense · 40 × 512 · 8 / 12 |" in text and "not run" in text
    assert "[1/" not in run_benchmark(tmp_path, *ours), "what is there is not run again"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_what_does_not_fit_is_shown_as_such(tmp_path):
    large = {**TINY, "rows": 2048, "vocabulary": 65536}  # 512 MB of logits on each side
    ours = ["--one", json.dumps({**large, "rounds": 1}), "--contenders", "plain", "--memory-gb", "1.2"]
    run_benchmark(tmp_path, *ours)
    (entry,) = json.loads((tmp_path / "loss.json").read_text(encoding="utf-8"))["cases"].values()
    assert entry["contenders"]["plain"]["status"] == "memory"
    assert "out of memory" in (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_page_and_the_plot_are_what_the_results_give():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    again = "run python benchmarks/loss.py --only-docs"
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page(results), again
    drawn = (ROOT / "docs" / "benchmarks-loss.svg").read_text(encoding="utf-8")
    assert drawn == plot(results), again
    ElementTree.fromstring(drawn)


def test_what_a_student_loses_is_what_was_measured():
    """The page has the results' table; top k with draws from its rest loses at most 1 % of the gain, draws alone 10 %."""
    text = (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")
    assert cache_quality.with_table(text) == text, "run python benchmarks/cache_quality.py --only-docs"
    results = json.loads(cache_quality.RESULT.read_text(encoding="utf-8"))
    assert cache_quality.lost(results, f"top-{cache_quality.K} + {cache_quality.REST} draws from the rest")[0] <= 0.01
    assert cache_quality.lost(results, f"sampled, {cache_quality.DRAWS} draws")[0] <= 0.1
    assert cache_quality.lost(results, f"top-{cache_quality.K}, renormalised")[0] > 1


def test_what_adapters_save_is_what_was_measured():
    """The page has the results' table; a student with adapters takes less memory, the loss with a frozen head 0.75 at most."""
    text = (ROOT / "docs" / "students.md").read_text(encoding="utf-8")
    assert lora.with_table(text) == text, "run python benchmarks/lora.py --only-docs"
    found = json.loads(lora.RESULT.read_text(encoding="utf-8"))
    assert found["loss"]["ratio"] <= 0.75
    assert found["steps"]["LoRA, r 16"]["peak_mb"] < 0.7 * found["steps"]["all weights"]["peak_mb"]


def test_what_pruning_gives_is_what_was_measured():
    """The page has the results' table."""
    text = (ROOT / "docs" / "students.md").read_text(encoding="utf-8")
    assert pruning.with_table(text) == text, "run python benchmarks/pruning.py --only-docs"


def test_memory_of_long_rows_and_of_a_step_is_what_was_measured():
    """The page has the results' tables; a packed row of 32,768 tokens takes less than 2 GB, the account is within 10 %."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert attention.with_table(text) == text, "copy the lines that benchmarks/attention.py's with_table makes"
    long = json.loads(attention.RESULT.read_text(encoding="utf-8"))["cases"]
    assert all(case["peak_mb"] < 2000 for name, case in long.items() if str(attention.LONGEST) in name)
    cases = json.loads(memory_account.RESULT.read_text(encoding="utf-8"))["cases"]
    assert memory_account.table(cases) in text, "copy the table that benchmarks/memory_account.py prints"
    assert cases.keys() == memory_account.CASES.keys()
    for name, case in cases.items():
        assert abs(case["counted"] / case["measured"] - 1) < 0.1, name


def test_what_a_student_learns_beside_trl_is_what_was_measured():
    """The page has the results' tables, and the factors of TRL's hybrid loss are all of its lead."""
    text = (ROOT / "docs" / "cross-tokenizer.md").read_text(encoding="utf-8")
    assert cross_quality.with_tables(text) == text, "run python benchmarks/cross_quality.py --only-docs"
    parts = json.loads((ROOT / "benchmarks" / "results" / "cross_ablation.json").read_text(encoding="utf-8"))
    at_100 = {name: found["100"] for name, found in parts.items()}
    for name in ("text", "prefix_marginal", "hybrid", "hybrid, without the factors", "prefix_marginal + 0.1 repeat"):
        assert f"{at_100[name]:.3f} |" in text
    assert at_100["prefix_marginal + 0.1 repeat"] < at_100["hybrid"] < at_100["prefix_marginal"]
    assert at_100["hybrid, without the factors"] > at_100["prefix_marginal"]
    path = ("prefix_marginal", "hybrid, chunks of one token each", "hybrid, without the factors", "hybrid")
    shares = [at_100[before] - at_100[after] for before, after in pairwise(path)]
    for share in shares:
        assert f"| {share:.3f} |".replace("-", "−") in text
    assert f"The gap of {sum(shares):.3f} between" in text


def test_the_default_is_ahead_of_trl_beyond_the_spread_and_in_less_time():
    """Wherever both were measured: a fresh student's default against the hybrid loss and ULD, and a trained student's."""
    pairs, compared = cross_quality.results(), 0
    for pair, rates in pairs.items():
        ours = "potstill" if pair == "900, taught" else "potstill, repeat"
        for ways in rates.values():
            for theirs in {"hybrid", "uld"} & set(ways) if ours in ways else ():
                compared += ahead(ways[ours], ways[theirs])
    assert compared >= 4


def ahead(ours, theirs) -> int:
    """At how many lengths, of those at which both were scored."""
    lengths = {step for runs in (ours, theirs) for run in runs.values() for step in run if step.isdigit()}
    compared = 0
    for step in lengths:
        scores = [[run[step] for run in runs.values() if step in run] for runs in (ours, theirs)]
        if all(scores):
            spread = sum(stdev(values) for values in scores if len(values) > 1)
            assert mean(scores[0]) + spread < mean(scores[1]), (step, scores)
            compared += 1
    seconds = [
        mean(
            run["seconds"] / max(int(step) for step in run if step.isdigit())
            for run in runs.values()
            if "seconds" in run
        )
        for runs in (ours, theirs)
    ]
    assert seconds[0] < seconds[1]
    return compared


def test_what_ranks_send_hold_and_wait_for_is_what_was_measured():
    """The page has the results' tables, its estimate is the one that the script makes, and collectives keep to their bounds."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scale.with_tables(text) == text, "run python benchmarks/scale.py --only-docs"
    found = json.loads(scale.RESULT.read_text(encoding="utf-8"))
    assert found["estimate"] == scale.estimated()
    for name, case in found["spread"].items():
        for kind, bound in scale.bounds(name, case).items():
            planned = scale.PLANNED if kind == "all-reduce" and "tp" in name else 1.0
            assert case["bytes"][kind] <= 1.01 * planned * bound, (name, kind)
    assert all(floats <= 6 for by_temperature in found["loss_floats"].values() for floats in by_temperature.values())
