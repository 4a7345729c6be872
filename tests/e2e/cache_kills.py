"""Builds of a cache that are killed at a line of their own, again and again, until they are let through.

Run as a program, because its children are forks: a build then starts in milliseconds, and a kill is a real SIGKILL, at any
line of the files that write, on any of their threads. Prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from cache_content import content

from potstill import files
from potstill.cache import build as building
from potstill.cache import manifest, store
from potstill.cache.build import CacheWriter, build
from potstill.config import DataConfig, StoreConfig, TeacherConfig
from potstill.models import load_teacher

TRACED = {module.__file__ for module in (files, manifest, store, building)}


class Builds:
    """Each build in forks of this process, one for each rank."""

    def __init__(self, folder: Path, teacher: Path, text: Path, kind: str) -> None:
        self.folder, self.logs = folder, folder.with_name(f"{folder.name}-logs")
        self.logs.mkdir()
        self._model = load_teacher(TeacherConfig(model=str(teacher)), torch.device("cpu"), "teacher", "teacher")
        self._data = DataConfig.model_validate({"sources": [{"files": str(text)}], "max_length": 64})
        self._store = StoreConfig.model_validate({"kind": kind, "k": 8, "num_samples": 12})

    def run(self, name: str, world: int, kill_at: int | None = None) -> tuple[list[int], list[str], int]:
        """Signals that ended the processes (0: none), keys of the documents they began to compute, lines they ran. When one
        is killed, so are the others."""
        children = {
            self._fork(lambda rank=rank: self._build(f"{name}-{rank}", rank, world, kill_at)) for rank in range(world)
        }
        ended = []
        while children:
            pid, status = os.wait()
            children.discard(pid)
            ended.append(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
            assert ended[-1] in (0, signal.SIGKILL) and (ended[-1] or os.WEXITSTATUS(status) == 0), (name, status)
            if ended[-1]:
                for other in children:
                    os.kill(other, signal.SIGKILL)
        logs = [self.logs / f"{name}-{rank}" for rank in range(world)]
        computed = [key for log in logs if log.exists() for key in log.read_text().split()]
        lines = [int(path.read_text()) for path in self.logs.glob(f"{name}-*.lines")]
        return ended, computed, max(lines, default=0)

    @staticmethod
    def _fork(work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _build(self, name: str, rank: int, world: int, kill_at: int | None) -> None:
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line":
                lines += 1
                if lines == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        write = CacheWriter.write

        def logged(writer: CacheWriter, examples: Any) -> None:
            with open(self.logs / name, "a", encoding="utf-8") as log:
                log.writelines(f"{example.key}\n" for example in examples)
            return write(writer, examples)

        CacheWriter.write = logged
        threading.settrace(trace)
        sys.settrace(trace)
        options = {"name": "teacher", "batch_tokens": 40, "shard_seconds": 0.0}
        build(self._model, self._store, self._data, self.folder, rank=rank, world=world, **options)
        sys.settrace(None)
        (self.logs / f"{name}.lines").write_text(str(lines))

    def finished(self) -> set[str]:
        return set(content(self.folder)) if (self.folder / "manifest.json").exists() else set()


def main(folder: str, teacher: str, text: str, kind: str, world: int, kills: int, seed: int) -> dict[str, Any]:
    whole = Builds(Path(folder) / "whole", Path(teacher), Path(text), kind)
    _, computed, _ = whole.run("whole", 1)
    _, again, idle_lines = whole.run("again", 1)  # with nothing left to do
    expected = content(whole.folder)
    assert sorted(computed) == sorted(expected) and not again

    builds = Builds(Path(folder) / "killed", Path(teacher), Path(text), kind)
    # While the folder is made; before or within the first batches; and further on, for the less there is to do, the fewer
    # lines go by before the first batch.
    spans = [(1, 150), (1, idle_lines), (idle_lines // 3, idle_lines)]
    generator = random.Random(seed)
    computed_again = killed = number = 0
    progress = []
    while killed < kills:
        before = builds.finished()
        ended, computed, _ = builds.run(
            f"kill-{number}", world, generator.randrange(*spans[killed * len(spans) // kills])
        )
        number += 1
        killed += signal.SIGKILL in ended
        assert number < 2 * kills
        computed_again += len(before & set(computed))
        assert before <= builds.finished()
        progress.append(len(builds.finished()))
    before = builds.finished()
    ended, computed, _ = builds.run("end", world)
    assert ended == [0] * world
    return {
        "killed": killed,
        "computed_again": computed_again + len(before & set(computed)),
        "documents": len(expected),
        "progress": progress,
        "same": content(builds.folder) == expected,
        "left": sorted(path.name for path in builds.folder.iterdir() if path.name == f"{files.UNFINISHED}cache"),
    }


if __name__ == "__main__":
    *words, world, kills, seed = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps(main(*words, int(world), int(kills), int(seed))))
