"""`loss`, `train`, `checkpoint`, `eval` and `log`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from potstill.config.data import DataConfig
from potstill.config.registry import DivergenceName
from potstill.config.sections import Positive, Schedule, Scheduled, Section, Share, key

REPEAT_STEPS = 100  # after which a fresh student reads: benchmarks/cross_quality.py


class TokenWeightsConfig(Section):
    """What each supervised token counts in the loss, by its place in its answer: a completion, an assistant turn, a plain text.
    All that is given is multiplied. Tokens of weight 0 are left out: they are not computed, and do not count in the divisor, in
    which every other token counts as one."""

    skip: int = key(0, "so many first tokens of every answer are left out", ge=0)
    window: Positive | None = key(None, "so many tokens after these count, and those beyond are left out")
    decay: float = key(1.0, "what each token counts of the one before it", gt=0, le=1)
    by_position: list[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]] = key(
        [], "weights by position, as in [[0, 1.0], [64, 0.3]]: from a token of the answer on, until the next one"
    )
    column: str | None = key(
        None, "column of the data with a weight: a number, or a list of numbers, one for each answer of the record"
    )

    @model_validator(mode="after")
    def _positions(self) -> TokenWeightsConfig:
        starts = [start for start, _ in self.by_position]
        if starts and (starts[0] != 0 or sorted(set(starts)) != starts):
            raise ValueError(f"by_position begins at 0 and goes up, and has {starts}: write [[0, 1.0], [64, 0.3]]")
        return self

    @property
    def uneven(self) -> bool:
        """Whether tokens of one answer count differently, besides those that are left out."""
        return self.decay != 1 or len({weight for _, weight in self.by_position if weight}) > 1


class LossConfig(Section):
    """What is minimised: kd_weight · divergence(teacher, student) + ce_weight · cross-entropy + repeat_weight · cross-entropy
    to the token just read, summed over the supervised tokens and divided once per optimizer step by their number."""

    divergence: DivergenceName = key(
        "forward_kl",
        "how far the student is from the teacher; docs/losses.md has the formulas. policy_gradient_kl: reverse KL by "
        "the tokens that the student drew (rollouts.on_policy_fraction: 1), for teachers that tell only how likely "
        "those are",
    )
    discount: float = key(
        0.0, "policy_gradient_kl: how much a token answers for the tokens after it; 0: for itself alone", ge=0, le=1
    )
    ratio_clip: float = key(
        2.0, "policy_gradient_kl: largest ratio of a token's probability now and when it was drawn", ge=1
    )
    reward_weight: Scheduled = key(
        1.0, "policy_gradient_kl with rollouts.reward: what a reward's advantage counts beside the divergence's"
    )
    beta: float = key(0.5, "jsd: 0 is forward KL, 1 is reverse KL", ge=0, le=1)
    alpha: float = key(0.1, "skew of skew_kl and skew_reverse_kl", gt=0, lt=1)
    student_top_k: Positive | None = key(
        None,
        "compare on the student's own so many likeliest tokens, and on all others as one; for teachers that give whole "
        "distributions (live, or hidden states); default: on all tokens",
    )
    entropy_gate: float | None = key(
        None, "mix forward KL in where the teacher is unsure: its share of the largest entropy, to this power", gt=0
    )
    temperature: Scheduled = key(
        1.0, "softmax temperature T of both sides; the divergence is multiplied by T² (tvd: by T)"
    )
    combine_teachers: Literal["sum", "average", "best"] = key(
        "sum",
        "with several teachers: the weighted sum of their divergences; one divergence, from the weighted mean of "
        "their distributions (live, one tokenizer); or for each document the one to which it is likeliest",
    )
    token_weights: TokenWeightsConfig | None = key(None, "default: every supervised token counts 1")
    token_clip: float | None = key(
        None,
        "largest divergence of a token, per teacher (the student learns nothing from one beyond it); policy_gradient_kl: "
        "largest size of a token's advantage, before the discount; default: no clamp",
        gt=0,
    )
    teacher_weighting: Literal["ce", "entropy", "max_probability"] | None = key(
        None,
        "combine_teachers: sum: weigh the teachers anew for each document, by how likely it is to them, by how sure "
        "they are, or by the probability of their first choices",
    )
    dynamic_scaling: bool = key(
        False, "multiply the divergence by cross-entropy ÷ divergence of the step before, so that both are of one size"
    )
    kd_weight: Scheduled = key(1.0, "weight of the divergence (α); unused when there is no teacher")
    ce_weight: Scheduled | None = key(
        None, "weight of the cross-entropy to the text; default: 0 with a teacher, 1 without"
    )
    repeat_weight: Scheduled | None = key(
        None,
        "weight of −log Q(the token just read): docs/losses.md; default: 0, and {start: 0.3, end: 0} over the first 100 "
        "steps (at most half of them; the first tenth of train.epochs) for a fresh student (student.config) with AdamW, a "
        "teacher with another tokenizer and a data set's text (saved with the run)",
    )

    @model_validator(mode="after")
    def _ranges(self) -> LossConfig:
        for name in ("temperature", "kd_weight", "ce_weight", "repeat_weight", "reward_weight"):
            number = getattr(self, name)
            lowest = min(number.start, number.end) if isinstance(number, Schedule) else number
            if name == "temperature" and lowest <= 0:
                raise ValueError(f"temperature must be above 0, not {lowest}")
            if lowest is not None and lowest < 0:
                raise ValueError(f"{name} must not be negative, and is {lowest}")
        return self

    @property
    def policy_gradient(self) -> bool:
        """Whether it learns from the tokens that the student drew, and asks a teacher only how likely those are."""
        return self.divergence == "policy_gradient_kl"


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """What takes the steps."""

    name: Literal["adamw", "muon"] = key("adamw", "muon: Muon on the hidden matrices, AdamW on the rest")
    lr: float = key(3e-4, "peak learning rate of AdamW", gt=0)
    muon_lr: float = key(0.02, "peak learning rate of Muon", gt=0)
    betas: tuple[Beta, Beta] = key((0.9, 0.95), "AdamW's betas")
    eps: float = key(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = key(0.1, "on matrices only", ge=0)
    momentum: float = key(0.95, "Muon's momentum", ge=0, lt=1)
    offload: bool = key(
        False,
        "AdamW in the host's memory: its state and a copy of the weights are there, 12 bytes per parameter; gradients go and "
        "weights come back once per step (one process)",
    )

    @model_validator(mode="after")
    def _offloads(self) -> OptimizerConfig:
        if self.offload and self.name == "muon":
            raise ValueError("offload goes with adamw: Muon's products are for the device")
        return self


class LrScheduleConfig(Section):
    """The learning rate over the run, as a share of its peak."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = key("cosine", "after the warm-up")
    warmup_steps: int = key(0, "steps of linear warm-up; this or warmup_ratio", ge=0)
    warmup_ratio: float = key(0.0, "warm-up as a share of all steps", ge=0, le=1)
    min_lr_ratio: float = key(0.1, "last learning rate as a share of the peak", ge=0, le=1)
    decay: Share = key(0.2, "wsd: share of the steps, at the end, that decays")

    @model_validator(mode="after")
    def _one_warmup(self) -> LrScheduleConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        return self


