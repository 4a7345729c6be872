"""Ranks that wait for each other, and who it is that they wait for.

A collective that fails says that it failed, and not because of whom. So each rank notes in the group's store at which step it
is, and that it has lost the others; who is behind, or noted nothing, is the one.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from potstill.parallel.mesh import Ranks
from potstill.types import PotstillError

GRACE = 5.0  # seconds in which all who wait notice it
ANSWER = 15.0  # … and in which the store answers, if at all
FAILED = re.compile(r"gloo|nccl|timed? ?out|connection|broken pipe|socket", re.IGNORECASE)
LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class RanksLost(PotstillError):
    """Nobody's mistake: beginning anew at the last checkpoint may mend it."""


@dataclass
class Watch:
    """Over the steps of one process."""

    ranks: Ranks
    timeout: float  # seconds to wait for others within a step, once the first is taken
    _waiting: bool = field(default=False, init=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number`, with whatever is told, evaluated and saved after it."""
        if not self.ranks.many:
            yield
            return
        began = time.monotonic()
        try:
            _store().set(f"at/{self.ranks.rank}", str(number))
            yield
        except RuntimeError as error:  # torch knows no narrower kind for what gloo says
            if not isinstance(error, dist.DistError) and not FAILED.search(str(error)):
                raise
            waited = time.monotonic() - began if LATE.search(str(error)) else None
            raise RanksLost(self._explained(number, error, waited)) from error
        if not self._waiting:  # loading, compiling and the first pass differ between ranks by more than that
            self._waiting = True
            for group in list(c10d._world.pg_map):
                c10d._set_pg_timeout(timedelta(seconds=self.timeout), group)

    def _explained(self, number: int, error: RuntimeError, waited: float | None) -> str:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        found: list[list[int]] = []
        # A store behind a cut link may not answer, and cannot be told how long to try.
        asking = threading.Thread(target=lambda: found.append(self._to_blame(number)), daemon=True)
        asking.start()
        asking.join(ANSWER)
        if not found:
            return f"step {number}: rank {self.ranks.rank} lost rank 0, which all ranks meet at ({said})"
        if not found[0]:
            return f"step {number}: the ranks lost each other ({said})"
        who = f"rank{'s' if len(found[0]) > 1 else ''} {', '.join(map(str, found[0]))}"
        if waited is None:
            return f"step {number}: {who} left ({said})"
        return f"step {number}: waited {waited:.0f} s for {who} (train.timeout is {self.timeout:g})"

    def _to_blame(self, number: int) -> list[int]:
        """Those that are at an earlier step; where there are none, those that did not lose the others."""
        store, everyone = _store(), range(self.ranks.world)
        store.set(f"lost/{self.ranks.rank}", str(number))
        end = time.monotonic() + GRACE
        while (silent := [r for r in everyone if not store.check([f"lost/{r}"])]) and time.monotonic() < end:
            time.sleep(0.05)
        at = {rank: int(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else -1 for rank in silent}
        return [rank for rank in silent if at[rank] < number] or silent


def _store() -> Any:
    return c10d._get_default_store()


def restarts_cannot_succeed() -> str | None:
    """A word of warning where torchrun may begin the ranks anew and they would not find each other."""
    environment = os.environ
    allowed = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if allowed and environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        return (
            f"torchrun may restart these processes ({allowed} times), and each restart will fail: the addresses of dead ranks "
            "stay in its store unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set where torchrun is started (potstill launch "
            "does)"
        )
    return None
