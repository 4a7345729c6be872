"""Two small vocabularies, chunks between them, and the cross-tokenizer losses written out: the naive twin.

Vs and Vt ids, N student rows, C chunks. Probabilities are dictionaries over outcomes here, and autograd does the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potstill.types import Chunks, ChunkTarget, LogitsTarget, Relation, TopKTarget

FLOOR = -1e4


def relation(pairs: dict[int, int], projection: dict[int, dict[int, float]], vs: int, vt: int) -> Relation:
    """From pairs (student → teacher) and the rows of the projection."""
    student = sorted(pairs)
    teacher = [pairs[x] for x in student]
    alone_s = [x for x in range(vs) if x not in pairs]
    alone_t = [y for y in range(vt) if y not in teacher]
    place_s, place_t = torch.zeros(vs, dtype=torch.int64), torch.zeros(vt, dtype=torch.int64)
    for i, (x, y) in enumerate(zip(student, teacher, strict=True)):
        place_s[x], place_t[y] = i, i
    for i, x in enumerate(alone_s):
        place_s[x] = -1 - i
    for i, y in enumerate(alone_t):
        place_t[y] = -1 - i
    entries = [(x, y, w) for x in sorted(projection) for y, w in sorted(projection[x].items())]
    unmapped = [x for x in range(vs) if x not in projection]
    ints = {
        "student": student, "teacher": teacher, "student_alone": alone_s, "teacher_alone": alone_t,
        "start": [e[0] for e in entries], "end": [e[1] for e in entries], "unmapped": unmapped,
    }  # fmt: skip
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in ints.items()}
    hosts = {n: np.array(ints[n], dtype=np.int64) for n in ("student", "student_alone", "start", "unmapped")}
    return Relation(
        **tensors,
        place_student=place_s,
        place_teacher=place_t,
        value=torch.tensor([e[2] for e in entries]),
        hosts=hosts,
    )


def chunks(lengths: list[int], gaps: list[int]) -> Chunks:
    """Chunks of so many rows, each after so many rows that are in none."""
    first, inner, row = [], [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        row += gap
        first.append(row)
        inner += range(row + 1, row + length)
        row += length
    return Chunks.at(*(np.array(x, dtype=np.int64) for x in (first, inner)))


def bucket_masses(target: ChunkTarget, number: int, logq: Tensor, labels: Tensor, logp: Tensor):
    """Student's and teacher's masses over the method's buckets at one chunk. `logq` [N, Vs], `logp` [Vt] at its start."""
    where = target.chunks
    rows = [int(where.first[number]), *where.inner[where.owner == number].tolist()]
    s1, t1 = int(labels[rows[0]]), int(target.token[number])
    c_q = torch.stack([logq[r, labels[r]] for r in rows]).sum().exp()
    c_p = (logp[t1] + target.inner[number]).exp()
    q, p = logq[rows[0]].exp(), logp.exp()
    pairs = dict(zip(target.relation.student.tolist(), target.relation.teacher.tolist(), strict=True))
    if target.method == "span_likelihood":
        a, b = c_q ** (1 / target.chunk_temperature), c_p ** (1 / target.chunk_temperature)
        return torch.stack([a, 1 - a]), torch.stack([b, 1 - b])
    top = target.start.ids[number].tolist() if isinstance(target.start, TopKTarget) else range(len(p))
    if target.method == "common_vocab":
        kept = [(x, y) for x, y in pairs.items() if x != s1 and y != t1 and y in top]
        ours = [c_q, *(q[x] for x, _ in kept)]
        theirs = [c_p, *(p[y] for _, y in kept)]
    else:
        r = target.relation
        sent = [q.new_zeros(()) for _ in range(len(p))]
        for x, y, w in zip(r.start.tolist(), r.end.tolist(), r.value.tolist(), strict=True):
            sent[y] = sent[y] + w * (q[x] - (c_q if x == s1 else 0))
        ours = [c_q, *(sent[y] for y in top)]
        theirs = [c_p, *(p[y] - (c_p if y == t1 else 0) for y in top)]
    ours, theirs = torch.stack(ours), torch.stack(theirs)
    return torch.cat([ours, (1 - ours.sum())[None]]), torch.cat([theirs, (1 - theirs.sum())[None]])


def log_of(mass: Tensor) -> Tensor:
    return torch.where(mass > 1e-13, mass.clamp(min=1e-300).log(), FLOOR)


