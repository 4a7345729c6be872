"""The teachers of a recipe, opened, and made ready ahead of the step that needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from potstill.cache.build import CacheWriter
from potstill.cache.manifest import form_of, read_manifest, tokenizer_of
from potstill.cache.origin import LiveOrigin
from potstill.cache.reader import CacheReader
from potstill.cache.reading import as_cached, chat_kwargs, piece_of
from potstill.cache.store import Cache, check_beside
from potstill.config import DataConfig, LossConfig, TeacherConfig
from potstill.config.compatibility import Combination, check
from potstill.config.sections import fixed_value
from potstill.data import StepBatch, without
from potstill.files import MANIFEST
from potstill.models import LanguageModel, difference, load_teacher, load_tokenizer, shared_ids
from potstill.teachers.cross_tokenizer import cross_tokenizer_view
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.protocols import SignalSource, TokenizerView
from potstill.teachers.reading import TeacherReader
from potstill.teachers.remote import RemoteOrigin, open_remote, open_server
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import StoredSignal, check_cache, check_pieces
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, PotstillError
from potstill.types import Teacher as AnyTeacher

SKIPPED = "skipped_examples"
LOOKED_UP = 10_000  # documents, before a run begins
NOTHING_LEFT = "data: on_missing is skip, and the cache has none of the documents"


@dataclass(frozen=True)
class TeacherSet:
    """The teachers of a run, and the models among them."""

    teachers: Sequence[Teacher[SignalSource]]
    live: Sequence[Teacher[LiveModel]]  # those in the process with the student's tokenizer, to evaluate against
    notes: Sequence[str] = ()  # what their user should know
    identities: list[str | None] = field(default_factory=list)  # fingerprints of those behind servers
    writer: LanguageModel | RemoteOrigin | None = None  # the first of them, where it can be asked to write


@dataclass(frozen=True)
class Opening:
    """A teacher of a recipe that is to be opened, and the run that it is for."""

    config: TeacherConfig
    student: LanguageModel
    data: DataConfig
    loss: LossConfig
    device: torch.device
    where: str  # what messages call it

    @property
    def temperature(self) -> float:
        """At which its signal is read; one that moves over the run goes with hidden states, which serve all."""
        return fixed_value(self.loss.temperature) or 1.0

    def check(self, difference: str | None) -> None:
        """That the recipe's combination can be, with what the recipe does not tell. `difference`: of the tokenizers."""
        found = replace(Combination.of(self.config, self.loss), tokenizer="same" if difference is None else "other")
        if found.alone:
            manifest = read_manifest(Path(self.config.cache or ""))
            form = form_of(manifest)
            found = found.stored(form.kind, form.temperatures, "imported" in manifest)
        check(found, self.where)

    def teacher(self, source: SignalSource, view: TokenizerView) -> Teacher[SignalSource]:
        return Teacher(source, view, self.config.name, self.config.weight, self.config.filter)

    def reader(self, tokenizer: Any, positions: int | None) -> TeacherReader:
        return TeacherReader(tokenizer, positions, chat_kwargs(self.data), self.config.context_column)


@dataclass(frozen=True)
class Opened:
    teacher: Teacher[SignalSource]
    origin: LanguageModel | RemoteOrigin | None = None  # what computes its signal
    difference: str | None = None  # of its tokenizer from the student's


def open_model(opening: Opening) -> Opened:
    config, student = opening.config, opening.student
    model = load_teacher(config, opening.device, opening.where)
    reason = difference(student.tokenizer, model.tokenizer)
    opening.check(reason)
    if reason is None and config.context_column is None:
        source = LiveModel(model, shared_ids(student, model, opening.where))
        return Opened(opening.teacher(source, SameTokenizerView()), model)
    view, width = cross_tokenizer_view(
        student, model.tokenizer, model.vocabulary, config.cross_tokenizer, opening.temperature
    )
    source = LiveModel(model, width, opening.reader(model.tokenizer, model.positions))
    return Opened(opening.teacher(source, view), model, reason)


def open_served(opening: Opening) -> Opened:
    config, student = opening.config, opening.student
    origin = open_server(config, opening.where)
    reason = difference(student.tokenizer, origin.tokenizer)
    opening.check(reason)
    other = reason is not None or config.context_column is not None
    teacher = open_remote(config, origin, student, opening.data, opening.loss, opening.where, other=other)
    return Opened(teacher, origin, reason)


