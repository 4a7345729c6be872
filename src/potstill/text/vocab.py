"""How two vocabularies relate: the pairs of ids that mean the same, and where the mass of every other student id goes.

The projection is a sparse matrix (CSR) with a row per student id: what a student says in its words, in the teacher's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors

from potstill.text.roles import NAMES, pairing_roles
from potstill.text.tokens import ABSENT, BYTE, SPECIAL, TEXT, Arrays, TokenTable, read_arrays, write_arrays
from potstill.types import PotstillError

FORMAT = "potstill vocabulary map 1"


@dataclass(frozen=True, eq=False)
class VocabMap:
    """Pairs of ids, and the projection of a student's ids on a teacher's."""

    student: npt.NDArray[np.int32]  # [pairs], increasing; student[i] and teacher[i] mean the same
    teacher: npt.NDArray[np.int32]  # [pairs]; no id stands twice
    # [V student + 1]; row i is indices[indptr[i]:indptr[i + 1]], empty for ids of no token
    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]  # teacher ids
    values: npt.NDArray[np.float32]  # weights; those of a row sum to one
    teacher_size: int
    fingerprints: tuple[str, str]  # of the student's table and the teacher's

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.teacher_size

    @cached_property
    def teacher_of(self) -> npt.NDArray[np.int32]:
        """[V student]; each id's partner, or -1."""
        partner = np.full(self.shape[0], -1, dtype=np.int32)
        partner[self.student] = self.teacher
        return partner

    def row(self, index: int) -> list[tuple[int, float]]:
        span = slice(int(self.indptr[index]), int(self.indptr[index + 1]))
        return list(zip(self.indices[span].tolist(), self.values[span].tolist(), strict=True))

    def save(self, path: Path | str) -> None:
        arrays: Arrays = {name: getattr(self, name) for name in ("student", "teacher", "indptr", "indices", "values")}
        about = json.dumps({"teacher_size": self.teacher_size, "fingerprints": self.fingerprints})
        write_arrays(Path(path), arrays, {"format": FORMAT, "about": about})

    @classmethod
    def load(cls, path: Path | str, student: TokenTable, teacher: TokenTable) -> VocabMap:
        """The map in a file, which must be of these two vocabularies."""
        try:
            arrays, metadata = read_arrays(Path(path))
        except (OSError, safetensors.SafetensorError) as error:
            raise PotstillError(f"cannot read the vocabulary map {path}: {error}") from error
        if metadata.get("format") != FORMAT:
            raise PotstillError(f"{path} is not a vocabulary map that this version of potstill reads")
        about = json.loads(metadata["about"])
        made_for, wanted = tuple(about["fingerprints"]), (student.fingerprint, teacher.fingerprint)
        for who, table, theirs, ours in zip(("student", "teacher"), (student, teacher), made_for, wanted, strict=True):
            if theirs != ours:
                raise PotstillError(
                    f"the vocabulary map {path} was made for another {who}: its tokenizer has the fingerprint {theirs[:12]}, "
                    f"and that of {table.name or 'this one'} is {ours[:12]}; make the map anew"
                )
        return cls(**arrays, teacher_size=int(about["teacher_size"]), fingerprints=wanted)


def vocab_map(student: TokenTable, teacher: TokenTable, *, decay: float = 0.0, top: int = 4) -> VocabMap:
    """`decay` 0 sends an id without a partner to the first teacher token of its bytes; otherwise its pieces have the weights
    1, decay, decay² …, of which the `top` largest are kept, scaled to sum to one."""
    if not 0 <= decay <= 1 or top < 1:
        raise PotstillError(
            f"a vocabulary map has a decay from 0 to 1 and keeps at least 1 piece, not {decay} and {top}"
        )
    partner = np.full(len(student), -1, dtype=np.int32)
    taken = np.zeros(len(teacher), dtype=np.bool_)
    _pair_texts(student, teacher, partner, taken)
    _pair_specials(student, teacher, partner, taken)
    paired = np.flatnonzero(partner >= 0)
    indptr, indices, values = _projection(student, teacher, partner, decay, top)
    return VocabMap(
        student=paired.astype(np.int32), teacher=partner[paired], indptr=indptr, indices=indices, values=values,
        teacher_size=len(teacher), fingerprints=(student.fingerprint, teacher.fingerprint),
    )  # fmt: skip


