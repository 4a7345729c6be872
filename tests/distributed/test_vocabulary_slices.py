"""The loss with its head cut into slices of the vocabulary, on 2 and 4 real processes, equals the loss in one process."""

import math

import pytest
import torch
from ranks import on_ranks
from sliced_calls import KINDS, REFUSED, ROWS, SLICES, SlicedCall, calls, even, traffic_calls, work

from potstill.losses import DIVERGENCES

WORLDS = [pytest.param(world, marks=pytest.mark.slow if world > 2 else ()) for world in SLICES]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} processes")
def ranks(request):
    return on_ranks(request.param, work)


def test_every_call_equals_one_process(ranks):
    made = calls(len(ranks))
    assert all(rank["results"].keys() == made.keys() for rank in ranks)
    wrong = [line for name, call in made.items() for line in differences(name, call, ranks)]
    assert not wrong, "\n".join(wrong)


def differences(name: str, call: SlicedCall, ranks: list) -> list[str]:
    alone = call.run()
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}[call.hidden.dtype]
    wrong = []
    for key, expected in alone.items():
        found = [rank["results"][name][key] for rank in ranks]
        for number, value in enumerate(found):
            wanted = expected[call.columns(number)] if key in ("weight", "bias") else expected
            try:
                torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance / 10)
            except AssertionError as error:
                wrong.append(f"{name}: {key} on rank {number}: {error}")
        if key not in ("weight", "bias") and not all(torch.equal(value, found[0]) for value in found):
            wrong.append(f"{name}: {key} is not the same on every rank")
        if not torch.isfinite(expected).all():
            wrong.append(f"{name}: {key} is not finite")
    return wrong


def test_calls_are_not_trivial():
    """Slices that no rank's size divides, and gradients that are there: else equality would say little."""
    for world, sizes in SLICES.items():
        assert len(sizes) == world and sum(sizes) == 37 and 37 % world and min(sizes) == 1
        assert even(world)[-1] > even(world)[0]
        for name, call in calls(world).items():
            found = call.run()
            if "across" in name:  # a chunk's value is at its first row
                assert found["kd"].sum() > 1e-3 and found["hidden"].abs().max() > 1e-3, name
            elif name == "cross-entropy alone, weights by row":
                assert found["ce"].min() > 1e-2 and found["hidden"].abs().max() > 1e-3 and not found["kd"].any()
            elif name != "no rows":
                assert found["kd"].min() > 1e-6 and found["hidden"].abs().max() > 1e-3, name
            else:
                assert found["loss"] == 0 and found["weight"].abs().max() == 0


def test_gradients_are_not_multiplied_by_the_size_of_the_group(ranks):
    """By hand: P is uniform over the ranks' ids, Q has 3 parts of (world + 2) on the first and 1 on each other."""
    world = len(ranks)
    p, q_first, q_other = 1 / world, 3 / (world + 2), 1 / (world + 2)
    value = p * math.log(p / q_first) + (world - 1) * p * math.log(p / q_other)
    for number, rank in enumerate(ranks):
        found = rank["results"]["one id a rank"]
        assert found["loss"].item() == pytest.approx(value, abs=1e-12)
        mine = q_first - p if number == 0 else q_other - p
        assert found["weight"].item() == pytest.approx(3 * mine, abs=1e-12)  # the loss went in three times
        assert found["hidden"].item() == pytest.approx(3 * math.log(3) * (q_first - p), abs=1e-12)


# Floats a row that a divergence's gradient needs of all ranks.
MEANS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 1, "skew_kl": 1, "skew_reverse_kl": 1, "tvd": 1}


def expected_traffic(divergence: str, kind: str, what: str) -> tuple[int, int]:
    """(collectives, float32 a row), all of them row-sized: maxima, then masses, then what the divergence's gradient needs; at
    the end of the call the rows' values, if they are wanted."""
    mean = MEANS[divergence]
    collectives, floats = (2 + mean, 4 + mean) if kind != "sampled" else (2, 2)
    if "T=2" in what and kind.startswith("dense"):  # the cross-entropy shares the maximum …
        floats += 1
    elif "T=2" not in what and kind.startswith("dense"):  # … and at T = 1 the softmax
        pass
    elif "ce" in what or "step" in what:
        collectives, floats = collectives + 2, floats + 2
    if what == "gate" and kind != "sampled":  # the teacher's entropy with the number of buckets
        collectives, floats = collectives + 1, floats + 2
    if "step" in what:
        return collectives, floats
    return collectives + 1, floats + (2 if "ce" in what else 1)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_few_floats_a_row_travel(ranks):
    made = traffic_calls(2)
    for number, rank in enumerate(ranks):
        for name, seen in rank["traffic"].items():
            divergence, kind, what, _ = name.split(" · ")
            (first, sizes), *rows, (last, gradient) = seen
            assert {first, last, *(op for op, _ in rows)} == {"c10d::allreduce_"}, name
            # Once a call: every rank's number of ids (and of a dense teacher's), and the gradient of the hidden states.
            assert sizes <= 2 * 2 * 8 and gradient == made[name].hidden.numel() * 4, name
            if "step" in what:  # the loss itself, one number
                assert rows.pop()[1] == 4, name
            found = len(rows), sum(size for _, size in rows) / (4 * ROWS)
            assert found == expected_traffic(divergence, kind, what), (name, number)
            if "step" in what:
                assert found[1] <= (6 if kind.startswith("dense") else 7), name
    assert {name.split(" · ")[0] for name in made} == set(DIVERGENCES) == set(MEANS)
    assert {name.split(" · ")[1] for name in made} == set(KINDS)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_vocabularies_cut_at_other_ids_are_refused_on_every_rank(ranks):
    """On every rank: one that went on would wait for the others for ever."""
    for name, (_, _, says) in REFUSED.items():
        assert all(says in rank["refusals"][name] for rank in ranks), name
