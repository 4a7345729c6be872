"""The whole recipe surface as pydantic models. Strict: an unknown key is an error. What is present decides; there are
no mode flags that could contradict the rest. `docs/recipe.md` and `potstill schema` are generated from this file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from potstill.sections import Positive, Schedule, Scheduled, Section, Share

Dtype = Literal["float32", "bfloat16", "float16"]


class StudentConfig(Section):
    """The model that learns. Exactly one of `model`, `from` (with `layers`) and `config` (with `tokenizer`)."""

    model: str | None = Field(
        None, description="a Hugging Face causal language model: folder, `shipped:NAME` or hub id"
    )
    from_: str | None = Field(None, alias="from", description="a model whose chosen `layers` make the student")
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(None, description="with `from`: layers to keep, in order")
    config: dict[str, Any] | None = Field(
        None, description="a fresh model: a transformers config as keys, with `model_type` (vocab_size is filled in)"
    )
    revision: str | None = Field(None, description="hub revision of `model` or `from`")
    tokenizer: str | None = Field(None, description="folder, `shipped:NAME` or hub id; default: the model's own")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype the student's weights are kept and trained in"
    )
    attn_implementation: str | None = Field(
        None, description="eager, sdpa, flash_attention_2, …; default: the model's own"
    )
    trust_remote_code: bool = Field(False, description="run model code from the hub")

    @model_validator(mode="after")
    def _one_origin(self) -> StudentConfig:
        given = [
            name for name, value in (("model", self.model), ("from", self.from_), ("config", self.config)) if value
        ]
        if len(given) != 1:
            raise ValueError(f"give exactly one of model, from and config (given: {', '.join(given) or 'none'})")
        if bool(self.from_) != bool(self.layers):
            raise ValueError("`from` and `layers` go together: from: MODEL, layers: [0, 2, 4]")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs a model_type, such as llama or gpt2")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a fresh model (config) needs a tokenizer")
        return self


class StoreConfig(Section):
    """What a cache keeps of a teacher; docs/cache.md says what each kind costs and gives."""

    kind: Literal["top_k", "sampled", "hidden", "chosen"] = Field(
        "top_k",
        description="top_k: the k likeliest tokens and the mass of the rest; sampled: draws; hidden: hidden states, exact; "
        "chosen: only how likely the text's own tokens were",
    )
    k: Positive = Field(64, description="top_k: how many tokens")
    temperatures: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = Field(
        [1.0], description="top_k: temperatures at which a student may learn from it (2 bytes a token each)"
    )
    rest: Annotated[int, Field(ge=0, le=4096)] = Field(
        0,
        description="top_k: draws from the rest, from which forward KL learns what is in it; more of them where it is heavy",
    )
    draws: Annotated[int, Field(gt=0, le=4096)] = Field(50, description="sampled: how many draws a token")
    seed: int = Field(0, description="seed of the draws")


class AcrossConfig(Section):
    """How to learn from a teacher with another tokenizer; unused when it is the student's. docs/two-tokenizers.md."""

    method: Literal["spelled", "shared", "projection", "chunk", "uld"] = Field(
        "spelled",
        description="what is compared: the teacher's next token spelled in the student's; or, where both tokenizers have cut "
        "the same bytes, ids that mean the same; the student's ids sent to the teacher's; how likely the bytes are; sorted "
        "probabilities",
    )
    decay: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="projection: an id without a partner goes to the teacher's pieces of it, each with this share of the last",
    )
    chunk_temperature: Annotated[float, Field(gt=0)] = Field(
        4.0, description="chunk: likelihoods are raised to one over this"
    )


