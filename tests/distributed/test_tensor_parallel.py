"""A student spread over 2 and 4 processes by tensor parallelism equals the one of one process."""

import pytest
from ranks import on_ranks
from spread_students import QUICK, everything, in_tensors
from tiny_families import make_model

from potstill.parallel.tensor import check_tensors
from potstill.types import PotstillError

PATIENCE = 400  # seconds


def wrong(ranks: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """What is not equal on some rank, case by case."""
    return {
        f"{case}, rank {rank}": far
        for rank, found in enumerate(ranks)
        for case, names in found.items()
        if (far := {name: value for name, value in names.items() if not value < 1e-10})
    }


def test_loss_sums_and_gradients_equal_one_process():
    found = on_ranks(2, in_tensors, 2, QUICK, timeout=PATIENCE)
    assert found[0].keys() == {*QUICK, "readers"} and not wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_and_every_target_equals_one_process(world):
    found = on_ranks(world, in_tensors, world, everything(), timeout=PATIENCE)
    assert len(found[0]) > 35 and not wrong(found)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "says"),
    [
        ("llama", {}, 3, "does not divide 8, the heads of model.layers.*.self_attn.q_proj of the llama model: set it to "
         "one of 1, 2, 4"),
        ("llama", {"num_key_value_heads": 2}, 4, "does not divide 2, the heads of model.layers.*.self_attn.k_proj of"),
        ("llama", {"intermediate_size": 50}, 4, "does not divide 50, the width of model.layers.*.mlp.gate_proj of the "
         "llama model: set it to one of 1, 2"),
        ("phi3", {"intermediate_size": 47}, 4, "does not divide 94, the width of model.layers.*.mlp.gate_up_proj of"),
        ("llama", {"vocab_size": 5}, 4, "leaves a rank without any of the 5 ids"),
        ("qwen3-moe", {}, 2, "set parallel.ep to a multiple of 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(family, changes, tp, says):
    with pytest.raises(PotstillError, match=says.replace("*", r"\*")):
        check_tensors(make_model(family, **changes).model, tp)


def test_a_model_without_a_plan_is_refused():
    model = make_model("gpt2").model
    with pytest.raises(PotstillError, match="no tensor-parallel plan for gpt2 models"):
        check_tensors(model, 2)
