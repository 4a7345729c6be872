"""One token for each row of logits. B rows, V ids, K candidates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.config import SamplingConfig
from potstill.signals.compute import draws, largest
from potstill.transfer import exact

CANDIDATES = 1024  # looked at for top_p before all of a large vocabulary is sorted


def rollout_seed(seed: int, prompt: int, generation: int) -> int:
    """64 bits that depend on the run's seed, the prompt's number in the whole run and the generation's alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt} {generation}".encode()).digest()[:8], "little")


def uniforms(seeds: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), `count` for each seed [B, count]: a text's draws do not depend on the texts written beside it."""
    return np.stack([np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds])


def draw(logits: Tensor, random: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Ids [B] and the log-probabilities [B] they were drawn with, from logits [B, V] and numbers in [0, 1) [B].

    Temperature, then min_p, top_k and top_p, each of what the one before left: the order of vLLM.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    scaled = logits / sampling.temperature
    if not (sampling.min_p or sampling.top_k or sampling.top_p < 1.0):
        # The weights are needed once, and the logits again for the log-probability.
        ids = draws(scaled.clone(), random[:, None], 1.0)["samples"].long()
        return ids.squeeze(-1), scaled.gather(-1, ids).squeeze(-1) - scaled.logsumexp(-1)
    values, columns = candidates(scaled, sampling)
    weights = exact(values).softmax(-1)
    ends = weights.cumsum(-1)
    place = torch.searchsorted(ends, random[:, None] * ends[:, -1:], right=True)
    place = torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1)  # rounding must not lead beyond the last one
    return columns.gather(-1, place).squeeze(-1), values.log_softmax(-1).gather(-1, place).squeeze(-1)


def drawn_from(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """The log-probabilities [N, V], in float32, that tokens are drawn with; −inf for what is never drawn."""
    nothing = torch.full_like(logits, -torch.inf, dtype=torch.float32)
    if sampling.temperature == 0.0:
        return nothing.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    values, columns = candidates(logits.float() / sampling.temperature, sampling)
    return nothing.scatter_(-1, columns, values.log_softmax(-1))


def candidates(scaled: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """What may be drawn: logits [B, K], largest first, −inf where there are fewer than K; and their ids [B, K]."""
    width = scaled.shape[1]
    log_mass = None
    if sampling.top_k and sampling.top_k < width:
        values, columns = largest(scaled, sampling.top_k)
    elif sampling.top_p < 1.0 and width > CANDIDATES:
        values, columns = largest(scaled, CANDIDATES)
        log_mass = _mass_after_min_p(scaled, values[:, :1], sampling)
        if bool((values.logsumexp(-1) - log_mass < np.log(sampling.top_p)).any()):
            values, columns = scaled.sort(-1, descending=True)
    else:
        values, columns = scaled.sort(-1, descending=True)
    if sampling.min_p:
        values = values.masked_fill(values < values[:, :1] + np.log(sampling.min_p), -torch.inf)
    if sampling.top_p < 1.0:
        total = values.logsumexp(-1) if log_mass is None else log_mass
        before = (exact(values) - total[:, None]).exp().cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        values = values.masked_fill(before >= sampling.top_p, -torch.inf)
    return values, columns


def _mass_after_min_p(scaled: Tensor, top: Tensor, sampling: SamplingConfig) -> Tensor:
    if not sampling.min_p:
        return scaled.logsumexp(-1)
    return scaled.masked_fill(scaled < top + np.log(sampling.min_p), -torch.inf).logsumexp(-1)
