"""How well a student drafts for its teacher: what their distributions share, and speculative decoding as it is simulated."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny
from tiny_runs import TinyRuns, lines
from typer.testing import CliRunner

from potstill.cli.main import app
from potstill.evals.drafting import said_drafts
from potstill.losses.compare import compare_rows
from potstill.types import Head, HiddenTarget, PotstillError, TopKTarget


@pytest.fixture
def runs(tmp_path, tiny_teacher, tiny_text):
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


def rows(probabilities: list[list[float]]) -> HiddenTarget:
    """Rows with these probabilities: hidden states that the identity makes logits of."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    return HiddenTarget(logits, Head(torch.eye(logits.shape[1], dtype=torch.float64), None, None, 1.0))


def test_acceptance_worked_out_by_hand():
    student, teacher = rows([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), rows([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    found = compare_rows(student, torch.tensor([0, 1]), teacher)
    assert found.acceptance.tolist() == pytest.approx([0.7, 1.0])  # 1 − ½·(0.3 + 0 + 0.3)
    logp = torch.tensor([[0.5], [0.8]], dtype=torch.float64).log()
    truncated = TopKTarget(torch.tensor([[2], [2]]), logp, torch.log1p(-logp.exp()).squeeze(-1), width=3)
    assert compare_rows(student, torch.tensor([0, 1]), truncated).acceptance is None


@torch.no_grad()
def test_acceptance_is_what_speculative_decoding_accepts_in_the_long_run():
    """Tokens drawn from Q and accepted with min(1, P ÷ Q), by the thousand."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(1, 7, generator=generator, dtype=torch.float64).softmax(-1) ** 3 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    drawn = q[0].multinomial(40_000, replacement=True, generator=generator)
    accepted = torch.rand(40_000, generator=generator, dtype=torch.float64) < (p[0] / q[0])[drawn]
    found = compare_rows(rows(q.tolist()), torch.tensor([0]), rows(p.tolist())).acceptance
    assert float(found) == pytest.approx(float(accepted.double().mean()), abs=0.01)


def test_what_is_said_of_drafts():
    assert said_drafts(torch.tensor([3.0, 4.0, 2.0])) == {"draft_acceptance": 0.75, "draft_tokens_per_pass": 2.5}
    assert set(said_drafts(torch.zeros(3)).values()) == {None}


def test_a_run_that_distils_a_draft(runs):
    """A student that begins as its teacher is accepted whole."""
    evaluation = runs.evaluation(on_policy_samples=3, draft_tokens=3)
    changes = {"student": {"model": str(runs.teacher)}, "loss": {"divergence": "tvd"}, "eval": evaluation}
    file = runs.file("draft", "train.steps=1", "rollouts.sampling.max_new_tokens=8", **changes)
    result = CliRunner().invoke(app, ["train", str(file), "train.optimizer.lr=1e-9"])
    assert result.exit_code == 0, result.output
    (found,) = lines(runs.folder / "draft" / "evals.jsonl")
    assert found["acceptance"] == pytest.approx(1.0, abs=1e-3)
    assert found["draft_acceptance"] == pytest.approx(1.0, abs=1e-3)
    assert found["draft_tokens_per_pass"] == pytest.approx(4.0, abs=1e-2)


def test_drafts_are_of_what_the_student_writes(runs):
    with pytest.raises(PotstillError, match=r"draft_tokens goes with on_policy_samples"):
        runs.recipe("x", eval=runs.evaluation(draft_tokens=3))


def test_without_a_teacher_nothing_is_accepted():
    student = tiny()
    assert compare_rows(student.at_rows(torch.zeros(2, 32)), torch.tensor([1, 2]), None).acceptance is None
