"""How examples lie in rows, and rows in a Batch. The one place in potstill that shifts by one.

Shapes: B rows of a batch, L positions, N rows of the loss.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from potstill.types import Batch, Example, Rows


def pack(lengths: Sequence[int], *, rows: int, row_length: int, urgent: int = 0) -> tuple[list[list[int]], list[int]]:
    """Best fit, longest first, into at most `rows` rows: what lies in each row, and what found no place.

    The first `urgent` items go before all others, so that nothing is left over again and again.
    """
    order = sorted(range(len(lengths)), key=lambda i: (i >= urgent, -lengths[i], i))
    packed: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (positions free, row), sorted
    left = []
    for i in order:
        at = bisect_left(room, (lengths[i], -1))
        if at < len(room):
            free, row = room.pop(at)
        elif len(packed) < rows:
            free, row = row_length, len(packed)
            packed.append([])
        else:
            left.append(i)
            continue
        packed[row].append(i)
        insort(room, (free - lengths[i], row))
    return [sorted(row) for row in packed], sorted(left)


def collate(rows: Sequence[Sequence[Example]], pad_id: int) -> Batch:
    """Rows of examples as a Batch, right-padded to the longest row. No rows are one position of padding: ranks that share a
    model make every pass together, also those that have nothing to read in it."""
    examples = [example for row in rows for example in row]
    width = max((sum(len(example.ids) for example in row) for row in rows), default=1)
    shape = (max(1, len(rows)), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    document = np.zeros(shape, dtype=np.int32)
    nothing = np.zeros(0, dtype=np.int64)
    student, labels = [nothing], [nothing]
    behaviour, weight = [nothing.astype(np.float32)], [nothing.astype(np.float32)]
    written = any(example.behaviour is not None for example in examples)
    weighed = any(example.weights is not None for example in examples)
    counting = np.arange(width, dtype=np.int64)
    lengths: list[int] = []
    for r, row in enumerate(rows):
        begin = 0
        for number, example in enumerate(row, 1):
            end = begin + len(example.ids)
            input_ids[r, begin:end] = example.ids
            position_ids[r, begin:end] = counting[: end - begin]
            document[r, begin:end] = number
            predicted = np.flatnonzero(example.supervised)
            # Token i is predicted from the position before it; token 0 is never supervised.
            student.append(predicted + (r * width + begin - 1))
            labels.append(example.ids[predicted].astype(np.int64))
            known = example.behaviour
            behaviour.append(np.full(len(predicted), np.nan, np.float32) if known is None else known[predicted])
            counts = example.weights
            weight.append(np.ones(len(predicted), np.float32) if counts is None else counts[predicted])
            begin = end
        lengths += [n for n in (*(len(example.ids) for example in row), width - begin) if n]
    packed = any(len(row) > 1 for row in rows)
    positions = torch.from_numpy(np.concatenate(student))
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        document=torch.from_numpy(document),
        packed=packed,
        rows=Rows(
            student=positions,
            teacher=positions,
            labels=torch.from_numpy(np.concatenate(labels)),
            behaviour=torch.from_numpy(np.concatenate(behaviour)) if written else None,
            weight=torch.from_numpy(np.concatenate(weight)) if weighed else None,
            advantage=_advantages(examples),
        ),
        supervised_tokens=len(positions),
        examples=tuple(examples),
        lengths=tuple(lengths) if packed else (),
        bounds=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)) if packed else None,
    )


def _advantages(examples: Sequence[Example]) -> torch.Tensor | None:
    """[N]; 0 for what has no reward."""
    if all(example.advantage is None for example in examples):
        return None
    values = np.array([example.advantage or 0.0 for example in examples], dtype=np.float32)
    return torch.from_numpy(np.repeat(values, [example.supervised_tokens for example in examples]))


def widened(batch: Batch, multiple: int) -> Batch:
    """The batch with more padding, so that its width is a multiple. What is read and what is supervised does not change."""
    width = batch.input_ids.shape[1]
    wide = -(-width // multiple) * multiple
    if wide == width:
        return batch
    more = wide - width

    def padded(matrix: Tensor) -> Tensor:
        return torch.nn.functional.pad(matrix, (0, more))

    def moved(positions: Tensor) -> Tensor:
        return positions + positions // width * more

    lengths, at = list[int](), 0
    for length in batch.lengths:
        lengths.append(length)
        at += length
        if at % width == 0:  # the end of a row: its padding is a run of its own, or goes on
            free = batch.document[at // width - 1, -1] == 0
            lengths[-1:] = [length + more] if free else [length, more]
    student = moved(batch.rows.student)
    teacher = student if batch.rows.teacher is batch.rows.student else moved(batch.rows.teacher)
    return replace(
        batch,
        input_ids=padded(batch.input_ids),
        position_ids=padded(batch.position_ids),
        document=padded(batch.document),
        rows=replace(batch.rows, student=student, teacher=teacher),
        lengths=tuple(lengths),
        bounds=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)) if batch.packed else None,
    )


def without(batch: Batch, left_out: Sequence[int]) -> Batch:
    """The batch with nothing supervised in some of its examples. They are still read: what lies where does not change."""
    counts = [example.supervised_tokens for example in batch.examples]
    keep = np.ones(len(counts), dtype=np.bool_)
    keep[list(left_out)] = False
    kept = torch.from_numpy(np.repeat(keep, counts))
    examples = tuple(
        example if keeps else replace(example, supervised=np.zeros_like(example.supervised), supervised_bytes=0)
        for example, keeps in zip(batch.examples, keep, strict=True)
    )
    given = {name: values[kept] for name, values in vars(batch.rows).items() if values is not None}
    rows = replace(batch.rows, **given)
    return replace(batch, rows=rows, supervised_tokens=len(rows), examples=examples)
