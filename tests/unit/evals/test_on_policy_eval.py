"""KL to the teacher on the student's own text, against a pass over each text alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny
from transformers.models.llama.modeling_llama import LlamaModel

from potstill.config import DataConfig, EvalConfig, RolloutsConfig, SamplingConfig, SourceConfig
from potstill.evals.on_policy import OnPolicyEval
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.transformers import TransformersEngine
from potstill.teachers.live import live_teacher

DRAFT = 4
BEGINNINGS = ["The people of the United States", "Once upon a time", "It is the duty of Congress"]


def on_policy_eval(student, teacher, folder) -> OnPolicyEval:
    path = folder / "held-out.jsonl"
    path.write_text("".join(f'{{"text": "{text} and what follows is not read"}}\n' for text in BEGINNINGS))
    data = DataConfig(sources=[SourceConfig(files=str(path))], max_length=64)
    config = EvalConfig(data=data, on_policy_samples=3, batch_size=2, draft_tokens=DRAFT)
    rollouts = RolloutsConfig(prompt_tokens=4, sampling=SamplingConfig(max_new_tokens=9))
    return OnPolicyEval(student, live_teacher(teacher, len(teacher.tokenizer), "t"), config, rollouts)


@torch.no_grad()
def naive(student, teacher) -> tuple[float, float, float, float]:
    """One text at a time, whole distributions, nothing fused."""
    reverse, forward, accepted, tried = [], [], 0.0, 0.0
    engine = TransformersEngine(student, SamplingConfig(max_new_tokens=9), stop_ids=[student.tokenizer.eos_token_id])
    for i, text in enumerate(BEGINNINGS):
        prompt = np.array(student.tokenizer(text).input_ids[:5], dtype=np.int32)  # bos and four tokens
        (written,) = engine.generate([GenerationRequest(prompt, rollout_seed(0, i, 0))])
        ids = torch.from_numpy(np.concatenate([prompt, written.ids])[None].astype(np.int64))
        at = slice(len(prompt) - 1, -1)
        logq, logp = (m.model(input_ids=ids).logits[0, at].double().log_softmax(-1) for m in (student, teacher))
        reverse += (logq.exp() * (logq - logp)).sum(-1).tolist()
        forward += (logp.exp() * (logp - logq)).sum(-1).tolist()
        alive = 1.0  # how likely the draft has not been ended yet
        for place, token in enumerate(written.ids[:DRAFT]):
            tried += alive
            alive *= min(1.0, float((logp[place, token] - logq[place, token]).exp()))
            accepted += alive
    return float(np.mean(reverse)), float(np.mean(forward)), accepted / tried, 1 + accepted / len(BEGINNINGS)


def test_it_is_the_mean_over_what_the_student_wrote(tmp_path) -> None:
    student, teacher = tiny(seed=0, initializer_range=0.2), tiny(seed=1, initializer_range=0.2)
    student.model.train()
    found = on_policy_eval(student, teacher, tmp_path)()
    reverse, forward, acceptance, tokens = naive(student, teacher)
    assert found["draft_acceptance"] == pytest.approx(acceptance, rel=1e-5) and 0.05 < acceptance < 0.95
    assert found["draft_tokens_per_pass"] == pytest.approx(tokens, rel=1e-5)
    assert found["on_policy_reverse_kl"] == pytest.approx(reverse, rel=1e-5) and reverse > 0.01
    assert found["on_policy_forward_kl"] == pytest.approx(forward, rel=1e-5) and forward != pytest.approx(
        reverse, rel=1e-3
    )
    assert found["on_policy_length"] <= 9.0 and student.model.training
    assert found == on_policy_eval(student, teacher, tmp_path)()  # the same texts every time


def test_a_student_that_writes_slowly_is_told(tmp_path, monkeypatch) -> None:
    forward = LlamaModel.forward
    monkeypatch.setattr(  # it forgets what it read
        LlamaModel,
        "forward",
        lambda self, *args, past_key_values=None, attention_mask=None, **k: forward(self, *args, **k),
    )
    (note,) = on_policy_eval(tiny(), tiny(), tmp_path).notes
    assert note.startswith("rollouts.engine: the student (llama) writes more slowly than others")


def test_a_student_that_is_its_teacher_is_at_zero(tmp_path) -> None:
    model = tiny()
    assert on_policy_eval(model, model, tmp_path)()["on_policy_reverse_kl"] == pytest.approx(0.0, abs=1e-6)
