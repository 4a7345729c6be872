"""Disks that are full at one point or another: the command says so, nothing half-written stays, and it goes on later."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_content import content
from campaign import Campaign, Forge, broken
from forge import Ended
from tiny_runs import TinyRuns, weights

from potstill.files import damage

DISK_MB = 24


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of its own; None where none can be mounted: then files cannot grow beyond a limit instead."""
    disk = tmp_path / "disk"
    disk.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
    if subprocess.run(line, capture_output=True).returncode:
        yield None
        return
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _when_full(
    forge: Forge, words: list[object], disk: Path | None, numbers: random.Random, needs: int
) -> tuple[Ended, Path | None]:
    """Run a command with less room than it needs; also what fills the disk."""
    room = numbers.randrange(needs)
    if disk is None:
        return forge.command(*words, file_bytes=room), None
    free = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room)))
    return forge.command(*words), filler


def test_full_disk(runs: TinyRuns, forge: Forge, small_disk: Path | None) -> None:
    campaign = Campaign("full disk", 90)
    campaign.facts["way"] = "a small tmpfs" if small_disk is not None else "a limit on the size of files"
    writes = {"on_policy_fraction": 0.7, "prompt_tokens": 6, "sampling": {"max_new_tokens": 8}}
    recipes = {"live": runs.file("live"), "on-policy": runs.file("on-policy", rollouts=writes)}
    build = ["--k", 8, "--batch-tokens", 40, "--shard-seconds", 0]
    base = ["cache", "build", runs.teacher, "--data", runs.text]
    for recipe in recipes.values():
        assert forge.command("train", recipe).code == 0
    assert forge.command(*base, "--out", runs.folder / "cache", *build).code == 0
    at = small_disk or runs.folder / "written"
    for case, numbers in campaign.cases(24):
        for left in at.iterdir() if at.exists() else []:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        kind = [*recipes, "cache"][int(case.split("-")[-1]) % 3]
        out = at / "out"
        words = [*base, "--out", out, *build] if kind == "cache" else ["train", recipes[kind], f"run={out}"]
        ended, filler = _when_full(forge, words, small_disk, numbers, 300_000 if kind == "cache" else 3_000_000)
        if wrong := broken(ended):
            campaign.found(case, f"{kind}: {wrong}")
        campaign.outcomes["refused" if ended.code else "had room"] += 1
        if any(damage(path) for path in out.glob("checkpoints/step-*")):
            campaign.found(case, f"{kind}: a checkpoint is damaged")
        if filler is not None:
            filler.unlink()
        again = forge.command(*words)
        if again.code:
            campaign.found(case, f"{kind}, with room again: {broken(again) or again.err}")
            continue
        same = (
            content(out) == content(runs.folder / "cache")
            if kind == "cache"
            else weights(out) == weights(runs.folder / kind)
        )
        if not same:
            campaign.found(case, f"{kind}: with room again, it did not end as an undisturbed one")
    campaign.end()
