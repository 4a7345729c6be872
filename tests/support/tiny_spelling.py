"""A made-up lexicon and rows over it, and the method `prefix_marginal` written out: the naive twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potstill.types import DenseTarget, Spelling


def random_spelling(seed: int, students: int = 25, teachers: int = 19, rows: int = 14, dtype: Any = torch.float64):
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
    source = DenseTarget(logits=2 * torch.randn(9, teachers, generator=made, dtype=dtype))
    main, more = np.full(students, -1), []
    for y, x in enumerate(first.tolist()):
        if x >= 0 and main[x] < 0:
            main[x] = y
        elif x >= 0:
            more.append((x, y))
    more_then, more_token = (np.array(column, dtype=np.int64) for column in zip(*sorted(more), strict=True))
    several, slot = np.unique(more_then, return_inverse=True)
    nowhere = np.flatnonzero(main < 0)
    arrays = (main, more_token, slot, several, nowhere, first >= 0, begin, token, then, place, node, actual, usual, own)
    tensors = [torch.from_numpy(x) for x in arrays]
    odd = (usual != own) | (beyond < 0)
    spelling = Spelling(
        source, students, *tensors, torch.from_numpy(beyond), odd, more_then, slot, nowhere, place, node, sizes
    )
    hidden = torch.randn(rows, 6, generator=made, dtype=dtype)
    head = torch.randn(students + 4, 6, generator=made, dtype=dtype)  # with padding ids
    return hidden, head, torch.from_numpy(own), DenseTarget(spelled=spelling)


def _usual(node, y, first, begin, token, then) -> int:
    if not node:
        return int(first[y])
    return next(int(then[i]) for i in range(begin[node], begin[node + 1]) if token[i] == y)


def naive_probabilities(spelling: Spelling, temperature: float = 1.0) -> Tensor:
    """[N, students], row by row and id by id."""
    first = dict(zip(spelling.more_token.tolist(), spelling.more_then_host.tolist(), strict=True))
    first |= {int(y): x for x, y in enumerate(spelling.main) if y >= 0}
    found = []
    for row in range(len(spelling.place)):
        p = (spelling.source.logits[spelling.place[row]] / temperature).softmax(-1).tolist()
        mass = [0.0] * spelling.students
        node = int(spelling.node[row])
        entries = [(y, first.get(y, -1)) for y in range(len(p))]
        if node:
            span = range(int(spelling.begin[node]), int(spelling.begin[node + 1]))
            entries = [(int(spelling.token[i]), int(spelling.then[i])) for i in span]
        for y, x in entries:
            if y == int(spelling.actual[row]):
                certain = p[y] * float(spelling.beyond[row].exp())
                mass[int(spelling.own[row])] += certain
                if x >= 0:
                    mass[x] += p[y] - certain
            elif x >= 0:
                mass[x] += p[y]
        # What nothing leads to is e^−20 as likely as the likeliest that takes part.
        least = max(p[y] for y, _ in entries) * math.exp(-20)
        mass = [max(m, least) for m in mass]
        found.append([m / sum(mass) for m in mass])
    return torch.tensor(found, dtype=torch.float64)
