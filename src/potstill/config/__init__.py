"""The whole recipe surface as pydantic models. Strict: an unknown key is an error. What is present decides; there are
no mode flags that could contradict the rest. `docs/recipe.md` and `potstill schema` are generated from this room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import Field, model_validator

from potstill.config.compatibility import Combination, reasons
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
    ParallelConfig,
    TokenWeightsConfig,
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
    "ParallelConfig",
    "Recipe",
    "RemoteConfig",
    "RolloutsConfig",
    "SamplingConfig",
    "SourceConfig",
    "StoreConfig",
    "StudentConfig",
    "TeacherConfig",
    "TokenWeightsConfig",
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
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig | None = None
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        """Every rule between sections that is broken, one line each."""
        found = (
            self._conflicts(),
            self._model_conflicts(),
            self._chat_conflicts(),
            self._rollout_conflicts(),
            self._incompatible(),
        )
        if broken := list(dict.fromkeys(reason for some in found for reason in some)):
            raise ValueError("\n".join(broken))
        return self

    def _incompatible(self) -> Iterator[str]:
        live = any(teacher.model or teacher.source or teacher.copies for teacher in self.teachers)
        compared = self.eval is not None and self.eval.on_policy_samples > 0 and not live
        for index, teacher in enumerate(self.teachers or [None]):
            combination = Combination.of(teacher, self.loss, self.rollouts, self.parallel, first=index == 0)
            yield from reasons(replace(combination, compared=compared), f"teachers[{index}]")

    def _conflicts(self) -> Iterator[str]:
        """Between keys of different sections, and what there is nothing to learn from."""
        if self.train.epochs is not None and any(s.weight is not None for s in self.data.sources):
            yield "train.epochs reads every source whole, so weights have no meaning: use train.steps"
        tokens, longest = self.train.tokens_per_micro_batch, self.data.max_length
        if tokens is not None and tokens < longest:
            yield (
                f"train.tokens_per_micro_batch {tokens} has no room for a row of data.max_length {longest}: raise it to "
                f"{longest} at least, or lower data.max_length"
            )
        if self.ce_weight == 0 and (not self.teachers or self.loss.kd_weight == 0):
            why = "loss.kd_weight is 0" if self.teachers else "there is no teacher"
            yield f"{why} and loss.ce_weight is 0: nothing to learn from"
        elif self.rollouts.on_policy_fraction == 1 and self.loss.kd_weight == 0:
            yield (
                "loss.kd_weight is 0 and all text is the student's own, which it has no cross-entropy to: nothing to "
                "learn from"
            )

    def _model_conflicts(self) -> Iterator[str]:
        for index, teacher in enumerate(self.teachers):
            if teacher.cache is not None and Path(teacher.cache).resolve() == Path(self.run).resolve():
                yield f"teachers[{index}].cache is the run's own folder ({self.run}): give one of them another"
            if not teacher.adapter and self.student.lora is None:
                yield f"teachers[{index}].adapter: there is no adapter to leave out: give student.lora, or leave it out"
        if self.student.lora is not None and self.student.lora.use_dora and self.parallel.tp > 1:
            yield (
                "student.lora.use_dora: the lengths of rows that tensor parallelism cuts are not known on one rank: set "
                "parallel.tp to 1"
            )

    def _chat_conflicts(self) -> Iterator[str]:
        if any(source.messages for source in self.data.sources):
            return
        if self.rollouts.turn != "last":
            yield "rollouts.turn goes with chats (data.sources[].messages), and no source has any: leave it out"
        for index, teacher in enumerate(self.teachers):
            if teacher.system is not None or teacher.chat_template_kwargs is not None:
                yield (
                    f"teachers[{index}].system and chat_template_kwargs go with chats (data.sources[].messages), and no source "
                    "has any: leave them out, or use context_column"
                )

    def _rollout_conflicts(self) -> Iterator[str]:
        rollouts, longest = self.rollouts, self.rollouts.sampling.longest
        if rollouts.data_share > 0 and any(s.kind == "completion" and not s.completion for s in self.data.sources):
            yield (
                "data.sources: a source has a prompt and no completion, and a share of the text is the data set's: name the "
                "column with completions, or let all answers be written (rollouts.on_policy_fraction: 1)"
            )
        if not rollouts.writes:
            return
        yield from rollouts.row_conflicts(self.train.batch_size)
        if not self.teachers:
            yield "rollouts: text is written, and there is no teacher to learn from"
        if longest >= self.data.max_length:
            yield (
                f"rollouts.sampling.max_new_tokens {longest} leaves no room for a prompt in data.max_length "
                f"{self.data.max_length}"
            )

    @property
    def ce_weight(self) -> Scheduled:
        if self.loss.ce_weight is not None:
            return self.loss.ce_weight
        return 0.0 if self.teachers else 1.0

    def with_columns(self) -> Recipe:
        """With the columns of the data that keys of other sections name, but for the teachers'."""
        weights = self.loss.token_weights
        named = [] if weights is None or weights.column is None else [weights.column]
        columns = list(dict.fromkeys([*self.data.columns, *named]))
        return self.model_copy(update={"data": self.data.model_copy(update={"columns": columns})})

    def with_repeat_weight(self, weight: Scheduled | None) -> Recipe:
        return self.model_copy(update={"loss": self.loss.model_copy(update={"repeat_weight": weight})})
