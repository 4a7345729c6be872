"""Students that are mixtures of experts: the loss that balances the experts, and how much each of them has to do."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_families import FAMILIES, make_model, make_rows
from tiny_runs import LLAMA, InterruptAt, Interrupted, TinyRuns, assert_same_run, metrics
from typer.testing import CliRunner

import potstill
from potstill.cli.main import app
from potstill.data import collate
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.students.experts import Routers, balancing_loss, expert_loads
from potstill.types import PotstillError

BALANCED = ("qwen3-moe", "mixtral", "gpt-oss")
NOTHING_ELSE = LossSettings("forward_kl", 0.5, 0.1, 1.0, 0.0, 0.0)
QWEN = LLAMA | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
}


@pytest.fixture
def runs(tmp_path, tiny_teacher, tiny_text):
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


def padded_rows():
    """One document per row, of different lengths."""
    return collate([[row[0]] for row in make_rows(3, 1)], 0)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", BALANCED)
def test_the_loss_and_its_gradient_are_those_of_transformers(family):
    student, batch = make_model(family), padded_rows()
    module = StudentLoss(student, Routers.of(student, 0.3)).train()
    loss, sums = module(batch, [], 2.0 * batch.supervised_tokens, NOTHING_ELSE)
    loss.backward()
    twin = make_model(family).model
    twin.config._attn_implementation = "eager"
    found = twin(batch.input_ids, attention_mask=(batch.document > 0).long(), output_router_logits=True)
    (0.3 / 2 * found.aux_loss).backward()
    assert float(loss.detach()) == pytest.approx(0.15 * float(found.aux_loss.detach()), rel=1e-6)
    assert float(sums["router_aux"]) == float(loss.detach())
    ours, theirs = gradients(module.model), gradients(twin)
    assert any("router" in name or "gate" in name for name in theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-8)


def test_a_loss_worked_out_by_hand():
    """Two experts and two tokens in one layer, one expert each: both choose the first, with ¾ and ⅝ of the probability. Padding
    does not count."""
    probabilities = torch.tensor([[0.75, 0.25], [0.625, 0.375], [0.0, 1.0]], dtype=torch.float64)
    logits = probabilities.clamp(min=1e-30).log().requires_grad_()
    loss = balancing_loss([logits], 1, torch.tensor([True, True, False]))
    assert float(loss.detach()) == pytest.approx(2 * 1.0 * (0.75 + 0.625) / 2)
    loss.backward()
    # 2 · f_1 · ∂P_1: of each token's half, p(1 − p) and −p(1 − p).
    assert logits.grad.tolist() == pytest.approx(
        [pytest.approx([0.1875, -0.1875]), pytest.approx([0.234375, -0.234375]), pytest.approx([0.0, 0.0])]
    )
    assert expert_loads([logits], [None], 1, torch.tensor([True, True, False])).tolist() == [[2.0, 0.0]]


def test_micro_batches_count_by_their_share_of_the_steps_tokens():
    student, parts = make_model("qwen3-moe"), [collate(make_rows(2, seed), 0) for seed in (0, 1)]
    module = StudentLoss(student, Routers.of(student, 1.0))
    total = sum(part.supervised_tokens for part in parts)
    each = [module(part, [], part.supervised_tokens, NOTHING_ELSE)[0].detach() for part in parts]
    of_step = sum(module(part, [], total, NOTHING_ELSE)[0].detach() for part in parts)
    shares = [part.supervised_tokens / total for part in parts]
    assert float(of_step) == pytest.approx(sum(s * float(x) for s, x in zip(shares, each, strict=True)), rel=1e-12)


def test_the_coefficient_is_the_models_own_unless_the_recipe_says_another():
    student = make_model("qwen3-moe", router_aux_loss_coef=0.02)
    assert Routers.of(student, None).coefficient == 0.02
    assert Routers.of(student, 0.5).coefficient == 0.5
    assert Routers.of(student, 0.0).coefficient == 0.0
    assert Routers.of(make_model("llama"), None) is None
    with pytest.raises(
        PotstillError, match=r"router_aux_loss_coef: there are no experts in llama models: leave it out"
    ):
        Routers.of(make_model("llama"), 0.1)


def test_deepseeks_experts_are_counted_and_have_no_such_loss(monkeypatch):
    keys = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
    keys |= {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4}
    monkeypatch.setitem(FAMILIES, "deepseek", {"model_type": "deepseek_v3", "qk_nope_head_dim": 4, **keys})
    student = make_model("deepseek", head_dim=4)
    with pytest.raises(PotstillError, match=r"no loss that balances experts in transformers for deepseek_v3 models"):
        Routers.of(student, 0.1)
    routers = Routers.of(student, None)
    batch = padded_rows()
    loss, sums = StudentLoss(student, routers)(batch, [], 1.0, NOTHING_ELSE)
    assert float(loss.detach()) == 0.0
    assert sums["expert_load"].shape == (1, 4)  # the first layer is dense
    assert float(sums["expert_load"].sum()) == 2 * int((batch.document > 0).sum())


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_balances_logs_and_resumes(runs, checkpointing):
    student = {"tokenizer": runs.recipe("x").student.tokenizer, "config": QWEN, "router_aux_loss_coef": 0.5}
    train = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "gradient_checkpointing": checkpointing}
    file = runs.file("whole", student=student, train=train)
    assert CliRunner().invoke(app, ["train", str(file)]).exit_code == 0
    lines = metrics(runs.folder / "whole")
    assert all(0.5 * 1.9 < line["router_aux"] < 0.5 * 4 for line in lines)  # 2 of 4 experts a token, evenly: 2
    assert all(
        len(line["expert_load"]) == 4 and math.isclose(sum(line["expert_load"]), 4, abs_tol=1e-3) for line in lines
    )
    cut = runs.recipe("cut", student=student, train=train)
    with pytest.raises(Interrupted):
        potstill.train(cut, [InterruptAt(5)])
    potstill.train(cut)
    assert_same_run(runs.folder / "cut", runs.folder / "whole")
    assert (
        CliRunner()
        .invoke(app, ["report", str(runs.folder / "whole"), "--out", str(runs.folder / "report.html")])
        .exit_code
        == 0
    )


def test_without_the_loss_a_run_differs_in_nothing_but_the_loss(runs):
    student = {"tokenizer": runs.recipe("x").student.tokenizer, "config": QWEN}
    first = {}
    for coefficient in (0.0, 0.5):
        name = f"c{coefficient:g}"
        potstill.train(
            runs.recipe(
                name, "train.steps=1", "train.batch_size=4", student=student | {"router_aux_loss_coef": coefficient}
            )
        )
        (first[coefficient],) = metrics(runs.folder / name)
    assert first[0.5]["kd"] == first[0.0]["kd"]
    assert first[0.5]["loss"] - first[0.0]["loss"] == pytest.approx(first[0.5]["router_aux"], rel=1e-5)
