"""Properties of the loss over random shapes, dtypes and settings: against a naive twin, at extremes, in memory, in refusals.

The twin makes full logits and leaves gradients to autograd; it is written from the definitions and shares nothing with the
engine.
"""

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from potstill.losses import DIVERGENCES, DenseTarget, SampledTarget, TopKTarget, fused_linear_kd
from potstill.losses.divergences import LOG_FLOOR
from potstill.parallel.vocab import check_slices
from potstill.types import LogitsTarget

INF = float("inf")
KINDS = ["dense hidden", "dense logits", "top-k", "sampled"]
bounded = settings(deadline=None, derandomize=True, database=None)


# The twin


def definition(name, p, q, beta, alpha):
    """Divergence of probabilities [n, B], in float64, by its definition."""
    kl = lambda a, b: torch.special.xlogy(a, a / b).sum(-1)  # noqa: E731
    m = {"jsd": beta * p + (1 - beta) * q, "skew_kl": alpha * p + (1 - alpha) * q}.get(
        name, alpha * q + (1 - alpha) * p
    )
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
        "skew_kl": lambda: kl(p, m),
        "skew_reverse_kl": lambda: kl(q, m),
        "tvd": lambda: (p - q).abs().sum(-1) / 2,
    }[name]()


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def twin(hidden, weight, target, *, divergence, temperature, bias, softcap, logit_scale, labels, entropy_gate, **more):
    """Per-row kd and ce of full logits, in float64."""
    z = hidden.double() @ weight.to(hidden.dtype).double().t()
    z = capped((z if bias is None else z + bias.double()) * logit_scale, softcap)
    ce = F.cross_entropy(z, labels, reduction="none") if labels is not None else torch.zeros(len(z)).double()
    scale = temperature if divergence == "tvd" else temperature**2
    if isinstance(target, SampledTarget):
        logq = (z / temperature).log_softmax(-1).gather(-1, target.ids)
        return -(target.weights.double() * logq).sum(-1) * scale, ce
    if isinstance(target, TopKTarget):
        kept = torch.zeros_like(z, dtype=torch.bool).scatter(-1, target.ids, True)
        rest = (z / temperature).masked_fill(kept, -INF).logsumexp(-1, keepdim=True)
        chosen = (z / temperature).gather(-1, target.ids)
        has_rest = target.tail[0] > -INF  # of all rows or of none, in these tests
        q = torch.cat([chosen, rest], -1).softmax(-1) if has_rest else chosen.softmax(-1)
        logp = torch.cat([target.logprobs, target.tail[:, None]], -1) if has_rest else target.logprobs
        p = logp.double().exp()
    else:
        if isinstance(target, LogitsTarget):
            logits = target.logits
        else:
            head = target.head
            logits = target.hidden.double() @ head.weight.to(target.hidden.dtype).double().t()
            logits = capped((logits if head.bias is None else logits + head.bias) * head.logit_scale, head.softcap)
        p = (logits.double() / temperature).softmax(-1)
        q = (z[:, : p.shape[1]] / temperature).softmax(-1)
    kd = definition(divergence, p, q, more["beta"], more["alpha"])
    if entropy_gate is not None:
        share = (-torch.special.xlogy(p, p).sum(-1) / math.log(p.shape[1])) ** entropy_gate
        kd = (1 - share) * kd + share * definition("forward_kl", p, q, 0.0, 0.0)
    return kd * scale, ce