def open_cached(opening: Opening) -> Opened:
    """A cache, alone or in front of a model or a server that computes what it lacks."""
    config, student, where = opening.config, opening.student, f"{opening.where}.cache"
    folder, writer, piece = Path(config.cache or ""), None, piece_of
    computes: LanguageModel | RemoteOrigin | None = None
    if config.model is not None:
        computes = load_teacher(config, opening.device, opening.where)
    elif config.server is not None:
        computes = open_server(config, opening.where)
    tokenizer = _cached_tokenizer(folder, where) if computes is None else computes.tokenizer
    reason = difference(student.tokenizer, tokenizer)
    opening.check(reason)  # before there is a folder
    if computes is not None:
        origin = LiveOrigin(computes, config.name) if isinstance(computes, LanguageModel) else computes
        if reason is not None:
            piece = opening.reader(tokenizer, origin.positions).piece
        writer = CacheWriter(origin, config.store, folder, data=opening.data)
    cache, skip = Cache(folder), config.on_missing == "skip"
    documents = CacheReader(
        cache, skip_missing=skip, writer=writer, data=opening.data, piece=piece, own_ids=reason is None
    )
    if reason is None:
        width = check_cache(cache, student, opening.data, where)
        view: TokenizerView = SameTokenizerView(logprobs_only=opening.loss.policy_gradient)
    else:
        check_pieces(cache, opening.data, where)
        view, width = cross_tokenizer_view(
            student, tokenizer, cache.form.vocabulary, config.cross_tokenizer, opening.temperature
        )
    return Opened(opening.teacher(StoredSignal(documents, width, opening.temperature), view), computes, reason)


def _cached_tokenizer(folder: Path, where: str) -> Any:
    check_beside(folder, read_manifest(folder))
    return load_tokenizer(str(tokenizer_of(folder)), where)


# What a teacher's signal can come from, by the name that `TeacherConfig.kind` has for it. docs/extending.md adds one.
SOURCES: dict[str, Callable[[Opening], Opened]] = {"model": open_model, "server": open_served, "cache": open_cached}


def open_teachers(
    configs: Sequence[TeacherConfig], student: LanguageModel, data: DataConfig, loss: LossConfig, device: torch.device
) -> TeacherSet:
    opened, live = [], []
    notes: list[str] = []
    for index, config in enumerate(configs):
        where = f"teachers[{index}]"
        if config.kind not in SOURCES:
            raise PotstillError(f"{where}.source: there is no {config.kind}; there are {', '.join(SOURCES)}")
        one = SOURCES[config.kind](Opening(config, student, data, loss, device, where))
        opened.append(one)
        model = one.origin if isinstance(one.origin, LanguageModel) else None
        notes.extend([] if model is None else model.notes)
        if one.difference is not None:
            notes.append(
                f"{where}: {one.difference}. Texts are aligned by bytes, method {config.cross_tokenizer.method}"
            )
        elif model is not None:
            live.append(live_teacher(model, shared_ids(student, model, where), config.name, config.weight))
    servers = [one.origin if isinstance(one.origin, RemoteOrigin) else None for one in opened]
    identities = [None if server is None else server.identity.weights for server in servers]
    return TeacherSet([one.teacher for one in opened], live, notes, identities, opened[0].origin if opened else None)


def open_live(
    config: TeacherConfig, student: LanguageModel, device: torch.device, where: str, key: str | None = None
) -> Teacher[LiveModel]:
    """`key`: what messages call a teacher that is from no recipe."""
    language_model = load_teacher(config, device, where, key)
    return live_teacher(language_model, shared_ids(student, language_model, where), config.name, config.weight)


def as_teachers_need(data: DataConfig, configs: Sequence[TeacherConfig]) -> DataConfig:
    """`data`, cut into pieces as a cache's texts were, where it does not say itself, and with the columns teachers ask for."""
    columns = dict.fromkeys([*data.columns, *(column for config in configs for column in config.columns)])
    data = data.model_copy(update={"columns": list(columns)})
    caches = [Path(config.cache) for config in configs if config.cache is not None]
    for folder in caches:
        if (folder / MANIFEST).exists():
            data = as_cached(data, read_manifest(folder))
    return data


