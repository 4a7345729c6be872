"""Students and teachers from the keys of a recipe."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from potstill.config import DataConfig, StudentConfig, TeacherConfig
from potstill.extras import missing_extra
from potstill.models.adapters import adapter_base, with_adapter
from potstill.models.attention import VARLEN
from potstill.models.language_model import LanguageModel, backbone
from potstill.models.libraries import check_counts, loading, reason, refuse_damaged
from potstill.models.probe import probed
from potstill.models.tokenizer import ids_without_rows, load_tokenizer, optional_file
from potstill.shipped import locate
from potstill.types import PotstillError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def load_student(config: StudentConfig, device: torch.device, seed: int, key: str | None = None) -> LanguageModel:
    """`key`: what messages call the model's name where it is from no recipe."""
    name = config.model or config.from_
    who = f"the model {name}" if key else "the student"
    where = key or ("student.model" if config.model else "student.from")
    tokenizer = load_student_tokenizer(config, key)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(seed)
    if config.config is not None:
        model = _fresh(config.config, tokenizer, dtype, config.attn_implementation)
    else:
        assert name is not None
        model = _pretrained(name, where, config, dtype=dtype)
    if config.layers is not None:
        keep_layers(model, config.layers)
    idle = ids_without_rows(model, tokenizer, who, "" if key else " (student.tokenizer)")
    language_model = probed(model.to(device), tokenizer, who, config.attn_implementation)
    return replace(
        language_model,
        notes=[*language_model.notes, *idle, *_other_parts(model)],
        processor=_processor(model, name, config.revision),
    )


def hollow_student(config: StudentConfig, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype) -> PreTrainedModel:
    """A student's model without its weights, which another rank has."""
    name = config.model or config.from_
    with torch.device("meta"):
        if config.config is not None:
            model = _fresh(config.config, tokenizer, dtype, config.attn_implementation)
        else:
            assert name is not None
            model = _hollow(name, "student.model" if config.model else "student.from", config, dtype)
    if config.layers is not None:
        keep_layers(model, config.layers)
    return model


def load_student_tokenizer(config: StudentConfig, key: str | None = None) -> PreTrainedTokenizerFast:
    name = config.model or config.from_
    if config.tokenizer is None or config.tokenizer == name:
        assert name is not None
        where = key or ("student.model" if config.model else "student.from")
        return load_tokenizer(name, where, config.revision, config.trust_remote_code)
    # Of another repository, where the model's revision means nothing.
    return load_tokenizer(config.tokenizer, "student.tokenizer", None, config.trust_remote_code)


