"""The report page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potstill.report import write_report

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'potstill[dev]'"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]

ATTACK = "</script><script>document.title='broken'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
LENGTHS = {"short": 200, "long": 3000}  # the second is thinned


def loss(name: str, step: int) -> float:
    return 1.0 + 3.0 / step + 0.2 * math.sin(step * (1.0 if name == "short" else 1.7))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, length in LENGTHS.items():
        run = folder / name
        run.mkdir()
        (run / "recipe.yaml").write_text(f"run: {name}\ntrain: {{steps: {length}}}\nnote: {'x' * 300}\n")
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, length + 1):
                line = {"step": step, "loss": loss(name, step), "lr": 1e-3 / step, "tokens": step, ATTACK: 1.0}
                line |= {"student_entropy": 2.0, "teacher_entropy": 1.5, "seconds_student": 0.1, "seconds_teacher": 0.1}
                file.write(json.dumps(line | {"grad_norm": math.nan if step == 7 else 1.0 + step % 5}) + "\n")
        scores = {"bits_per_byte": 1.5, "perplexity": 9.0, "kl": None, "agreement": 0.5, "ece": 0.1}
        samples = [{"prompt": ATTACK, "text": "word" * 200}, {"prompt": "A", "text": ATTACK}]
        evals = [{"step": at, **scores, "samples": samples} for at in (length // 2, length)]
        (run / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    return write_report([folder / name for name in LENGTHS], folder / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox does not start as root, as in a container.
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=root)
        yield opened
        opened.close()


class Opened:
    """A page with what it asked for and complained about."""

    def __init__(self, browser: Any, report: Path, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.goto(report.as_uri())

    def panel(self, title: str) -> Any:
        heading = self.page.locator("h4").filter(has_text=title)
        return self.page.locator("figure.panel").filter(has=heading).first

    def lines(self, title: str) -> list[str]:
        drawn = self.panel(title).locator("path.line[data-run]")
        drawn.first.wait_for(state="attached")  # panels are drawn as the browser finds time
        return drawn.evaluate_all("all => all.map(p => p.getAttribute('d'))")

    def next_frame(self) -> None:
        """Until what was asked for is drawn. (Waiting for an expression is eval, which the page's rollouts forbids.)"""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def hover(self, title: str, share: float) -> dict[str, list[str]]:
        """The read-out at that share of the plot's width: the step, and each run's cells."""
        plot = self.panel(title).locator("svg[role=img]")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        self.page.mouse.move(box["x"] + share * box["width"], box["y"] + 100)
        readout = self.panel(title).locator(".readout")
        readout.wait_for(state="visible")
        rows = readout.locator("tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent.trim()))")
        return {row[0]: row[1:] for row in rows}


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    page = Opened(browser, report)
    yield page
    assert page.complaints == [], "the console stays silent"
    assert page.requests == [report.as_uri()], "the file itself, and nothing else"
    page.context.close()


def test_curves_are_drawn(opened: Opened) -> None:
    assert opened.page.title() == "2 runs · potstill"
    assert len(opened.lines("Loss")) == 2 and all(len(d) > 1000 for d in opened.lines("Loss"))
    assert len(opened.lines("Entropy")) == 4, "student and teacher of both runs"
    assert len(opened.lines("Bits per byte")) == 2
    assert opened.panel("Bits per byte").locator("circle").count() == 4
    assert opened.panel("Loss").locator("path.band").count() == 1, "of the thinned run"
    assert "long: 1 value is not finite, first at step 7" in opened.panel("Gradient norm").inner_text()
    assert all("NaN" not in d for panel in ("Loss", "Gradient norm", "Learning rate") for d in opened.lines(panel))
    assert opened.page.locator("script").count() == 2 and opened.page.locator("img").count() == 0


def test_hovering_reads_out_the_true_values(opened: Opened) -> None:
    for share in (0.3, 0.5, 0.9):
        rows = opened.hover("Loss", share)
        at = int(next(key for key in rows if key.startswith("step")).removeprefix("step ").replace(",", ""))
        assert at == pytest.approx(3000 * share, abs=400), "the axis has a margin"
        assert float(rows["long"][0]) == pytest.approx(loss("long", at), abs=1e-4)
        assert rows["short"][0] == "–", "it ended before"
    rows = opened.hover("Loss", 0.11)
    at = int(next(key for key in rows if key.startswith("step")).removeprefix("step "))
    own = int(rows["short"][2].removeprefix("at ")) if rows["short"][2:] and rows["short"][2] else at
    assert float(rows["short"][0]) == pytest.approx(loss("short", own), abs=1e-4)
    crosses = opened.page.locator(".cross").count()
    assert crosses == opened.page.locator("figure.panel").count(), "the crosshair is in every panel"
    opened.page.mouse.move(2, 2)
    assert opened.page.locator(".cross").count() == 0


def test_the_keyboard_moves_the_read_out(opened: Opened) -> None:
    opened.panel("Loss").locator("svg[role=img]").focus()
    opened.page.keyboard.press("Home")
    assert "step 1value" in (opened.panel("Loss").locator(".readout").text_content() or "")
    opened.page.keyboard.press("ArrowRight")
    assert opened.panel("Loss").locator(".step").text_content() == "step 2"
    opened.page.keyboard.press("End")
    assert opened.panel("Loss").locator(".step").text_content() == "step 3,000"
    opened.page.keyboard.press("Escape")
    assert opened.panel("Loss").locator(".readout").is_hidden()


def test_smoothing_is_an_unbiased_mean(opened: Opened) -> None:
    before = opened.lines("Loss")
    schedule = opened.lines("Learning rate")
    opened.page.locator("#smoothing").fill("5")
    opened.next_frame()
    assert opened.page.locator("#smoothing-said").text_content() == "5% of the steps"
    assert opened.lines("Loss") != before and opened.lines("Learning rate") == schedule, "a schedule is not smoothed"
    assert opened.panel("Loss").locator("path.raw").count() == 2
    opened.page.locator("[data-run='1'][type=checkbox]").uncheck()  # the short run alone: whole, and its own axis
    opened.next_frame()
    assert len(opened.lines("Loss")) == 1
    rows = opened.hover("Loss", 0.7)
    at = int(next(key for key in rows if key.startswith("step")).removeprefix("step "))
    fade = math.exp(-1 / (0.05 * 199))
    weights = [fade ** (at - step) for step in range(1, at + 1)]
    expected = sum(w * loss("short", s) for w, s in zip(weights, range(1, at + 1), strict=True)) / sum(weights)
    assert float(rows["short"][1]) == pytest.approx(expected, abs=1e-4)
    opened.page.locator("#smoothing").fill("0")
    opened.next_frame()
    assert (
        opened.page.locator("path.raw").count() == 0 and opened.page.locator("#smoothing-said").text_content() == "off"
    )


def test_log_scale(opened: Opened) -> None:
    before = opened.lines("Learning rate")
    button = opened.panel("Learning rate").locator("button.log")
    button.click()
    assert button.get_attribute("aria-pressed") == "true" and opened.lines("Learning rate") != before
    button.click()
    assert opened.lines("Learning rate") == before


def test_dark_mode(browser: Any, report: Path) -> None:
    grounds, strokes = set(), set()
    for scheme in ("light", "dark"):
        page = Opened(browser, report, color_scheme=scheme)
        grounds.add(page.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        strokes.add(page.page.evaluate("getComputedStyle(document.querySelector('path.line')).stroke"))
        page.context.close()
    assert len(grounds) == 2 and len(strokes) == 2


@pytest.mark.parametrize("width", [320, 390, 1024])
def test_no_width_overflows(browser: Any, report: Path, width: int) -> None:
    page = Opened(browser, report, viewport={"width": width, "height": 800})
    page.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.hover("Loss", 0.5)
    box = page.panel("Loss").locator(".readout").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    page.context.close()


def test_without_javascript_it_still_reads(browser: Any, report: Path) -> None:
    page = Opened(browser, report, java_script_enabled=False)
    assert page.page.locator("table").first.is_visible() and page.page.get_by_text("word" * 200).first.is_visible()
    assert page.panel("Loss").locator("polyline").count() == 2
    assert not page.page.locator("#smoothing").is_visible() and page.complaints == []
    page.context.close()
