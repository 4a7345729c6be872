"""A student whose sequences are cut over processes equals the one of one process."""

import pytest
from ranks import on_ranks
from spread_students import QUICK_CONTEXT, everything, in_contexts
from test_tensor_parallel import wrong
from tiny_families import make_model

from potstill.parallel.context import _check
from potstill.types import PotstillError

PATIENCE = 400  # seconds


def test_loss_sums_and_gradients_equal_one_process():
    found = on_ranks(2, in_contexts, 2, 1, QUICK_CONTEXT, timeout=PATIENCE)
    assert found[0].keys() == set(QUICK_CONTEXT) and not wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_every_family_and_every_target_equals_one_process(cp, tp):
    names = [*everything(), *(["qwen3-moe", "mixtral"] if tp == 1 else [])]
    found = on_ranks(cp * tp, in_contexts, cp, tp, names, timeout=PATIENCE)
    assert not wrong(found)


def test_frequencies_that_depend_on_the_length_are_refused():
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(PotstillError, match="dynamic"):
        _check(make_model("llama", rope_parameters=scaled).model)
