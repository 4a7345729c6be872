"""What a token is drawn from: the model's distribution after temperature and truncation."""

from __future__ import annotations

import torch
from torch import Tensor

from potstill.config.policy import SamplingConfig


def drawn_from(logits_NV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities [N, V] in float32; −inf for what is never drawn. Temperature, then min_p, top_k and top_p, each of
    what the one before left: the order of vLLM. At temperature 0 all is on the likeliest token."""
    logits = logits_NV.float()
    if sampling.temperature == 0:
        only = torch.full_like(logits, -torch.inf)
        return only.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        rising, order = logits.sort(dim=-1)
        beyond = rising.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        beyond[:, -1] = False  # the likeliest always stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)
