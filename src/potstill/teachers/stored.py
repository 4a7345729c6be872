"""A teacher whose signal is on disk, or comes from a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potstill.cache.codec import Document, Format
from potstill.cache.manifest import tokenizer_of
from potstill.cache.reader import SignalSource
from potstill.cache.reading import chat_kwargs, template_fingerprint
from potstill.cache.scored import (
    Chosen,
    Scored,
    read_hidden,
    read_sampled,
    read_tail_samples,
    read_token_logprobs,
    read_top_k,
)
from potstill.cache.store import Cache
from potstill.config import DataConfig, LossConfig
from potstill.config.sections import fixed_value
from potstill.models import load_tokenizer, same_tokenizer
from potstill.models.language_model import LanguageModel
from potstill.types import (
    Batch,
    DenseTarget,
    Example,
    PotstillError,
    SampledTarget,
    Target,
    TokenLogprobsTarget,
    TopKTarget,
)

NONE = np.zeros(0, dtype=np.int64)


class CachedTeacher:
    """Reads what a teacher once said, or has just said. `prepare` decodes it; `targets` only moves it to the device, but for
    what has to be computed first."""

    def __init__(
        self,
        source: SignalSource,
        width: int,
        name: str,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        chosen_only: bool = False,
    ) -> None:
        self.width = width  # ids that student and teacher share; the rest take no part
        self.name = name
        self.weight = weight
        self.source = source
        self.form = source.form
        self.ahead = source.ahead
        self._temperature = temperature
        self._chosen_only = chosen_only  # the loss asks how likely the text's own tokens are, and no more

    def missing(self, batch: Batch) -> Sequence[int]:
        return self.source.missing(batch)

    def prepare(self, batch: Batch) -> Target | None:
        """The target on the host; None when some of it is still to be computed."""
        documents = self.source.documents(batch.examples)
        if documents is None:
            return None
        return self._decoded([(d, _rows(d, example)) for d, example in zip(documents, batch.examples, strict=True)])

    def complete(self, batch: Batch, prepared: Target | None) -> Target | None:
        if prepared is None:
            self.source.compute(batch.examples)
            prepared = self.prepare(batch)
        return prepared

    def targets(self, batch: Batch, prepared: Target | None) -> Target:
        prepared = self.complete(batch, prepared)
        assert prepared is not None
        device = batch.input_ids.device
        if isinstance(prepared, DenseTarget):
            assert prepared.hidden is not None
            return replace(self.source.head(device, self.width), hidden=prepared.hidden.to(device, non_blocking=True))
        moved: Any = prepared.to(device)
        if isinstance(moved, TokenLogprobsTarget):
            return moved
        if isinstance(moved, TopKTarget) and moved.tail_samples is not None:
            moved = replace(moved, tail_samples=moved.tail_samples.long())
        return replace(moved, ids=moved.ids.long())

    def close(self) -> None:
        self.source.close()

    def _decoded(self, chosen: Chosen) -> Target:
        form = self.form
        if form.kind == "hidden":
            return DenseTarget(hidden=read_hidden(chosen))
        if self._chosen_only:
            return TokenLogprobsTarget(torch.from_numpy(read_token_logprobs(chosen)))
        if form.kind == "sampled":
            ids, shares, entropy = map(torch.from_numpy, read_sampled(chosen))
            return SampledTarget(ids, shares, entropy, width=self.width)
        ids, logprobs, tail = map(torch.from_numpy, read_top_k(chosen, self._temperature))
        target = TopKTarget(ids, logprobs, tail, width=self.width)
        if form.tail_samples and self._temperature == 1.0:  # which they were drawn at
            rest, entropy = map(torch.from_numpy, read_tail_samples(chosen))
            target = replace(target, tail_samples=rest, tail_entropy=entropy)
        return target


def _rows(document: Document | Scored, example: Example) -> npt.NDArray[np.int64]:
    """The document's rows for the tokens that the example supervises, which must be the same tokens."""
    wanted = np.flatnonzero(example.supervised)
    if not len(wanted):
        return NONE
    length = int(wanted[-1]) + 1
    if not len(document.tokens):
        raise PotstillError(
            f"{example.source} ({example.key}): the cache's teacher had nothing to predict in it, for its prompt is longer "
            "than the teacher can read: leave it out of the data, or set data.max_length to at most what the teacher reads"
        )
    if length > len(document.tokens):
        raise PotstillError(
            f"{example.source} ({example.key}): the cache has the first {len(document.tokens)} tokens of it, which is "
            "all its "
            f"teacher can read, and {length} are trained on: set data.max_length to at most that"
        )
    if not np.array_equal(document.tokens[:length], example.ids[:length]):
        at = int(np.argmax(document.tokens[:length] != example.ids[:length]))
        raise PotstillError(
            f"{example.source} ({example.key}): the cache has other tokens for it (token {at} is {document.tokens[at]} there "
            f"and {example.ids[at]} here): it was read with other settings of the tokenizer or of the chat template"
        )
    if not document.predicted[wanted].all():
        raise PotstillError(f"{example.source} ({example.key}): the cache does not hold all of its supervised tokens")
    rows: npt.NDArray[np.int64] = np.cumsum(document.predicted)[wanted] - 1
    return rows


