"""What a teacher said about documents: as a cache stores it, or exact, as it was computed just now. Both are read alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from potstill.signals.codec import Array, Bytes, pack, packed_bytes, unpack
from potstill.signals.kinds import Signal, SignalKind
from potstill.types import Example

NOTHING = bytes([4])  # a document of no tokens, as `to_bytes` makes it of any kind: the width of its lengths


@dataclass(frozen=True)
class Document:
    """A document in the teacher's tokens, and a row for each of those that are predicted."""

    form: SignalKind
    tokens: npt.NDArray[np.uint32 | np.int32]
    predicted: npt.NDArray[np.bool_]  # which tokens have a row: the distribution they were predicted from
    arrays: Mapping[str, Array]  # the streams of the rows; of an exact one the signal itself
    lengths: Bytes | None = None  # of a stored one: what each token adds to the text, packed
    length_bits: int = 4
    read: Example | None = None  # of an exact one: how the teacher read it

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each token of a stored document ends in the text, in bytes."""
        assert self.lengths is not None
        return np.cumsum(unpack(self.lengths[None], len(self.tokens), self.length_bits)[0], dtype=np.int64)

    def as_read(self, example: Example) -> Example:
        """The student's example as the teacher read it."""
        if self.read is not None:
            return self.read
        return replace(example, ids=self.tokens.astype(np.int32), supervised=self.predicted, ends=None)

    def all_rows(self) -> SignalRows:
        return SignalRows([(self, np.arange(int(self.predicted.sum())))])


def exact(form: SignalKind, read: Example, signal: Signal) -> Document:
    """A document with the rows that were computed for it just now: nothing is rounded."""
    return Document(form, read.ids, read.supervised, signal, read=read)


def blank(form: SignalKind) -> Document:
    """A document of nothing."""
    return from_bytes(form, np.frombuffer(NOTHING, dtype=np.uint8), 0)


class SignalRows(Mapping[str, Array]):
    """Rows of some documents, all stored or all exact, as one signal. An array is read when it is asked for."""

    def __init__(self, chosen: Sequence[tuple[Document, npt.NDArray[np.int64]]]) -> None:
        self._chosen = chosen
        self.form = chosen[0][0].form

    def __getitem__(self, name: str) -> Array:
        stored = self._chosen[0][0].read is None
        return self.form.decode(name, self._gathered) if stored else self._gathered(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.form.layout())

    def __len__(self) -> int:
        return len(self.form.layout())

    def _gathered(self, name: str) -> Array:
        return np.concatenate([document.arrays[name][rows] for document, rows in self._chosen])


def to_bytes(
    form: SignalKind,
    tokens: Array,
    ends: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.bool_],
    streams: Mapping[str, Bytes],
) -> bytes:
    """One document: the width of its lengths; its tokens; what each adds to the text, in bytes; which of them have a row;
    and the rows, stream by stream."""
    lengths = np.diff(ends, prepend=0)
    bits = max(4, int(lengths.max(initial=0)).bit_length())
    parts: list[Bytes] = [
        np.array([bits], dtype=np.uint8),
        pack(tokens[None], form.id_bits),
        pack(lengths[None], bits),
        np.packbits(predicted, bitorder="little"),
        *form.write(streams),
    ]
    return b"".join(part.tobytes() for part in parts)


def from_bytes(form: SignalKind, data: Bytes, tokens: int) -> Document:
    """The document of so many tokens that `to_bytes` made. ValueError: these bytes are not of this kind."""
    at = 0

    def take(size: int) -> Bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError(f"there are {len(data)} bytes and more were expected")
        return data[at - size : at]

    bits = int(take(1)[0])
    if not 4 <= bits <= 24:
        raise ValueError(f"lengths of {bits} bits")
    ids = unpack(take(packed_bytes(tokens, form.id_bits))[None], tokens, form.id_bits)[0]
    lengths = take(packed_bytes(tokens, bits))
    predicted = np.unpackbits(take(packed_bytes(tokens, 1)), count=tokens, bitorder="little").view(np.bool_)
    streams = form.read(int(np.count_nonzero(predicted)), take)
    if at != len(data):
        raise ValueError(f"there are {len(data)} bytes and {at} were expected")
    return Document(form, ids, predicted, streams, lengths, bits)
