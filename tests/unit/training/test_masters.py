"""Float32 masters of bfloat16 parameters: small updates are kept, gradients are summed in float32, a resume is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import batch_of, examples, tiny
from torch import nn
from transformers import AutoModelForCausalLM

from potstill.config import OptimizerConfig
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.training.optimizer import make_optimizers, moved
from potstill.training.state import load_state, take_snapshot, write_index

SETTINGS = LossSettings("forward_kl", 0.5, 0.1, 1.0, kd_weight=0.0, ce_weight=1.0)


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(p.bfloat16())  # both dtypes begin with the same weights
        self.to(dtype)


def step_with(model: nn.Module, optimizers, gradients) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad_dtype = None
        p.grad = gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_move_as_float32_parameters_would(name):
    """The same gradients move the masters and the parameters of a float32 twin to the same bits; the model has them rounded."""
    config = OptimizerConfig(name=name, lr=1e-4, muon_lr=1e-4)
    narrow, wide = Layers(torch.bfloat16), Layers(torch.float32)
    ours, theirs = (make_optimizers(m, m.head, config) for m in (narrow, wide))
    for _ in range(5):
        gradients = [torch.randn_like(p) for p in wide.parameters()]
        step_with(narrow, ours, gradients)
        step_with(wide, theirs, gradients)
    masters = {id(weight): master for optimizer in ours for master, weight in moved(optimizer)}
    for weight, twin in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert weight.dtype == torch.bfloat16 and masters[id(weight)].dtype == torch.float32
        assert torch.equal(masters[id(weight)], twin)
        assert torch.equal(weight, twin.bfloat16())
        assert weight.grad is None


def test_updates_too_small_for_bfloat16_add_up():
    """AdamW moves a weight of 1 by 1e-4 a step, which bfloat16 rounds away each time: without masters it would stay at 1."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight, model.head = weight, nn.Linear(1, 1)
    optimizers = make_optimizers(model, model.head, OptimizerConfig(lr=1e-4, weight_decay=0.0))
    for _ in range(100):
        weight.grad_dtype = None
        weight.grad = torch.ones(4, 4)
        optimizers[0].step()
    master = next(m for m, w in moved(optimizers[0]) if w is weight)
    torch.testing.assert_close(master.detach(), torch.full((4, 4), 1 - 100 * 1e-4))
    assert (weight == torch.tensor(0.99).bfloat16()).all()
    lost = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([lost], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        lost.grad = torch.ones_like(lost)
        plain.step()
    assert (lost == 1).all()


def test_gradients_of_micro_batches_are_summed_in_float32():
    """256 gradients of 1 and one of 256, in bfloat16: its own sum stays at 256 once it is there."""
    model = nn.Module()
    model.weight, model.head = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), nn.Linear(1, 1)
    make_optimizers(model, model.head, OptimizerConfig())
    for factor in [256.0] + [1.0] * 256:
        (model.weight * factor).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert (model.weight.grad == 512).all()
    plain = torch.tensor(256.0, dtype=torch.bfloat16)
    assert plain + 1 == 256


def bf16_student(seed: int) -> StudentLoss:
    student = tiny(seed)
    student.model.to(torch.bfloat16)
    return StudentLoss(student).train()


def trained(module: StudentLoss, optimizers, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        batch = batch_of(*[[e] for e in examples([9, 17], seed=number)])
        loss, _ = module(batch, [], batch.supervised_tokens, SETTINGS)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_keeps_the_masters_and_a_resume_is_exact(tmp_path: Path, name: str) -> None:
    config = OptimizerConfig(name=name, lr=1e-3, muon_lr=1e-3)

    def made(seed: int):
        module = bf16_student(seed)
        return module, make_optimizers(module.model, module.model.get_output_embeddings(), config)

    module, optimizers = made(0)
    trained(module, optimizers, 0, 3)
    for folder in ("model", "state"):
        (tmp_path / folder).mkdir()
    module.model.save_pretrained(tmp_path / "model", state_dict={})
    written = take_snapshot(module.model, module, optimizers).write(tmp_path)
    write_index(tmp_path, written.weights)
    trained(module, optimizers, 3, 3)
    again, its_optimizers = made(1)
    load_state(tmp_path, again, its_optimizers)
    trained(again, its_optimizers, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    for mine, theirs in zip(its_optimizers, optimizers, strict=True):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(moved(mine), moved(theirs), strict=True))
    with safe_open(tmp_path / "state" / "00000-0.safetensors", "pt") as file:
        masters = [key for key in file.keys() if key.endswith(".master")]  # noqa: SIM118
        assert len(masters) == len(list(module.parameters()))
        assert all(file.get_tensor(key).dtype == torch.float32 for key in masters)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_the_host_takes_the_same_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its weights and state are copies; the model gets the same bits, and another run resumes without it, or with it."""

    def made(seed: int, offload: bool):
        module = StudentLoss(tiny(seed)).train().to(dtype)
        return module, make_optimizers(
            module.model, module.model.get_output_embeddings(), OptimizerConfig(offload=offload)
        )

    plain, away = made(0, False), made(0, True)
    for module, optimizers in (plain, away):
        trained(module, optimizers, 0, 3)
    assert all(master is not weight for master, weight in moved(away[1][0]))
    for folder in ("model", "state"):
        (tmp_path / folder).mkdir()
    write_index(tmp_path, take_snapshot(away[0].model, *away).write(tmp_path).weights)
    trained(*plain, 3, 2)
    for offload in (False, True):
        again = made(1, offload)
        load_state(tmp_path, *again)
        trained(*again, 3, 2)
        assert all(torch.equal(a, b) for a, b in zip(again[0].parameters(), plain[0].parameters(), strict=True))


def test_muon_stays_on_the_device() -> None:
    with pytest.raises(ValueError, match="offload goes with adamw"):
        OptimizerConfig(name="muon", offload=True)
