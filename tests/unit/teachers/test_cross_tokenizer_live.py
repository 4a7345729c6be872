"""A teacher with another tokenizer in the student's loss: itself when it is the same, and gradients that no split changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taught import answers, cross_teacher
from tiny import CPU, LLAMA, batch_of, tiny

from potstill.config import CrossTokenizerConfig, StudentConfig
from potstill.data import Encoder
from potstill.models import load_student, shared_ids
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.live import live_teacher
from potstill.types import Example

KNOBS = LossSettings("forward_kl", 0.5, 0.1, 1.0, 0.8, 0.3)
TEXTS = ["The people of the United States.", "Peace, commerce – naïve façades\n", "2,024 treaties; 日本 and 🙂", "a"]


def documents(tokenizer, last=True):
    encode = Encoder(tokenizer, max_length=96, append_eos=True)
    pieces = [Example(f"{i:032x}", text, last=last) for i, text in enumerate(TEXTS)]
    return [encoded.example for encoded in encode(pieces) if encoded.example is not None]


def gradients(student, teacher, batches, knobs=KNOBS):
    module = StudentLoss(student)
    module.zero_grad()
    tokens, kd = sum(batch.supervised_tokens for batch in batches), 0.0
    for batch in batches:
        loss, sums = module(batch, answers(teacher, [batch])[0], tokens, knobs)
        loss.backward()
        kd += float(sums["kd"])
    return kd, torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.fixture(scope="module")
def teacher():
    model = tiny(1, hidden_size=48)
    model.model.eval().requires_grad_(False)
    return model


def aligned(student, teacher, method, temperature=1.0):
    return cross_teacher(student, teacher, CrossTokenizerConfig(method=method), temperature)


@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab", "projection"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_the_same_tokenizer_it_is_the_plain_divergence(teacher, method, temperature):
    student = tiny(0)
    batches = [batch_of(*documents(student.tokenizer))]
    knobs = replace(KNOBS, temperature=temperature)
    live = live_teacher(teacher, shared_ids(student, teacher, "teachers[0]"), "teacher")
    wanted = gradients(student, live, batches, knobs)
    found = gradients(student, aligned(student, teacher, method, temperature=temperature), batches, knobs)
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)  # a sum of differences of nearly equal float32 numbers
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld"])
def test_another_tokenizer_and_any_split(teacher, method):
    """Packed or not, in one micro-batch or four; with texts that end and texts that go on in another piece."""
    student = load_student(StudentConfig(config=LLAMA, tokenizer="shipped:tokenizers/pieces-1k"), CPU, 0)
    other = aligned(student, teacher, method)
    for last in (True, False):
        made = documents(student.tokenizer, last)
        whole = gradients(student, other, [batch_of(*made)])
        assert whole[0] > 0 and whole[1].abs().max() > 0
        for batches in ([batch_of(one) for one in made], [batch_of(made[:2], made[2:])]):
            found = gradients(student, other, batches)
            assert found[0] == pytest.approx(whole[0], rel=1e-4)
            torch.testing.assert_close(found[1], whole[1], rtol=1e-3, atol=1e-6)
        assert other.prepare(batch_of(*made)).counts["tokens_in_chunks"] == sum(
            document.supervised_tokens for document in made
        )
