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
from potstill.cache.manifest import read_manifest, tokenizer_of
from potstill.cache.origin import LiveOrigin, Origin
from potstill.cache.reader import CacheReader
from potstill.cache.reading import as_cached, chat_kwargs, piece_of
from potstill.cache.store import Cache, check_beside
from potstill.config import DataConfig, LossConfig, TeacherConfig
from potstill.data import StepBatch, without
from potstill.files import MANIFEST
from potstill.models import LanguageModel, difference, load_teacher, load_tokenizer, shared_ids
from potstill.teachers.combine import RoutedTeacher
from potstill.teachers.cross_tokenizer import AlignedCached, AlignedTeacher, Rereader, check_cross_tokenizer
from potstill.teachers.live import LiveTeacher
from potstill.teachers.remote import RemoteOrigin, StudentTopK, open_remote, open_server
from potstill.teachers.stored import CachedTeacher, check_cache, check_loss, check_pieces
from potstill.teachers.tokenizer_pair import TokenizerPair
from potstill.types import Batch, PotstillError, Teacher

SKIPPED = "skipped_examples"
LOOKED_UP = 10_000  # documents, before a run begins
NOTHING_LEFT = "data: on_missing is skip, and the cache has none of the documents"


@dataclass(frozen=True)
class TeacherSet:
    """The teachers of a run, and the models among them."""

    teachers: Sequence[Teacher]
    live: Sequence[LiveTeacher]  # those whose model is in the process, to evaluate against
    notes: Sequence[str] = ()  # what their user should know
    identities: list[str | None] = field(default_factory=list)  # fingerprints of those behind servers
    writer: LanguageModel | RemoteOrigin | None = None  # the first of them, where it can be asked to write


def open_live(
    config: TeacherConfig, student: LanguageModel, device: torch.device, where: str, key: str | None = None
) -> LiveTeacher:
    """`key`: what messages call a teacher that is from no recipe."""
    language_model = load_teacher(config, device, where, key)
    return LiveTeacher(language_model, shared_ids(student, language_model, where), config.name, config.weight)


def open_teachers(
    configs: Sequence[TeacherConfig], student: LanguageModel, data: DataConfig, loss: LossConfig, device: torch.device
) -> TeacherSet:
    teachers: list[Teacher] = []
    live, identities = [], []
    notes: list[str] = []
    writer: LanguageModel | RemoteOrigin | None = None
    for index, config in enumerate(configs):
        where = f"teachers[{index}]"
        opening = Opening(config, student, data, loss, where)
        language_model = None if config.model is None else load_teacher(config, device, where)
        server = None if config.server is None else open_server(config, where)
        there = language_model or server
        identities.append(None if server is None else server.identity.weights)
        writer = there if index == 0 else writer
        notes.extend([] if language_model is None else language_model.notes)
        tokenizer = there.tokenizer if there is not None else opening.cached_tokenizer()
        reason = difference(student.tokenizer, tokenizer)
        if reason is not None:
            notes.append(f"{where}: {reason}. Texts are aligned by bytes, method {config.cross_tokenizer.method}")
        if reason is None and language_model is not None:
            model = LiveTeacher(language_model, shared_ids(student, language_model, where), config.name, config.weight)
            live.append(model)
        teacher: Teacher
        if config.cache is not None:
            origin = server if language_model is None else LiveOrigin(language_model, config.name)
            teacher = opening.from_cache(origin, None if reason is None else tokenizer)
        elif server is not None:
            other = reason is not None or config.context_column is not None
            teacher = open_remote(config, server, student, data, loss, where, other=other)
        elif reason is not None or config.context_column is not None:
            assert language_model is not None
            teacher = opening.aligned(language_model)
        else:
            teacher = model
        _check_several(teacher, config, loss, where)
        teachers.append(RoutedTeacher(teacher, config.filter) if config.filter else teacher)
    return TeacherSet(teachers, live, notes, identities, writer)


def _check_several(teacher: Teacher, config: TeacherConfig, loss: LossConfig, where: str) -> None:
    form = teacher.form if isinstance(teacher, CachedTeacher | AlignedCached) else None
    whole = isinstance(teacher, LiveTeacher) or (isinstance(teacher, CachedTeacher) and teacher.form.kind == "hidden")
    if loss.combine_teachers == "average" and (not whole or config.filter):
        raise PotstillError(
            f"{where}: loss.combine_teachers is average, for which a teacher must give whole distributions over the "
            "student's own ids "
            "for every document: a model with the student's tokenizer or a cache of kind hidden, without filter and "
            "context_column"
        )
    if (
        loss.teacher_weighting not in (None, "ce")
        and loss.policy_gradient
        and form is not None
        and form.kind != "hidden"
    ):
        raise PotstillError(
            f"{where}: loss.divergence: policy_gradient_kl reads from the cache only how likely the text's own tokens were, "
            f"which does not tell the teacher's {loss.teacher_weighting}, as loss.teacher_weighting asks: take "
            "teacher_weighting: ce, or kind hidden"
        )
    if (loss.combine_teachers == "best" or loss.teacher_weighting) and isinstance(teacher, StudentTopK):
        raise PotstillError(
            f"{where}.remote.kind: student_top_k does not tell how sure the teacher is, as loss."
            f"{'combine_teachers' if loss.combine_teachers == 'best' else 'teacher_weighting'} asks: use top_k or hidden"
        )
    if (loss.combine_teachers == "best" or loss.teacher_weighting) and form is not None and form.kind == "sampled":
        raise PotstillError(
            f"{where}: the cache holds draws, which do not tell how sure the teacher is, as loss."
            f"{'combine_teachers' if loss.combine_teachers == 'best' else 'teacher_weighting'} asks: build one of kind "
            "top_k or hidden"
        )