@st.composite
def problems(draw, divergence, kind):
    """hidden, weight, target and the call's options."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, v, h = draw(st.integers(1, 7)), draw(st.integers(3, 40)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    weight_dtype = draw(st.sampled_from([dtype, torch.float32]))
    temperature = draw(st.sampled_from([1.0, 0.5, 1.7, 4.0]))
    maybe = lambda value: value if draw(st.booleans()) else None  # noqa: E731
    softcap, bias = maybe(3.0), maybe(randn(v).to(weight_dtype))
    hidden, weight = randn(n, h).to(dtype), randn(v, h).to(weight_dtype)
    labels = maybe(torch.randint(v, (n,), generator=generator))
    options = {
        "divergence": divergence,
        "temperature": temperature,
        "beta": draw(st.sampled_from([0.1, 0.5, 0.9])),
        "alpha": draw(st.sampled_from([0.1, 0.5])),
        "kd_weight": 0.7,
        "ce_weight": 0.4 if labels is not None else 0.0,
        "labels": labels,
        "bias": bias,
        "softcap": softcap,
        "logit_scale": draw(st.sampled_from([1.0, 0.6])),
        "entropy_gate": maybe(1.5) if kind != "sampled" else None,
        "row_weight": maybe(torch.rand(n, dtype=torch.float64, generator=generator).float()),
        "chunk_rows": draw(st.sampled_from([None, 1, 2, n, n + 3])),
    }
    width = draw(st.integers(2, v))  # the student's further ids are padding
    dense = DenseTarget(randn(n, 4).to(dtype), randn(width, 4).to(weight_dtype), softcap=maybe(4.0), logit_scale=0.8)
    if kind == "dense hidden":
        return hidden, weight, dense, options
    if kind == "dense logits":
        return hidden, weight, DenseTarget(logits=randn(n, width).to(dtype)), options
    logp = randn(n, v).log_softmax(-1)
    k = draw(st.integers(1, v - 1))
    top = logp.topk(k)
    if kind == "top-k":
        rest = logp.scatter(-1, top.indices, -INF).logsumexp(-1)
        return hidden, weight, TopKTarget(top.indices, top.values, rest), options
    ids = torch.randint(v, (n, k), generator=generator)  # with repeats, as draws have
    return hidden, weight, SampledTarget(ids, torch.rand(n, k, dtype=torch.float64, generator=generator)), options


TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-2}


def assert_near(found, expected, tolerance, what):
    room = tolerance * (1 + expected.abs().max())
    assert (found.double() - expected.double()).abs().max() <= room, (what, found, expected)


CELLS = [(d, k) for d in DIVERGENCES for k in KINDS if k != "sampled" or d == "forward_kl"]


@pytest.mark.parametrize(("divergence", "kind"), CELLS)
def test_value_and_gradients_equal_the_twin(divergence, kind):
    @settings(bounded, max_examples=40)
    @given(problems(divergence, kind))
    def check(problem):
        hidden, weight, target, options = problem
        wanted = [x.requires_grad_() for x in (hidden, weight, options["bias"]) if x is not None]
        out = fused_linear_kd(hidden, weight, target, **options)
        kd, ce = twin(hidden, weight, target, **options)
        row_weight = 1.0 if options["row_weight"] is None else options["row_weight"].double()
        loss = (row_weight * (0.7 * kd + options["ce_weight"] * ce)).sum()
        # The engine works in float32 at least: values of bfloat16 inputs are as exact as of float32.
        exact = TOLERANCE[torch.promote_types(hidden.dtype, torch.float32)]
        assert out.kd.dtype == torch.promote_types(hidden.dtype, torch.float32)
        assert_near(out.kd, kd, exact, "kd")
        assert_near(out.ce, ce, exact, "ce")
        assert_near(out.loss, loss, exact, "loss")
        found = torch.autograd.grad(2.0 * out.loss, wanted)
        for x, ours, theirs in zip(wanted, found, torch.autograd.grad(2.0 * loss, wanted), strict=True):
            assert ours.dtype == x.dtype
            tolerance = max(TOLERANCE[hidden.dtype], TOLERANCE[x.dtype])
            assert_near(ours, theirs, tolerance, "gradient")

    check()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_entries_of_a_truncated_teacher_are_the_dense_teacher(divergence):
    @settings(bounded, max_examples=15)
    @given(st.integers(2, 30), st.sampled_from([1.0, 2.5]), st.sampled_from([None, 1.5]), st.integers(0, 2**31))
    def check(v, temperature, gate, seed):
        generator = torch.Generator().manual_seed(seed)
        hidden, weight, teacher = (
            torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((4, 3), (v, 3), (4, v))
        )
        logp = (teacher / temperature).log_softmax(-1)
        ids = torch.stack([torch.randperm(v, generator=generator) for _ in range(4)])
        top_k = TopKTarget(ids, logp.gather(-1, ids), torch.full((4,), -INF, dtype=torch.float64))
        found = []
        for target in (DenseTarget(logits=teacher), top_k):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            options = {"divergence": divergence, "temperature": temperature, "entropy_gate": gate}
            out = fused_linear_kd(*leaves, target, **options)
            found.append([out.kd, *torch.autograd.grad(out.loss, leaves)])
        for dense, truncated in zip(*found, strict=True):
            torch.testing.assert_close(truncated, dense, rtol=1e-9, atol=1e-11)

    check()


# Extremes

extreme = st.sampled_from([0.0, 1.0, 30.0, 1e4, -1e4, -INF])


@pytest.mark.parametrize(("divergence", "kind"), [cell for cell in CELLS if cell[1] != "dense hidden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(divergence, kind, dtype):
    """Huge, one-hot, uniform, empty on either side or both: value and gradient are finite, and no value is negative."""

    @settings(bounded, max_examples=40)
    @given(st.data())
    def check(data):
        v = data.draw(st.integers(2, 6))
        student = torch.tensor(data.draw(st.lists(extreme, min_size=v, max_size=v)), dtype=dtype)
        teacher = torch.tensor(data.draw(st.lists(extreme, min_size=v, max_size=v)), dtype=dtype)
        teacher[data.draw(st.integers(0, v - 1))] = data.draw(st.sampled_from([0.0, 1e4]))  # it says something
        temperature = data.draw(st.sampled_from([1.0, 0.5, 3.0]))
        logp = (teacher[None] / temperature).log_softmax(-1)
        top = logp.topk(data.draw(st.integers(1, v)))
        target = {
            "dense logits": DenseTarget(logits=teacher[None]),
            "top-k": TopKTarget(top.indices, top.values, logp.scatter(-1, top.indices, -INF).logsumexp(-1)),
            "sampled": SampledTarget(top.indices, top.values.exp()),
        }[kind]
        # −inf comes by the bias: through the product it would be −inf · 0.
        empty = student == -INF
        leaves = [
            torch.ones(1, 1, dtype=dtype, requires_grad=True),
            student.masked_fill(empty, 0.0)[:, None].requires_grad_(),
            torch.zeros(v, dtype=dtype).masked_fill(empty, -INF).requires_grad_(),
        ]
        out = fused_linear_kd(
            *leaves[:2],
            target,
            bias=leaves[2],
            labels=torch.tensor([data.draw(st.integers(0, v - 1))]),
            ce_weight=data.draw(st.sampled_from([0.0, 0.5])),
            divergence=divergence,
            temperature=temperature,
            entropy_gate=data.draw(st.sampled_from([None, 1.0])),
        )
        gradients = torch.autograd.grad(out.loss, leaves)
        for x in (out.loss, out.kd, out.ce, *gradients):
            assert torch.isfinite(x).all(), (student, teacher, out, gradients)
        assert out.kd >= -1e-5 and 0 <= out.ce <= -LOG_FLOOR

    check()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_never_negative_and_zero_when_equal(divergence):
    @settings(bounded, max_examples=30)
    @given(st.integers(0, 2**31), st.integers(2, 50), st.sampled_from([0.01, 1.0, 10.0]), st.sampled_from([1.0, 2.5]))
    def check(seed, v, size, temperature):
        generator = torch.Generator().manual_seed(seed)
        z, teacher = size * torch.randn(2, 4, v, generator=generator)
        options = {"divergence": divergence, "temperature": temperature}
        rounding = 1e-6 * temperature**2
        assert fused_linear_kd(z, torch.eye(v), DenseTarget(logits=teacher), **options).kd.min() >= -rounding
        z.requires_grad_()
        out = fused_linear_kd(z, torch.eye(v), DenseTarget(logits=z.detach()), **options)
        out.loss.backward()
        assert out.kd.abs().max() <= rounding and z.grad.abs().max() <= rounding

    check()


@pytest.mark.parametrize("kind", ["dense logits", "top-k"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_adding_a_constant_to_all_logits_changes_nothing(divergence, kind):
    """Also in float32 and with a large constant: the maximum must leave before the logarithm of the sum is taken off."""
    generator = torch.Generator().manual_seed(9)
    z, teacher = (
        torch.randint(-128, 129, (2, 16, 20), generator=generator) / 32
    )  # exact in float32 with the constant too
    labels = torch.randint(20, (16,), generator=generator)
    found = []
    for constant in (0.0, 4096.0, -8192.0):
        logp = teacher.log_softmax(-1)
        top = logp.topk(5)
        rest = logp.scatter(-1, top.indices, -INF).logsumexp(-1)
        target = (
            TopKTarget(top.indices, top.values, rest) if kind == "top-k" else DenseTarget(logits=teacher - constant)
        )
        hidden = (z + constant).requires_grad_()
        out = fused_linear_kd(hidden, torch.eye(20), target, labels=labels, ce_weight=1.0, divergence=divergence)
        out.loss.backward()
        found.append((out.kd, out.ce, hidden.grad))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_empty_on_both_sides_where_subnormals_are_flushed(divergence):
    """An id without mass on both sides costs 0; its mixture's floor must not itself be flushed to 0."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        bias = torch.tensor([0.0, -INF, 0.5]).requires_grad_()
        target = DenseTarget(logits=torch.tensor([[1.0, -INF, 0.0]]))
        out = fused_linear_kd(torch.ones(1, 1), torch.zeros(3, 1), target, bias=bias, divergence=divergence)
        out.loss.backward()
    finally:
        torch.set_flush_denormal(False)
    assert out.loss > 0 and torch.isfinite(out.loss) and torch.isfinite(bias.grad).all()


