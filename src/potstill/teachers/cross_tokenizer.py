"""The view of a teacher with another tokenizer: it reads the same text in its own tokens, and answers at chunks that cover the
same bytes. The methods common_vocab, projection, span_likelihood and uld; prefix_marginal.py has the view of that name.

C chunks, T teacher tokens that come after the first ones of their chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potstill.config import CrossTokenizerConfig
from potstill.losses import label_logprobs
from potstill.models import LanguageModel
from potstill.teachers.prefix_marginal import PrefixMarginalView
from potstill.teachers.protocols import Asked, Ints, Plan, Signal, TokenizerView
from potstill.teachers.tokenizer_pair import TokenizerPair, aligned_chunks, expanded
from potstill.transfer import to_device
from potstill.types import Batch, Chunks, ChunkTarget, Example, SampledTarget, TopKTarget


def cross_tokenizer_view(
    student: LanguageModel, tokenizer: Any, vocabulary: int, config: CrossTokenizerConfig, temperature: float
) -> tuple[TokenizerView, int]:
    """The view of a teacher with that tokenizer and so many ids, and how many of them take part."""
    pair = TokenizerPair(student.tokenizer, tokenizer, config, (student.vocabulary, vocabulary))
    view = PrefixMarginalView if config.method == "prefix_marginal" else ChunkView
    return view(pair, temperature), len(pair.teacher)


class ChunkView:
    """`config`: in place of the pair's own."""

    def __init__(
        self, pair: TokenizerPair, temperature: float = 1.0, config: CrossTokenizerConfig | None = None
    ) -> None:
        self.pair, self.temperature, self.config = pair, temperature, config or pair.cross_tokenizer
        _ = pair.map  # not on several threads at once, later

    def plan(self, batch: Batch, read: Sequence[Example]) -> ChunkPlan:
        kept = aligned_chunks(self.pair, batch, read)
        (s0, s1), (t0, t1), first = kept.student, kept.teacher, kept.first
        owner, step = expanded(s1 - s0 - 1)
        rows = first[owner] + 1 + step
        teacher_owner, teacher_step = expanded(t1 - t0 - 1)
        place = t0[teacher_owner] + 1 + teacher_step
        whole = self.config.method != "span_likelihood"
        known = np.zeros(batch.supervised_tokens, dtype=np.bool_)
        known[first] = known[rows] = True
        return ChunkPlan(
            asked=(
                Asked.of(read, kept.document, t0, distribution=whole, token_logprobs=True),
                Asked.of(read, kept.document[teacher_owner], place, distribution=False, token_logprobs=True),
            ),
            known=None if known.all() else known,
            counts=kept.counts,
            view=self,
            chunks=Chunks.at(first, rows),
            inner_owner=teacher_owner,
        )


@dataclass(frozen=True, kw_only=True)
class ChunkPlan(Plan):
    """The rows of a batch as chunks. Asked about: the first teacher token of each chunk [C], and the others [T]."""

    view: ChunkView
    chunks: Chunks
    inner_owner: Ints  # [T]; whose the others are

    def target(self, signals: Sequence[Signal], device: torch.device) -> ChunkTarget:
        config, (at_first, at_inner) = self.view.config, signals
        arrays = (*(one.token for one in self.asked), self.inner_owner)
        token, inner_token, owner = (to_device(array, device) for array in arrays)
        whole, start = config.method != "span_likelihood", at_first.target
        logprobs = self._logprobs(at_inner, inner_token)
        inner = logprobs.new_zeros(len(token)).index_add_(0, owner, logprobs)
        assert not isinstance(start, SampledTarget)
        of_head = whole and start is not None and start.dense  # by the loss
        logprob = torch.zeros_like(inner) if of_head else self._logprobs(at_first, token)
        return ChunkTarget(
            config.method,
            self.chunks.to(device),
            self.view.pair.relation(device),
            start if whole else None,
            token,
            _agreeing(start, token, logprob) if isinstance(start, TopKTarget) else logprob,
            inner,
            config.chunk_temperature,
        )

    def _logprobs(self, signal: Signal, token: Tensor) -> Tensor:
        if signal.token_logprobs is not None:
            return signal.token_logprobs
        assert signal.target is not None and not isinstance(signal.target, TopKTarget | SampledTarget)
        return label_logprobs(signal.target, token, self.view.temperature)


def _agreeing(start: TopKTarget, token: Tensor, logprob: Tensor) -> Tensor:
    """The first tokens' log-probabilities, as the entries have them, or no larger than the rest that they are part of: the two
    were rounded apart, and masses must sum to one."""
    own = start.ids == token[:, None]
    entry = start.logprobs.masked_fill(~own, -torch.inf).amax(-1)
    return torch.where(own.any(-1), entry, torch.minimum(logprob, start.tail))
