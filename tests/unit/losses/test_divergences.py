"""Golden numbers of the divergences, worked out by hand and in other frameworks; and what happens at zero mass."""

import pytest
import torch

from potstill.losses import DIVERGENCES, DenseTarget, SampledTarget, TopKTarget, fused_linear_kd

STUDENT = [[2.0, 0.5, -1.0], [0.1, 0.2, 0.3]]
TEACHER = [[1.5, 0.0, -0.5], [0.2, -0.1, 0.0]]

# name, beta, mean of the two rows at T = 1 and at T = 2 (T², for tvd T, included)
GOLDEN = [
    ("forward_kl", 0.5, 0.026484276591519, 0.045112829148552),
    ("reverse_kl", 0.5, 0.021788106387114, 0.041105244251808),
    ("jsd", 0.1, 0.002320095375694, 0.004016445430922),
    ("jsd", 0.5, 0.005905769818504, 0.010724101742315),
    ("jsd", 0.9, 0.001989396359730, 0.003729253294078),
    ("jsd", 0.0, 0.026484276591519, 0.045112829148552),
    ("jsd", 1.0, 0.021788106387114, 0.041105244251808),
    ("skew_kl", 0.5, 0.020344414449851, 0.035764172018633),
    ("skew_reverse_kl", 0.5, 0.018169398393681, 0.033836376129909),
    ("tvd", 0.5, 0.075297651352860, 0.113086025078979),
]


def kd(student, teacher, dtype=torch.float64, **options):
    """Per-row values, the logits entering through an identity head."""
    logits = torch.as_tensor(student, dtype=dtype)
    target = DenseTarget(logits=torch.as_tensor(teacher, dtype=dtype)) if isinstance(teacher, list) else teacher
    return fused_linear_kd(logits, torch.eye(logits.shape[1], dtype=dtype), target, **options).kd


@pytest.mark.parametrize(("name", "beta", "cold", "warm"), GOLDEN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_golden_rows(name, beta, cold, warm, dtype, tolerance):
    for temperature, expected in ((1.0, cold), (2.0, warm)):
        value = kd(STUDENT, TEACHER, dtype, divergence=name, beta=beta, temperature=temperature).mean()
        assert value.item() == pytest.approx(expected, abs=tolerance)


def test_golden_top_1_and_rest():
    logp = torch.tensor(TEACHER, dtype=torch.float64).log_softmax(-1)
    top = logp.topk(1)
    tail = torch.log1p(-top.values.exp()).squeeze(-1)
    target = TopKTarget(top.indices, top.values, tail)
    assert kd(STUDENT, target).tolist() == pytest.approx([0.006904795070787, 0.018389320692710], abs=1e-10)
    reverse = kd(STUDENT, target, divergence="reverse_kl")
    assert reverse.tolist() == pytest.approx([0.006584508403398, 0.017644370472925], abs=1e-10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_when_equal_and_never_negative(name):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, 11, dtype=torch.float64, generator=generator) * 4
    assert kd(a, DenseTarget(logits=a), divergence=name).abs().max() < 1e-12
    assert kd(a, DenseTarget(logits=b), divergence=name).min() > 1e-4


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_all_entries_of_a_truncated_teacher_are_the_dense_teacher(name, temperature):
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 8, 7, dtype=torch.float64, generator=generator) * 3
    logp = (teacher / temperature).log_softmax(-1)
    whole = logp.topk(7)
    target = TopKTarget(whole.indices, whole.values, torch.full((8,), float("-inf"), dtype=torch.float64))
    options = {"divergence": name, "temperature": temperature}
    for hidden_target in (target, DenseTarget(logits=teacher)):
        hidden = student.clone().requires_grad_()
        out = fused_linear_kd(hidden, torch.eye(7, dtype=torch.float64), hidden_target, **options)
        out.loss.backward()
        if hidden_target is target:
            value, gradient = out.kd, hidden.grad
    torch.testing.assert_close(value, out.kd, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-9, atol=1e-12)


def test_mass_outside_the_top_k_is_not_free():
    """Renormalised over k this loss would be 0: the student has all its mass elsewhere."""
    teacher, student = torch.zeros(1, 1000), torch.zeros(1, 1000)
    teacher[0, :4], student[0, 500:] = 7.0, 3.0
    logp = teacher.log_softmax(-1)
    top = logp.topk(4)
    rest = logp[:, 4:].logsumexp(-1)
    assert kd(student, TopKTarget(top.indices, top.values, rest), torch.float32).item() > 5


def test_student_sure_of_the_kept_ids_keeps_its_rest():
    """1 − Σ would be 0 in float32 here; the rest's log-mass is about −30."""
    student = torch.full((1, 100), -30.0 - torch.tensor(99.0).log().item())
    student[0, 0] = 0.0
    target = TopKTarget(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), torch.tensor([0.5]).log())
    value = kd(student, target, torch.float32)
    assert value.item() == pytest.approx(0.5 * -0.693147 * 2 + 0.5 * 30, abs=1e-3)


def test_sampled_target_is_unbiased_cross_entropy():
    """The mean over every possible single draw, weighted by its probability, is the cross-entropy; so is the gradient."""
    teacher = torch.tensor([[0.5, 1.0, -1.0]], dtype=torch.float64)
    student = torch.tensor([[1.0, -0.5, 0.2]], dtype=torch.float64)
    p = teacher.softmax(-1)[0]
    eye = torch.eye(3, dtype=torch.float64)
    value, gradient = 0.0, torch.zeros(1, 3, dtype=torch.float64)
    for token in range(3):
        hidden = student.clone().requires_grad_()
        target = SampledTarget(torch.tensor([[token]]), torch.ones(1, 1, dtype=torch.float64))
        out = fused_linear_kd(hidden, eye, target)
        out.loss.backward()
        value += p[token] * out.kd.item()
        gradient += p[token] * hidden.grad
    assert value.item() == pytest.approx(-(p * student.log_softmax(-1)[0]).sum().item(), abs=1e-12)
    torch.testing.assert_close(gradient, student.softmax(-1) - p)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_extremes_stay_finite(name):
    inf = float("inf")
    rows = {
        "both sides empty": ([[1.0, -inf, 0.0]], [[0.5, -inf, 0.0]]),
        "teacher one-hot": ([[1.0, 2.0, 0.0]], [[0.0, -inf, -inf]]),
        "student empty where the teacher is not": ([[1.0, -inf, 0.0]], [[0.0, 0.0, 0.0]]),
        "huge": ([[1e4, -1e4, 0.0]], [[-1e4, 1e4, 0.0]]),
    }
    for what, (student, teacher) in rows.items():
        hidden = torch.tensor(student).nan_to_num(neginf=-1e30).requires_grad_()
        out = fused_linear_kd(hidden, torch.eye(3), DenseTarget(logits=torch.tensor(teacher)), divergence=name)
        out.loss.backward()
        assert torch.isfinite(out.kd).all() and torch.isfinite(hidden.grad).all(), what
    both = kd([[1.0, -1e30, 0.0]], [[0.5, -inf, 0.0]], divergence=name)
    only = kd([[1.0, 0.0]], [[0.5, 0.0]], divergence=name)
    assert both.item() == pytest.approx(only.item(), abs=1e-9)  # an id empty on both sides takes no part
