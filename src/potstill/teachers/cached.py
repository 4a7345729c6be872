"""A teacher whose signal is on disk; with a model beside it, what the disk lacks is computed and added."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import torch
from torch import Tensor

from potstill.config import DataConfig, LossConfig, Schedule
from potstill.models import check_rows, load_tokenizer, same_tokenizer
from potstill.models.language_model import LanguageModel
from potstill.teachers.build import Scribe
from potstill.teachers.codec import (
    Document,
    Format,
    blank,
    from_bytes,
    read_hidden,
    read_rest,
    read_sampled,
    read_top_k,
)
from potstill.teachers.inspect import coverage
from potstill.teachers.reading import chat_kwargs, piece_of, template_fingerprint
from potstill.teachers.store import Cache
from potstill.types import Batch, DenseTarget, Example, PotstillError, SampledTarget, Target, TopKTarget

NONE = np.zeros(0, dtype=np.int64)


class CachedTeacher:
    """Reads what a teacher once said. `prepare` decodes it; `targets` only moves it to the device, but for what a `scribe`
    has to compute first."""

    def __init__(
        self,
        cache: Cache,
        width: int,
        name: str,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        skip_missing: bool = False,
        scribe: Scribe | None = None,
        data: DataConfig | None = None,
    ) -> None:
        self.cache = cache
        self.width = width  # ids that student and teacher share; the rest take no part
        self.name = name
        self.weight = weight
        self._temperature = temperature
        self._skip = skip_missing
        self._scribe = scribe
        self._data = data
        self._head: dict[torch.device, DenseTarget] = {}

    def lacks(self, batch: Batch) -> Sequence[int]:
        if not self._skip:
            return ()
        found = self.cache.find([example.key for example in batch.examples])
        return [i for i, at in enumerate(found) if at < 0]

    def prepare(self, batch: Batch) -> Target | None:
        """The target on the host; None when some of it is still to be computed."""
        documents = self._documents(batch.examples)
        chosen = [
            (document, _rows(document, example))
            for document, example in zip(documents, batch.examples, strict=True)
            if document is not None
        ]
        if len(chosen) == len(documents):
            return self._decoded(chosen)
        if self._scribe is None:
            raise self._missing(batch.examples[documents.index(None)])
        return None

    def targets(self, batch: Batch, prepared: Target | None) -> Target:
        if prepared is None:
            documents = self._documents(batch.examples)
            self._compute([e for e, there in zip(batch.examples, documents, strict=True) if there is None])
            prepared = self.prepare(batch)
        assert prepared is not None
        device = batch.input_ids.device
        if isinstance(prepared, DenseTarget):
            assert prepared.hidden is not None
            return replace(self._head_on(device), hidden=prepared.hidden.to(device, non_blocking=True))
        moved: Any = prepared.to(device)
        if isinstance(moved, TopKTarget) and moved.rest is not None:
            moved = replace(moved, rest=moved.rest.long())
        return replace(moved, ids=moved.ids.long())

    def close(self) -> None:
        if self._scribe is not None:
            self._scribe.close()

    def _documents(self, examples: Sequence[Example]) -> list[Document | None]:
        """None: it is not there."""
        found = self.cache.documents([example.key for example in examples])
        for i, example in enumerate(examples):
            if not example.supervised.any():  # its document was left out
                found[i] = blank(self.cache.form)
            elif found[i] is None and self._scribe is not None:
                found[i] = self._waiting(self._scribe, example.key)
        missing = [i for i, document in enumerate(found) if document is None]
        if missing and self._scribe is not None:
            # What has just been written waits no more, and other processes write too.
            self.cache.refresh()
            for i, document in zip(missing, self.cache.documents([examples[i].key for i in missing]), strict=True):
                found[i] = document
        return found

    def _waiting(self, scribe: Scribe, key: str) -> Document | None:
        tokens, data = scribe.writer.waiting.get(key, (0, b""))
        return from_bytes(self.cache.form, np.frombuffer(data, dtype=np.uint8), tokens) if data else None

    def _compute(self, examples: Sequence[Example]) -> None:
        """None, when what was missing has been computed since for another batch, or by another process."""
        assert self._scribe is not None
        unique = {example.key: example for example in examples}
        read = self._scribe.text([piece_of(example) for example in unique.values()])
        if some := [example for example in read if example is not None]:
            self._scribe.write(some)
            self._scribe.settle()

    def _decoded(self, chosen: list[tuple[Document, npt.NDArray[np.int64]]]) -> Target:
        form = self.cache.form
        if form.kind == "hidden":
            hidden = torch.from_numpy(read_hidden(chosen))
            return DenseTarget(hidden=hidden.view(torch.bfloat16) if form.dtype == "bfloat16" else hidden)
        if form.kind == "sampled":
            ids, shares, entropy = map(torch.from_numpy, read_sampled(chosen))
            return SampledTarget(ids, shares, entropy, width=self.width)
        ids, logprobs, tail = map(torch.from_numpy, read_top_k(chosen, self._temperature))
        target = TopKTarget(ids, logprobs, tail, width=self.width)
        if form.rest and self._temperature == 1.0:  # which they were drawn at
            rest, entropy = map(torch.from_numpy, read_rest(chosen))
            target = replace(target, rest=rest, rest_entropy=entropy)
        return target

    def _head_on(self, device: torch.device) -> DenseTarget:
        if device not in self._head:
            self._head[device] = load_head(self.cache.folder, self.width).to(device)
        return self._head[device]

    def _missing(self, example: Example) -> PotstillError:
        named = f"{example.source or 'a document'} ({example.key})"
        counted = ""
        if self._data is not None and not any(source.streaming for source in self._data.sources):
            found = coverage(self.cache, self._data, self.tokenizer())
            counted = f"; {found.missing:,} of the {found.documents:,} documents of data are not in it"
        return PotstillError(
            f"the cache {self.cache.folder} has no document {named}{counted}: add what is missing with `potstill cache build "
            f"RECIPE --out {self.cache.folder}`, or leave it out with on_missing: skip"
        )

    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.cache.folder / "tokenizer"), "cache")


def _rows(document: Document, example: Example) -> npt.NDArray[np.int64]:
    """The document's rows for the tokens that the example supervises, which must be the same tokens."""
    wanted = np.flatnonzero(example.supervised)
    if not len(wanted):
        return NONE
    length = int(wanted[-1]) + 1
    if length > len(document.tokens):
        raise PotstillError(
            f"{example.source} ({example.key}): the cache has the first {len(document.tokens)} tokens of it, which is all its "
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


def load_head(folder: Path, width: int | None = None) -> DenseTarget:
    with safetensors.safe_open(folder / "head.safetensors", "pt") as file:
        numbers = {key: literal_eval(value) for key, value in (file.metadata() or {}).items()}
        bias: Tensor | None = file.get_tensor("bias") if "bias" in file.keys() else None  # noqa: SIM118
        weight = file.get_tensor("weight")
    return DenseTarget(weight=weight[:width], bias=None if bias is None else bias[:width], **numbers)


def check_cache(
    cache: Cache, student: LanguageModel, data: DataConfig, loss: LossConfig, where: str
) -> tuple[int, float]:
    """How many ids student and cache share, and the loss's temperature; an error where the recipe and the cache do not fit."""
    tokenizer = load_tokenizer(str(cache.folder / "tokenizer"), where)
    width = same_tokenizer(student.tokenizer, tokenizer, where)
    check_rows("student", student, width, where)
    if width < cache.form.vocabulary and cache.form.kind != "hidden":
        raise PotstillError(
            f"{where}: the cache's probabilities are over {cache.form.vocabulary} ids and the student's tokenizer has {width}: "
            "take the teacher's tokenizer for the student (student.tokenizer), or a cache of kind hidden"
        )
    _check_rendering(cache, student, tokenizer, data, where)
    return width, check_loss(cache.form, loss, where)


def _check_rendering(cache: Cache, student: LanguageModel, tokenizer: Any, data: DataConfig, where: str) -> None:
    manifest = cache.manifest
    ours, theirs = student.tokenizer.eos_token, tokenizer.eos_token
    if data.append_eos and ours not in (None, theirs) and any(not source.messages for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's documents end with {theirs!r} and the student's with {ours!r}: take the teacher's tokenizer "
            "for the student (student.tokenizer), or set data.append_eos to false"
        )
    if any(source.messages for source in data.sources):
        if template_fingerprint(student.tokenizer) != manifest["chat"]["template"]:
            raise PotstillError(
                f"{where}: the cache's conversations were rendered with another chat template than the student's: take the "
                "teacher's tokenizer for the student (student.tokenizer)"
            )
        if chat_kwargs(data) != manifest["chat"]["kwargs"]:
            raise PotstillError(
                f"{where}: the cache's conversations were rendered with chat_template_kwargs {manifest['chat']['kwargs']}, and "
                f"those of data.sources are {chat_kwargs(data)}"
            )
    pieces = manifest["piece_bytes"]
    if data.piece_bytes not in (None, pieces) and any(source.kind == "text" for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's texts were cut into pieces of {pieces} bytes, and data.piece_bytes is {data.piece_bytes}: "
            "leave it out"
        )


def check_loss(form: Format, loss: LossConfig, where: str) -> float:
    """The temperature of the loss, where a cache of this format can serve it."""
    scheduled = loss.temperature
    if form.kind == "hidden":
        return 1.0  # the head is there: any temperature can be had
    if form.kind == "chosen":
        raise PotstillError(
            f"{where}: the cache holds only how likely the text's own tokens were, and the loss needs a distribution: build "
            "one with --kind top_k, sampled or hidden"
        )
    moves = isinstance(scheduled, Schedule) and scheduled.shape != "constant" and scheduled.start != scheduled.end
    temperature = scheduled.start if isinstance(scheduled, Schedule) else scheduled
    if moves or temperature not in form.temperatures:
        known = ", ".join(f"{t:g}" for t in form.temperatures)
        what = "moves over the run" if moves else f"is {temperature:g}"
        raise PotstillError(
            f"{where}: loss.temperature {what}, and the cache knows the mass of what it left out at {known} only: build one "
            f"with --temperature {'…' if moves else f'{temperature:g}'} (top_k), or of kind hidden, which serves all of them"
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
