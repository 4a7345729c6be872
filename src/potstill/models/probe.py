"""What a model does between its last hidden state and its logits, and whether it keeps packed documents apart, is probed
when it is loaded, not believed: a model that does something else is refused, not trained wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from potstill.models.attention import PLAIN, candidates, caps_scores, choose
from potstill.models.language_model import LanguageModel, backbone, evaluating, hidden_states
from potstill.models.libraries import reason
from potstill.types import Batch, PotstillError, Rows

# Config keys that change logits before or after the head's product: key → (field of the head, value from the key's value).
HEAD_KEYS = {
    "final_logit_softcapping": ("softcap", float),  # Gemma 2 and 3
    "logits_soft_cap": ("softcap", float),  # RecurrentGemma
    "output_logit_soft_cap": ("softcap", float),  # xLSTM
    "logits_scaling": ("logit_scale", lambda x: 1.0 / x),  # Granite, MiniCPM
    "logits_mup_width_multiplier": ("logit_scale", lambda x: 1.0 / x),  # Inkling
    "logit_scale": ("logit_scale", float),  # Cohere
    "lm_head_multiplier": ("logit_scale", float),  # Falcon-H1
}
RAMP = 60.0  # what the head's product is replaced with goes from minus to plus this: soft caps are felt


def probed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, who: str, attention: str | None = None
) -> LanguageModel:
    """Find out which way of attention keeps documents apart, and check that head(hidden) is what the model calls its logits.
    `attention`: the way that was asked for; None: the first that does."""
    config = model.config.get_text_config()
    if attention is None and caps_scores(model) and config._attn_implementation == "sdpa":
        backbone(model).set_attn_implementation("eager")
    with torch.no_grad(), evaluating(model):
        try:
            single, packed = _probe_batches(config.to_dict(), model.device)
            seen = _look(model, single)
        except Exception as error:  # the code of each architecture, which may raise anything
            raise PotstillError(
                f"{who} ({model.config.model_type}) cannot be used: trying it on a short text, to get its hidden states "
                f"and its logits, fails ({reason(error)})"
            ) from error
        if not torch.isfinite(seen.logits).all():
            raise PotstillError(
                f"{who} ({model.config.model_type}, {str(model.dtype).removeprefix('torch.')}) gives logits that are not "
                "finite: its weights are broken, or too large for this dtype"
            )
        rows = seen.logits.shape[-1]
        language_model = LanguageModel(model, tokenizer, {}, "own", rows if rows < seen.head_rows else None)
        language_model.head = _head(language_model, seen, who)
        language_model.attention, language_model.notes = _way(model, single, packed, who, attention)
    return language_model


@dataclass(frozen=True)
class _Seen:
    """A forward pass from the outside. R rows, V ids."""

    hidden: Tensor  # [R, H]; of the backbone
    entered: Tensor | None  # [R, H]; what the head was given. None: the model does not call it
    logits: Tensor  # [R, V]; of the whole
    passed: Tensor | None  # [R, V]; … with `ramp` for the head's product
    ramp: Tensor  # float32 [V]
    head_rows: int


def _look(model: PreTrainedModel, batch: Batch) -> _Seen:
    head = model.get_output_embeddings()
    entered: list[Tensor] = []
    ramp = torch.linspace(-RAMP, RAMP, head.weight.shape[0], device=batch.input_ids.device)
    hidden = hidden_states(model, batch, "own")
    watch = head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    try:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    finally:
        watch.remove()
    swap = head.register_forward_hook(lambda _, inputs, output: ramp.expand(output.shape).clone())
    try:  # in float32 also where the model is not, so that what it does to logits shows exactly
        passed = model(input_ids=batch.input_ids, use_cache=False).logits if entered else None
    finally:
        swap.remove()
    return _Seen(
        hidden.flatten(0, -2),
        entered[-1].flatten(0, -2) if entered else None,
        logits.flatten(0, -2),
        None if passed is None else passed.flatten(0, -2),
        ramp[: logits.shape[-1]],
        head.weight.shape[0],
    )


def _head(language_model: LanguageModel, seen: _Seen, who: str) -> dict[str, Any]:
    """What the head does beside its product, read from the config and checked; some configs have keys that do nothing."""
    config = language_model.model.config.get_text_config()
    found = {
        field: make(value)
        for key, (field, make) in HEAD_KEYS.items()
        if hasattr(config, key) and isinstance(value := getattr(config, key), int | float)
    }
    for head in (found, {}):
        plain = language_model.output_head()
        ours = replace(plain, **head).logits(seen.hidden)
        if _is_head(seen, plain.bias is not None, **head) and _close(ours, seen.logits, language_model.model.dtype):
            return head
    raise PotstillError(
        f"{who} ({language_model.model.config.model_type}) does something between its last hidden state and its logits that "
        "potstill does not know; its loss would be wrong"
    )


def _is_head(seen: _Seen, biased: bool, softcap: float | None = None, logit_scale: float = 1.0) -> bool:
    """Whether what goes into the head and what comes out behind it is as it should be, apart from the product itself. The scale
    may be applied on either side of the product; with a bias, behind it."""
    if seen.entered is None or seen.passed is None:
        return True
    for before in {1.0} if biased else {1.0, logit_scale}:
        expected = seen.ramp * (logit_scale / before)
        if softcap is not None:
            expected = (expected / softcap).tanh() * softcap
        if _close(seen.hidden.float() * before, seen.entered) and _close(expected.expand_as(seen.passed), seen.passed):
            return True
    return False


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


def _way(model: PreTrainedModel, single: Batch, packed: Batch, who: str, asked: str | None) -> tuple[str, list[str]]:
    """The first way of attention by which documents are the same packed as alone; a word where it is not the best."""
    text, config = backbone(model), model.config.get_text_config()
    keys, before = config.to_dict(), config._attn_implementation
    kinds = set(keys.get("layer_types") or keys.get("layers_block_type") or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return "own", []
    plain = before if before in PLAIN else "eager"
    failed: list[str] = []
    with _short_windows(text, config):
        choose(text, "own", plain)
        own = hidden_states(model, single, "own")
        for way in candidates(model, model.device, asked):
            try:
                choose(text, way, plain)
                why = "" if _keeps_apart(model, single, packed, way, own) else "documents of a row see each other"
            except Exception as error:  # the code of each architecture, which may raise anything
                why = reason(error)
            if not why:
                return way, _fallen_back(f"{who} ({config.model_type})", way, failed)
            failed.append(f"by {way} ({why})")
    if config._attn_implementation != before:
        text.set_attn_implementation(before)
    return "own", []


def _fallen_back(who: str, way: str, failed: Sequence[str]) -> list[str]:
    if not failed:
        return []
    cost = ": the masks of packed rows take memory with the square of their length" if way == "dense" else ""
    return [f"{who} is read by {way} attention, for it cannot be {' or '.join(failed)}{cost}"]


@contextmanager
def _short_windows(text: PreTrainedModel, config: Any) -> Iterator[None]:
    """Windows that the short documents of a probe feel, where it has windows; modules may have noted them too."""
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    places = [config, *(module for module in text.modules() if "sliding_window" in vars(module))]
    places = [place for place in places if window is not None and place.sliding_window == window]
    try:
        for place in places:
            place.sliding_window = 5
        yield
    finally:
        for place in places:
            place.sliding_window = window


def _keeps_apart(model: PreTrainedModel, single: Batch, packed: Batch, way: str, own: Tensor) -> bool:
    alone, together = hidden_states(model, single, way), hidden_states(model, packed, way)
    vocabulary = model.config.get_text_config().vocab_size
    beside = [hidden_states(model, _with_another_first(batch, vocabulary), way) for batch in (single, packed)]
    # Rows of a batch do not see each other; experts still round differently when others share them.
    rounding = _moved(alone[1], beside[0][1])
    leak = _moved(together.view_as(own)[1], beside[1].view_as(own)[1])
    slack = 1e-5 if own.dtype == torch.float32 else 0.0
    return _close(alone, own) and _close(together.view_as(own), own) and leak <= max(slack, 10 * rounding)


def _with_another_first(batch: Batch, vocabulary: int) -> Batch:
    """The batch with other text in its first document, which is the first half of its ids."""
    ids = batch.input_ids.flatten().clone()
    half = len(ids) // 2
    ids[:half] = (ids[:half] + vocabulary // 2) % vocabulary
    return replace(batch, input_ids=ids.view_as(batch.input_ids))


def _moved(one: Tensor, other: Tensor) -> float:
    """How far hidden states [L, H] have moved where they moved most, as a share of their size."""
    return float(((one - other).abs().mean(-1) / one.abs().mean(-1).clamp(min=1e-6)).max())


def _close(ours: Tensor, theirs: Tensor, computed_in: torch.dtype = torch.float32) -> bool:
    """Within what the coarsest of the dtypes can tell."""
    exact = {ours.dtype, theirs.dtype, computed_in} == {torch.float32}
    distance = (ours.float() - theirs.float()).abs().max()
    return bool(distance <= (1e-3 if exact else 5e-2) * theirs.abs().max().clamp(min=1e-3))
