"""Pieces of several sources as one shuffled stream that can begin again anywhere.

A state is a small JSON-able value. It names records, not bytes in a buffer: what was held in memory is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potstill.config import DataConfig
from potstill.data.examples import Piece, Pieces, piece_maker
from potstill.data.sources import Source, generator
from potstill.types import PotstillError

State = dict[str, Any]

FIRST_PIECE = [0, 0, 0, 0]  # of a cursor: epoch, part, record, pieces of it taken
DRAWS_AT_ONCE = 4096
BLOCK_WITHOUT_SHUFFLE = 1024


class Cursor:
    """Where one source's pieces have been read up to."""

    def __init__(self, source: Source, pieces: Pieces, state: Sequence[int]) -> None:
        self.source = source
        self._pieces = pieces
        self.epoch, self._part, self._record, self._taken = state
        self._iterator = self._epoch_pieces()

    def state(self) -> list[int]:
        return [self.epoch, self._part, self._record, self._taken]

    def take(self) -> Piece | None:
        """The next piece; None once at the end of each epoch."""
        piece = next(self._iterator, None)
        if piece is None:
            self.epoch, self._part, self._record, self._taken = self.epoch + 1, 0, 0, 0
            self._iterator = self._epoch_pieces()
        return piece

    def _epoch_pieces(self) -> Iterator[Piece]:
        start, skip = (self._part, self._record), self._taken
        fresh = start == (0, 0) and not skip
        records = found = 0
        for record, where, position in self.source.records(self.epoch, start):
            records += 1
            (self._part, self._record), self._taken = position, 0
            for number, piece in enumerate(self._pieces(record, where), 1):
                if number > skip:
                    found += 1
                    self._taken = number
                    yield piece
            skip = 0
        if fresh and not found:
            key = self.source.key
            if records:
                raise PotstillError(
                    f"{key}.fraction: {self.source.config.fraction} keeps none of the source's {records} records"
                )
            name = self.source.config.dataset or self.source.config.files
            raise PotstillError(f"{key}: {name if isinstance(name, str) else ', '.join(name or ())} holds no records")


class Mixture:
    """Several sources as one: drawn by weight, without end, or without weights one after another, epoch by epoch."""

    def __init__(
        self,
        cursors: Sequence[Cursor],
        weights: Sequence[float] | None,
        *,
        seed: int,
        epochs: int | None,
        state: State,
    ) -> None:
        self._cursors = cursors
        self._seed = seed
        self._epochs = epochs
        self._shares = None if weights is None else np.cumsum(weights) / np.sum(weights)
        self._draws: Any = None
        self._source: int = state["source"]
        self._drawn: int = state["drawn"]

    def state(self) -> State:
        return {"sources": [cursor.state() for cursor in self._cursors], "source": self._source, "drawn": self._drawn}

    def take(self, most: int) -> tuple[list[Piece], int]:
        """Up to `most` pieces and their epoch (by weight: the last that all sources have reached); none at the end."""
        pieces: list[Piece] = []
        epoch = self._epoch()
        while len(pieces) < most and (self._epochs is None or epoch < self._epochs):
            cursor = self._cursors[self._source if self._shares is None else self._draw()]
            piece = cursor.take()
            if piece is None and self._shares is not None:
                piece = cursor.take()  # goes round; drawing anew instead would favour the longer sources
            if piece is not None:
                pieces.append(piece)
                continue
            self._source = (self._source + 1) % len(self._cursors)
            if self._source == 0 and pieces:
                break
            epoch = self._epoch()
        return pieces, epoch

    def _epoch(self) -> int:
        return min(cursor.epoch for cursor in self._cursors)

    def _draw(self) -> int:
        assert self._shares is not None
        if self._draws is None or self._drawn % DRAWS_AT_ONCE == 0:
            self._draws = generator(self._seed, 3, self._drawn // DRAWS_AT_ONCE).random(DRAWS_AT_ONCE)
        drawn = self._draws[self._drawn % DRAWS_AT_ONCE]
        self._drawn += 1
        return int(min(np.searchsorted(self._shares, drawn, side="right"), len(self._cursors) - 1))


class Blocks:
    """A mixture in blocks of `size` pieces, each shuffled by (seed, epoch, number of the block)."""

    def __init__(self, mixture: Mixture, *, seed: int, size: int, shuffle: bool, state: State) -> None:
        self._mixture = mixture
        self._seed = seed
        self._size = size if shuffle else min(size, BLOCK_WITHOUT_SHUFFLE)
        self._shuffle = shuffle
        self._number: int = state["block"]
        self._index: int = state["index"]

    def __iter__(self) -> Iterator[tuple[Piece, Place]]:
        """Every piece with its place."""
        while True:
            start = self._mixture.state()
            pieces, epoch = self._mixture.take(self._size)
            if not pieces:
                return
            order = range(len(pieces))
            if self._shuffle:
                order = generator(self._seed, 4, epoch, self._number).permutation(len(pieces)).tolist()
            block = Block(start, self._number, epoch)
            for i in range(self._index, len(pieces)):
                yield pieces[order[i]], Place(block, i)
            self._number += 1
            self._index = 0


@dataclass(frozen=True)
class Block:
    """Where a block begins in the mixture."""

    mixture: State
    number: int
    epoch: int


@dataclass(frozen=True)
class Place:
    """Where a piece stands in the shuffled stream."""

    block: Block
    index: int

    def state(self, after: bool = False) -> State:
        """What to begin again from: this piece, or the one after it."""
        return {"mixture": self.block.mixture, "block": self.block.number, "index": self.index + after}


def beginning(sources: int) -> State:
    """Where a stream of so many sources starts."""
    mixture = {"sources": [FIRST_PIECE] * sources, "source": 0, "drawn": 0}
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
) -> tuple[Blocks, list[str | None]]:
    """The sources of `data` as one stream, from where `state` (its `start`, with the sources' `fingerprints`) says; and their
    fingerprints now."""
    sources = [
        Source(config, f"{key}.sources[{index}]", seed=seed, shuffle=data.shuffle, further=data.columns)
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
    cursors = []
    for source, position in zip(sources, positions, strict=True):
        maker = piece_maker(data, source.config, source.key, tokenizer)
        cursors.append(Cursor(source, maker, position))
    mixture = Mixture(cursors, weights or None, seed=seed, epochs=epochs, state=start["mixture"])
    fingerprints = [source.fingerprint() for source in sources]
    if state is not None and not changed_data_ok:
        _check_unchanged(sources, state["fingerprints"], fingerprints)
    return Blocks(mixture, seed=seed, size=data.shuffle_buffer, shuffle=data.shuffle, state=start), fingerprints


def _check_unchanged(sources: Sequence[Source], then: Sequence[str | None], now: Sequence[str | None]) -> None:
    for source, before, after in zip(sources, then, now, strict=True):
        if before != after:
            raise PotstillError(
                f"{source.key} is not what the run began with (then {before or 'a stream'}; now {after or 'a stream'}), "
                "so the run's place in it means nothing; put the data back, choose another folder with run=, or go on "
                "all the same with checkpoint.resume=force"
            )