class TrainConfig(Section):
    """How long, in what steps and on what. Exactly one of `steps` and `epochs`."""

    steps: Positive | None = key(None, "optimizer steps; this or epochs")
    epochs: Positive | None = key(None, "passes over the data; this or steps")
    batch_size: Positive = key(8, "rows per optimizer step: packed rows, or documents without packing")
    micro_batch_size: Positive | None = key(
        None, "rows per forward pass of one process; default: batch_size ÷ the data-parallel processes"
    )
    tokens_per_micro_batch: Positive | None = key(
        None,
        "tokens per forward pass of one process, padding included: as many rows of like length as fit; this or "
        "micro_batch_size, and at least data.max_length",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    max_grad_norm: float | None = key(1.0, "largest gradient norm; null: no clipping", gt=0)
    precision: Literal["auto", "fp32", "tf32", "bf16"] = key(
        "auto",
        "of the products: bf16 is autocast over weights kept in student.dtype, tf32 is for CUDA; auto: bf16 on CUDA, fp32 "
        "elsewhere and for a float64 student",
    )
    gradient_checkpointing: bool = key(False, "recompute activations: less memory, a third more time")
    compile: bool = key(False, "torch.compile the layers of the student and of live teachers that are whole on a rank")
    seed: int = key(0, "initial weights, shuffling, dropout")
    device: str = key("auto", "auto: cuda, mps or cpu, whichever there is")
    timeout: float = key(
        600.0, "seconds that a process waits for the others within a step, once the first is taken", gt=0
    )

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs (to replace one by the other, set it to null)")
        if self.micro_batch_size is not None and self.tokens_per_micro_batch is not None:
            raise ValueError(
                "give micro_batch_size or tokens_per_micro_batch, not both (to replace one, set it to null)"
            )
        return self

    def fading_repeat(self) -> Schedule:
        """The repeat_weight of a fresh student, where the recipe has none."""
        over = 0.1 if self.steps is None else min(0.5, REPEAT_STEPS / self.steps)
        return Schedule(start=0.3, end=0.0, over=over)

    def micro(self, ranks: int) -> int:
        """Rows of a forward pass, where so many ranks share those of a step."""
        return self.micro_batch_size or -(-self.batch_size // ranks)


class ParallelConfig(Section):
    """How the student is spread over the processes that torchrun starts; docs/scaling.md. The product of all but ep is their
    number, less the ranks that teachers have of their own."""

    dp_replicate: Positive = key(1, "copies of the student, each sharded over dp_shard ranks (HSDP)")
    dp_shard: Positive | Literal["auto"] = key(
        "auto", "ranks over which a copy is sharded (FSDP2), each with other rows; auto: what is left of the processes"
    )
    cp: Positive = key(1, "context parallel: ranks that share the positions of each row")
    tp: Positive = key(1, "tensor parallel: ranks that share each matrix, within a host")
    ep: Positive = key(1, "expert parallel: ranks that share the experts of a mixture; of dp_shard × tp")


class CheckpointConfig(Section):
    """What is saved, and how a run goes on. A checkpoint is also written at the end, when the run is stopped, and when an
    evaluation is the best so far."""

    every: Positive | None = key(None, "steps between checkpoints; default: by time only")
    every_minutes: float | None = key(
        15, "minutes after a checkpoint before there is another: what a crash can cost; null: by steps only", gt=0
    )
    keep: Positive = key(2, "how many of the newest to keep (the best is kept besides)")
    resume: Literal["auto", "never", "force"] = key(
        "auto", "auto: go on where the run folder stops; never: refuse a used folder; force: with other settings too"
    )
    async_save: bool = key(
        False,
        "write checkpoints while training goes on, from a copy of weights and optimizer state in the host's memory",
    )
    push_to_hub: str | None = key(None, "hub repository the final model is pushed to")


class EvalConfig(Section):
    """Held-out text, read in order and without an added eos, and beginnings to complete."""

    data: DataConfig = Field(description="held-out text")
    every: Positive | None = key(None, "steps between evaluations; always at the end")
    examples: Positive | None = key(None, "use only the first so many examples")
    batch_size: Positive = key(8, "rows per forward pass")
    prompts: list[str] = key([], "beginnings the student completes, shown in the report")
    max_new_tokens: Positive = key(64, "length of those completions")
    on_policy_samples: int = key(
        0,
        "answers that the student writes to the beginnings of held-out texts (by rollouts.prompt_tokens and "
        "rollouts.sampling.max_new_tokens), on which the reverse KL to a live teacher is measured; 0: none",
        ge=0,
    )
    draft_tokens: int = key(
        0,
        "tokens per pass that the student drafts for the teacher in speculative decoding, simulated at the beginning of each "
        "of the on_policy_samples; 0: not simulated",
        ge=0,
    )

    @model_validator(mode="after")
    def _drafts_are_written(self) -> EvalConfig:
        if self.draft_tokens and not self.on_policy_samples:
            raise ValueError(
                "draft_tokens goes with on_policy_samples: drafts are the beginnings of what the student writes"
            )
        return self


class LogConfig(Section):
    """What is written while a run goes on; docs/metrics.md says what the numbers mean."""

    every: Positive = key(10, "steps between lines in a log file (a terminal shows a bar)")
    stat_rows: int = key(256, "rows a step on which entropies, agreement and KL at T = 1 are measured; 0: off", ge=0)
    tensorboard: bool = key(True, "write TensorBoard events")
    wandb: str | None = key(None, "Weights & Biases project (extra `wandb`)")
