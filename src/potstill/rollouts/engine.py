"""What every engine that writes text has in common, and how one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from potstill.config import RolloutsConfig, SamplingConfig
from potstill.config.registry import ROLLOUT_ENGINES, load
from potstill.models import LanguageModel
from potstill.rollouts.writing_ranks import ALONE, WritingRanks


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to go on from. Engines share the work of equal prompts where they can."""

    ids: npt.NDArray[np.int32]  # [P], at least one
    seed: int  # 64 bits; the text depends on the prompt, the weights and this alone, not on what else is asked for
    most: int | None = None  # tokens of the text; None: as many as the engine's sampling says


def asked_tokens(asked: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[int]:
    """How long each text may be."""
    return [sampling.longest if ask.most is None else ask.most for ask in asked]


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt."""

    ids: npt.NDArray[np.int32]  # [C]; with the eos that ended it, and nothing after that. May be empty
    logprobs: npt.NDArray[np.float32]  # [C]; of each token, after temperature and truncation: what it was drawn from
    end: Literal["eos", "stop", "length"]


class Engine(Protocol):
    """Writes text with a model. The one that it was made with, until it is told that there are new weights. With several ranks
    (`EngineSetup.team`) all of them make the same calls, and are given the same texts."""

    version: int  # of the weights it writes with: optimizer steps taken
    notes: Sequence[str]  # what its user should know before the first step

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        """In the order asked for. May be called on another thread, one call at a time."""
        ...

    def update(self, version: int) -> None:
        """Take the weights that the student has now. Called between generations, when no step is under way."""
        ...

    def close(self) -> None:
        """At the end of a run, however it ends."""
        ...


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is opened with."""

    model: LanguageModel
    rollouts: RolloutsConfig
    stop_ids: Sequence[int]  # the ids that end a text, and no others do
    max_length: int  # of a prompt and what is written after it: data.max_length
    folder: Path  # of the run
    version: int = 0  # optimizer steps that the model has taken
    autocast: Any = nullcontext  # a context to compute in
    student: bool = True  # else a teacher, whose weights never change, and which is whole on every rank
    team: WritingRanks = ALONE  # the ranks that write together; a student may be spread over them


def open_engine(kind: str, setup: EngineSetup) -> Engine:
    engine: Engine = load(ROLLOUT_ENGINES[kind])(setup)
    return engine
