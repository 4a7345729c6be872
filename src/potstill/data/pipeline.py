"""From `data:` to the batches of each optimizer step, and back to any of them.

    sources ─► pieces ─► mixture ─► shuffled blocks ─► Examples ─► groups of windows ─► StepBatch

A group is as many examples as fill several windows. Within it examples are packed, or sorted by length; its windows
then come in random order. A state says where the group begins in the stream, and how many of its windows are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from potstill.config import DataConfig
from potstill.data.encoding import Encode, Encoded, Encoder, LengthsOnly
from potstill.data.examples import Piece
from potstill.data.layout import collate, pack
from potstill.data.sources import generator
from potstill.data.stream import Blocks, Place, State, beginning, open_stream
from potstill.types import Batch, Example, PotstillError

GROUP_WINDOWS = 16
GROUP_TOKENS = 2**20  # a group holds no more, unless one window does
PIECES_AT_ONCE = 256  # tokenized together

COUNTS = (
    "documents",
    "examples",
    "tokens",
    "supervised_tokens",
    "padding_tokens",
    "cut_examples",
    "cut_tokens",
    "dropped_examples",
    "dropped_tokens",
    "split_conversations",
)


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step, as micro-batches."""

    batches: tuple[Batch, ...]
    state: State  # JSON-able; StepBatches(…, state=state) goes on with the next window
    counts: dict[str, int]  # since the beginning of the run; the names are COUNTS
    epoch: int  # from 0
    facts: Mapping[str, float] = field(default_factory=dict)  # about text that was written for it, for the log


@dataclass(frozen=True)
class Item:
    """An encoded piece and where it stands in the stream."""

    encoded: Encoded
    place: Place
    number: int  # since the stream was opened


@dataclass(frozen=True)
class Group:
    """As many examples as fill several windows, laid out."""

    windows: list[list[list[Item]]]  # of rows, of examples
    dropped: Counter[str]
    before: State  # where to begin again for its first window, and for the one after its last; without counts
    after: State


