"""A made-up prefix table and rows over it, and the method `prefix_marginal` written out: the naive twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potstill.types import LogitsTarget, PrefixMarginalTarget, PrefixTable


def random_prefix_marginal(
    seed: int, students: int = 25, teachers: int = 19, rows: int = 14, dtype: Any = torch.float64
):
    """hidden [N, H], head, labels [N] and a target whose rows begin anywhere in the teacher's tokens."""
    g = np.random.default_rng(seed)
    first = g.integers(0, students, teachers)
    first[3] = -1  # one that the student has no word for
    sizes = np.array([0, 3, 5, 1])  # entries of the nodes
    token = np.concatenate([g.choice(teachers, size, replace=False) for size in sizes[1:]])
    then = g.integers(0, students, len(token))
    place = np.sort(g.integers(0, 9, rows))
    node = g.integers(0, 4, rows)
    begin = np.concatenate([[0], np.cumsum(sizes)])
    actual = np.array([g.choice(token[begin[n] : begin[n + 1]]) if n else g.integers(0, teachers) for n in node])
    usual = np.array([_usual(n, y, first, begin, token, then) for n, y in zip(node, actual, strict=True)])
    own = np.where(g.random(rows) < 0.6, usual, g.integers(0, students, rows)).clip(0)
    beyond = np.where(g.random(rows) < 0.3, -g.exponential(1.0, rows), 0.0)
    made = torch.Generator().manual_seed(seed)
    source = LogitsTarget(2 * torch.randn(9, teachers, generator=made, dtype=dtype))
    table = made_up_table(students, first, begin, token, then)
    target = PrefixMarginalTarget(
        source,
        table.on(torch.device("cpu")),
        *map(torch.from_numpy, (place, node, actual, usual, own, beyond)),
        place_host=place,
        node_host=node,
        odd_host=(usual != own) | (beyond < 0),
    )
    hidden = torch.randn(rows, 6, generator=made, dtype=dtype)
    head = torch.randn(students + 4, 6, generator=made, dtype=dtype)  # with padding ids
    return hidden, head, torch.from_numpy(own), target


def made_up_table(students: int, first, begin, token, then) -> PrefixTable:
    """What the loss reads of a table: the student's first token of each teacher's, and the entries of the nodes."""
    main, more = np.full(students, -1), []
    for y, x in enumerate(first.tolist()):
        if x >= 0 and main[x] < 0:
            main[x] = y
        elif x >= 0:
            more.append((x, y))
    more_then, more_token = np.array(sorted(more), dtype=np.int64).reshape(-1, 2).T.copy()
    several, slot = np.unique(more_then, return_inverse=True)
    unread = dict.fromkeys(("base", "node_at", "then_at", "depth", "lengths"), np.zeros(0, dtype=np.int64))
    return PrefixTable(
        students=students,
        first=first,
        whole=first >= 0,
        main=main,
        more_token=more_token,
        more_then=more_then,
        more_slot=slot,
        several=several,
        nowhere=np.flatnonzero(main < 0),
        begin=begin,
        token=token,
        then=then,
        **unread,
    )


def _usual(node, y, first, begin, token, then) -> int:
    if not node:
        return int(first[y])
    return next(int(then[i]) for i in range(begin[node], begin[node + 1]) if token[i] == y)


def naive_probabilities(target: PrefixMarginalTarget, temperature: float = 1.0) -> Tensor:
    """[N, students], row by row and id by id."""
    table = target.table.host
    found = []
    for row in range(len(target.place)):
        p = (target.source.logits[target.place[row]] / temperature).softmax(-1).tolist()
        mass = [0.0] * table.students
        node = int(target.node[row])
        entries = [(y, int(table.first[y])) for y in range(len(p))]
        if node:
            span = range(int(table.begin[node]), int(table.begin[node + 1]))
            entries = [(int(table.token[i]), int(table.then[i])) for i in span]
        for y, x in entries:
            if y == int(target.actual[row]):
                certain = p[y] * float(target.beyond[row].exp())
                mass[int(target.own[row])] += certain
                if x >= 0:
                    mass[x] += p[y] - certain
            elif x >= 0:
                mass[x] += p[y]
        # What nothing leads to is e^−20 as likely as the likeliest that takes part.
        least = max(p[y] for y, _ in entries) * math.exp(-20)
        mass = [max(m, least) for m in mass]
        found.append([m / sum(mass) for m in mass])
    return torch.tensor(found, dtype=torch.float64)
