"""Causal language models as potstill uses them: hidden states from the backbone, the output head kept apart.

What a model does between its last hidden state and its logits, and whether it keeps packed documents apart, is probed
when it is loaded, not believed: a model that does something else is refused, not trained wrongly.
B rows, L positions, N loss rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from potstill.config import DataConfig, StudentConfig, TeacherConfig
from potstill.losses.rows import head_logits
from potstill.shipped import locate
from potstill.types import Batch, DenseTarget, PotstillError, Rows

# Config keys that change logits after the head's product: key → (field of the head, value from the key's value).
HEAD_KEYS = {
    "final_logit_softcapping": ("softcap", float),  # Gemma 2 and 3
    "logits_scaling": ("logit_scale", lambda x: 1.0 / x),  # Granite, MiniCPM
    "logit_scale": ("logit_scale", float),  # Cohere
    "lm_head_multiplier": ("logit_scale", float),  # Falcon-H1
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notes that libraries print while they load and save; potstill shows its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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
        config = self.model.config
        return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def hidden_states(model: PreTrainedModel, batch: Batch, masks: str) -> Tensor:
    """Last hidden states [B, L, H]; the head is not applied."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if masks == "blocks":
        inputs["position_ids"] = batch.position_ids
        inputs["attention_mask"] = block_masks(model.config, batch.document, next(model.parameters()).dtype)
    return model.base_model(**inputs, use_cache=False).last_hidden_state


def block_masks(config: Any, document_BL: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Causal attention inside each document, made on the device without reading from it. Models that mix kinds of layers
    take one mask a kind. Right padding is document 0: it attends to itself, and nothing attends to it."""
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


def load_student(config: StudentConfig, device: torch.device, seed: int) -> LanguageModel:
    name = config.model or config.from_
    where = "student.model" if config.model else "student.from"
    tokenizer_where = "student.tokenizer" if config.tokenizer else where
    tokenizer = load_tokenizer(config.tokenizer or name or "", tokenizer_where, config.revision)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(seed)
    if config.config is not None:
        model = _fresh(config.config, tokenizer, dtype, config.attn_implementation)
    else:
        assert name is not None
        model = _pretrained(name, where, config, dtype=dtype)
    if config.layers is not None:
        keep_layers(model, config.layers)
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise PotstillError(
            f"the student has {model.get_input_embeddings().num_embeddings} embeddings and its tokenizer {len(tokenizer)} "
            "ids: give it the tokenizer it was trained with (student.tokenizer)"
        )
    return _probed(model.to(device), tokenizer, "the student")


def load_teacher(config: TeacherConfig, device: torch.device, where: str) -> LanguageModel:
    options: dict[str, Any] = {"dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)}
    if config.dtype == "auto" and device.type == "cpu":
        options["dtype"] = torch.float32
    if config.quantize is not None:
        options["quantization_config"] = _quantization(config.quantize, where)
        options["device_map"] = {"": device}
    model = _pretrained(config.model, f"{where}.model", config, **options)
    if config.quantize is None:
        model.to(device)
    model.eval().requires_grad_(False)
    tokenizer = load_tokenizer(config.model, f"{where}.model", config.revision)
    return _probed(model, tokenizer, f"the teacher {config.model}")


def load_tokenizer(name: str, where: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(name), revision=revision)
    except (OSError, ValueError) as error:
        raise _cannot_load(name, where, "tokenizer", error) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PotstillError(f"{where}: {name} has no fast tokenizer (tokenizer.json), which potstill needs")
    return tokenizer


def _pretrained(name: str, where: str, config: StudentConfig | TeacherConfig, **options: Any) -> PreTrainedModel:
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                locate(name),
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise _cannot_load(name, where, "model", error) from error
    # transformers would fill these with random numbers and go on.
    absent = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise PotstillError(f"{where}: the weights in {name} lack {absent[0]}{more}, or hold them in another shape")
    return model


def _cannot_load(name: str, where: str, what: str, error: Exception) -> PotstillError:
    if Path(locate(name)).exists():
        return PotstillError(f"{where}: cannot load the {what} in {name} ({_reason(error)})")
    if name.startswith((".", "/", "~")):
        return PotstillError(f"{where}: cannot load {name}: there is no such folder")
    return PotstillError(
        f"{where}: cannot load {name}: no such folder here, and the hub gave no {what} ({_reason(error)})"
    )


def _fresh(
    keys: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype, attn: str | None
) -> PreTrainedModel:
    keys = dict(keys)
    kind = keys.pop("model_type")
    try:
        known = AutoConfig.for_model(kind).to_dict()
    except ValueError:
        raise PotstillError(f"student.config.model_type: transformers has no model type {kind!r}") from None
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PotstillError(f"student.config.{key}: a {kind} config has no such key{hint}")
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    options = {"attn_implementation": attn} if attn else {}
    try:
        config = AutoConfig.for_model(kind, **{"vocab_size": len(tokenizer), **ids, **keys})
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except Exception as error:  # the values reach the code of each architecture, which may raise anything
        raise PotstillError(f"student.config: transformers makes no {kind} model of it ({_reason(error)})") from error


def keep_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Keep only the chosen layers of a model, in the order given."""
    depth = model.config.num_hidden_layers
    wrong = [i for i in layers if i >= depth]
    if wrong:
        raise PotstillError(f"student.layers: {wrong} are not layers of a model with {depth} (0 to {depth - 1})")
    stacks = [(n, m) for n, m in model.base_model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        raise PotstillError(f"student.from: cannot tell which part of a {model.config.model_type} model its layers are")
    name, stack = stacks[0]
    kept = nn.ModuleList([stack[i] for i in layers])
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = index
    parent, _, attribute = name.rpartition(".")
    setattr(model.base_model.get_submodule(parent), attribute, kept)
    for key, value in model.config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # layer_types and the like
            setattr(model.config, key, [value[i] for i in layers])
    model.config.num_hidden_layers = len(layers)


def _quantization(bits: str, where: str) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise PotstillError(f"{where}.quantize needs bitsandbytes: pip install 'potstill[quant]'") from None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=bits == "8bit", load_in_4bit=bits == "4bit")


def _probed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, who: str) -> LanguageModel:
    """Find out how the model takes masks, and check that head(hidden) is what it calls its logits."""
    keys = model.config.to_dict()
    head = {field: make(keys[key]) for key, (field, make) in HEAD_KEYS.items() if keys.get(key) is not None}
    language_model = LanguageModel(model, tokenizer, head, "own")
    training = model.training
    model.eval()
    with torch.no_grad():
        single, packed = _probe_batches(keys, model.device)
        own = hidden_states(model, single, "own")
        logits = model(input_ids=single.input_ids, use_cache=False).logits
        ours = head_logits(own.flatten(0, 1), **_head_of(language_model.at_rows(own.flatten(0, 1))))
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
        if _takes_block_masks(model, keys, single, packed):
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


