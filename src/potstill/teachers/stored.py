"""Documents that come with a teacher's signal, from a cache or as a server has just answered, as sources of signal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potstill.cache.manifest import tokenizer_of
from potstill.cache.origin import LiveOrigin, TeacherBackend
from potstill.cache.reader import CacheReader
from potstill.cache.reading import chat_kwargs, template_fingerprint
from potstill.cache.store import Cache
from potstill.cache.together import computing
from potstill.config import DataConfig
from potstill.models import load_tokenizer, same_tokenizer
from potstill.models.language_model import LanguageModel
from potstill.signals.document import Document, SignalRows, blank
from potstill.signals.kinds import Hidden, SignalKind
from potstill.teachers.protocols import Asked, Reading, Signal, SignalSource
from potstill.teachers.reading import NOTHING
from potstill.transfer import to_device
from potstill.types import Batch, Example, Head, HiddenTarget, LogitsTarget, PotstillError, SampledTarget, TopKTarget


class StoredSignal(SignalSource):
    """Documents that come with their signal. The prefetch thread decodes it; the device gets it, and the head."""

    def __init__(self, form: SignalKind, width: int, temperature: float = 1.0) -> None:
        self.form, self.width, self.temperature = form, width, temperature

    @abstractmethod
    def documents(self, batch: Batch, compute: bool) -> Sequence[Document] | None:
        """As `read`."""

    @abstractmethod
    def head(self, device: torch.device) -> Head:
        """The head that goes with hidden states, over `width` ids."""

    def read(self, batch: Batch, compute: bool) -> Reading | None:
        found = self.documents(batch, compute)
        if found is None:
            return None
        return Reading([d.as_read(e) for d, e in zip(found, batch.examples, strict=True)], documents=found)

    def prepare(self, reading: Reading, asked: Sequence[Asked]) -> list[Signal]:
        if not reading.documents:  # a rank that has no rows in a pass of all
            reading = Reading([NOTHING], documents=[blank(self.form)])
        return [self._decoded(_chosen(reading, one), one) for one in asked]

    def _decoded(self, rows: SignalRows, asked: Asked) -> Signal:
        form = rows.form
        if isinstance(form, Hidden):
            return Signal(hidden=form.states(rows))
        logprobs = torch.from_numpy(rows["token_logprobs"]) if asked.token_logprobs else None
        if not asked.distribution:
            return Signal(token_logprobs=logprobs)
        target = form.target(rows, self.temperature, self.width)
        assert isinstance(target, LogitsTarget | TopKTarget | SampledTarget)
        return Signal(target, logprobs)

    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        device = batch.input_ids.device

        def moved(values: Tensor | None) -> Tensor | None:
            return None if values is None else to_device(values, device)

        if all(signal.hidden is None for signal in host):
            return [Signal(None if s.target is None else s.target.to(device), moved(s.token_logprobs)) for s in host]
        head = self.head(device)
        hidden = (moved(signal.hidden) for signal in host)
        return [Signal(HiddenTarget(part, head)) for part in hidden if part is not None]


class CachedSignal(StoredSignal):
    """A cache, alone or in front of what computes its missing documents (`origin`), which is then on every rank; the reader
    adds to the cache on the one that asks."""

    def __init__(
        self, reader: CacheReader, width: int, temperature: float = 1.0, origin: TeacherBackend | None = None
    ) -> None:
        super().__init__(reader.form, width, temperature)
        self.reader, self.ahead, self._origin = reader, reader.ahead, origin
        self.fixed, self.skips = reader.fixed and origin is None, reader.skips

    def computing(self) -> AbstractContextManager[None]:
        return computing(self._origin)

    @property
    def waited(self) -> float:
        return self._origin.teacher.waited if isinstance(self._origin, LiveOrigin) else 0.0

    def missing(self, batch: Batch) -> Sequence[int]:
        return self.reader.missing(batch)

    def check_there(self, examples: Sequence[Example]) -> None:
        if self.fixed:
            self.reader.check_there(examples)

    def documents(self, batch: Batch, compute: bool) -> Sequence[Document] | None:
        found = self.reader.documents(batch.examples)
        if found is None and compute:
            self.reader.compute(batch.examples)
            found = self.reader.documents(batch.examples)
        return found

    def head(self, device: torch.device) -> Head:
        return self.reader.head(device, self.width)

    def close(self) -> None:
        self.reader.close()


def _chosen(reading: Reading, asked: Asked) -> SignalRows:
    """Of each document the rows that predict the tokens that are asked about."""
    bounds = np.searchsorted(asked.document, np.arange(len(reading.documents) + 1))
    chosen = []
    for i, (document, example) in enumerate(zip(reading.documents, reading.examples, strict=True)):
        at = asked.place[bounds[i] : bounds[i + 1]]
        if not document.predicted[at].all():
            raise PotstillError(
                f"{example.source} ({example.key}): the cache does not hold all of its supervised tokens: build it anew"
            )
        chosen.append((document, np.cumsum(document.predicted)[at] - 1))
    return SignalRows(chosen)


def check_cache(cache: Cache, student: LanguageModel, data: DataConfig, where: str) -> int:
    """How many ids student and cache share; an error where the data and the cache do not fit."""
    tokenizer = load_tokenizer(str(tokenizer_of(cache.folder)), where)
    width = min(same_tokenizer(student.tokenizer, tokenizer, where), student.vocabulary)
    if width < cache.form.vocabulary and cache.form.kind != "hidden":
        raise PotstillError(
            f"{where}: the cache's probabilities are over {cache.form.vocabulary} ids and the student's tokenizer has {width}: "
            "take the teacher's tokenizer for the student (student.tokenizer), or a cache of kind hidden"
        )
    _check_rendering(cache, student, tokenizer, data, where)
    check_pieces(cache, data, where)
    return width


def _check_rendering(cache: Cache, student: LanguageModel, tokenizer: Any, data: DataConfig, where: str) -> None:
    ours, theirs = student.tokenizer.eos_token, tokenizer.eos_token
    if data.append_eos and ours not in (None, theirs) and any(not source.messages for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's documents end with {theirs!r} and the student's with {ours!r}: take the teacher's "
            "tokenizer for the student (student.tokenizer), or set data.append_eos to false"
        )
    chats = any(source.messages for source in data.sources)
    if chats and template_fingerprint(student.tokenizer) != cache.manifest.chat.template:
        raise PotstillError(
            f"{where}: the cache's conversations were rendered with another chat template than the student's: take the "
            "teacher's tokenizer for the student (student.tokenizer)"
        )


def check_pieces(cache: Cache, data: DataConfig, where: str) -> None:
    """What must be alike whatever the tokenizers."""
    manifest = cache.manifest
    if any(source.messages for source in data.sources) and chat_kwargs(data) != manifest.chat.arguments:
        raise PotstillError(
            f"{where}: the cache's conversations were rendered with chat_template_kwargs {manifest.chat.arguments}, and "
            f"those of data.sources are {chat_kwargs(data)}"
        )
    pieces = manifest.piece_bytes
    if data.piece_bytes not in (None, pieces) and any(source.kind == "text" for source in data.sources):
        raise PotstillError(
            f"{where}: the cache's texts were cut into pieces of {pieces} bytes, and data.piece_bytes is {data.piece_bytes}: "
            "leave it out; where it is left out, another teacher's cache has pieces of that size: build one of the two anew"
        )
