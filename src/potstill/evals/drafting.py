"""Speculative decoding, simulated: how many of the tokens that the student drafts its teacher would accept.

The student draws a draft x_1 … x_k; the teacher accepts x_i with probability min(1, P(x_i) ÷ Q(x_i)), and the first one that it
does not accept ends the draft. The draws of the student are those of its own answers; whether one is accepted is not drawn, but
counted by its probability, so that the same texts give the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from potstill.losses.compare import label_logprobs
from potstill.transfer import exact
from potstill.types import Batch, Dense, HiddenTarget, Target


def accepted_drafts(own: HiddenTarget, teacher: Target, batch: Batch, tokens: int) -> Tensor:
    """Of answers that the student wrote, the first `tokens` of each as a draft: how many are accepted, how many are looked at
    until one is not, and how many drafts there are; float64 [3], on the host."""
    assert isinstance(teacher, Dense)
    labels = batch.rows.labels
    chances = (exact(label_logprobs(teacher, labels)) - exact(label_logprobs(own, labels))).exp().clamp(max=1).cpu()
    lengths = [example.supervised_tokens for example in batch.examples]
    total = torch.zeros(3, dtype=torch.float64)
    for part in chances.split(lengths):
        if len(part):
            reached = part[:tokens].double().cumprod(0)  # how likely all up to this one are accepted
            total += torch.tensor([float(reached.sum()), float(1 + reached[:-1].sum()), 1.0], dtype=torch.float64)
    return total


def said_drafts(total: Tensor) -> dict[str, Any]:
    accepted, tried, drafts = total.tolist()
    if not drafts:
        return {"draft_acceptance": None, "draft_tokens_per_pass": None}
    # The teacher's pass gives one token more: its own where the draft ends.
    return {"draft_acceptance": accepted / tried, "draft_tokens_per_pass": 1 + accepted / drafts}
