"""What each supervised token counts in the loss, by its place in its answer and by its record.

An answer is a run of supervised tokens: a completion, an assistant turn, a plain text. L tokens of an example.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.config.training import TokenWeightsConfig
from potstill.types import Example, PotstillError

Weights = npt.NDArray[np.float32]


def weigh(example: Example, sizes: npt.NDArray[Any], config: TokenWeightsConfig | None) -> Example:
    """The example with the weights of its tokens. Those of weight 0 are not supervised any more: nothing is computed for them.
    `sizes` [L]: bytes that each token stands for."""
    if config is None or not example.supervised.any():
        return example
    weights = token_weights(example, config)
    supervised = weights > 0
    return replace(
        example,
        supervised=supervised,
        supervised_bytes=min(example.supervised_bytes, int(np.asarray(sizes)[supervised].sum())),
        answers=example.supervised,
        weights=weights if (weights[supervised] != 1).any() else None,
    )


def token_weights(example: Example, config: TokenWeightsConfig) -> Weights:
    """[L]; 0 for what is not supervised."""
    supervised = example.supervised
    begins = supervised & ~np.concatenate([[False], supervised[:-1]])
    places = np.arange(len(supervised))
    place = places - np.maximum.accumulate(np.where(begins, places, 0))  # in its answer
    counts = supervised & (place >= config.skip)
    if config.window is not None:
        counts &= place < config.skip + config.window
    weights = counts.astype(np.float64)
    if config.decay != 1:
        weights *= config.decay ** np.maximum(place - config.skip, 0)
    if config.by_position:
        starts, steps = zip(*config.by_position, strict=True)
        weights *= np.array(steps)[np.searchsorted(starts, place, side="right") - 1]
    if config.column is not None:
        weights *= _of_record(example, config.column, np.cumsum(begins) - 1)
    return weights.astype(np.float32)


def _of_record(example: Example, column: str, answer: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | float:
    """What the record's column says: a number for all of it, or a list with one for each of its answers. `answer` [L]."""
    where = f"{example.source}: column {column} (loss.token_weights.column)"
    try:
        value = json.loads(example.columns[column])
    except ValueError:
        value = None
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(_is_weight(number) for number in numbers):
        raise PotstillError(
            f"{where} holds {example.columns[column][:40]!r}: give a number of at least 0, or a list of them, one for each "
            "answer"
        )
    if not isinstance(value, list):
        return float(value)
    last = int(answer[-1])
    # A text that was cut to data.max_length has lost its last answers; parts of a conversation do not say which they have.
    if len(numbers) <= last or example.split or example.writer is not None:
        raise PotstillError(
            f"{where} lists {len(numbers)} weights, and the text has {last + 1} answers of its own: give one for each, or a "
            "single number (also where answers are written, and for templates that rewrite earlier turns)"
        )
    return np.array(numbers, dtype=np.float64)[np.maximum(answer, 0)]


def _is_weight(number: Any) -> bool:
    return type(number) in (int, float) and 0 <= number < math.inf
