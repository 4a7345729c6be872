"""One text that the student wrote, and every kind of teacher: live, behind a server, and a cache that is filled from either
say the same about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taught import answers, data_of, relative, step, write_files
from tiny import CPU, LLAMA, tiny
from transformers import AutoTokenizer

from potstill.cache.reading import examples_of
from potstill.config import DataConfig, LossConfig, SamplingConfig, StudentConfig, TeacherConfig
from potstill.data import Encoder
from potstill.data.dealing import Share
from potstill.models import LanguageModel, load_student
from potstill.objective.student_loss import LossSettings
from potstill.rollouts.buffer import Layout, laid_out
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.prompts import Answers, Prompter, stop_ids
from potstill.rollouts.transformers import TransformersEngine
from potstill.shipped import locate
from potstill.teachers.open import open_teachers

PIECES = "shipped:tokenizers/pieces-1k"
METHODS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return data_of(write_files(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0, initializer_range=0.2)


@pytest.fixture(scope="module")
def other() -> LanguageModel:
    """With other tokens than the teacher's."""
    made = load_student(StudentConfig(config={**LLAMA, "initializer_range": 0.2}, tokenizer=PIECES), CPU, 0)
    made.tokenizer.chat_template = AutoTokenizer.from_pretrained(locate("shipped:tokenizers/bytes-2k")).chat_template
    return made


def rollouts(student: LanguageModel, data: DataConfig):
    """Batches of texts that it wrote to prompts of all kinds; most of them no tokenizer would cut like that."""
    prompter = Prompter(student.tokenizer, most=80, prompt_tokens=6, kwargs={})
    prompts = [p for piece in examples_of(data, student.tokenizer) if (p := prompter(piece)) is not None][::2]
    engine = TransformersEngine(student, SamplingConfig(max_new_tokens=16), stop_ids=stop_ids(student, True))
    written = engine.generate([GenerationRequest(prompt.ids, i) for i, prompt in enumerate(prompts)])
    made = Answers(student, Encoder(student.tokenizer, max_length=96, append_eos=True), {})
    examples = [made.own(p, text, "student", 0) for p, text in zip(prompts, written, strict=True)]
    again = [student.tokenizer(e.text, add_special_tokens=e.messages is None).input_ids for e in examples]
    assert sum(ids != e.ids.tolist() for ids, e in zip(again, examples, strict=True)) > len(examples) // 2
    return laid_out(examples, Layout(len(examples), Share(4), 0, packing=True))


@pytest.fixture
def opened():
    made: list[Any] = []

    def get(student: LanguageModel, data: DataConfig, config: dict[str, Any], **loss: Any):
        found = open_teachers([TeacherConfig.model_validate(config)], student, data, LossConfig(**loss), CPU)
        made.extend(found.teachers)
        return found.teachers[0]

    yield get
    for teacher in made:
        teacher.close()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "policy_gradient_kl"])
def test_with_the_students_tokens(opened, served, tiny_teacher, data, student, tmp_path: Path, divergence: str) -> None:
    batches = rollouts(student, data)
    knobs = LossSettings(divergence, 0.5, 0.1, 1.0, 1.0, 0.0)
    live = opened(student, data, {"model": str(tiny_teacher)}, divergence=divergence)
    expected, gradients = step(student, batches, answers(live, batches), knobs)
    hidden = {"store": {"kind": "hidden"}}
    kinds = {
        "remote, hidden": {"server": served.address, "remote": {"kind": "hidden"}},
        "a cache beside the model": {"model": str(tiny_teacher), "cache": str(tmp_path / "live"), **hidden},
        "a cache beside the server": {"server": served.address, "cache": str(tmp_path / "served"), **hidden},
    }
    if divergence == "policy_gradient_kl":
        kinds["remote, chosen"] = {"server": served.address, "remote": {"kind": "token_logprobs"}}
    for name, config in kinds.items():
        for _ in range(2):  # the second time a cache has it
            teacher = opened(student, data, config, divergence=divergence)
            loss, found = step(student, batches, answers(teacher, batches), knobs)
            assert loss == pytest.approx(expected, rel=1e-5), name
            assert relative(found, gradients) <= 2e-5, name
    assert abs(expected) > 0.05


