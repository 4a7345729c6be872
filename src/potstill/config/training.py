"""`loss`, `train`, `checkpoint`, `eval` and `log`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from potstill.config.data import DataConfig
from potstill.config.sections import Positive, Schedule, Scheduled, Section, Share


class LossConfig(Section):
    """What is minimised: kd_weight · divergence(teacher, student) + ce_weight · cross-entropy, summed over the supervised
    tokens and divided once per optimizer step by their number."""

    divergence: Literal[
        "forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd", "policy_gradient_kl"
    ] = Field(
        "forward_kl",
        description="how far the student is from the teacher; docs/losses.md has the formulas. policy_gradient_kl: "
        "reverse KL "
        "by the tokens that the student drew (rollouts.on_policy_fraction: 1), for teachers that tell only how likely "
        "those are",
    )
    discount: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="policy_gradient_kl: how much a token answers for the tokens after it; 0: for itself alone"
    )
    ratio_clip: Annotated[float, Field(ge=1)] = Field(
        2.0, description="policy_gradient_kl: largest ratio of a token's probability now and when it was drawn"
    )
    beta: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="jsd: 0 is forward KL, 1 is reverse KL")
    alpha: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="skew of skew_kl and skew_reverse_kl")
    entropy_gate: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="mix forward KL in where the teacher is unsure: its share of the largest entropy, to this power",
    )
    temperature: Scheduled = Field(
        1.0, description="softmax temperature T of both sides; the divergence is multiplied by T² (tvd: by T)"
    )
    combine_teachers: Literal["sum", "average", "best"] = Field(
        "sum",
        description="with several teachers: the weighted sum of their divergences; one divergence, from the weighted mean of "
        "their distributions (live, one tokenizer); or for each document the one to which it is likeliest",
    )
    teacher_weighting: Literal["ce", "entropy", "max_probability"] | None = Field(
        None,
        description="combine_teachers: sum: weigh the teachers anew for each document, by how likely it is to them, by "
        "how sure they "
        "are, or by the probability of their first choices",
    )
    dynamic_scaling: bool = Field(
        False,
        description="multiply the divergence by cross-entropy ÷ divergence of the step before, so that both are of one size",
    )
    kd_weight: Scheduled = Field(1.0, description="weight of the divergence (α); unused when there is no teacher")
    ce_weight: Scheduled | None = Field(
        None, description="weight of the cross-entropy to the text; default: 0 with a teacher, 1 without"
    )

    @model_validator(mode="after")
    def _ranges(self) -> LossConfig:
        for key in ("temperature", "kd_weight", "ce_weight"):
            number = getattr(self, key)
            if number is None:
                continue
            ends = (number.start, number.end) if isinstance(number, Schedule) else (number,)
            if key == "temperature" and min(ends) <= 0:
                raise ValueError(f"temperature must be above 0, not {min(ends)}")
            if min(ends) < 0:
                raise ValueError(f"{key} must not be negative, and is {min(ends)}")
        return self

    @property
    def policy_gradient(self) -> bool:
        """Whether it learns from the tokens that the student drew, and asks a teacher only how likely those are."""
        return self.divergence == "policy_gradient_kl"


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """What takes the steps."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon on the hidden matrices, AdamW on the rest")
    lr: Annotated[float, Field(gt=0)] = Field(3e-4, description="peak learning rate of AdamW")
    muon_lr: Annotated[float, Field(gt=0)] = Field(0.02, description="peak learning rate of Muon")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's betas")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="on matrices only")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="Muon's momentum")


class LrScheduleConfig(Section):
    """The learning rate over the run, as a share of its peak."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = Field("cosine", description="after the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up; this or warmup_ratio")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="warm-up as a share of all steps")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="last learning rate as a share of the peak"
    )
    decay: Share = Field(0.2, description="wsd: share of the steps, at the end, that decays")

    @model_validator(mode="after")
    def _one_warmup(self) -> LrScheduleConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        return self


class TrainConfig(Section):
    """How long, in what steps and on what. Exactly one of `steps` and `epochs`."""

    steps: Positive | None = Field(None, description="optimizer steps; this or epochs")
    epochs: Positive | None = Field(None, description="passes over the data; this or steps")
    batch_size: Positive = Field(8, description="rows per optimizer step: packed rows, or documents without packing")
    micro_batch_size: Positive | None = Field(
        None, description="rows per forward pass; must divide batch_size; default all"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="largest gradient norm; null: no clipping"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast over weights kept in student.dtype")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, a third more time")
    compile: bool = Field(False, description="torch.compile the student's layers")
    seed: int = Field(0, description="initial weights, shuffling, dropout")
    device: str = Field("auto", description="auto: cuda, mps or cpu, whichever there is")

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs (to replace one by the other, set it to null)")
        if self.batch_size % self.micro:
            raise ValueError(f"micro_batch_size {self.micro} does not divide batch_size {self.batch_size}")
        return self

    @property
    def micro(self) -> int:
        return self.micro_batch_size or self.batch_size


class CheckpointConfig(Section):
    """What is saved, and how a run goes on. A checkpoint is also written at the end, when the run is stopped, and when an
    evaluation is the best so far."""

    every: Positive | None = Field(None, description="steps between checkpoints; default: by time only")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        15, description="minutes after a checkpoint before there is another: what a crash can cost; null: by steps only"
    )
    keep: Positive = Field(2, description="how many of the newest to keep (the best is kept besides)")
    resume: Literal["auto", "never", "force"] = Field(
        "auto",
        description="auto: go on where the run folder stops; never: refuse a used folder; force: with other settings too",
    )
    push_to_hub: str | None = Field(None, description="hub repository the final model is pushed to")


class EvalConfig(Section):
    """Held-out text, read in order and without an added eos, and beginnings to complete."""

    data: DataConfig = Field(description="held-out text")
    every: Positive | None = Field(None, description="steps between evaluations; always at the end")
    examples: Positive | None = Field(None, description="use only the first so many examples")
    batch_size: Positive = Field(8, description="rows per forward pass")
    prompts: list[str] = Field([], description="beginnings the student completes, shown in the report")
    max_new_tokens: Positive = Field(64, description="length of those completions")
    on_policy_samples: Annotated[int, Field(ge=0)] = Field(
        0,
        description="answers that the student writes to the beginnings of held-out texts (by rollouts.prompt_tokens and "
        "rollouts.sampling.max_new_tokens), on which the reverse KL to a live teacher is measured; 0: none",
    )


class LogConfig(Section):
    """What is written while a run goes on; docs/metrics.md says what the numbers mean."""

    every: Positive = Field(10, description="steps between lines in a log file (a terminal shows a bar)")
    stat_rows: Annotated[int, Field(ge=0)] = Field(
        256, description="rows a step on which entropies, agreement and KL at T = 1 are measured; 0: off"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: str | None = Field(None, description="Weights & Biases project (extra `wandb`)")
