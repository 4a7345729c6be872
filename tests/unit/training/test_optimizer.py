"""Schedules at points worked out by hand; which parameters go where; Muon in float32 against torch's own."""

import pytest
import torch
from tiny import tiny

from potstill.config import LrScheduleConfig, OptimizerConfig
from potstill.config.sections import Schedule
from potstill.training.optimizer import StackedMuon, lr_factor, make_optimizers, set_lr


@pytest.mark.parametrize(
    ("shape", "points"),
    [
        ("constant", {0: 0.2, 3: 0.8, 4: 1.0, 60: 1.0, 104: 1.0}),
        ("linear", {4: 1.0, 54: 0.55, 104: 0.1}),
        ("cosine", {4: 1.0, 54: 0.55, 29: 0.1 + 0.9 * 0.8535533905932737, 104: 0.1}),
        ("wsd", {4: 1.0, 84: 1.0, 94: 0.55, 104: 0.1}),
    ],
)
def test_lr_schedule(shape, points):
    config = LrScheduleConfig(shape=shape, warmup_steps=4, min_lr_ratio=0.1, decay=0.2)
    for step, expected in points.items():
        assert lr_factor(step, 105, config) == pytest.approx(expected), step
        of_all = config.model_copy(update={"warmup_steps": 0, "warmup_ratio": 0.04})  # 4.2 of 105 steps
        assert lr_factor(step, 105, of_all) == pytest.approx(expected), step


def test_schedule_of_a_loss_weight():
    linear = Schedule(start=1.0, end=0.5, over=0.5)
    assert [linear.at(p) for p in (0.0, 0.25, 0.5, 1.0)] == [1.0, 0.75, 0.5, 0.5]
    cosine = Schedule(start=4.0, end=1.0, shape="cosine")
    assert cosine.at(0.5) == pytest.approx(2.5) and cosine.at(1.0) == 1.0
    assert Schedule(start=2.0, end=9.0, shape="constant").at(0.7) == 2.0


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_hidden_matrices_and_nothing_else(tied):
    student = tiny(0, tie_word_embeddings=tied)
    head = student.model.get_output_embeddings()
    adamw, muon = make_optimizers(student.model, head, OptimizerConfig(name="muon", lr=1e-3, muon_lr=0.02))
    names = {id(p): name for name, p in student.model.named_parameters()}
    muons = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert all(name.endswith("proj.weight") for name in muons) and len(muons) == 14
    assert muons | rest == set(names.values()) and not muons & rest
    assert {names[id(p)] for p in adamw.param_groups[1]["params"]} == {n for n in rest if "norm" in n}
    assert adamw.param_groups[1]["weight_decay"] == 0.0
    assert set_lr([adamw, muon], 0.5) == 5e-4
    assert muon.param_groups[0]["lr"] == 0.01


def test_stacked_muon_is_torch_muon():
    torch.manual_seed(0)
    start = [torch.randn(shape) * 0.1 for shape in [(8, 24), (24, 8), (8, 8), (8, 8)]]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = StackedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, w in zip(ours, theirs, start, strict=True):
        moved = (b - w).norm()
        assert moved > 0.05 and (a - b).norm() < 0.03 * moved  # torch rounds to bfloat16 on the way
        torch.testing.assert_close(optimizers[0].state[a]["momentum_buffer"], optimizers[1].state[b]["momentum_buffer"])
