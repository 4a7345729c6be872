"""Documents of a cache as training asks for them; with a model or a server beside it, what it lacks is computed and added."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import numpy as np
import safetensors
import torch

from potstill.cache.build import BATCH_TOKENS, CacheWriter
from potstill.cache.manifest import HEAD, part, tokenizer_of
from potstill.cache.origin import read_head
from potstill.cache.store import Cache
from potstill.cache.verify import coverage
from potstill.config import DataConfig
from potstill.models import load_tokenizer
from potstill.signals.document import Document, blank, from_bytes
from potstill.types import Batch, Example, Head, PotstillError


class CacheReader:
    """`as_read`: gives an example the text that a teacher with other tokens reads. Without it, a text that a model wrote is
    read in the tokens it was written in, which no tokenizer gives back from the text."""

    def __init__(
        self,
        cache: Cache,
        *,
        skip_missing: bool = False,
        writer: CacheWriter | None = None,
        data: DataConfig | None = None,
        as_read: Callable[[Example], Example] | None = None,
    ) -> None:
        cache.check_files()
        self.cache = cache
        self.form = cache.form
        self.ahead = writer.origin.at_once if writer is not None and writer.origin.ahead else 1
        self._claiming = threading.Lock()
        self._under_way: dict[str, Future[None]] = {}  # documents that are being computed, until they are packed
        self.skips = skip_missing
        self._writer = writer
        self._data = data
        self._as_read = as_read
        self.fixed = writer is None and not skip_missing
        self._heads: dict[tuple[torch.device, int], Head] = {}

    def head(self, device: torch.device, width: int) -> Head:
        """The teacher's own, over so many ids; of a cache of hidden states."""
        if (device, width) not in self._heads:
            self._heads[device, width] = load_head(self.cache.folder, width).to(device)
        return self._heads[device, width]

    def missing(self, batch: Batch) -> Sequence[int]:
        if not self.skips:
            return ()
        found = self.cache.find([example.key for example in batch.examples])
        return [i for i, at in enumerate(found) if at < 0]

    def check_there(self, examples: Sequence[Example]) -> None:
        asked = [example for example in examples if example.supervised.any() and self.fixed]
        found = self.cache.find([example.key for example in asked])
        if (found < 0).any():
            raise self._missing(asked[int(np.argmax(found < 0))])

    def documents(self, examples: Sequence[Example]) -> list[Document] | None:
        """None: some of them are still to be computed."""
        if self._writer is not None:
            self._writer.flush_if_due()
        found = self._found(examples)
        if None in found and self._writer is None:
            raise self._missing(examples[found.index(None)])
        if None in found and self._writer is not None and self._writer.origin.ahead:
            self.compute(examples)
            found = self._found(examples)
        there = [document for document in found if document is not None]
        return there if len(there) == len(found) else None

    def compute(self, examples: Sequence[Example]) -> None:
        """What is not there. Nothing, when it has been computed since for another batch, or by another process. Several threads
        may prepare: each asks for what no other has under way, and waits for all of its own."""
        asked: set[str] = set()
        while True:
            with self._claiming:
                # First what is under way, then what is there: what is packed between the two is found.
                others = {e.key: packed for e in examples if (packed := self._under_way.get(e.key)) is not None}
                free = [e for e in examples if e.key not in others]
                missing = {e.key: e for e, there in zip(free, self._found(free), strict=True) if there is None}
                assert asked.isdisjoint(missing), "what was added is not found"
                asked |= missing.keys()
                own = self._begin(list(missing.values()))
            if not own and not others:
                return
            for packed in own:
                packed.result()
            wait(others.values())  # where one of them fails, the next round asks for it again

    def _begin(self, examples: Sequence[Example]) -> list[Future[None]]:
        assert self._writer is not None
        # In parts of like lengths: one long document among short ones would pad all of them to its length.
        tokens = min(sum(len(example.ids) for example in examples), BATCH_TOKENS)
        if self._as_read is not None:
            texts, written = [self._as_read(example) for example in examples], []
        else:
            texts = [example for example in examples if example.writer is None]
            written = [example for example in examples if example.writer is not None]
        begun = []
        for keys, packed in self._writer.begin(texts, written, tokens):
            self._under_way |= dict.fromkeys(keys, packed)
            packed.add_done_callback(partial(self._release, keys))
            begun.append(packed)
        return begun

    def _release(self, keys: Sequence[str], _: Future[None]) -> None:
        for key in keys:
            del self._under_way[key]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(abandoned=True)

    def _found(self, examples: Sequence[Example]) -> list[Document | None]:
        """None: it is not there."""
        # An example with nothing supervised: its document was left out.
        found = [self._waiting(e.key) if e.supervised.any() else blank(self.cache.form) for e in examples]
        for refresh in (False, True) if self._writer is not None else (False,):
            missing = [i for i, document in enumerate(found) if document is None]
            if missing and refresh:  # what has just been written waits no more, and other processes write too
                self.cache.refresh()
            for i, document in zip(missing, self.cache.documents([examples[i].key for i in missing]), strict=True):
                found[i] = document
        return found

    def _waiting(self, key: str) -> Document | None:
        tokens, data = (0, b"") if self._writer is None else self._writer.writer.waiting.get(key, (0, b""))
        return from_bytes(self.cache.form, np.frombuffer(data, dtype=np.uint8), tokens) if data else None

    def _missing(self, example: Example) -> PotstillError:
        named = f"{example.source or 'a document'} ({example.key})"
        counted = ""
        if self._data is not None and not any(source.streaming for source in self._data.sources):
            tokenizer = load_tokenizer(str(tokenizer_of(self.cache.folder)), "cache")
            found = coverage(self.cache, self._data, tokenizer)
            counted = f"; {found.missing:,} of the {found.documents:,} documents of data are not in it"
        return PotstillError(
            f"the cache {self.cache.folder} has no document {named}{counted}: add what is missing with `potstill cache build "
            f"RECIPE --out {self.cache.folder}`, or leave it out with on_missing: skip"
        )


def load_head(folder: Path, width: int | None = None) -> Head:
    path = part(folder, HEAD)
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return read_head(tensors, file.metadata() or {}, width)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise PotstillError(
            f"cannot read {path} ({error}): run `potstill cache build` again, which writes it anew"
        ) from error
