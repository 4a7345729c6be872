"""The teachers of a recipe, opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from potstill.cache.build import CacheWriter
from potstill.cache.manifest import read_manifest, tokenizer_of
from potstill.cache.origin import TeacherBackend
from potstill.cache.reader import CacheReader
from potstill.cache.reading import as_cached, weights_fingerprint
from potstill.cache.store import Cache, check_beside
from potstill.cache.together import origin_of
from potstill.config import DataConfig, LossConfig, TeacherConfig
from potstill.config.compatibility import Combination, check
from potstill.config.registry import TEACHER_SOURCES, load
from potstill.config.sections import fixed_value
from potstill.files import MANIFEST
from potstill.models import LanguageModel, difference, load_tokenizer, same_tokenizer, shared_ids
from potstill.models.placed import load_elsewhere
from potstill.parallel.channel import Asker
from potstill.parallel.mesh import ranks
from potstill.parallel.team import Team, sharing_rows
from potstill.students.average import MovingAverage
from potstill.teachers.cross_tokenizer import cross_tokenizer_view
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.placed import load_in_place, no_fingerprint
from potstill.teachers.protocols import SignalSource, TokenizerView
from potstill.teachers.reading import TeacherReader, reader_of
from potstill.teachers.remote import RemoteOrigin, ServedSignal, StudentTopK, open_server, server_form
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import CachedSignal, check_cache, check_pieces
from potstill.teachers.teacher import Teacher
from potstill.types import Example, PotstillError


@dataclass(frozen=True)
class TeacherSet:
    """The teachers of a run, and the models among them."""

    teachers: Sequence[Teacher[SignalSource]]
    live: Sequence[Teacher[LiveModel]]  # those in the process with the student's tokenizer, to evaluate against
    notes: Sequence[str] = ()  # what their user should know
    identities: list[str | None] = field(default_factory=list)  # fingerprints of those behind servers
    writer: LanguageModel | RemoteOrigin | None = None  # the first of them, where it can be asked to write
    other_tokenizer: bool = False  # one of them has another than the student
    averages: Sequence[MovingAverage] = ()  # of the student's weights


@dataclass(frozen=True)
class Opening:
    """A teacher of a recipe that is to be opened, and the run that it is for."""

    config: TeacherConfig
    student: LanguageModel
    data: DataConfig
    loss: LossConfig
    device: torch.device
    where: str  # what messages call it
    asker: Asker | None = None  # of a teacher with ranks of its own

    @property
    def temperature(self) -> float:
        """At which its signal is read; one that moves over the run goes with hidden states, which serve all."""
        return fixed_value(self.loss.temperature) or 1.0

    def check(self, difference: str | None, origin: LanguageModel | RemoteOrigin | None = None) -> None:
        """That the recipe's combination can be, with what the recipe does not tell. `difference`: of the tokenizers."""
        found = replace(Combination.of(self.config, self.loss), tokenizer="same" if difference is None else "other")
        if isinstance(origin, RemoteOrigin):
            found = replace(found, server=origin.server.api)
        found = replace(found, ranks=ranks().world)
        if found.alone:
            manifest = read_manifest(Path(self.config.cache or ""))
            form = manifest.form
            found = found.stored(form.kind, form.temperatures, manifest.imported is not None)
        check(found, self.where)

    def teacher(self, source: SignalSource, view: TokenizerView, team: Team | None = None) -> Teacher[SignalSource]:
        """`team`: those of which one asks."""
        return Teacher(source, view, self.config.name, self.config.weight, self.config.filter, team)

    def model(self) -> LanguageModel:
        """Loaded, or asked for what it is."""
        config, here, cached = self.config, ranks(), self.config.cache is not None
        team = sharing_rows(here)
        if config.ranks and (self.asker is not None or not team.leads):
            return load_elsewhere(config, self.asker, team, self.device, self.where)
        if config.ranks:
            raise PotstillError(
                f"{self.where}.ranks: {config.ranks} ranks of its own are {config.ranks} processes more than the student's: "
                "start them with torchrun, or leave ranks out"
            )
        rows = None
        if here.tp.size > 1 and not cached and not config.own_prompt:
            tokenizer = load_tokenizer(config.name, f"{self.where}.model", config.revision, config.trust_remote_code)
            if difference(self.student.tokenizer, tokenizer) is None:
                rows = self.student.model.get_output_embeddings().weight.shape[0]
        fingerprint = weights_fingerprint if cached else no_fingerprint
        return load_in_place(config, self.device, self.where, here, head_rows=rows, fingerprint=fingerprint)

    def cross_view(self, tokenizer: Any, vocabulary: int) -> tuple[TokenizerView, int]:
        cross_tokenizer = self.config.cross_tokenizer
        return cross_tokenizer_view(self.student, tokenizer, vocabulary, cross_tokenizer, self.temperature)

    def reader(self, tokenizer: Any, positions: int | None) -> TeacherReader:
        return reader_of(self.config, tokenizer, positions, self.data)


