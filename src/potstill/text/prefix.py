"""A teacher's tokens in a student's: which of the student's tokens comes first in what is left of a teacher's token
once some of its bytes are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers

from potstill.text.tokens import BYTE, TEXT, TokenTable
from potstill.text.vocab import VocabMap
from potstill.types import PrefixTable

NOWHERE = -1
BEFORE = "\n"  # joins with nothing that comes after it


def segmented(backend: tokenizers.Tokenizer, table: TokenTable, contents: Sequence[bytes]) -> list[list[int]]:
    """Some bytes in a tokenizer's tokens, each as it cuts them inside a text. The longest tokens, one after the other, where
    they are no text (half a character), or the tokenizer changes it."""
    texts = []
    for content in contents:
        text = content.decode("utf-8", "replace")
        # A prefix that the tokenizer makes up stands for a space; where there is none, it must not come first.
        texts.append(text if table.prefix == "none" else text[1:] if text[:1] == " " else BEFORE + text)
    encoded = backend.encode_batch(texts, add_special_tokens=False)
    found = []
    for content, encoding in zip(contents, encoded, strict=True):
        ids = _end(table, encoding.ids, content)
        found.append([i for i in table.longest_words(content) if i is not None] if ids is None else ids)
    return found


def _end(table: TokenTable, ids: list[int], content: bytes) -> list[int] | None:
    """The last of the ids, those that say just this."""
    left = len(content)
    for begin in range(len(ids) - 1, -1, -1):
        said = table.token_bytes(ids[begin]) if ids[begin] < len(table) else b""
        if not said or content[max(left - len(said), 0) : left] != said:
            return None
        left -= len(said)
        if not left:
            return ids[begin:]
    return None


def prefix_table(
    teacher: TokenTable, student: TokenTable, found: VocabMap, backend: tokenizers.Tokenizer
) -> PrefixTable:
    """`found`: the map from the teacher's ids to the student's; `backend`: the student's tokenizer. An id takes part where
    that would cut it: after ` t`, ` treaty` does, and ` the` does not, which it writes in one."""
    sizes = np.diff(found.indptr)
    first = np.full(len(teacher), NOWHERE, dtype=np.int64)
    first[sizes > 0] = found.indices[found.indptr[:-1][sizes > 0]]
    spelled = np.isin(teacher.kinds, (TEXT, BYTE))
    whole = np.isin(np.arange(len(teacher)), found.student)
    first[~spelled & ~whole] = NOWHERE  # a special that the student has not is no text either
    lengths = np.where(spelled, teacher.lengths, 0).astype(np.int64)
    parts = np.flatnonzero((lengths > 1) & ~whole)
    segments = segmented(backend, student, [teacher.token_bytes(index) for index in parts.tolist()])
    next_at: dict[int, dict[int, int]] = {}  # teacher id → bytes written → the student's next token
    for index, ids in zip(parts.tolist(), segments, strict=True):
        ends = np.cumsum([0, *(student.lengths[i] for i in ids)]).tolist()
        if ends[-1] == lengths[index]:  # or else the student has no word for some of it
            next_at[index] = dict(zip(ends, ids, strict=False))
            first[index] = ids[0]
    base = np.concatenate([[0], np.cumsum(np.maximum(lengths - 1, 0))])
    nodes: dict[bytes, int] = {}
    node_at, then_at = np.zeros(base[-1], dtype=np.int64), np.zeros(base[-1], dtype=np.int64)
    place = 0
    for index in np.flatnonzero(lengths > 1).tolist():
        content, after = teacher.token_bytes(index), next_at.get(index, {})
        for written in range(1, len(content)):
            node_at[place] = nodes.setdefault(content[:written], len(nodes) + 1)
            then_at[place] = after.get(written, NOWHERE)
            place += 1
    of = np.repeat(np.arange(len(teacher)), np.diff(base))
    kept = np.flatnonzero(then_at != NOWHERE)
    order = kept[np.argsort(node_at[kept], kind="stable")]
    counts = np.bincount(node_at[kept], minlength=len(nodes) + 1)
    main = np.full(len(student), NOWHERE, dtype=np.int64)
    for some in (np.flatnonzero((first != NOWHERE) & ~whole)[::-1], np.flatnonzero(whole)):  # the last one stays
        main[first[some]] = some
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