def divergence(name: str, p: Tensor, q: Tensor, unreached: Tensor | None = None) -> Tensor:
    """`unreached`: buckets that no token of the student's leads to."""
    logp, logq = log_of(p), log_of(q)
    if name == "forward_kl" and unreached is not None:
        share = p[~unreached].sum()  # KL of what is left, times its share
        return share * ((p / share) * (logp - share.log() - logq))[~unreached].sum()
    if name == "forward_kl":
        return (p * (logp - logq)).sum()
    if name == "reverse_kl":
        return (q * (logq - logp)).sum()
    if name == "jsd":
        logm = log_of((p + q) / 2)
        return ((p * (logp - logm)).sum() + (q * (logq - logm)).sum()) / 2
    if name == "skew_kl":
        return (p * (logp - log_of(0.1 * p + 0.9 * q))).sum()
    if name == "skew_reverse_kl":
        return (q * (logq - log_of(0.1 * q + 0.9 * p))).sum()
    return (p - q).abs().sum() / 2


def naive_loss(target: ChunkTarget, logits: Tensor, labels: Tensor, name: str, temperature: float = 1.0) -> Tensor:
    """Sum over the chunks, from raw student logits [N, Vs]; the target's start must be dense, or top-k made of `dense`."""
    logq = (logits / temperature).log_softmax(-1)
    total = logits.new_zeros(())
    for number in range(len(target.chunks.first)):
        logp = (teacher_logits(target)[number] / temperature).log_softmax(-1)
        if target.method == "uld":
            q, p = logq[target.chunks.first[number]].exp(), logp.exp()
            known = target.start.ids.shape[1] if isinstance(target.start, TopKTarget) else len(p)
            count = min(256, len(q), known)
            a, b = q.topk(count).values, p.topk(count).values
            total = total + (a - b).abs().sum() + ((1 - a.sum()) - (1 - b.sum())).abs()
            continue
        q, p = bucket_masses(target, number, logq, labels, logp)
        total = total + divergence(name, p, q, q < 1e-13 if target.method == "projection" else None)
    return total * (temperature if "tvd" in (name, target.method.replace("uld", "tvd")) else temperature**2)


_DENSE: dict[int, Tensor] = {}  # by the target's tokens: the logits a top-k start was made of


def teacher_logits(target: ChunkTarget) -> Tensor:
    return target.start.logits if isinstance(target.start, LogitsTarget) else _DENSE[id(target.token)]


def truncated(target: ChunkTarget, k: int, temperature: float = 1.0) -> ChunkTarget:
    """The same target with the teacher's top k and the rest."""
    from dataclasses import replace

    logits = target.start.logits
    _DENSE[id(target.token)] = logits
    logp = (logits / temperature).log_softmax(-1)
    top, ids = logp.topk(k, -1)
    rest = logp.exp().scatter(-1, ids, 0.0).sum(-1)
    tail = torch.where(rest > 0, rest.clamp(min=1e-300).log(), -torch.inf)
    return replace(target, start=TopKTarget(ids, top, tail), logprob=logp.gather(-1, target.token[:, None]).squeeze(-1))


def random_case(seed: int, method: str, vs: int = 23, vt: int = 19, dtype: torch.dtype = torch.float64):
    """hidden [N, H], head [Vs, H], labels [N] and a target with a dense start."""
    g = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 1, 3, 1, 1, 4, 2]
    where = chunks(lengths, [0, 1, 0, 0, 2, 0, 0, 1])
    n, c = sum(lengths) + 4 + 2, len(lengths)
    pairs = {x: y for x, y in zip(torch.randperm(vs, generator=g).tolist(), range(0, vt, 2), strict=False)}
    projection = {x: {pairs[x]: 1.0} if x in pairs else {x % vt: 0.75, (x * 7 + 1) % vt: 0.25} for x in range(vs)}
    projection = {x: row if sum(row.values()) == 1 else {x % vt: 1.0} for x, row in projection.items()}
    hidden = torch.randn(n, 6, generator=g, dtype=dtype)
    head = torch.randn(vs, 6, generator=g, dtype=dtype)
    labels = torch.randint(vs, (n,), generator=g)
    logits = 2 * torch.randn(c, vt, generator=g, dtype=dtype)
    token = torch.randint(vt, (c,), generator=g)
    longer = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0], dtype=dtype)  # chunks of several of the teacher's tokens
    inner = -longer * torch.rand(c, generator=g, dtype=dtype) * 3
    logprob = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
    target = ChunkTarget(
        method, where, relation(pairs, projection, vs, vt), LogitsTarget(logits), token, logprob, inner, 2.0
    )
    return hidden, head, labels, target
