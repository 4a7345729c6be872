"""From `data:` to the step batches of a run, and back to any of them.

    sources ─► Examples ─► mixture ─► shuffled blocks ─► tokens ─► groups of step batches ─► StepBatch

A group is as many examples as fill several step batches. Within it examples are packed, or sorted by length; its step batches
then come in random order. A state says where the group begins in the stream, and how many of its step batches are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from potstill.config import DataConfig, TokenWeightsConfig
from potstill.data.dealing import Share, own_rows, padding
from potstill.data.encoding import Encode, Encoded, Encoder, lengths_only
from potstill.data.layout import collate, pack
from potstill.data.planning import blocks
from potstill.data.sources import generator
from potstill.data.stream import Place, State, Stream, beginning, open_stream
from potstill.parallel.agree import Rounds
from potstill.types import Batch, Example, PotstillError, StepBatch

GROUP_STEPS = 16
GROUP_TOKENS = 2**20  # a group holds no more, unless one step batch does

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
NOTHING_READ: State = {"read": 0, "left": [], "kept": 0, "group": 0, "steps": 0, "counts": {}}


@dataclass(frozen=True)
class Item:
    """An encoded example and where it stands in the stream."""

    encoded: Encoded
    place: Place
    number: int  # since the stream was opened


Rows = list[list[Item]]


@dataclass(frozen=True)
class Group:
    """As many examples as fill several step batches, laid out."""

    steps: list[Rows]
    dropped: Counter[str]
    before: State  # where to begin again for its first step batch, and for the one after its last; without counts
    after: State


class StepBatches:
    """An iterator of step batches: `batch_size` rows each, packed rows of several documents or padded ones of one.

    `epochs=None` goes round without end; with epochs the last step batch may be smaller. `limit` ends after so many
    examples. A reader that must not stand still between groups wants them `Prefetched(steps, steps.group_steps)`.
    What lies in a step batch does not depend on `micro_batch_size` (or `tokens_per_micro_batch`, in its place), nor on among
    how many ranks it is dealt (`rank`: which this is, of how many): each is given its own micro-batches. `rounds`: these ranks
    tokenize for each other (data/planning.py); all of them then read, or `leave`. `key` names the section of the recipe in
    messages.
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
        rank: tuple[int, int] = (0, 1),
        tokens_per_micro_batch: int | None = None,
        rounds: Rounds | None = None,
        token_weights: TokenWeightsConfig | None = None,
    ) -> None:
        self.rounds = rounds
        self._data, self._batch_size = data, batch_size
        self._share = Share(micro_batch_size, *rank, tokens_per_micro_batch)
        self._seed, self._limit, self._key = seed, limit, key
        self._pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self.group_steps = max(1, min(GROUP_STEPS, GROUP_TOKENS // (batch_size * data.max_length)))
        self._encode: Encode = Encoder(
            tokenizer,
            max_length=data.max_length,
            append_eos=data.append_eos,
            evaluation=evaluation,
            key=key,
            token_weights=token_weights,
        )
        self._state = state or {"start": beginning(len(data.sources)), **NOTHING_READ}
        self._stream, self._fingerprints = open_stream(
            data, tokenizer, seed=seed, epochs=epochs, state=state, key=key, changed_data_ok=changed_data_ok
        )
        self._steps = self._run()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        return next(self._steps)

    def count(self, progress: Callable[[int], None] = lambda steps: None) -> int:
        """How many step batches are still to come. Reads everything and tokenizes every text once, so it can be slow:
        `progress` is called now and then with the number so far. Uses the iterator up."""
        self._encode = lengths_only(self._encode)
        total = -int(self._state["steps"])
        for group in self._groups():
            total += len(group.steps)
            progress(total)
        return total

    def _run(self) -> Iterator[StepBatch]:
        counts: Counter[str] = Counter(self._state["counts"])
        done = self._state["steps"]
        for group in self._groups():
            if not done:
                counts.update(group.dropped)
            for number, rows in enumerate(group.steps[done:], done + 1):
                lengths = [sum(item.encoded.length for item in row) for row in rows]
                batches, items = self._batches(rows, lengths), list(chain(*rows))
                for item in items:
                    counts.update(_counted(item.encoded))
                counts["supervised_tokens"] += sum(item.encoded.supervised for item in items)
                counts["padding_tokens"] += padding(lengths, self._share)
                totals = {name: counts[name] for name in COUNTS}
                state = group.after if number == len(group.steps) else {**group.before, "steps": number}
                state = {**state, "counts": totals, "fingerprints": self._fingerprints}
                yield StepBatch(batches, state, totals, max(item.place.epoch for item in items))
            done = 0

    def leave(self) -> None:
        """With `rounds`, once nobody here reads any more: the other ranks are told."""
        if self.rounds is not None:
            self.rounds.leave()

    def _batches(self, rows: Rows, lengths: Sequence[int]) -> tuple[Batch, ...]:
        own = own_rows(lengths, self._share)
        elsewhere = [item for i in chain(*own) for item in rows[i] if not item.encoded.here]
        now = self._encode([item.encoded.raw for item in elsewhere])
        tokens = {item.number: encoded.example for item, encoded in zip(elsewhere, now, strict=True)}

        def examples(row: list[Item]) -> list[Example]:
            found = (tokens.get(item.number, item.encoded.example) for item in row)
            return [example for example in found if example is not None]

        return tuple(collate([examples(rows[i]) for i in some], self._pad_id) for some in own)

    def _groups(self) -> Iterator[Group]:
        before = self._state
        items = Items(self._stream, self._encode, self.rounds)
        read = [items.take() for _ in range(before["read"])]
        waiting = [read[i] for i in before["left"]]
        while True:
            pool, dropped, kept = self._gather(items, waiting, before["kept"])
            if not kept:
                raise PotstillError(_nothing_left(self._key, dropped))
            if not pool:
                return
            more = items.next is not None and not self._enough(items.next, kept)
            lay_out = self._packed if self._data.packing else self._bucketed
            rows, waiting = lay_out(pool, len(waiting), more, generator(self._seed, 5, before["group"]))
            after = items.position(waiting) | {"kept": kept, "group": before["group"] + 1, "steps": 0}
            steps = [rows[i : i + self._batch_size] for i in range(0, len(rows), self._batch_size)]
            yield Group(steps, dropped, before, after)
            before = after

    def _gather(self, items: Items, waiting: list[Item], kept: int) -> tuple[list[Item], Counter[str], int]:
        """The examples of the next group: those that wait for a place, and new ones until there are enough, or until
        an epoch ends and there are enough for a step batch."""
        packing = self._data.packing
        one_step = self._batch_size * (self._data.max_length if packing else 1)
        pool = list(waiting)
        used = sum(item.encoded.length if packing else 1 for item in pool)
        dropped: Counter[str] = Counter()
        epoch: int | None = None
        barren: int | None = None  # the epoch since which nothing was kept
        while (item := items.next) is not None:
            if item.encoded.kept:
                ended = epoch is not None and item.place.epoch != epoch
                full = used >= self.group_steps * one_step or (ended and used >= one_step)
                if full or self._enough(item, kept):
                    break
                pool.append(items.take())
                used += item.encoded.length if packing else 1
                kept += not item.encoded.continues
                epoch, barren = item.place.epoch, None
                continue
            items.take()
            dropped.update(_counted(item.encoded))
            barren = item.place.epoch if barren is None else barren
            if item.place.epoch > barren + 1:
                raise PotstillError(_nothing_left(self._key, dropped))
        return pool, dropped, kept

    def _enough(self, item: Item, kept: int) -> bool:
        """Whether `limit` ends before this item. What belongs to an example before it is still of it."""
        return kept == self._limit and not item.encoded.continues

    def _packed(
        self, pool: list[Item], urgent: int, more: bool, random: np.random.Generator
    ) -> tuple[Rows, list[Item]]:
        """The rows of a group in the order they are used, and the items that wait for the next group. Only when there
        is no more to come may rows be fewer than make whole step batches."""
        lengths = [item.encoded.length for item in pool]
        most = self.group_steps * self._batch_size
        rows, left = pack(lengths, rows=most, row_length=self._data.max_length, urgent=urgent)
        if more:
            whole = len(rows) - len(rows) % self._batch_size
            left = sorted(chain(left, *rows[whole:]))
            rows = rows[:whole]
        if self._data.shuffle:
            rows = [rows[i] for i in random.permutation(len(rows))]
        else:
            rows.sort()
        # What waited comes first, so that epochs meet in as few step batches as can be.
        rows.sort(key=lambda row: row[0] >= urgent)
        return [[pool[i] for i in row] for row in rows], [pool[i] for i in left]

    def _bucketed(
        self, pool: list[Item], urgent: int, more: bool, random: np.random.Generator
    ) -> tuple[Rows, list[Item]]:
        """As `_packed`, one item per row: step batches of like lengths."""
        size = self._batch_size
        whole = len(pool) - len(pool) % size if more else len(pool)
        first = min(size, whole) if urgent else 0  # what waited comes first, where one epoch meets the next
        order = sorted(range(first, whole), key=lambda i: (-pool[i].encoded.length, i))
        steps = [order[i : i + size] for i in range(0, len(order), size)]
        smaller = steps.pop() if steps and len(steps[-1]) < size else []
        if self._data.shuffle:
            steps = [steps[i] for i in random.permutation(len(steps))]
        else:
            steps.sort(key=min)
        return [[pool[i]] for i in chain(range(first), *steps, smaller)], pool[whole:]


class Items:
    """The stream in tokens, encoded many at once. `next`: what `take` gives; None at the end."""

    def __init__(self, stream: Stream, encode: Encode, rounds: Rounds | None = None) -> None:
        self._items = self._encoded(stream, encode, rounds)
        self._last: Item | None = None
        self.next = next(self._items, None)

    def _encoded(self, stream: Stream, encode: Encode, rounds: Rounds | None) -> Iterator[Item]:
        number = 0
        for encoded, place in chain.from_iterable(blocks(stream, encode, rounds)):
            for one in (encoded, *encoded.further):
                yield Item(one, place, number)
                number += 1

    def take(self) -> Item:
        assert self.next is not None
        self._last, self.next = self.next, next(self._items, None)
        return self._last

    def position(self, waiting: Sequence[Item]) -> State:
        """Where the next group begins: at the first item that still waits, with those of its followers that do too."""
        assert self._last is not None
        if waiting:
            first = waiting[0].number
            left = [item.number - first for item in waiting]
            return {"start": waiting[0].place.state(), "read": self._last.number + 1 - first, "left": left}
        start = self._last.place.state(after=True) if self.next is None else self.next.place.state()
        return {"start": start, "read": 0, "left": []}


def _counted(encoded: Encoded) -> dict[str, int]:
    kept, begun = encoded.kept, not encoded.continues
    return {
        "documents": int(begun and encoded.raw.first),
        "examples" if kept else "dropped_examples": int(begun),
        "tokens" if kept else "dropped_tokens": encoded.length,
        "cut_examples": int(encoded.cut > 0),
        "cut_tokens": encoded.cut,
        "split_conversations": int(begun and kept and encoded.raw.split),
    }


def _nothing_left(key: str, dropped: Counter[str]) -> str:
    count = dropped["dropped_examples"]
    if not count:
        return f"{key}.sources gave no examples"
    return (
        f"{key}.sources: nothing to learn from in any of {count} examples: empty texts, conversations without an "
        f"assistant turn, or prompts of {key}.max_length tokens and more"
    )
