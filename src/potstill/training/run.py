"""A run as its folder, and those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """Where a run stands: all that is needed, besides weights and optimizers, to resume it."""

    step: int = 0  # optimizer steps taken so far
    tokens: int = 0  # supervised tokens so far
    data: dict[str, Any] | None = None  # the data iterator's position
    counts: dict[str, int] = field(default_factory=dict)  # of the data so far: tokens, cut tokens, dropped examples …
    total_steps: int = 0
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    kd_scale: float = 1.0  # with loss.dynamic_scaling: cross-entropy ÷ divergence of the last step
    teachers: list[str | None] = field(default_factory=list)  # fingerprints of those behind servers
    base: str | None = None  # with student.lora: the fingerprint of what the adapters were put into


@dataclass
class Run(Progress):
    """What came of a run. The folder holds recipe.yaml, metrics.jsonl, evals.jsonl, checkpoints/ and TensorBoard events."""

    folder: Path
    evaluation: dict[str, Any] | None = None  # the latest one
    checkpoint: Path | None = None  # the newest one
    best: Path | None = None  # the one with the lowest bits per byte
    merged: Path | None = None  # with student.lora: the whole model with the adapter in it, once the run has ended
    stopped_by: str | None = None  # the signal, or the reason given to stop(), that ended it early
    asked_to_stop: str | None = None

    @property
    def model(self) -> Path:
        """The trained student as a folder that transformers loads (an adapter alone: with peft)."""
        if self.merged is not None:
            return self.merged
        assert self.checkpoint is not None, "nothing was saved yet"
        return self.checkpoint / "model"

    @property
    def exit_code(self) -> int:
        """Of the command, as shells have it: 143 after SIGTERM, 130 after Ctrl-C; 0 after the last step and after stop()."""
        return {"SIGTERM": 143, "SIGINT": 130}.get(self.stopped_by or "", 0)

    def stop(self, reason: str = "a callback") -> None:
        """End the run after the step under way, with a checkpoint; the same recipe resumes it."""
        self.asked_to_stop = reason


class Callback:
    """Watches a run. Override what you need; the log files and the progress bar are callbacks themselves."""

    def started(self, run: Run) -> None:
        """Before the first step (of this process: after a resume, `run.step` is not 0)."""

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """After every optimizer step."""

    def evaluated(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        """After every evaluation."""

    def saved(self, run: Run, checkpoint: Path) -> None:
        """After a checkpoint is in place."""

    def ended(self, run: Run) -> None:
        """When the run is over, whether by its last step, a signal or an error."""
