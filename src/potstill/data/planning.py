"""Lengths that the ranks of a run find out together.

The plan of a run is the same on every rank and needs every text's length, but no rank needs the tokens of rows that others
read. So each tokenizes its share of the texts for all, and later those of its own rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from potstill.data.encoding import Encode, Encoded
from potstill.data.stream import Place, Stream
from potstill.parallel.agree import Agreed, Rounds
from potstill.types import Example

TOKENIZED_AT_ONCE = 256  # examples, by one rank
MOST_AT_ONCE = 8192  # … by all of them: each holds their texts

Block = list[tuple[Encoded, Place]]
Numbers = npt.NDArray[np.int64]  # [n, 4]: length, kept, cut, supervised


def blocks(stream: Stream, encode: Encode, rounds: Rounds | None = None) -> Iterator[Block]:
    """The stream in tokens, many at once. `rounds`: with other ranks, each of which has the same stream; then a text that
    another rank tokenized has a length, and no tokens yet (`Encoded.here`)."""
    if rounds is None:
        while some := list(islice(stream, TOKENIZED_AT_ONCE)):
            encoded = encode([example for example, _ in some])
            yield [(one, place) for one, (_, place) in zip(encoded, some, strict=True)]
        return
    while block := _planned_together(stream, encode, rounds):
        yield block


def _planned_together(stream: Stream, encode: Encode, rounds: Rounds) -> Block:
    size, index = rounds.size, rounds.index
    some: list[tuple[Example, Place]] = []
    own: list[Encoded] = []

    def work() -> tuple[int, int, Numbers]:
        some.extend(islice(stream, size * max(1, min(TOKENIZED_AT_ONCE, MOST_AT_ONCE // size))))
        own.extend(encode([example for example, _ in some[index::size]]))
        read = zlib.crc32("\n".join(example.key for example, _ in some).encode())
        return len(some), read, _numbers(own)

    found = rounds.gathered(work)
    for rank, (count, read, _) in enumerate(found):
        if (count, read) != found[0][:2]:
            raise Agreed(
                f"data.sources: rank {rank} reads other texts than rank 0: the files must be the same on every host"
            )
    encoded: list[Encoded | None] = [None] * len(some)
    for rank, (_, _, numbers) in enumerate(found):
        for place, row in zip(range(rank, len(some), size), numbers.tolist(), strict=True):
            encoded[place] = own[place // size] if rank == index else _elsewhere(some[place][0], *row)
    return [(one, place) for one, (_, place) in zip(encoded, some, strict=True) if one is not None]


def _numbers(encoded: list[Encoded]) -> Numbers:
    rows = [(one.length, one.kept, one.cut, one.supervised) for one in encoded]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 4)


def _elsewhere(raw: Example, length: int, kept: int, cut: int, supervised: int) -> Encoded:
    return Encoded(raw, raw if kept else None, length, cut, supervised=supervised, here=False)