def _pair_texts(
    student: TokenTable, teacher: TokenTable, partner: npt.NDArray[np.int32], taken: npt.NDArray[np.bool_]
) -> None:
    """Equal bytes of one kind first, because SentencePiece has each ASCII byte twice; then whatever has equal bytes."""
    for kinds in ((TEXT,), (BYTE,), (TEXT, BYTE)):
        ours, theirs = student.by_bytes(kinds, partner < 0), teacher.by_bytes(kinds, ~taken)
        for content, ids in ours.items():
            for index, other in zip(ids, theirs.get(content, ()), strict=False):
                partner[index] = other
                taken[other] = True


def _pair_specials(
    student: TokenTable, teacher: TokenTable, partner: npt.NDArray[np.int32], taken: npt.NDArray[np.bool_]
) -> None:
    same_role = list(_of_one_role(student, teacher))
    by_content = {content: index for index, content in teacher.contents.items()}
    same_name = [(i, by_content[content]) for i, content in student.contents.items() if content in by_content]
    # Within a role, what has the same name too belongs together.
    named = [(index, other) for index, other in same_role if student.contents[index] == teacher.contents[other]]
    for index, other in (*named, *same_role, *same_name):
        if partner[index] < 0 and not taken[other]:
            partner[index], taken[other] = other, True


def _of_one_role(student: TokenTable, teacher: TokenTable) -> Iterator[tuple[int, int]]:
    """Specials that may be paired by a role, in the order of the roles."""
    ours, theirs = pairing_roles(student.special), pairing_roles(teacher.special)
    for role in (*NAMES, *(role for role in student.special if role not in NAMES)):
        for index, other in product(student.special.get(role, ()), teacher.special.get(role, ())):
            if role in ours[index] and role in theirs[other]:
                yield index, other


def _projection(
    student: TokenTable, teacher: TokenTable, partner: npt.NDArray[np.int32], decay: float, top: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    lost = _for_nothing(teacher)
    same_role = pairing_roles(student.special)
    counts = np.zeros(len(student) + 1, dtype=np.int64)
    indices: list[int] = []
    values: list[float] = []
    kinds, partners = student.kinds.tolist(), partner.tolist()
    whole, offsets = student.buffer.tobytes(), student.offsets.tolist()
    for index, kind in enumerate(kinds):
        if kind == ABSENT:
            continue
        row: dict[int, float]
        if partners[index] >= 0:
            row = {partners[index]: 1.0}
        elif kind == SPECIAL and (other := _of_role(teacher, same_role.get(index, set()))) is not None:
            row = {other: 1.0}
        else:
            # A special that the teacher has no word for, it would write out.
            text = student.contents[index].encode() if kind == SPECIAL else whole[offsets[index] : offsets[index + 1]]
            pieces = (lost if piece is None else piece for piece in teacher.longest_words(text))
            row = _weights(pieces, lost, decay, top)
        counts[index + 1] = len(row)
        indices += row
        values += row.values()
    return np.cumsum(counts), np.array(indices, dtype=np.int32), np.array(values, dtype=np.float32)


def _weights(pieces: Iterator[int], lost: int, decay: float, top: int) -> dict[int, float]:
    """`lost`: what no pieces at all count as."""
    first, weight = next(pieces, lost), 1.0
    if not decay:
        return {first: weight}
    row = {first: weight}
    for piece in pieces:
        weight *= decay
        row[piece] = row.get(piece, 0.0) + weight
    kept = dict(sorted(row.items(), key=lambda item: -item[1])[:top])
    total = sum(kept.values())
    return {piece: value / total for piece, value in sorted(kept.items())}


def _of_role(table: TokenTable, roles: set[str]) -> int | None:
    return next((ids[0] for role, ids in table.special.items() if role in roles), None)


def _for_nothing(table: TokenTable) -> int:
    """Where what the vocabulary cannot say goes."""
    found = next((table.special[role][0] for role in ("unk", "eos") if role in table.special), None)
    return int(np.argmax(table.kinds != ABSENT)) if found is None else found