def load_teacher(
    config: TeacherConfig, device: torch.device, where: str, key: str | None = None, *, on_host: bool = False
) -> LanguageModel:
    """`where`: the teacher's place in the recipe; `key`: what messages call its name where it is from no recipe. `on_host`: in
    the host's memory, as it is to be on the device."""
    assert config.model is not None
    key = key or f"{where}.model"
    options: dict[str, Any] = {"dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)}
    if config.dtype == "auto" and device.type == "cpu":
        options["dtype"] = torch.float32
    if config.quantize is not None:
        options["quantization_config"] = _quantization(config.quantize, device, where)
        options["device_map"] = {"": device}
    model = _pretrained(config.model, key, config, **options)
    if config.quantize is None and not on_host:
        model.to(device)
    model.eval().requires_grad_(False)
    tokenizer = load_tokenizer(config.model, key, config.revision, config.trust_remote_code)
    who = f"the teacher {config.model}"
    idle = ids_without_rows(model, tokenizer, who, "")
    language_model = probed(model, tokenizer, who, config.attn_implementation)
    return replace(language_model, notes=[*language_model.notes, *idle])


def load_hollow(
    config: TeacherConfig, dtype: torch.dtype, where: str, key: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A teacher's model without its weights, which are elsewhere, and its tokenizer."""
    assert config.model is not None
    name, key = config.model, key or f"{where}.model"
    if adapter_base(name, config.revision) is not None:
        raise PotstillError(
            f"{key}: {name} is an adapter, and is spread over ranks as a whole model only: merge it first"
        )
    model = _hollow(name, key, config, dtype)
    return model.eval().requires_grad_(False), load_tokenizer(name, key, config.revision, config.trust_remote_code)


def _hollow(name: str, key: str, config: StudentConfig | TeacherConfig, dtype: torch.dtype) -> PreTrainedModel:
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    with loading(name, key, "model"), torch.device("meta"):
        known = AutoConfig.from_pretrained(locate(name), **origin)
        options = {"trust_remote_code": config.trust_remote_code, **_load_options(dtype, config.attn_implementation)}
        model: PreTrainedModel = _loader(known, known.architectures or []).from_config(known, **options)
    return model


def _load_options(dtype: torch.dtype | str, attn: str | None) -> dict[str, Any]:
    """In what a model computes, and by what. The product over all experts at once knows no float64."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return {"dtype": dtype, **experts, **({"attn_implementation": attn} if attn and attn != VARLEN else {})}


def _sees(model: PreTrainedModel) -> bool:
    kind = type(model.config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and isinstance(
        model, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    )


def _processor(model: PreTrainedModel, name: str | None, revision: str | None) -> dict[str, str]:
    if name is None or not _sees(model):
        return {}
    found = {file: optional_file(name, file, revision) for file in PROCESSOR_FILES}
    return {file: Path(path).read_text(encoding="utf-8") for file, path in found.items() if path is not None}


def _other_parts(model: PreTrainedModel) -> list[str]:
    if not _sees(model):
        return []
    return [
        f"the student ({type(model).__name__}) also sees: its language model learns, its other parts are saved as they are; "
        "AutoModelForImageTextToText loads the whole again"
    ]


def _pretrained(name: str, where: str, config: StudentConfig | TeacherConfig, **options: Any) -> PreTrainedModel:
    refuse_damaged(name, where)
    with loading(name, where, "model"):
        base = adapter_base(name, config.revision)
    if base is not None:  # an adapter alone; whose code runs is the recipe's to say, not that of a file in there
        if adapter_base(*base) is not None:
            raise PotstillError(
                f"{where}: {name} is an adapter of {base[0]}, which is an adapter itself: merge that first"
            )
        plain = config.model_copy(update={"revision": base[1], "trust_remote_code": False})
        model = _pretrained(base[0], where, plain, **options)
        with loading(name, where, "adapter"):
            return with_adapter(model, locate(name), where, config.revision)
    options |= _load_options(options["dtype"], config.attn_implementation)
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    with loading(name, where, "model"):
        known = AutoConfig.from_pretrained(locate(name), **origin)
        check_counts(known, name, where)
        model, found = _loader(known, known.architectures or []).from_pretrained(
            locate(name),
            **origin,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    # transformers would fill these with random numbers and go on.
    absent = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise PotstillError(f"{where}: the weights in {name} lack {absent[0]}{more}, or hold them in another shape")
    return model


def _loader(config: PreTrainedConfig, saved_as: Sequence[str]) -> Any:
    """The class that loads a model: for one that also sees, the whole of it, so that what is saved has all of its parts. Some
    of these can be loaded as their language model alone; that is done where they were saved so."""
    kind = type(config)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    alone = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__ if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None
    return AutoModelForCausalLM if alone in saved_as else AutoModelForImageTextToText


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
    filled = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    filled["vocab_size"] = len(tokenizer)
    try:
        # A language model alone where there is one, unless eyes are asked for too.
        alone = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")] if "vision_config" not in keys else []
        if "text_config" in known:
            keys["text_config"] = {**filled, **keys.get("text_config", {})}
        else:
            keys = {**filled, **keys}
        config = AutoConfig.for_model(kind, **keys)
        return _loader(config, alone).from_config(config, **_load_options(dtype, attn))
    except Exception as error:  # the values reach the code of each architecture, which may raise anything
        raise PotstillError(f"student.config: transformers makes no {kind} model of it ({reason(error)})") from error


def check_layers(model: PreTrainedModel, layers: list[int]) -> int:
    """Gives how many there are."""
    depth: int = model.config.get_text_config().num_hidden_layers
    wrong = [i for i in layers if i >= depth]
    if wrong:
        raise PotstillError(f"student.layers: {wrong} are not layers of a model with {depth} (0 to {depth - 1})")
    return depth


def keep_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Keep only the chosen layers of a model, in the order given."""
    config = model.config.get_text_config()
    depth = check_layers(model, layers)
    stacks = [(n, m) for n, m in backbone(model).named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        raise PotstillError(f"student.from: cannot tell which part of a {model.config.model_type} model its layers are")
    name, stack = stacks[0]
    kept = nn.ModuleList([stack[i] for i in layers])
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = index
    parent, _, attribute = name.rpartition(".")
    setattr(backbone(model).get_submodule(parent), attribute, kept)
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, list) and len(value) == depth:  # layer_types and the like
            setattr(config, key, [value[i] for i in layers])
    config.num_hidden_layers = len(layers)
    _check_config_builds(model, layers)


def _check_config_builds(model: PreTrainedModel, layers: list[int]) -> None:
    """Refuse a choice of layers that the config cannot describe: saved, it would be loaded as another architecture."""
    try:
        with torch.device("meta"):
            built = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # the code of each architecture, which may raise anything
        raise PotstillError(
            f"student.layers: transformers makes no {model.config.model_type} model of layers {layers} ({reason(error)})"
        ) from error
    ours, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (model, built))
    differing = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if differing:
        raise PotstillError(
            f"student.layers: a {model.config.model_type} config cannot describe a model of layers {layers}; saved, it would "
            f"be loaded with another {differing[0]}: keep layers of its kinds in the places where the whole model has them"
        )


def _quantization(kind: str, device: torch.device, where: str) -> Any:
    """4 bits as nf4 with products in bfloat16: the library's own defaults, fp4 and float32, are less exact and slower."""
    if kind == "fp8":
        return _fp8(device, where)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise missing_extra(f"{where}.quantize", "quant") from None
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _fp8(device: torch.device, where: str) -> Any:
    """transformers would fall back to bfloat16 on a GPU that cannot, and say so in a log."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not able:
        raise PotstillError(
            f"{where}.quantize: fp8 needs a CUDA GPU of compute capability 8.9 or later, and this is {device}: choose 8bit or "
            "4bit, or leave it out"
        )
    from transformers import FineGrainedFP8Config

    return FineGrainedFP8Config()


def check_fit(data: DataConfig, key: str, who: str, language_model: LanguageModel) -> None:
    """Refuse data that a model cannot read: sequences beyond its positions, packing it would see through."""
    limit = language_model.positions
    if limit is not None and data.max_length > limit:
        raise PotstillError(
            f"{key}.max_length is {data.max_length} and {who} has {limit} positions: set {key}.max_length to {limit} or less"
        )
    if not data.packing:
        return
    short = language_model.short_positions
    if short is not None and data.max_length > short:
        raise PotstillError(
            f"{key}.packing: {who} reads all documents of a row in another way when one is longer than {short} tokens "
            f"(longrope): set {key}.packing to false, or {key}.max_length to {short} or less"
        )
    if language_model.attention == "own":
        config = language_model.model.config
        kind = config.get_text_config()._attn_implementation
        other = "" if kind in ("sdpa", "eager") else ", or attn_implementation to sdpa where the model has it"
        raise PotstillError(
            f"{key}.packing: {who} ({config.model_type}, {kind} attention) cannot keep packed documents apart: set "
            f"{key}.packing to false{other}"
        )