class TeacherConfig(Section):
    """A model to learn from, its signal on disk, or both. Its tokenizer must be the student's."""

    model: str | None = Field(
        None, description="a Hugging Face causal language model: folder, `shipped:NAME` or hub id"
    )
    cache: str | None = Field(
        None,
        description="folder that `potstill cache build` made: the teacher is never loaded; beside `model`: what it lacks is "
        "computed and added",
    )
    on_missing: Literal["error", "skip"] = Field(
        "error", description="with `cache` alone: what to do with a document that is not in it; skip counts and reports"
    )
    store: StoreConfig = StoreConfig()
    across: AcrossConfig = AcrossConfig()
    only: dict[str, str | list[str]] = Field(
        {},
        description="which records it teaches, by their columns, as in {domain: math} or {language: [de, fr]}; default: all",
    )
    prompt: str | None = Field(
        None,
        description="column with what it reads in place of the student's prompt: before a plain text, or as the system message "
        "of a chat (a hint that the student does not get; with `model`, without `cache`)",
    )
    revision: str | None = Field(None, description="hub revision")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="weight of this teacher's loss among several")
    dtype: Dtype | Literal["auto"] = Field(
        "auto", description="dtype of its weights; auto: as saved (float32 on a CPU)"
    )
    quantize: Literal["8bit", "4bit"] | None = Field(
        None, description="load in 8 or 4 bits (extra `quant`, needs CUDA)"
    )
    attn_implementation: str | None = Field(None, description="eager, sdpa, flash_attention_2, …")
    trust_remote_code: bool = Field(False, description="run model code from the hub")

    @model_validator(mode="after")
    def _an_origin(self) -> TeacherConfig:
        if self.model is None and self.cache is None:
            raise ValueError("give model, or cache, or both")
        if self.model is not None and self.on_missing == "skip":
            raise ValueError(
                "on_missing: skip goes with a cache alone; with model beside it, what is missing is computed"
            )
        if self.prompt is not None and self.cache is not None:
            raise ValueError("prompt goes with model alone: a cache holds what the teacher says without it")
        return self

    @property
    def columns(self) -> list[str]:
        """Of a record, that it needs."""
        return [*self.only, *([self.prompt] if self.prompt is not None else [])]

    @property
    def name(self) -> str:
        return self.model or self.cache or ""


class SourceConfig(Section):
    """One place that records come from, and which of their columns to read. Exactly one of `files` and `dataset`; one of
    `text`, `prompt` with `completion`, and `messages` (none of them: the column named text)."""

    files: str | list[str] | None = Field(
        None, description="jsonl (also .jsonl.gz), json, parquet, arrow or txt files: paths, globs, `shipped:NAME`"
    )
    dataset: str | None = Field(None, description="a Hugging Face data set: hub name, or a folder that datasets wrote")
    name: str | None = Field(None, description="with `dataset`: its configuration")
    split: str = Field("train", description="with `dataset`: the split")
    revision: str | None = Field(None, description="with `dataset`: hub revision")
    streaming: bool = Field(False, description="with `dataset`: read it from the hub as it goes, without a local copy")
    text: str | None = Field(None, description="column with plain text, all of it supervised; default `text`")
    prompt: str | None = Field(None, description="column with a prompt, not supervised; goes with `completion`")
    completion: str | None = Field(None, description="column with the completion, supervised")
    messages: str | None = Field(None, description="column with a chat; every assistant turn is supervised")
    tools: str | None = Field(None, description="with `messages`: column with the tools offered to the model")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="with `messages`: further arguments of the chat template"
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="share of examples in a mixture (relative); for every source or for none, and with `train.steps` only",
    )
    share: Share = Field(1.0, description="keep this share of the examples, chosen by a hash of their content")

    @model_validator(mode="after")
    def _columns(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give exactly one of files and dataset")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion go together")
        kinds = [k for k, v in (("text", self.text), ("prompt", self.prompt), ("messages", self.messages)) if v]
        if len(kinds) > 1:
            raise ValueError(f"give one of text, prompt/completion and messages, not {' and '.join(kinds)}")
        if self.tools and not self.messages:
            raise ValueError("tools goes with messages")
        return self

    @property
    def kind(self) -> Literal["text", "completion", "messages"]:
        return "messages" if self.messages else "completion" if self.prompt else "text"


