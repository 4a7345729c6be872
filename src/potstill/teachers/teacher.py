"""The one teacher: a source of signal seen through a tokenizer view, asked about all documents of a batch or about some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from potstill.data import collate
from potstill.teachers.protocols import Plan, Reading, Signal, SignalSource, TokenizerView
from potstill.types import Batch, Example, Prepared, Target

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


class Teacher(Generic[Source]):
    """`filter`: the values of columns that records must have for this teacher to be asked about them."""

    def __init__(
        self,
        source: Source,
        view: TokenizerView,
        name: str,
        weight: float = 1.0,
        filter: Mapping[str, str | list[str]] | None = None,
    ) -> None:
        self.source, self.view, self.name, self.weight = source, view, name, weight
        self.ahead, self.fixed, self.skips = source.ahead, source.fixed, source.skips
        self._filter = {column: [kept] if isinstance(kept, str) else kept for column, kept in (filter or {}).items()}

    def _wants(self, example: Example) -> bool:
        return all(example.columns[column] in kept for column, kept in self._filter.items())

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
        ready = prepared
        assert isinstance(ready, Ready)
        if ready.batch is None:
            return None, ready
        device, rows = batch.input_ids.device, ready.rows
        part = batch if rows is None else ready.batch.to(device)
        if ready.plan is None:
            ready = self._read(part, rows, compute=True)
        if ready.known is not None and not ready.known.any():
            return None, ready
        assert ready.plan is not None and ready.reading is not None
        signals = self.source.signal(part, ready.reading, ready.plan.asked, ready.signals)
        target = ready.plan.target(signals, device)
        return target if rows is None else target.spread(np.flatnonzero(rows), len(batch.rows)), ready

    def targets(self, batch: Batch, prepared: Prepared | None = None) -> Target:
        """The target of a batch that it has something to say about."""
        target, _ = self.answer(batch, self.prepare(batch) if prepared is None else prepared)
        assert target is not None
        return target

    def close(self) -> None:
        self.source.close()