@dataclass(frozen=True)
class Opened:
    """What opening a teacher gives; a source of your own needs `teacher` alone."""

    teacher: Teacher[SignalSource]
    origin: LanguageModel | RemoteOrigin | None = None  # what computes its signal
    difference: str | None = None  # of its tokenizer from the student's
    average: MovingAverage | None = None  # what is to be told of every step, where it is made of the student's weights


def open_model(opening: Opening) -> Opened:
    return open_loaded(opening, opening.model())


def open_loaded(opening: Opening, model: LanguageModel) -> Opened:
    config, student = opening.config, opening.student
    reason = difference(student.tokenizer, model.tokenizer)
    opening.check(reason)
    if reason is None and not config.own_prompt:
        source = LiveModel(model, shared_ids(student, model, opening.where))
        return Opened(opening.teacher(source, SameTokenizerView()), model)
    view, width = opening.cross_view(model.tokenizer, model.vocabulary)
    source = LiveModel(model, width, opening.reader(model.tokenizer, model.positions))
    return Opened(opening.teacher(source, view), model, reason)


def open_served(opening: Opening, origin: RemoteOrigin | None = None) -> Opened:
    """`origin`: the server, where it is open already."""
    config, student, temperature = opening.config, opening.student, opening.temperature
    origin = origin or open_server(config, opening.where)
    reason = difference(student.tokenizer, origin.tokenizer)
    opening.check(reason, origin)
    if reason is not None or config.own_prompt:
        form = server_form(config, origin, origin.server.vocabulary, 1.0)
        across, width = opening.cross_view(origin.tokenizer, form.vocabulary)
        reader = opening.reader(origin.tokenizer, origin.positions)
        source: SignalSource = ServedSignal(origin, form, width, temperature, reader)
        return Opened(opening.teacher(source, across, sharing_rows(ranks())), origin, reason)
    if origin.positions is not None and opening.data.max_length > origin.positions:
        raise PotstillError(
            f"data.max_length is {opening.data.max_length} and the teacher at {config.server} reads {origin.positions} "
            f"tokens: set data.max_length to {origin.positions} or less"
        )
    width = same_tokenizer(student.tokenizer, origin.tokenizer, opening.where)
    width = min(width, student.vocabulary, origin.server.vocabulary)
    form = server_form(config, origin, width, temperature)
    of_student = config.remote.kind == "student_top_k"
    source = StudentTopK(origin, student, form) if of_student else ServedSignal(origin, form, width, temperature)
    view = SameTokenizerView(logprobs_only=opening.loss.policy_gradient)
    return Opened(opening.teacher(source, view, None if of_student else sharing_rows(ranks())), origin)


