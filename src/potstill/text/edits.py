"""Where two nearly equal sequences are equal: the stretches, in order, near linear in their length.

rapidfuzz finds the least edits of two strings exactly, at a cost that grows with the product of their lengths. So it is shown
windows only: what is equal at either end is stripped, a window opens where the sequences differ and closes at the next long
equal run. Runs that are unique in both (anchors) come first, so that a long insertion cannot lose the place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein

Atoms = npt.NDArray[np.uint16]
Stretch = tuple[int, int, int]  # begin in a, begin in b, length

SMALLEST, LARGEST = 64, 2048  # windows, in atoms
RUN = 16  # an equal run of so many is no coincidence: an alignment up to it is settled
GRAM, STRIDE = 32, 16  # anchors are runs of GRAM atoms, looked for at every STRIDE-th place
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def equal_stretches(a: Atoms, b: Atoms) -> list[Stretch]:
    """Stretches (i, j, length) with a[i:i + length] == b[j:j + length], in order, no two overlapping on either side."""
    head = _common(a, b)
    tail = _common(a[head:][::-1], b[head:][::-1])
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    found: list[Stretch] = [(0, 0, head)]
    i = j = 0
    if min(len(middle_a), len(middle_b)) > LARGEST:
        for p, q, length in _anchors(middle_a, middle_b):
            overlap = max(i - p, j - q, 0)
            if overlap < length:
                p, q, length = p + overlap, q + overlap, length - overlap
                found += _shifted(_windowed(middle_a[i:p], middle_b[j:q]), head + i, head + j)
                found.append((head + p, head + q, length))
                i, j = p + length, q + length
    found += _shifted(_windowed(middle_a[i:], middle_b[j:]), head + i, head + j)
    found.append((len(a) - tail, len(b) - tail, tail))
    return _joined(found)


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many of the first are equal, looking at ever larger blocks: a difference near the start is found at once."""
    size = min(len(a), len(b))
    done, block = 0, 64
    while done < size:
        end = min(done + block, size)
        differ = a[done:end] != b[done:end]
        if differ.any():
            return done + int(differ.argmax())
        done, block = end, block * 4
    return size


def _windowed(a: Atoms, b: Atoms) -> list[Stretch]:
    text_a, text_b = _as_text(a), _as_text(b)
    found: list[Stretch] = []
    i = j = 0
    while i < len(a) and j < len(b):
        run = _common(a[i:], b[j:])
        if run:
            found.append((i, j, run))
            i, j = i + run, j + run
            continue
        blocks = _window(text_a, text_b, i, j)
        found += blocks
        if blocks:
            i, j = blocks[-1][0] + blocks[-1][2], blocks[-1][1] + blocks[-1][2]
        else:  # nothing alike in a whole window
            i, j = i + LARGEST // 2, j + LARGEST // 2
    return found


