"""What the tests with a real vLLM share: the student that it copies, its recipe, and an engine that a test may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from potstill.config import StudentConfig
from potstill.config.rollouts import EngineConfig, RolloutsConfig, SamplingConfig
from potstill.models import LanguageModel, load_student

MAX_LENGTH = 128
EOS = 1


def shipped_teacher() -> LanguageModel:
    return load_student(StudentConfig(model="shipped:teacher"), torch.device("cpu"), 0)


def shake(student: LanguageModel, seed: int, scale: float = 0.02) -> None:
    """Other weights, as a few steps of training would leave them; the head's and the norms' too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in student.model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def rollouts(server: str | None = None, options: dict[str, Any] | None = None, **sampling: Any) -> RolloutsConfig:
    engine = EngineConfig(kind="vllm", server=server, options=options or {})
    return RolloutsConfig(
        on_policy_fraction=1, engine=engine, sampling=SamplingConfig(**({"max_new_tokens": 16} | sampling))
    )


@dataclass
class Writer:
    """An engine, the student it copies, and how it samples, which a test may change."""

    engine: Any
    student: LanguageModel

    def sampling(self, **keys: Any) -> SamplingConfig:
        self.engine.sampling = SamplingConfig(**({"max_new_tokens": 16} | keys))
        return self.engine.sampling

    def ends_with(self, *ids: int) -> None:
        self.engine.stop_ids = ids
