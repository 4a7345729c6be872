"""Reverse KL by the tokens that the student drew: by hand, against autograd, against the exact gradient, through models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from taught import batches_of, builder, data_of, relative, step, targets_of, write_files
from tiny import CPU, LLAMA, batch_of, example, examples, tiny
from torch import Tensor, nn

from potstill.config import LossConfig, Recipe, StudentConfig, TeacherConfig
from potstill.losses import (
    DenseTarget,
    SampledTarget,
    TokenLogprobsTarget,
    TopKTarget,
    chosen_logprobs,
    policy_gradient_kl,
)
from potstill.losses.divergences import LOG_FLOOR
from potstill.models import load_student, load_teacher, shared_ids
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.combine import compute_targets
from potstill.teachers.confidence import row_confidence
from potstill.teachers.live import live_teacher
from potstill.teachers.open import open_teachers
from potstill.teachers.teacher import Teacher
from potstill.training.metrics import SUMS, means
from potstill.types import Batch, HiddenTarget, PotstillError, Rows

# Halves and quarters: the loss's weights are float32, and these are exact in it.
KNOBS = LossSettings("policy_gradient_kl", 0.5, 0.1, 1.0, 0.5, 0.25)
ALONE = replace(KNOBS, kd_weight=1.0, ce_weight=0.0)
NAN = math.nan


class Table(nn.Module):
    """A student that is a table of logits [N, V], one row for each row of the loss."""

    context = None

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.logits = nn.Parameter(logits.double())

    def hidden(self, batch: Batch, rows: Tensor) -> Tensor:
        return self.model.logits[rows]

    def at_rows(self, hidden: Tensor) -> HiddenTarget:
        return DenseTarget(hidden, torch.eye(hidden.shape[1], dtype=hidden.dtype))


def batch_with(labels: Tensor, behaviour: Tensor | None, lengths: list[int]) -> Batch:
    """Rows of documents with so many supervised tokens."""
    made, at = [], 0
    for number, length in enumerate(lengths):
        ids = np.array([number, *labels[at : at + length].tolist()], dtype=np.int32)
        made.append(example(ids))
        at += length
    rows = Rows(torch.arange(len(labels)), torch.arange(len(labels)), labels, behaviour)
    return replace(batch_of(*made), rows=rows)


def table_step(logits: Tensor, batch: Batch, targets: Any, divisor: float = 1.0, knobs: LossSettings = ALONE):
    """Loss, gradient of the logits, and the sums by name."""
    module = StudentLoss(Table(logits))  # type: ignore[arg-type]
    loss, sums = module(batch, targets, divisor, knobs)
    loss.backward()
    return loss.item(), module.model.logits.grad, {name: sums[name].item() if name in sums else 0.0 for name in SUMS}


# --- by hand

Q = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
P = torch.tensor([0.25, 0.9, 0.4], dtype=torch.float64)  # of the labels
B = torch.tensor([0.5, 0.4, 0.2], dtype=torch.float64)  # ratios 1, 1.5 and 4
LABELS = torch.tensor([0, 1, 2])


def test_three_rows_by_hand():
    """A is −ln 2, ln 1.5 and −ln 2; the third ratio is clipped to 2, and has no gradient."""
    ln2, ln15 = math.log(2), math.log(1.5)
    loss, gradient, sums = table_step(
        Q.log(), batch_with(LABELS, B.log(), [2, 1]), [(1.0, TokenLogprobsTarget(P.log()))], divisor=4
    )
    assert loss == pytest.approx((ln2 - 1.5 * ln15 + 2 * ln2) / 4, abs=1e-12)
    wanted = [[0.5 * ln2, -0.25 * ln2, -0.25 * ln2], [0.3 * ln15, -0.6 * ln15, 0.3 * ln15], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(gradient, torch.tensor(wanted, dtype=torch.float64) / 4, rtol=0, atol=1e-12)
    assert sums["kd"] == pytest.approx(3 * ln2 - 1.5 * ln15, abs=1e-6)
    assert sums["ce"] == pytest.approx(-math.log(0.5 * 0.6 * 0.8), abs=1e-6)
    assert sums["on_policy_rows"] == 3 and sums["ratio_clipped"] == 1
    assert sums["ratio_mean"] == pytest.approx(6.5, abs=1e-5)
    assert sums["advantage"] == pytest.approx(ln15 - 2 * ln2, abs=1e-6)
    assert sums["sampling_logprob_gap"] == pytest.approx(math.log(1.5) + math.log(4), abs=1e-6)
    found, sampled = means(sums), means(dict.fromkeys(SUMS, 0.0))
    assert found["ratio_mean"] == pytest.approx(6.5 / 3, abs=1e-5) and found["ratio_clipped"] == pytest.approx(1 / 3)
    other = means({**sums, "policy_gradient_rows": 0.0})  # as with another divergence
    assert other.keys() - sampled.keys() == {"sampling_logprob_gap"}
    assert set(sampled) == {"kl", "teacher_entropy", "student_entropy", "agreement"}
    assert set(sampled.values()) == {None}


def test_a_discount_stays_in_its_document_by_hand():
    """A is −ln 2, ln 1.5, −ln 2; documents of two rows and of one."""
    score = policy_gradient_kl(Q.log()[range(3), LABELS], [(1.0, P.log())], B.log(), [2, 0, 1], discount=0.5)
    a = [-math.log(2) + 0.5 * math.log(1.5), math.log(1.5), -math.log(2)]
    torch.testing.assert_close(score.advantage, torch.tensor(a, dtype=torch.float64))
    torch.testing.assert_close(score.value, torch.tensor([-a[0], -1.5 * a[1], -2 * a[2]], dtype=torch.float64))
    torch.testing.assert_close(score.weight, torch.tensor([a[0], 1.5 * a[1], 0.0], dtype=torch.float64))
    assert score.clipped.tolist() == [False, False, True]


def test_a_ratio_at_the_clip_is_not_clipped():
    score = policy_gradient_kl(torch.zeros(1), [(1.0, -torch.ones(1))], torch.zeros(1), [1], ratio_clip=1.0)
    assert score.weight.item() == -1.0 and not score.clipped.any()


def test_extremes_are_finite():
    """A token the teacher cannot have said, one the student now cannot say, and one that was as good as never drawn."""
    logq, logb = torch.tensor([-1.0, -10_000.0, -0.1]), torch.tensor([-1.0, -1.0, -1e6])
    logp = torch.tensor([-math.inf, -1.0, -2.0])
    for discount in (0.9, 0.0):
        score = policy_gradient_kl(logq, [(1.0, logp)], logb, [3], discount=discount)
        assert all(part.isfinite().all() for part in (score.value, score.weight, score.advantage, score.ratio))
    assert (
        score.advantage[0] == LOG_FLOOR + 1 and score.weight[1] == 0 and score.clipped.tolist() == [False, False, True]
    )


# --- against autograd


def naive(logits, labels, behaviour, lengths, teachers, knobs, divisor):
    """By the definition: loops, whole logits, autograd through the ratio."""
    logq = logits.log_softmax(-1)[range(len(labels)), labels]
    total, start = logits.sum() * 0, 0
    for length in lengths:
        for i in range(start, start + length):
            ce = -logq[i]
            if math.isnan(behaviour[i]):
                total = total + knobs.ce_weight * ce
                continue
            advantage = 0.0
            for j in range(i, start + length):
                if math.isnan(behaviour[j]):
                    continue
                for share, logp in teachers:
                    weight = share if isinstance(share, float) else share[j]
                    advantage += weight * knobs.discount ** (j - i) * (logp[j] - logq[j].detach())
            ratio = (logq[i] - behaviour[i]).exp().clamp(max=knobs.ratio_clip)
            total = total - knobs.kd_weight * ratio * advantage
        start += length
    return total / divisor


def random_case():
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 0, 1, 9, 8]
    n, v = sum(lengths), 11
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    logits, labels = 1.5 * randn(n, v), torch.randint(v, (n,), generator=generator)
    behaviour = logits.log_softmax(-1)[range(n), labels] + 0.4 * randn(n)
    behaviour[[3, 5, 12, 13]] = NAN
    share = torch.rand(n, dtype=torch.float64, generator=generator)
    share[7] = 0.0
    teachers = [(0.5, randn(n, v).log_softmax(-1)), (share, randn(n, v).log_softmax(-1))]
    return logits, labels, behaviour, lengths, teachers


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("ratio_clip", [1.0, 1.2, 100.0])
@pytest.mark.parametrize("several", [False, True])
def test_equals_autograd(discount, ratio_clip, several):
    logits, labels, behaviour, lengths, teachers = random_case()
    teachers = teachers if several else [(1.0, teachers[0][1])]
    knobs = replace(KNOBS, discount=discount, ratio_clip=ratio_clip)
    chosen = [(share, logp[range(len(labels)), labels]) for share, logp in teachers]
    twin = logits.clone().requires_grad_()
    wanted = naive(twin, labels, behaviour, lengths, chosen, knobs, 16)
    wanted.backward()
    batch = batch_with(labels, behaviour, lengths)
    for targets in (
        [(share, TokenLogprobsTarget(logp)) for share, logp in chosen],
        [(share, DenseTarget(logits=3.0 + logp)) for share, logp in teachers],
    ):
        loss, gradient, sums = table_step(logits, batch, targets, 16, knobs)
        assert loss == pytest.approx(wanted.item(), abs=1e-10)
        torch.testing.assert_close(gradient, twin.grad, rtol=1e-9, atol=1e-12)
        assert (0 < sums["ratio_clipped"] < sums["on_policy_rows"] == 19) == (ratio_clip < 100)


@pytest.mark.parametrize("discount", [0.3, 0.9, 1.0])
def test_discounted_sums_of_long_documents(discount):
    """Doubling steps against one after the other."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 300, 2, 0, 129, 64, 7]
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    wanted, start = [], 0
    for length in lengths:
        sums, after = [], 0.0
        for value in reversed(values[start : start + length].tolist()):
            after = value + discount * after
            sums.append(after)
        wanted += sums[::-1]
        start += length
    zeros = torch.zeros_like(values)
    found = policy_gradient_kl(zeros, [(1.0, values)], zeros, lengths, discount=discount).advantage
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_its_mean_over_the_students_draws_is_reverse_kl():
    """Every token of the vocabulary, weighted by how likely it is drawn, gives value and gradient of KL(Q‖P)."""
    generator = torch.Generator().manual_seed(4)
    logits, teacher = (torch.randn(6, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    q, logp = logits.log_softmax(-1), teacher.log_softmax(-1)
    value, gradient = 0.0, torch.zeros_like(logits)
    for token in range(9):
        labels = torch.full((6,), token)
        batch = batch_with(labels, q[:, token], [4, 2])
        for row in range(6):  # one at a time, for its own weight
            share = torch.zeros(6, dtype=torch.float64)
            share[row] = q[row, token].exp()
            loss, one, _ = table_step(logits, batch, [(share, TokenLogprobsTarget(logp[:, token]))])
            value, gradient = value + loss, gradient + one
    exact = logits.clone().requires_grad_()
    kl = (exact.softmax(-1) * (exact.log_softmax(-1) - logp)).sum()
    kl.backward()
    assert value == pytest.approx(kl.item(), abs=1e-10)
    torch.testing.assert_close(gradient, exact.grad, rtol=0, atol=1e-10)


# --- cross-entropy on the student's own text


@pytest.mark.parametrize("divergence", ["forward_kl", "policy_gradient_kl"])
def test_no_cross_entropy_on_what_the_student_wrote(divergence):
    """It is measured over all rows, and learnt from where the student did not write."""
    logits, labels, behaviour, lengths, teachers = random_case()
    knobs = replace(KNOBS, divergence=divergence)
    twin, target = logits.clone().requires_grad_(), DenseTarget(logits=teachers[0][1])
    ce = F.cross_entropy(twin, labels, reduction="none")
    loss, gradient, sums = table_step(logits, batch_with(labels, behaviour, lengths), [(1.0, target)], 16, knobs)
    without = replace(knobs, ce_weight=0.0)
    kd, kd_gradient, _ = table_step(logits, batch_with(labels, behaviour, lengths), [(1.0, target)], 16, without)
    wanted = 0.25 * ce[behaviour.isnan()].sum() / 16
    wanted.backward()
    assert loss - kd == pytest.approx(wanted.item(), abs=1e-10) and wanted > 0.05
    torch.testing.assert_close(gradient - kd_gradient, twin.grad, rtol=0, atol=1e-10)
    assert sums["ce"] == pytest.approx(ce.sum().item(), rel=1e-6)
    gap = (-ce.detach() - behaviour).abs().nansum()
    assert sums["on_policy_rows"] == 19 and sums["sampling_logprob_gap"] == pytest.approx(gap.item(), rel=1e-5)


def test_without_draws_there_is_only_cross_entropy():
    """Text of the data set alone, or no teacher that is asked."""
    logits, labels, behaviour, lengths, teachers = random_case()
    ce = F.cross_entropy(logits, labels, reduction="none")
    target = [(1.0, DenseTarget(logits=teachers[0][1]))]
    loss, _, sums = table_step(logits, batch_with(labels, None, lengths), target, 16, KNOBS)
    assert loss == pytest.approx(0.25 * ce.sum().item() / 16, abs=1e-10) and sums["kd"] == sums["on_policy_rows"] == 0
    loss, _, sums = table_step(logits, batch_with(labels, behaviour, lengths), [], 16, KNOBS)
    assert (
        loss == pytest.approx(0.25 * ce[behaviour.isnan()].sum().item() / 16, abs=1e-10)
        and sums["on_policy_rows"] == 19
    )


def test_no_rows_give_a_differentiable_zero():
    empty = batch_with(torch.zeros(0).long(), torch.zeros(0), [0])
    logits = torch.zeros(0, 5)
    loss, gradient, _ = table_step(
        logits, empty, [(1.0, TokenLogprobsTarget(torch.zeros(0)))], 16, replace(KNOBS, discount=0.9)
    )
    assert loss == 0.0 and gradient.shape == (0, 5)


# --- what teachers say


def test_likelihoods_of_the_labels():
    logits, labels, *_ = random_case()
    wanted = logits.log_softmax(-1)[range(len(labels)), labels]
    torch.testing.assert_close(chosen_logprobs(DenseTarget(logits=logits), labels), wanted)
    narrow = chosen_logprobs(DenseTarget(logits=logits[:, :6]), labels)
    inside = labels < 6
    known = logits[:, :6].log_softmax(-1)[inside, labels[inside]]
    torch.testing.assert_close(narrow[inside], known)
    assert inside.any() and (narrow[~inside] == LOG_FLOOR).all() and not inside.all()


def test_autocast_leaves_the_teachers_likelihoods_alone():
    torch.manual_seed(0)
    target, labels = DenseTarget(torch.randn(7, 16), torch.randn(30, 16)), torch.randint(30, (7,))
    plain = chosen_logprobs(target, labels)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(chosen_logprobs(target, labels), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "target",
    [
        TopKTarget(torch.zeros(3, 1).long(), torch.zeros(3, 1), torch.zeros(3)),
        SampledTarget(torch.zeros(3, 1).long(), torch.ones(3, 1)),
    ],
)
def test_other_targets_are_refused(target):
    with pytest.raises(ValueError, match=f"a TokenLogprobsTarget or a DenseTarget, not a {type(target).__name__}"):
        chosen_logprobs(target, torch.zeros(3).long())


def test_confidence_of_likelihoods():
    target = TokenLogprobsTarget(torch.tensor([-1.0, -math.inf]))
    values, rows, counts = row_confidence(target, LABELS[:2], "ce")
    assert values.tolist() == [-1.0, LOG_FLOOR] and rows.tolist() == [0, 1] and counts.tolist() == [1.0, 1.0]
    assert row_confidence(target, LABELS[:2], "entropy") is None


# --- through models


def drawn(documents, student, seed=0):
    """The documents as if the student had written them, not long ago."""
    generator = np.random.default_rng(seed)
    written = []
    for document in documents:
        ids = torch.tensor(document.ids)[None].long()
        with torch.no_grad():
            logq = student.model(ids).logits[0].float().log_softmax(-1)
        behaviour = np.zeros(len(document.ids), np.float32)
        then = logq[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
        behaviour[1:] = then + 0.5 * generator.standard_normal(len(then))
        written.append(replace(document, behaviour=behaviour, writer="student"))
    return written


@pytest.fixture(scope="module")
def pair():
    student, teacher = tiny(0), tiny(1, hidden_size=48, num_hidden_layers=3)
    teacher.model.eval().requires_grad_(False)
    return student, live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "teacher")


@pytest.fixture(scope="module")
def documents(pair):
    return drawn(examples([9, 17, 4, 12, 21, 6, 15, 8]), pair[0])


def test_the_same_gradient_however_a_step_is_split(pair, documents):
    """1 × 8, 2 × 4, 8 × 1, and packed."""
    student, teacher = pair
    knobs = replace(KNOBS, discount=0.9, ratio_clip=1.5)
    splits = [
        [batch_of(*documents)],
        [batch_of(*documents[:4]), batch_of(*documents[4:])],
        [batch_of(document) for document in documents],
        [batch_of(documents[:3], documents[3:5], documents[5:])],
    ]
    (whole, wanted), *others = [step(student, b, [teacher.targets(one) for one in b], knobs) for b in splits]
    assert abs(whole) > 0.01
    for loss, gradients in others:
        assert loss == pytest.approx(whole, rel=1e-4)
        assert relative(gradients, wanted) < 1e-4


def test_a_live_teacher_and_its_likelihoods_are_the_same(pair, documents):
    student, teacher = pair
    batch = batch_of(*documents)
    with torch.no_grad():
        logits = teacher.source.language_model.model(batch.input_ids).logits.flatten(0, 1)[batch.rows.teacher]
    alone = TokenLogprobsTarget(logits.log_softmax(-1).gather(-1, batch.rows.labels[:, None])[:, 0])
    loss, gradients = step(student, [batch], [teacher.targets(batch)], KNOBS)
    expected, others = step(student, [batch], [alone], KNOBS)
    assert loss == pytest.approx(expected, rel=1e-4) and relative(gradients, others) < 1e-4


@pytest.fixture(scope="module")
def built(tiny_teacher, tmp_path_factory):
    data = data_of(write_files(tmp_path_factory.mktemp("data")))
    teacher = load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")
    return teacher, data, builder(teacher, data, tmp_path_factory)


SETTINGS = LossConfig(divergence="policy_gradient_kl")


STORES = [
    {"kind": "token_logprobs"},
    {"kind": "top_k", "k": 8},
    {"kind": "top_k", "k": 4, "temperatures": (2.0,)},
    {"kind": "hidden"},
]


@pytest.mark.parametrize("store", STORES, ids=str)
def test_a_cache_says_what_the_live_teacher_says(pair, built, store):
    """A likelihood is stored to 1/1024 nat."""
    student, (teacher, data, build) = pair[0], built
    batches = batches_of(data, student)[:2]
    batches = [batch_of(*drawn(batch.examples, student)) for batch in batches]
    live = live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "tiny")
    config = TeacherConfig(cache=str(build(**store)))
    (found,) = open_teachers([config], student, data, SETTINGS, CPU).teachers
    answers = targets_of(found, batches)
    exact = store["kind"] == "hidden"
    assert all(isinstance(target, HiddenTarget if exact else TokenLogprobsTarget) for target in answers)
    loss, gradients = step(student, batches, answers, ALONE)
    expected, wanted = step(student, batches, [live.targets(batch) for batch in batches], ALONE)
    assert loss == pytest.approx(expected, rel=1e-4 if exact else 1e-3)
    assert relative(gradients, wanted) < (1e-4 if exact else 2e-3)


def test_two_teachers_of_some_documents_each(pair, built):
    """Likelihoods of some documents, spread over all rows with weight 0 at the others."""
    student, (_, data, build) = pair[0], built
    batch = batch_of(*drawn(batches_of(data, student)[0].examples, student))
    sides = ["a" if i % 2 else "b" for i in range(len(batch.examples))]
    routed = replace(
        batch, examples=tuple(replace(e, columns={"side": s}) for e, s in zip(batch.examples, sides, strict=True))
    )
    config = TeacherConfig(cache=str(build(kind="token_logprobs")), weight=2.0)
    (whole,) = open_teachers([config], student, data, SETTINGS, CPU).teachers
    halves = [Teacher(whole.source, whole.view, whole.name, 2.0, {"side": side}) for side in ("a", "b")]
    both = compute_targets(halves, [half.prepare(routed) for half in halves], routed, SETTINGS)
    alone = compute_targets([whole], [whole.prepare(batch)], batch, SETTINGS)
    assert len(both) == 2 and all(isinstance(target, TokenLogprobsTarget) for _, target in both)
    loss, gradients = step(student, [routed], [both], KNOBS)
    expected, wanted = step(student, [batch], [alone], KNOBS)
    assert loss == pytest.approx(expected, rel=1e-5) and relative(gradients, wanted) < 1e-5


# --- refusals


@pytest.mark.parametrize(
    ("loss", "on_policy", "says"),
    [
        ({"temperature": 2.0}, 1, "at temperature 1: leave temperature out"),
        ({"temperature": {"start": 1.0, "end": 2.0}}, 1, "at temperature 1: leave temperature out"),
        ({"entropy_gate": 1.0}, 1, "entropy_gate needs the teacher's distribution"),
        ({"ratio_clip": 0.5}, 1, "greater than or equal to 1"),
        ({"discount": 1.5}, 1, "less than or equal to 1"),
        ({}, 0, r"set rollouts.on_policy_fraction to 1"),
    ],
)
def test_refused_by_the_recipe(loss, on_policy, says):
    keys = {
        "student": {"config": LLAMA, "tokenizer": "shipped:tokenizers/bytes-2k"},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "shipped:corpus/train.parquet"}]},
        "loss": {"divergence": "policy_gradient_kl", **loss},
        "rollouts": {"on_policy_fraction": on_policy},
        "train": {"steps": 1},
    }
    with pytest.raises(ValueError, match=says):
        Recipe.model_validate(keys)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    config = StudentConfig(config=LLAMA, tokenizer="shipped:tokenizers/pieces-1k")
    made, folder = load_student(config, CPU, 5), tmp_path_factory.mktemp("foreign")
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


