"""Whole runs with a real vLLM: one that writes, in the process and behind HTTP, and one that teaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import potstill
from potstill.config import LossConfig, TeacherConfig
from potstill.config.recipe import load_recipe
from potstill.losses.dense import target_logits
from potstill.teachers.live import LiveModel
from potstill.teachers.open import open_teachers
from potstill.training.feed import open_feed
from potstill.training.run import Run
from potstill.training.setup import assemble
from potstill.types import TokenLogprobsTarget, TopKTarget

pytestmark = pytest.mark.vllm


def recipe(run: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": str(run),
        "student": {"from": "shipped:teacher", "layers": [0, 4]},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {
            "sources": [{"files": "shipped:corpus/train.parquet", "fraction": 0.02}],
            "max_length": 64,
            "piece_bytes": 300,
        },
        "rollouts": {"on_policy_fraction": 1.0, "prompt_tokens": 12, "sampling": {"max_new_tokens": 24}},
        "loss": {"divergence": "reverse_kl"},
        "train": {"steps": 4, "batch_size": 8, "micro_batch_size": 4, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 2},
        "log": {"tensorboard": False},
    } | sections


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def written_by(server: str | None, folder: Path) -> dict[str, Any]:
    engine = {"kind": "vllm"} | ({} if server is None else {"server": server, "folder": str(folder / "weights")})
    return {"on_policy_fraction": 1.0, "prompt_tokens": 12, "sampling": {"max_new_tokens": 24}, "engine": engine}


@pytest.mark.parametrize("where", ["in the process", "behind a server"])
def test_every_step_trains_on_what_its_own_weights_wrote(
    needs_vllm: None, request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    """The gap between what a token was drawn with and what it is now is rounding: the weights arrived before every step."""
    student = {"from": "shipped:teacher", "layers": [0, 1, 2, 3, 4]}  # of the shape that the server serves
    server = request.getfixturevalue("server_to_update") if where == "behind a server" else None
    run = tmp_path / "run"
    loss = {"divergence": "forward_kl", "temperature": 2.0}
    potstill.train(recipe(run, rollouts=written_by(server, tmp_path), student=student, loss=loss))
    found = metrics(run)
    assert len(found) == 4 and all(line["rollout_staleness"] == 0 for line in found)
    for line in found:
        assert line["sampling_logprob_gap"] < 1e-3, line["step"]


def test_in_the_process_a_run_goes_on_after_it_was_stopped(needs_vllm: None, tmp_path: Path) -> None:
    keys = recipe(tmp_path / "run", rollouts=written_by(None, tmp_path))
    potstill.train(keys)
    potstill.train(keys | {"train": {**keys["train"], "steps": 8}})
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, 9))
    assert all(line["sampling_logprob_gap"] < 1e-3 for line in found)


@pytest.mark.parametrize("kind", ["top_k", "token_logprobs"])
def test_as_a_teacher_it_says_what_the_live_model_says(vllm_server: str, tmp_path: Path, kind: str) -> None:
    """On what the student wrote: the exact top k of the live teacher, and the likelihood of the drawn tokens."""
    seen: list[Any] = []
    divergence = "reverse_kl" if kind == "top_k" else "policy_gradient_kl"
    remote = {"kind": kind} | ({"k": 32} if kind == "top_k" else {})
    server = {"server": vllm_server, "tokenizer": "shipped:teacher", "remote": remote}
    keys = recipe(tmp_path / "run", teachers=[server], loss={"divergence": divergence})

    class Watch(potstill.Callback):
        def stepped(self, run: Any, found: Any) -> None:
            seen.append(found)

    run = potstill.train(keys, [Watch()])
    assert run.step == 4 and all(torch.isfinite(torch.tensor(found["kd"])) for found in seen)
    loaded = load_recipe(recipe(tmp_path / "again", teachers=[server], loss={"divergence": divergence}))
    parts = assemble(loaded)
    live_parts = open_teachers(
        [TeacherConfig(model="shipped:teacher")], parts.student, parts.data, LossConfig(), parts.device
    )
    live = live_parts.teachers[0]
    assert isinstance(live.source, LiveModel)
    with open_feed(parts, Run(tmp_path / "again", total_steps=1)) as feed:
        step = next(feed)
        for batch, ready in zip(step.step.batches, step.ready, strict=True):
            target = parts.teachers[0].targets(batch, ready[0])
            logp = target_logits(live.targets(batch), slice(None)).double().log_softmax(-1)
            if isinstance(target, TokenLogprobsTarget):
                expected = logp.gather(-1, batch.rows.labels[:, None]).squeeze(-1)
                torch.testing.assert_close(target.logprobs.double(), expected, rtol=0, atol=1e-4)
                continue
            assert isinstance(target, TopKTarget)
            best, ids = logp.topk(32, -1)
            torch.testing.assert_close(target.logprobs.double(), best, rtol=0, atol=1e-4)
            torch.testing.assert_close(logp.gather(-1, target.ids), best, rtol=0, atol=1e-4)
            rest = logp.scatter(-1, ids, -torch.inf).logsumexp(-1)
            torch.testing.assert_close(
                target.tail.double().exp(), rest.exp(), rtol=0, atol=1e-5
            )  # one minus the others
    parts.teachers[0].close()


def test_as_a_teacher_it_writes_what_the_live_model_writes(vllm_server: str, tmp_path: Path) -> None:
    """Sequence-level distillation with the teacher behind vLLM: at temperature 0, the live model's own text."""
    writes = {
        "on_policy_fraction": 0.0,
        "teacher_fraction": 1.0,
        "prompt_tokens": 12,
        "sampling": {"max_new_tokens": 24, "temperature": 0.0},
    }
    server = {"server": vllm_server, "tokenizer": "shipped:teacher", "remote": {"kind": "top_k", "k": 8}}
    found = []
    for name, teacher in (("live", {"model": "shipped:teacher"}), ("served", server)):
        loaded = load_recipe(recipe(tmp_path / name, teachers=[teacher], rollouts=writes, loss={"ce_weight": 1.0}))
        parts = assemble(loaded)
        with open_feed(parts, Run(tmp_path / name, total_steps=1)) as feed:
            step = next(feed)
        found.append(sorted(tuple(e.ids.tolist()) for batch in step.step.batches for e in batch.examples))
        assert all(e.writer == "teacher" and e.behaviour is None for b in step.step.batches for e in b.examples)
        parts.teachers[0].close()
    assert found[0] == found[1] and len(found[0]) == 8
    run = potstill.train(recipe(tmp_path / "run", teachers=[server], rollouts=writes, loss={"ce_weight": 1.0}))
    assert run.step == 4 and run.counts["written_examples"] == 32
