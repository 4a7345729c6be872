"""A teacher's tokens in a student's: which of the student's tokens comes first in what is left of a teacher's token
once some of its bytes are written."""

from __future__ import annotations

import numpy as np

from potstill.text.tokens import BYTE, TEXT, TokenTable
from potstill.text.vocab import VocabMap
from potstill.types import PrefixTable

NOWHERE = -1


def prefix_table(teacher: TokenTable, student: TokenTable, found: VocabMap) -> PrefixTable:
    """`found`: the map from the teacher's ids to the student's. The student's first token of some bytes is the longest that
    they begin with."""
    sizes = np.diff(found.indptr)
    first = np.full(len(teacher), NOWHERE, dtype=np.int64)
    first[sizes > 0] = found.indices[found.indptr[:-1][sizes > 0]]
    spelled = np.isin(teacher.kinds, (TEXT, BYTE))
    whole = np.isin(np.arange(len(teacher)), found.student)
    first[~spelled & ~whole] = NOWHERE  # a special that the student has not is no text either
    lengths = np.where(spelled, teacher.lengths, 0).astype(np.int64)
    base = np.concatenate([[0], np.cumsum(np.maximum(lengths - 1, 0))])
    nodes: dict[bytes, int] = {}
    rests: dict[bytes, int] = {}
    node_at, then_at = np.zeros(base[-1], dtype=np.int64), np.zeros(base[-1], dtype=np.int64)
    place = 0
    for index in np.flatnonzero(lengths > 1).tolist():
        content = teacher.token_bytes(index)
        for written in range(1, len(content)):
            node_at[place] = nodes.setdefault(content[:written], len(nodes) + 1)
            rest = content[written:]
            if rest not in rests:
                found_first = next(student.longest_words(rest))
                rests[rest] = NOWHERE if found_first is None else found_first
            then_at[place] = rests[rest]
            place += 1
    of = np.repeat(np.arange(len(teacher)), np.diff(base))
    kept = np.flatnonzero(then_at != NOWHERE)
    order = kept[np.argsort(node_at[kept], kind="stable")]
    counts = np.bincount(node_at[kept], minlength=len(nodes) + 1)
    main = np.full(len(student), NOWHERE, dtype=np.int64)
    for ids in (np.flatnonzero((first != NOWHERE) & ~whole)[::-1], np.flatnonzero(whole)):  # the last one stays
        main[first[ids]] = ids
    more = np.flatnonzero((first != NOWHERE) & (main[np.maximum(first, 0)] != np.arange(len(teacher))))
    order_more = np.argsort(first[more], kind="stable")
    several, slots = np.unique(first[more][order_more], return_inverse=True)
    return PrefixTable(
        students=len(student),
        first=first,
        whole=whole,
        main=main,
        more_token=more[order_more],
        more_then=first[more][order_more],
        more_slot=slots,
        several=several,
        nowhere=np.flatnonzero(main == NOWHERE),
        begin=np.concatenate([[0], np.cumsum(counts)]),
        token=of[order],
        then=then_at[order],
        base=base,
        node_at=node_at,
        then_at=then_at,
        depth=np.array([0, *map(len, nodes)], dtype=np.int64),
        lengths=lengths,
    )
