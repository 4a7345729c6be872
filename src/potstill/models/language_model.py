"""A causal language model as potstill uses it: hidden states from the backbone, the output head kept apart.

B rows, L positions, N loss rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from potstill.models.attention import block_masks, inputs
from potstill.models.libraries import quiet
from potstill.parallel.context import Context
from potstill.parallel.shard import layers
from potstill.parallel.team import Lockstep
from potstill.parallel.vocab import shard_targets, sliced
from potstill.types import Batch, Head, HiddenTarget, PotstillError


class HiddenSource(Protocol):
    """Where a model's hidden states come from, if it is not computed whole in this process."""

    @property
    def ahead(self) -> bool:
        """Whether it is asked on the thread that prepares the next step: it does not need this process's device."""
        ...

    @property
    def waited(self) -> float:
        """Seconds that this process has stood still for other ranks' answers."""
        ...

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        """As `LanguageModel.begin`."""
        ...


@dataclass
class LanguageModel:
    """A loaded model with its tokenizer and what was found out about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    head: Mapping[str, Any]  # softcap and logit_scale
    attention: (
        str  # the way documents of a row are kept apart (models/attention.py); "own": none, so one document a row only
    )
    rows: int | None = None  # of its head, that it gives logits for; None: all
    notes: Sequence[str] = ()  # what its user should know
    processor: Mapping[str, str] = field(default_factory=dict)  # files that say how images become its input, by name
    placed: HiddenSource | None = None  # where it is computed; None: here, whole
    group: dist.ProcessGroup | None = None  # the ranks that share the vocabulary: each has a slice of the head
    fingerprint: str | None = None  # of its weights, where they are not here
    context: Context | None = None  # the ranks that read the parts of a sequence
    lockstep: Lockstep = field(default_factory=Lockstep)  # the ranks that make its passes together

    def save(self, folder: Path) -> None:
        """As a folder that transformers loads."""
        with quiet():
            self.model.save_pretrained(folder)
        self.save_words(folder)

    def save_words(self, folder: Path) -> None:
        """What turns text and images into the model's input."""
        with quiet():
            self.tokenizer.save_pretrained(folder)
        for name, text in self.processor.items():
            (folder / name).write_text(text, encoding="utf-8")

    @property
    def waited(self) -> float:
        """Seconds that this process has stood still for other ranks' hidden states."""
        return 0.0 if self.placed is None else self.placed.waited

    @property
    def ahead(self) -> bool:
        """Whether it is best asked on the thread that prepares the next step."""
        return self.placed is not None and self.placed.ahead

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        """Ask for the last hidden states [N, H] at flat positions of the batch; what is given back waits for them. In this
        process they are computed then."""
        self._check_ids(batch)
        if self.placed is not None:
            return self.placed.begin(batch, positions)
        return partial(self.computed, batch, positions)

    def hidden(self, batch: Batch, positions: Tensor) -> Tensor:
        """Last hidden states [N, H] at flat positions of the batch."""
        return self.begin(batch, positions)().to(batch.input_ids.device)

    def computed(self, batch: Batch, positions: Tensor) -> Tensor:
        """By this process; `hidden` is for all others."""
        limit, lengths = self.short_positions, [len(example.ids) for example in batch.examples]
        if limit is None or batch.packed or len({length > limit for length in lengths}) < 2:
            states = hidden_states(self.model, batch, self.attention, self.context)
        else:
            states = self._short_and_long(batch, lengths, limit)
        return states.flatten(0, 1).index_select(0, positions)

    def at_rows(self, hidden: Tensor, width: int | None = None) -> HiddenTarget:
        """Hidden states [N, H] with this model's head, narrowed to the first `width` ids."""
        return HiddenTarget(hidden, self.output_head(width))

    def output_head(self, width: int | None = None) -> Head:
        module = self.model.get_output_embeddings()
        bias: Tensor | None = module.bias if isinstance(module, nn.Linear) else None
        if self.rows is not None:
            width = self.rows if width is None else min(width, self.rows)
        weight, bias, width = sliced(module.weight, bias, width, self.group)
        return Head(weight[:width], None if bias is None else bias[:width], **self.head, group=self.group)

    def logits(self, hidden: Tensor, width: int | None = None) -> Tensor:
        """Over all of its first `width` ids, on every rank."""
        head = self.output_head(width)
        shard, _, _ = shard_targets(head.width, (), head.group, hidden.device)
        return shard.whole(head.logits(hidden))

    @property
    def device(self) -> torch.device:
        """Of its head, which is whole on every rank that reads with it."""
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    @property
    def positions(self) -> int | None:
        """The longest sequence it can read, where it says."""
        return positions_of(self.model.config.get_text_config())

    @property
    def short_positions(self) -> int | None:
        """The longest text before rotary factors for long ones take over, for all rows of a batch (Phi-3's longrope)."""
        config = self.model.config.get_text_config()
        rope = (config.rope_parameters or {}) if hasattr(config, "rope_parameters") else {}
        kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
        switches = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
        return min(switches, default=None)

    @property
    def vocabulary(self) -> int:
        """How many ids it can read and write: those of its tokenizer, but for some at the end that it has no embeddings for."""
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return min(len(self.tokenizer), self.rows or len(self.tokenizer), *(table.weight.shape[0] for table in tables))

    def _short_and_long(self, batch: Batch, lengths: Sequence[int], limit: int) -> Tensor:
        """Hidden states of a batch with one document a row, the short ones and the long ones apart."""
        short = [i for i, length in enumerate(lengths) if length <= limit]
        long = [i for i, length in enumerate(lengths) if length > limit]
        width = batch.input_ids.shape[1]
        states = []
        for rows in (short, long):
            cut = (rows, slice(max(lengths[i] for i in rows)))
            names = ("input_ids", "position_ids", "document")
            part = replace(batch, **{name: getattr(batch, name)[cut] for name in names})
            found = hidden_states(self.model, part, self.attention, self.context)
            states.append(nn.functional.pad(found, (0, 0, 0, width - found.shape[1])))
        back = torch.tensor([*short, *long], device=batch.input_ids.device).argsort()
        return torch.cat(states).index_select(0, back)

    def _check_ids(self, batch: Batch) -> None:
        """On the host: a device would stop, or say nothing."""
        if self.vocabulary == len(self.tokenizer):
            return
        for example in batch.examples:
            largest = int(example.ids.max())
            if largest >= self.vocabulary:
                raise PotstillError(
                    f"{example.source or 'a text'} holds {self.tokenizer.convert_ids_to_tokens(largest)!r} (id "
                    f"{largest}), for "
                    f"which {self.model.config.model_type} model {self.model.config._name_or_path} has no embedding: take it "
                    "out of the text"
                )


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The part whose last hidden states the head reads; of a model that also sees or hears, its language model, which is
    called by itself: the whole keeps what it computed of images from one call to the next."""
    nested = model.config.get_text_config() is not model.config
    part = model.get_decoder() if nested else model.base_model
    # Llama 4 has a model with a head in there.
    found: PreTrainedModel = part.model if part.get_output_embeddings() is not None else part
    return found


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile a model layer by layer, in place: like layers share what was compiled. Sizes are symbols, so that rows of another
    length, or of other documents, are not compiled for anew. A layer that is compiled already stays as it is."""
    inside = set(backbone(model).modules())
    for layer in layers(model):
        if layer in inside and layer._compiled_call_impl is None:
            layer.compile(backend=backend, dynamic=True)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout. However the block ends, the model then trains, or does not, as before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def hidden_states(model: PreTrainedModel, batch: Batch, attention: str, context: Context | None = None) -> Tensor:
    """Last hidden states [B, L, H]; the head is not applied."""
    config, dtype = model.config.get_text_config(), next(model.parameters()).dtype
    if context is not None:
        return _states_of_parts(model, batch, dtype, context)
    given = inputs(config, batch, attention, dtype, positions_of(config))
    states: Tensor = backbone(model)(**given, use_cache=False).last_hidden_state
    return states


def _states_of_parts(model: PreTrainedModel, batch: Batch, dtype: torch.dtype, context: Context) -> Tensor:
    """The same where each rank reads a part of every sequence: it has the own rows of the masks."""
    length = batch.input_ids.shape[1]
    batch = context.padded(batch)
    own = context.own(batch.input_ids.shape[1], batch.input_ids.device)
    masks = block_masks(model.config.get_text_config(), batch.document, dtype, own)
    ids, places = batch.input_ids[:, own], batch.position_ids[:, own]
    found = backbone(model)(
        input_ids=ids, position_ids=places, attention_mask=masks, context=context, use_cache=False
    ).last_hidden_state
    return context.joined(found, 1)[:, :length]


def positions_of(config: Any) -> int | None:
    """The longest sequence a model can read, where it says (`hasattr`: some configs map the name to one of their own)."""
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None
