"""A document's signal as bytes: ids at the width the vocabulary needs, log-probabilities as gaps between their neighbours.

docs/cache-format.md is the specification. R rows (predicted tokens), K kept entries, N draws, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Signal = Mapping[str, npt.NDArray[Any]]  # what is known of R rows; the names are those of `SIGNALS`

KINDS = ("top_k", "sampled", "hidden", "token_logprobs")
SIGNALS = {
    # [R, K] largest first; [R, K]; [R, temperatures]; [R]; with draws from the rest also [R, M] and [R]
    "top_k": ("ids", "logprobs", "odds", "token_logprobs", "tail_samples", "tail_entropy"),
    "sampled": ("samples", "entropy"),  # [R, N] in order; [R]
    "hidden": ("hidden",),  # [R, H]
    "token_logprobs": ("token_logprobs",),  # [R]
}
LARGEST_VOCABULARY = 2**24

# The k largest log-probabilities are kept as gaps from one to the next: the first ones fine, for most mass is there.
FINE_GAPS = 8
FINE_BITS, COARSE_BITS = 10, 5
FINE_RANGE, COARSE_RANGE = (0.001, 24.0), (0.016, 8.0)

STEPS_PER_NAT = 1024  # of chosen tokens' log-probabilities (uint16), and of the rest's log-odds (int16)
STEPS_PER_ENTROPY = 2048  # uint16
NO_REST = -(2**15)
DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bfloat16: its bits


@dataclass(frozen=True)
class Format:
    """What a cache holds of each predicted token. The manifest records it."""

    kind: str
    vocabulary: int  # ids the probabilities are over: those of the tokenizer, without padding of the matrices
    k: int = 0  # top_k
    temperatures: tuple[float, ...] = (1.0,)  # top_k: those whose rest is known; sampled: the one of the draws
    tail_samples: int = 0  # top_k: draws from the rest
    num_samples: int = 0  # sampled
    seed: int = 0  # of the draws
    width: int = 0  # hidden
    dtype: str = "float32"  # hidden

    @property
    def id_bits(self) -> int:
        return max(4, (self.vocabulary - 1).bit_length())

    @property
    def fine(self) -> int:
        return min(FINE_GAPS, self.k - 1)

    def row_bytes(self) -> dict[str, int]:
        """The streams of a document that have a fixed number of bytes a row, in order."""
        if self.kind == "top_k":
            return {
                "ids": packed_bytes(self.k, self.id_bits),
                "fine": packed_bytes(self.fine, FINE_BITS),
                "coarse": packed_bytes(self.k - 1 - self.fine, COARSE_BITS),
                "odds": 2 * len(self.temperatures),
                "token_logprobs": 2,
            } | (
                {"tail_samples": packed_bytes(self.tail_samples, self.id_bits), "tail_entropy": 2}
                if self.tail_samples
                else {}
            )
        if self.kind == "sampled":
            return {"entropy": 2}
        if self.kind == "hidden":
            return {"hidden": self.width * np.dtype(DTYPES[self.dtype]).itemsize}
        return {"token_logprobs": 2}


def packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def pack(values: npt.NDArray[Any], bits: int) -> Bytes:
    """Unsigned values [R, n] as R rows of bytes, `bits` (4 to 24) each, the lowest bit first."""
    rows, count = values.shape
    assert values.dtype.kind in "iu" and not (values.size and (values.min() < 0 or int(values.max()) >> bits)), (
        "values that do not fit their bits"
    )
    width = packed_bytes(count, bits)
    room = np.zeros((rows, width + 3), dtype=np.uint8)
    words = _words(room, width)
    values = values.astype(np.uint32)
    for phase in range(min(8, count)):  # every eighth value has the same shift, and stands `bits` bytes further
        part = values[:, phase::8] << np.uint32(phase * bits % 8)
        words[:, phase * bits // 8 :: bits][:, : part.shape[1]] |= part
    return np.ascontiguousarray(room[:, :width])


def unpack(packed: Bytes, count: int, bits: int) -> npt.NDArray[np.uint32]:
    """The `count` values of each row that `pack` packed."""
    rows, width = packed.shape
    room = _room(rows, width)
    room[: rows * width].reshape(rows, width)[:] = packed
    return _unpacked(room, rows, width, count, bits)


def _room(rows: int, width: int) -> Bytes:
    """For so many rows, and three bytes more: 32 bits are read at once, and what is not a value's own is masked out."""
    room = np.empty(rows * width + 3, dtype=np.uint8)
    room[rows * width :] = 0
    return room


