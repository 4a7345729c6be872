"""Examples of several sources as one shuffled stream that can begin again anywhere.

A state is a small JSON-able value. It names records, not bytes in a buffer: what was held in memory is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potstill.config import DataConfig
from potstill.data.examples import MakeExamples, example_maker
from potstill.data.sources import Source, generator
from potstill.types import Example, PotstillError

State = dict[str, Any]

FIRST_EXAMPLE = [0, 0, 0, 0]  # of a cursor: epoch, part, record, examples of it taken
DRAWS_AT_ONCE = 4096
BLOCK_WITHOUT_SHUFFLE = 1024


class Cursor:
    """Where one source's examples have been read up to."""

    def __init__(self, source: Source, make: MakeExamples, state: Sequence[int]) -> None:
        self._source, self._make = source, make
        self.epoch, self._part, self._record, self._taken = state
        self._examples = self._read()

    def state(self) -> list[int]:
        return [self.epoch, self._part, self._record, self._taken]

    def take(self) -> Example | None:
        """The next example; None once at the end of each epoch."""
        example = next(self._examples, None)
        if example is None:
            self.epoch, self._part, self._record, self._taken = self.epoch + 1, 0, 0, 0
            self._examples = self._read()
        return example

    def _read(self) -> Iterator[Example]:
        """What is left of the epoch."""
        start, skip = (self._part, self._record), self._taken
        fresh = start == (0, 0) and not skip
        records = found = 0
        for record, where, position in self._source.records(self.epoch, start):
            records += 1
            (self._part, self._record), self._taken = position, 0
            for number, example in enumerate(self._make(record, where), 1):
                if number > skip:
                    found += 1
                    self._taken = number
                    yield example
            skip = 0
        if fresh and not found:
            key, config = self._source.key, self._source.config
            if records:
                raise PotstillError(f"{key}.fraction: {config.fraction} keeps none of the source's {records} records")
            name = config.dataset or config.files
            raise PotstillError(f"{key}: {name if isinstance(name, str) else ', '.join(name or ())} holds no records")


class Mixture:
    """Several sources as one: drawn by weight, without end, or without weights one after another, epoch by epoch."""

    def __init__(
        self, cursors: Sequence[Cursor], weights: Sequence[float], *, seed: int, epochs: int | None, state: State
    ) -> None:
        self._cursors, self._seed, self._epochs = cursors, seed, epochs
        self._shares = np.cumsum(weights) / np.sum(weights) if weights else None
        self._draws: Any = None
        self._source: int = state["source"]
        self._drawn: int = state["drawn"]

    def state(self) -> State:
        return {"sources": [cursor.state() for cursor in self._cursors], "source": self._source, "drawn": self._drawn}

    def take(self, most: int) -> tuple[list[Example], int]:
        """Up to `most` examples and their epoch (by weight: the last that all sources have reached); none at the end."""
        examples: list[Example] = []
        epoch = self._epoch()
        while len(examples) < most and (self._epochs is None or epoch < self._epochs):
            cursor = self._cursors[self._source if self._shares is None else self._draw(self._shares)]
            example = cursor.take()
            if example is None and self._shares is not None:
                example = cursor.take()  # goes round; drawing anew instead would favour the longer sources
            if example is not None:
                examples.append(example)
                continue
            self._source = (self._source + 1) % len(self._cursors)
            if self._source == 0 and examples:
                break
            epoch = self._epoch()
        return examples, epoch

    def _epoch(self) -> int:
        return min(cursor.epoch for cursor in self._cursors)

    def _draw(self, shares: Any) -> int:
        at = self._drawn % DRAWS_AT_ONCE
        if self._draws is None or at == 0:
            self._draws = generator(self._seed, 3, self._drawn // DRAWS_AT_ONCE).random(DRAWS_AT_ONCE)
        self._drawn += 1
        return int(min(np.searchsorted(shares, self._draws[at], side="right"), len(self._cursors) - 1))


@dataclass(frozen=True)
class Place:
    """Where an example stands in the shuffled stream."""

    mixture: State  # where its block begins
    block: int
    epoch: int
    index: int  # in the block

    def state(self, after: bool = False) -> State:
        """What to begin again from: this example, or the one after it."""
        return {"mixture": self.mixture, "block": self.block, "index": self.index + after}


Stream = Iterator[tuple[Example, Place]]


def _shuffled(mixture: Mixture, data: DataConfig, seed: int, state: State) -> Stream:
    """A mixture in blocks of shuffle_buffer examples, each shuffled by (seed, epoch, number of the block)."""
    size = data.shuffle_buffer if data.shuffle else min(data.shuffle_buffer, BLOCK_WITHOUT_SHUFFLE)
    number, index = state["block"], state["index"]
    while True:
        start = mixture.state()
        examples, epoch = mixture.take(size)
        if not examples:
            return
        order = range(len(examples))
        if data.shuffle:
            order = generator(seed, 4, epoch, number).permutation(len(examples)).tolist()
        for i in range(index, len(examples)):
            yield examples[order[i]], Place(start, number, epoch, i)
        number, index = number + 1, 0


def beginning(sources: int) -> State:
    """Where a stream of so many sources starts."""
    mixture = {"sources": [FIRST_EXAMPLE] * sources, "source": 0, "drawn": 0}
    return {"mixture": mixture, "block": 0, "index": 0}


def open_stream(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    epochs: int | None,
    state: State | None,
    key: str = "data",
    changed_data_ok: bool = False,
    each_turn: bool = False,
) -> tuple[Stream, list[str | None]]:
    """The sources of `data` as one stream, from where `state` (its `start`, with the sources' `fingerprints`) says; and their
    fingerprints now. `each_turn`: every turn of a chat is an example of its own."""
    sources = [
        Source(config, f"{key}.sources[{index}]", seed=seed, shuffle=data.shuffle, further=data.read_columns)
        for index, config in enumerate(data.sources)
    ]
    weights = [source.weight for source in data.sources if source.weight is not None]
    if weights and epochs is not None:
        raise PotstillError(f"{key}.sources: weights have no meaning when every source is read whole; leave them out")
    start = beginning(len(sources)) if state is None else state["start"]
    positions = start["mixture"]["sources"]
    if len(positions) != len(sources):
        raise PotstillError(
            f"{key}.sources: the saved state is of {len(positions)} sources, the recipe has {len(sources)}"
        )
    cursors = [
        Cursor(source, example_maker(data, source.config, source.key, tokenizer, each_turn), position)
        for source, position in zip(sources, positions, strict=True)
    ]
    mixture = Mixture(cursors, weights, seed=seed, epochs=epochs, state=start["mixture"])
    fingerprints = [source.fingerprint() for source in sources]
    if state is not None and not changed_data_ok:
        _check_unchanged(sources, state["fingerprints"], fingerprints)
    return _shuffled(mixture, data, seed, start), fingerprints


def _check_unchanged(sources: Sequence[Source], then: Sequence[str | None], now: Sequence[str | None]) -> None:
    for source, before, after in zip(sources, then, now, strict=True):
        if before != after:
            raise PotstillError(
                f"{source.key} is not what the run began with (then {before or 'a stream'}; now {after or 'a stream'}), "
                "so the run's place in it means nothing; put the data back, choose another folder with run=, or resume "
                "all the same with checkpoint.resume=force"
            )