class StepBatches:
    """An iterator of windows: `batch_size` rows each, packed rows of several documents or padded ones of one.

    `epochs=None` goes round without end; with epochs the last window may be smaller. `limit` ends after so many
    examples. A reader that must not stand still between groups wants them `Prefetched(windows, windows.group_windows)`.
    What lies in a window does not depend on `micro_batch_size`. `key` names the section of the recipe in messages.
    `evaluation` scores all of a text and only the text, without eos; it has no state to begin again from. A `state` of
    sources that have changed since is refused unless `changed_data_ok`.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        epochs: int | None,
        state: State | None = None,
        limit: int | None = None,
        key: str = "data",
        evaluation: bool = False,
        changed_data_ok: bool = False,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._limit = limit
        self._key = key
        self._pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self.group_windows = max(1, min(GROUP_WINDOWS, GROUP_TOKENS // (batch_size * data.max_length)))
        self._encode: Encode = Encoder(
            tokenizer, max_length=data.max_length, append_eos=data.append_eos, evaluation=evaluation, key=key
        )
        self._state = state if state is not None else _beginning(len(data.sources))
        self._blocks, self._fingerprints = open_stream(
            data, tokenizer, seed=seed, epochs=epochs, state=state, key=key, changed_data_ok=changed_data_ok
        )
        self._windows = self._run()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        return next(self._windows)

    def count(self, progress: Callable[[int], None] | None = None) -> int:
        """How many windows are still to come. Uses the iterator up; see `count_windows`."""
        self._encode = LengthsOnly(self._encode)
        total = -int(self._state["windows"])
        for group in self._groups():
            total += len(group.windows)
            if progress is not None:
                progress(total)
        return total

    def _run(self) -> Iterator[StepBatch]:
        counts: Counter[str] = Counter(self._state["counts"])
        done = self._state["windows"]
        for group in self._groups():
            if not done:
                counts.update(group.dropped)
            for number, rows in enumerate(group.windows[done:], done + 1):
                batches = tuple(
                    collate(
                        [[_example(item) for item in row] for row in rows[i : i + self._micro_batch_size]], self._pad_id
                    )
                    for i in range(0, len(rows), self._micro_batch_size)
                )
                items = [item for row in rows for item in row]
                counts.update(_counted(items, batches))
                totals = {name: counts[name] for name in COUNTS}
                state = group.after if number == len(group.windows) else {**group.before, "windows": number}
                epoch = max(item.place.block.epoch for item in items)
                state = {**state, "counts": totals, "fingerprints": self._fingerprints}
                yield StepBatch(batches, state, totals, epoch)
            done = 0

    def _groups(self) -> Iterator[Group]:
        before = self._state
        items = Items(self._blocks, self._encode)
        read = list(islice(items, before["read"]))
        waiting = [read[i] for i in before["left"]]
        while True:
            pool, dropped, kept = self._gather(items, waiting, before["kept"])
            if not kept:
                raise PotstillError(_nothing_left(self._key, dropped))
            if not pool:
                return
            following = items.peek()
            more = following is not None and not self._enough(following, kept)
            lay_out = self._packed if self._data.packing else self._bucketed
            rows, waiting = lay_out(pool, len(waiting), more, generator(self._seed, 5, before["group"]))
            after = _position(items, waiting) | {"kept": kept, "group": before["group"] + 1, "windows": 0}
            windows = [rows[i : i + self._batch_size] for i in range(0, len(rows), self._batch_size)]
            yield Group(windows, dropped, before, after)
            before = after

    def _gather(self, items: Items, waiting: list[Item], kept: int) -> tuple[list[Item], Counter[str], int]:
        """The examples of the next group: those that wait for a place, and new ones until there are enough, or until
        an epoch ends and there are enough for a window."""
        packing = self._data.packing
        one_window = self._batch_size * (self._data.max_length if packing else 1)
        pool = list(waiting)
        used = sum(item.encoded.length if packing else 1 for item in pool)
        dropped: Counter[str] = Counter()
        epoch: int | None = None
        barren: int | None = None  # the epoch since which nothing was kept
        while (item := items.peek()) is not None:
            if item.encoded.kept:
                ended = epoch is not None and item.place.block.epoch != epoch
                full = used >= self.group_windows * one_window or (ended and used >= one_window)
                if full or self._enough(item, kept):
                    break
                pool.append(next(items))
                used += item.encoded.length if packing else 1
                kept += not item.encoded.goes_on
                epoch, barren = item.place.block.epoch, None
                continue
            next(items)
            dropped.update(_counted_dropped(item))
            barren = item.place.block.epoch if barren is None else barren
            if item.place.block.epoch > barren + 1:
                raise PotstillError(_nothing_left(self._key, dropped))
        return pool, dropped, kept

    def _enough(self, item: Item, kept: int) -> bool:
        """Whether `limit` ends before this item. What belongs to an example before it is still of it."""
        return kept == self._limit and not item.encoded.goes_on

    def _packed(
        self, pool: list[Item], urgent: int, more: bool, random: np.random.Generator
    ) -> tuple[list[list[Item]], list[Item]]:
        """The rows of a group in the order they are used, and the items that wait for the next group. Only when there
        is no more to come may rows be fewer than make whole windows."""
        lengths = [item.encoded.length for item in pool]
        most = self.group_windows * self._batch_size
        rows, left = pack(lengths, rows=most, row_length=self._data.max_length, urgent=urgent)
        if more:
            whole = len(rows) - len(rows) % self._batch_size
            left = sorted(chain(left, *rows[whole:]))
            rows = rows[:whole]
        if self._data.shuffle:
            rows = [rows[i] for i in random.permutation(len(rows))]
        else:
            rows.sort()
        # What waited comes first, so that epochs meet in as few windows as can be.
        rows.sort(key=lambda row: row[0] >= urgent)
        return [[pool[i] for i in row] for row in rows], [pool[i] for i in left]

    def _bucketed(
        self, pool: list[Item], urgent: int, more: bool, random: np.random.Generator
    ) -> tuple[list[list[Item]], list[Item]]:
        """As `_packed`, one item a row: windows of like lengths."""
        whole = len(pool) - len(pool) % self._batch_size if more else len(pool)
        first = self._batch_size if urgent else 0  # what waited is in the first window, where one epoch meets the next
        order = sorted(range(first, whole), key=lambda i: (-pool[i].encoded.length, i))
        windows = [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        smaller = windows.pop() if windows and len(windows[-1]) < self._batch_size else []
        if self._data.shuffle:
            windows = [windows[i] for i in random.permutation(len(windows))]
        else:
            windows.sort(key=min)
        return [[pool[i]] for window in [range(min(first, whole)), *windows, smaller] for i in window], pool[whole:]


def count_windows(
    data: DataConfig,
    tokenizer: Any,
    *,
    batch_size: int,
    seed: int,
    epochs: int,
    limit: int | None = None,
    key: str = "data",
    progress: Callable[[int], None] | None = None,
) -> int:
    """How many windows a run over `epochs` has. Reads everything and tokenizes every text once, so it can be slow:
    `progress` is called now and then with the number of windows so far."""
    windows = StepBatches(
        data,
        tokenizer,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        limit=limit,
        key=key,
    )
    return windows.count(progress)


class Items:
    """The stream of encoded pieces, tokenized many at once, with a look at the next one."""

    def __init__(self, blocks: Blocks, encode: Encode) -> None:
        self._items = self._encoded(iter(blocks), encode)
        self._next: Item | None = None
        self._last: Item | None = None

    def _encoded(self, pieces: Iterator[tuple[Piece, Place]], encode: Encode) -> Iterator[Item]:
        number = 0
        while some := list(islice(pieces, PIECES_AT_ONCE)):
            for encoded, (_, place) in zip(encode([piece for piece, _ in some]), some, strict=True):
                for one in (encoded, *encoded.further):
                    yield Item(one, place, number)
                    number += 1

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self.peek()
        if item is None:
            raise StopIteration
        self._last, self._next = item, None
        return item

    def peek(self) -> Item | None:
        if self._next is None:
            self._next = next(self._items, None)
        return self._next

    @property
    def taken(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    def here(self) -> State:
        """Where the next item is. Asked only after one was taken."""
        if self._next is not None:
            return self._next.place.state()
        assert self._last is not None
        return self._last.place.state(after=True)


def _beginning(sources: int) -> State:
    return {"start": beginning(sources), "read": 0, "left": [], "kept": 0, "group": 0, "windows": 0, "counts": {}}


def _position(items: Items, waiting: list[Item]) -> State:
    """Where the next group begins: at the first item that still waits, with those of its followers that do too."""
    if not waiting:
        return {"start": items.here(), "read": 0, "left": []}
    first = waiting[0]
    left = [item.number - first.number for item in waiting]
    return {"start": first.place.state(), "read": items.taken - first.number, "left": left}


def _example(item: Item) -> Example:
    assert item.encoded.example is not None
    return item.encoded.example


def _counted(items: list[Item], batches: Sequence[Batch]) -> dict[str, int]:
    tokens = sum(item.encoded.length for item in items)
    begun = [item for item in items if not item.encoded.goes_on]
    return {
        "documents": sum(item.encoded.piece.first for item in begun),
        "examples": len(begun),
        "tokens": tokens,
        "supervised_tokens": sum(batch.supervised_tokens for batch in batches),
        "padding_tokens": sum(batch.input_ids.numel() for batch in batches) - tokens,
        "cut_examples": sum(item.encoded.cut > 0 for item in items),
        "cut_tokens": sum(item.encoded.cut for item in items),
        "split_conversations": sum(item.encoded.piece.split for item in begun),
    }


def _counted_dropped(item: Item) -> dict[str, int]:
    encoded = item.encoded
    return {
        "documents": int(encoded.piece.first),
        "dropped_examples": 1,
        "dropped_tokens": encoded.length,
        "cut_tokens": encoded.cut,
        "cut_examples": int(encoded.cut > 0),
    }


def _nothing_left(key: str, dropped: Counter[str]) -> str:
    count = dropped["dropped_examples"]
    if not count:
        return f"{key}.sources gave no examples"
    return (
        f"{key}.sources: nothing to learn from in any of {count} examples: empty texts, conversations without an "
        f"assistant turn, or prompts of {key}.max_length tokens and more"
    )