def test_all_entries_of_the_top_k_are_the_whole_distribution(opened, served, tiny_teacher, data, student) -> None:
    """With k = V nothing is left out."""
    batches = rollouts(student, data)
    knobs = LossSettings("reverse_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    live = opened(student, data, {"model": str(tiny_teacher)}, divergence="reverse_kl")
    expected, gradients = step(student, batches, answers(live, batches), knobs)
    width = len(student.tokenizer)
    for kind in ("top_k", "student_top_k"):
        config = {"server": served.address, "remote": {"kind": kind, "k": width}}
        loss, found = step(
            student, batches, answers(opened(student, data, config, divergence="reverse_kl"), batches), knobs
        )
        assert loss == pytest.approx(expected, rel=1e-5), kind
        assert relative(found, gradients) <= 1e-4, kind


def test_a_cache_of_the_top_k_has_what_the_server_said_within_its_rounding(
    opened, served, data, student, tmp_path
) -> None:
    batches = rollouts(student, data)
    knobs = LossSettings("reverse_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    said = opened(
        student, data, {"server": served.address, "remote": {"kind": "top_k", "k": 64}}, divergence="reverse_kl"
    )
    expected, gradients = step(student, batches, answers(said, batches), knobs)
    config = {"server": served.address, "cache": str(tmp_path / "k"), "store": {"kind": "top_k", "k": 64}}
    for _ in range(2):
        loss, found = step(
            student, batches, answers(opened(student, data, config, divergence="reverse_kl"), batches), knobs
        )
        assert loss == pytest.approx(expected, rel=5e-3)
        assert relative(found, gradients) <= 0.02


@pytest.mark.parametrize("method", METHODS)
def test_with_other_tokens(opened, served, tiny_teacher, data, other, tmp_path: Path, method: str) -> None:
    batches = rollouts(other, data)
    knobs = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
    across = {"cross_tokenizer": {"method": method}}
    live = opened(other, data, {"model": str(tiny_teacher), **across})
    expected, gradients = step(other, batches, answers(live, batches), knobs)
    assert expected > 0.01
    for config in (
        {"server": served.address, "remote": {"kind": "hidden"}},
        {"model": str(tiny_teacher), "cache": str(tmp_path / "live"), "store": {"kind": "hidden"}},
        {"server": served.address, "cache": str(tmp_path / "served"), "store": {"kind": "hidden"}},
    ):
        teacher = opened(other, data, {**config, **across})
        loss, found = step(other, batches, answers(teacher, batches), knobs)
        assert loss == pytest.approx(expected, rel=1e-5) and relative(found, gradients) <= 5e-5


def test_only_the_last_turn_of_a_chat_is_taught(opened, tiny_teacher, data, other) -> None:
    """The teacher's template shows both assistant turns; the student wrote the second."""
    chats = DataConfig.model_validate({**data.model_dump(by_alias=True), "sources": [data.sources[2].model_dump()]})
    batches = rollouts_of_chats = rollouts(other, chats)
    teacher = opened(other, chats, {"model": str(tiny_teacher), "cross_tokenizer": {"method": "span_likelihood"}})
    ready = [teacher.prepare(batch) for batch in batches]
    for batch, made in zip(rollouts_of_chats, ready, strict=True):
        counted = made.counts
        assert counted["tokens"] == batch.supervised_tokens
        assert counted["bytes_in_chunks"] >= 0.8 * counted["bytes"]
        assert all(e.messages is not None and len(e.messages) == 4 for e in batch.examples)
        covered = np.concatenate([torch.as_tensor(made.plan.chunks.first).numpy()])
        assert covered.max() < batch.supervised_tokens