@dataclass(frozen=True)
class Opening:
    """A teacher of a recipe that is not simply a model with the student's tokenizer."""

    config: TeacherConfig
    student: LanguageModel
    data: DataConfig
    loss: LossConfig
    where: str

    def cached_tokenizer(self) -> Any:
        folder = Path(self.config.cache or "")
        check_beside(folder, read_manifest(folder))
        return load_tokenizer(str(tokenizer_of(folder)), f"{self.where}.cache")

    def aligned(self, language_model: LanguageModel) -> AlignedTeacher:
        config = self.config
        return AlignedTeacher(
            language_model,
            TokenizerPair(
                self.student.tokenizer,
                language_model.tokenizer,
                config.cross_tokenizer,
                (self.student.vocabulary, language_model.vocabulary),
            ),
            config.name,
            config.weight,
            temperature=check_cross_tokenizer(config.cross_tokenizer, self.loss, self.where),
            kwargs=chat_kwargs(self.data),
            prompt=config.context_column,
        )

    def from_cache(self, origin: Origin | None, other: Any | None) -> CachedTeacher | AlignedCached:
        """`origin`: of what the cache lacks. `other`: the teacher's tokenizer, where it is not the student's."""
        config, where = self.config, f"{self.where}.cache"
        assert config.cache is not None
        folder, writer, piece = Path(config.cache), None, piece_of
        if origin is not None:
            form = origin.format(config.store)  # checked before there is a folder
            if other is None:
                check_loss(form, self.loss, where)
            else:
                check_cross_tokenizer(config.cross_tokenizer, self.loss, where, form)
                piece = Rereader(other, origin.positions, chat_kwargs(self.data)).piece
            writer = CacheWriter(origin, config.store, folder, data=self.data)
        cache = Cache(folder)
        skip = config.on_missing == "skip"
        source = CacheReader(
            cache, skip_missing=skip, writer=writer, data=self.data, piece=piece, own_ids=other is None
        )
        if other is None:
            width, temperature = check_cache(cache, self.student, self.data, self.loss, where)
            only = self.loss.policy_gradient
            return CachedTeacher(source, width, config.name, config.weight, temperature=temperature, chosen_only=only)
        check_pieces(cache, self.data, where)
        if "imported" in cache.manifest and config.cross_tokenizer.method in (
            "common_vocab",
            "projection",
            "span_likelihood",
        ):
            raise PotstillError(
                f"{where}: the cache was imported, and does not know how likely the text's own tokens were where they "
                "are not "
                f"among the entries, which cross_tokenizer.method {config.cross_tokenizer.method} needs: take "
                "prefix_marginal or uld"
            )
        temperature = check_cross_tokenizer(config.cross_tokenizer, self.loss, where, cache.form)
        sizes = (self.student.vocabulary, cache.form.vocabulary)
        pairing = TokenizerPair(self.student.tokenizer, other, config.cross_tokenizer, sizes)
        return AlignedCached(source, pairing, config.name, config.weight, temperature=temperature)


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
    teachers: Sequence[Teacher],
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


def _ready(window: StepBatch, teachers: Sequence[Teacher], pool: ThreadPoolExecutor | None = None) -> Prepared:
    if pool is None:
        return Prepared(window, [[teacher.prepare(batch) for teacher in teachers] for batch in window.batches])
    begun = [[pool.submit(teacher.prepare, batch) for teacher in teachers] for batch in window.batches]
    try:
        return Prepared(window, [[future.result() for future in some] for some in begun])
    finally:
        for future in (one for some in begun for one in some):
            future.cancel()


def _left(windows: Iterable[StepBatch], teachers: Sequence[Teacher], counts: Mapping[str, int]) -> Iterator[StepBatch]:
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


def check_there(windows: Callable[[], Iterable[StepBatch]], teachers: Sequence[Teacher], steps: int) -> None:
    """Before a run: that a cache with no model beside it has what the run reads first. What is missing further on is told when
    it is read ahead: to look everything up would be to read the data twice."""
    asked = [(t.teacher, t.wants) if isinstance(t, RoutedTeacher) else (t, lambda _: True) for t in teachers]
    shelves = [(t.source, wants) for t, wants in asked if isinstance(t, CachedTeacher | AlignedCached)]
    caches = [(source, wants) for source, wants in shelves if isinstance(source, CacheReader) and source.fixed]
    looked_up = 0
    for window in islice(windows(), steps) if caches else ():
        examples = [example for batch in window.batches for example in batch.examples]
        for source, wants in caches:
            source.check_there([example for example in examples if wants(example)])
        looked_up += len(examples)
        if looked_up >= LOOKED_UP or window.epoch:
            return


def count_left(windows: Iterable[StepBatch], teachers: Sequence[Teacher], progress: Callable[[int], None]) -> int:
    """How many windows `prepared` gives."""
    total = 0
    for window in windows:
        total += any(len(_lacking(batch, teachers)) < len(batch.examples) for batch in window.batches)
        progress(total)
    if not total:
        raise PotstillError(NOTHING_LEFT)
    return total


def _lacking(batch: Batch, teachers: Sequence[Teacher]) -> list[int]:
    return sorted({i for teacher in teachers for i in teacher.missing(batch)})


def _counted(window: StepBatch, batches: Sequence[Batch], skipped: int, unused: int) -> StepBatch:
    """The window with what is left of it, and counts of what was left out."""
    if not skipped:
        return window
    counts = {**window.counts, SKIPPED: skipped}
    counts["supervised_tokens"] -= unused
    return replace(window, batches=tuple(batches), counts=counts, state={**window.state, "counts": counts})
