"""Ranks that wait for each other, and who it is that they wait for.

A collective that fails says that it failed, and not because of whom. So each rank notes in the group's store at which step it
is, and that it has lost the others; who is behind, or noted nothing, is the one.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from potstill.parallel.mesh import Ranks
from potstill.types import PotstillError

GRACE = 5.0  # seconds in which all who wait notice that one does not come
QUIET = 1.0  # … and without news, after which those who can notice that one is dead have done so
ANSWER = 15.0  # … and in which the store answers, if at all
RESUMES = "the same command resumes at the last checkpoint"
FAILED = re.compile(r"gloo|nccl|timed? ?out|connection|broken pipe|socket", re.IGNORECASE)
PLACE_IN_SOURCE = re.compile(r"^\[[^\]]*\] ")  # of gloo's, at the beginning of what it says
LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class RanksLost(PotstillError):
    """Nobody's mistake: beginning anew at the last checkpoint may mend it."""

    at_once = True  # threads that wait for the lost ones would hold up the end


class PeerLost(RuntimeError):
    """One end of a channel has lost the other, the rank `peer`."""

    def __init__(self, words: str, peer: int) -> None:
        super().__init__(words)
        self.peer = peer


@dataclass
class Watch:
    """Over the steps of one process."""

    ranks: Ranks
    timeout: float  # seconds to wait for others within a step, once the first is taken
    _waiting: bool = field(default=False, init=False)
    _first: str = field(default="rank 0", init=False)  # and where that is

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number`, with whatever is told, evaluated and saved after it."""
        if not self.ranks.many:
            yield
            return
        began = time.monotonic()
        try:
            note_place(self.ranks, number)
            yield
            if not self._waiting:  # loading, compiling and the first pass differ between ranks by more than that
                self._waiting, self._first = True, _place(0)
                # A thread that plans ahead waits until others need more, which may be long: an evaluation, say.
                for group in c10d._world.pg_map.keys() - {self.ranks.data}:
                    c10d._set_pg_timeout(timedelta(seconds=self.timeout), group)
        except RuntimeError as error:  # torch knows no narrower kind for what gloo says
            if not is_loss(error):
                raise
            raise RanksLost(self._explained(number, error, time.monotonic() - began)) from error

    def _explained(self, number: int, error: RuntimeError, waited: float) -> str:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        said = PLACE_IN_SOURCE.sub("", line).split(". ")[0].rstrip(".")
        found: list[tuple[list[str], bool]] = []
        # A store behind a cut link may not answer, and cannot be told how long to try.
        blamed = error.peer if isinstance(error, PeerLost) else None
        asking = threading.Thread(target=self._ask, args=(number, bool(LATE.search(line)), blamed, found), daemon=True)
        asking.start()
        asking.join(ANSWER)
        limit = f"train.timeout is {self.timeout:g}"
        if not found:
            return (
                f"step {number}: lost {self._first}, at which all ranks meet ({said}; {limit}): see what it said, "
                f"whether it hangs, and the network between; {RESUMES}"
            )
        places, late = found[0]
        if not places:
            return (
                f"step {number}: the ranks lost each other ({said}; {limit}): see the network between them; {RESUMES}"
            )
        who = ", ".join(places)
        if not late:  # who waits for one that waits for the dead one notices when that one leaves
            left = f"{who} left" if len(places) == 1 else f"of {who} at least one left"
            return f"step {number}: {left} ({said}): see there what ended it; {RESUMES}"
        return (
            f"step {number}: waited {waited:.0f} s ({limit}) for {who}: see there what it does (py-spy dump), and the network "
            f"between, or raise train.timeout; {RESUMES}"
        )

    def _ask(self, number: int, late: bool, blamed: int | None, found: list[tuple[list[str], bool]]) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it rank 0
            if blamed is not None:
                _store().set(f"blamed/{blamed}", "")
            silent, late = self._silent(late)
            at = {rank: _noted(rank)[0] for rank in silent}
            found.append(([_place(rank) for rank in silent if at[rank] < number] or [*map(_place, silent)], late))

    def _silent(self, late: bool) -> tuple[list[int], bool]:
        """Those that did not lose the others; and whether anybody waited in vain: to the others, who did is gone. A teacher's
        rank takes no steps, and so notices nothing: it is among them if somebody who asked it says so."""
        store, silent = _store(), [*range(self.ranks.students)]
        note_loss(self.ranks, late)
        began = news = time.monotonic()
        while silent and time.monotonic() < min(began + GRACE, news + (GRACE if late else QUIET)):
            time.sleep(0.05)
            heard = [rank for rank in silent if store.check([f"lost/{rank}"])]
            late = late or any(store.get(f"lost/{rank}") == b"late" for rank in heard)
            silent = [rank for rank in silent if rank not in heard]
            news = time.monotonic() if heard else news
        teachers = range(self.ranks.students, self.ranks.world)
        blamed = [rank for rank in teachers if store.check([f"blamed/{rank}"]) and not store.check([f"lost/{rank}"])]
        return silent + blamed, late


def is_loss(error: Exception) -> bool:
    """Whether it says that another rank is gone, or does not come."""
    return isinstance(error, dist.DistError | PeerLost) or FAILED.search(str(error)) is not None


def note_place(here: Ranks, step: int, whose: str = "") -> None:
    """At which step a rank is, and where that rank is."""
    _store().set(f"at/{here.rank}", f"{step} process {os.getpid()} on {socket.gethostname()}{whose}")


def note_loss(here: Ranks, late: bool = False) -> None:
    """That this rank has lost another one, and so is not the one that is looked for."""
    _store().set(f"lost/{here.rank}", "late" if late else "gone")


def _noted(rank: int) -> tuple[int, str]:
    """The step a rank is at, and where that rank is."""
    if not _store().check([f"at/{rank}"]):
        return -1, ""
    step, _, place = _store().get(f"at/{rank}").decode().partition(" ")
    return int(step), place


def _place(rank: int) -> str:
    place = _noted(rank)[1]
    return f"rank {rank} ({place})" if place else f"rank {rank}"


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
