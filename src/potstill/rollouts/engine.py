"""What every engine that writes text has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to go on from. Engines share the work of equal prompts where they can."""

    ids: npt.NDArray[np.int32]  # [P], at least one
    seed: int  # 64 bits; the text depends on the prompt, the weights and this alone, not on what else is asked for


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt."""

    ids: npt.NDArray[np.int32]  # [C]; with the eos that ended it, and nothing after that. May be empty
    logprobs: npt.NDArray[np.float32]  # [C]; of each token, after temperature and truncation: what it was drawn from
    end: Literal["eos", "stop", "length"]


class Engine(Protocol):
    """Writes text with a model. The one that it was made with, until it is told that there are new weights."""

    version: int  # of the weights it writes with: optimizer steps taken

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        """In the order asked for. May be called on another thread, one call at a time."""
        ...

    def update(self, version: int) -> None:
        """Take the weights that the student has now. Called between generations, when no step is under way."""
        ...

    def close(self) -> None:
        """At the end of a run, however it ends."""
        ...
