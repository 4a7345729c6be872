"""Attention inside the segments of packed rows, where torch has no kernel for it: on the CPU, in float32, with caps or sinks.

Segment after segment, and long ones in blocks of queries, so that no more than a block of scores is there at a time. The
backward pass computes the scores again: nothing but queries, keys and values is kept. It is an operator of its own, so that a
compiler neither unrolls the segments nor compiles anew for others.

T positions, S segments, H heads, K of keys and values, G = H / K, D width of a head, n queries and m keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

QUERIES = 128  # of a block


def segment_attention(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, K, D]
    v: Tensor,  # [T, K, D']
    bounds: Tensor,  # int32 [S + 1], on the host
    sinks: Tensor | None,  # [H]; scores of a key that has no value
    scale: float,
    window: int | None,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """[T, H, D']: each position attends to itself and to those before it in its segment, at most `window` in all."""
    if dropout:  # what was dropped would not be known when scores are computed again
        blocks = []
        for a, i, j in _blocks(bounds, window):
            p, _ = _probabilities(q[i:j], k[a:j], sinks, scale, window, softcap)
            blocks.append(_ungrouped(torch.nn.functional.dropout(p, dropout) @ _by_head(v[a:j], p.dtype), j - i))
        return torch.cat(blocks).to(v.dtype)
    found: Tensor = torch.ops.potstill.segment_attention(q, k, v, bounds, sinks, scale, window, softcap)
    return found


def _blocks(bounds: Tensor, window: int | None) -> Iterator[tuple[int, int, int]]:
    """First key, first query and end of each block."""
    for begin, end in pairwise(_read(bounds)):
        for first in range(begin, end, QUERIES):
            key = begin if window is None else max(begin, first - window + 1)
            yield key, first, min(end, first + QUERIES)


def _read(bounds: Tensor) -> list[int]:
    assert bounds.device.type == "cpu"  # else the host would wait for a device here, in every layer
    found: list[int] = bounds.tolist()
    return found


def _probabilities(
    q: Tensor, k: Tensor, sinks: Tensor | None, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """p [K, G·n, m] of queries [n, H, D], the last of which is at the last of the keys [m, K, D]; and p [H, n] of the sinks (0
    without). In float32 at least."""
    (n, heads, _), m = q.shape, len(k)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _grouped(q, k.shape[1], wide) @ _by_head(k, wide).transpose(1, 2)
    scores = scores.view(heads, n, m) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    distance = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
    scores.masked_fill_(distance < 0 if window is None else (distance < 0) | (distance >= window), -torch.inf)
    if sinks is None:
        return scores.softmax(-1).view(k.shape[1], -1, m), scores.new_zeros(heads, n)
    scores = torch.cat([scores, sinks.to(wide).view(-1, 1, 1).expand(-1, n, 1)], -1)
    p = scores.softmax(-1)
    return p[..., :m].reshape(k.shape[1], -1, m), p[..., m]


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[m, K, D] → [K, m, D]"""
    return x.to(dtype).transpose(0, 1)


def _grouped(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[n, H, D] → [K, G·n, D]: heads that share keys stand side by side."""
    return x.to(dtype).transpose(0, 1).reshape(groups, -1, x.shape[2])


def _ungrouped(x: Tensor, n: int) -> Tensor:
    """[K, G·n, D] → [n, H, D]"""
    return x.reshape(-1, n, x.shape[2]).transpose(0, 1)


@torch.library.custom_op("potstill::segment_attention", mutates_args=())
def _segment_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sinks: Tensor | None, scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    out = v.new_empty(*q.shape[:2], v.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        for a, i, j in _blocks(bounds, window):
            p, _ = _probabilities(q[i:j], k[a:j], sinks, scale, window, softcap)
            out[i:j] = _ungrouped(p @ _by_head(v[a:j], p.dtype), j - i)
    return out


@_segment_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sinks: Tensor | None, scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    return v.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("potstill::segment_attention_gradient", mutates_args=())
def _gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sinks: Tensor | None, scale: float,
    window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k, v and the sinks (empty without any), summed in float32 at least, for keys are in several blocks."""
    wide, groups = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    ds = torch.zeros(0 if sinks is None else q.shape[1], dtype=wide, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for a, i, j in _blocks(bounds, window):
            p, p_sink = _probabilities(q[i:j], k[a:j], sinks, scale, window, softcap)
            by_query, key = _grouped(grad[i:j], groups, wide), _by_head(k[a:j], wide)
            dv[a:j] += (p.transpose(1, 2) @ by_query).transpose(0, 1)
            of_scores = by_query @ _by_head(v[a:j], wide).transpose(1, 2)
            mean = (of_scores * p).sum(-1, keepdim=True)
            of_scores = (of_scores - mean) * p
            if softcap is not None:
                capped = _grouped(q[i:j], groups, wide) @ key.transpose(1, 2) * (scale / softcap)
                of_scores *= 1 - capped.tanh_().square_()
            dq[i:j] = _ungrouped(of_scores @ key, j - i) * scale
            dk[a:j] += (of_scores.transpose(1, 2) @ _grouped(q[i:j], groups, wide)).transpose(0, 1) * scale
            if sinks is not None:
                ds -= (p_sink * mean.view_as(p_sink)).sum(-1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ds if sinks is None else ds.to(sinks.dtype)


@_gradient.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sinks: Tensor | None, scale: float,
    window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    return dq, dk, dv, q.new_empty(0, dtype=wide) if sinks is None else sinks.new_empty(sinks.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, bounds, sinks, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, bounds, sinks)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, sinks = ctx.saved_tensors
    dq, dk, dv, ds = torch.ops.potstill.segment_attention_gradient(grad, q, k, v, bounds, sinks, *ctx.settings)
    return dq, dk, dv, None, None if sinks is None else ds, None, None, None


_segment_attention.register_autograd(_backward, setup_context=_keep)