def check_cache(
    cache: Cache, student: LanguageModel, data: DataConfig, loss: LossConfig, where: str
) -> tuple[int, float]:
    """How many ids student and cache share, and the loss's temperature; an error where the recipe and the cache do not fit."""
    tokenizer = load_tokenizer(str(tokenizer_of(cache.folder)), where)
    width = min(same_tokenizer(student.tokenizer, tokenizer, where), student.vocabulary)
    if width < cache.form.vocabulary and cache.form.kind != "hidden":
        raise PotstillError(
            f"{where}: the cache's probabilities are over {cache.form.vocabulary} ids and the student's tokenizer has "
            f"{width}: "
            "take the teacher's tokenizer for the student (student.tokenizer), or a cache of kind hidden"
        )
    _check_rendering(cache, student, tokenizer, data, where)
    check_pieces(cache, data, where)
    if loss.policy_gradient and "imported" in cache.manifest:
        raise PotstillError(
            f"{where}: the cache was imported, and does not know how likely the text's own tokens were where they are not "
            "among the entries, which policy_gradient_kl needs: take another loss.divergence, or a cache that was built here"
        )
    return width, check_loss(cache.form, loss, where)


def _check_rendering(cache: Cache, student: LanguageModel, tokenizer: Any, data: DataConfig, where: str) -> None:
    ours, theirs = student.tokenizer.eos_token, tokenizer.eos_token
    if data.append_eos and ours not in (None, theirs) and any(not source.messages for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's documents end with {theirs!r} and the student's with {ours!r}: take the teacher's "
            "tokenizer "
            "for the student (student.tokenizer), or set data.append_eos to false"
        )
    chats = any(source.messages for source in data.sources)
    if chats and template_fingerprint(student.tokenizer) != cache.manifest["chat"]["template"]:
        raise PotstillError(
            f"{where}: the cache's conversations were rendered with another chat template than the student's: take the "
            "teacher's tokenizer for the student (student.tokenizer)"
        )


def check_pieces(cache: Cache, data: DataConfig, where: str) -> None:
    """What must be alike whatever the tokenizers."""
    manifest = cache.manifest
    if any(source.messages for source in data.sources) and chat_kwargs(data) != manifest["chat"]["kwargs"]:
        raise PotstillError(
            f"{where}: the cache's conversations were rendered with chat_template_kwargs {manifest['chat']['kwargs']}, and "
            f"those of data.sources are {chat_kwargs(data)}"
        )
    pieces = manifest["piece_bytes"]
    if data.piece_bytes not in (None, pieces) and any(source.kind == "text" for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's texts were cut into pieces of {pieces} bytes, and data.piece_bytes is {data.piece_bytes}: "
            "leave it out; where it is left out, another teacher's cache has pieces of that size: build one of the two anew"
        )


def check_loss(form: Format, loss: LossConfig, where: str) -> float:
    """The temperature of the loss, where a cache of this format can serve it."""
    if form.kind == "hidden":
        return 1.0  # the head is there: any temperature can be had
    if loss.policy_gradient:
        if form.kind == "sampled":
            raise PotstillError(
                f"{where}: the cache holds draws of the teacher's, and loss.divergence: policy_gradient_kl needs how likely "
                "the student's tokens were to it: use a cache of kind token_logprobs, top_k or hidden"
            )
        return 1.0
    if form.kind == "token_logprobs":
        raise PotstillError(
            f"{where}: the cache holds only how likely the text's own tokens were, and the loss needs a distribution: build "
            "one with --kind top_k, sampled or hidden, or learn by the student's own tokens (loss.divergence: "
            "policy_gradient_kl)"
        )
    temperature = fixed_value(loss.temperature)
    if temperature is None or temperature not in form.temperatures:
        known = ", ".join(f"{t:g}" for t in form.temperatures)
        what, wanted = (
            ("moves over the run", "…") if temperature is None else (f"is {temperature:g}", f"{temperature:g}")
        )
        has = "'s draws are at temperature" if form.kind == "sampled" else " knows the mass of what it left out at"
        raise PotstillError(
            f"{where}: loss.temperature {what}, and the cache{has} {known} only: build one with --temperature {wanted} "
            "(top_k), or of kind hidden, which serves all of them"
        )
    if form.kind == "sampled" and (loss.divergence != "forward_kl" or loss.entropy_gate is not None):
        what = (
            f"loss.divergence is {loss.divergence}" if loss.divergence != "forward_kl" else "loss.entropy_gate is set"
        )
        raise PotstillError(
            f"{where}: the cache holds draws, which are unbiased for forward_kl only, and {what}: use forward_kl, or a cache "
            "of kind top_k or hidden"
        )
    return temperature