def _takes_block_masks(model: PreTrainedModel, keys: Mapping[str, Any], single: Batch, packed: Batch) -> bool:
    kinds = set(keys.get("layer_types") or ["full_attention"])
    known = {"full_attention", "sliding_attention"}
    if model.config._attn_implementation not in ("sdpa", "eager") or not kinds <= known:
        return False
    window = keys.get("sliding_window")
    if window is not None:  # one that these short documents feel
        model.config.sliding_window = 5
    try:
        own = hidden_states(model, single, "own")
        alone, together = hidden_states(model, single, "blocks"), hidden_states(model, packed, "blocks")
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
        return False  # a model whose forward takes no such mask; it is then used with one document a row
    finally:
        if window is not None:
            model.config.sliding_window = window
    return _close(alone, own) and _close(together.view_as(own), own)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-3 if theirs.dtype == torch.float32 and ours.dtype == torch.float32 else 5e-2
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3))


def check_fit(data: DataConfig, key: str, who: str, language_model: LanguageModel) -> None:
    """Refuse data that a model cannot read: sequences beyond its positions, packing it would see through."""
    limit = language_model.positions
    if limit is not None and data.max_length > limit:
        raise PotstillError(
            f"{key}.max_length is {data.max_length} and {who} has {limit} positions: set {key}.max_length to {limit} or less"
        )
    if data.packing and language_model.masks == "own":
        raise PotstillError(
            f"{key}.packing: {who} ({language_model.model.config.model_type}, "
            f"{language_model.model.config._attn_implementation} attention) cannot keep packed documents apart: set "
            f"{key}.packing to false, or attn_implementation to sdpa where the model has it"
        )


def shared_ids(student: LanguageModel, teacher: LanguageModel, where: str) -> int:
    """How many ids both tokenizers give the same meaning; an error when they are not the same tokenizer.

    Compared by content: the same text must give the same ids, and each id must stand for the same token. Extra ids at the
    end of either (added tokens, padding of the matrices) are left out of the divergence."""
    ours, theirs = _content(student.tokenizer), _content(teacher.tokenizer)
    mine, other = student.tokenizer.convert_ids_to_tokens, teacher.tokenizer.convert_ids_to_tokens
    width = min(len(student.tokenizer), len(teacher.tokenizer))
    for index, (a, b) in enumerate(zip(mine(range(width)), other(range(width)), strict=True)):
        if a != b:
            raise PotstillError(
                f"{where}: the teacher's tokenizer is not the student's: id {index} is {b!r} there and {a!r} here "
                "(potstill trains from a teacher with the student's tokenizer only, so far)"
            )
    differing = [part for part in ours if ours[part] != theirs[part]]
    if differing:
        raise PotstillError(
            f"{where}: the teacher's tokenizer has the student's tokens but cuts text differently ({', '.join(differing)})"
        )
    for who, language_model in (("student", student), ("teacher", teacher)):
        rows = language_model.model.get_output_embeddings().weight.shape[0]
        if rows < width:
            raise PotstillError(f"{where}: the {who}'s head has {rows} rows for {width} shared ids")
    return width


def _content(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides how a text is cut: normaliser, pre-tokenizer and the model with its merges."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}


def _reason(error: Exception) -> str:
    """The first line of what a library says, with the next one where it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
