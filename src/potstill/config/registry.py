"""What a recipe can name and anyone can add with one file and one line: the name, and where its code is. docs/extending.md adds
one of each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

Table = dict[str, str]  # the name in a recipe → "module:object"

# A function (Block, LossParams) → value per row and factor of the gradient
DIVERGENCES: Table = {
    "forward_kl": "potstill.losses.divergences:forward_kl",
    "reverse_kl": "potstill.losses.divergences:reverse_kl",
    "jsd": "potstill.losses.divergences:jsd",
    "skew_kl": "potstill.losses.divergences:skew_kl",
    "skew_reverse_kl": "potstill.losses.divergences:skew_reverse_kl",
    "tvd": "potstill.losses.divergences:tvd",
}
# A subclass of SignalKind
CACHE_KINDS: Table = {
    "top_k": "potstill.signals.kinds:TopK",
    "sampled": "potstill.signals.kinds:Sampled",
    "hidden": "potstill.signals.kinds:Hidden",
    "token_logprobs": "potstill.signals.kinds:TokenLogprobs",
}
# A function Opening → Opened
TEACHER_SOURCES: Table = {
    "model": "potstill.teachers.open:open_model",
    "server": "potstill.teachers.open:open_served",
    "cache": "potstill.teachers.open:open_cached",
    "student": "potstill.teachers.own:open_own",
}
# A function EngineSetup → Engine
ROLLOUT_ENGINES: Table = {
    "transformers": "potstill.rollouts.transformers:open_engine",
    "vllm": "potstill.rollouts.vllm:open_engine",
}

if TYPE_CHECKING:
    DivergenceName = str
    CacheKind = str
    EngineName = str
else:
    DivergenceName = Literal[(*DIVERGENCES, "policy_gradient_kl")]
    CacheKind = Literal[tuple(CACHE_KINDS)]
    EngineName = Literal[tuple(ROLLOUT_ENGINES)]


def load(place: str) -> Any:
    """The object of a table's "module:object"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