def test_mean_of_sampled_targets_is_the_cross_entropy():
    """Over many draws, to within five standard errors, which the draws' own distribution gives; gradient as well."""
    generator = torch.Generator().manual_seed(6)
    v, draws, rows = 7, 50, 4000
    z, teacher = torch.randn(2, v, dtype=torch.float64, generator=generator)
    p, logq = teacher.softmax(-1), z.log_softmax(-1)
    ids = torch.multinomial(p, rows * draws, replacement=True, generator=generator).view(rows, draws)
    hidden = z.expand(rows, v).clone().requires_grad_()
    target = SampledTarget(ids, torch.full((rows, draws), 1 / draws, dtype=torch.float64))
    out = fused_linear_kd(hidden, torch.eye(v, dtype=torch.float64), target)
    out.loss.backward()
    cross_entropy = -(p * logq).sum()
    variance = (p * (logq + cross_entropy) ** 2).sum() / draws  # of one row's estimate
    assert (out.kd.mean() - cross_entropy).abs() <= 5 * (variance / rows).sqrt()
    assert out.kd.var().item() == pytest.approx(variance.item(), rel=0.15)  # so the bound above is not loose
    error = (p * (1 - p) / draws / rows).sqrt()
    assert ((hidden.grad.mean(0) - (logq.exp() - p)).abs() <= 5 * error).all()


