"""What a cache keeps of a teacher, against float64 softmaxes of whole logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from potstill.signals import compute as signal
from potstill.signals.compute import COLUMNS, largest, uniforms
from potstill.signals.kinds import KINDS, Hidden, Sampled, TokenLogprobs, TopK
from potstill.types import DenseTarget, HiddenTarget

TEMPERATURES = (0.5, 1.0, 3.0)


def teacher(rows: int, vocabulary: int, width: int = 12, seed: int = 0, **changes) -> HiddenTarget:
    generator = torch.Generator().manual_seed(seed)
    return DenseTarget(
        hidden=torch.randn(rows, width, generator=generator),
        weight=torch.randn(vocabulary, width, generator=generator),
        **changes,
    )


def whole_logits(target: HiddenTarget) -> Tensor:
    """In float64, with everything a head can have."""
    head = target.head
    z = target.hidden.double() @ head.weight.double().t()
    z = (z if head.bias is None else z + head.bias.double()) * head.logit_scale
    return z if head.softcap is None else head.softcap * (z / head.softcap).tanh()


def labels_of(target: HiddenTarget, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.width, (target.hidden.shape[0],), generator=generator)


@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize(
    "width",
    [16, COLUMNS - 1, COLUMNS, 4 * COLUMNS, 64 * COLUMNS - 1, 64 * COLUMNS, 64 * COLUMNS + 1, 70 * COLUMNS + 63],
)
def test_the_k_largest_are_those_of_topk(width, k):
    z = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    values, ids = largest(z, k)
    expected = z.topk(k, -1)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def test_all_of_the_largest_in_one_group_or_in_the_columns_that_fill_none():
    z = torch.zeros(2, 70 * COLUMNS + 20)
    z[0, 3 * COLUMNS : 3 * COLUMNS + 8] = torch.arange(1.0, 9.0)
    z[1, -8:] = torch.arange(8.0, 0.0, -1.0)
    values, ids = largest(z, 8)
    assert torch.equal(values, torch.arange(8.0, 0.0, -1.0).expand(2, 8))
    assert ids[0].tolist() == [3 * COLUMNS + i for i in range(7, -1, -1)]
    assert ids[1].tolist() == [z.shape[1] - 8 + i for i in range(8)]


def test_equal_logits_give_the_same_values_and_no_id_twice():
    z = torch.randint(0, 3, (5, 70 * COLUMNS), generator=torch.Generator().manual_seed(1)).float()
    values, ids = largest(z, 16)
    assert torch.equal(values, z.topk(16, -1).values) and torch.equal(values, z.gather(-1, ids))
    assert all(len(set(row.tolist())) == 16 for row in ids)


@pytest.mark.parametrize("vocabulary", [40, 64 * COLUMNS + 5])
@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": "random", "softcap": 6.0, "logit_scale": 1.7}],
    ids=["plain head", "bias, cap and scale"],
)
def test_top_k_rest_and_chosen_are_those_of_the_whole_softmax(vocabulary, changes):
    if "bias" in changes:
        changes = {**changes, "bias": torch.randn(vocabulary, generator=torch.Generator().manual_seed(9))}
    target = teacher(21, vocabulary, **changes)
    labels = labels_of(target)
    form = TopK(vocabulary, k=10, temperatures=TEMPERATURES)
    found = form.compute(target, labels)
    z = whole_logits(target)
    logp = z.log_softmax(-1)
    ids = torch.from_numpy(found["ids"]).long()
    np.testing.assert_allclose(found["logprobs"], logp.topk(10, -1).values, atol=2e-5)
    np.testing.assert_allclose(found["logprobs"], logp.gather(-1, ids), atol=2e-5)
    np.testing.assert_allclose(found["token_logprobs"], logp.gather(-1, labels[:, None])[:, 0], atol=2e-5)
    for place, temperature in enumerate(TEMPERATURES):
        at = (z / temperature).log_softmax(-1)
        kept = at.gather(-1, ids).logsumexp(-1)
        rest = at.scatter(-1, ids, -math.inf).logsumexp(-1)
        np.testing.assert_allclose(found["odds"][:, place], rest - kept, atol=5e-5)
    only_chosen = TokenLogprobs(vocabulary).compute(target, labels)
    np.testing.assert_allclose(only_chosen["token_logprobs"], found["token_logprobs"], atol=2e-5)


def test_a_rest_that_a_subtraction_would_lose():
    """Kept: all but e^−30 of the mass. 1 − Σ would be 0 or a rounding error in float32, and its logarithm anything."""
    logits = torch.full((1, 300), -30.0 - math.log(290))
    logits[0, :10] = -math.log(10)
    target = DenseTarget(hidden=torch.ones(1, 1), weight=logits.t())
    found = TopK(300, k=10).compute(target, torch.tensor([299]))
    assert found["odds"][0, 0] == pytest.approx(-30.0, abs=1e-4)
    assert found["token_logprobs"][0] == pytest.approx(-30.0 - math.log(290), abs=1e-4)


def test_temperatures_without_one_among_them():
    """Log-probabilities and the chosen one's are at T = 1 all the same."""
    target = teacher(7, 90)
    labels = labels_of(target)
    with_one = TopK(90, k=8, temperatures=(1.0, 2.0)).compute(target, labels)
    without = TopK(90, k=8, temperatures=(2.0,)).compute(target, labels)
    for name in ("ids", "token_logprobs", "logprobs"):
        np.testing.assert_allclose(with_one[name], without[name], atol=1e-6)
    np.testing.assert_array_equal(with_one["odds"][:, 1:], without["odds"])


