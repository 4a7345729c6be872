"""What a fork of the forge can do besides running a command. Each gives an exit code, as a command does."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import potstill
from potstill.config import DataConfig
from potstill.config.recipe import checked, load_recipe, recipe_yaml
from potstill.models import load_tokenizer
from potstill.training.run import Callback, Run
from potstill.types import PotstillError

TOKENIZER = "shipped:tokenizers/bytes-2k"


def _as_a_command(work: Callable[..., None]) -> Callable[..., int]:
    """A refusal is one sentence on stderr and exit code 1."""

    @wraps(work)
    def call(*arguments: str) -> int:
        try:
            work(*arguments)
        except PotstillError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    return call


class _KilledAfterSaving(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def saved(self, run: Run, checkpoint: Path) -> None:
        if run.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until(recipe: str, step: str) -> None:
    """A run that is killed when it has saved a step."""
    potstill.train(recipe, [_KilledAfterSaving(int(step))])


def read_recipe(path: str) -> None:
    """A recipe that is read can be written, and read again to the same."""
    recipe = load_recipe(path)
    text = recipe_yaml(recipe)
    Path("again.yaml").write_text(text, encoding="utf-8")
    if recipe_yaml(load_recipe("again.yaml")) != text:
        raise AssertionError("the recipe that was written is not the one that was read")


@cache
def _tokenizer() -> Any:
    return load_tokenizer(TOKENIZER, "the forge")


def read_data(section: str) -> None:
    """All records of a `data` section, as tokens."""
    from potstill.data import StepBatches

    keys = json.loads(section)
    tokenizer = _tokenizer()
    if (template := keys.pop("template", None)) is not None:
        tokenizer.chat_template = template
    data = checked(DataConfig, {"max_length": 64, "shuffle": False, **keys}, "data")
    windows = StepBatches(data, tokenizer, batch_size=4, micro_batch_size=4, seed=0, epochs=1)
    for _ in windows:
        pass


class _Watched(Callback):
    """What the process holds, every few steps."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, list[dict[str, int]]()

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step % self.every:
            return
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is freed is given back: what is left is held
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen.append(
            {
                "step": run.step,
                "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
        )


def soak(recipe: str, out: str) -> None:
    """A run that is watched."""
    watched = _Watched(5)
    potstill.train(recipe, [watched])
    Path(out).write_text(json.dumps(watched.seen))


CALLS = {name: _as_a_command(call) for name, call in {
    "train_until": train_until, "read_recipe": read_recipe, "read_data": read_data, "soak": soak,
}.items()}  # fmt: skip
