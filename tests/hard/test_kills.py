"""Processes that are killed at any moment, again and again: what they end with is what an undisturbed one ends with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_content import content
from campaign import Campaign, Forge, broken
from tiny_runs import TinyRuns, metrics, steps_on_disk, weights

from potstill.files import damage

OPTIONS = ["train.steps=16", "checkpoint.every=2"]
WRITES = {"on_policy_fraction": 0.7, "prompt_tokens": 6, "sampling": {"max_new_tokens": 8}}
# Whose lines are counted: half of the kills come at one of them, on whatever thread it is
WRITERS = (
    "potstill.files",
    "potstill.training.checkpoint",
    "potstill.training.logging",
    "potstill.cache.manifest",
    "potstill.cache.store",
)


@dataclass(frozen=True)
class Killed:
    """Something that is killed, begun again, and compared in the end."""

    words: Callable[[str], list[object]]  # of the command, given a name for what it writes
    same: Callable[[Path, Path], bool]
    whole: Callable[[Path], bool] = lambda folder: True  # at any moment
    progress: Callable[[Path], int] = lambda folder: 0  # what can only grow


def _same_run(run: Path, undisturbed: Path) -> bool:
    return metrics(run) == metrics(undisturbed) and weights(run) == weights(undisturbed)


def _nearly_same_run(run: Path, undisturbed: Path) -> bool:
    """Of a cache that is filled while it is read: what a kill took is computed again in batches of other documents, and differs
    in its last bits. The steps are the same, and so are the losses but for that."""
    one, other = metrics(run), metrics(undisturbed)
    steps = [line["step"] for line in one] == [line["step"] for line in other]
    return steps and all(
        math.isclose(a["loss"], b["loss"], rel_tol=1e-3) and a["tokens"] == b["tokens"]
        for a, b in zip(one, other, strict=True)
    )


def _last_step(run: Path) -> int:
    return max(steps_on_disk(run), default=0) if (run / "checkpoints").exists() else 0


def _whole_checkpoints(run: Path) -> bool:
    return not any(damage(path) for path in (run / "checkpoints").glob("step-*"))


def _documents(cache: Path) -> int:
    return len(content(cache)) if (cache / "manifest.json").exists() else 0


def _subjects(runs: TinyRuns) -> dict[str, Killed]:
    def trained(*options: str, same: Callable[[Path, Path], bool] = _same_run, **sections: Any) -> Killed:
        def words(name: str) -> list[object]:
            named = {"teachers": sections["teachers"](name)} if "teachers" in sections else {}
            return ["train", runs.file(name, *OPTIONS, *options, **{**sections, **named})]

        return Killed(words, same, _whole_checkpoints, _last_step)

    def beside(name: str) -> list[dict[str, Any]]:
        return [{"model": str(runs.teacher), "cache": str(runs.folder / f"{name}-cache"), "store": {"kind": "hidden"}}]

    def build(name: str) -> list[object]:
        options = ["--k", 8, "--batch-tokens", 40, "--shard-seconds", 0]
        return ["cache", "build", runs.teacher, "--data", runs.text, "--out", runs.folder / name, *options]

    ahead = WRITES | {"steps_per_generation": 2, "max_staleness": 3}
    return {
        "live": trained(),
        "evaluated": trained("log.tensorboard=true", "train.optimizer.name=muon", eval=runs.evaluation(every=4)),
        "on-policy": trained(rollouts=WRITES, loss={"divergence": "reverse_kl"}),
        "written ahead": trained(rollouts=ahead),
        "cache beside": trained(teachers=beside, same=_nearly_same_run),
        "cache build": Killed(
            build,
            lambda one, other: content(one) == content(other),
            progress=_documents,
        ),
    }


def _killed_once(forge: Forge, subject: Killed, name: str, numbers: random.Random, lasts: tuple[float, int]) -> bool:
    """Run it and kill it, at any moment or at a line of what writes; whether the kill came in time."""
    seconds, lines = lasts
    if numbers.random() < 0.5:
        ended = forge.command(*subject.words(name), kill_after=numbers.uniform(0.02, seconds))
    else:
        ended = forge.command(*subject.words(name), traced=list(WRITERS), kill_at=1 + numbers.randrange(lines))
    if ended.signal == 9:
        return True
    assert ended.code == 0, broken(ended) or ended.err
    return False


def test_kills(runs: TinyRuns, forge: Forge) -> None:
    campaign = Campaign("kills", 300)
    subjects = _subjects(runs)
    undisturbed: dict[str, tuple[float, int]] = {}
    ends: dict[str, str] = {}
    for case, numbers in campaign.cases(66):
        kind = list(subjects)[int(case.split("-")[-1]) % len(subjects)]
        subject = subjects[kind]
        if kind not in undisturbed:
            undisturbed[kind] = _undisturbed(forge, subject, f"{kind} whole")
        name = ends.setdefault(kind, f"{kind} of {case}")
        folder = runs.folder / name
        before = subject.progress(folder) if folder.exists() else 0
        if _killed_once(forge, subject, name, numbers, undisturbed[kind]):
            campaign.outcomes["killed"] += 1
            campaign.outcomes[f"killed: {kind}"] += 1
            if folder.exists() and not subject.whole(folder):
                campaign.found(case, f"{kind}: something half-written stands there")
            if folder.exists() and subject.progress(folder) < before:
                campaign.found(case, f"{kind}: {before} were there and {subject.progress(folder)} are left")
        else:  # it came to its end before the kill
            campaign.outcomes["ended first"] += 1
            _compare(campaign, case, subject, folder, runs.folder / f"{kind} whole")
            del ends[kind]
    for kind, name in ends.items():
        ended = forge.command(*subjects[kind].words(name))
        if ended.code:
            campaign.found(name, broken(ended) or ended.err)
        else:
            _compare(campaign, name, subjects[kind], runs.folder / name, runs.folder / f"{kind} whole")
    campaign.end()


def _undisturbed(forge: Forge, subject: Killed, name: str) -> tuple[float, int]:
    """How many seconds a whole one takes, and how many lines of its writers."""
    ended = forge.command(*subject.words(name), traced=list(WRITERS))
    assert ended.code == 0 and ended.lines, ended.err
    return ended.seconds, ended.lines


def _compare(campaign: Campaign, case: str, subject: Killed, found: Path, expected: Path) -> None:
    campaign.outcomes["compared"] += 1
    if not subject.same(found, expected):
        campaign.found(case, f"{found.name} did not end as an undisturbed one")
