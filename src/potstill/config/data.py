"""`data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from potstill.config.sections import Positive, Section, Share, key


class SourceConfig(Section):
    """One place that records come from, and which of their columns to read. Exactly one of `files` and `dataset`; one of
    `text`, `prompt` with `completion`, and `messages` (none of them: the column named text)."""

    files: str | list[str] | None = key(
        None,
        "jsonl (also .jsonl.gz), json, parquet, arrow or txt files: paths, globs, `shipped:NAME`, or addresses, also "
        "with globs (`s3://`, `gs://`, `hf://datasets/…`, `https://` and whatever else fsspec reads)",
    )
    dataset: str | None = key(None, "a Hugging Face data set: hub name, or a folder that datasets wrote")
    name: str | None = key(None, "with `dataset`: its configuration")
    split: str = key("train", "with `dataset`: the split")
    revision: str | None = key(None, "with `dataset`: hub revision")
    streaming: bool = key(False, "with `dataset`: read it from the hub as it goes, without a local copy")
    text: str | None = key(None, "column with plain text, all of it supervised; default `text`")
    prompt: str | None = key(
        None,
        "column with a prompt, not supervised; goes with `completion`, or alone where all answers are written "
        "(`rollouts`)",
    )
    completion: str | None = key(None, "column with the completion, supervised")
    messages: str | None = key(None, "column with a chat; every assistant turn is supervised")
    tools: str | None = key(None, "with `messages`: column with the tools offered to the model")
    chat_template_kwargs: dict[str, Any] = key({}, "with `messages`: further arguments of the chat template")
    weight: float | None = key(
        None,
        "share of examples in a mixture (relative); for every source or for none, and with `train.steps` only",
        gt=0,
    )
    fraction: Share = key(1.0, "keep this share of the examples, chosen by a hash of their content")

    @model_validator(mode="after")
    def _columns(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("give exactly one of files and dataset")
        if self.completion and not self.prompt:
            raise ValueError("completion goes with prompt")
        kinds = [k for k, v in (("text", self.text), ("prompt", self.prompt), ("messages", self.messages)) if v]
        if len(kinds) > 1:
            raise ValueError(f"give one of text, prompt/completion and messages, not {' and '.join(kinds)}")
        if self.tools and not self.messages:
            raise ValueError("tools goes with messages")
        return self

    @property
    def kind(self) -> Literal["text", "completion", "messages"]:
        return "messages" if self.messages else "completion" if self.prompt else "text"


class SuperviseConfig(Section):
    """Which messages of a chat are learnt. A tool's results never are."""

    roles: Annotated[list[Literal["assistant", "user", "system"]], Field(min_length=1)] = key(
        ["assistant"], "whose messages"
    )
    turns: Literal["all", "last"] = key("all", "all of them, or the last alone")
    column: str | None = key(None, "column with a list of true and false, one per message: only those with true")


class DataConfig(Section):
    """Text to train or evaluate on."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)] = Field(description="where the records come from")
    max_length: Positive = key(
        1024,
        "longest sequence in the student's tokens; longer ones are cut and counted; in evaluation, read in windows",
    )
    piece_bytes: Positive | None = key(
        None,
        "cut plain texts into pieces of at most this many bytes, before any tokenizer; default: as a cache's texts "
        "were cut, else measured so that nearly all fit max_length (saved with the run); in evaluation 4096",
    )
    packing: bool = key(True, "fill rows of max_length with several documents (which never see each other)")
    shuffle: bool = key(True, "shuffle, from train.seed")
    shuffle_buffer: Positive = key(
        20_000,
        "examples shuffled together; sources without weights are read one after another, so that those larger than "
        "this hardly mix",
    )
    supervise: Literal["all", "last"] | SuperviseConfig = key(
        "all", "of chats: every assistant turn, the last one alone, or the messages that a section says"
    )
    append_eos: bool = key(True, "end documents and completions with the tokenizer's eos")
    columns: list[str] = key(
        [], "further columns (texts, numbers, lists of numbers) to read; those that other keys name are read anyway"
    )
    workers: Positive = key(
        1, "threads that prepare steps ahead for teachers: decoding caches, aligning with other tokenizers"
    )

    @property
    def cut_bytes(self) -> int:
        """The size of pieces of plain texts, where nothing was measured either."""
        return self.piece_bytes or 4096

    @property
    def supervised(self) -> SuperviseConfig:
        """`supervise` as a section."""
        return SuperviseConfig(turns=self.supervise) if isinstance(self.supervise, str) else self.supervise

    @property
    def read_columns(self) -> list[str]:
        """Besides those that make the text."""
        column = self.supervised.column
        return list(dict.fromkeys([*self.columns, *([] if column is None else [column])]))

    @model_validator(mode="after")
    def _chats(self) -> DataConfig:
        if self.supervise != "all" and not any(source.messages for source in self.sources):
            raise ValueError("supervise goes with messages, and no source has any: leave it out")
        return self

    @model_validator(mode="after")
    def _mixture(self) -> DataConfig:
        weighted = [s.weight is not None for s in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give every source a weight, or none")
        return self
