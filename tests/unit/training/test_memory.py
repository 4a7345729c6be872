"""The memory of a step, as it is counted on fake tensors: against what can be worked out."""

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny

from potstill.config import OptimizerConfig
from potstill.memory import Allocations, Memory, Step, count_memory
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.training.optimizer import make_optimizers

SETTINGS = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.5)


def counted(student, teachers=(), rows=2, passes=1, **optimizer) -> Memory:
    config = OptimizerConfig(**optimizer)
    step = Step(
        rows,
        64,
        passes,
        lambda made, batch, targets: StudentLoss(made).train()(batch, targets, 9, SETTINGS)[0],
        lambda made: make_optimizers(made.model, made.model.get_output_embeddings(), config),
        nullcontext,
    )
    return count_memory(student, teachers, step)


@pytest.mark.parametrize(("narrow", "weight", "state"), [(False, 4, 8), (True, 2, 12)])
def test_what_a_parameter_takes(narrow, weight, state):
    """A float32 parameter: 4 bytes, 4 of gradient, 8 of AdamW; a bfloat16 one: 2, 4, and 4 of master besides."""
    student, teacher = tiny(0), tiny(1, hidden_size=48)
    if narrow:
        student.model.bfloat16()
    parameters = sum(p.numel() for p in student.model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in student.model.buffers())
    found = counted(student, [teacher])
    assert found.weights == weight * parameters + buffers
    assert found.gradients == 4 * parameters
    assert found.optimizer == state * parameters
    assert found.teacher == sum(t.numel() * 4 for t in (*teacher.model.parameters(), *teacher.model.buffers()))
    assert found.total == sum(vars(found).values())
    assert student.model.device.type == "cpu" and not any(p.grad is not None for p in student.model.parameters())


def test_the_host_has_an_optimizer_that_is_not_counted_on_a_device():
    """On a CPU the two are one, and all of it is counted."""
    student = tiny(0)
    parameters = sum(p.numel() for p in student.model.parameters())
    assert counted(student, offload=True).optimizer == 12 * parameters


def test_activations_grow_with_the_rows():
    few, many = (counted(tiny(0), [tiny(1)], rows=rows) for rows in (8, 16))
    assert 1.8 < many.activations / few.activations < 2.2
    assert many.loss > few.loss > 8 * 63 * 2048 * 4  # the student's logits alone


def test_the_words():
    said = Memory(2_000_000, 2_000_000, 4_000_000, 10**9, 5_000, 700).said()
    assert said == (
        "memory of a step, counted: 1.01 GB (weights 2 MB, gradients 2 MB, optimizer 4 MB, activations 1 GB, loss 5 kB, "
        "teacher 700 bytes)"
    )


def test_a_view_of_what_was_there_takes_nothing():
    """A linear layer transposes its weight: that must not count as a second weight."""
    weight, x = torch.empty(64, 32), torch.empty(4, 32)
    with Allocations([weight, x]) as seen:
        torch.nn.functional.linear(x, weight)
        x.t().contiguous()
    assert seen.most == 4 * 64 * 4 and seen.now == 0
