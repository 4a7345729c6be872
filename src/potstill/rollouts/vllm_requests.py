"""What vLLM is asked and what it answers, in its process's words or over HTTP: the names are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from potstill.config.rollouts import SamplingConfig
from potstill.rollouts.engine import Completion
from potstill.signals.kinds import SLACK
from potstill.types import PotstillError

LEAST_TEMPERATURE = 0.01  # vLLM takes this for anything between it and 0 …
MOST_TEMPERATURE = 2.0  # … and refuses what is above this


def check_sampling(sampling: SamplingConfig) -> None:
    key = f"rollouts.sampling.temperature {sampling.temperature:g}"
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise PotstillError(
            f"{key}: vLLM would take {LEAST_TEMPERATURE:g} for it; give that, or 0 for the likeliest token"
        )
    if sampling.temperature > MOST_TEMPERATURE:
        raise PotstillError(
            f"{key}: vLLM takes at most {MOST_TEMPERATURE:g}; lower it, or use rollouts.engine.kind transformers"
        )


def request(sampling: SamplingConfig, stop_ids: Sequence[int], seed: int, most: int) -> dict[str, Any]:
    """Everything is said, so that no default of a model's or of a server's applies."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": most,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # of its config: ours are in stop_token_ids
        "skip_special_tokens": False,  # a stop string may be one
        "spaces_between_special_tokens": False,
        "seed": int(seed) & (2**63 - 1),  # what HTTP takes, and never −1, which would be none
        "logprobs": 0,  # of the token itself only
    }


def read_text(choice: Any, most: int, vocabulary: int = 2**31) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of what a server wrote. ValueError: what is wrong with them."""
    try:
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        aligned = isinstance(ids, list) and isinstance(logprobs, list) and len(ids) == len(logprobs)
    except (KeyError, TypeError):
        aligned = False
    if not aligned:
        raise ValueError("it gives no token ids with what it writes: is it a vLLM of 0.10.2 or later?")
    if len(ids) > most:
        raise ValueError(f"it wrote {len(ids)} tokens where {most} were asked for at most")
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < vocabulary]:
        raise ValueError(f"it wrote {str(wrong[0])[:40]!r}, which is none of the ids")
    if wrong := [x for x in logprobs if type(x) not in (int, float) or not -math.inf < x <= SLACK]:
        raise ValueError(f"it gives {str(wrong[0])[:40]!r} as a log-probability of what it wrote")
    return ids, logprobs


def completion(
    ids: Sequence[int], logprobs: Sequence[float], reason: str | None, sampling: SamplingConfig, stop_ids: Sequence[int]
) -> Completion:
    if reason not in ("stop", "length"):
        raise PotstillError(f"vLLM broke off a text ({reason}) instead of ending it")
    drawn = np.asarray(logprobs, np.float32)
    if sampling.temperature == 0:  # nothing else could have been drawn; vLLM tells of the softmax
        drawn = np.zeros_like(drawn)
    ended = len(ids) > 0 and ids[-1] in stop_ids
    return Completion(np.asarray(ids, np.int32), drawn, "eos" if ended else "stop" if reason == "stop" else "length")
