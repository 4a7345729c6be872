"""Evaluation numbers against numbers worked out another way."""

import math

import pytest
import torch
from tiny import CPU, batch_of, examples, tiny

from potstill.config import DataConfig
from potstill.evals.fidelity import _binned, _expected_calibration_error, complete, evaluate, evaluation_batches
from potstill.teachers.live import LiveTeacher

TEXT = "The state of the Union is strong — très forte 💪, as ever.\n" * 7


@pytest.mark.parametrize("packing", [True, False])
def test_bits_per_byte_counts_every_byte_once(tmp_path, packing):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text("Fellow citizens", encoding="utf-8")
    data = DataConfig.model_validate(
        {"sources": [{"files": str(tmp_path / "*.txt")}], "max_length": 64, "piece_bytes": 90, "packing": packing}
    )
    student = tiny(0)
    result = evaluate(student, None, evaluation_batches(data, student, 2, None), CPU)
    assert result["bytes"] == len(TEXT.encode()) + len("Fellow citizens")
    # Another way: document pieces one by one through the whole model, its own logits, bos in front.
    nats = tokens = 0.0
    for batch in evaluation_batches(data, student, 1, None):
        for example in batch.examples:
            ids = student.tokenizer(example.text, return_tensors="pt").input_ids
            assert ids[0, 0] == student.tokenizer.bos_token_id
            with torch.no_grad():
                logp = student.model.eval()(ids).logits[0, :-1].log_softmax(-1)
            nats -= logp.gather(-1, ids[0, 1:, None]).sum().item()
            tokens += ids.shape[1] - 1
    assert result["tokens"] == tokens
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["bytes"], rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert result["kl"] is None and result["agreement"] is None


def test_the_teacher_against_itself_and_another():
    a, b = tiny(0), tiny(1)
    batches = [batch_of(*examples([9, 17, 4]))]
    itself = evaluate(a, LiveTeacher(a, 2048, "a"), batches, CPU)
    assert itself["kl"] == pytest.approx(0, abs=1e-6) and itself["agreement"] == 1.0
    other = evaluate(a, LiveTeacher(b, 2048, "b"), batches, CPU)
    batch = batches[0]
    with torch.no_grad():
        q, p = (
            m.model.eval()(batch.input_ids).logits.flatten(0, 1)[batch.rows.student].log_softmax(-1) for m in (a, b)
        )
    assert other["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert other["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert other["accuracy"] == pytest.approx((q.argmax(-1) == batch.rows.labels).float().mean().item())


def test_calibration_error_by_hand():
    """Bins of 1/15: 0.95 three times with two right, 0.30 twice with none right."""
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.30, 0.30])
    correct = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    expected = (3 * abs(0.95 - 2 / 3) + 2 * 0.30) / 5
    assert _expected_calibration_error(_binned(confidence, correct)) == pytest.approx(expected, rel=1e-6)


def test_completions_are_the_models_own_greedy_text():
    student = tiny(0)
    samples = complete(student, ["The people", "We"], 5)
    for sample in samples:
        ids = student.tokenizer(sample["prompt"], return_tensors="pt").input_ids
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, student.model.eval()(ids).logits[:, -1:].argmax(-1)], 1)
        assert student.tokenizer.decode(ids[0], skip_special_tokens=True) == sample["prompt"] + sample["text"]
