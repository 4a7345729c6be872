"""Rewards of answers, by a function of the user's own, and what they are worth among the answers to one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from potstill.config.registry import load
from potstill.rollouts.prompts import Prompt
from potstill.types import PotstillError

Reward = Callable[[str, str, Mapping[str, Any]], float]  # prompt, completion, record
KEY = "rollouts.reward"
SMALLEST_SPREAD = 1e-6  # of the rewards of a group: alike but for rounding, they say nothing


def open_reward(place: str) -> Reward:
    """The function of "module:function"."""
    try:
        found = load(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise PotstillError(
            f"{KEY}: cannot load {place} ({error}): write module:function, of a module that is installed or on PYTHONPATH"
        ) from error
    if not callable(found):
        raise PotstillError(
            f"{KEY}: {place} is a {type(found).__name__}, not a function of prompt, completion and record"
        )
    reward: Reward = found
    return reward


def reward_of(reward: Reward, prompt: Prompt, completion: str) -> float:
    """Of an answer. The record is what the recipe reads of it: `data.columns`, and the messages that are answered."""
    messages = {} if prompt.messages is None else {"messages": prompt.messages}
    where = prompt.example.source
    try:
        value = float(reward(prompt.text, completion, {**prompt.example.columns, **messages}))
    except Exception as error:  # the user's own code may raise anything
        raise PotstillError(f"{KEY}: it failed for {where}: {type(error).__name__}: {error}") from error
    if not math.isfinite(value):
        raise PotstillError(f"{KEY}: it gave {value} for {where}: it must give a finite number")
    return value


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r − mean) / standard deviation within the answers to one prompt (GRPO); 0 where all are alike."""
    values = np.array(rewards, dtype=np.float64)
    spread = float(values.std())
    return [0.0] * len(values) if spread < SMALLEST_SPREAD else ((values - values.mean()) / spread).tolist()
