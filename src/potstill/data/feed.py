"""The one feed of a run: step batches of a data set or of rollouts, with what the teachers made ready for them.

StepBatches (loader.py) ─┐
                         ├─► without what teachers lack ─► prepared by the teachers, ahead ─► optimizer step
rollouts (types.py) ─────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from potstill.data.layout import widened, without
from potstill.data.loader import StepBatches
from potstill.data.prefetch import Interrupted, Prefetched, result_of
from potstill.data.stream import State
from potstill.data.upload import Arriving, Uploads
from potstill.parallel.agree import Rounds
from potstill.transfer import CPU, use_device
from potstill.types import Batch, PotstillError, Prepared, RolloutSource, StepBatch, Teacher

SKIPPED = "skipped_examples"
LOOKED_UP = 10_000  # documents, before a run begins
NOTHING_LEFT = "data: on_missing is skip, and the cache has none of the documents"


def without_missing(
    steps: Iterable[StepBatch], teachers: Sequence[Teacher], counts: Mapping[str, int], rounds: Rounds | None = None
) -> Iterator[StepBatch]:
    """Step batches without the documents that a teacher lacks; those of which nothing is left are passed over. `counts`: of
    what went before. `rounds`: with the ranks among which the rows are dealt."""
    skipped, unused = counts.get(SKIPPED, 0), 0
    barren: int | None = None  # the epoch since which nothing was left
    skips = any(teacher.skips for teacher in teachers)
    for step in steps:
        if not skips:
            yield step
            continue
        batches, left_out, before = [], 0, sum(batch.supervised_tokens for batch in step.batches)
        for batch in step.batches:
            missing = sorted({i for teacher in teachers for i in teacher.missing(batch)})
            left_out += len(missing)
            batches.append(without(batch, missing) if missing else batch)
        left = sum(batch.supervised_tokens for batch in batches)
        now = {"left_out": left_out, "unused": before - left, "left": left}
        if rounds is not None:
            now = rounds.totals(**now)
        skipped, unused = skipped + now["left_out"], unused + now["unused"]
        if not now["left"]:
            barren = step.epoch if barren is None else barren
            if step.epoch > barren + 1:  # it would go on like that for ever
                raise PotstillError(NOTHING_LEFT)
            continue
        barren = None
        if skipped:
            totals = {**step.counts, SKIPPED: skipped}
            totals["supervised_tokens"] -= unused
            step = replace(step, batches=tuple(batches), counts=totals, state={**step.state, "counts": totals})
        yield step


def check_there(steps: Callable[[], Iterable[StepBatch]], teachers: Sequence[Teacher], most: int) -> None:
    """Before a run of `most` steps: that a cache with no model beside it has what the run reads first. What is missing later
    on is told when it is read ahead: to look everything up would be to read the data twice."""
    fixed = [teacher for teacher in teachers if teacher.fixed]
    looked_up = 0
    for step in islice(steps(), most) if fixed else ():
        examples = [example for batch in step.batches for example in batch.examples]
        for teacher in fixed:
            teacher.check_there(examples)
        looked_up += len(examples)
        if looked_up >= LOOKED_UP or step.epoch:
            return


def count_left(steps: Iterable[StepBatch], teachers: Sequence[Teacher], progress: Callable[[int], None]) -> int:
    """How many step batches `without_missing` gives."""
    total = 0
    for total, _ in enumerate(without_missing(steps, teachers, {}), 1):
        progress(total)
    if not total:
        raise PotstillError(NOTHING_LEFT)
    return total


@dataclass(frozen=True)
class PreparedStep:
    """A step batch, and what each teacher makes ready for each of its micro-batches on another thread."""

    step: StepBatch
    futures: Sequence[Sequence[Future[Any]]]
    interrupted: Interrupted = lambda: False
    arriving: Sequence[Future[Arriving]] | None = None  # the micro-batches, on their way to the device

    @property
    def ready(self) -> Iterator[list[Any]]:
        """Micro-batch by micro-batch; waited for where it is read."""
        for futures in self.futures:
            yield [result_of(future, self.interrupted) for future in futures]

    def on(self, device: torch.device) -> Iterator[tuple[Batch, list[Any]]]:
        """The micro-batches on the device, each with what the teachers made ready for it."""
        for number, (batch, ready) in enumerate(zip(self.step.batches, self.ready, strict=True)):
            there = None if self.arriving is None else result_of(self.arriving[number], self.interrupted)
            yield batch.to(device) if there is None else there(), ready

    def waited_for(self) -> PreparedStep:
        """The same, once all of it is there."""
        for _ in self.ready:
            pass
        return self


def _leave(steps: StepBatches, kind: object, error: BaseException | None, *_: object) -> None:
    """By all ranks, or by none: one that ends by an error of its own would wait for others that wait for it."""
    if error is None or (isinstance(error, PotstillError) and error.shared):
        steps.leave()


class Feed(ExitStack):
    """An iterator of prepared step batches, of a data set (`StepBatches`) or of rollouts: teachers prepare the next ones, on
    `workers` threads, while the present one trains. `counts`: of what went before. `interrupted`: asked now and then whether
    to stop waiting (StoppedWaiting). `device`: where it trains; micro-batches are sent there ahead, as wide as a multiple
    of `multiple`."""

    def __init__(
        self,
        steps: StepBatches | RolloutSource,
        teachers: Sequence[Teacher],
        counts: Mapping[str, int] | None = None,
        *,
        workers: int = 1,
        interrupted: Interrupted = lambda: False,
        device: torch.device = CPU,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        self._uploads, self._multiple = Uploads(device), multiple
        self._teachers, self._interrupted = teachers, interrupted
        self._rollouts = None if isinstance(steps, StepBatches) else steps
        self.collective = self._rollouts is not None  # several ranks ask for the next step together, or not at all
        self.notes: Sequence[str] = () if self._rollouts is None else self._rollouts.notes
        # All that a step batch asks of servers is under way at once.
        threads = max([workers, *(teacher.ahead for teacher in teachers)])
        self._pool = ThreadPoolExecutor(threads, "prepare", use_device, (device,))
        self.callback(self._pool.shutdown, cancel_futures=True)
        if isinstance(steps, StepBatches):
            self.push(partial(_leave, steps))  # when the threads below have ended
            left = without_missing(steps, teachers, counts or {}, steps.rounds)
            read = self.enter_context(Prefetched(left, depth=steps.group_steps))
            begun = Prefetched((self._begin(step) for step in read), depth=workers, interrupted=interrupted)
            self._prepared: Iterator[PreparedStep] = self.enter_context(begun)
        else:
            self._prepared = self._written(steps)
            self.callback(steps.close)

    def __iter__(self) -> Iterator[PreparedStep]:
        return self

    def __next__(self) -> PreparedStep:
        return next(self._prepared)

    def _begin(self, step: StepBatch) -> PreparedStep:
        step = replace(step, batches=tuple(widened(batch, self._multiple) for batch in step.batches))
        futures = [[self._pool.submit(self._prepare, one, batch) for one in self._teachers] for batch in step.batches]
        arriving = [self._pool.submit(self._uploads.begin, batch) for batch in step.batches]
        return PreparedStep(step, futures, self._interrupted, arriving)

    def _prepare(self, teacher: Teacher, batch: Batch) -> Prepared:
        return self._uploads.pinned(teacher.prepare(batch))

    def _written(self, rollouts: RolloutSource) -> Iterator[PreparedStep]:
        """One is begun ahead, where it is written already."""
        begun: deque[PreparedStep] = deque()
        for step in rollouts:
            begun.append(self._begin(step))
            while len(begun) > (1 if rollouts.waiting else 0):
                yield begun.popleft()

    def advance(self, version: int) -> None:
        """The student has new weights, after so many optimizer steps: whoever writes with them is handed them."""
        if self._rollouts is not None:
            self._rollouts.advance(version)

    def save(self, folder: Path, state: State) -> None:
        """Put what was written, and is still to be trained on after `state`, into a checkpoint."""
        if self._rollouts is not None:
            self._rollouts.save(folder, state)
