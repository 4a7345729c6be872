"""`student` and `teachers`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from potstill.config.registry import CacheKind
from potstill.config.sections import Positive, Section, ServerAddress, key

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


class LoraConfig(Section):
    """Low-rank adapters (peft) that learn in place of the student's own weights; docs/students.md."""

    r: Positive = key(16, "rank of the two matrices that are learnt for each matrix of the student")
    alpha: float = key(32.0, "their product counts alpha ÷ r (with use_rslora: alpha ÷ √r)", gt=0)
    dropout: float = key(0.0, "probability of dropout before the first of them", ge=0, lt=1)
    target_modules: str | list[str] = key(
        "all-linear", "which modules get them: names, a regular expression of whole names, or all-linear (but the head)"
    )
    modules_to_save: list[str] = key([], "modules that are trained whole, such as lm_head where it is not tied")
    use_dora: bool = key(False, "DoRA: the length of each row is learnt apart from its direction")
    use_rslora: bool = key(False, "rsLoRA: scale by alpha ÷ √r")
    peft: dict[str, Any] = key({}, "further keys of peft.LoraConfig, such as rank_pattern or layers_to_transform")
    export: Literal["merged", "adapter", "both"] = key(
        "merged",
        "what there is at the end of the run besides the adapter of the checkpoints: RUN/merged, the whole model with "
        "the adapter added to its weights (merged, both), or nothing more (adapter)",
    )


class WidthConfig(Section):
    """A narrower student: what matters least on a sample of `data` is cut; docs/students.md. Left out: as it is."""

    hidden: Positive | None = key(None, "channels of the hidden states")
    intermediate: Positive | None = key(None, "neurons of each layer's MLP")
    heads: Positive | None = key(None, "attention heads of each layer, a multiple of kv_heads")
    kv_heads: Positive | None = key(None, "heads of keys and values of each layer")
    examples: Positive = key(128, "texts of `data` to measure on what matters")


class StudentConfig(Section):
    """The model that learns. Exactly one of `model`, `from` (with `layers`, `width`) and `config` (with `tokenizer`)."""

    model: str | None = key(None, "a Hugging Face causal language model: folder, `shipped:NAME` or hub id")
    from_: str | None = key(None, "a model that the student is a part of: some `layers`, less `width`", alias="from")
    layers: list[Annotated[int, Field(ge=0)]] | None = key(None, "with `from`: layers to keep, in order")
    width: WidthConfig | None = key(None, "with `from`: a narrower model, pruned by activations")
    config: dict[str, Any] | None = key(
        None, "a fresh model: a transformers config as keys, with `model_type` (vocab_size is filled in)"
    )
    revision: str | None = key(None, "hub revision of `model` or `from`")
    tokenizer: str | None = key(None, "folder, `shipped:NAME` or hub id; default: the model's own")
    dtype: Literal["float32", "bfloat16", "float64"] = key(
        "float32",
        "dtype of the student's weights; bfloat16: the optimizer keeps float32 masters of them; float64: to compare runs to "
        "the last digit",
    )
    attn_implementation: str | None = key(
        None,
        "varlen, flash_attention_2, flash_attention_3, flex_attention; sdpa and eager make masks for packed rows; default: the "
        "first that keeps packed documents apart; docs/gpu.md",
    )
    dropout: float | None = key(
        None,
        "probability of all its dropouts while it trains; default: 0 where it writes text "
        "(rollouts.on_policy_fraction), for it writes without, otherwise the model's own",
        ge=0,
        lt=1,
    )
    lora: LoraConfig | None = key(None, "train low-rank adapters in place of its own weights (extra `lora`)")
    freeze: list[str] = key(
        [],
        "parameters that learn nothing: patterns of names between dots, such as embed_tokens or layers.[0-3].* "
        "(shell-like; layers.1 is not layers.10)",
    )
    router_aux_loss_coef: float | None = key(
        None,
        "mixture of experts: weight of the loss that balances them; default: the model's own, where it has one; 0: without",
        ge=0,
    )
    trust_remote_code: bool = key(False, "run model code from the hub")

    @model_validator(mode="after")
    def _one_origin(self) -> StudentConfig:
        given = [
            name for name, value in (("model", self.model), ("from", self.from_), ("config", self.config)) if value
        ]
        if len(given) != 1:
            raise ValueError(f"give exactly one of model, from and config (given: {', '.join(given) or 'none'})")
        if bool(self.from_) != bool(self.layers or self.width):
            raise ValueError("`from` goes with `layers`, `width` or both, as in from: MODEL, layers: [0, 2, 4]")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, such as llama or gpt2")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a fresh model (config) needs a tokenizer")
        if self.lora is not None:
            self._adapted(self.lora)
        return self

    def _adapted(self, lora: LoraConfig) -> None:
        if self.config is not None:
            raise ValueError("lora goes with model or from: a fresh model has nothing that an adapter could add to")
        if self.freeze:
            raise ValueError("lora freezes all but its adapters and modules_to_save: leave freeze out")
        if lora.export != "merged" and self.from_ is not None:
            raise ValueError(
                "lora.export: an adapter of a part of a model goes with no model that there is: use merged, or make the "
                "model first (train.steps=1) and name it as model"
            )


