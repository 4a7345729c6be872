"""A build that is killed at any moment and started again ends with what an undisturbed one has, and computes nothing twice
that was finished."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_content import content
from tiny_models import write_jsonl

from potstill.cache.store import shard_names

pytestmark = pytest.mark.e2e
PATIENCE = 400.0


@pytest.mark.parametrize(("world", "kind"), [(1, "hidden"), (2, "sampled")], ids=["1 process", "2 processes"])
@pytest.mark.slow
def test_killed_at_20_lines(tmp_path: Path, tiny_teacher: Path, tiny_text: Path, world: int, kind: str) -> None:
    script = Path(__file__).with_name("cache_kills.py")
    line = [sys.executable, script, tmp_path, tiny_teacher, tiny_text, kind, world, 20, 7]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] == 20 and found["documents"] == 60
    assert found["computed_again"] == 0
    assert found["same"] and not found["left"]
    assert 0 in found["progress"] and max(found["progress"]) > 10  # before there was anything, and half way


@pytest.fixture
def many_texts(tmp_path: Path) -> Path:
    words = ["union", "people", "congress", "peace", "treasury", "nation", "year", "duty", "law", "commerce"]
    texts = [" ".join(words[(i * k + k * k) % 10] for k in range(3 + i % 9)) + f", {i}" for i in range(300)]
    return write_jsonl(tmp_path / "many.jsonl", [{"text": text} for text in texts])


class Build:
    """`potstill cache build` in processes of its own, to be watched and killed."""

    def __init__(self, world: int, teacher: Path, text: Path, out: Path, *options: object) -> None:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(world)] if world > 1 else []
        line = ["cache", "build", teacher, "--data", text, "--out", out, "--k", 8, "--batch-tokens", 24, *options]
        self._process = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "potstill", *map(str, line)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for(self, what: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Until it is so, the build has ended, or so long; looked at every millisecond."""
        deadline = time.monotonic() + seconds
        while not what():
            if self._process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> bool:
        """SIGKILL to it and to all that it started, wherever they are; whether it was still running."""
        running = self._process.poll() is None
        while pids := _family(self._process.pid):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
        self._process.communicate(timeout=PATIENCE)
        return running

    def end(self) -> str:
        out, _ = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0, out
        return out


def _family(pid: int) -> list[int]:
    """A process and its descendants that still run (not those that have ended and wait to be noticed)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return ([pid] if stat[0] != "Z" else []) + [found for child in children for found in _family(int(child))]


def added(said: str) -> int:
    return sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) documents added", said))


def shards(folder: Path) -> int:
    return len(shard_names(folder)) if folder.is_dir() else 0


@pytest.mark.slow
def test_two_processes_killed_half_way(
    tmp_path: Path, tiny_teacher: Path, many_texts: Path, command: Callable[..., Any]
) -> None:
    """As torchrun starts them. What was on disk when they were killed is not computed again."""
    out = tmp_path / "cache"
    first = Build(2, tiny_teacher, many_texts, out, "--shard-seconds", 0)
    assert first.wait_for(lambda: shards(out) >= 20)
    assert first.kill()
    there = len(content(out))
    assert 20 <= there < 300
    said = Build(2, tiny_teacher, many_texts, out).end()
    assert added(said) == 300 - there
    whole = tmp_path / "whole"
    line = ("cache", "build", tiny_teacher, "--data", many_texts, "--out", whole, "--k", 8, "--batch-tokens", 24)
    assert command(*line).code == 0
    assert content(out) == content(whole)


HOLD = """
import sys
from pathlib import Path
import torch
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.models import load_teacher
from potstill.cache.build import build

def hold(_):
    print("computing", flush=True)
    sys.stdin.readline()

teacher, text, out = sys.argv[1:]
model = load_teacher(TeacherConfig(model=teacher), torch.device("cpu"), "teacher", "teacher")
data = DataConfig.model_validate({"sources": [{"files": text}], "piece_bytes": 4096})
build(model, StoreConfig(k=8), data, Path(out), name=teacher, batch_tokens=24, progress=hold)
"""


def test_a_second_command_does_not_discard_a_live_build(
    tmp_path: Path, tiny_teacher: Path, many_texts: Path, command: Callable[..., Any]
) -> None:
    """Held after its first batch, before its first shard."""
    out = tmp_path / "cache"
    line = [sys.executable, "-c", HOLD, str(tiny_teacher), str(many_texts), str(out)]
    first = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "computing\n"
    assert shards(out) == 0
    again = ("cache", "build", tiny_teacher, "--data", many_texts, "--out", out)
    done = command(*again, "--k", 16)
    assert done.code == 1 and f"another process is building {out}, with another signal (k 8, now 16)" in done.err
    first.communicate(timeout=PATIENCE)
    assert first.returncode == 0 and len(content(out)) == 300
    done = command(*again, "--k", 8)
    assert done.code == 0 and "0 documents added" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_command_killed_at_20_moments(tmp_path: Path, tiny_teacher: Path, many_texts: Path, world: int) -> None:
    """Some while it starts, most while it writes."""
    out, generator = tmp_path / "cache", random.Random(world)
    killed = computed = 0
    for number in range(20):
        before = shards(out)
        process = Build(world, tiny_teacher, many_texts, out, "--shard-seconds", 0)
        more = before + generator.randrange(1, 8)
        seconds = generator.uniform(1, 6) if number % 4 == 0 else PATIENCE
        process.wait_for(lambda more=more: shards(out) >= more, seconds)
        killed += process.kill()
        computed += shards(out) > before
    assert killed == 20 and computed >= 10
    there = len(content(out))
    said = Build(world, tiny_teacher, many_texts, out).end()
    assert added(said) == 300 - there
    Build(1, tiny_teacher, many_texts, tmp_path / "whole").end()
    assert content(out) == content(tmp_path / "whole")
