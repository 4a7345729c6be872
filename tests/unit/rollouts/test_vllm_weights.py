"""Weights under the names of files, layer by layer, against all at once."""

from __future__ import annotations

import pytest
import torch
from tiny_families import FAMILIES, make_model
from transformers.core_model_loading import revert_weight_conversion

from potstill.rollouts.vllm_weights import named_weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_at_a_time_gives_the_names_and_values_of_the_whole(family: str) -> None:
    student = make_model(family)
    expected = revert_weight_conversion(student.model, student.model.state_dict())
    found = list(named_weights(student))
    assert len(found) == len(expected) and {name for name, _ in found} == expected.keys()
    for name, tensor in found:
        assert torch.equal(tensor, expected[name])