class StoreConfig(Section):
    """What a cache keeps of a teacher; docs/cache.md says what each kind costs and gives."""

    kind: CacheKind = key(
        "top_k",
        "top_k: the k likeliest tokens and the mass of the rest; sampled: draws; hidden: hidden states, exact; "
        "token_logprobs: only how likely the text's own tokens were",
    )
    k: Positive = key(64, "top_k: how many tokens")
    temperatures: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = key(
        [1.0], "top_k: temperatures at which a student may learn from it (2 bytes a token each)"
    )
    tail_samples: int = key(
        0,
        "top_k: draws from the rest, from which forward KL learns what is in it; more of them where it is heavy",
        ge=0,
        le=4096,
    )
    num_samples: int = key(50, "sampled: how many draws a token", gt=0, le=4096)
    seed: int = key(0, "seed of the draws")


class CrossTokenizerConfig(Section):
    """How to learn from a teacher with another tokenizer; unused when it is the student's. docs/cross-tokenizer.md."""

    method: Literal["prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld"] = key(
        "prefix_marginal",
        "what is compared: the teacher's next token spelled in the student's; or, where both tokenizers have cut the "
        "same bytes, ids that mean the same; the student's ids sent to the teacher's; how likely the bytes are; "
        "sorted probabilities",
    )
    decay: float = key(
        0.0,
        "projection: an id without a partner goes to the teacher's pieces of it, each with this share of the last",
        ge=0,
        le=1,
    )
    chunk_temperature: float = key(4.0, "span_likelihood: likelihoods are raised to one over this", gt=0)


class RemoteConfig(Section):
    """How a teacher behind a server is asked; docs/remote.md."""

    kind: Literal["top_k", "hidden", "token_logprobs", "student_top_k"] = key(
        "top_k",
        "what it is asked for (without `cache`): its k likeliest tokens and the mass of the rest; hidden states "
        "(`potstill serve` only), exact; how likely the text's own tokens are; or how likely those are that the "
        "student likes best (`potstill serve` only), for reverse KL",
    )
    k: Positive = key(64, "top_k, student_top_k: how many tokens")
    concurrency: Positive = key(8, "requests under way at once")
    timeout: float = key(
        120.0, "seconds after which a request is given up and sent again; one more for each 128 KB that it moves", gt=0
    )
    retry_timeout: float = key(
        600.0, "seconds to wait for a server that is away or fails (5xx) before the run stops", ge=0
    )
    start_timeout: float = key(
        10.0,
        "seconds to wait for a server that cannot be reached at the start; one that has answered once is waited for "
        "by `retry_timeout`",
        ge=0,
    )
    api_key_env: str | None = key(None, "name of the environment variable with the bearer token")