class DataConfig(Section):
    """Text to train or evaluate on."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)] = Field(description="where the records come from")
    max_length: Positive = Field(
        1024, description="longest sequence in the student's tokens; longer ones are cut, and counted"
    )
    piece_bytes: Positive | None = Field(
        None,
        description="cut plain texts into pieces of at most this many bytes, before any tokenizer; default 4 × max_length",
    )
    packing: bool = Field(
        True, description="fill rows of max_length with several documents (which never see each other)"
    )
    shuffle: bool = Field(True, description="shuffle, from train.seed")
    shuffle_buffer: Positive = Field(
        20_000,
        description="examples shuffled together; sources without weights are read one after another, so that those larger than "
        "this hardly mix",
    )
    append_eos: bool = Field(True, description="end documents and completions with the tokenizer's eos")
    columns: list[str] = Field(
        [], description="further columns (texts) to read; those that teachers name are read anyway"
    )
    workers: Positive = Field(
        1, description="threads that prepare steps ahead for teachers: decoding caches, aligning with other tokenizers"
    )

    @model_validator(mode="after")
    def _mixture(self) -> DataConfig:
        weighted = [s.weight is not None for s in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give every source a weight, or none")
        return self


class LossConfig(Section):
    """What is minimised: kd_weight · divergence(teacher, student) + ce_weight · cross-entropy, summed over the supervised
    tokens and divided once per optimizer step by their number."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"] = Field(
        "forward_kl", description="how far the student is from the teacher; docs/losses.md has the formulas"
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
    several: Literal["sum", "average", "best"] = Field(
        "sum",
        description="with several teachers: the weighted sum of their divergences; one divergence, from the weighted mean of "
        "their distributions (live, one tokenizer); or for each document the one to which it is likeliest",
    )
    confidence: Literal["ce", "entropy", "max_probability"] | None = Field(
        None,
        description="several: sum: weigh the teachers anew for each document, by how likely it is to them, by how sure they "
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
        if self.confidence is not None and self.several != "sum":
            raise ValueError(f"confidence goes with several: sum, not with {self.several}")
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


class OptimizerConfig(Section):
    """What takes the steps."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon on the hidden matrices, AdamW on the rest")
    lr: Annotated[float, Field(gt=0)] = Field(3e-4, description="peak learning rate of AdamW")
    muon_lr: Annotated[float, Field(gt=0)] = Field(0.02, description="peak learning rate of Muon")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="on matrices only")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="Muon's momentum")


class LrScheduleConfig(Section):
    """The learning rate over the run, as a share of its peak."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = Field("cosine", description="after the warm-up")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up")
    floor: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="last learning rate as a share of the peak")
    decay: Share = Field(0.2, description="wsd: share of the steps, at the end, that decays")


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
    clip: Annotated[float, Field(gt=0)] | None = Field(1.0, description="largest gradient norm; null: no clipping")
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

    every: Positive | None = Field(None, description="steps between checkpoints; default: none but those named above")
    keep: Positive = Field(2, description="how many of the newest to keep (the best is kept besides)")
    resume: Literal["auto", "never", "anyway"] = Field(
        "auto",
        description="auto: go on where the run folder stops; never: refuse a used folder; anyway: with other settings too",
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


class LogConfig(Section):
    """What is written while a run goes on; docs/metrics.md says what the numbers mean."""

    every: Positive = Field(10, description="steps between lines in a log file (a terminal shows a bar)")
    stat_rows: Annotated[int, Field(ge=0)] = Field(
        256, description="rows a step on which entropies, agreement and KL at T = 1 are measured; 0: off"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: str | None = Field(None, description="Weights & Biases project (extra `wandb`)")


class Recipe(Section):
    """One distillation run."""

    run: str = Field("runs/run", description="folder of the run: recipe, metrics, checkpoints")
    student: StudentConfig
    teachers: list[TeacherConfig] = Field([], description="empty: plain training on the text")
    data: DataConfig
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
        return self

    @property
    def ce_weight(self) -> Scheduled:
        if self.loss.ce_weight is not None:
            return self.loss.ce_weight
        return 0.0 if self.teachers else 1.0