# Memory


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive; the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._known.add(x.untyped_storage())
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def extra_memory(rows: int, kind: str, v: int = 1000, chunk_rows: int = 16) -> int:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    target = {
        "dense hidden": DenseTarget(torch.randn(rows, 4), torch.randn(v, 4)),
        "dense logits": DenseTarget(logits=torch.randn(rows, v)),
        "top-k": TopKTarget(torch.arange(5).repeat(rows, 1), torch.full((rows, 5), -3.0), torch.full((rows,), -1.0)),
        "sampled": SampledTarget(torch.arange(5).repeat(rows, 1), torch.full((rows, 5), 0.2)),
    }[kind]
    labels = torch.zeros(rows, dtype=torch.int64)
    with Live() as live:
        fused_linear_kd(hidden, weight, target, labels=labels, ce_weight=0.5, chunk_rows=chunk_rows)
    return live.most


@pytest.mark.parametrize(("kind", "buffers"), [("dense hidden", 5), ("dense logits", 5), ("top-k", 2), ("sampled", 3)])
def test_peak_memory_does_not_grow_with_rows(kind, buffers):
    """Buffers of [chunk, V]: student's logits and softmax; a dense teacher's two and a spare one. (Here a block is as large
    as a chunk; in a real vocabulary only the two logits are.) Beside them the head's gradient, and a few numbers a row."""
    few, many = extra_memory(256, kind), extra_memory(512, kind)
    chunk, head, a_row = 16 * 1000 * 4, 1000 * 4 * 4, 4 * 4 + 3 * 4  # a row: gradient of hidden; row_weight, kd, ce
    assert many - few <= 256 * (a_row + 8)
    assert many < 1.1 * few
    assert few <= buffers * chunk + head + 256 * (a_row + 8) + 16 * 1024  # small vectors of one chunk
    assert few < 512 * 1000 * 4 / 4  # a quarter of the logits alone, of which the twin has several