class TeacherConfig(Section):
    """A model to learn from: in this process, behind a server, or as its signal on disk, alone or beside one of them."""

    model: str | None = key(None, "a Hugging Face causal language model: folder, `shipped:NAME` or hub id")
    cache: str | None = key(
        None,
        "folder that `potstill cache build` made: the teacher is never loaded; beside `model` or `server`: what it "
        "lacks is computed and added",
    )
    server: ServerAddress | None = key(
        None,
        "address of `potstill serve`, or of an OpenAI-compatible server that gives prompt log-probabilities (vLLM)",
    )
    student: Literal["frozen", "ema", "live"] | None = key(
        None,
        "self-distillation, the student itself: its weights as they began, their moving average, or as they are now "
        "(with a `context_column`)",
    )
    decay: float = key(0.999, "student: ema: what the average keeps of itself at each step", ge=0, lt=1)
    adapter: bool = key(
        True, "with `student` and student.lora; false: without what the adapters add, in the student's own memory"
    )
    source: str | None = key(
        None, "a source of your own, by its name in `TEACHER_SOURCES of config/registry.py` (docs/extending.md)"
    )
    options: dict[str, Any] = key({}, "with `source`: what it is opened with")
    remote: RemoteConfig = RemoteConfig()
    served_model_name: str | None = key(None, "with `server`: the model's name there; default: its only one")
    tokenizer: str | None = key(
        None, "with `server`: the teacher's tokenizer, where the server does not hand it out; default: the name there"
    )
    on_missing: Literal["error", "skip"] = key(
        "error", "with `cache` alone: what to do with a document that is not in it; skip counts and reports"
    )
    store: StoreConfig = StoreConfig()
    cross_tokenizer: CrossTokenizerConfig = CrossTokenizerConfig()
    filter: dict[str, str | list[str]] = key(
        {}, "which records it teaches, by their columns, as in {domain: math} or {language: [de, fr]}; default: all"
    )
    context_column: str | None = key(
        None,
        "column with what it reads in place of the student's prompt: before a plain text, or as the system message of"
        " a chat (a hint that the student does not get; without `cache`)",
    )
    system: str | None = key(
        None, "of chats: its system message, in place of the student's (without `cache` and `context_column`)"
    )
    chat_template_kwargs: dict[str, Any] | None = key(
        None, "of chats: arguments of its chat template, over those of `data.sources` (without `cache`)"
    )
    placement: Literal["replicate", "shard", "offload"] = key(
        "replicate",
        "where its weights are: whole on every rank of the student's; sharded over them (FSDP2); or sharded and kept in the "
        "host's memory while they are not computed with",
    )
    ranks: int = key(
        0,
        "ranks of its own, the last of the world in the order of the teachers: they compute ahead of the student; 0: it is "
        "on the student's",
        ge=0,
    )
    tp: Positive | Literal["auto"] = key(
        "auto",
        "tensor parallel: ranks that share each of its matrices. With `ranks`: so many of them make a copy (auto: 1); "
        "without: parallel.tp, or 1 for a teacher that is whole on every rank (auto: parallel.tp where it fits)",
    )
    revision: str | None = key(None, "hub revision")
    weight: float = key(1.0, "weight of this teacher's loss among several", gt=0)
    dtype: Dtype | Literal["auto"] = key("auto", "dtype of its weights; auto: as saved (float32 on a CPU)")
    quantize: Literal["8bit", "4bit", "fp8"] | None = key(
        None,
        "load in 8 bits, in 4 (nf4, products in bfloat16; both: extra `quant`, need CUDA), or in fp8 (a GPU of compute "
        "capability 8.9 or later, with the package accelerate)",
    )
    attn_implementation: str | None = key(None, "as the student's")
    trust_remote_code: bool = key(False, "run model code from the hub")

    @model_validator(mode="after")
    def _an_origin(self) -> TeacherConfig:
        given = [name for name in ("model", "server", "cache", "source", "student") if getattr(self, name) is not None]
        if not given:
            raise ValueError("give model, server or cache, or a cache beside one of the others; or student")
        self._own(given)
        if "model" in given and "server" in given:
            raise ValueError("give model or server, not both: they would be two teachers")
        if self.system is not None and self.context_column is not None:
            raise ValueError("give system or context_column, not both: either is its system message")
        if "source" in given and len(given) > 1:
            raise ValueError("source goes without model, server and cache")
        if self.on_missing == "skip" and {"model", "server"} & set(given):
            raise ValueError(
                "on_missing: skip goes with a cache alone; with model or server beside it, what is missing is computed"
            )
        if self.ranks or self.placement != "replicate" or self.tp != "auto":
            self._placed()
        if "server" in given:
            self._served()
        elif (self.tokenizer, self.served_model_name, self.remote) != (None, None, RemoteConfig()):
            raise ValueError("tokenizer, served_model_name and remote go with server")
        return self

    def _own(self, given: list[str]) -> None:
        if "student" not in given:
            if (self.decay, self.adapter) != (0.999, True):
                raise ValueError("decay and adapter go with student")
            return
        if len(given) > 1:
            raise ValueError(f"student goes without {next(name for name in given if name != 'student')}")
        if self.student == "live" and self.adapter and not self.own_prompt:
            raise ValueError(
                "student: live would say what the student says: give it a context_column, or take ema or frozen"
            )
        if self.student == "ema" and not self.adapter:
            raise ValueError(
                "adapter: false goes with student: frozen or live, for what has no adapter does not change"
            )
        if self.decay != 0.999 and self.student != "ema":
            raise ValueError("decay goes with student: ema")
        if (self.on_missing, self.store, self.trust_remote_code) != ("error", StoreConfig(), False):
            raise ValueError("student goes without on_missing, store and trust_remote_code")
        if self.quantize or self.revision or self.dtype != "auto" or self.attn_implementation:
            raise ValueError(
                "student goes without revision, dtype, quantize and attn_implementation: they are the student's"
            )

    def _placed(self) -> None:
        if self.model is None:
            raise ValueError("placement, ranks and tp go with model")
        if self.ranks % self.copy_ranks:
            raise ValueError(
                f"ranks: {self.ranks} are no whole copies over tp: {self.tp} ranks each: choose a multiple"
            )
        if self.quantize and self.copy_ranks > 1:
            raise ValueError("tp goes without quantize: leave one of the two out")
        others = [name for name in ("ranks", "quantize") if getattr(self, name)]
        if self.placement != "replicate" and others:
            raise ValueError(f"placement: {self.placement} goes without {others[0]}: leave one of the two out")

    def _served(self) -> None:
        own = {"revision": self.revision, "quantize": self.quantize, "attn_implementation": self.attn_implementation}
        wrong = [key for key, value in own.items() if value] + (["dtype"] if self.dtype != "auto" else [])
        if wrong:
            raise ValueError(f"{wrong[0]} goes with model: a server was started with its own")
        plain = RemoteConfig()
        if self.cache is not None and (self.remote.kind, self.remote.k) != (plain.kind, plain.k):
            raise ValueError(
                "with a cache beside the server, store says what is asked for and kept: remove remote.kind and remote.k, and "
                "write them as store.kind and store.k"
            )

    @property
    def own_prompt(self) -> bool:
        """Whether it reads another text than the student, whatever the tokenizers."""
        return self.context_column is not None or self.system is not None or self.chat_template_kwargs is not None

    @property
    def copies(self) -> bool:
        """Whether it is a copy of the student, not the student that trains."""
        return self.student in ("frozen", "ema") and self.adapter

    @property
    def copy_ranks(self) -> int:
        """Of its own ranks, over which one copy of it lies."""
        return 1 if self.tp == "auto" else self.tp

    @property
    def columns(self) -> list[str]:
        """Of a record, that it needs."""
        return [*self.filter, *([self.context_column] if self.context_column is not None else [])]

    @property
    def name(self) -> str:
        own = None if self.student is None else f"the student ({self.student})"
        return self.model or self.server or self.cache or self.source or own or ""

    @property
    def kind(self) -> str:
        """What its signal comes from, as `TEACHER_SOURCES of config/registry.py` names it."""
        if self.student is not None:
            return "student"
        return self.source or ("cache" if self.cache is not None else "server" if self.server is not None else "model")