@dataclass(frozen=True)
class Prepared:
    """A window, and for each of its micro-batches what each teacher made ready."""

    window: StepBatch
    ready: Sequence[Sequence[Any]]


def prepared(
    windows: Iterable[StepBatch],
    teachers: Sequence[AnyTeacher],
    counts: Mapping[str, int] = MappingProxyType({}),
    *,
    workers: int = 1,
) -> Iterator[Prepared]:
    """Step batches with what the teachers can make ready on the host. Documents that a teacher lacks are left out, and steps
    of which nothing is left. `counts`: of what went before. `workers`: windows made ready at once."""
    left = _left(windows, teachers, counts)
    ahead = max((teacher.ahead for teacher in teachers), default=1)
    if workers == 1 and ahead == 1:
        yield from (_ready(window, teachers) for window in left)
        return
    if workers == 1:  # all that a window asks of servers is under way at once
        with ThreadPoolExecutor(ahead, "prepare") as pool:
            yield from (_ready(window, teachers, pool) for window in left)
        return
    with ThreadPoolExecutor(workers, "prepare") as pool:
        waiting: deque[Future[Prepared]] = deque()
        try:
            for window in left:
                waiting.append(pool.submit(_ready, window, teachers))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _ready(window: StepBatch, teachers: Sequence[AnyTeacher], pool: ThreadPoolExecutor | None = None) -> Prepared:
    if pool is None:
        return Prepared(window, [[teacher.prepare(batch) for teacher in teachers] for batch in window.batches])
    begun = [[pool.submit(teacher.prepare, batch) for teacher in teachers] for batch in window.batches]
    try:
        return Prepared(window, [[future.result() for future in some] for some in begun])
    finally:
        for future in (one for some in begun for one in some):
            future.cancel()


def _left(
    windows: Iterable[StepBatch], teachers: Sequence[AnyTeacher], counts: Mapping[str, int]
) -> Iterator[StepBatch]:
    """The windows without what teachers lack."""
    skipped, unused = counts.get(SKIPPED, 0), 0
    barren: int | None = None  # the epoch since which nothing was left
    for window in windows:
        batches = []
        for batch in window.batches:
            left_out = _lacking(batch, teachers)
            skipped += len(left_out)
            batches.append(without(batch, left_out) if left_out else batch)
            unused += batch.supervised_tokens - batches[-1].supervised_tokens
        if not any(batch.supervised_tokens for batch in batches):
            barren = window.epoch if barren is None else barren
            if window.epoch > barren + 1:  # it would go on like that for ever
                raise PotstillError(NOTHING_LEFT)
            continue
        barren = None
        yield _counted(window, batches, skipped, unused)


def check_there(windows: Callable[[], Iterable[StepBatch]], teachers: Sequence[AnyTeacher], steps: int) -> None:
    """Before a run: that a cache with no model beside it has what the run reads first. What is missing further on is told when
    it is read ahead: to look everything up would be to read the data twice."""
    fixed = [teacher for teacher in teachers if teacher.fixed]
    looked_up = 0
    for window in islice(windows(), steps) if fixed else ():
        examples = [example for batch in window.batches for example in batch.examples]
        for teacher in fixed:
            teacher.check_there(examples)
        looked_up += len(examples)
        if looked_up >= LOOKED_UP or window.epoch:
            return


def count_left(windows: Iterable[StepBatch], teachers: Sequence[AnyTeacher], progress: Callable[[int], None]) -> int:
    """How many windows `prepared` gives."""
    total = 0
    for window in windows:
        total += any(len(_lacking(batch, teachers)) < len(batch.examples) for batch in window.batches)
        progress(total)
    if not total:
        raise PotstillError(NOTHING_LEFT)
    return total


def _lacking(batch: Batch, teachers: Sequence[AnyTeacher]) -> list[int]:
    return sorted({i for teacher in teachers for i in teacher.missing(batch)})


def _counted(window: StepBatch, batches: Sequence[Batch], skipped: int, unused: int) -> StepBatch:
    """The window with what is left of it, and counts of what was left out."""
    if not skipped:
        return window
    counts = {**window.counts, SKIPPED: skipped}
    counts["supervised_tokens"] -= unused
    return replace(window, batches=tuple(batches), counts=counts, state={**window.state, "counts": counts})
