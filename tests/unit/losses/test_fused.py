"""The chunked loss against its naive twin (full logits, autograd), in value and gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from potstill.losses import (
    DIVERGENCES,
    DenseTarget,
    SampledTarget,
    TokenLogprobsTarget,
    TopKTarget,
    compare_rows,
    fused_linear_kd,
)
from potstill.products import wide_product, widens
from potstill.types import Head


def naive_divergence(name, logp, logq, beta, alpha):
    """By the definition, for autograd."""
    p, q = logp.exp(), logq.exp()
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    mix = lambda a, b, w: (w * a.exp() + (1 - w) * b.exp()).log()  # noqa: E731
    if name == "forward_kl":
        return kl(logp, logq)
    if name == "reverse_kl":
        return kl(logq, logp)
    if name == "jsd":
        m = mix(logp, logq, beta)
        return beta * kl(logp, m) + (1 - beta) * kl(logq, m)
    if name == "skew_kl":
        return kl(logp, mix(logp, logq, alpha))
    if name == "skew_reverse_kl":
        return kl(logq, mix(logq, logp, alpha))
    return 0.5 * (p - q).abs().sum(-1)


def naive_loss(hidden, weight, target, labels, row_weight, name, t, kd_weight, ce_weight, bias, softcap, scale, width):
    def logits(h, w, b, cap, s):
        z = F.linear(h, w, b) * s
        return z if cap is None else cap * torch.tanh(z / cap)

    z = logits(hidden, weight, bias, softcap, scale)
    head = target.head
    teacher = logits(target.hidden, head.weight, head.bias, head.softcap, head.logit_scale)
    logp, logq = (teacher / t).log_softmax(-1), (z[:, :width] / t).log_softmax(-1)
    kd = naive_divergence(name, logp, logq, 0.3, 0.1) * (t if name == "tvd" else t * t)
    ce = F.cross_entropy(z, labels, reduction="none")
    return (row_weight * (kd_weight * kd + ce_weight * ce)).sum(), kd, ce


CASES = list(itertools.product(DIVERGENCES, [1.0, 2.5], [None, 3, 100]))


@pytest.mark.parametrize(("name", "temperature", "chunk_rows"), CASES)
def test_equals_full_logits(name, temperature, chunk_rows):
    generator = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, v, width, h, ht = 13, 37, 33, 8, 6  # the student's vocabulary is padded to 37
    target = DenseTarget(randn(n, ht), randn(width, ht), bias=randn(width), softcap=4.0, logit_scale=0.8)
    hidden, weight, bias = (x.requires_grad_() for x in (randn(n, h), randn(v, h), randn(v)))
    labels = torch.randint(v, (n,), generator=generator)
    row_weight = torch.rand(n, dtype=torch.float64, generator=generator)
    out = fused_linear_kd(
        hidden,
        weight,
        target,
        labels=labels,
        row_weight=row_weight,
        divergence=name,
        temperature=temperature,
        beta=0.3,
        kd_weight=0.7,
        ce_weight=0.4,
        bias=bias,
        softcap=5.0,
        logit_scale=1.3,
        chunk_rows=chunk_rows,
    )
    arguments = (target, labels, row_weight, name, temperature, 0.7, 0.4, bias, 5.0, 1.3, width)
    loss, kd, ce = naive_loss(hidden, weight, *arguments)
    ours = torch.autograd.grad(3 * out.loss, (hidden, weight, bias))
    theirs = torch.autograd.grad(3 * loss, (hidden, weight, bias))
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.kd, kd, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.ce, ce, rtol=1e-10, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["none", "dense", "narrow", "top-k", "two"])
def test_cross_entropy_weights_by_row(kind, temperature, chunk_rows):
    """Against whole logits and autograd; weights above, below and at 0."""
    torch.manual_seed(8)
    n, v = 7, 19
    hidden, weight, bias, teacher, other = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((n, 4), (v, 4), (v,), (n, v), (n, v))
    )
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    labels, ce_weight = torch.randint(v, (n,)), torch.tensor([0.4, 0.0, -1.5, 2.0, 0.0, 0.3, -0.1], dtype=torch.float64)
    row_weight = torch.rand(n, dtype=torch.float64)
    logits = 5.0 * torch.tanh(F.linear(hidden, weight, bias) * 1.3 / 5.0)
    logq, width = (logits / temperature).log_softmax(-1), 15 if kind == "narrow" else v
    top = (teacher / temperature).log_softmax(-1).topk(4)
    tail = torch.log1p(-top.values.exp().sum(-1))
    targets = {
        "none": [],
        "dense": [(1.0, DenseTarget(logits=teacher))],
        "narrow": [(1.0, DenseTarget(logits=teacher[:, :width]))],
        "top-k": [(1.0, TopKTarget(top.indices, top.values, tail))],
        "two": [(0.5, DenseTarget(logits=teacher)), (2.0, DenseTarget(logits=other))],
    }[kind]
    if kind == "top-k":
        kept = logq.gather(-1, top.indices)
        rest = logq.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
        buckets = lambda a, b: torch.cat([a, b[:, None]], -1)  # noqa: E731
        kd = naive_divergence("reverse_kl", buckets(top.values, tail), buckets(kept, rest), 0.3, 0.1)
    else:
        parts = [(share, (target.logits / temperature).log_softmax(-1)) for share, target in targets]
        logq = (logits[:, :width] / temperature).log_softmax(-1)
        kd = sum(
            (share * naive_divergence("reverse_kl", logp, logq, 0.3, 0.1) for share, logp in parts), torch.zeros(n)
        )
    ce = F.cross_entropy(logits, labels, reduction="none")
    wanted = (row_weight * (0.7 * temperature**2 * kd + ce_weight * ce)).sum()
    out = fused_linear_kd(
        hidden,
        weight,
        targets,
        labels=labels,
        row_weight=row_weight,
        divergence="reverse_kl",
        temperature=temperature,
        kd_weight=0.7,
        ce_weight=ce_weight,
        bias=bias,
        softcap=5.0,
        logit_scale=1.3,
        chunk_rows=chunk_rows,
    )
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=1e-12)
    for a, b in zip(torch.autograd.grad(out.loss, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_equal_cross_entropy_weights_by_row_are_one_weight():
    torch.manual_seed(9)
    inputs = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target, labels, found = DenseTarget(logits=torch.randn(5, 9)), torch.randint(9, (5,)), []
    for weight in (0.25, torch.full((5,), 0.25)):
        out = fused_linear_kd(*inputs, target, labels=labels, ce_weight=weight)
        found.append((out.loss.detach(), *torch.autograd.grad(out.loss, inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


KINDS = [*itertools.product(DIVERGENCES, ["dense", "top-k"]), ("forward_kl", "sampled")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_gradcheck(name, kind):
    torch.manual_seed(2)
    logp = (torch.randn(4, 6, dtype=torch.float64) / 2).log_softmax(-1)
    top = logp.topk(3)
    target = {
        "dense": DenseTarget(logits=logp[:, :5]),
        "top-k": TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1))),
        "sampled": SampledTarget(top.indices, torch.rand(4, 3, dtype=torch.float64)),
    }[kind]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (6, 3), (6,))]
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused_linear_kd(h, w, target, divergence=name, temperature=1.7, bias=b, chunk_rows=3).loss,
        inputs,
    )


def test_several_teachers_over_one_product():
    torch.manual_seed(3)
    a, b = DenseTarget(logits=torch.randn(5, 9)), DenseTarget(logits=torch.randn(5, 9))
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    both = fused_linear_kd(hidden, weight, [(0.3, a), (2.0, b)])
    apart = 0.3 * fused_linear_kd(hidden, weight, a).loss + 2.0 * fused_linear_kd(hidden, weight, b).loss
    for ours, theirs in zip(
        torch.autograd.grad(both.loss, (hidden, weight)), torch.autograd.grad(apart, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_no_rows_give_a_differentiable_zero():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = DenseTarget(logits=torch.zeros(0, 9))
    out = fused_linear_kd(hidden, weight, target, labels=torch.zeros(0, dtype=torch.int64), ce_weight=1.0)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert weight.grad.abs().max() == 0.0


def test_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    fused_linear_kd(hidden, weight, DenseTarget(logits=torch.randn(3, 9))).loss.backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_head_can_be_learnt_from(dtype):
    hidden, weight = (torch.randn(n, 8).to(dtype).requires_grad_() for n in (5, 11))
    logits = Head(weight).logits(hidden)
    logits.sum().backward()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(hidden.grad, weight.detach().float().sum(0).expand(5, 8).to(dtype))
    with torch.no_grad():
        torch.testing.assert_close(Head(weight).logits(hidden), logits.detach(), rtol=1e-5, atol=1e-5)


def test_a_device_that_widens_is_asked_to():
    """Of meta tensors, which have the operators of a GPU and no numbers: shapes and dtypes."""
    assert widens("meta") and not widens("cpu")
    a, b = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 8), (8, 11)))
    out = torch.empty(5, 11, device="meta")
    for found in (wide_product(a, b), wide_product(a, b, out), wide_product(a, b, out, add=True)):
        assert found.shape == (5, 11) and found.dtype == torch.float32


def test_what_fake_tensors_could_do_is_not_kept_for_real_ones():
    """A run counts its memory on fake tensors before its first step."""
    widens.cache_clear()
    with FakeTensorMode():
        wide_product(*(torch.ones(4, 4, dtype=torch.bfloat16) for _ in range(2)))
    assert wide_product(*(torch.ones(4, 4, dtype=torch.bfloat16) for _ in range(2))).tolist() == [[4.0] * 4] * 4


def test_bfloat16_is_computed_in_float32():
    torch.manual_seed(4)
    hidden, weight = torch.randn(40, 16).bfloat16().requires_grad_(), torch.randn(50, 16).bfloat16().requires_grad_()
    target = DenseTarget(torch.randn(40, 8).bfloat16(), torch.randn(50, 8).bfloat16())
    out = fused_linear_kd(hidden, weight, target, chunk_rows=7)
    out.loss.backward()
    logits = hidden.detach().float() @ weight.detach().float().t()
    exact = F.kl_div(
        logits.log_softmax(-1),
        (target.hidden.float() @ target.head.weight.float().t()).log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
    assert out.kd.dtype == torch.float32
    torch.testing.assert_close(out.loss, exact, rtol=1e-5, atol=1e-5)
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.bfloat16


def test_memory_does_not_grow_with_rows_times_vocabulary():
    """The largest tensor made on the way holds one chunk, not all rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.seen = max(self.seen, out.numel())
            return out

    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest() as mode:
        fused_linear_kd(hidden, weight, DenseTarget(torch.randn(256, 4), torch.randn(1000, 4)), chunk_rows=16)
    assert mode.seen == 16 * 1000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"beta": 1.5}, "beta must be between 0 and 1"),
        ({"ce_weight": 1.0}, "ce_weight needs labels"),
        ({"ce_weight": torch.zeros(3)}, "ce_weight needs labels"),
        (
            {"ce_weight": torch.zeros(2), "labels": torch.zeros(3).long()},
            r"ce_weight \[2\] of torch.float32 must be \[3\]",
        ),
        ({"ce_weight": torch.zeros(3).long(), "labels": torch.zeros(3).long()}, r"\[3\] of floating point"),
        (
            {"target": TokenLogprobsTarget(torch.zeros(3))},
            "only how likely the text's own tokens are, and a divergence needs",
        ),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \[4\] of torch.int64 must be \[3\]"),
        ({"weight": torch.zeros(9, 5)}, "must be"),
        ({"target": DenseTarget(logits=torch.zeros(2, 9))}, r"the teacher's logits \[2, 9\] .* must be \[3, 9\]"),
        ({"target": DenseTarget(logits=torch.zeros(3, 10))}, "10 ids and the student's head 9"),
        (
            {"target": TopKTarget(torch.zeros(3, 0).long(), torch.zeros(3, 0), torch.zeros(3))},
            r"must be \[3, K\] of torch.int64, with K at least 1",
        ),
        ({"target": SampledTarget(torch.zeros(3, 2).long(), torch.ones(3, 2)), "divergence": "jsd"}, "forward_kl only"),
    ],
)
def test_refusals(change, says):
    call = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "target": DenseTarget(logits=torch.zeros(3, 9))}
    with pytest.raises(ValueError, match=says):
        fused_linear_kd(**{**call, **change})


