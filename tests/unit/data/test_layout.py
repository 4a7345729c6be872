"""Padding beyond the longest row, as compiled layers off the CPU get it: the same gradient."""

from types import SimpleNamespace

import pytest
import torch
from tiny import batch_of, examples, tiny

from potstill.data import Feed
from potstill.data.layout import widened
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.live import live_teacher
from potstill.training.feed import TILE, _multiple
from potstill.types import StepBatch

SETTINGS = LossSettings("reverse_kl", 0.5, 0.1, 1.0, 1.0, 0.5)


def rows(packed):
    one, two, three, four = examples([9, 17, 4, 12])
    return batch_of([one, two], [three, four]) if packed else batch_of(one, two, three, four)


@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_does_not_depend_on_the_padding(packed):
    student, teacher = tiny(0), tiny(1, hidden_size=48)
    batch, live = rows(packed), live_teacher(teacher, 2048, "teacher")
    found = []
    for each in (batch, widened(batch, TILE)):
        module = StudentLoss(student).train()
        loss, _ = module(each, [(1.0, live.targets(each))], 9, SETTINGS)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(student.model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_what_lies_where(packed):
    """A row's padding is one run; a row without any gets one."""
    batch = rows(packed)
    wide = widened(batch, 16)
    assert wide.input_ids.shape == ((2, 32) if packed else (4, 32))
    flat, narrow = wide.input_ids.flatten(), batch.input_ids.flatten()
    assert torch.equal(flat[wide.rows.student], narrow[batch.rows.student])
    assert wide.rows.teacher is wide.rows.student
    assert wide.lengths == ((9, 17, 6, 4, 12, 16) if packed else ())
    assert not packed or wide.bounds.tolist() == [0, 9, 26, 32, 36, 48, 64]
    assert widened(batch, 1) is batch and widened(wide, 16) is wide


@pytest.mark.parametrize(
    ("device", "compiles", "max_length", "multiple"),
    [("cuda", True, 200, TILE), ("cpu", True, 200, 1), ("cuda", False, 200, 1), ("cuda", True, 300, 1)],
)
def test_who_gets_it(device, compiles, max_length, multiple):
    """Compiled layers on a GPU, but for models that cannot read as much: the last one's has 320 positions."""
    parts = SimpleNamespace(
        recipe=SimpleNamespace(train=SimpleNamespace(compile=compiles)),
        device=torch.device(device),
        data=SimpleNamespace(max_length=max_length),
        student=tiny(0, max_position_embeddings=320),
        teachers=[live_teacher(tiny(1, max_position_embeddings=512), 2048, "teacher")],
    )
    assert _multiple(parts) == multiple


def test_the_feed_widens_each_micro_batch():
    steps = StepBatch((rows(True), rows(False)), {}, {"supervised_tokens": 1}, 0)

    class OneStep:
        notes, waiting = (), 0

        def __iter__(self):
            return iter([steps])

        def close(self):
            pass

    with Feed(OneStep(), [], multiple=TILE) as feed:
        (found,) = feed
    assert [batch.input_ids.shape[1] for batch in found.step.batches] == [TILE, TILE]
