"""Values of other systems' keys as values of ours, by the name that stands after the | in the tables of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Keys = dict[str, Any]  # dotted keys of a recipe, with what they become
SHAPES = {"cosine", "linear", "constant", "wsd"}
KL = {
    "forward": "forward_kl", "fkl": "forward_kl", "kl": "forward_kl", "forward_kl": "forward_kl",
    "reverse": "reverse_kl", "rkl": "reverse_kl", "reverse_kl": "reverse_kl",
    "mixed": "jsd", "jsd": "jsd", "js": "jsd", "tvd": "tvd", "sfkl": "skew_kl", "srkl": "skew_reverse_kl",
}  # fmt: skip


def _shape(key: str, value: Any) -> Keys:
    name = str(value).lower()
    found = next((shape for shape in sorted(SHAPES) if shape in name), None)
    if found is None and ("warmup_stable_decay" in name or "wsd" in name):
        found = "wsd"
    return {} if found is None else {key: found}


def _optimizer(key: str, value: Any) -> Keys:
    return {key: "muon" if "muon" in str(value).lower() else "adamw"} if _known_optimizer(value) else {}


def _known_optimizer(value: Any) -> bool:
    return any(name in str(value).lower() for name in ("muon", "adam"))


def _jsd(key: str, value: Any) -> Keys:
    if value in (0, 1):
        return {"loss.divergence": "reverse_kl" if value else "forward_kl"}
    return {"loss.divergence": "jsd", key: value}


def _ratio(key: str, value: Any) -> Keys:
    return {key: value, "loss.ce_weight": round(1 - value, 9)}


def _both(key: str, value: Any) -> Keys:
    return {key: value, "loss.temperature": value} if value else {key: value}


def _whole(key: str, value: Any) -> Keys:
    """Of epochs there are whole ones here."""
    return {key: max(1, round(value))} if value and value > 0 else {}


def _precision(key: str, value: Any) -> Keys:
    name = str(value).lower()
    return {key: "bf16" if name in ("bfloat16", "bf16") else "fp32"} if name in PRECISIONS else {}


PRECISIONS = ("bfloat16", "bf16", "float32", "fp32", "32", "32-true")


def _dtype(key: str, value: Any) -> Keys:
    name = str(value).rpartition(".")[2]
    return {key: name} if name in ("float32", "bfloat16") else {}


def _divergence(key: str, value: Any) -> Keys:
    name = KL.get(str(value).lower())
    return {} if name is None else {key: name}


def _if_true(found: Any) -> Callable[[str, Any], Keys]:
    return lambda key, value: {key: found} if value else {}


# What a value becomes: keys of a recipe, none where it has no counterpart
CONVERSIONS: Mapping[str, Callable[[str, Any], Keys]] = {
    "accumulate": lambda key, value: {f"{key} ×": value},  # × micro_batch_size, once that is known
    "bf16": _if_true("bf16"),
    "both": _both,
    "dtype": _dtype,
    "flash": _if_true("flash_attention_2"),
    "hybrid": _if_true("common_vocab"),
    "jsd": _jsd,
    "kl_type": _divergence,
    "minutes": lambda key, value: {key: 60 * value},
    "no_dropout": _if_true(0.0),
    "offload": _if_true("offload"),
    "one_less": lambda key, value: {key: round(1 - value, 9)},
    "optimizer": _optimizer,
    "positive": lambda key, value: {key: value} if value > 0 else {},
    "precision": _precision,
    "ratio": _ratio,
    "reverse": lambda key, value: {key: "reverse_kl" if value else "forward_kl"},
    "shape": _shape,
    "share": lambda key, value: {key: float(value)} if value else {},
    "thinking": lambda key, value: {key: {"enable_thinking": bool(value)}},
    "uld": _if_true("uld"),
    "vllm": _if_true("vllm"),
    "whole": _whole,
}