def _unpacked(room: Bytes, rows: int, width: int, count: int, bits: int) -> npt.NDArray[np.uint32]:
    words: npt.NDArray[np.uint32] = np.ndarray((rows, width), dtype="<u4", buffer=room, strides=(width, 1))
    values = np.empty((rows, count), dtype=np.uint32)
    for phase in range(min(8, count)):
        out = values[:, phase::8]
        np.right_shift(words[:, phase * bits // 8 :: bits][:, : out.shape[1]], np.uint32(phase * bits % 8), out=out)
    values &= np.uint32((1 << bits) - 1)
    return values


def _words(room: Bytes, width: int) -> npt.NDArray[np.uint32]:
    """The 32 bits that begin at each byte."""
    return np.ndarray((room.shape[0], width), dtype="<u4", buffer=room, strides=(room.shape[1], 1))


def wrong_ids(ids: npt.NDArray[Any], vocabulary: int, there: npt.NDArray[np.bool_] | None = None) -> str | None:
    """What is wrong with the ids of each row [R, K], which are to be different ones, or None. `there`: which of them count."""
    counted = ids if there is None else ids[there]
    outside = counted[(counted < 0) | (counted >= vocabulary)]
    if outside.size:
        return f"the id {outside.flat[0]}, and the teacher has {vocabulary} ids"
    if there is not None:  # what does not count is made different from all that does
        ids = np.where(there, ids, vocabulary + np.arange(ids.shape[1]))
    ordered = np.sort(ids, -1)
    again = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
    return f"the id {again[0]} twice at one token" if again.size else None


def _gap_table(bits: int, between: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The gap each code stands for: 0, then evenly spaced on a logarithmic scale."""
    low, high = between
    steps = np.arange(2**bits - 1) / (2**bits - 2)
    return np.concatenate([[0.0], low * (high / low) ** steps])


FINE_TABLE = _gap_table(FINE_BITS, FINE_RANGE)
COARSE_TABLE = _gap_table(COARSE_BITS, COARSE_RANGE)
FINE_GAP = FINE_TABLE.astype(np.float32)
# Coarse gaps are looked up two at a time: a complex number is two floats, and reading is half the work.
COARSE_PAIR = np.stack(np.meshgrid(COARSE_TABLE, COARSE_TABLE), -1).astype(np.float32).view(np.complex64).ravel()


def encode(form: Format, signal: Signal) -> dict[str, Bytes]:
    """The streams of R rows, each [R, bytes a row]; of `sampled` also `first` [R, N] bits and `ids`, which vary."""
    if form.kind == "top_k":
        fine, coarse = _encode_gaps(signal["logprobs"], form.fine)
        odds = np.clip(np.rint(signal["odds"] * STEPS_PER_NAT), NO_REST + 1, 2**15 - 1)
        odds = np.where(np.isneginf(signal["odds"]), NO_REST, odds)
        drawn = (
            {
                "tail_samples": pack(signal["tail_samples"], form.id_bits),
                "tail_entropy": _encode_entropy(signal["tail_entropy"]),
            }
            if form.tail_samples
            else {}
        )
        return drawn | {
            "ids": pack(signal["ids"], form.id_bits),
            "fine": pack(fine, FINE_BITS),
            "coarse": pack(coarse, COARSE_BITS),
            "odds": _as_bytes(odds, "<i2"),
            "token_logprobs": _encode_chosen(signal["token_logprobs"]),
        }
    if form.kind == "sampled":
        draws = signal["samples"]
        first = np.ones(draws.shape, dtype=np.bool_)
        first[:, 1:] = draws[:, 1:] != draws[:, :-1]
        return {"first": first.view(np.uint8), "ids": draws, "entropy": _encode_entropy(signal["entropy"])}
    if form.kind == "hidden":
        return {"hidden": signal["hidden"].view(np.uint8).reshape(len(signal["hidden"]), -1)}
    return {"token_logprobs": _encode_chosen(signal["token_logprobs"])}


def _encode_gaps(logprobs: npt.NDArray[Any], fine: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Codes of the gaps [R, fine] and [R, rest]. Each gap is taken from what the codes before it give, so that their errors
    do not add up."""
    exact = logprobs.astype(np.float64)
    codes = np.zeros((len(exact), max(0, exact.shape[1] - 1)), dtype=np.uint32)
    here = exact[:, 0].copy()
    for i in range(1, exact.shape[1]):
        table = FINE_TABLE if i <= fine else COARSE_TABLE
        codes[:, i - 1] = np.searchsorted((table[1:] + table[:-1]) / 2, np.maximum(here - exact[:, i], 0.0))
        here -= table[codes[:, i - 1]]
    return codes[:, :fine], codes[:, fine:]


def _encode_chosen(chosen: npt.NDArray[Any]) -> Bytes:
    return _as_bytes(np.clip(np.rint(-chosen * STEPS_PER_NAT), 0, 2**16 - 1)[:, None], "<u2")


def _encode_entropy(entropy: npt.NDArray[Any]) -> Bytes:
    return _as_bytes(np.clip(np.rint(entropy * STEPS_PER_ENTROPY), 0, 2**16 - 1)[:, None], "<u2")


def _as_bytes(values: npt.NDArray[Any], dtype: str) -> Bytes:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


@dataclass(frozen=True)
class Document:
    """A document as it is stored: views of its bytes."""

    form: Format
    tokens: npt.NDArray[np.uint32]  # the teacher's
    packed_lengths: Bytes
    length_bits: int
    predicted: npt.NDArray[np.bool_]  # which tokens have a row: the distribution they were predicted from
    streams: Mapping[
        str, Bytes
    ]  # [R, bytes a row]; of `sampled` also `first` [R, N] and `ids` [distinct ids of all rows]

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each token ends in the text, in bytes."""
        return np.cumsum(unpack(self.packed_lengths[None], len(self.tokens), self.length_bits)[0], dtype=np.int64)


def to_bytes(
    form: Format, tokens: npt.NDArray[Any], ends: npt.NDArray[Any], predicted: npt.NDArray[np.bool_], streams: Any
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
    ]
    if form.kind == "sampled":
        first = streams["first"].astype(np.bool_)
        parts += [np.packbits(first, bitorder="little"), pack(streams["ids"][first][None], form.id_bits)]
    parts += [streams[name] for name in form.row_bytes()]
    return b"".join(part.tobytes() for part in parts)


def from_bytes(form: Format, data: Bytes, tokens: int) -> Document:
    """The document of so many tokens that `to_bytes` made. ValueError: these bytes are not of this format."""
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
    rows = int(np.count_nonzero(predicted))
    streams: dict[str, Bytes] = {}
    if form.kind == "sampled":
        flags = np.unpackbits(
            take(packed_bytes(rows * form.num_samples, 1)), count=rows * form.num_samples, bitorder="little"
        )
        streams["first"] = flags.reshape(rows, form.num_samples)
        if not streams["first"][:, 0].all():
            raise ValueError("a row's first draw is no new one")
        distinct = int(np.count_nonzero(flags))
        streams["ids"] = unpack(take(packed_bytes(distinct, form.id_bits))[None], distinct, form.id_bits)[0]
    for name, width in form.row_bytes().items():
        streams[name] = take(rows * width).reshape(rows, width)
    if at != len(data):
        raise ValueError(f"there are {len(data)} bytes and {at} were expected")
    return Document(form, ids, lengths, bits, predicted, streams)


NOTHING = bytes([4])  # a document of no tokens, as `to_bytes` makes it of any format: the width of its lengths


def blank(form: Format) -> Document:
    """A document of nothing."""
    streams: dict[str, Bytes] = {name: np.zeros((0, width), dtype=np.uint8) for name, width in form.row_bytes().items()}
    if form.kind == "sampled":
        streams |= {"first": np.zeros((0, form.num_samples), dtype=np.uint8), "ids": np.zeros(0, dtype=np.uint8)}
    nothing = np.zeros(0, dtype=np.uint8)
    return Document(form, nothing.view(np.uint32), nothing, 4, nothing.view(np.bool_), streams)


Chosen = Sequence[tuple[Document, npt.NDArray[np.int64]]]  # documents, and rows of each


def read_top_k(chosen: Chosen, temperature: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """ids [R, K], log-probabilities [R, K] and the log-mass of the rest [R], at a temperature that the cache has."""
    form = chosen[0][0].form
    ids = _unpacked_rows(chosen, "ids", form.k, form.id_bits).view(np.int32)
    below = np.zeros((len(ids), form.k), dtype=np.float32)  # how far below the largest each is
    first, coarse = 1 + form.fine, form.k - 1 - form.fine
    if form.fine:
        below[:, 1:first] = FINE_GAP[_unpacked_rows(chosen, "fine", form.fine, FINE_BITS)]
    if coarse > 0:
        pairs = _unpacked_rows(chosen, "coarse", -(-coarse // 2), 2 * COARSE_BITS)
        below[:, first:] = COARSE_PAIR[pairs].view(np.float32)[:, :coarse]
    summed = torch.from_numpy(below)
    torch.cumsum(summed, -1, out=summed)  # NumPy's takes four times as long
    below *= np.float32(-1 / temperature)
    odds = _rows(chosen, "odds").view("<i2")[:, form.temperatures.index(temperature)].astype(np.float32)
    nothing = odds == NO_REST
    odds /= STEPS_PER_NAT
    log_mass = np.log(np.exp(below).sum(-1)) + np.where(nothing, 0.0, np.logaddexp(0.0, odds))
    tail = np.where(nothing, -math.inf, -np.logaddexp(0.0, -odds))
    below -= log_mass[:, None].astype(np.float32)
    return ids, below, tail.astype(np.float32)


def read_sampled(chosen: Chosen) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """ids [R, M] and shares of the draws [R, M] (0 where there are fewer than M), and the teacher's entropy [R]."""
    draws = chosen[0][0].form.num_samples
    firsts, ids = [], []
    for document, rows in chosen:
        first = document.streams["first"].view(np.bool_)
        ends = np.cumsum(first.sum(-1))
        ids += [
            document.streams["ids"][begin:end]
            for begin, end in zip((ends - first.sum(-1))[rows], ends[rows], strict=True)
        ]
        firsts.append(first[rows])
    first = np.concatenate(firsts)
    distinct = first.sum(-1)
    most = int(distinct.max(initial=1))
    there = np.arange(most) < distinct[:, None]
    out = np.zeros((len(first), most), dtype=np.int32)
    out[there] = np.concatenate(ids) if ids else []
    row, place = np.nonzero(first)
    following = np.append(place[1:], draws)
    counts = np.where(np.append(row[1:] == row[:-1], False), following, draws) - place
    shares = np.zeros(out.shape, dtype=np.float32)
    shares[there] = counts / draws
    return out, shares, _entropy(chosen, "entropy")


def read_tail_samples(chosen: Chosen) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Draws from the rest [R, M], and the teacher's entropy within it [R]."""
    form = chosen[0][0].form
    return unpack(_rows(chosen, "tail_samples"), form.tail_samples, form.id_bits).astype(np.int32), _entropy(
        chosen, "tail_entropy"
    )


def _entropy(chosen: Chosen, name: str) -> npt.NDArray[np.float32]:
    return _rows(chosen, name).view("<u2")[:, 0].astype(np.float32) * np.float32(1 / STEPS_PER_ENTROPY)


def read_hidden(chosen: Chosen) -> npt.NDArray[Any]:
    """[R, H], in the cache's dtype; of bfloat16 the bits."""
    return _rows(chosen, "hidden").view(DTYPES[chosen[0][0].form.dtype])


def read_token_logprobs(chosen: Chosen) -> npt.NDArray[np.float32]:
    """Log-probabilities [R] of the tokens that were there."""
    return _rows(chosen, "token_logprobs").view("<u2")[:, 0].astype(np.float32) * np.float32(-1 / STEPS_PER_NAT)


def _rows(chosen: Chosen, name: str) -> Bytes:
    return np.concatenate([document.streams[name][rows] for document, rows in chosen])


def _unpacked_rows(chosen: Chosen, name: str, count: int, bits: int) -> npt.NDArray[np.uint32]:
    """`unpack` of rows of several documents, which are brought together only once."""
    width = chosen[0][0].streams[name].shape[1]
    total, at = sum(len(rows) for _, rows in chosen), 0
    room = _room(total, width)
    together = room[: total * width].reshape(total, width)
    for document, rows in chosen:
        np.take(document.streams[name], rows, 0, out=together[at : at + len(rows)], mode="clip")
        at += len(rows)
    return _unpacked(room, total, width, count, bits)
