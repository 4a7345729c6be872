"""Two tokenizations of one text as chunks: the shortest runs of tokens on both sides that cover the same bytes.

An *atom* is a byte or a special token; specials of one role are the same atom on both sides. Where the atoms of a sequence are
equal on both sides, chunks end where the cumulative counts of atoms meet. Where they are not (a tokenizer changed the text, or
put a special that the other has not), chunks are found inside the equal stretches, and what lies between is not exact.

A batch is laid out flat, one sequence after the other, and never padded. S and T count student and teacher tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.text.edits import equal_stretches
from potstill.text.roles import pairing_roles
from potstill.text.tokens import ABSENT, SPACE, SPECIAL, TokenTable, checked_ids, gather
from potstill.types import PotstillError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
FIRST_ROLE = 256  # atoms below are bytes


@dataclass(frozen=True)
class Alignment:
    """Entries that tile both sequences in order. Ends are exclusive; an entry that is not exact may be empty on one side."""

    student_start: npt.NDArray[np.int32]
    student_end: npt.NDArray[np.int32]
    teacher_start: npt.NDArray[np.int32]
    teacher_end: npt.NDArray[np.int32]
    exact: Bools

    def __len__(self) -> int:
        return len(self.exact)

    def supervised(self, tokens: Bools) -> Bools:
        """Which entries may enter a loss, given which student tokens are supervised: exact ones, if all their tokens are."""
        before = np.concatenate([[0], np.cumsum(tokens)])
        whole = before[self.student_end] - before[self.student_start] == self.student_end - self.student_start
        return np.asarray(self.exact & whole)


def align(
    student_ids: npt.ArrayLike, teacher_ids: npt.ArrayLike, student_table: TokenTable, teacher_table: TokenTable
) -> Alignment:
    """How two tokenizations of one text line up. Ids are taken as they are: they need not be what the tokenizer would give."""
    return align_batch([student_ids], [teacher_ids], student_table, teacher_table)[0]


def align_batch(
    student_ids: Sequence[npt.ArrayLike],
    teacher_ids: Sequence[npt.ArrayLike],
    student_table: TokenTable,
    teacher_table: TokenTable,
) -> list[Alignment]:
    """`align` of many sequences at once."""
    if len(student_ids) != len(teacher_ids):
        raise PotstillError(
            f"{len(student_ids)} sequences of the student's to be aligned with {len(teacher_ids)} of the teacher's"
        )
    if not student_ids:
        return []
    student, teacher, atoms = _both((student_ids, teacher_ids), (student_table, teacher_table))
    if np.array_equal(student.ends, teacher.ends) and np.array_equal(student.atoms, teacher.atoms):
        s, t = _meet(student.bounds, teacher.bounds, int(student.bounds[-1]) + 1)
        cut = np.stack([s[:-1], s[1:], t[:-1], t[1:]])
    else:
        ends = np.stack([student.ends, teacher.ends], axis=1)
        begins = np.concatenate([np.zeros((1, 2), dtype=np.int64), ends[:-1]])
        cut = _inside(_stretches(student, teacher, np.hstack([begins, ends])), student, teacher)
    return _tiles(_true_specials(cut, student, teacher, atoms), student, teacher)


def align_spans(
    student_ids: npt.ArrayLike,
    teacher_ids: npt.ArrayLike,
    student_table: TokenTable,
    teacher_table: TokenTable,
    spans: Sequence[tuple[int, int, int, int]],
) -> Alignment:
    """`align` where only pairs of spans (student start, end, teacher start, end; in tokens, in order) are the same text, as
    the messages of a conversation are in two chat templates. Nothing outside them is exact."""
    student, teacher, atoms = _both(([student_ids], [teacher_ids]), (student_table, teacher_table))
    given = np.array(spans, dtype=np.int64).reshape(-1, 4)
    for side, columns in ((student, given[:, :2]), (teacher, given[:, 2:])):
        flat = columns.ravel()
        if len(flat) and (flat[0] < 0 or flat[-1] > int(side.counts[0]) or (np.diff(flat) < 0).any()):
            raise PotstillError(
                f"spans to align overlap or go beyond the {int(side.counts[0])} tokens: {columns.tolist()}"
            )
    columns_of = ((student, 0), (teacher, 2), (student, 1), (teacher, 3))
    edges = np.stack([_atoms_before(given[:, column], side) for side, column in columns_of], axis=1)
    cut = _inside(_stretches(student, teacher, edges), student, teacher)
    return _tiles(_true_specials(cut, student, teacher, atoms), student, teacher)[0]


@dataclass(frozen=True)
class _Atoms:
    """A vocabulary in atoms, for one partner: it is the partner that decides which specials are the same."""

    buffer: npt.NDArray[np.uint16]
    begins: Ints  # [V + 1]; the last stands for ids beyond the vocabulary
    spans: npt.NDArray[np.int32]  # [V + 1]
    roles: dict[int, set[str]]
    doubtful: bool  # some specials are one atom and have no role in common


@lru_cache(maxsize=16)
def _pair(student: TokenTable, teacher: TokenTable) -> tuple[_Atoms, _Atoms]:
    roles = [{i: set(named) for i, named in pairing_roles(table.special).items()} for table in (student, teacher)]
    for table, of_ids in zip((student, teacher), roles, strict=True):
        for index, content in table.contents.items():
            of_ids.setdefault(index, set()).add(content)
    # Roles that one token has together are one atom: where that joins too much, `_true_specials` looks again.
    group: dict[str, str] = {}

    def root(role: str) -> str:
        while group.setdefault(role, role) != role:
            role = group[role]
        return role

    for of_ids in roles:
        for named in of_ids.values():
            first, *rest = sorted(named)
            for role in rest:
                group[root(role)] = root(first)
    numbers: dict[str, int] = {}
    codes = [
        {i: FIRST_ROLE + 2 + numbers.setdefault(root(min(named)), len(numbers)) for i, named in of_ids.items()}
        for of_ids in roles
    ]
    theirs: dict[int, list[set[str]]] = {}
    for index, named in roles[1].items():
        theirs.setdefault(codes[1][index], []).append(named)
    doubtful = any(not ours & named for index, ours in roles[0].items() for named in theirs.get(codes[0][index], ()))
    return (
        _in_atoms(student, codes[0], roles[0], FIRST_ROLE, doubtful),
        _in_atoms(teacher, codes[1], roles[1], FIRST_ROLE + 1, doubtful),
    )


def _in_atoms(
    table: TokenTable, codes: dict[int, int], roles: dict[int, set[str]], nobody: int, doubtful: bool
) -> _Atoms:
    """`nobody` is the atom of ids without a meaning: it differs from side to side, so that it is equal to nothing."""
    size = len(table)
    bare = np.flatnonzero((table.kinds == SPECIAL) | (table.kinds == ABSENT))
    extra = np.array([codes.get(int(index), nobody) for index in bare] + [nobody], dtype=np.uint16)
    spans = np.append(table.lengths, np.int32(1))
    spans[bare] = 1
    begins = np.append(table.offsets[:-1], 0)
    begins[np.append(bare, size)] = len(table.buffer) + np.arange(len(extra))
    return _Atoms(np.concatenate([table.buffer.astype(np.uint16), extra]), begins, spans, roles, doubtful)


@dataclass(frozen=True)
class _Flat:
    """Sequences laid out flat. Tokens without an atom (a dummy prefix that is a token) are left out until the end."""

    ids: Ints  # [tokens with atoms]
    at: Ints | None  # where they stand among all tokens; None: all have atoms
    counts: Ints  # [B]; tokens of each sequence, all of them
    bounds: Ints  # [tokens with atoms + 1]; atoms before each
    ends: Ints  # [B]; atoms before the end of each sequence
    atoms: npt.NDArray[np.uint16]


def _flat(
    sequences: Sequence[npt.ArrayLike], table: TokenTable, atoms: _Atoms, what: str, spaced: Bools | None = None
) -> _Flat:
    """`spaced`: the sequences whose text begins with a space, if that is known."""
    parts = [checked_ids(ids, what) for ids in sequences]
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    if len(ids) and int(ids.max()) >= len(table):
        ids = np.minimum(ids, len(table))
    spans, begins = atoms.spans[ids], atoms.begins[ids]
    if table.prefix != "none":
        dummy = _dummies(ids, table, np.cumsum(counts) - counts, spaced)
        spans, begins = spans - dummy, begins + dummy
    at = None
    last = np.cumsum(counts)
    if len(spans) and not spans.all():
        at = np.flatnonzero(spans)
        ids, spans, begins = ids[at], spans[at], begins[at]
        last = np.searchsorted(at, last)
    bounds = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(spans, out=bounds[1:])
    return _Flat(ids, at, counts, bounds, bounds[last], gather(atoms.buffer, begins, spans))


def _both(
    ids: tuple[Sequence[npt.ArrayLike], Sequence[npt.ArrayLike]], tables: tuple[TokenTable, TokenTable]
) -> tuple[_Flat, _Flat, tuple[_Atoms, _Atoms]]:
    """Student and teacher, laid out in atoms of this pair."""
    atoms = _pair(*tables)
    sides = list(zip(ids, tables, atoms, ("the student's ids", "the teacher's ids"), strict=True))
    student, teacher = (_flat(*side) for side in sides)
    # One tokenizer may have put a space only if there was none; the other knows whether there was.
    hides_space = [table.prefix != "none" and not table.prefix_always for table in tables]
    if hides_space == [True, False]:
        student = _flat(*sides[0], _spaced(teacher))
    elif hides_space == [False, True]:
        teacher = _flat(*sides[1], _spaced(student))
    return student, teacher, atoms


def _atoms_before(tokens: Ints, side: _Flat) -> Ints:
    return side.bounds[tokens if side.at is None else np.searchsorted(side.at, tokens)]


def _dummies(ids: Ints, table: TokenTable, starts: Ints, spaced: Bools | None) -> Bools:
    dummy = table.dummies(np.minimum(ids, len(table) - 1), starts) & (ids < len(table))
    if spaced is not None and spaced.any():
        held = np.flatnonzero(dummy)
        sequence = np.searchsorted(starts, held, side="right") - 1
        sequence, first = np.unique(sequence, return_index=True)
        dummy[held[first][spaced[sequence]]] = False
    return dummy


def _spaced(side: _Flat) -> Bools:
    """Which sequences begin with a space, whatever specials come before it."""
    text = np.flatnonzero(side.atoms < FIRST_ROLE)
    begins = np.append(0, side.ends[:-1])
    first = np.append(text, len(side.atoms))[np.searchsorted(text, begins)]
    there = first < side.ends
    there[there] = side.atoms[first[there]] == SPACE
    return np.asarray(there)


def _meet(student: Ints, teacher: Ints, size: int) -> tuple[Ints, Ints]:
    """Indices of the values that stand in both; both increase, below `size`."""
    marks = np.zeros(size, dtype=np.bool_)
    marks[teacher] = True
    ours = np.flatnonzero(marks[student])
    marks[teacher] = False
    marks[student] = True
    return ours, np.flatnonzero(marks[teacher])


def _stretches(student: _Flat, teacher: _Flat, ranges: Ints) -> Ints:
    """[n, 3]: where the atoms are equal (begin in the student's, in the teacher's, length), in order, inside `ranges` (begins
    on both sides, ends on both sides)."""
    found: list[tuple[int, int, int]] = []
    for i, j, i_end, j_end in ranges.tolist():
        a, b = student.atoms[i:i_end], teacher.atoms[j:j_end]
        if np.array_equal(a, b):
            found.append((i, j, len(a)))
        else:
            found += [(i + p, j + q, length) for p, q, length in equal_stretches(a, b)]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _inside(stretches: Ints, student: _Flat, teacher: _Flat) -> Ints:
    """[4, chunks]: the chunks inside stretches. Each stretch has a place of its own on a line that both sides are put on."""
    stretches = stretches[stretches[:, 2] > 0]
    i, j, length = stretches.T
    base = np.cumsum(length + 1) - (length + 1)

    def on_line(bounds: Ints, begin: Ints) -> tuple[Ints, Ints, Ints]:
        low, high = np.searchsorted(bounds, begin), np.searchsorted(bounds, begin + length, side="right")
        which = np.repeat(np.arange(len(begin)), high - low)
        token = np.arange(len(which)) + np.repeat(low - (np.cumsum(high - low) - (high - low)), high - low)
        return base[which] + bounds[token] - begin[which], token, which

    place_s, token_s, which = on_line(student.bounds, i)
    place_t, token_t, _ = on_line(teacher.bounds, j)
    hit_s, hit_t = _meet(place_s, place_t, int((length + 1).sum()) + 1)
    together = which[hit_s][:-1] == which[hit_s][1:]
    s, t = token_s[hit_s], token_t[hit_t]
    return np.stack([s[:-1], s[1:], t[:-1], t[1:]])[:, together]


def _true_specials(cut: Ints, student: _Flat, teacher: _Flat, atoms: tuple[_Atoms, _Atoms]) -> Ints:
    """Without the chunks of two specials that are one atom but have no role in common."""
    if not atoms[0].doubtful:
        return cut
    at = np.flatnonzero(student.atoms[student.bounds[cut[0]]] >= FIRST_ROLE)
    ours, theirs = atoms[0].roles, atoms[1].roles
    pairs = zip(student.ids[cut[0, at]].tolist(), teacher.ids[cut[2, at]].tolist(), strict=True)
    wrong = [place for place, (s, t) in zip(at.tolist(), pairs, strict=True) if not ours[s] & theirs[t]]
    return np.delete(cut, wrong, axis=1) if wrong else cut


def _tiles(cut: Ints, student: _Flat, teacher: _Flat) -> list[Alignment]:
    """Chunks, and between them what is not exact, per sequence."""
    cut = np.stack([*_with_atomless(cut[0], cut[1], student), *_with_atomless(cut[2], cut[3], teacher)])
    ends_s, ends_t = np.cumsum(student.counts), np.cumsum(teacher.counts)
    exact = np.ones(cut.shape[1], dtype=np.bool_)
    if not _gapless(cut, ends_s, ends_t):
        cut, exact = _filled(cut, ends_s, ends_t)
    # An entry belongs to the sequence in which it ends; none crosses from one into the next.
    last = np.searchsorted(cut[1] + cut[3], ends_s + ends_t, side="right")
    tiles, begin = [], 0
    for end, off_s, off_t in zip(last.tolist(), ends_s - student.counts, ends_t - teacher.counts, strict=True):
        offsets = np.array([[off_s], [off_s], [off_t], [off_t]])
        s0, s1, t0, t1 = (cut[:, begin:end] - offsets).astype(np.int32)
        tiles.append(Alignment(s0, s1, t0, t1, exact[begin:end]))
        begin = end
    return tiles


def _with_atomless(begin: Ints, end: Ints, side: _Flat) -> tuple[Ints, Ints]:
    """Chunks in terms of all tokens: a token without atoms joins the chunk of text that follows, else the one before."""
    if side.at is None:
        return begin, end
    total = int(side.counts.sum())
    wide = np.append(side.at, total)
    sequence = np.append(np.cumsum(side.counts) - side.counts, total)
    text = side.atoms[side.bounds[begin]] < FIRST_ROLE if len(begin) else np.zeros(0, dtype=np.bool_)
    before = np.append(0, side.at + 1)[begin]  # just after the token that precedes
    start = sequence[np.searchsorted(sequence, side.at[begin], side="right") - 1]
    out_begin = np.where(text, np.maximum(before, start), wide[begin])
    limit = sequence[np.searchsorted(sequence, side.at[end - 1], side="right")]
    following = np.minimum(wide[end], limit)
    # What follows takes the tokens in between if it is text in the same sequence.
    next_text = np.zeros(len(end), dtype=np.bool_)
    inner = (end < len(side.at)) & (wide[end] < limit)
    next_text[inner] = side.atoms[side.bounds[end[inner]]] < FIRST_ROLE
    return out_begin, np.where(text & ~next_text, following, side.at[end - 1] + 1)


def _gapless(cut: Ints, ends_s: Ints, ends_t: Ints) -> bool:
    total = [ends_s[-1:], ends_t[-1:]]
    return all(
        len(cut[0]) and cut[row][0] == 0 and cut[row + 1][-1] == end and np.array_equal(cut[row][1:], cut[row + 1][:-1])
        for row, end in zip((0, 2), total, strict=True)
    )


def _filled(cut: Ints, ends_s: Ints, ends_t: Ints) -> tuple[Ints, Bools]:
    """An empty chunk at the end of each sequence, then an entry for every gap."""
    places = np.searchsorted(cut[1] + cut[3], ends_s + ends_t, side="right")
    marked: Any = np.insert(cut, places, np.stack([ends_s, ends_s, ends_t, ends_t]), axis=1)
    before_s, before_t = np.append(0, marked[1][:-1]), np.append(0, marked[3][:-1])
    gaps = np.stack([before_s, marked[0], before_t, marked[2]])
    both = np.stack([gaps, marked], axis=2).reshape(4, -1)
    exact = np.tile([False, True], marked.shape[1])
    kept = (both[0] < both[1]) | (both[2] < both[3])
    return both[:, kept], exact[kept]
