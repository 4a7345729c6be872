"""How two models differ row by row, measured (not trained): used by the evaluation and by the training log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from potstill.losses.dense import log_probs, target_logits
from potstill.losses.divergences import LOG_FLOOR
from potstill.losses.rows import CHUNK_BYTES
from potstill.parallel.vocab import VocabShard, shard_targets
from potstill.types import (
    ChunkTarget,
    Dense,
    HiddenTarget,
    PrefixMarginalTarget,
    SampledTarget,
    Target,
    TopKTarget,
)


@dataclass(frozen=True)
class RowStats:
    """Per-row float32 values, at T = 1, in nats. The teacher's are None when there is none, or when it does not tell."""

    nll: Tensor  # −log Q(label) over the student's whole vocabulary
    confidence: Tensor  # the student's largest probability
    correct: Tensor  # its most likely token is the label
    student_entropy: Tensor
    teacher_entropy: Tensor | None
    kl: Tensor | None  # KL(P‖Q) over the ids both models have; of a truncated teacher over its entries and the rest
    agreement: Tensor | None  # both models' most likely tokens are the same
    acceptance: (
        Tensor | None
    )  # 1 − TVD: how likely the teacher accepts a token that the student drafts. Dense teachers only


@torch.no_grad()
def compare_rows(student: HiddenTarget, labels: Tensor, teacher: Target | None) -> RowStats:
    """Compare the student and a teacher at N rows, in chunks."""
    given = [] if teacher is None else [(1.0, teacher)]
    shard, cut, _ = shard_targets(student.width, given, student.head.group, labels.device)
    parts: list[tuple[Tensor | None, ...]] = []
    for rows in chunks_of_rows(max(1, len(labels)), shard.widest):
        label, logits = labels[rows, None], target_logits(student, rows)
        logq = log_probs(logits, shard)
        best, top = shard.first_choice(logq)
        entropy, nll = shard.total(-(logq.exp() * logq).sum(-1), -shard.gather(logq, label, 0.0).squeeze(-1))
        correct = (top == label.squeeze(-1)).float()
        parts.append((nll, best.exp(), correct, entropy, *_against(cut[0][1] if cut else None, rows, logits, shard)))
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return RowStats(*columns)  # type: ignore[arg-type]


def chunks_of_rows(rows: int, width: int) -> Iterator[slice]:
    step = max(16, CHUNK_BYTES // (4 * width))
    return (slice(start, start + step) for start in range(0, rows, step))


def _against(
    teacher: Target | None, rows: slice, logits: Tensor, shard: VocabShard
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The teacher's entropy, KL(P‖Q), whether both like the same token best, and what their distributions share."""
    if isinstance(teacher, Dense):
        logp = log_probs(target_logits(teacher, rows, shard=shard), shard)
        logq = log_probs(logits[:, : logp.shape[1]], shard)
        agree = (shard.first_choice(logp)[1] == shard.first_choice(logq)[1]).float()
        entropy, kl, shared = shard.total(
            -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - logq)).sum(-1), torch.minimum(logp, logq).exp().sum(-1)
        )
        return entropy, kl, agree, shared
    if not isinstance(teacher, TopKTarget | SampledTarget):
        return None, None, None, None  # there is none, its tokens are others, or it has no distribution
    if (width := shard.held(teacher.width)) < shard.size:
        logits = torch.nn.functional.pad(logits[:, :width], (0, shard.size - width), value=-torch.inf)
    logq, ids = log_probs(logits, shard), teacher.ids[rows]
    kept = shard.lookup(logq, ids, LOG_FLOOR)
    if isinstance(teacher, SampledTarget):
        if teacher.entropy is None:
            return None, None, None, None
        entropy = teacher.entropy[rows].to(kept.dtype)
        return entropy, -(teacher.weights[rows] * kept).sum(-1) - entropy, None, None
    best, logprobs = shard.first_choice(logq)[1], teacher.logprobs[rows]
    if teacher.absent is not None:
        kept = kept.masked_fill(teacher.absent[rows], -torch.inf)
    rest = shard.logsumexp(shard.drop_(logq, ids))[:, None]
    logq = torch.cat([kept, rest], -1).clamp_(min=LOG_FLOOR)
    logp = torch.cat([logprobs, teacher.tail[rows, None]], -1).to(logq.dtype).clamp_(min=LOG_FLOOR)
    top = ids.gather(-1, logprobs.argmax(-1, keepdim=True)).squeeze(-1)
    return -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - logq)).sum(-1), (top == best).float(), None


def of_chunks(
    target: Dense, labels: Tensor, found: Callable[[Tensor, Tensor, VocabShard], Tensor], temperature: float = 1.0
) -> Tensor:
    """What is found [N] from a dense target's log-probabilities and the labels, chunk by chunk."""
    group = target.head.group if isinstance(target, HiddenTarget) else None
    shard, _, _ = shard_targets(target.width, (), group, labels.device)
    parts = [torch.zeros(0, device=labels.device)]
    for rows in chunks_of_rows(len(labels), shard.widest):
        logp = log_probs(target_logits(target, rows) / temperature, shard)
        parts.append(found(logp, labels[rows, None], shard))
    return torch.cat(parts)


@torch.no_grad()
def label_logprobs(target: Dense, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N] of given ids at a dense target's N rows, in chunks; LOG_FLOOR for one that it lacks."""
    return of_chunks(
        target, labels, lambda logp, label, shard: shard.lookup(logp, label, LOG_FLOOR).squeeze(-1), temperature
    )


@torch.no_grad()
def shared_mass(target: Target, most: int) -> Tensor | None:
    """The mass of a teacher with another tokenizer on ids that the student has too, at a sample of its places [at most `most`].
    None: it has the same tokenizer, or it is not known any more."""
    if isinstance(target, PrefixMarginalTarget):
        places = target.place[:: max(1, target.place.shape[0] // most)][:most]
        logp = log_probs(target_logits(target.source.select(places), slice(None)))
        return (logp.exp() * target.table.whole).sum(-1)
    if not isinstance(target, ChunkTarget):
        return None
    start, count = target.start, target.token.shape[0]
    if start is None or not count:
        return torch.zeros(0, device=target.token.device)
    chosen = torch.arange(0, count, max(1, count // most), device=target.token.device)[:most]
    some = start.select(chosen)
    if isinstance(some, TopKTarget):
        return (some.logprobs.exp() * (target.relation.place_teacher[some.ids] >= 0)).sum(-1)
    logp = log_probs(target_logits(some, slice(None)))
    return logp.index_select(1, target.relation.teacher).exp().sum(-1)