def _window(text_a: str, text_b: str, i: int, j: int) -> list[Stretch]:
    """The equal blocks from (i, j) on, as far as they are settled."""

    # Where one side says the same in fewer atoms throughout (runs of spaces as one), equal windows would drift apart.
    ratio = min(max((len(text_b) - j) / (len(text_a) - i), 0.5), 2.0)
    width = SMALLEST
    while True:
        wide_a, wide_b = int(width / max(ratio, 1.0)), int(width * min(ratio, 1.0))
        matched = Levenshtein.editops(text_a[i : i + wide_a], text_b[j : j + wide_b]).as_matching_blocks()
        blocks = [(i + m.a, j + m.b, m.size) for m in matched if m.size]
        if i + wide_a >= len(text_a) and j + wide_b >= len(text_b):
            return blocks
        long = [at for at, block in enumerate(blocks) if block[2] >= RUN]
        if long:
            return blocks[: long[-1] + 1]
        if width >= LARGEST:  # beyond the half, what the window does not show may decide
            return [block for block in blocks if block[0] - i < wide_a // 2 and block[1] - j < wide_b // 2]
        width *= 2


def _as_text(atoms: Atoms) -> str:
    return atoms.astype("<u2").tobytes().decode("utf-16-le", "surrogatepass")


def _anchors(a: Atoms, b: Atoms) -> list[Stretch]:
    """Runs that stand once in each, in an order that both share: the longest such chain, neighbours joined."""
    hash_a, hash_b = _grams(a)[::STRIDE], _grams(b)
    # Most places of b are of no interest, and a bitmap says so faster than sorting them all would.
    mask = np.uint64((1 << (16 * len(hash_a)).bit_length()) - 1)
    marks = np.zeros(int(mask) + 1, dtype=np.bool_)
    marks[hash_a & mask] = True
    candidates = np.flatnonzero(marks[hash_b & mask])
    order = candidates[np.argsort(hash_b[candidates], kind="stable")]
    ranked = hash_b[order]
    first = np.searchsorted(ranked, hash_a, side="left")
    once = (np.searchsorted(ranked, hash_a, side="right") - first == 1) & _unique(hash_a)
    at_a = np.flatnonzero(once) * STRIDE
    at_b = order[first[once]]
    chain = slice(None) if (np.diff(at_b) > 0).all() else _increasing(at_b.tolist())
    return list(_along_diagonals(a, b, at_a[chain], at_b[chain]))


def _along_diagonals(a: Atoms, b: Atoms, at_a: npt.NDArray[np.int64], at_b: npt.NDArray[np.int64]) -> Iterator[Stretch]:
    """Anchors in stretches: neighbours with the same shift, and nothing between them that differs."""
    for some in np.split(np.arange(len(at_a)), np.flatnonzero(np.diff(at_b - at_a)) + 1):
        if not len(some):
            continue
        begin, shift = int(at_a[some[0]]), int(at_b[some[0]] - at_a[some[0]])
        end = int(at_a[some[-1]]) + GRAM
        differ = np.flatnonzero(a[begin:end] != b[begin + shift : end + shift]) + begin
        # A hash may deceive: an anchor with a difference inside is none.
        true = some[np.searchsorted(differ, at_a[some]) == np.searchsorted(differ, at_a[some] + GRAM)]
        for run in np.split(true, np.flatnonzero(np.diff(np.searchsorted(differ, at_a[true]))) + 1):
            if len(run):
                p = int(at_a[run[0]])
                yield p, p + shift, int(at_a[run[-1]]) + GRAM - p


def _grams(atoms: Atoms) -> npt.NDArray[np.uint64]:
    """A hash of every run of GRAM atoms, by doubling: of 2, of 4, … of 32."""
    hashes = (atoms.astype(np.uint64) + np.uint64(1)) * _FACTOR
    width = 1
    while width < GRAM:
        mixed = hashes[:-width] * _FACTOR
        hashes = (mixed ^ (mixed >> np.uint64(29))) + hashes[width:]
        width *= 2
    return hashes


def _unique(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.asarray(counts[inverse] == 1)


def _increasing(values: list[int]) -> list[int]:
    """Indices of a longest increasing subsequence."""
    tails: list[int] = []
    tail_at: list[int] = []
    before: list[int] = []
    for at, value in enumerate(values):
        place = bisect_left(tails, value)
        before.append(tail_at[place - 1] if place else -1)
        if place == len(tails):
            tails.append(value)
            tail_at.append(at)
        else:
            tails[place], tail_at[place] = value, at
    chain = []
    at = tail_at[-1] if tail_at else -1
    while at >= 0:
        chain.append(at)
        at = before[at]
    return chain[::-1]


def _shifted(stretches: list[Stretch], by_a: int, by_b: int) -> list[Stretch]:
    return [(i + by_a, j + by_b, length) for i, j, length in stretches]


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Neighbours without a gap on either side are one."""
    joined: list[Stretch] = []
    for i, j, length in stretches:
        if not length:
            continue
        if joined and joined[-1][0] + joined[-1][2] == i and joined[-1][1] + joined[-1][2] == j:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((i, j, length))
    return joined
