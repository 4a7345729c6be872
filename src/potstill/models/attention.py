"""How the documents of a packed row are kept apart: the ways of attention, what each is given, and which a model may try.

A batch is read as segments: every document, every run of padding. `varlen` is told where they begin and needs no mask, so
memory grows with the length of a row and not with its square; so do `flash_attention_2`, `flash_attention_3` and
`flex_attention`. `dense` makes a mask [L, L], for models that take nothing else.

B rows, L positions, T = B·L, S segments, H heads, K heads of keys and values, D width of a head.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from potstill.models.segments import segment_attention
from potstill.parallel.context import plain_attention, register_attention
from potstill.types import Batch

VARLEN = "varlen"
PLAIN = ("sdpa", "eager")
PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
FLEX = "flex_attention"
BLOCK = 128  # positions of a block of a BlockMask: what the kernels of flex_attention are made for


def candidates(model: PreTrainedModel, device: torch.device, asked: str | None) -> list[str]:
    """The ways that a model may go, best first; which of them keeps documents apart is then probed. What a user asked for is
    the only one."""
    if asked in (VARLEN, FLEX, *PACKAGES):
        return [asked]
    if asked is not None:
        return ["dense"]
    if device.type != "cuda":
        return [VARLEN, "dense"]
    others = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    if caps_scores(model) or has_sinks(model):  # torch's kernel knows neither
        return [*others, FLEX, VARLEN, "dense"]
    return [VARLEN, *others, FLEX, "dense"]


def caps_scores(model: PreTrainedModel) -> bool:
    """Whether scores are soft-capped, which sdpa leaves out without a word (Gemma 2)."""
    return bool(model.config.get_text_config().to_dict().get("attn_logit_softcapping"))


def has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())


def choose(model: PreTrainedModel, way: str, plain: str) -> None:
    """Let a text model's attention go one way. `plain`: sdpa or eager, for passes that are not ours: those that write."""
    name = way
    if way == VARLEN:
        name = register_attention(VARLEN, _varlen, plain)
    elif way in ("dense", "own"):
        name = plain
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"its attention cannot be replaced by {way}")


def inputs(config: Any, batch: Batch, way: str, dtype: torch.dtype, positions: int | None) -> dict[str, Any]:
    """What the backbone is given. `config` is the one of the text: models that also see nest it in theirs. Rows with one
    document each need no positions and, but for windows, no mask: right padding comes after all that counts."""
    given: dict[str, Any] = {"input_ids": batch.input_ids}
    if way == "own":
        return given
    if batch.packed or (positions is not None and batch.input_ids.shape[1] > positions):
        given["position_ids"] = batch.position_ids
    if way == "dense":
        return given | ({"attention_mask": block_masks(config, batch.document, dtype)} if batch.packed else {})
    if way == FLEX:
        return given | {"attention_mask": by_kind(config, lambda window: block_mask(batch.document, window))}
    bounds, on_host, longest = segments(batch)
    # The names by which transformers hands them on to attention.
    given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if way == VARLEN:  # a mask of one element is passed on as it is: no other is made, and the host waits for nothing
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        given |= {"attention_mask": by_kind(config, lambda window: nothing), "segment_bounds": on_host}
    return given


def segments(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Where segments begin and the last one ends, on the batch's device and on the host; the length of the longest."""
    rows, length = batch.input_ids.shape
    device = batch.input_ids.device
    if not batch.packed:
        bounds, on_host = (
            torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=place) for place in (device, "cpu")
        )
        return bounds, on_host, length
    lengths = batch.lengths or segment_lengths(batch.document)
    on_host = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return on_host.to(device) if batch.bounds is None else batch.bounds, on_host, max(lengths)


def segment_lengths(document_BL: Tensor) -> tuple[int, ...]:
    """Read from the numbers of documents; the host waits for them. `data.collate` knows without."""
    document = document_BL.cpu()
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    places = begins.flatten().nonzero().flatten()
    return tuple(torch.diff(places, append=places.new_tensor([document.numel()])).tolist())


