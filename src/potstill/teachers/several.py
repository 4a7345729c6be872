"""The teachers of a recipe, opened, and made ready ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from potstill.config import DataConfig, LossConfig, Schedule, TeacherConfig
from potstill.data import Window, without
from potstill.files import MANIFEST
from potstill.models import LanguageModel, difference, load_teacher, shared_ids
from potstill.teachers.aligned import AlignedTeacher, Pairing
from potstill.teachers.build import Scribe, format_of
from potstill.teachers.cached import CachedTeacher, check_cache, check_loss
from potstill.teachers.live import LiveTeacher
from potstill.teachers.reading import as_cached, chat_kwargs
from potstill.teachers.store import Cache, read_manifest
from potstill.types import Batch, PotstillError, Teacher

SKIPPED = "skipped_examples"
NOTHING_LEFT = "data: on_missing is skip, and the cache has none of the documents"


@dataclass(frozen=True)
class Faculty:
    """The teachers of a run, and the models among them."""

    teachers: Sequence[Teacher]
    live: Sequence[LiveTeacher]  # those whose model is in the process, to evaluate against
    notes: Sequence[str] = ()  # what their user should know


def open_live(
    config: TeacherConfig, student: LanguageModel, device: torch.device, where: str, key: str | None = None
) -> LiveTeacher:
    """`key`: what messages call a teacher that is from no recipe."""
    language_model = load_teacher(config, device, where, key)
    return LiveTeacher(language_model, shared_ids(student, language_model, where), config.name, config.weight)


def open_teachers(
    configs: Sequence[TeacherConfig], student: LanguageModel, data: DataConfig, loss: LossConfig, device: torch.device
) -> Faculty:
    teachers: list[Teacher] = []
    live, notes = [], []
    for index, config in enumerate(configs):
        where = f"teachers[{index}]"
        model = None
        if config.model is not None:
            language_model = load_teacher(config, device, where)
            reason = difference(student.tokenizer, language_model.tokenizer)
            if config.cache is None and reason is not None:
                notes.append(f"{where}: {reason}. Texts are aligned by bytes, method {config.across.method}")
                teachers.append(_open_aligned(config, language_model, student, data, loss, where))
                continue
            width = shared_ids(student, language_model, where)
            model = LiveTeacher(language_model, width, config.name, config.weight)
            live.append(model)
        if config.cache is None:
            assert model is not None
            teachers.append(model)
        else:
            teachers.append(_open_cached(config, model, student, data, loss, f"{where}.cache"))
    return Faculty(teachers, live, notes)


def _open_aligned(
    config: TeacherConfig,
    language_model: LanguageModel,
    student: LanguageModel,
    data: DataConfig,
    loss: LossConfig,
    where: str,
) -> AlignedTeacher:
    temperature = fixed_temperature(loss)
    if temperature is None or (config.across.method == "chunk" and temperature != 1.0):
        what = "moves over the run" if temperature is None else f"is {temperature:g}"
        why = (
            "the likelihood of a chunk of tokens is at one temperature"
            if temperature is None
            else "the method chunk compares likelihoods of text, which are at 1"
        )
        raise PotstillError(f"{where}: the teacher has another tokenizer and loss.temperature {what}; {why}")
    pairing = Pairing(student.tokenizer, language_model.tokenizer, config.across)
    kwargs = chat_kwargs(data)
    return AlignedTeacher(language_model, pairing, config.name, config.weight, temperature=temperature, kwargs=kwargs)


def fixed_temperature(loss: LossConfig) -> float | None:
    """The loss's temperature; None when it moves."""
    number = loss.temperature
    if not isinstance(number, Schedule):
        return number
    return number.start if number.shape == "constant" or number.start == number.end else None


def _open_cached(
    config: TeacherConfig,
    model: LiveTeacher | None,
    student: LanguageModel,
    data: DataConfig,
    loss: LossConfig,
    where: str,
) -> CachedTeacher:
    assert config.cache is not None
    folder = Path(config.cache)
    scribe = None
    if model is not None:
        check_loss(format_of(config.store, model.language_model), loss, where)  # before there is a folder
        scribe = Scribe(model.language_model, config.store, folder, name=config.name, data=data)
    cache = Cache(folder)
    width, temperature = check_cache(cache, student, data, loss, where)
    return CachedTeacher(
        cache,
        width,
        config.name,
        config.weight,
        temperature=temperature,
        skip_missing=config.on_missing == "skip",
        scribe=scribe,
        data=data,
    )


def with_pieces_of(data: DataConfig, configs: Sequence[TeacherConfig]) -> DataConfig:
    """`data`, cut into pieces as a cache's texts were, where it does not say itself."""
    caches = [Path(config.cache) for config in configs if config.cache is not None]
    for folder in caches:
        if (folder / MANIFEST).exists():
            data = as_cached(data, read_manifest(folder))
    return data


@dataclass(frozen=True)
class Prepared:
    """A window, and for each of its micro-batches what each teacher made ready."""

    window: Window
    ready: Sequence[Sequence[Any]]


def prepared(
    windows: Iterable[Window], teachers: Sequence[Teacher], counts: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Prepared]:
    """Windows with what the teachers can make ready on the host. Documents that a teacher lacks are left out, and windows of
    which nothing is left. `counts`: of what went before."""
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
        ready = [[teacher.prepare(batch) for teacher in teachers] for batch in batches]
        yield Prepared(_counted(window, batches, skipped, unused), ready)


def count_left(windows: Iterable[Window], teachers: Sequence[Teacher], progress: Callable[[int], None]) -> int:
    """How many windows `prepared` gives."""
    total = 0
    for window in windows:
        total += any(len(_lacking(batch, teachers)) < len(batch.examples) for batch in window.batches)
        progress(total)
    if not total:
        raise PotstillError(NOTHING_LEFT)
    return total


def _lacking(batch: Batch, teachers: Sequence[Teacher]) -> list[int]:
    return sorted({i for teacher in teachers for i in teacher.lacks(batch)})


def _counted(window: Window, batches: Sequence[Batch], skipped: int, unused: int) -> Window:
    """The window with what is left of it, and counts of what was left out."""
    if not skipped:
        return window
    counts = {**window.counts, SKIPPED: skipped}
    counts["supervised_tokens"] -= unused
    return replace(window, batches=tuple(batches), counts=counts, state={**window.state, "counts": counts})