def test_refused_teachers(pair, built, foreign, tiny_teacher, tmp_path):
    student, (_, data, build) = pair[0], built

    def refused(config: dict[str, Any], says: str, **loss: Any) -> None:
        settings = LossConfig(**{"divergence": "policy_gradient_kl", **loss})
        with pytest.raises(PotstillError, match=says):
            open_teachers([TeacherConfig(**config)], student, data, settings, CPU)

    refused({"cache": str(build(kind="sampled", num_samples=8))}, "use a cache of kind token_logprobs, top_k or hidden")
    new = {"model": str(tiny_teacher), "cache": str(tmp_path / "new"), "store": {"kind": "sampled"}}
    refused(new, "use a cache of kind token_logprobs, top_k or hidden")
    assert not (tmp_path / "new").exists()
    refused(
        {"model": foreign},
        "another tokenizer or a prompt of its own: use cross_tokenizer.method: span_likelihood with another divergence",
    )
    refused({"model": str(tiny_teacher), "context_column": "hint"}, "another tokenizer or a prompt of its own")
    refused(
        {"cache": str(build(kind="token_logprobs"))},
        "loss needs a distribution: use .* policy_gradient_kl",
        divergence="jsd",
    )
    refused(
        {"cache": str(build(kind="top_k", k=8))},
        "take teacher_weighting: ce, or kind hidden",
        teacher_weighting="entropy",
    )
    refused(
        {"cache": str(build(kind="token_logprobs"))}, "loss.combine_teachers is average", combine_teachers="average"
    )
    folder = build(kind="top_k", k=9)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "imported": {"layout": "l", "values": "v", "rest": "none"}})
    )
    refused({"cache": str(folder)}, "the cache was imported, and does not know how likely")
