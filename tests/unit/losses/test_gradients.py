"""The student and its loss as one module: the same gradient however the documents are laid out and split."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from tiny import batch_of, examples, tiny

from potstill.models import shared_ids
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.live import live_teacher

FORWARD = LossSettings("forward_kl", 0.5, 0.1, 2.0, 0.8, 0.3, repeat_weight=0.15)
DOCUMENTS = examples([9, 17, 4, 12, 21, 6, 15, 8])


@pytest.fixture(scope="module")
def pair():
    student, teacher = tiny(0), tiny(1, hidden_size=48, num_hidden_layers=3)
    teacher.model.eval().requires_grad_(False)
    return StudentLoss(student), live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "teacher")


def gradients(pair, micro_batches, knobs=FORWARD):
    """Loss, gradients and sums of a step over micro-batches."""
    module, teacher = pair
    module.zero_grad()
    tokens = sum(batch.supervised_tokens for batch in micro_batches)
    sums = Counter()
    for batch in micro_batches:
        loss, micro_sums = module(batch, [(1.0, teacher.targets(batch))], tokens, knobs)
        loss.backward()
        sums.update(micro_sums)
    return sums, {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(ours[1][name], gradient, rtol=2e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_micro_batches_1x8_2x4_8x1(pair, divergence):
    knobs = LossSettings(divergence, 0.5, 0.1, 2.0, 0.8, 0.3, repeat_weight=0.15)
    whole = gradients(pair, [batch_of(*DOCUMENTS)], knobs)
    assert_same(gradients(pair, [batch_of(*DOCUMENTS[:4]), batch_of(*DOCUMENTS[4:])], knobs), whole)
    assert_same(gradients(pair, [batch_of(document) for document in DOCUMENTS], knobs), whole)


def test_packed_equals_padded(pair):
    padded = gradients(pair, [batch_of(*DOCUMENTS)])
    packed = batch_of(DOCUMENTS[:3], DOCUMENTS[3:5], DOCUMENTS[5:])
    assert packed.packed and packed.input_ids.shape == (3, 33)
    assert_same(gradients(pair, [packed]), padded)


def test_chunked_hidden_state_loss_equals_plain_full_logits(pair):
    """The naive twin shares nothing with the engine: whole logits, shifting by slices, masks of -100, autograd."""
    module, teacher = pair
    ours = gradients(pair, [batch_of(*DOCUMENTS)])
    module.zero_grad()
    tokens, kd, ce, repeated = 0, 0.0, 0.0, 0.0
    for document in DOCUMENTS:
        ids = torch.tensor(document.ids)[None].long()
        labels = torch.where(torch.tensor(document.supervised), ids[0], -100)[1:]
        student_logits = module.model(ids).logits[0, :-1].float()
        teacher_logits = teacher.source.language_model.model(ids).logits[0, :-1].float()
        logp, logq = (teacher_logits / 2).log_softmax(-1), (student_logits / 2).log_softmax(-1)
        kd = kd + 4 * (logp.exp() * (logp - logq)).sum(-1)[labels != -100].sum()
        ce = ce + F.cross_entropy(student_logits, labels, ignore_index=-100, reduction="sum")
        repeated = repeated + F.cross_entropy(
            student_logits[labels != -100], ids[0, :-1][labels != -100], reduction="sum"
        )
        tokens += int((labels != -100).sum())
    loss = (0.8 * kd + 0.3 * ce + 0.15 * repeated) / tokens
    loss.backward()
    assert tokens == sum(d.supervised_tokens for d in DOCUMENTS)
    theirs = {name: p.grad.clone() for name, p in module.named_parameters()}
    sums = {"loss": loss.detach(), "kd": kd.detach(), "ce": ce.detach()}
    assert_same(({name: ours[0][name] for name in sums}, ours[1]), (sums, theirs))


def test_sliding_window_packed_equals_padded():
    """The mask we make for packed rows keeps the model's own window."""
    for kind, extra in (
        ("mistral", {}),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 5.0, "num_hidden_layers": 2}),
    ):
        student = tiny(0, model_type=kind, sliding_window=5, **extra)
        assert student.attention == "varlen"
        with torch.no_grad():
            padded, packed = batch_of(*DOCUMENTS[:3]), batch_of(DOCUMENTS[:3])
            a = student.hidden(padded, padded.rows.student)
            b = student.hidden(packed, packed.rows.student)
            own = [
                student.model.base_model(torch.tensor(d.ids)[None].long()).last_hidden_state[0] for d in DOCUMENTS[:3]
            ]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        rows = [h[:-1][torch.tensor(d.supervised[1:])] for h, d in zip(own, DOCUMENTS[:3], strict=True)]
        torch.testing.assert_close(a, torch.cat(rows), rtol=1e-4, atol=1e-5)


def test_padded_vocabularies_take_no_part():
    """Heads padded to different widths beyond the tokenizer: only the 2,048 shared ids enter the divergence."""
    student, teacher = tiny(0, vocab_size=2100), tiny(1, vocab_size=2200, hidden_size=48)
    width = shared_ids(student, teacher, "teachers[0]")
    assert width == 2048
    live = live_teacher(teacher, width, "teacher")
    module, batch = StudentLoss(student), batch_of(*DOCUMENTS[:2])
    knobs = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    _, sums = module(batch, [(1.0, live.targets(batch))], 1, knobs)
    with torch.no_grad():
        q = student.model(batch.input_ids).logits.flatten(0, 1)[batch.rows.student][:, :2048].log_softmax(-1)
        p = teacher.model(batch.input_ids).logits.flatten(0, 1)[batch.rows.teacher][:, :2048].log_softmax(-1)
    torch.testing.assert_close(sums["kd"], (p.exp() * (p - q)).sum(), rtol=1e-4, atol=1e-4)


def test_statistics_of_a_step(pair):
    """Sampled rows: with the teacher as the student KL is 0 and both agree everywhere."""
    _, teacher = pair
    module, batch = StudentLoss(teacher.source.language_model), batch_of(*DOCUMENTS)
    _, sums = module(batch, [(1.0, teacher.targets(batch))], 1, FORWARD, stat_rows=10)
    of = {name: value.item() for name, value in sums.items()}
    assert of["stat_rows"] == 10 and of["agreement"] == 10
    assert of["kl"] == pytest.approx(0, abs=1e-5)
    assert of["teacher_entropy"] == pytest.approx(of["student_entropy"], rel=1e-5)
