"""What all campaigns share: how much is done, from which seed, what may come of a case, and the figures that are kept.

POTSTILL_HARD_SEED gives a campaign its seed again, POTSTILL_HARD_SHARE makes all of them smaller, POTSTILL_HARD_CASE does
one case of them alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from forge import PATIENCE, Ended, Job

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
SHARE = float(os.environ.get("POTSTILL_HARD_SHARE") or 1)
SEED = int(os.environ.get("POTSTILL_HARD_SEED") or int.from_bytes(os.urandom(3)))
ONLY = os.environ.get("POTSTILL_HARD_CASE")
# Of a share only: a slow machine does less of it, and no less than this part.
LEAST = 0.25
SHOWN = 12  # findings


class Forge:
    """The process of forge.py: does jobs in forks, and is started again should it end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            line = [sys.executable, str(Path(__file__).with_name("forge.py"))]
            path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
        return self._process

    def do(self, call: str, *arguments: object, **keys: Any) -> Ended:
        process = self._started()
        job = Job(call, [str(word) for word in arguments], **{"folder": str(self.folder), **keys})
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.flush()
        return Ended(**json.loads(process.stdout.readline()))

    def command(self, *words: object, **keys: Any) -> Ended:
        """`potstill …`"""
        return self.do("command", *words, **keys)

    def __enter__(self) -> Forge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(PATIENCE)


def broken(ended: Ended) -> str | None:
    """What no command may do, whatever it was given; None: it works, or ends with one sentence."""
    said = f"{ended.out}\n{ended.err}"
    if ended.hung:
        return "it hangs"
    if "Traceback (most recent call last)" in said:
        return f"a traceback: {said.strip().splitlines()[-1][:300]}"
    if ended.signal:
        return f"ended by signal {ended.signal}: {said.strip()[-300:]}"
    if ended.code == 0:
        return None
    if ended.code == 1 and not ended.err and "damaged: " in ended.out:  # what `cache verify` and `info` are for
        return None
    first, *others = ended.err.splitlines() or [""]
    if ended.code != 1 or not first.startswith("error: ") or len(first) < 20:
        return f"exit code {ended.code}: {ended.err.strip()[:300]}"
    if not all(line.startswith("  - ") for line in others):  # the problems of a recipe have a line each
        return f"more than one sentence: {ended.err.strip()[:300]}"
    return None


class Campaign:
    """Counts what came of each case. What is wrong is collected, and told at the end."""

    def __init__(self, name: str, seconds: float) -> None:
        """`seconds`: that a whole one may take on two idle cores, of which a share has its share."""
        self.name, self.outcomes, self.facts = name, Counter[str](), dict[str, Any]()
        self.findings: list[str] = []
        self.count = self.wanted = 0
        self._begin, self._seconds = time.monotonic(), seconds
        print(f"\n{name}: POTSTILL_HARD_SEED={SEED} POTSTILL_HARD_SHARE={SHARE:g}")

    def scaled(self, whole: int) -> int:
        return max(1, round(whole * SHARE))

    @property
    def least(self) -> int:
        return self.wanted if SHARE >= 1 else max(1, int(self.wanted * LEAST))

    @property
    def late(self) -> bool:
        """Whether a share has had its time, and has done its least. The whole is done however long it takes."""
        return self.count >= self.least and time.monotonic() - self._begin > self._seconds * SHARE

    def cases(self, whole: int) -> Iterator[tuple[str, random.Random]]:
        """A name for each case and numbers that depend on it and the seed alone."""
        self.wanted += self.scaled(whole)
        for number in range(self.scaled(whole)):
            name = f"{self.name}-{number}"
            if ONLY is not None and name != ONLY:
                continue
            if SHARE < 1 and self.late:
                break
            self.count += 1
            yield name, self.numbers(name)

    def numbers(self, name: str) -> random.Random:
        return random.Random(f"{SEED} {name}")

    def found(self, case: str, what: str) -> None:
        self.findings.append(f"{case}: {what}")
        print(f"FOUND {self.findings[-1]}", flush=True)
        self.outcomes["findings"] += 1

    def end(self) -> None:
        """Say what was counted; fail on findings, and when too little was done."""
        spent = time.monotonic() - self._begin
        print(f"{self.name}: {self.count} of {self.wanted} in {spent:.0f} s; {dict(self.outcomes)} {self.facts}")
        told = "\n".join(self.findings[:SHOWN])
        assert not self.findings, f"{len(self.findings)} findings with POTSTILL_HARD_SEED={SEED}:\n{told}"
        if ONLY is not None:
            return
        assert self.count >= self.least, f"only {self.count} of {self.wanted} were done"
        if SHARE >= 1:
            kept = {"cases": self.count, "outcomes": dict(sorted(self.outcomes.items())), **self.facts}
            keep(self.name, {**kept, "seconds": round(spent), "seed": SEED})


def keep(name: str, figures: dict[str, Any]) -> None:
    """Among the figures of reliability.json. Two campaigns may end at once."""
    with open(RESULT.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        beside = RESULT.with_suffix(".new")
        beside.write_text(json.dumps({**results, name: figures}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(RESULT)
    RESULT.with_suffix(".lock").unlink(missing_ok=True)
