"""Losses over rows. A loss never sees a mask, a pad id or a label of -100."""

from potstill.losses.compare import RowStats, compare_rows, label_logprobs, shared_mass
from potstill.losses.divergences import DIVERGENCES
from potstill.losses.fused import FusedLoss, fused_linear_kd
from potstill.losses.kd import KDLoss
from potstill.losses.policy_gradient import Score, chosen_logprobs, policy_gradient_kl
from potstill.types import ChunkTarget, DenseTarget, SampledTarget, TokenLogprobsTarget, TopKTarget

__all__ = [
    "DIVERGENCES",
    "ChunkTarget",
    "DenseTarget",
    "FusedLoss",
    "KDLoss",
    "RowStats",
    "SampledTarget",
    "Score",
    "TokenLogprobsTarget",
    "TopKTarget",
    "chosen_logprobs",
    "compare_rows",
    "fused_linear_kd",
    "label_logprobs",
    "policy_gradient_kl",
    "shared_mass",
]
