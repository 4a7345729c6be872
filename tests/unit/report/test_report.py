"""The report page as text: its numbers, its escaping, what it refuses and how large it grows."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potstill.report import write_report
from potstill.report.curves import thinned
from potstill.report.runs import Log, labels, read_runs
from potstill.types import PotstillError

RECIPE = "run: {run}\nteachers:\n- model: big\nloss: {{divergence: {divergence}}}\ntrain: {{steps: {steps}, layers: [0, 2]}}\n"
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number, "loss": 4.0 / number, "kd": 3.0 / number, "ce": 5.0, "kl": None, "agreement": 0.5,
        "teacher_entropy": 1.5, "student_entropy": 2.5, "grad_norm": 1.0, "lr": 3e-4, "temperature": 2.0,
        "kd_weight": 1.0, "ce_weight": 0.0, "tokens": 1000 * number, "tokens_per_second": 1e4, "seconds_data": 0.01,
        "seconds_teacher": 0.03, "seconds_student": 0.05, "seconds_optimizer": 0.01, "peak_memory_bytes": 2**30,
        "epoch": 0, **more,
    }  # fmt: skip


def evaluation(number: int, bits: float = 1.25, **more: Any) -> dict[str, Any]:
    return {
        "step": number, "bits_per_byte": bits, "perplexity": 12.5, "kl": 0.375, "agreement": 0.625, "ece": 0.03125,
        "tokens": 100, "bytes": 400, "samples": [{"prompt": "Once", "text": " upon a time"}], **more,
    }  # fmt: skip


def make_run(folder: Path, steps: list[Any], evals: list[Any] | None = None, divergence: str = "forward_kl") -> Path:
    folder.mkdir(parents=True)
    recipe = RECIPE.format(run=folder, divergence=divergence, steps=len(steps))
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps), encoding="utf-8")
    if evals is not None:
        (folder / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals), encoding="utf-8")
    return folder


def page(*runs: Path) -> str:
    return write_report(runs, runs[0].parent / "report.html").read_text(encoding="utf-8")


def embedded(html: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1], parse_constant=pytest.fail)


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text outside script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data


def cells(html: str, caption: str) -> list[list[str]]:
    """The body of the table with that caption, as text."""
    table = next(t for t in html.split("<table")[1:] if f">{caption}</caption>" in t).split("</table>")[0]
    rows = table.split("<tbody>")[1].split("<tr>")[1:]
    strip = re.compile(r"<[^>]+>")
    return [[strip.sub("", c).strip() for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(n) for n in range(1, 5)], [evaluation(2, 1.5), evaluation(4)])
    html = page(run)
    assert cells(html, "Runs") == [[f"run{run}", "4", "4,000", "0.4 s", "10.00 k", "1.0000", "1.00 GiB"]]
    assert cells(html, "The last evaluation of every run") == [
        ["run", "4", "1.2500", "12.50", "0.3750", "62.5%", "0.0312"]
    ]
    assert [row[1] for row in cells(html, "Evaluations of run")] == ["1.5000", "1.2500"]
    assert "data 10%, teacher 30%, student 50%, optimizer 10%" in html
    data = embedded(html)
    assert data["runs"][0]["metrics"]["steps"] == [1, 2, 3, 4]
    assert data["runs"][0]["metrics"]["columns"]["loss"]["value"] == [4, 2, 1.33333, 1]
    assert data["runs"][0]["evals"]["columns"]["bits_per_byte"]["value"] == [1.5, 1.25]
    titles = [panel["title"] for panel in data["panels"]]
    assert titles[:3] == ["Loss", "Distillation loss", "Cross-entropy"]
    assert "KL to the teacher" not in titles, "null at every step"
    assert "Temperature" not in titles, "it never moves"
    assert " upon a time" in html and "divergence: forward_kl" in html
    assert html.count("<polyline") >= len(titles), "the curves without JavaScript"


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(n) for n in range(1, 11)])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:37])
    html = page(run)
    assert cells(html, "Runs")[0][1] == "4 of 10"
    assert "line 5 of metrics.jsonl cannot be read and is left out" in html


def test_nothing_is_loaded_and_no_text_becomes_markup(tmp_path: Path) -> None:
    samples = [{"prompt": ATTACK, "text": ATTACK}, {"prompt": "{{script}} ünï 🥃 ", "text": "\ud800 half \0 nul é"}]
    run = make_run(
        tmp_path / "a <b>&", [step(1, **{ATTACK: 1.0})], [evaluation(1, samples=samples)], divergence=f"'{ATTACK}'"
    )
    html = page(run)
    found = Elements(html)
    assert [tag for tag, _ in found.tags].count("script") == 2, "the data and the one script"
    assert "img" not in [tag for tag, _ in found.tags]
    assert not [a for _, a in found.tags if any(name.startswith("on") for name in a)]
    links = [v for _, a in found.tags for k, v in a.items() if k in ("src", "href") and v]
    assert all(link.startswith("#") or link == "data:," for link in links), links
    assert "@import" not in html and "url(http" not in html and "fetch(" not in html
    assert "default-src 'none'" in html and "script-src 'sha256-" in html
    assert found.text.count(ATTACK) >= 3, "shown as it is: prompt, text, recipe, the name of a metric"
    assert "{{script}} ünï 🥃" in found.text and "? half � nul é" in found.text
    assert ATTACK in embedded(html)["runs"][0]["metrics"]["columns"]


def test_values_that_are_not_finite_are_gaps_and_are_counted(tmp_path: Path) -> None:
    steps = [step(1), step(2, loss=math.nan), step(3, loss=math.inf, kd=None), step(4, loss=-math.inf)]
    html = page(make_run(tmp_path / "run", steps, [evaluation(4, math.nan, ece=10**400)]))
    assert embedded(html)["runs"][0]["metrics"]["columns"]["loss"]["value"] == [4, None, None, None]
    assert "run: 3 values are not finite, first at step 2" in html
    assert cells(html, "Runs")[0][5] == "not finite"
    assert cells(html, "The last evaluation of every run")[0][2] == "not finite"
    assert cells(html, "The last evaluation of every run")[0][6] == "not finite"


def test_several_runs(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a" / "run", [step(1), step(2)], [evaluation(2, 1.5, agreement=0.7)])
    b = make_run(tmp_path / "b" / "run", [step(1)], [evaluation(1, 1.25, kl=None)], divergence="jsd")
    c = make_run(tmp_path / "other", [step(1)])
    html = page(a, b, c)
    table = cells(html, "The last evaluation of every run")
    assert [row[0] for row in table] == ["a/run", "b/run", "other"]
    assert [row[2] for row in table] == ["1.5000", "1.2500★ best", "–"]
    assert [row[3] for row in table] == ["12.50", "12.50", "–"], "a tie of all has no best"
    assert [row[4] for row in table] == ["0.3750", "–", "–"], "one value alone has no best"
    assert [row[5] for row in table] == ["70.0%★ best", "62.5%", "–"], "more agreement is better"
    differing = cells(html, "Keys in which the recipes differ")
    assert differing == [["loss.divergence", "forward_kl", "jsd", "forward_kl"], ["train.steps", "2", "1", "1"]]
    assert html.count("<article>") == 2, "the two runs with samples, side by side"
    assert len(embedded(html)["runs"]) == 3


def test_evaluations_of_no_run_stand_beside_those_of_the_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(1)], [evaluation(1)])
    others = {"before": evaluation(0, 3.5, kl=1.5), "teacher": evaluation(0, 1.0, kl=None, agreement=None)}
    html = write_report([run], tmp_path / "report.html", others).read_text(encoding="utf-8")
    assert cells(html, "The last evaluation of every run") == [
        ["run", "1", "1.2500", "12.50", "0.3750", "62.5%", "0.0312"],
        ["before", "–", "3.5000", "12.50", "1.5000", "62.5%", "0.0312"],
        ["teacher", "–", "1.0000", "12.50", "–", "–", "0.0312"],
    ]


def test_values_per_token_are_not_compared_across_tokenizers(tmp_path: Path) -> None:
    """Perplexity 12.5 of 100 tokens and 9.5 of 140: the same text, cut in other ways."""
    a = make_run(tmp_path / "a", [step(1)], [evaluation(1, 1.5, ece=0.02)])
    b = make_run(tmp_path / "b", [step(1)], [evaluation(1, 1.25, kl=None, agreement=None, perplexity=9.5, tokens=140)])
    html = page(a, b)
    table = cells(html, "The last evaluation of every run")
    assert [row[2] for row in table] == ["1.5000", "1.2500★ best"], "of the same bytes"
    assert [row[3:] for row in table] == [["12.50", "0.3750", "62.5%", "0.0200"], ["9.50", "–", "–", "0.0312"]]
    assert "These runs have different tokenizers: only bits per byte compares them." in html
    assert "best bits per byte 1.2500, b" in html
    c = make_run(tmp_path / "c", [step(1)], [evaluation(1, 1.125, bytes=300)])
    html = page(a, c)
    assert not any("★" in cell for row in cells(html, "The last evaluation of every run") for cell in row)
    assert "scored on different amounts of text, so none is called the best" in html
    assert "best bits per byte" not in html
    same = page(a, make_run(tmp_path / "d", [step(1)], [evaluation(1, 1.125, perplexity=11.5)]))
    assert cells(same, "The last evaluation of every run")[1][2:4] == ["1.1250★ best", "11.50★ best"]
    assert "only bits per byte compares" not in same


def test_a_teacher_with_other_tokens_has_curves_of_its_own(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", [step(n, kl=0.5) for n in (1, 2)], [evaluation(2)])
    aligned = {"align_chunks_per_token": 0.5, "align_exact": 0.75, "kl": 1.5}
    across = make_run(
        tmp_path / "cross_tokenizer",
        [step(n, **aligned) for n in (1, 2)],
        [evaluation(2, kl=None, agreement=None, tokens=140)],
    )
    both = make_run(
        tmp_path / "both", [step(n, **aligned) for n in (1, 2)], [evaluation(2)]
    )  # its first teacher's are the same
    html = page(plain, across, both)
    data = embedded(html)
    assert [run["metrics"]["columns"].get("kl", {}).get("value") for run in data["runs"]] == [
        [0.5, 0.5],
        None,
        [1.5, 1.5],
    ]
    across_kl = [run["metrics"]["columns"].get("cross_tokenizer_kl", {}).get("value") for run in data["runs"]]
    assert across_kl == [None, [1.5, 1.5], None]
    titles = [panel["title"] for panel in data["panels"]]
    assert {"KL to the teacher", "KL to the teacher, cross-tokenizer", "Top-1 agreement, cross-tokenizer"} <= set(
        titles
    )
    (figure,) = [part for part in html.split("<figure")[1:] if "<h4>KL to the teacher, cross-tokenizer" in part]
    assert figure.count("<polyline") == 1 and "for a teacher with other tokens" in figure
    (figure,) = [part for part in html.split("<figure")[1:] if "<h4>KL to the teacher <" in part]
    assert figure.count("<polyline") == 2
    assert "cross-tokenizer" not in " ".join(panel["title"] for panel in embedded(page(plain))["panels"])


def test_labels_are_the_shortest_that_differ() -> None:
    paths = [Path("/x/a/run"), Path("/y/a/run"), Path("/y/b/run"), Path("/y/b/more")]
    assert labels(paths) == ["x/a/run", "y/a/run", "b/run", "more"]


def test_a_resume_replaces_what_came_after_it(tmp_path: Path) -> None:
    steps = [step(1), step(2), step(3), step(4), step(3, loss=9.0)]
    run = make_run(tmp_path / "run", steps)
    log = read_runs([run])[0].metrics
    assert log.steps.tolist() == [1, 2, 3] and log.columns["loss"].tolist() == [4, 2, 9] and log.replaced == 2
    assert "2 lines of metrics.jsonl left out, of steps that were taken again after a resume" in page(run)


def test_missing_things(tmp_path: Path) -> None:
    with pytest.raises(PotstillError, match=r"there is no run folder .*gone: name the folder"):
        write_report([tmp_path / "gone"], tmp_path / "out.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PotstillError, match=r"is not a run, it has no recipe\.yaml"):
        write_report([tmp_path / "empty"], tmp_path / "out.html")
    with pytest.raises(PotstillError, match="at least one run"):
        write_report([], tmp_path / "out.html")
    run = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0}, {"step": 2}])
    with pytest.raises(PotstillError, match="name each run once"):
        write_report([run, tmp_path / "." / "run"], tmp_path / "out.html")
    with pytest.raises(PotstillError, match="is a folder: name a file"):
        write_report([run], tmp_path)
    with pytest.raises(PotstillError, match="cannot write"):
        write_report([run], run / "recipe.yaml" / "out.html")
    html = page(run)
    assert "No evaluation yet" in html and "No samples" in html and cells(html, "Runs")[0][2:] == ["–"] * 5
    (run / "metrics.jsonl").unlink()
    assert "No step has been logged yet" in page(run)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "lo',
        b"",
        b"[1]",
        b"\xff" + b'{"step": 2, "loss": 1.0}',
        b'{"loss": 1.0}',
        b'{"step": true}',
        b'{"step": 2, "loss": "low"}',
        b'{"step": 2, "samples": [{"prompt": 1}]}',
        b'{"step": 2, "samples": 3}',
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, line: bytes) -> None:
    run = make_run(tmp_path / "run", [step(1)])
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(step(3)).encode() + b"\n")
    log = read_runs([run])[0].metrics
    assert log.steps.tolist() == [1, 3] and log.unreadable == (2,)
    assert "run: line 2 of metrics.jsonl cannot be read and is left out" in page(run)
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')  # and one that a kill tore
    assert "run: 2 lines, from line 2 on, of metrics.jsonl cannot be read and are left out" in page(run)


def test_the_page_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(1)])
    out = tmp_path / "new" / "page.html"
    assert write_report([run], out) == out
    first = out.read_bytes()
    assert write_report([str(run)], str(out)).read_bytes() == first  # type: ignore[list-item, arg-type]
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def test_thinning_keeps_the_ends_the_means_and_every_spike() -> None:
    values = np.arange(10_000, dtype=np.float64)
    values[4321], values[100] = 1e6, math.nan
    log = Log(np.arange(1, 10_001), {"x": values}, {}, 0, ())
    thin = thinned(log, ["x", "absent"], 100)
    column = thin["columns"]["x"]
    assert thin["steps"][0] == 1 and thin["steps"][-1] == 10_000 and len(thin["steps"]) == 100
    assert sum(thin["count"]) == 10_000 and max(column["high"]) == 1e6 and column["low"][0] == 0
    for at, value in zip(thin["steps"], column["value"], strict=True):
        assert value == at - 1, "the true value at that step"
    second = slice(1, 1 + thin["count"][1])
    assert column["mean"][1] == pytest.approx(np.nanmean(values[second]), rel=1e-5)
    assert "mean" not in thinned(log, ["x"], 5000)["columns"]["x"], "not twice too long: kept whole"


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(1)])
    noise = np.random.default_rng(0).random((100_000, 16))
    names = [k for k, v in step(1).items() if isinstance(v, float)]
    with (run / "metrics.jsonl").open("w") as file:
        for number, row in enumerate(noise.tolist(), start=1):
            file.write(json.dumps({"step": number, "tokens": number, **dict(zip(names, row, strict=False))}) + "\n")
    out = write_report([run], tmp_path / "out.html")
    assert 100_000 < out.stat().st_size < 1_000_000