def open_cached(opening: Opening) -> Opened:
    """A cache, alone or in front of a model or a server that computes what it lacks."""
    config, student, where = opening.config, opening.student, f"{opening.where}.cache"
    folder, team = Path(config.cache or ""), sharing_rows(ranks())
    as_read: Callable[[Example], Example] | None = None
    computes: LanguageModel | RemoteOrigin | None = None
    origin: TeacherBackend | None = None
    if config.model is not None:
        computes = opening.model()
    elif config.server is not None:
        computes = open_server(config, opening.where)
    tokenizer = cached_tokenizer(folder, where) if computes is None else computes.tokenizer
    reason = difference(student.tokenizer, tokenizer)
    opening.check(reason, computes)  # before there is a folder
    if computes is not None:
        origin = origin_of(computes, config.name) if isinstance(computes, LanguageModel) else computes
        if reason is not None:
            as_read = opening.reader(tokenizer, origin.positions).as_read
    writer = _opened_writer(opening, origin, folder, team)
    cache, skip = Cache(folder), config.on_missing == "skip"
    reader = CacheReader(cache, skip_missing=skip, writer=writer, data=opening.data, as_read=as_read)
    if reason is None:
        width = check_cache(cache, student, opening.data, where)
        view: TokenizerView = SameTokenizerView(logprobs_only=opening.loss.policy_gradient)
    else:
        check_pieces(cache, opening.data, where)
        view, width = opening.cross_view(tokenizer, cache.form.vocabulary)
    source = CachedSignal(reader, width, opening.temperature, origin)
    return Opened(opening.teacher(source, view, team), computes, reason)


def _opened_writer(opening: Opening, origin: TeacherBackend | None, folder: Path, team: Team) -> CacheWriter | None:
    """On the rank that asks; before it is there, nobody looks at the folder."""
    found: list[CacheWriter] = []

    def open_one() -> None:
        if origin is not None:
            found.append(CacheWriter(origin, opening.config.store, folder, data=opening.data))

    team.of_first(open_one)
    return found[0] if found else None


def teacher_tokenizer(config: TeacherConfig, where: str, student: Any) -> Any:
    """A teacher's tokenizer, without its weights; the student's, where it reads the student's tokens whatever they are."""
    if config.model is not None:
        return load_tokenizer(config.model, f"{where}.model", config.revision, config.trust_remote_code)
    if config.server is not None:
        origin = open_server(config, where)
        origin.close()
        return origin.tokenizer
    return student if config.cache is None else cached_tokenizer(Path(config.cache), f"{where}.cache")


def cached_tokenizer(folder: Path, where: str) -> Any:
    check_beside(folder, read_manifest(folder))
    return load_tokenizer(str(tokenizer_of(folder)), where)


def open_teachers(
    configs: Sequence[TeacherConfig],
    student: LanguageModel,
    data: DataConfig,
    loss: LossConfig,
    device: torch.device,
    askers: Mapping[int, Asker] | None = None,
) -> TeacherSet:
    """`askers`: of those with ranks of their own, by their place."""
    opened, live = [], []
    notes: list[str] = []
    for index, config in enumerate(configs):
        where = f"teachers[{index}]"
        one = _open(Opening(config, student, data, loss, device, where, (askers or {}).get(index)))
        opened.append(one)
        model = one.origin if isinstance(one.origin, LanguageModel) else None
        notes.extend([] if model is None else model.notes)
        if one.difference is not None:
            notes.append(
                f"{where}: {one.difference}. Texts are aligned by bytes, method {config.cross_tokenizer.method}"
            )
        elif model is not None:
            live.append(live_teacher(model, shared_ids(student, model, where), config.name, config.weight))
    return TeacherSet(
        [one.teacher for one in opened],
        live,
        notes,
        [one.origin.identity.weights if isinstance(one.origin, RemoteOrigin) else None for one in opened],
        opened[0].origin if opened else None,
        any(one.difference is not None for one in opened),
        [one.average for one in opened if one.average is not None],
    )


def _open(opening: Opening) -> Opened:
    kind = opening.config.kind
    if kind not in TEACHER_SOURCES:
        raise PotstillError(f"{opening.where}.source: there is no {kind}; there are {', '.join(TEACHER_SOURCES)}")
    opened: Opened = load(TEACHER_SOURCES[kind])(opening)
    return opened


def open_live(
    config: TeacherConfig, student: LanguageModel, device: torch.device, where: str, key: str | None = None
) -> Teacher[LiveModel]:
    """`key`: what messages call a teacher that is from no recipe."""
    language_model = load_in_place(config, device, where, ranks(), key=key)
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
