"""Every piece of Python in docs/use-elsewhere.md is run as it stands, and gives what it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_readme import ROOT, blocks

PAGE = ROOT / "docs" / "use-elsewhere.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The names that the page's n-th piece of Python leaves behind."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks(PAGE)[request.param][1], f"{PAGE.name}, example {request.param + 1}", "exec"), names)
    return names


def naive_rows(names: dict[str, Any], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of teacher and student at the supervised rows, from whole logits."""
    ids, both = names["ids"], (names["teacher"], names["student"])
    with torch.no_grad():
        logp, logq = ((m(ids).logits[:, 5:-1] / temperature).log_softmax(-1).flatten(0, 1) for m in both)
    return logp, logq


def test_every_piece_has_a_test() -> None:
    assert [language for language, _ in blocks(PAGE)] == ["python"] * 4


@pytest.mark.e2e
@pytest.mark.parametrize("example", [0], indirect=True)
def test_bare_loop(example: dict[str, Any]) -> None:
    losses = example["losses"]
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    # The loss of the weights as they are now, from whole logits.
    logp, logq = naive_rows(example, 2.0)
    kd = 4 * F.kl_div(logq, logp, reduction="batchmean", log_target=True)
    _, logq = naive_rows(example, 1.0)
    ce = F.nll_loss(logq, example["ids"][:, 6:].flatten())
    fused, target = example["fused_linear_kd"], example["DenseTarget"]
    student, teacher = (
        (m.base_model, m.get_output_embeddings().weight) for m in (example["student"], example["teacher"])
    )
    hidden, answers = (body(example["ids"]).last_hidden_state[:, 5:-1].flatten(0, 1) for body, _ in (student, teacher))
    labels = example["ids"][:, 6:].flatten()
    out = fused(hidden, student[1], target(answers, teacher[1]), labels=labels, temperature=2.0, ce_weight=0.1)
    torch.testing.assert_close(out.loss.detach() / len(labels), kd + 0.1 * ce, rtol=1e-4, atol=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("example", [1], indirect=True)
def test_trainer(example: dict[str, Any]) -> None:
    losses = example["losses"]
    assert len(losses) == 20 and losses[-1] < 0.7 * losses[0]
    # One step of two micro-batches with unlike numbers of labels, by the trainer's own rules: the mean over all of them.
    trainer, ids = example["trainer"], example["ids"]
    cut = [torch.where(torch.arange(24) < start, -100, ids[i * 8 : i * 8 + 8]) for i, start in enumerate((6, 20))]
    batches = [{"input_ids": ids[i * 8 : i * 8 + 8], "labels": labels} for i, labels in enumerate(cut)]
    count = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    assert int(count) == 8 * 18 + 8 * 4
    trainer.model.eval()
    with torch.no_grad():
        loss = sum(trainer.compute_loss(trainer.model, dict(b), num_items_in_batch=count) for b in batches)
        logp, logq = (m(ids).logits[:, :-1].log_softmax(-1) for m in (trainer.teacher, trainer.model))
        alone = trainer.compute_loss(trainer.model, dict(batches[0]))
    rows = torch.cat(cut)[:, 1:] != -100
    kl = F.kl_div(logp, logq, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(loss, kl[rows].mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(alone, kl[:8][rows[:8]].mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("example", [2], indirect=True)
def test_in_place_of_trl(example: dict[str, Any]) -> None:
    rows = example["labels"] != -100
    logits = [example[f"{who}_logits"].detach().requires_grad_() for who in ("teacher", "student")]
    logp, logq = ((z[rows] / 2).log_softmax(-1) for z in logits)
    logm = (0.3 * logp.exp() + 0.7 * logq.exp()).log()
    kl = [F.kl_div(logm, log, reduction="batchmean", log_target=True) for log in (logp, logq)]
    exact = 0.3 * kl[0] + 0.7 * kl[1]
    (gradient,) = torch.autograd.grad(exact, logits[1])
    torch.testing.assert_close(example["loss"].detach(), exact.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(example["student_logits"].grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.e2e
@pytest.mark.parametrize("example", [2], indirect=True)
def test_equals_trl(example: dict[str, Any]) -> None:
    reason = "TRL is not installed; its function was compared with 1.16.0"
    theirs = pytest.importorskip("trl.experimental.gkd", reason=reason).GKDTrainer.generalized_jsd_loss
    ours = example["generalized_jsd_loss"]
    torch.manual_seed(1)
    base, teacher, labels = torch.randn(3, 5, 20), torch.randn(3, 5, 20), torch.randint(20, (3, 5))
    labels[0, :3] = labels[2] = -100
    for beta in (0.0, 0.3, 0.5, 1.0):
        for given in (None, labels, torch.full_like(labels, -100)):
            masked = given is not None and bool((given == -100).all())
            for reduction in ("batchmean", "sum", "mean"):
                for items in (None, 7, torch.tensor(7)):
                    if masked and reduction == "mean" and items is None:
                        continue  # the mean of nothing: not a number with both
                    found = []
                    for function in (ours, theirs):
                        student = base.clone().requires_grad_()
                        loss = function(student, teacher, given, beta, 1.7, reduction, items)
                        found.append((loss.detach(), *torch.autograd.grad(loss, student)))
                    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="reduction"):
        ours(base, teacher, labels, reduction="none")


@pytest.mark.e2e
@pytest.mark.parametrize("example", [3], indirect=True)
def test_in_place_of_nemo(example: dict[str, Any]) -> None:
    rows = example["labels"] != -100
    student = example["student_logits"].detach().requires_grad_()
    logq, logp = ((z[rows] / 2).log_softmax(-1) for z in (student, example["teacher_logits"]))
    exact = 4 * F.kl_div(logq, logp, reduction="sum", log_target=True) / 64
    (gradient,) = torch.autograd.grad(exact, student)
    torch.testing.assert_close(example["loss"].detach(), exact.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(example["student_logits"].grad, gradient, rtol=1e-5, atol=1e-7)