def test_no_rest_when_everything_is_kept():
    target = teacher(4, 30)
    found = TopK(30, k=30).compute(target, labels_of(target))
    assert np.isneginf(found["odds"]).all()
    np.testing.assert_allclose(np.exp(found["logprobs"]).sum(-1), 1.0, atol=1e-5)


def naive_draws(z: Tensor, random: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of the cumulative distribution in float64; and how near each number lies to where the draw changes."""
    ends = z.double().softmax(-1).cumsum(-1).numpy()
    wanted = np.sort(random, -1)
    ids = np.stack([np.searchsorted(e, u, side="right") for e, u in zip(ends, wanted, strict=True)])
    distance = np.abs(ends[:, None, :] - wanted[:, :, None]).min(-1)
    return ids.clip(max=z.shape[1] - 1), distance


@pytest.mark.parametrize("vocabulary", [5, COLUMNS, COLUMNS + 1, 1000])
def test_draws_are_the_inverse_of_the_cumulative_distribution(vocabulary):
    target = teacher(30, vocabulary)
    random = np.random.default_rng(0).random((30, 40))
    random[0, :2] = 0.0, 1 - 2**-53
    found = Sampled(vocabulary, num_samples=40).compute(target, labels_of(target), random)
    ids, distance = naive_draws(whole_logits(target), random)
    clear = distance > 1e-6
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found["samples"][clear], ids[clear])
    assert found["samples"].min() >= 0 and found["samples"].max() < vocabulary
    entropy = torch.distributions.Categorical(logits=whole_logits(target)).entropy()
    np.testing.assert_allclose(found["entropy"], entropy, atol=2e-5)


def test_draws_follow_the_distribution():
    """Pearson's χ² of 200,000 draws at each of three rows. Its mean is the degrees of freedom, its variance twice that."""
    vocabulary, draws = 150, 200_000
    target = teacher(3, vocabulary, seed=4, logit_scale=0.5)
    random = np.stack([uniforms(0, f"{row:032x}", 1, draws)[0] for row in range(3)])
    found = Sampled(vocabulary, num_samples=draws).compute(target, labels_of(target), random)
    for row, p in zip(found["samples"], whole_logits(target).softmax(-1).numpy(), strict=True):
        cells = p * draws >= 5
        counts = np.bincount(row, minlength=vocabulary)
        observed = np.append(counts[cells], counts[~cells].sum())
        expected = np.append(p[cells], p[~cells].sum()) * draws
        observed, expected = observed[expected > 0], expected[expected > 0]
        freedom = len(expected) - 1
        assert freedom > 30
        assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


def test_ids_without_mass_are_never_drawn_and_the_entropy_is_a_number():
    bias = torch.full((130,), -math.inf)
    bias[[3, 64, 129]] = torch.tensor([0.5, 1.0, -0.3])
    target = DenseTarget(hidden=torch.zeros(2, 3), weight=torch.zeros(130, 3), bias=bias)
    random = np.random.default_rng(1).random((2, 3000))
    random[0, :2] = 0.0, 1 - 2**-53
    found = Sampled(130, num_samples=3000).compute(target, torch.zeros(2, dtype=torch.int64), random)
    assert set(np.unique(found["samples"])) == {3, 64, 129}
    p = bias.double().softmax(-1)[[3, 64, 129]]
    np.testing.assert_allclose(found["entropy"], -(p * p.log()).sum().item(), rtol=1e-5)


def test_random_numbers_depend_on_the_document_and_the_seed_alone():
    one = uniforms(0, "a" * 32, 7, 50)
    assert one.shape == (7, 50) and one.min() >= 0 and one.max() < 1
    np.testing.assert_array_equal(one, uniforms(0, "a" * 32, 7, 50))
    np.testing.assert_array_equal(one[:3], uniforms(0, "a" * 32, 3, 50))  # of a document that was cut
    assert not np.array_equal(one, uniforms(0, "b" * 32, 7, 50))
    assert not np.array_equal(one, uniforms(1, "a" * 32, 7, 50))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hidden"])
def test_neither_batches_nor_blocks_change_the_signal(kind, monkeypatch):
    """Row by row, and in products and blocks of a few rows: the same draws and ids; the same numbers up to rounding."""
    vocabulary = 64 * COLUMNS + 3
    target = teacher(23, vocabulary)
    labels = labels_of(target)
    form = KINDS[kind](vocabulary, k=12, num_samples=30, temperatures=(1.0, 2.0) if kind == "top_k" else (1.0,))
    random = uniforms(5, "c" * 32, 23, 30) if kind == "sampled" else None
    whole = form.compute(target, labels, random)
    monkeypatch.setattr(signal, "PRODUCT_BYTES", 7 * 4 * vocabulary)
    monkeypatch.setattr(signal, "BLOCK_BYTES", 3 * 4 * vocabulary)
    in_blocks = form.compute(target, labels, random)
    rows = [torch.arange(i, min(i + 4, 23)) for i in range(0, 23, 4)]
    parts = [form.compute(target.select(at), labels[at], None if random is None else random[at]) for at in rows]
    for name, values in whole.items():
        for other in (in_blocks[name], np.concatenate([part[name] for part in parts])):
            if values.dtype.kind == "i":
                np.testing.assert_array_equal(other, values)
            else:
                np.testing.assert_allclose(other, values, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_rows_never_exist(kind, monkeypatch):
    rows, vocabulary = 500, 3000
    monkeypatch.setattr(signal, "PRODUCT_BYTES", 8 * 4 * vocabulary)
    monkeypatch.setattr(signal, "BLOCK_BYTES", 2 * 4 * vocabulary)
    target = teacher(rows, vocabulary)
    form = KINDS[kind](vocabulary, k=10, num_samples=20, width=12)
    random = np.random.default_rng(0).random((rows, 20)) if kind == "sampled" else None
    with LargestTensor() as seen:
        form.compute(target, labels_of(target), random)
    assert seen.elements <= max(8 * vocabulary, target.head.weight.numel(), 2 * 20 * COLUMNS)
    assert seen.elements < rows * vocabulary / 10


def test_hidden_states_are_kept_in_the_format_s_own_type():
    """A model whose last norm is in float32 and whose weights are not: what is stored is what the manifest says."""
    target = teacher(4, 20)
    found = Hidden(20, width=12, dtype="bfloat16").compute(target, labels_of(target))
    assert found["hidden"].dtype == np.uint16
    assert torch.equal(torch.from_numpy(found["hidden"]).view(torch.bfloat16), target.hidden.bfloat16())