def by_kind(config: Any, make: Callable[[int | None], Any]) -> Any:
    """A mask for each kind of layer, where a model mixes them; else one for all."""
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    if hasattr(config, "layer_types") and config.layer_types:
        windows = {"full_attention": None, "sliding_attention": window}
        return {kind: make(windows[kind]) for kind in sorted(set(config.layer_types))}
    return make(window)


def first_keys(document_BL: Tensor, window: int | None) -> Tensor:
    """The first position that each one attends to, int64 [B, L]; the last is itself."""
    place = torch.arange(document_BL.shape[1], device=document_BL.device)
    begins = torch.ones_like(document_BL, dtype=torch.bool)
    begins[:, 1:] = document_BL[:, 1:] != document_BL[:, :-1]
    first = torch.where(begins, place, 0).cummax(1).values
    return first if window is None else first.maximum(place - (window - 1))


def block_masks(
    config: Any, document_BL: Tensor, dtype: torch.dtype, queries: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """Causal attention inside each document, made on the device without reading from it. Right padding is document 0: it
    attends to itself, and nothing attends to it. `queries`: the positions that attend; None: all."""
    place = torch.arange(document_BL.shape[1], device=document_BL.device)
    queries = place if queries is None else queries

    def mask(window: int | None) -> Tensor:
        allowed = place >= first_keys(document_BL, window)[:, None, queries, None]
        allowed &= place <= queries[:, None]
        if config._attn_implementation.endswith("sdpa"):
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    masks: Tensor | dict[str, Tensor] = by_kind(config, mask)
    return masks


def block_mask(document_BL: Tensor, window: int | None) -> BlockMask:
    """The same for flex_attention: which blocks of keys a block of queries needs, found from the first key of each position. So
    the table has an element for each pair of blocks, where `create_block_mask` asks about each pair of positions."""
    rows, length = document_BL.shape
    first = first_keys(document_BL, window)
    blocks = -(-length // BLOCK)
    # Past the end nothing is attended to, so a block that reaches there is never whole.
    padded = torch.nn.functional.pad(first, (0, blocks * BLOCK - length), value=blocks * BLOCK)
    begin, number = padded.view(rows, 1, blocks, 1, BLOCK), torch.arange(blocks, device=document_BL.device)
    needed = (number >= begin[..., 0] // BLOCK) & (number <= number[:, None])
    # All its keys are seen by all queries: none lies before the first key of the last query, none after the first query.
    whole = needed & (number * BLOCK >= begin[..., -1]) & (number < number[:, None])

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[b, q])

    def ordered(table: Tensor) -> tuple[Tensor, Tensor]:
        return table.sum(-1, dtype=torch.int32), table.int().argsort(dim=-1, descending=True, stable=True).int()

    tables = (*ordered(needed & ~whole), *ordered(whole))
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segment_bounds: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention inside segments, with the scores of each architecture: windows, soft caps, sinks. A call without segments is
    not ours and goes the model's own way."""
    if cu_seq_lens_q is None or segment_bounds is None or max_length_q is None:
        return plain_attention(module, query, key, value, attention_mask, **options)
    if options.get("position_bias") is not None:
        raise NotImplementedError("a bias for each pair of positions")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window, softcap, sinks = (options.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    dropout, rows, length = options.get("dropout", 0.0), query.shape[0], query.shape[2]
    plain = softcap is None and sinks is None
    if plain and cu_seq_lens_q.shape[0] == rows + 1 and (window is None or length <= window):  # each row is one segment
        grouped = query.shape[1] != key.shape[1]
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return found.transpose(1, 2), None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if plain and not dropout and _has_kernel(q, v):
        found = varlen_attn(  # type: ignore[assignment]  # no more than that is asked for
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scale,
            window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    else:
        found = segment_attention(q, k, v, segment_bounds, sinks, scale, window, softcap, dropout)
    return found.unflatten(0, (rows, length)), None


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether torch's varlen attention has one for these."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256