@pytest.mark.parametrize("parts", [{}, {"hidden": torch.zeros(3, 5)}, {"weight": torch.zeros(9, 5)}])
def test_half_a_dense_target_is_refused(parts):
    with pytest.raises(ValueError, match="a DenseTarget needs hidden and weight, or logits"):
        DenseTarget(**parts)


def test_compare_rows_by_hand():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([[0.5, 0.4, 0.1], [0.6, 0.3, 0.1]])
    stats = compare_rows(DenseTarget(q.log(), torch.eye(3)), torch.tensor([1, 0]), DenseTarget(p.log(), torch.eye(3)))
    torch.testing.assert_close(stats.nll, -torch.tensor([0.4, 0.6]).log())
    torch.testing.assert_close(stats.kl, (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(stats.student_entropy, -(q * q.log()).sum(-1))
    torch.testing.assert_close(stats.teacher_entropy, -(p * p.log()).sum(-1))
    assert stats.agreement.tolist() == [1.0, 0.0]
    assert stats.correct.tolist() == [0.0, 1.0]
    torch.testing.assert_close(stats.confidence, torch.tensor([0.5, 0.6]))


def test_room_kept_from_call_to_call_changes_nothing():
    """Calls of other sizes and in inference mode come between two equal ones. A kept graph gives its gradient again."""

    def call(rows, vocabulary):
        g = torch.Generator().manual_seed(rows)
        hidden = torch.randn(rows, 4, generator=g).requires_grad_()
        weight = torch.randn(vocabulary, 4, generator=g).requires_grad_()
        target = DenseTarget(logits=torch.randn(rows, vocabulary, generator=g))
        return fused_linear_kd(hidden, weight, target, divergence="jsd", chunk_rows=3), (hidden, weight)

    with torch.inference_mode():
        call(9, 41)
    out, inputs = call(7, 30)
    call(8, 50)
    first = torch.autograd.grad(out.loss, inputs, retain_graph=True)
    twice = torch.autograd.grad(2 * out.loss, inputs)
    again, same_inputs = call(7, 30)
    torch.testing.assert_close(again.kd, out.kd, rtol=0, atol=0)
    for once, double, fresh in zip(first, twice, torch.autograd.grad(again.loss, same_inputs), strict=True):
        torch.testing.assert_close(once, fresh, rtol=0, atol=0)
        torch.testing.assert_close(double, 2 * fresh)
    with pytest.raises(RuntimeError):
        out.loss.backward()


def test_absent_entries_are_as_if_they_were_not_there():
    """They repeat another entry's id, whatever their place, and change neither value nor gradient."""
    torch.manual_seed(6)
    hidden, weight = torch.randn(5, 4).double(), torch.randn(9, 4).double()
    logp = torch.randn(5, 9).double().log_softmax(-1)
    top = logp.topk(3)
    tail = logp.exp().scatter(-1, top.indices, 0.0).sum(-1).log()
    plain = TopKTarget(top.indices, top.values, tail)
    order = torch.tensor([0, 3, 1, 4, 2])
    ids = torch.cat([top.indices, top.indices[:, :1], top.indices[:, 2:3]], -1)[:, order]
    values = torch.cat([top.values, torch.full((5, 2), -torch.inf).double()], -1)[:, order]
    absent = torch.tensor([False, False, False, True, True]).expand(5, -1)[:, order]
    padded = TopKTarget(ids, values, tail, absent=absent)
    for divergence in DIVERGENCES:
        for gate in (None, 1.5):
            found = []
            for target in (plain, padded):
                h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
                out = fused_linear_kd(h, w, target, divergence=divergence, entropy_gate=gate)
                out.loss.backward()
                found.append((out.kd, h.grad, w.grad))
            for ours, wanted in zip(*found, strict=True):
                torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_clamped_rows_equal_full_logits(name, temperature):
    """Of two teachers each is clamped by itself; a row beyond the limit has its value and no gradient."""
    generator = torch.Generator().manual_seed(8)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, generator=generator).requires_grad_() for n in (9, 31))
    first, second = (torch.randn(9, 31, dtype=torch.float64, generator=generator) for _ in range(2))
    logq = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    scale = temperature if name == "tvd" else temperature**2
    values = [
        scale * naive_divergence(name, (x / temperature).log_softmax(-1), logq, 0.3, 0.1) for x in (first, second)
    ]
    clip = 1.001 * torch.cat(values).detach().median().item()
    twin = (0.3 * values[0].clamp(max=clip) + 1.7 * values[1].clamp(max=clip)).sum()
    expected = torch.autograd.grad(twin, [hidden, weight])
    targets = [(0.3, DenseTarget(logits=first)), (1.7, DenseTarget(logits=second))]
    out = fused_linear_kd(
        hidden, weight, targets, divergence=name, temperature=temperature, beta=0.3, token_clip=clip, chunk_rows=4
    )
    torch.testing.assert_close(out.loss, twin)
    torch.testing.assert_close(torch.autograd.grad(out.loss, [hidden, weight]), expected)


def test_a_clamp_of_chunks_is_refused():
    hidden, weight = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="token_clip 0 must be above 0"):
        fused_linear_kd(hidden, weight, DenseTarget(logits=torch.randn(2, 4)), token_clip=0)
