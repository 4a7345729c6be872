"""Reverse KL by the tokens that the student drew: its gradient by the score function, from log-probabilities alone.

N rows of the loss; log P, log Q and log B of a row's token to the teacher, to the student now, and when it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from potstill.losses.compare import label_logprobs
from potstill.losses.divergences import LOG_FLOOR
from potstill.transfer import to_device
from potstill.types import Dense, Target, TokenLogprobsTarget

LARGEST_LOG_RATIO = 60.0  # e⁶⁰ is finite in float32, and so is the sum of many: for the log, the loss clips far below


@dataclass(frozen=True)
class Score:
    """Of each row; all are 0 where the student did not write the token."""

    value: Tensor  # [N]; −ρ·A
    weight: Tensor  # [N]; ρ·A, 0 where ρ is clipped: the gradient is that of a cross-entropy with this weight
    advantage: Tensor  # [N]; A
    ratio: Tensor  # [N]; ρ before it is clipped
    clipped: Tensor  # bool [N]


@torch.no_grad()
def policy_gradient_kl(
    student: Tensor,
    teachers: Sequence[tuple[float | Tensor, Tensor]],
    behaviour: Tensor,
    lengths: Sequence[int],
    *,
    discount: float = 0.0,
    ratio_clip: float = 2.0,
    token_clip: float | None = None,
    reward: Tensor | None = None,
) -> Score:
    """`student` [N]: log Q. `teachers`: weights (a number, or one a row) and log P [N]; advantages are summed. `behaviour` [N]:
    log B, NaN where the student did not write the token. `lengths`: rows of each document, in order. `token_clip`: largest
    size of a token's own advantage, before those of later ones are added. `reward` [N]: is added, undiscounted."""
    own = ~behaviour.isnan()
    advantage = torch.zeros_like(student)
    for share, logprobs in teachers:
        share = share.to(student.dtype) if isinstance(share, Tensor) else share
        advantage += share * (logprobs.to(student.dtype).clamp(min=LOG_FLOOR) - student)
    if token_clip is not None:
        advantage = advantage.clamp(-token_clip, token_clip)
    advantage = _discounted(torch.where(own, advantage, 0.0), lengths, discount)
    if reward is not None:
        advantage = advantage + reward.to(advantage.dtype)
    advantage = torch.where(own, advantage, 0.0)
    ratio = (student - behaviour.to(student.dtype)).clamp(max=LARGEST_LOG_RATIO).exp()
    ratio = torch.where(own, ratio, 0.0)
    clipped = ratio > ratio_clip
    weight = ratio * advantage
    return Score(
        value=torch.where(clipped, -ratio_clip * advantage, -weight),
        weight=torch.where(clipped, 0.0, weight),
        advantage=advantage,
        ratio=ratio,
        clipped=clipped,
    )


def _discounted(values: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Each value and the discounted ones after it in its document. In steps that double: after each one a row holds the sum of
    twice as many, so that few operations do for long documents."""
    longest = max(lengths, default=0)
    if not discount or longest < 2:
        return values
    ends = np.cumsum(lengths)
    after = to_device(np.repeat(ends, lengths) - 1 - np.arange(ends[-1]), values.device)
    span = 1
    while span < longest:
        values = values + discount**span * torch.where(after >= span, values.roll(-span), 0.0)
        span *= 2
    return values


@torch.no_grad()
def chosen_logprobs(target: Target, labels: Tensor) -> Tensor:
    """log P of the labels [N]. An id that the teacher does not have is as unlikely to it as can be."""
    if isinstance(target, TokenLogprobsTarget):
        return target.logprobs
    if not isinstance(target, Dense):
        raise ValueError(
            "policy_gradient_kl needs how likely the text's own tokens are to the teacher: a TokenLogprobsTarget or a "
            f"DenseTarget, not a {type(target).__name__}"
        )
    with torch.autocast(labels.device.type, enabled=False):
        return label_logprobs(target, labels)
