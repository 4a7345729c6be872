"""A causal language model as potstill uses it: hidden states from the backbone, the output head kept apart.

B rows, L positions, N loss rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from potstill.types import Batch, DenseTarget


@dataclass
class LanguageModel:
    """A loaded model with its tokenizer and what was found out about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    head: Mapping[str, Any]  # softcap and logit_scale
    masks: str  # "blocks": takes our block-diagonal masks; "own": makes its own, so one document a row only

    def hidden(self, batch: Batch, positions: Tensor) -> Tensor:
        """Last hidden states [N, H] at flat positions of the batch."""
        return hidden_states(self.model, batch, self.masks).flatten(0, 1).index_select(0, positions)

    def at_rows(self, hidden: Tensor, width: int | None = None) -> DenseTarget:
        """Hidden states [N, H] with this model's head, narrowed to the first `width` ids."""
        module = self.model.get_output_embeddings()
        bias = module.bias if isinstance(module, nn.Linear) else None
        return DenseTarget(
            hidden=hidden, weight=module.weight[:width], bias=None if bias is None else bias[:width], **self.head
        )

    @property
    def positions(self) -> int | None:
        """The longest sequence it can read, where it says (`hasattr`: some configs map the name to one of their own)."""
        config = self.model.config.get_text_config()
        return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def hidden_states(model: PreTrainedModel, batch: Batch, masks: str) -> Tensor:
    """Last hidden states [B, L, H]; the head is not applied."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if masks == "blocks":
        inputs["position_ids"] = batch.position_ids
        inputs["attention_mask"] = block_masks(
            model.config.get_text_config(), batch.document, next(model.parameters()).dtype
        )
    return model.base_model(**inputs, use_cache=False).last_hidden_state


def block_masks(config: Any, document_BL: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Causal attention inside each document, made on the device without reading from it. Models that mix kinds of layers
    take one mask a kind. Right padding is document 0: it attends to itself, and nothing attends to it.

    `config` is the one of the text: models that also see nest it in theirs."""
    keys = config.to_dict()
    place = torch.arange(document_BL.shape[1], device=document_BL.device)
    distance = place[:, None] - place[None, :]
    same = document_BL[:, None, :, None] == document_BL[:, None, None, :]

    def mask(window: int | None) -> Tensor:
        reach = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        allowed = same & reach
        if config._attn_implementation == "sdpa":
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    windows = {"full_attention": None, "sliding_attention": keys.get("sliding_window")}
    if keys.get("layer_types"):
        return {kind: mask(windows[kind]) for kind in sorted(set(keys["layer_types"]))}
    return mask(keys.get("sliding_window"))
