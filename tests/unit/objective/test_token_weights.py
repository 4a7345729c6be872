"""Weights of tokens and the clamp of their divergence, through models: value and gradient against autograd on whole logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import batch_of, examples, tiny
from torch import Tensor

from potstill.config import TokenWeightsConfig
from potstill.data.weighing import weigh
from potstill.losses import policy_gradient_kl
from potstill.models import shared_ids
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.live import live_teacher
from potstill.types import Batch

KNOBS = LossSettings("reverse_kl", 0.5, 0.1, 2.0, 0.5, 0.25)
WEIGHTS = TokenWeightsConfig(skip=1, window=6, decay=0.5)


def models(seed: int = 0):
    student, teacher = tiny(seed), tiny(seed + 1)
    for one in (student, teacher):
        one.model.double().eval()
    return student, teacher


def naive(student, teacher, batch: Batch, knobs: LossSettings, divisor: float) -> Tensor:
    """Whole logits, a loop over the rows, autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for example in batch.examples:
        ids = torch.from_numpy(example.ids).long()[None]
        ours, theirs = student.model(ids).logits[0], teacher.model(ids).logits[0].detach()
        for i in np.flatnonzero(example.supervised):
            weight = 1.0 if example.weights is None else float(example.weights[i])
            q, p = ((x[i - 1] / knobs.temperature).log_softmax(-1) for x in (ours, theirs))
            kd = (q.exp() * (q - p)).sum() * knobs.temperature**2
            if knobs.token_clip is not None:
                kd = kd.clamp(max=knobs.token_clip)
            ce = -ours[i - 1].log_softmax(-1)[ids[0, i]]
            total = total + weight * (knobs.kd_weight * kd + knobs.ce_weight * ce) / divisor
    return total


@pytest.mark.parametrize("clip", [None, 0.02, 1e-9, 1e9])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_equal_to_the_naive_twin(clip: float | None, weights: TokenWeightsConfig | None) -> None:
    student, teacher = models()
    found = [weigh(one, np.ones(len(one.ids)), weights) for one in examples([17, 9, 24], seed=3)]
    batch, knobs = batch_of([found[0], found[1]], found[2]), replace(KNOBS, token_clip=clip)
    module = StudentLoss(student)
    target = live_teacher(teacher, shared_ids(student, teacher, "teacher"), "teacher").targets(batch)
    loss, sums = module(batch, [(1.0, target)], batch.supervised_tokens, knobs)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    twin = naive(student, teacher, batch, knobs, batch.supervised_tokens)
    twin.backward()
    assert abs(loss.item() - twin.item()) < 1e-7 * abs(twin.item())  # weights are float32
    for name, p in module.named_parameters():
        assert (ours[name] - p.grad).norm() <= 1e-6 * p.grad.norm(), name
    if clip == 0.02:  # some are clamped, some are not
        mean = float(sums["kd"]) / len(batch.rows)
        assert 0.002 < mean < 0.02


def test_a_clamped_advantage() -> None:
    """By hand: log P − log Q is −3, 0.5 and 4; clamped at 1 it is −1, 0.5 and 1, and later ones count half."""
    student, teacher = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([-4.0, -1.5, -1.0])
    score = policy_gradient_kl(student, [(1.0, teacher)], student, [3], discount=0.5, token_clip=1.0)
    assert score.advantage.tolist() == [-1 + 0.25 + 0.25, 0.5 + 0.5, 1.0]
    assert score.weight.tolist() == score.advantage.tolist()  # every ratio is 1


def test_a_reward_is_added_to_every_token_of_its_answer() -> None:
    """By hand: neither clamped nor discounted, and nothing where the student did not write."""
    student, teacher = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([-4.0, -1.5, -1.0])
    behaviour, reward = torch.tensor([-1.0, -2.0, torch.nan]), torch.tensor([3.0, 3.0, 3.0])
    score = policy_gradient_kl(student, [(1.0, teacher)], behaviour, [3], discount=0.5, token_clip=1.0, reward=reward)
    assert score.advantage.tolist() == [-1 + 0.25 + 3, 0.5 + 3, 0.0]


def test_rewards_through_models_equal_the_naive_twin() -> None:
    """Two answers with advantages 1.5 and −0.5, half of which counts: the gradient is that of −Σ (A + R/2)·log Q, where A is
    log P − log Q, without a gradient of its own."""
    student, teacher = models()
    made = [
        replace(e, advantage=a, writer="student", behaviour=np.zeros(len(e.ids), np.float32))
        for e, a in zip(examples([17, 9], seed=3), (1.5, -0.5), strict=True)
    ]
    batch, module = batch_of(made), StudentLoss(student)
    knobs = LossSettings("policy_gradient_kl", 0.5, 0.1, 1.0, 1.0, 0.0, ratio_clip=1e9, reward_weight=0.5)
    log_q, log_p = [], []
    for one in made:
        ids = torch.from_numpy(one.ids).long()[None]
        at = torch.from_numpy(np.flatnonzero(one.supervised))
        for found, model in ((log_q, student), (log_p, teacher)):
            rows = model.model(ids).logits[0, at - 1].log_softmax(-1)
            found.append(rows.gather(-1, ids[0, at, None]).squeeze(-1))
    rewards = torch.cat([torch.full((len(x),), a) for x, a in zip(log_q, (1.5, -0.5), strict=True)])
    q, p = torch.cat(log_q), torch.cat(log_p).detach()
    rows = replace(batch.rows, behaviour=q.detach())
    assert rows.advantage is not None and rows.advantage.tolist() == rewards.tolist()
    advantage = (p - q).detach() + 0.5 * rewards
    twin = -(advantage * q).sum() / 20
    expected = torch.autograd.grad(twin, list(student.model.parameters()))
    target = live_teacher(teacher, shared_ids(student, teacher, "teacher"), "teacher").targets(batch)
    loss, sums = module(replace(batch, rows=rows), [(1.0, target)], 20, knobs)
    loss.backward()
    assert loss.item() == pytest.approx(-advantage.sum().item() / 20, rel=1e-6)
    assert sums["advantage"].item() == pytest.approx(advantage.sum().item(), rel=1e-6)
    for ours, theirs in zip(student.model.parameters(), expected, strict=True):
        assert (ours.grad - theirs).norm() <= 1e-6 * theirs.norm()  # the divisor is float32
