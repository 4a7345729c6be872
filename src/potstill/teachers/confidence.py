"""How sure a teacher is of a text, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from potstill.losses.compare import label_logprobs, of_chunks
from potstill.losses.divergences import LOG_FLOOR
from potstill.parallel.vocab import VocabShard
from potstill.types import ChunkTarget, Dense, Target, TokenLogprobsTarget, TopKTarget

Confidence = tuple[Tensor, Tensor, Tensor]  # values, the rows they are at, and how many rows each stands for


@torch.no_grad()
def row_confidence(target: Target, labels: Tensor, what: str) -> Confidence | None:
    """How sure a teacher is: `ce`, the log-probabilities of the text itself; `entropy`, minus its entropy; `max_probability`,
    that of its first choice. None: it cannot be told."""
    if not isinstance(target, ChunkTarget):
        values = _confidence(target, labels, what)
        return (
            None
            if values is None
            else (values, torch.arange(len(labels), device=labels.device), torch.ones_like(values))
        )
    chunks = target.chunks
    if what == "ce":
        first = label_logprobs(target.start, target.token) if isinstance(target.start, Dense) else target.logprob
        counts = torch.ones_like(target.inner).index_add_(
            0, chunks.owner, torch.ones_like(chunks.owner).to(target.inner)
        )
        return first + target.inner, chunks.first, counts
    values = None if target.start is None else _confidence(target.start, target.token, what)
    return None if values is None else (values, chunks.first, torch.ones_like(values))


def _confidence(target: Target, labels: Tensor, what: str) -> Tensor | None:
    if isinstance(target, TokenLogprobsTarget) and what == "ce":
        return target.logprobs.clamp(min=LOG_FLOOR)
    if isinstance(target, TopKTarget):
        logp = torch.cat([target.logprobs, target.tail[:, None]], -1).clamp(min=LOG_FLOOR)
        if what == "ce":  # what is not among the entries is as likely as the rest at most
            own = target.ids == labels[:, None]
            entry = target.logprobs.masked_fill(~own, -torch.inf).amax(-1)
            return torch.where(own.any(-1), entry, target.tail).clamp(min=LOG_FLOOR)
        return (logp.exp() * logp).sum(-1) if what == "entropy" else target.logprobs.amax(-1).exp()
    if not isinstance(target, Dense):
        return None
    if what == "ce":
        return label_logprobs(target, labels)
    return of_chunks(target, labels, _entropy if what == "entropy" else _first_choice)


def _entropy(logp: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    return shard.total((logp.exp() * logp).sum(-1))[0]


def _first_choice(logp: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    return shard.first_choice(logp)[0].exp()
