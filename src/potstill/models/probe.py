"""What a model does between its last hidden state and its logits, and whether it keeps packed documents apart, is probed
when it is loaded, not believed: a model that does something else is refused, not trained wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from potstill.losses.dense import head_logits
from potstill.models.language_model import LanguageModel, hidden_states
from potstill.models.libraries import reason
from potstill.types import Batch, DenseTarget, PotstillError, Rows

# Config keys that change logits after the head's product: key → (field of the head, value from the key's value).
HEAD_KEYS = {
    "final_logit_softcapping": ("softcap", float),  # Gemma 2 and 3
    "logits_soft_cap": ("softcap", float),  # RecurrentGemma
    "output_logit_soft_cap": ("softcap", float),  # xLSTM
    "logits_scaling": ("logit_scale", lambda x: 1.0 / x),  # Granite, MiniCPM
    "logit_scale": ("logit_scale", float),  # Cohere
    "lm_head_multiplier": ("logit_scale", float),  # Falcon-H1
}


def probed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, who: str) -> LanguageModel:
    """Find out how the model takes masks, and check that head(hidden) is what it calls its logits."""
    keys = model.config.get_text_config().to_dict()
    head = {field: make(keys[key]) for key, (field, make) in HEAD_KEYS.items() if keys.get(key) is not None}
    language_model = LanguageModel(model, tokenizer, head, "own")
    training = model.training
    model.eval()
    with torch.no_grad():
        single, packed = _probe_batches(keys, model.device)
        try:
            own = hidden_states(model, single, "own")
            logits = model(input_ids=single.input_ids, use_cache=False).logits
            ours = head_logits(own.flatten(0, 1), **_head_of(language_model.at_rows(own.flatten(0, 1))))
        except Exception as error:  # the code of each architecture, which may raise anything
            raise PotstillError(
                f"{who} ({model.config.model_type}) cannot be used: trying it on a short text, to get its hidden states "
                f"and its logits, fails ({reason(error)})"
            ) from error
        if not torch.isfinite(logits).all():
            raise PotstillError(
                f"{who} ({model.config.model_type}, {str(model.dtype).removeprefix('torch.')}) gives logits that are not "
                "finite: its weights are broken, or too large for this dtype"
            )
        if not _close(ours, logits.flatten(0, 1).float()):
            raise PotstillError(
                f"{who} ({model.config.model_type}) does something between its last hidden state and its logits that potstill "
                "does not know; its loss would be wrong"
            )
        if _takes_block_masks(model, single, packed):
            language_model.masks = "blocks"
    model.train(training)
    return language_model


def _head_of(target: DenseTarget) -> dict[str, Any]:
    assert target.hidden is not None and target.weight is not None
    return {
        "weight": target.weight.to(target.hidden.dtype),
        "bias": target.bias,
        "softcap": target.softcap,
        "logit_scale": target.logit_scale,
    }


def _probe_batches(keys: Mapping[str, Any], device: torch.device) -> tuple[Batch, Batch]:
    """Two rows of one document each, and the same two documents packed in one row."""
    length = min(24, (keys.get("max_position_embeddings") or 48) // 2)
    ids = (torch.arange(2 * length, device=device) * 7 + 3) % keys["vocab_size"]
    place = torch.arange(length, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    rows = Rows(none, none, none)
    number = torch.tensor([1, 2], dtype=torch.int32, device=device).repeat_interleave(length)
    single = Batch(ids.view(2, length), place.repeat(2, 1), torch.ones(2, length, device=device), False, rows, 0, ())
    packed = Batch(ids.view(1, -1), place.repeat(2).view(1, -1), number.view(1, -1), True, rows, 0, ())
    return single, packed


def _takes_block_masks(model: PreTrainedModel, single: Batch, packed: Batch) -> bool:
    config = model.config.get_text_config()
    keys = config.to_dict()
    kinds = set(keys.get("layer_types") or ["full_attention"])
    known = {"full_attention", "sliding_attention"}
    if config._attn_implementation not in ("sdpa", "eager") or not kinds <= known:
        return False
    window = keys.get("sliding_window")
    if window is not None:  # one that these short documents feel
        config.sliding_window = 5
    try:
        own = hidden_states(model, single, "own")
        alone, together = hidden_states(model, single, "blocks"), hidden_states(model, packed, "blocks")
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
        return False  # a model whose forward takes no such mask; it is then used with one document a row
    finally:
        if window is not None:
            config.sliding_window = window
    return _close(alone, own) and _close(together.view_as(own), own)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-3 if theirs.dtype == torch.float32 and ours.dtype == torch.float32 else 5e-2
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3))
