"""Context parallelism: every rank reads a part of each sequence, and attention sees the keys and values of all parts.

A sequence is cut into 2·cp chunks, and rank i has chunks i and 2·cp − 1 − i: later positions attend to more, so the first chunk
goes with the last. Queries stay where they are; keys and values are gathered, in the order of the text, layer by layer. So
packed documents and sliding windows need nothing but the own rows of their masks. After the last layer the hidden states are
joined, and each rank takes a share of the rows of the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from potstill.types import Batch, ChunkTarget, PotstillError, Rows, Target

Targets = Sequence[tuple[float | Tensor, Target]]
LENGTH_ROPES = ("dynamic", "longrope")  # their frequencies depend on the longest position that a rank sees


@dataclass(frozen=True)
class Context:
    """The ranks that read the parts of a sequence, and which of them this is."""

    group: dist.ProcessGroup
    size: int
    index: int

    @property
    def chunks(self) -> int:
        return 2 * self.size

    def padded(self, batch: Batch) -> Batch:
        """A batch whose length can be cut."""
        more = -batch.input_ids.shape[1] % self.chunks
        parts = (batch.input_ids, batch.position_ids, batch.document)
        ids, positions, document = (torch.nn.functional.pad(part, (0, more)) for part in parts)
        return replace(batch, input_ids=ids, position_ids=positions, document=document)

    def own(self, length: int, device: torch.device) -> Tensor:
        """The positions that this rank reads, of so many."""
        whole = torch.arange(length, device=device).view(self.chunks, -1)
        return whole[[self.index, self.chunks - 1 - self.index]].flatten()

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' parts in the order of the text; the gradient of a part is the sum of what all ranks found."""
        whole: Tensor = _Joined.apply(part, dim, self)
        return whole

    def share(self, batch: Batch, targets: Targets, whole_documents: bool) -> tuple[Batch, Targets]:
        """This rank's part of the rows of the loss: about equally many; where rows depend on others of their document, all
        rows of some documents."""
        counts = np.array([example.supervised_tokens for example in batch.examples], dtype=np.int64)
        ends, count = np.cumsum(counts), len(batch.rows)
        if whole_documents or any(isinstance(target, ChunkTarget) for _, target in targets):
            near = np.abs(np.concatenate([[0], ends])[:, None] - np.arange(self.size + 1) * count / self.size)
            cuts = np.concatenate([[0], ends])[near.argmin(0)]
        else:
            cuts = np.arange(self.size + 1) * count // self.size
        begin, end = int(cuts[self.index]), int(cuts[self.index + 1])
        chosen = torch.arange(begin, end)
        at = chosen.to(batch.rows.student.device)
        tensors = {name: value[at] for name, value in vars(batch.rows).items() if isinstance(value, Tensor)}
        mine = [
            example for example, last, n in zip(batch.examples, ends, counts, strict=True) if begin <= last - n < end
        ]
        cut = [(x[at] if isinstance(x, Tensor) else x, target.select(chosen)) for x, target in targets]
        return replace(batch, rows=Rows(**tensors), supervised_tokens=end - begin, examples=tuple(mine)), cut


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, context: Context) -> Tensor:
        ctx.dim, ctx.context = dim, context
        own = part.contiguous()
        everyone = [torch.empty_like(own) for _ in range(context.size)]
        dist.all_gather(everyone, own, group=context.group)
        halves = [half for each in everyone for half in each.chunk(2, dim)]
        return torch.cat([*halves[::2], *halves[::-2]], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        context: Context = ctx.context
        chunks = grad.chunk(context.chunks, ctx.dim)
        by_rank = [torch.cat([chunks[i], chunks[-1 - i]], ctx.dim) for i in range(context.size)]
        own = torch.empty_like(by_rank[0])
        dist.reduce_scatter(own, by_rank, group=context.group)
        return own, None, None


def split_context(model: PreTrainedModel) -> None:
    """Let a model's attention see the keys and values of all ranks, in calls that say which these are (`context`)."""
    _check(model)
    model.set_attn_implementation(register_attention("context", _attention, plain_kind(model)))


def register_attention(name: str, attention: Any, plain: str) -> str:
    """Make an attention known to transformers, with masks as sdpa or eager (`plain`) has them. Gives its name there."""
    name = f"{name}_{plain}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, {"sdpa": sdpa_mask, "eager": eager_mask}[plain])
    return name


def plain_kind(model: PreTrainedModel) -> str:
    """What transformers calls a model's attention, without the name of ours around it."""
    name: str = model.config.get_text_config()._attn_implementation
    return next((plain for plain in ("sdpa", "eager") if name.endswith(f"_{plain}")), name)


def plain_attention(module: Any, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """By sdpa or eager, whichever is in the name of a registered attention."""
    inner = sdpa_attention_forward
    if module.config._attn_implementation.endswith("eager"):  # that of each architecture is its own
        inner = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found: tuple[Tensor, Tensor | None] = inner(module, *inputs, **options)
    return found


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    context: Context | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if context is not None:
        key, value = (context.joined(x, 2) for x in (key, value))
        options["is_causal"] = False  # the mask says it all
    return plain_attention(module, query, key, value, attention_mask, **options)


def _check(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kind, attention = config.model_type, plain_kind(model)
    if attention not in ("sdpa", "eager"):
        raise PotstillError(f"parallel.cp: {kind} with the attention {attention} cannot be cut: use sdpa")
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if found := kinds & set(LENGTH_ROPES):
        raise PotstillError(
            f"parallel.cp: the rotary frequencies of this {kind} model ({', '.join(map(str, found))}) depend on the length of "
            "a text, of which a rank sees a part: set parallel.cp to 1"
        )
