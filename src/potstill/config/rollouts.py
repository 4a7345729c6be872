"""`rollouts`: whose text is trained on, and how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from potstill.config.registry import EngineName
from potstill.config.sections import Positive, Schedule, Section, ServerAddress, key

SMALLEST_SHARE = 1e-9  # what shares may miss one by, for rounding


class SamplingConfig(Section):
    """How text is written. Log-probabilities of what was written are kept after all of this."""

    temperature: float = key(1.0, "of the softmax; 0: always the likeliest token", ge=0)
    top_p: float = key(1.0, "only the likeliest tokens that together have this probability", gt=0, le=1)
    top_k: int = key(0, "only so many of the likeliest tokens; 0: all", ge=0)
    min_p: float = key(0.0, "only tokens with at least this share of the likeliest one's probability", ge=0, lt=1)
    max_new_tokens: Positive | Schedule = key(
        256, "longest text that is written, in tokens (the horizon); may be a schedule, rounded to whole tokens"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = key([], "texts that end what is written, besides the model's eos")
    seed: int | None = key(None, "default: train.seed")

    @model_validator(mode="after")
    def _horizon(self) -> SamplingConfig:
        horizon = self.max_new_tokens
        if isinstance(horizon, Schedule) and min(horizon.start, horizon.end) < 1:
            raise ValueError(f"max_new_tokens must be 1 at least, and goes from {horizon.start:g} to {horizon.end:g}")
        return self

    def horizon(self, progress: float) -> int:
        """max_new_tokens at `progress` (0 at the first step, 1 at the last)."""
        most = self.max_new_tokens
        return round(most.at(progress)) if isinstance(most, Schedule) else most

    @property
    def longest(self) -> int:
        """max_new_tokens at its largest."""
        return max(self.horizon(0.0), self.horizon(1.0))


class EngineConfig(Section):
    """What runs the writer's model."""

    kind: EngineName = key(
        "transformers", "transformers: in this process; vllm: in this process too, or behind `server`"
    )
    server: ServerAddress | list[ServerAddress] | None = key(
        None,
        "vllm: address of a running `vllm serve`, which takes new weights from `folder`; of a list of them each rank asks one",
    )
    folder: str | None = key(
        None, "with `server`: folder for weights that both processes see; default: in the run's folder"
    )
    batch_size: Positive = key(256, "transformers: texts written at once; more are written in turns")
    options: dict[str, Any] = key({}, "vllm: further arguments of vllm.LLM, such as gpu_memory_utilization")

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        for name in ("server", "folder", "options"):
            if getattr(self, name) and self.kind != "vllm":
                raise ValueError(f"{name} goes with kind: vllm")
        if self.server and self.options:
            raise ValueError("options are of vllm in this process; a server has been started with its own")
        if self.folder and not self.server:
            raise ValueError("folder goes with server")
        return self

    @property
    def servers(self) -> list[str]:
        return self.server if isinstance(self.server, list) else [self.server] if self.server else []


class RolloutsConfig(Section):
    """Whose text is trained on: the data set's, or what the student or a teacher writes after the data set's prompts (a
    `prompt` column, a chat up to its last assistant turn, the first tokens of a plain text). docs/on-policy.md."""

    on_policy_fraction: float = key(
        0.0, "share of the prompts that the student answers itself (λ); drawn for each prompt", ge=0, le=1
    )
    teacher_fraction: float = key(
        0.0, "share of the prompts that the first teacher answers (sequence-level distillation)", ge=0, le=1
    )
    num_generations: Positive = key(1, "answers written to each prompt")
    generation_batch_size: Positive | None = key(
        None, "prompts of one generation: × num_generations = train.batch_size × steps_per_generation; default: as many"
    )
    steps_per_generation: Positive = key(
        1, "optimizer steps whose texts are written at once; above 1, later ones train on older weights' text"
    )
    max_staleness: int = key(
        0,
        "optimizer steps that may lie between the weights that wrote a text and those it trains; from 2 × "
        "steps_per_generation − 1 on, the next texts are written while the present ones train",
        ge=0,
    )
    turn: Literal["last", "random", "all"] = key(
        "last",
        "of a chat, the assistant turn that is written, after the data set's own turns before it: the last; one of those that "
        "are supervised, drawn for each prompt; or each of them, as a prompt of its own",
    )
    prompt_tokens: Positive = key(32, "of a plain text: how many of its first tokens are the prompt")
    reward: str | None = key(
        None,
        "module:function, (prompt, completion, record) → number: its advantage among the answers to one prompt is added to "
        "that of policy_gradient_kl; the module is one that is installed or on PYTHONPATH, and its code runs (SECURITY.md)",
        pattern=r"^[\w.]+:\w+$",
    )
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _shares(self) -> RolloutsConfig:
        if self.on_policy_fraction + self.teacher_fraction > 1 + SMALLEST_SHARE:
            raise ValueError(
                f"on_policy_fraction {self.on_policy_fraction:g} and teacher_fraction {self.teacher_fraction:g} are "
                "shares of the same prompts and "
                "sum to more than 1"
            )
        if self.max_staleness < self.steps_per_generation - 1:
            raise ValueError(
                f"steps_per_generation {self.steps_per_generation} trains on texts that are up to "
                f"{self.steps_per_generation - 1} steps old, and max_staleness is {self.max_staleness}: set max_staleness to "
                f"{self.steps_per_generation - 1}, or steps_per_generation to {self.max_staleness + 1}"
            )
        if self.reward is not None and self.num_generations < 2:
            raise ValueError(
                "reward compares the answers to one prompt with each other, and num_generations is 1: set it to 2 or more"
            )
        if self.sampling.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"num_generations {self.num_generations} with sampling.temperature 0 writes the same answer so many "
                "times: set "
                "one of them to 1"
            )
        return self

    @property
    def writes(self) -> bool:
        """Whether any text is written at all."""
        return self.on_policy_fraction + self.teacher_fraction > 0

    @property
    def data_share(self) -> float:
        left = 1.0 - self.on_policy_fraction - self.teacher_fraction
        return left if left > SMALLEST_SHARE else 0.0

    @property
    def overlaps(self) -> bool:
        """Whether the next texts are written while the present ones train. Not by vLLM in this process: it would draw from the
        random numbers that the training draws from."""
        if self.engine.kind == "vllm" and not self.engine.servers:
            return False
        return self.max_staleness >= 2 * self.steps_per_generation - 1

    def row_conflicts(self, batch_size: int) -> Iterator[str]:
        """Why the prompts of a generation do not fill its steps exactly."""
        rows = batch_size * self.steps_per_generation
        of = f"train.batch_size {batch_size}" + (
            f" × steps_per_generation {self.steps_per_generation}" if self.steps_per_generation > 1 else ""
        )
        if rows % self.num_generations:
            fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            yield (
                f"rollouts.num_generations {self.num_generations} does not divide the {rows} rows of a generation ({of}): "
                f"{fit} would fit"
            )
            return
        prompts = rows // self.num_generations
        if self.generation_batch_size not in (None, prompts):
            yield (
                f"rollouts.generation_batch_size {self.generation_batch_size} × num_generations {self.num_generations} = "
                f"{self.generation_batch_size * self.num_generations}, and a generation has {rows} rows ({of}): "
                f"generation_batch_size {prompts} would fit, or train.batch_size "
                f"{self.generation_batch_size * self.num_generations / self.steps_per_generation:g}"
            )
