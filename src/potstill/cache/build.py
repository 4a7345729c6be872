"""`potstill cache build`: run a teacher over a data set once, and keep what it says.

Which documents share a batch depends on the data alone, not on what was done before or on how many processes there are: a
build that was killed, or spread over other processes, ends with the same content. Each process writes shards of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from potstill.cache.manifest import HEAD, TOKENIZER, new_manifest, read_manifest
from potstill.cache.origin import CLOSE, TeacherBackend, save_head
from potstill.cache.reading import TeacherText, as_cached, chat_kwargs, examples_of
from potstill.cache.store import Cache, adopt, begun_cache, create
from potstill.cache.together import SharedOrigin, computing, origin_of
from potstill.cache.verify import coverage
from potstill.config import DataConfig, StoreConfig
from potstill.files import MANIFEST
from potstill.models import LanguageModel
from potstill.signals.document import NOTHING
from potstill.signals.kinds import Signal
from potstill.types import Example, PotstillError

T = TypeVar("T")
GROUP_TEXTS = 2048  # sorted by length together
SHARD_SECONDS = 60.0  # at most so much work is lost when a build is killed
BATCH_TOKENS = 4096  # of a forward pass
WAITING = 4  # batches whose signal waits to be packed and written


@dataclass(frozen=True)
class Progress:
    """How far a build is; of this process alone."""

    documents: int  # added
    tokens: int
    bytes: int
    text_bytes: int  # done, of `total_text_bytes` that this process has to do (0: not known)
    total_text_bytes: int
    there: int  # documents of the data that were in the cache already, of all processes
    unpredictable: int  # documents with nothing to predict in them
    rest: float | None  # top_k: the rest's mass at the first temperature, on average
    seconds: float


class CacheWriter:
    """Computes documents and adds them to a cache; packing and writing happen on a thread of their own."""

    def __init__(
        self,
        origin: TeacherBackend,
        store: StoreConfig,
        folder: Path,
        *,
        data: DataConfig,
        shard_seconds: float = SHARD_SECONDS,
    ) -> None:
        self.origin, self.form = origin, origin.format(store)
        self.text = TeacherText(origin.tokenizer, origin.positions)
        found, kwargs = origin.identity, chat_kwargs(data)
        if not any(source.messages for source in data.sources) and (folder / MANIFEST).exists():
            kwargs = read_manifest(folder).chat.arguments  # of data without chats, those of the cache that is there
        manifest = new_manifest(
            folder,
            self.form,
            teacher={"model": found.name, "revision": found.revision, "weights": found.weights, "dtype": found.dtype},
            tokenizer=found.tokenizer,
            chat={"template": found.template, "kwargs": kwargs},
            piece_bytes=data.cut_bytes,
            probe=None if origin.probe is None else list(origin.probe),
        )
        self.writer = create(folder, manifest, self._beside)
        self.writer.shard_seconds = shard_seconds
        if not _same_model(self.writer.manifest.probe, origin.probe):
            self.writer.close()
            raise PotstillError(
                f"{folder} was built with another model than the server has now, though both are called {found.name}: "
                "choose another folder"
            )
        self.unpredictable = 0
        self._rest = np.zeros(2)  # rows, and the sum of their rests' masses
        self._worker = ThreadPoolExecutor(1, "writer")
        self._pending: deque[Future[None]] = deque()
        self._flushing: Future[int] | None = None
        self._closed = False

    def _beside(self, folder: Path) -> None:
        """What a reader needs besides the shards: the tokenizer, and with hidden states the head."""
        self.origin.tokenizer.save_pretrained(folder / TOKENIZER)
        if self.form.has_head:
            save_head(self.origin.head(self.form.vocabulary), folder / HEAD)

    def add(self, texts: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> None:
        """Compute some documents. No more than a few batches wait to be written."""
        for _, packed in self.begin(texts, (), batch_tokens):
            self._pending.append(packed)
            while len(self._pending) > max(WAITING, self.origin.at_once):
                self._pending.popleft().result()

    def begin(
        self, texts: Sequence[Example], written: Iterable[Example], batch_tokens: int
    ) -> Iterator[tuple[list[str], Future[None]]]:
        """Begin with some documents, and with texts that are in the teacher's tokens already: keys, and what is done when
        they are packed. Those with nothing to predict in them are stored as nothing, for else they would be missing for
        ever. Not to be called by two threads at once."""
        read = self.text(texts)
        if nothing := [text.key for text, example in zip(texts, read, strict=True) if example is None]:
            self.unpredictable += len(nothing)
            yield nothing, self._worker.submit(self._add_nothing, nothing)
        for examples in (written, filter(None, read)):
            by_length = sorted(examples, key=lambda example: len(example.ids))
            # In parts that fit: some texts have more tokens per byte than others.
            for some in batches(by_length, lambda example: len(example.ids), 2 * batch_tokens):
                yield [example.key for example in some], self.write(some)

    def write(self, examples: Sequence[Example]) -> Future[None]:
        """Run the teacher on some documents, in its own tokens, and hand what it says to the thread that writes."""
        for example in examples:
            if example.ids.max() >= self.form.vocabulary:
                raise PotstillError(
                    f"{example.source} ({example.key}): the teacher's tokenizer gives it id {example.ids.max()}, and the "
                    f"teacher has {self.form.vocabulary} ids"
                )
        begun = self.origin.begin(self.form, examples)
        return self._worker.submit(lambda: self._add(examples, begun()))

    def _add(self, examples: Sequence[Example], signal_rows: Signal) -> None:
        if "odds" in signal_rows:
            odds = signal_rows["odds"][:, 0].astype(np.float64)
            self._rest += len(odds), np.exp(-np.logaddexp(0.0, -odds)).sum()
        self.writer.add_rows(self.form, examples, self.form.encode(signal_rows))

    def _add_nothing(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.writer.add(key, 0, NOTHING)

    def flush_if_due(self) -> None:
        """Put what has waited long enough on disk, on the thread that writes. Who reads calls it: nothing may be added any
        more."""
        before = self._flushing  # of any thread that reads
        if before is not None:
            if not before.done():
                return
            before.result()  # raises what went wrong
        if self.writer.waiting and self.writer.due and not self._closed:
            self._flushing = self._worker.submit(self.writer.flush)

    @property
    def rest(self) -> float | None:
        """Of what was computed so far: the mass beyond the top k, on average."""
        return float(self._rest[1] / self._rest[0]) if self._rest[0] else None

    def close(self, *, abandoned: bool = False) -> None:
        """Put everything on disk that was computed. `abandoned`: what is under way is given up."""
        if self._closed:
            return
        self._closed = True
        if abandoned:
            self.origin.close()
        try:
            wait(self._pending)
            self._worker.submit(self.writer.flush).result()
            for packed in () if abandoned else self._pending:
                packed.result()
        except KeyboardInterrupt:  # what is there is kept, and nobody waits for the rest
            self.origin.close()
            self._worker.submit(self.writer.flush).result()
            raise
        finally:
            self.origin.close()  # first: what waits for a server would hold the worker up
            self._worker.shutdown()
            self.writer.close()


def _same_model(before: Sequence[float] | None, now: Sequence[float] | None) -> bool:
    """Whether a server whose model has no fingerprint says of a text what it said when the cache was begun."""
    if before is None or now is None:
        return True
    return len(before) == len(now) and float(np.abs(np.subtract(before, now)).mean()) <= CLOSE


def build(
    teacher: LanguageModel | TeacherBackend,
    store: StoreConfig,
    data: DataConfig,
    folder: Path,
    *,
    name: str = "",
    key: str = "data",
    batch_tokens: int = BATCH_TOKENS,
    rank: int = 0,
    world: int = 1,
    shard_seconds: float = SHARD_SECONDS,
    progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Progress:
    """Add to the cache in `folder` every document of `data` that it lacks. `name`: what its manifest calls a model. `rank`, of
    `world`: which share of the documents is this process's; a rank that only helps to compute another's adds none."""
    origin = origin_of(teacher, name) if isinstance(teacher, LanguageModel) else teacher
    with computing(origin):
        if isinstance(origin, SharedOrigin) and not origin.leads:
            return Progress(0, 0, 0, 0, 0, 0, 0, None, 0.0)
        return _build(origin, store, data, folder, key, batch_tokens, (rank, world), shard_seconds, progress, say)


def _build(
    origin: TeacherBackend,
    store: StoreConfig,
    data: DataConfig,
    folder: Path,
    key: str,
    batch_tokens: int,
    share: tuple[int, int],
    shard_seconds: float,
    progress: Callable[[Progress], None],
    say: Callable[[str], None],
) -> Progress:
    begin = time.monotonic()
    rank, world = share
    if (begun := begun_cache(folder)) is not None:
        data = as_cached(data, begun)
    writer = CacheWriter(origin, store, folder, data=data, shard_seconds=shard_seconds)
    lost, names = adopt(folder)
    if names:
        more = ", …" if names[1:] else ""
        say(f"{len(names)} shards of {folder} are gone ({names[0]}{more}): their {lost:,} documents are computed again")
    cache = Cache(folder)
    there = total = done = 0
    if not any(source.streaming for source in data.sources):
        found = coverage(cache, data, origin.tokenizer, key=key)
        there, total = found.documents - found.missing, found.missing_bytes // world

    def now() -> Progress:
        added = (writer.writer.documents, writer.writer.tokens, writer.writer.bytes)
        return Progress(*added, done, total, there, writer.unpredictable, writer.rest, time.monotonic() - begin)

    try:
        for number, batch in enumerate(text_batches(examples_of(data, origin.tokenizer, key), batch_tokens)):
            if number % world == rank:
                missing = [text for text, at in zip(batch, cache.find([t.key for t in batch]), strict=True) if at < 0]
                writer.add(missing, batch_tokens)
                done += sum(map(text_bytes, missing))
                progress(now())
        writer.close()
    except BaseException:
        writer.close(abandoned=True)
        raise
    return now()


def text_bytes(example: Example) -> int:
    return len(example.text.encode())


def text_batches(examples: Iterator[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Texts of like lengths. Lengths are in bytes: only who computes a batch needs its tokens."""
    while group := list(islice(examples, GROUP_TEXTS)):
        group.sort(key=lambda example: (text_bytes(example), example.key))
        yield from batches(group, text_bytes, 4 * batch_tokens)


def batches(items: Sequence[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """What comes in the order of its size, in batches of at most so much when all of a batch are padded to its longest."""
    batch: list[T] = []
    for item in items:
        if batch and (len(batch) + 1) * size(item) > most:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a build as Ctrl-C does: with what was computed on disk."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ranks() -> tuple[int, int]:
    """This process and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
