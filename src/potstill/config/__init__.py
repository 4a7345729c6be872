"""The whole recipe surface as pydantic models. Strict: an unknown key is an error. What is present decides; there are
no mode flags that could contradict the rest. `docs/recipe.md` and `potstill schema` are generated from this room."""

from __future__ import annotations

from pydantic import Field, model_validator

from potstill.config.data import DataConfig, SourceConfig
from potstill.config.models import (
    CrossTokenizerConfig,
    Dtype,
    RemoteConfig,
    StoreConfig,
    StudentConfig,
    TeacherConfig,
)
from potstill.config.rollouts import EngineConfig, RolloutsConfig, SamplingConfig
from potstill.config.sections import Scheduled, Section
from potstill.config.training import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    LossConfig,
    LrScheduleConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "CrossTokenizerConfig",
    "DataConfig",
    "Dtype",
    "EngineConfig",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "LrScheduleConfig",
    "OptimizerConfig",
    "Recipe",
    "RemoteConfig",
    "RolloutsConfig",
    "SamplingConfig",
    "SourceConfig",
    "StoreConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
]


class Recipe(Section):
    """One distillation run."""

    run: str = Field("runs/run", description="folder of the run: recipe, metrics, checkpoints")
    student: StudentConfig
    teachers: list[TeacherConfig] = Field([], description="empty: plain training on the text")
    data: DataConfig
    rollouts: RolloutsConfig = RolloutsConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig | None = None
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        if self.train.epochs is not None and any(s.weight is not None for s in self.data.sources):
            raise ValueError("train.epochs reads every source whole, so weights have no meaning: use train.steps")
        if self.ce_weight == 0 and (not self.teachers or self.loss.kd_weight == 0):
            why = "loss.kd_weight is 0" if self.teachers else "there is no teacher"
            raise ValueError(f"{why} and loss.ce_weight is 0: nothing to learn from")
        self._written()
        return self

    def _written(self) -> None:
        """What written text asks of the rest of the recipe."""
        rollouts = self.rollouts
        if rollouts.data_share > 0 and any(s.kind == "completion" and not s.completion for s in self.data.sources):
            raise ValueError(
                "data.sources: a source has a prompt and no completion, and a share of the text is the data set's: name the "
                "column with completions, or let all answers be written (rollouts.on_policy_fraction: 1)"
            )
        if self.loss.policy_gradient and rollouts.on_policy_fraction < 1:
            raise ValueError(
                "loss.divergence: policy_gradient_kl learns from tokens that the student drew itself: set "
                "rollouts.on_policy_fraction to 1"
            )
        if self.loss.policy_gradient and rollouts.sampling.temperature == 0:
            raise ValueError(
                "loss.divergence: policy_gradient_kl learns from tokens that were drawn, and rollouts.sampling.temperature 0 "
                "draws none: set it above 0"
            )
        if rollouts.on_policy_fraction == 1 and self.loss.kd_weight == 0:
            raise ValueError(
                "loss.kd_weight is 0 and all text is the student's own, which it has no cross-entropy to: nothing to "
                "learn from"
            )
        if not rollouts.writes:
            return
        rollouts.check_rows(self.train.batch_size)
        if not self.teachers:
            raise ValueError("rollouts: text is written, and there is no teacher to learn from")
        for index, teacher in enumerate(self.teachers):
            if teacher.cache is not None and teacher.model is None and teacher.server is None:
                raise ValueError(
                    f"teachers[{index}]: a cache alone cannot know fresh text: put model or server beside it (it is "
                    "then read, "
                    "and written to), or set rollouts.on_policy_fraction and rollouts.teacher_fraction to 0"
                )
        if rollouts.teacher_fraction and self.teachers[0].context_column is not None:
            raise ValueError(
                "rollouts.teacher_fraction: the first teacher has a prompt of its own, which what it writes would not "
                "be an answer "
                "to: leave teachers[0].context_column out"
            )
        if rollouts.sampling.max_new_tokens >= self.data.max_length:
            raise ValueError(
                f"rollouts.sampling.max_new_tokens {rollouts.sampling.max_new_tokens} leaves no room for a prompt in "
                f"data.max_length {self.data.max_length}"
            )

    @property
    def ce_weight(self) -> Scheduled:
        if self.loss.ce_weight is not None:
            return self.loss.ce_weight
        return 0.0 if self.teachers else 1.0
