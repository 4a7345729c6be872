"""A teacher on the student's own likeliest tokens: value and gradient against autograd on whole logits, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from potstill.losses import DenseTarget, fused_linear_kd
from potstill.losses.support import on_support
from potstill.types import Head, HiddenTarget


def test_by_hand() -> None:
    """Q is (½, ¼, ¼) and P (⅛, ⅛, ¾): with k = 1 the buckets are (½, ½) and (⅛, ⅞)."""
    logs = lambda *p: torch.tensor([p], dtype=torch.float64).log()  # noqa: E731
    student = HiddenTarget(logs(0.5, 0.25, 0.25), Head(torch.eye(3, dtype=torch.float64)))
    target, mass = on_support(student, DenseTarget(logits=logs(0.125, 0.125, 0.75)), 1, 1.0)
    assert target.ids.tolist() == [[0]] and mass.item() == pytest.approx(0.125)
    assert target.tail.exp().item() == pytest.approx(0.875)
    out = fused_linear_kd(student.hidden, student.head.weight, target, divergence="reverse_kl")
    assert out.kd.item() == pytest.approx(0.5 * math.log(0.5 / 0.125) + 0.5 * math.log(0.5 / 0.875))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 4, 19, 50])
@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_equals_full_logits(name: str, k: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    hidden, weight = randn(11, 5).requires_grad_(), randn(23, 5).requires_grad_()  # 4 ids more than the teacher's
    teacher = DenseTarget(randn(11, 7), randn(19, 7))
    target, mass = on_support(HiddenTarget(hidden, Head(weight)), teacher, k, temperature)
    out = fused_linear_kd(hidden, weight, target, divergence=name, temperature=temperature)
    total, shares = torch.zeros((), dtype=torch.float64), []
    for i in range(11):
        z = (hidden[i] @ weight.t())[:19]
        p, q = ((x / temperature).softmax(-1) for x in (teacher.hidden[i] @ teacher.head.weight.t(), z))
        chosen = sorted(range(19), key=lambda j: -float(z[j].detach()))[:k]
        rest = [j for j in range(19) if j not in chosen]
        p, q = (torch.cat([x[chosen], x[rest].sum()[None]]) if rest else x[chosen] for x in (p, q))
        a, b = (q, p) if name == "reverse_kl" else (p, q)
        total = total + temperature**2 * (a * (a.log() - b.log())).sum()
        shares.append(float(p[:k].sum()))
    torch.testing.assert_close(out.loss, total)
    torch.testing.assert_close(mass, torch.tensor(shares, dtype=mass.dtype))
    ours, theirs = (torch.autograd.grad(x, [hidden, weight]) for x in (out.loss, total))
    torch.testing.assert_close(ours, theirs)
