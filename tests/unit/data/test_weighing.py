"""What each token counts: by hand, by its place in its answer and by its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import batch_of, example

from potstill.config import TokenWeightsConfig
from potstill.data import without
from potstill.data.weighing import token_weights, weigh
from potstill.types import Example, PotstillError

# Two answers, of 4 and of 3 tokens, after prompts of 2 tokens and of 1.
MASK = [0, 0, 1, 1, 1, 1, 0, 1, 1, 1]


def made(**columns: str) -> Example:
    return replace(example(range(10, 20), MASK), source="a.jsonl, line 1", columns=columns, supervised_bytes=70)


def weights(columns: dict[str, str] | None = None, **keys: Any) -> list[float]:
    found = token_weights(made(**(columns or {})), TokenWeightsConfig.model_validate(keys))
    return [round(float(x), 6) for x in found[2:6]] + [round(float(x), 6) for x in found[7:]]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"skip": 1}, [0, 1, 1, 1, 0, 1, 1]),
        ({"window": 2}, [1, 1, 0, 0, 1, 1, 0]),
        ({"skip": 1, "window": 1}, [0, 1, 0, 0, 0, 1, 0]),
        ({"decay": 0.5}, [1, 0.5, 0.25, 0.125, 1, 0.5, 0.25]),
        ({"skip": 1, "decay": 0.5}, [0, 1, 0.5, 0.25, 0, 1, 0.5]),
        ({"by_position": [[0, 1.0], [2, 0.25]]}, [1, 1, 0.25, 0.25, 1, 1, 0.25]),
        ({"by_position": [[0, 2.0], [1, 0.0], [3, 0.5]], "decay": 0.5}, [2, 0, 0, 0.0625, 2, 0, 0]),
        ({"skip": 9}, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_by_place(keys: dict[str, Any], expected: list[float]) -> None:
    assert weights(**keys) == expected


def test_by_record() -> None:
    assert weights({"w": "0.5"}, column="w") == [0.5] * 7
    assert weights({"w": "[0.5, 2]"}, column="w", skip=2) == [0, 0, 0.5, 0.5, 0, 0, 2]
    assert weights({"w": "[0.5, 2, 7]"}, column="w") == [0.5] * 4 + [2] * 3  # the third answer was cut off


@pytest.mark.parametrize("wrong", ["a lot", "-1", "[]", '[1, "x"]', "NaN", "true"])
def test_a_column_without_a_weight_is_refused(wrong: str) -> None:
    with pytest.raises(PotstillError, match=r"a.jsonl, line 1: column w \(loss.token_weights.column\) holds"):
        weights({"w": wrong}, column="w")


@pytest.mark.parametrize("change", [{"writer": "student"}, {"split": True}, {}])
def test_weights_of_answers_need_answers_that_are_the_records(change: dict[str, Any]) -> None:
    values = "[1, 2]" if change else "[1]"
    with pytest.raises(PotstillError, match="and the text has 2 answers of its own"):
        token_weights(replace(made(w=values), **change), TokenWeightsConfig(column="w"))


def test_what_counts_nothing_is_not_supervised() -> None:
    sizes = np.arange(10)
    found = weigh(made(), sizes, TokenWeightsConfig(skip=1, decay=0.5))
    assert found.supervised.tolist() == [False, False, False, True, True, True, False, False, True, True]
    assert found.supervised_bytes == 3 + 4 + 5 + 8 + 9
    assert found.answers is not None and found.answers.tolist() == [bool(x) for x in MASK]
    assert weigh(made(), sizes, TokenWeightsConfig(skip=1)).weights is None  # all that is left counts 1
    assert weigh(made(), sizes, None).answers is None
    plain = example(range(5))
    rows = batch_of([found, plain]).rows
    assert rows.weight is not None
    assert rows.weight.tolist() == [1, 0.5, 0.25, 1, 0.5, 1, 1, 1, 1]
    assert rows.labels.tolist() == [13, 14, 15, 18, 19, 1, 2, 3, 4]
    left = without(batch_of([found, plain]), [1]).rows
    assert left.weight is not None and left.weight.tolist() == [1, 0.5, 0.25, 1, 0.5]
    assert batch_of(plain).rows.weight is None


@pytest.mark.parametrize("positions", [[[1, 1.0]], [[0, 1.0], [0, 2.0]], [[0, 1.0], [5, 1.0], [3, 1.0]]])
def test_positions_go_up_from_0(positions: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="by_position begins at 0 and goes up"):
        TokenWeightsConfig.model_validate({"by_position": positions})
