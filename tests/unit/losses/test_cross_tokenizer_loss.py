"""Losses between two tokenizers against their naive twin, in value and gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_cross import chunks, naive_loss, random_case, relation, truncated
from tiny_prefix import made_up_table, random_prefix_marginal

from potstill.losses import DIVERGENCES, ChunkTarget, DenseTarget, fused_linear_kd
from potstill.types import LogitsTarget, PrefixMarginalTarget

METHODS = ("common_vocab", "projection", "span_likelihood", "uld")


def both(target, hidden, head, labels, name, temperature=1.0, **options):
    """Value and gradients of the fused loss and of the twin."""
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if fused:
            loss = fused_linear_kd(
                h, w, target, labels=labels, divergence=name, temperature=temperature, **options
            ).loss
        else:
            loss = naive_loss(target, h @ w.t(), labels, name, temperature)
        loss.backward()
        results.append((loss.detach(), h.grad, w.grad))
    return results


CELLS = [(method, t) for method in METHODS for t in (1.0, 1.7) if method != "span_likelihood" or t == 1.0]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("method", "temperature"), CELLS)
@pytest.mark.parametrize("k", [None, 5, 19])
def test_equals_the_naive_twin(method, name, k, temperature):
    for seed in range(2):
        hidden, head, labels, target = random_case(seed, method)
        target = target if k is None else truncated(target, k, temperature)
        ours, naive = both(target, hidden, head, labels, name, temperature, chunk_rows=5)
        for got, wanted in zip(ours, naive, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cases", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["prefix_marginal", *METHODS])
def test_never_below_zero_in_thousands_of_cases(method, cases):
    """Chunks, or prefix-marginal rows, of random models, by every divergence, sure and unsure, whole and truncated."""
    seen, seed = 0, 0
    while seen < cases:
        divergence = list(DIVERGENCES)[seed % len(DIVERGENCES)]
        if method == "prefix_marginal":
            hidden, head, labels, target = random_prefix_marginal(seed)
            rows = torch.arange(len(labels))
        else:
            hidden, head, labels, target = random_case(seed, method)
            target = target if seed % 3 else truncated(target, 5)
            rows = target.chunks.first
        scale = (0.01, 1.0, 6.0)[seed % 4 % 3]
        out = fused_linear_kd(scale * hidden, head, target, labels=labels, divergence=divergence)
        assert out.kd[rows].min() >= -1e-12, (seed, divergence)
        assert out.kd.isfinite().all()
        seen, seed = seen + len(rows), seed + 1


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab", "projection"])
def test_the_same_vocabulary_is_the_plain_divergence(method, divergence):
    """In value and gradient, in float64, with each id its own partner."""
    torch.manual_seed(4)
    rows, ids = 9, 23
    hidden, head, labels = torch.randn(rows, 6).double(), torch.randn(ids, 6).double(), torch.randint(ids, (rows,))
    logits, every = 2 * torch.randn(rows, ids).double(), np.arange(rows)
    plain = DenseTarget(logits=logits)
    if method == "prefix_marginal":
        none, zero = np.zeros(0, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        table = made_up_table(ids, np.arange(ids), np.zeros(2, dtype=np.int64), none, none)
        target = PrefixMarginalTarget(
            plain, table.on(torch.device("cpu")), torch.from_numpy(every), torch.from_numpy(zero), labels, labels, labels,
            torch.zeros(rows).double(), place_host=every, node_host=zero, odd_host=np.zeros(rows, dtype=np.bool_),
        )  # fmt: skip
    else:
        same = relation({x: x for x in range(ids)}, {x: {x: 1.0} for x in range(ids)}, ids, ids)
        logprob = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        where = chunks([1] * rows, [0] * rows)
        target = ChunkTarget(method, where, same, plain, labels, logprob, torch.zeros(rows).double())
    found = []
    for one in (target, plain):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        out = fused_linear_kd(h, w, one, labels=labels, divergence=divergence, temperature=1.5)
        out.loss.backward()
        found.append((out.kd, h.grad, w.grad))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-9)


def test_what_no_student_id_is_sent_to_costs_nothing():
    """By hand: the student's ids go to the teacher's 0 and 1, and the teacher has a fifth of its mass on 2. Forward KL is 0.8 ·
    KL((¼, ¾) ‖ (½, ½)): no constant of thousands, in float32 too, and at its least it is 0."""
    both_ways = relation({0: 0, 1: 1}, {0: {0: 1.0}, 1: {1: 1.0}}, 2, 3)
    teacher, student = torch.tensor([[0.2, 0.6, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    none = torch.zeros(1)
    target = ChunkTarget(
        "projection", chunks([1], [0]), both_ways, LogitsTarget(teacher), torch.tensor([0]), none, none
    )
    labels, head = torch.tensor([0]), torch.eye(2)
    found = fused_linear_kd(student, head, target, labels=labels).kd.item()
    assert found == pytest.approx(0.8 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)), rel=1e-5)
    alike = torch.tensor([[0.25, 0.75]]).log()
    assert fused_linear_kd(alike, head, target, labels=labels).kd.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [None, 7])
def test_equals_the_naive_twin_where_some_of_the_teachers_ids_are_not_reached(name, k):
    for seed in range(2):
        hidden, head, labels, target = random_case(seed, "projection", vs=11, vt=19)
        assert len(set(target.relation.end.tolist())) < 19
        target = target if k is None else truncated(target, k)
        ours, naive = both(target, hidden, head, labels, name, chunk_rows=5)
        for got, wanted in zip(ours, naive, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)
        assert name != "forward_kl" or 0 < ours[0] < 100  # eight chunks
