"""What a cache keeps of a teacher, from its hidden states and its head, without logits of all rows at once.

R rows, V ids, K kept entries, N draws, b rows of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.losses.dense import target_logits
from potstill.losses.rows import LOG2_E
from potstill.transfer import exact, to_device
from potstill.types import HiddenTarget

PRODUCT_BYTES = 64 * 2**20  # of one product's logits
BLOCK_BYTES = 8 * 2**20  # of the logits worked on at once: they stay in a processor's last cache, and calls are few
COLUMNS = 64  # that share one maximum, or one sum
BELOW_ONE = 1 - 2.0**-23  # also in float32
NO_MASS = -128.0  # a logit so far below the largest weighs 0 in float32; −inf would make 0 · −inf of its entropy


def uniforms(seed: int, key: str, rows: int, draws: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for a document's draws. They depend on the document alone, so that a build that was interrupted, or
    was spread over other processes, draws the same."""
    word = hashlib.sha256(f"{seed} {key}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(word, "little"))).random((rows, draws))


@torch.no_grad()
def in_blocks(
    of_logits: Callable[[Tensor, Tensor, Tensor | None], dict[str, Tensor]],
    target: HiddenTarget,
    vocabulary: int,
    labels: Tensor,
    asked: npt.NDArray[Any] | None,
) -> dict[str, npt.NDArray[Any]]:
    """What a function makes of the logits of R rows, a block of them at a time. It may write over the logits."""
    rows, device = labels.shape[0], labels.device
    n = max(1, PRODUCT_BYTES // (4 * vocabulary))
    b = n if device.type != "cpu" else max(1, BLOCK_BYTES // (4 * vocabulary))
    logits = torch.empty(min(n, rows), vocabulary, device=device)
    wanted = None if asked is None else to_device(asked, device)
    parts: list[dict[str, Tensor]] = []
    for start in range(0, rows, n):
        count = min(n, rows - start)
        product = target_logits(target, slice(start, start + count), out=logits[:count])
        for first in range(0, count, b):
            at = slice(start + first, start + min(first + b, count))
            parts.append(
                of_logits(product[first : first + b], labels[at, None], None if wanted is None else wanted[at])
            )
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]} if parts else {}


def largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [b, V], largest first, and where they are. Columns are looked at in groups: the k largest lie
    in the k groups with the largest maxima."""
    rows, width = z.shape
    groups = width // COLUMNS
    if groups < 4 * k:
        return z.topk(k, -1)
    grouped = z[:, : groups * COLUMNS].unflatten(-1, (groups, COLUMNS))
    best = grouped.amax(-1).topk(k, -1, sorted=False).indices
    candidates = _groups(grouped, best).flatten(1)
    columns = (best[..., None] * COLUMNS + torch.arange(COLUMNS, device=z.device)).flatten(1)
    if groups * COLUMNS < width:  # the columns that fill no group
        candidates = torch.cat([candidates, z[:, groups * COLUMNS :]], -1)
        left = torch.arange(groups * COLUMNS, width, device=z.device)
        columns = torch.cat([columns, left.expand(rows, -1)], -1)
    values, place = candidates.topk(k, -1)
    return values, columns.gather(-1, place)


def _groups(grouped: Tensor, chosen: Tensor) -> Tensor:
    """Chosen groups [b, n, COLUMNS] of each row. Faster than `gather`, which looks every column up."""
    return grouped[torch.arange(grouped.shape[0], device=chosen.device)[:, None], chosen]


def largest_left(z: Tensor, values: Tensor) -> Tensor:
    """An upper bound of what is left, near enough to it that the sum of exponentials neither overflows nor vanishes. Finite,
    for −inf − −inf is no number: fewer than k ids may have any mass."""
    if values.shape[1] == z.shape[1]:
        return torch.zeros_like(values[:, -1])
    return values[:, -1].clamp(min=torch.finfo(values.dtype).min)


def log_mass(z: Tensor, largest: Tensor, temperature: float = 1.0) -> Tensor:
    """log Σ exp(z / T) of each row; −inf where nothing is left."""
    return (z - largest[:, None]).mul_(LOG2_E / temperature).exp2_().sum(-1).log() + largest / temperature


def draws(z: Tensor, random: Tensor, temperature: float) -> dict[str, Tensor]:
    """N draws with replacement from each row [b, N], in the order of their ids, and the entropy of the row."""
    width = z.shape[1]
    if temperature != 1.0:
        z.div_(temperature)
    z.sub_(z.amax(-1, keepdim=True)).clamp_(min=NO_MASS)
    weights = torch.mul(z, LOG2_E).exp2_()
    entropy = -z.mul_(weights).sum(-1)  # the logits are not needed again
    groups = -(-width // COLUMNS)
    if groups * COLUMNS > width:
        weights = torch.nn.functional.pad(weights, (0, groups * COLUMNS - width))
    grouped = weights.unflatten(-1, (groups, COLUMNS))
    ends = exact(grouped.sum(-1)).cumsum_(-1)
    mass = ends[:, -1:]
    entropy = entropy / mass.squeeze(-1) + mass.squeeze(-1).log()
    # First the group, then the column in it: two short searches in place of a sum along the whole row. Rounding must not
    # lead beyond the last one that has any weight.
    wanted = (random.sort(-1).values * mass).clamp_(max=mass * BELOW_ONE)
    group = torch.searchsorted(ends, wanted, right=True).clamp_(
        max=groups - 1
    )  # beyond it with NaN, which is told later
    before = torch.nn.functional.pad(ends, (1, 0)).gather(-1, group)
    inside = _groups(grouped, group).cumsum_(-1)
    wanted = (wanted - before).float()[..., None].clamp_(max=inside[..., -1:] * BELOW_ONE)
    column = torch.searchsorted(inside, wanted, right=True).squeeze(-1)
    return {"samples": (group * COLUMNS + column).int(), "entropy": entropy.float()}
