"""`potstill cache build`: run a teacher over a data set once, and keep what it says.

Which documents share a batch depends on the data alone, not on what was done before or on how many processes there are: a
build that was killed, or spread over other processes, ends with the same content. Each process writes shards of its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from potstill.cache.document import NOTHING, to_bytes
from potstill.cache.kinds import Signal
from potstill.cache.manifest import HEAD, PROBE, TOKENIZER, part, read_manifest, signal_keys
from potstill.cache.origin import CLOSE, LiveOrigin, Origin, save_head
from potstill.cache.reading import TeacherText, as_cached, chat_kwargs, examples_of
from potstill.cache.store import SHARD_BYTES, Cache, adopt, begun_cache, create
from potstill.config import DataConfig, StoreConfig
from potstill.files import MANIFEST
from potstill.models import LanguageModel
from potstill.types import Example, PotstillError

GROUP_PIECES = 2048  # sorted by length together
SHARD_SECONDS = 60.0  # at most so much work is lost when a build is killed
BATCH_TOKENS = 4096  # of a forward pass
WAITING = 4  # batches whose signal waits to be packed and written


@dataclass(frozen=True)
class Progress:
    """How far a build is; of this process alone but for the totals."""

    documents: int  # done by this process
    tokens: int
    bytes: int  # of the cache, per this process
    text_bytes: int  # done, of `total_text_bytes` that this process has to do (0: not known)
    total_text_bytes: int
    seconds: float


@dataclass(frozen=True)
class Built:
    documents: int  # added by this process
    tokens: int
    there: int  # documents of the data that were in the cache already
    unpredictable: int  # documents with nothing to predict in them
    seconds: float
    rest: float | None = None  # top_k: the rest's mass at the first temperature, on average


class CacheWriter:
    """Computes documents and adds them to a cache; packing and writing happen on a thread of their own."""

    def __init__(
        self,
        origin: Origin,
        store: StoreConfig,
        folder: Path,
        *,
        data: DataConfig,
        shard_seconds: float = SHARD_SECONDS,
    ) -> None:
        self.origin = origin
        self.form = origin.format(store)
        self.text = TeacherText(origin.tokenizer, origin.positions)
        found = origin.identity
        identity = {
            "kind": self.form.kind,
            "signal": signal_keys(self.form),
            "teacher": {
                "model": found.name,
                "revision": found.revision,
                "weights": found.weights,
                "dtype": found.dtype,
            },
            "tokenizer": found.tokenizer,
            "chat": {"template": found.template, "kwargs": _chat_kwargs(data, folder)},
            "piece_bytes": data.cut_bytes,
        }
        self.writer = create(folder, identity, self._beside)
        try:
            self._check_probe(folder)
        except PotstillError:
            self.writer.close()
            raise
        self.documents = self.tokens = self.bytes = 0
        self._rest = np.zeros(2)  # rows, and the sum of their rests' masses
        self._shard_seconds = shard_seconds
        self._began = time.monotonic()
        self._worker = ThreadPoolExecutor(1, "writer")
        self._pending: deque[Future[None]] = deque()
        self._tending: Future[None] | None = None
        self._closed = False

    def _beside(self, folder: Path) -> None:
        """What a reader needs besides the shards: the tokenizer, and with hidden states the head."""
        self.origin.tokenizer.save_pretrained(folder / TOKENIZER)
        if self.form.has_head:
            save_head(self.origin.head(self.form.vocabulary), folder / HEAD)
        if self.origin.probe is not None:
            (folder / PROBE).write_text(json.dumps(list(self.origin.probe)), encoding="utf-8")

    def _check_probe(self, folder: Path) -> None:
        """That a server whose model has no fingerprint says of a text what it said when the cache was begun."""
        if self.origin.probe is None or not part(folder, PROBE).exists():
            return
        try:
            before = np.array(json.loads(part(folder, PROBE).read_text(encoding="utf-8")), dtype=np.float64)
        except (ValueError, TypeError, RecursionError) as error:
            raise PotstillError(
                f"{folder / PROBE} is not what potstill wrote ({error}): choose another folder"
            ) from error
        now = np.array(self.origin.probe)
        if before.shape != now.shape or float(np.abs(before - now).mean()) > CLOSE:
            raise PotstillError(
                f"{folder} was built with another model than the server has now, though both are called "
                f"{self.origin.identity.name}: choose another folder"
            )

    def add(self, pieces: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> int:
        """Compute some documents. Gives how many have nothing to predict in them: they are stored as nothing, for else they
        would be missing for ever."""
        read, barren = self._read(pieces)
        if barren:
            self._pending.append(self._worker.submit(self._add_nothing, barren))
        for some in by_tokens(read, batch_tokens):
            self._pending.append(self.write(some))
            while len(self._pending) > max(WAITING, self.origin.at_once):
                self._pending.popleft().result()
        return len(barren)

    def start(self, pieces: Sequence[Example], written: Sequence[Example], batch_tokens: int) -> list[Future[None]]:
        """Begin with some documents, and with texts that are in the teacher's tokens already. Who waits for what is given
        back, on whatever thread, finds them packed. Not to be called by two threads at once."""
        read, barren = self._read(pieces)
        begun = [self._worker.submit(self._add_nothing, barren)] if barren else []
        for examples in (list(written), read):
            begun += [self.write(some) for some in by_tokens(examples, batch_tokens)]
        return begun

    def _read(self, pieces: Sequence[Example]) -> tuple[list[Example], list[str]]:
        """Pieces in the teacher's tokens, and the keys of those with nothing to predict in them."""
        read = self.text(pieces)
        barren = [piece.key for piece, example in zip(pieces, read, strict=True) if example is None]
        return [example for example in read if example is not None], barren

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
        streams = self.form.encode(signal_rows)
        if "odds" in signal_rows:
            odds = signal_rows["odds"][:, 0].astype(np.float64)
            self._rest += len(odds), np.exp(-np.logaddexp(0.0, -odds)).sum()
        begin = 0
        for example in examples:
            end = begin + example.supervised_tokens
            assert example.ends is not None
            rows = {name: stream[begin:end] for name, stream in streams.items()}
            data = to_bytes(self.form, example.ids, example.ends, example.supervised, rows)
            self.writer.add(example.key, len(example.ids), data)
            self.documents, self.tokens, self.bytes = (
                self.documents + 1,
                self.tokens + len(example.ids),
                self.bytes + len(data),
            )
            begin = end
        if self.writer.size >= SHARD_BYTES or time.monotonic() - self._began >= self._shard_seconds:
            self._flush()

    def _add_nothing(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.writer.add(key, 0, NOTHING)

    def _flush(self) -> None:
        self.writer.flush()
        self._began = time.monotonic()

    def flush_if_due(self) -> None:
        """Put what has waited long enough on disk, on the thread that writes. Who reads calls it: nothing may be added any
        more."""
        before = self._tending  # of any thread that reads
        if before is not None:
            if not before.done():
                return
            before.result()  # raises what went wrong
        if self.writer.waiting and time.monotonic() - self._began >= self._shard_seconds and not self._closed:
            self._tending = self._worker.submit(self._flush)

    @property
    def rest(self) -> float | None:
        """Of what was computed so far: the mass beyond the top k, on average."""
        return float(self._rest[1] / self._rest[0]) if self._rest[0] else None

    def settle(self) -> None:
        """Wait until everything handed over is packed (not: on disk)."""
        while self._pending:
            self._pending.popleft().result()

    def close(self, *, abandoned: bool = False) -> None:
        """Put everything on disk that was computed. `abandoned`: what is under way is given up."""
        if self._closed:
            return
        self._closed = True
        if abandoned:
            self.origin.close()
        try:
            wait(self._pending)
            self._worker.submit(self._flush).result()
            if not abandoned:
                self.settle()
        except KeyboardInterrupt:  # what is there is kept, and nobody waits for the rest
            self.origin.close()
            self._worker.submit(self._flush).result()
            raise
        finally:
            self.origin.close()  # first: what waits for a server would hold the worker up
            self._worker.shutdown()
            self.writer.close()


def _chat_kwargs(data: DataConfig, folder: Path) -> dict[str, Any]:
    """Those of the data; of data without chats, those of the cache that is there."""
    if not any(source.messages for source in data.sources) and (folder / MANIFEST).exists():
        there: dict[str, Any] = read_manifest(folder)["chat"]["kwargs"]
        return there
    return chat_kwargs(data)


def build(
    teacher: LanguageModel | Origin,
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
) -> Built:
    """Add to the cache in `folder` every document of `data` that it lacks. `name`: what its manifest calls a model."""
    begin = time.monotonic()
    origin = LiveOrigin(teacher, name) if isinstance(teacher, LanguageModel) else teacher
    if (begun := begun_cache(folder)) is not None:
        data = as_cached(data, begun)
    writer = CacheWriter(origin, store, folder, data=data, shard_seconds=shard_seconds)
    lost, names = adopt(folder)
    if names:
        more = ", …" if names[1:] else ""
        say(f"{len(names)} shards of {folder} are gone ({names[0]}{more}): their {lost:,} documents are computed again")
    cache = Cache(folder)
    streaming = any(source.streaming for source in data.sources)
    there, total = (0, 0) if streaming else _to_do(cache, data, origin.tokenizer, key)
    done = unpredictable = 0
    try:
        for number, batch in enumerate(_batches(examples_of(data, origin.tokenizer, key), batch_tokens)):
            if number % world != rank:
                continue
            missing = [piece for piece, at in zip(batch, cache.find([p.key for p in batch]), strict=True) if at < 0]
            unpredictable += writer.add(missing, batch_tokens)
            done += sum(len(piece.text.encode()) for piece in missing)
            seconds = time.monotonic() - begin
            progress(Progress(writer.documents, writer.tokens, writer.bytes, done, total // world, seconds))
        writer.close()
    except BaseException:
        writer.close(abandoned=True)
        raise
    return Built(writer.documents, writer.tokens, there, unpredictable, time.monotonic() - begin, writer.rest)


def _to_do(cache: Cache, data: DataConfig, tokenizer: Any, key: str) -> tuple[int, int]:
    """How many documents are there already, and how many bytes of text are not."""
    there = total = 0
    pieces = examples_of(data, tokenizer, key)
    while some := list(islice(pieces, GROUP_PIECES)):
        found = cache.find([piece.key for piece in some]) >= 0
        there += int(found.sum())
        total += sum(len(piece.text.encode()) for piece, here in zip(some, found, strict=True) if not here)
    return there, total


def _batches(pieces: Iterator[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Pieces of like lengths. Lengths are in bytes: only who computes a batch needs its tokens."""
    while group := list(islice(pieces, GROUP_PIECES)):
        group.sort(key=lambda piece: (len(piece.text.encode()), piece.key))
        batch: list[Example] = []
        for piece in group:
            if batch and (len(batch) + 1) * len(piece.text.encode()) > 4 * batch_tokens:
                yield batch
                batch = []
            batch.append(piece)
        yield batch


def by_tokens(examples: list[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """The same, in parts that fit: some texts have more tokens a byte than others."""
    examples = sorted(examples, key=lambda example: len(example.ids))
    batch: list[Example] = []
    for example in examples:
        if batch and (len(batch) + 1) * len(example.ids) > 2 * batch_tokens:
            yield batch
            batch = []
        batch.append(example)
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
