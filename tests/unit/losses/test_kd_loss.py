"""KDLoss against its naive twin (log-softmax and autograd), against values worked out by hand, and on input that is wrong."""

import itertools
import math

import pytest
import torch
from test_fused import naive_divergence

from potstill.losses import DIVERGENCES, KDLoss, kd


def naive(student, teacher, labels, divisor=None, *, divergence="forward_kl", t=1.0, ignore=-100, beta=0.5, alpha=0.1):
    """By the definition, for autograd, on the supervised rows only."""
    keep = labels.reshape(-1) != ignore
    logq, logp = ((x.reshape(-1, x.shape[-1])[keep] / t).log_softmax(-1) for x in (student, teacher.detach()))
    total = naive_divergence(divergence, logp, logq, beta, alpha).sum() * (t if divergence == "tvd" else t * t)
    return total / (keep.sum() if divisor is None else divisor)


def value_and_gradient(loss, student):
    (gradient,) = torch.autograd.grad(3 * loss, student)
    return loss.detach(), gradient


@pytest.fixture(params=[True, False], ids=["chosen rows", "all rows"])
def either_way(request, monkeypatch):
    """Rows are chosen by the mask on a CPU, and all gone through elsewhere: both ways are tried here."""
    monkeypatch.setattr(kd, "_reading_is_free", lambda mask: request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cases_worked_out_by_hand(dtype, either_way):
    student = torch.tensor([[1, 0], [0.5, -0.5], [2, -1]], dtype=dtype)
    teacher = torch.tensor([[0.8, -0.2], [0.4, -0.4], [1.5, -0.5]], dtype=dtype)
    assert KDLoss()(student, teacher, torch.tensor([0, -100, 1])).item() == pytest.approx(0.020431, abs=1e-6)
    student = torch.tensor([[0.3, 0.7], [1, -1]], dtype=dtype)
    teacher = torch.tensor([[0.2, 0.8], [0.9, -0.9]], dtype=dtype)
    loss = KDLoss()(student, teacher, torch.tensor([1, 0]), num_batch_labels=10)
    assert loss.item() == pytest.approx(0.00069792, abs=1e-8)


GOLDEN = {  # at T = 1 and T = 2
    ("forward_kl", 0.5): (0.026484276591519, 0.045112829148552),
    ("reverse_kl", 0.5): (0.021788106387114, 0.041105244251808),
    ("jsd", 0.1): (0.002320095375694, 0.004016445430922),
    ("jsd", 0.5): (0.005905769818504, 0.010724101742315),
    ("jsd", 0.9): (0.001989396359730, 0.003729253294078),
    ("skew_kl", 0.5): (0.020344414449851, 0.035764172018633),
    ("skew_reverse_kl", 0.5): (0.018169398393681, 0.033836376129909),
    ("tvd", 0.5): (0.075297651352860, 0.113086025078979),
}


@pytest.mark.parametrize(("name", "beta"), GOLDEN)
def test_golden_rows(name, beta):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        student = torch.tensor([[2, 0.5, -1], [0.1, 0.2, 0.3]], dtype=dtype)
        teacher = torch.tensor([[1.5, 0, -0.5], [0.2, -0.1, 0]], dtype=dtype)
        for t, golden in zip((1.0, 2.0), GOLDEN[name, beta], strict=True):
            loss = KDLoss(temperature=t, divergence=name, beta=beta)(student, teacher, torch.tensor([0, 1]))
            assert loss.item() == pytest.approx(golden, abs=tolerance)


CASES = list(itertools.product(DIVERGENCES, [1.0, 2.5], [0, 1, 3]))


@pytest.mark.parametrize(("name", "t", "chunk"), CASES)
def test_equals_the_naive_twin(name, t, chunk, either_way):
    generator = torch.Generator().manual_seed(3)
    whole, teacher = (torch.randn(2, 6, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 2:4] = 7
    settings = dict(divergence=name, beta=0.3, alpha=0.2)
    loss = KDLoss(ignore_index=7, temperature=t, chunk_size=chunk, **settings)
    for divisor in (None, 13, torch.tensor(13), torch.tensor([13.0])):
        student = whole.clone().requires_grad_()
        shifted = student[:, :-1], teacher[:, :-1]  # views that cannot be flattened
        ours = value_and_gradient(loss(*shifted, labels, divisor), student)
        exact = None if divisor is None else 13
        theirs = value_and_gradient(naive(*shifted, labels, exact, t=t, ignore=7, **settings), student)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    flat = loss(whole[:, :-1].reshape(-1, 11), teacher[:, :-1].reshape(-1, 11), labels.reshape(-1))
    torch.testing.assert_close(flat, loss(whole[:, :-1], teacher[:, :-1], labels))
    torch.testing.assert_close(flat, loss(whole[:, :-1], teacher[:, :-1].reshape(-1, 11), labels.reshape(-1).int()))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradcheck(name):
    torch.manual_seed(1)
    student, teacher = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 6).double()
    loss = KDLoss(temperature=1.7, divergence=name, beta=0.3, chunk_size=3)
    assert torch.autograd.gradcheck(lambda z: loss(z, teacher, torch.tensor([0, -100, 1, 2])), (student,))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_float32(name, dtype):
    torch.manual_seed(2)
    student, teacher = (torch.randn(9, 33).to(dtype) for _ in range(2))
    labels = torch.tensor([1, -100, *range(7)])
    exact = student.double().requires_grad_()
    theirs = value_and_gradient(naive(exact, teacher.double(), labels, t=2.0, divergence=name), exact)
    student.requires_grad_()
    ours = value_and_gradient(KDLoss(temperature=2.0, divergence=name)(student, teacher, labels), student)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == dtype
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-5, atol=1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # of the gradient, when it is stored
    torch.testing.assert_close(ours[1].double(), theirs[1], rtol=rounding, atol=1e-6)


def test_without_upcast_the_temperature_divides_in_the_logits_own_type():
    torch.manual_seed(5)
    student, teacher, labels = torch.randn(5, 17).bfloat16(), torch.randn(5, 17).bfloat16(), torch.zeros(5).long()
    loss = KDLoss(temperature=3.0, fp32_upcast=False)(student, teacher, labels)
    rounded = 9 * naive((student / 3).double(), (teacher / 3).double(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), rounded, rtol=1e-5, atol=1e-7)
    assert loss != KDLoss(temperature=3.0)(student, teacher, labels)
    at_one = [KDLoss(fp32_upcast=upcast)(student, teacher, labels) for upcast in (True, False)]
    assert at_one[0] == at_one[1]


@pytest.mark.parametrize("divisor", [None, 0, 8])
def test_all_masked_is_a_differentiable_zero(divisor, either_way):
    student = torch.full((2, 3, 5), math.nan).requires_grad_()
    loss = KDLoss()(student, torch.randn(2, 3, 5), torch.full((2, 3), -100), divisor)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(student.grad, torch.zeros(2, 3, 5))
    empty = torch.randn(0, 5, requires_grad=True)
    KDLoss()(empty, torch.randn(0, 5), torch.zeros(0).long(), divisor).backward()
    assert empty.grad.shape == (0, 5)


def test_what_is_masked_has_no_part(either_way):
    torch.manual_seed(6)
    student, teacher, labels = torch.randn(4, 5), torch.randn(4, 5), torch.tensor([1, -100, 2, -100])
    clean = KDLoss()(student, teacher, labels)
    student[1], student[3], teacher[1], teacher[3] = math.nan, math.inf, -math.inf, math.nan
    student.requires_grad_()
    loss = KDLoss()(student, teacher, labels)
    loss.backward()
    torch.testing.assert_close(loss, clean)
    assert student.grad[[1, 3]].abs().max() == 0.0 and student.grad.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("t", [1.0, 3.0])
def test_no_mass_on_both_sides(name, t):
    """Ids of −inf on both sides are as if they were not there; on one side only, value and gradient stay finite."""
    torch.manual_seed(7)
    student, teacher, labels = torch.randn(3, 6).double(), torch.randn(3, 6).double(), torch.tensor([0, 1, 2])
    fewer = student[:, :4].clone().requires_grad_()
    loss = KDLoss(temperature=t, divergence=name)
    exact = value_and_gradient(loss(fewer, teacher[:, :4], labels), fewer)
    student[:, 4:] = teacher[:, 4:] = -math.inf
    student.requires_grad_()
    ours = value_and_gradient(loss(student, teacher, labels), student)
    torch.testing.assert_close(ours[0], exact[0])
    torch.testing.assert_close(ours[1][:, :4], exact[1])
    assert ours[1][:, 4:].abs().max() == 0.0
    one_side = torch.randn(3, 6).double().requires_grad_()
    value, gradient = value_and_gradient(loss(one_side, teacher, labels), one_side)
    assert value.isfinite() and gradient.isfinite().all()


def test_the_teacher_gets_no_gradient_and_nothing_is_overwritten():
    student, teacher = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    before = student.detach().clone(), teacher.detach().clone()
    KDLoss(temperature=2.0, fp32_upcast=False)(student, teacher, torch.tensor([0, 1, 2])).backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


def test_no_gradient_is_made_where_none_is_wanted():
    labels, teacher = torch.tensor([0, 1, 2]), torch.randn(3, 4)
    assert not KDLoss()(torch.randn(3, 4), teacher, labels).requires_grad
    with torch.no_grad():
        assert not KDLoss()(torch.randn(3, 4, requires_grad=True), teacher, labels).requires_grad


def test_backward_more_than_once():
    student = torch.randn(3, 4, requires_grad=True)
    loss = KDLoss()(student, torch.randn(3, 4), torch.tensor([0, 1, 2]))
    (first,) = torch.autograd.grad(loss, student, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * loss, student, retain_graph=True)
    (last,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(twice, 2 * first)
    torch.testing.assert_close(last, first)
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, student)


def test_autocast_does_not_narrow_it():
    student, teacher, labels = torch.randn(3, 40), torch.randn(3, 40), torch.tensor([0, 1, 2])
    plain = KDLoss(temperature=2.0)(student, teacher, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert KDLoss(temperature=2.0)(student, teacher, labels) == plain


def test_settings_may_be_changed_between_calls():
    loss, arguments = KDLoss(), (torch.randn(2, 4), torch.randn(2, 4), torch.tensor([0, 1]))
    loss.temperature = 2.0
    assert loss(*arguments) == KDLoss(temperature=2.0)(*arguments)
    loss.temperature = 0.0
    with pytest.raises(ValueError, match="temperature"):
        loss(*arguments)
    assert not list(loss.parameters()) and not loss.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(divergence="kl"), "unknown divergence 'kl'"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(beta=1.5), "beta"),
        (dict(alpha=0.0), "alpha"),
        (dict(chunk_size=-1), "chunk_size"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        KDLoss(**settings)


Z, Y = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("student", "teacher", "labels", "divisor", "message"),
    [
        (Z[0, 0], Z, Y, None, "student_logits"),
        (Z, Z[:, :2], Y, None, "teacher_logits has positions"),
        (Z, Z, Y[:, :2], None, "labels has positions"),
        (Z, Z, Y.t(), None, "labels has positions"),
        (Z, Z[..., :4], Y, None, "teacher_logits has 4 ids and student_logits 5"),
        (Z[..., :0], Z[..., :0], Y, None, "ids"),
        (Z.long(), Z, Y, None, "student_logits must be floating point"),
        (Z, Z.long(), Y, None, "teacher_logits must be floating point"),
        (Z, Z, Y.double(), None, "labels must be integers"),
        (Z, Z, Y.bool(), None, "labels must be integers"),
        (Z, Z.to("meta"), Y, None, "teacher_logits is on meta"),
        (Z, Z, Y, -1, "num_batch_labels"),
        (Z, Z, Y, torch.ones(2), "num_batch_labels"),
    ],
)
def test_tensors_that_are_refused(student, teacher, labels, divisor, message):
    with pytest.raises(ValueError, match=message):
        KDLoss()(student, teacher, labels, divisor)


def test_memory_is_one_copy_and_blocks(monkeypatch):
    """Of tensors as large as the logits, one is made: the gradient, which is scaled where it is."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Large(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            owned = isinstance(out, torch.Tensor) and not any(
                isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
                for a in (*args, *(kwargs or {}).values())
            )
            self.made += owned and out.numel() >= 400 * 50
            return out

    whole = torch.randn(4, 101, 50, requires_grad=True)
    student, teacher, labels = whole[:, :-1], torch.randn(4, 101, 50)[:, :-1], torch.zeros(4, 100).long()
    with Large() as large:
        loss = KDLoss(temperature=2.0, chunk_size=16)(student, teacher, labels)
        (gradient,) = torch.autograd.grad(loss / 3, student)
    assert large.made == 1 and gradient.shape == student.shape