def test_the_memory_count_sees_full_logits():
    hidden, weight = torch.randn(256, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Live() as live:
        (hidden @ weight.t()).log_softmax(-1).exp().sum().backward()
    assert live.most >= 3 * 256 * 1000 * 4


# Refusals


class NoWork(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran before the refusal")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


ids, whole = meta(3, 2, dtype=torch.int64), DenseTarget(meta(3, 5), meta(9, 5))
top_k = TopKTarget(ids, meta(3, 2), meta(3))
sampled = SampledTarget(ids, meta(3, 2))
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"divergence": "kl"}, "unknown divergence 'kl'; there are forward_kl, "),
    *(({"temperature": t}, "temperature must be above 0 and finite") for t in (0.0, -1.0, INF, math.nan)),
    *(({"beta": b}, "beta must be between 0 and 1") for b in (-0.1, 1.1, math.nan)),
    *(({"alpha": a}, "alpha must be between 0 and 1") for a in (0.0, 1.0, math.nan)),
    ({"softcap": 0.0}, "^softcap must be above 0, not 0.0"),
    ({"entropy_gate": 0.0}, "entropy_gate must be above 0"),
    ({"chunk_rows": -1}, "chunk_rows must be at least 1"),
    ({"hidden": meta(3, 1, 4)}, r"hidden \[3, 1, 4\] and weight \[9, 4\] must be \[N, H\] and \[V, H\]"),
    ({"weight": meta(9, 5)}, r"hidden \[3, 4\] and weight \[9, 5\] must be"),
    ({"weight": meta(0, 4)}, "weight has no columns of the vocabulary"),
    ({"hidden": meta(3, 4, dtype=torch.int64)}, "hidden and weight must be floating point, not torch.int64"),
    ({"bias": meta(8)}, r"^bias \[8\] of torch.float32 must be \[9\]"),
    ({"ce_weight": 0.5}, "ce_weight needs labels"),
    ({"labels": meta(4, dtype=torch.int64)}, r"labels \[4\] of torch.int64 must be \[3\]"),
    ({"labels": meta(3, dtype=torch.int32)}, r"labels \[3\] of torch.int32 must be \[3\] of torch.int64"),
    ({"row_weight": meta(3, 1)}, r"row_weight \[3, 1\] of torch.float32 must be \[3\]"),
    ({"row_weight": meta(3, dtype=torch.bool)}, r"row_weight \[3\] of torch.bool must be \[3\] of floating point"),
    ({"target": [(1.0, "a teacher")]}, "str is not a Target: DenseTarget"),
    ({"target": DenseTarget(logits=meta(3, 1, 9))}, r"logits \[3, 1, 9\] of torch.float32 must be \[3, 9\]"),
    (
        {"target": DenseTarget(logits=meta(3, 9, dtype=torch.int32))},
        r"logits \[3, 9\] of torch.int32 must be \[3, 9\] of floating point",
    ),
    ({"target": DenseTarget(logits=meta(2, 9))}, r"the teacher's logits \[2, 9\] of torch.float32 must be \[3, 9\]"),
    (
        {"target": DenseTarget(logits=meta(3, 10))},
        "the teacher has 10 ids and the student's head 9: narrow the teacher",
    ),
    ({"target": DenseTarget(meta(3, 5), meta(9, 6))}, r"the teacher's hidden \[3, 5\] and weight \[9, 6\] must be"),
    ({"target": DenseTarget(meta(3, 5), meta(9, 5), bias=meta(8))}, r"the teacher's bias \[8\] of .* must be \[9\]"),
    ({"target": DenseTarget(meta(3, 5), meta(9, 5), softcap=-1.0)}, "the teacher's softcap must be above 0"),
    (
        {"target": replace(top_k, ids=ids[:, :0], logprobs=meta(3, 0))},
        r"ids \[3, 0\] of torch.int64 must be \[3, K\] of torch.int64, with K at least 1",
    ),
    ({"target": replace(top_k, logprobs=meta(3, 3))}, r"target logprobs \[3, 3\] of torch.float32 must be \[3, 2\]"),
    (
        {"target": replace(top_k, ids=meta(3, 2, dtype=torch.int32))},
        r"target ids \[3, 2\] of torch.int32 must be \[3, K\] of torch.int64",
    ),
    (
        {"target": replace(top_k, logprobs=ids)},
        r"target logprobs \[3, 2\] of torch.int64 must be \[3, 2\] of floating point",
    ),
    ({"target": replace(top_k, tail=meta(3, 1))}, r"target tail \[3, 1\] of torch.float32 must be \[3\]"),
    ({"target": replace(top_k, tail=meta(3, dtype=torch.int64))}, r"target tail \[3\] of torch.int64 must be \[3\]"),
    ({"target": replace(sampled, weights=meta(3, 1))}, r"target weights \[3, 1\] of torch.float32 must be \[3, 2\]"),
    *(
        ({"target": sampled, "divergence": d}, f"sampled targets are unbiased for forward_kl only, not for {d}")
        for d in DIVERGENCES
        if d != "forward_kl"
    ),
]


@pytest.mark.parametrize(("change", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_refused_before_any_work(change, says):
    """On the meta device there is no value to read, and no operation runs at all."""
    call = {"hidden": meta(3, 4), "weight": meta(9, 4), "target": whole}
    with NoWork(), pytest.raises(ValueError, match=says):
        fused_linear_kd(**{**call, **change})


@pytest.mark.parametrize(
    ("sizes", "widths", "whole", "says"),
    [
        ([19, 18], [17, 16], None, r"\[17, 16\] and the student's into \[19, 18\]: rank 0"),
        ([19, 18], [19, 19], None, "rank 1"),
        ([19, 18], [19, 18], 38, "the teacher has 38 ids and the student's head 37"),
    ],
)
def test_slices_that_do_not_meet_are_refused(sizes, widths, whole, says):
    with pytest.raises(ValueError, match=says):
        check_slices(sizes, widths, whole)
    check_slices([19, 18], [19, 3])
    check_slices([10, 10, 10], [10, 4, 0], whole=14)
