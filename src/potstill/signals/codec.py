"""Numbers of R rows as bytes: unsigned integers of a few bits, and reals as counts of steps. docs/cache-format.md has them all.

A `Code` turns one array of a signal into a stream, which has the same number of bytes for every row, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

STEPS_PER_NAT = 1024  # of tokens' log-probabilities (uint16), and of the rest's log-odds (int16)
STEPS_PER_ENTROPY = 2048  # uint16
NO_REST = -(2**15)
DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bfloat16: its bits


@dataclass(frozen=True)
class Raw:
    """Numbers as they are."""

    stored: str  # a dtype with its byte order
    shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        return np.dtype(self.stored).name

    @property
    def width(self) -> int:
        return math.prod(self.shape) * np.dtype(self.stored).itemsize

    def encode(self, values: Array) -> Bytes:
        return np.ascontiguousarray(values.astype(self.stored)).reshape(-1).view(np.uint8).reshape(-1, self.width)

    def decode(self, stream: Bytes) -> Array:
        return np.ascontiguousarray(stream).reshape(-1).view(self.stored).reshape(-1, *self.shape)


@dataclass(frozen=True)
class Steps:
    """Reals as whole numbers of steps, as far as 16 bits reach. With a sign, the least of them stands for −inf."""

    stored: str
    per_unit: float
    shape: tuple[int, ...] = ()
    dtype = "float32"

    @property
    def width(self) -> int:
        return Raw(self.stored, self.shape).width

    def encode(self, values: Array) -> Bytes:
        bounds, signed = np.iinfo(self.stored), self.stored == "<i2"
        steps = np.clip(np.rint(values * self.per_unit), bounds.min + signed, bounds.max)
        if signed:
            steps = np.where(np.isneginf(values), bounds.min, steps)
        return Raw(self.stored, self.shape).encode(steps)

    def decode(self, stream: Bytes) -> Array:
        steps = Raw(self.stored, self.shape).decode(stream)
        values = steps.astype(np.float32) * np.float32(1 / self.per_unit)
        if self.stored == "<i2":
            values[steps == NO_REST] = -np.inf
        return values


TOKEN_LOGPROB = Steps("<u2", -STEPS_PER_NAT)
ENTROPY = Steps("<u2", STEPS_PER_ENTROPY)


@dataclass(frozen=True)
class Packed:
    """Unsigned integers of `bits` bits each."""

    count: int
    bits: int
    dtype = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    @property
    def width(self) -> int:
        return packed_bytes(self.count, self.bits)

    def encode(self, values: Array) -> Bytes:
        return pack(values, self.bits)

    def decode(self, stream: Bytes) -> Array:
        return unpack(stream, self.count, self.bits).view(np.int32)


Code = Raw | Steps | Packed  # `shape` and `dtype`: of a row as it is read; `width`: its bytes as they are stored


def packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def pack(values: Array, bits: int) -> Bytes:
    """Unsigned values [R, n] as R rows of bytes, `bits` (4 to 24) each, the lowest bit first."""
    rows, count = values.shape
    assert values.dtype.kind in "iu" and not (values.size and (values.min() < 0 or int(values.max()) >> bits)), (
        "values that do not fit their bits"
    )
    width = packed_bytes(count, bits)
    room = np.zeros((rows, width + 3), dtype=np.uint8)
    words = _words(room, rows, width, width + 3)
    values = values.astype(np.uint32)
    for phase in range(min(8, count)):  # every eighth value has the same shift, and stands `bits` bytes further
        part = values[:, phase::8] << np.uint32(phase * bits % 8)
        words[:, phase * bits // 8 :: bits][:, : part.shape[1]] |= part
    return np.ascontiguousarray(room[:, :width])


def unpack(packed: Bytes, count: int, bits: int) -> npt.NDArray[np.uint32]:
    """The `count` values of each row that `pack` packed."""
    rows, width = packed.shape
    room = np.zeros(rows * width + 3, dtype=np.uint8)  # what is read beyond a value's own bits is masked out
    room[: rows * width] = packed.reshape(-1)
    words = _words(room, rows, width, width)
    values = np.empty((rows, count), dtype=np.uint32)
    for phase in range(min(8, count)):
        out = values[:, phase::8]
        np.right_shift(words[:, phase * bits // 8 :: bits][:, : out.shape[1]], np.uint32(phase * bits % 8), out=out)
    values &= np.uint32((1 << bits) - 1)
    return values


def _words(room: Bytes, rows: int, width: int, stride: int) -> npt.NDArray[np.uint32]:
    """The 32 bits that begin at each byte of each row."""
    return np.ndarray((rows, width), dtype="<u4", buffer=room, strides=(stride, 1))


# The k largest log-probabilities are kept as gaps from one to the next: the first ones fine, for most mass is there.
FINE_GAPS = 8
FINE_BITS, COARSE_BITS = 10, 5
FINE_RANGE, COARSE_RANGE = (0.001, 24.0), (0.016, 8.0)


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


def encode_gaps(logprobs: Array, fine: int) -> tuple[Array, Array]:
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


def decode_gaps(fine: Bytes, coarse: Bytes, k: int) -> npt.NDArray[np.float32]:
    """How far below the largest each of the k entries is [R, k]."""
    first = 1 + min(FINE_GAPS, k - 1)
    below = torch.zeros(len(fine), k)
    gaps = below.numpy()
    if first > 1:
        gaps[:, 1:first] = FINE_GAP[unpack(fine, first - 1, FINE_BITS)]
    if k > first:
        pairs = unpack(coarse, -(-(k - first) // 2), 2 * COARSE_BITS)
        gaps[:, first:] = COARSE_PAIR[pairs].view(np.float32)[:, : k - first]
    torch.cumsum(below, -1, out=below)  # NumPy's takes four times as long
    return gaps
