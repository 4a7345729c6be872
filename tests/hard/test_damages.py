"""Files that are damaged at random: it is told in one sentence, mended, or does not matter. Never other numbers in silence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_content import content
from campaign import Campaign, Forge, broken
from forge import Ended
from mutations import copied, files_in, hurt
from tiny_runs import TinyRuns, weights

MEMORY_MB = 4000  # more than anything here needs


@dataclass(frozen=True)
class Subject:
    """A folder to damage, what is then done with it, and whether what comes of it is as it would have been."""

    folder: Path
    words: Callable[[Path], list[object]]
    as_before: Callable[[Path, Ended], bool]
    hurts: Callable[[Path], bool] = lambda path: True  # which of its files


def _json_out(ended: Ended) -> Any:
    try:
        return json.loads(ended.out)
    except ValueError:
        return ended.out


def _run_subject(runs: TinyRuns, forge: Forge) -> Subject:
    """A run that was killed when it had saved step 6 of 8. Its logs are text without a checksum: a digit that changes in
    them changes no weight."""
    recipe = runs.file("whole", eval=runs.evaluation(every=3))
    assert forge.command("train", recipe).code == 0
    begun = runs.file("begun", eval=runs.evaluation(every=3))
    assert forge.do("train_until", begun, 6).signal == 9

    def words(folder: Path) -> list[object]:
        return ["train", begun, f"run={folder}"]

    def as_before(folder: Path, ended: Ended) -> bool:
        return weights(folder) == weights(runs.folder / "whole")

    return Subject(runs.folder / "begun", words, as_before)


def _eval_subject(runs: TinyRuns, forge: Forge) -> Subject:
    """A checkpoint of a run, which knows its checksums."""
    checkpoint = runs.folder / "whole" / "checkpoints" / "latest"

    def words(folder: Path) -> list[object]:
        return ["eval", folder / "model", "--data", runs.text, "--max-length", 64, "--json"]

    expected = _json_out(forge.command(*words(checkpoint)))
    return Subject(
        checkpoint.resolve(),
        words,
        lambda folder, ended: _numbers(_json_out(ended)) == _numbers(expected),
        lambda path: "model" in path.parts or path.name == "manifest.json",
    )


def _numbers(found: Any) -> Any:
    """Without the model's own name."""
    return {k: v for k, v in found.items() if k != "model"} if isinstance(found, dict) else found


def _cache_subjects(runs: TinyRuns, forge: Forge) -> dict[str, Subject]:
    cache = runs.folder / "cache"
    line = ["--k", 8, "--batch-tokens", 200, "--shard-seconds", 0]
    assert forge.command("cache", "build", runs.teacher, "--data", runs.text, "--out", cache, *line).code == 0
    cached = runs.file("cached", teachers=[{"cache": str(cache)}])
    assert forge.command("train", cached).code == 0
    there = content(cache)

    def train(folder: Path) -> list[object]:
        return ["train", cached, f"run={folder}-run", f"teachers.0.cache={folder}"]

    def learns_the_same(folder: Path, ended: Ended) -> bool:
        return weights(folder.with_name(f"{folder.name}-run")) == weights(runs.folder / "cached")

    def whole(folder: Path, ended: Ended) -> bool:
        try:
            return content(folder) == there
        except AssertionError:  # of a document's checksum
            return False

    def whole_or_told_when_read(folder: Path, ended: Ended) -> bool:
        """A build does not read the documents that are there; whoever does is told."""
        return whole(folder, ended) or forge.command("cache", "verify", folder).code == 1

    return {
        "cache, trained on": Subject(cache, train, learns_the_same),
        "cache, verified": Subject(cache, lambda folder: ["cache", "verify", folder], whole),
        "cache, built again": Subject(
            cache,
            lambda folder: ["cache", "build", runs.teacher, "--data", runs.text, "--out", folder, *line],
            whole_or_told_when_read,
        ),
    }


def _model_subject(runs: TinyRuns) -> Subject:
    """A folder of a model that has no checksums: another number in it is another model. It loads, or is refused."""
    return Subject(
        runs.teacher,
        lambda folder: ["eval", folder, "--data", runs.text, "--max-length", 64, "--json"],
        lambda folder, ended: True,
    )


def _report_subject(runs: TinyRuns) -> Subject:
    return Subject(
        runs.folder / "whole",
        lambda folder: ["report", folder, "--out", folder.with_suffix(".html")],
        lambda folder, ended: True,
        lambda path: path.parent.name == "whole" or "checkpoints" not in path.parts,
    )


def test_damages(runs: TinyRuns, forge: Forge) -> None:
    campaign = Campaign("damages", 420)
    subjects = {"run, gone on with": _run_subject(runs, forge)}  # each by how often, below
    subjects |= {"checkpoint, scored": _eval_subject(runs, forge), **_cache_subjects(runs, forge)}
    subjects |= {"model, scored": _model_subject(runs), "run, reported": _report_subject(runs)}
    often = [3, 2, 2, 1, 1, 2, 1]
    order = [name for name, times in zip(subjects, often, strict=True) for _ in range(times)]
    for case, numbers in campaign.cases(540):
        name = order[int(case.split("-")[-1]) % len(order)]
        outcome, what = _damaged(forge, subjects[name], runs.folder / "hurt" / "copy", numbers)
        campaign.outcomes[outcome] += 1
        if outcome == "wrong":
            campaign.found(case, f"{name}: {what}")
    campaign.end()


def _damaged(forge: Forge, subject: Subject, to: Path, numbers: random.Random) -> tuple[str, str]:
    shutil.rmtree(to.parent, ignore_errors=True)
    copied(subject.folder, to)
    chosen = numbers.choice([path for path in files_in(to) if subject.hurts(path.relative_to(to))])
    what = f"{chosen.relative_to(to)}, {hurt(chosen, numbers)}"
    ended = forge.command(*subject.words(to), memory_mb=MEMORY_MB)
    if wrong := broken(ended):
        return "wrong", f"{what}: {wrong}"
    if ended.code:
        return "told in one sentence", ""
    if not subject.as_before(to, ended):
        return "wrong", f"{what}: other numbers in silence"
    told = any(word in ended.out for word in ("damaged", "set aside", "moved"))
    return ("mended" if told else "harmless"), ""
