"""The one teacher: a source of signal seen through a tokenizer view, asked about all documents of a batch or about some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from potstill.data import collate
from potstill.parallel.team import Team
from potstill.teachers.protocols import Plan, Reading, Signal, SignalSource, TokenizerView
from potstill.types import Batch, Example, PotstillError, Prepared, Target

Source = TypeVar("Source", bound=SignalSource, covariant=True)
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ready(Prepared):
    """What the prefetch thread could do for a batch. Without a plan, the source still has to compute some of it."""

    batch: Batch | None = None  # of the documents that the teacher is asked about; None: there are none
    rows: Bools | None = None  # [N]; the rows of these documents; None: all
    reading: Reading | None = None
    plan: Plan | None = None
    signals: Sequence[Signal] = ()


def teaches(filter: Mapping[str, str | list[str]], example: Example) -> bool:
    """Whether a record has the values of columns that a teacher's filter asks for."""
    kept = ((example.columns[column], [one] if isinstance(one, str) else one) for column, one in filter.items())
    return all(value in values for value, values in kept)


class Teacher(Generic[Source]):
    """`filter`: the values of columns that records must have for this teacher to be asked about them. `team`: the ranks with
    the same rows, where only the first of them asks the source, and tells the others: a cache may change, and a server is
    not asked twice."""

    def __init__(
        self,
        source: Source,
        view: TokenizerView,
        name: str,
        weight: float = 1.0,
        filter: Mapping[str, str | list[str]] | None = None,
        team: Team | None = None,
    ) -> None:
        self.source, self.view, self.name, self.weight = source, view, name, weight
        self.ahead, self.fixed, self.skips = source.ahead, source.fixed, source.skips
        self._team = team if team is not None and team.many else None
        self._filter = filter or {}

    def _wants(self, example: Example) -> bool:
        return teaches(self._filter, example)

    def _part(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        """A batch of the documents that this teacher is asked about, and their indices."""
        if not self._filter:
            return batch, list(range(len(batch.examples)))
        kept = [i for i, e in enumerate(batch.examples) if self._wants(e) and e.supervised.any()]
        return collate([[batch.examples[i]] for i in kept], pad_id=0) if kept else None, kept

    def missing(self, batch: Batch) -> Sequence[int]:
        part, kept = self._part(batch)
        return [] if part is None else [kept[i] for i in self.source.missing(part)]

    def check_there(self, examples: Sequence[Example]) -> None:
        self.source.check_there([example for example in examples if self._wants(example)])

    def prepare(self, batch: Batch) -> Ready:
        if self._team is not None and not self._team.leads:
            return Ready()
        part, kept = self._part(batch)
        rows = None
        if self._filter:
            wanted = np.isin(np.arange(len(batch.examples)), kept)
            rows = np.repeat(wanted, [example.supervised_tokens for example in batch.examples])
        return Ready(known=rows) if part is None else self._read(part, rows, compute=False)

    def _read(self, batch: Batch, rows: Bools | None, *, compute: bool) -> Ready:
        reading = self.source.read(batch, compute)
        if reading is None:
            return Ready(batch=batch, rows=rows)
        plan = self.view.plan(batch, reading.examples)
        signals = self.source.prepare(reading, plan.asked)
        plan = plan.prepared(signals)
        known = plan.known if rows is None else rows.copy()
        if rows is not None and known is not None and plan.known is not None:
            known[rows] = plan.known
        return Ready(known, plan.counts, batch, rows, reading, plan, signals)

    @torch.no_grad()  # not inference_mode: its tensors could not enter the student's backward
    def answer(self, batch: Batch, prepared: Prepared) -> tuple[Target | None, Prepared]:
        ready, device = prepared, batch.input_ids.device
        assert isinstance(ready, Ready)
        ready = self._computed(ready, batch) if self._team is None else self._told(ready, batch)
        if ready.batch is None or (ready.known is not None and not ready.known.any()):
            self.source.idle(device)
            return None, ready
        assert ready.plan is not None and ready.reading is not None
        rows = ready.rows
        part = batch if rows is None else ready.batch.to(device)
        signals = self.source.signal(part, ready.reading, ready.plan.asked, ready.signals)
        target = ready.plan.target(signals, device)
        return target if rows is None else target.spread(np.flatnonzero(rows), len(batch.rows)), ready

    def _computed(self, ready: Ready, batch: Batch) -> Ready:
        """With what the prefetch thread could not do."""
        with self.source.computing():
            if ready.batch is None or ready.plan is not None:
                return ready
            part = batch if ready.rows is None else ready.batch.to(batch.input_ids.device)
            return self._read(part, ready.rows, compute=True)

    def _told(self, ready: Ready, batch: Batch) -> Ready:
        """What the first rank of the team found, for all of them."""
        assert self._team is not None
        own, error = ready, None
        try:
            own = self._computed(ready, batch)
        except PotstillError as raised:
            error = raised
        found = self._team.of_first(lambda: _sent(own, error))
        if self._team.leads:
            return own
        plan = None if found.plan is None else replace(found.plan, view=self.view)
        return replace(found, plan=plan)

    @property
    def waited(self) -> float:
        return self.source.waited

    def targets(self, batch: Batch, prepared: Prepared | None = None) -> Target:
        """The target of a batch that it has something to say about."""
        target, _ = self.answer(batch, self.prepare(batch) if prepared is None else prepared)
        assert target is not None
        return target

    def close(self) -> None:
        self.source.close()


def _sent(ready: Ready, error: PotstillError | None) -> Ready:
    """As other ranks need it: without the documents, which `signal` does not look at where they came with their signal."""
    if error is not None:
        raise error
    plan = None if ready.plan is None else replace(ready.plan, view=None)
    return replace(ready, plan=plan, reading=None if ready.reading is None else Reading(()))
