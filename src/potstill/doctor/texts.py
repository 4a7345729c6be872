"""The data: whether it can be read, how much of it max_length would lose, and how much of it a cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from potstill.cache.reading import as_cached, chat_kwargs, examples_of, template_fingerprint
from potstill.cache.store import Cache
from potstill.config import TeacherConfig
from potstill.data import check_lengths
from potstill.doctor.findings import Finding, Patient, error, ok, warning
from potstill.files import MANIFEST
from potstill.teachers.open import cached_tokenizer
from potstill.types import PotstillError

LOOKED_UP = 2000  # documents of the data that are looked up in a cache


def lengths(patient: Patient) -> Iterator[Finding]:
    if not patient.recipe.rollouts.data_share:
        yield ok("only the prompts of data.sources are read")
        return
    try:
        notes = check_lengths(patient.data, patient.tokenizer)
    except PotstillError as refused:
        yield error(str(refused), "raise data.max_length")
        return
    for note in notes:
        yield warning(note, "raise data.max_length, or leave such records out")
    if not notes:
        yield ok(f"nearly all sampled examples fit data.max_length {patient.data.max_length:,}")


def caches(patient: Patient) -> Iterator[Finding]:
    for index, config in enumerate(patient.recipe.teachers):
        if config.cache is None:
            continue
        where, folder = f"teachers[{index}].cache", Path(config.cache)
        if not (folder / MANIFEST).exists():
            if config.model is None and config.server is None:
                yield error(f"{where}: there is no cache in {folder}", "build it: potstill cache build RECIPE")
            else:
                yield ok(f"{where}: {folder} is filled as the run goes on")
            continue
        cache = Cache(folder)
        if (other := _other_rendering(patient, cache, where)) is not None:
            yield other
        else:
            yield _coverage(patient, config, cache, where)


def _other_rendering(patient: Patient, cache: Cache, where: str) -> Finding | None:
    """Keys are of conversations before their template, so that a cache of another one would be found there."""
    if not patient.chats:
        return None
    chat, tokenizer = cache.manifest.chat, cached_tokenizer(cache.folder, where)
    same = template_fingerprint(patient.tokenizer) == chat.template or len(tokenizer) != len(patient.tokenizer)
    if same and chat_kwargs(patient.recipe.data) == chat.arguments:
        return None
    return error(
        f"{where}: its conversations were rendered with another chat template, or other chat_template_kwargs, than the data's",
        "take the teacher's tokenizer for the student (student.tokenizer), or build the cache anew",
    )


def _coverage(patient: Patient, config: TeacherConfig, cache: Cache, where: str) -> Finding:
    tokenizer = cached_tokenizer(cache.folder, where)
    data = as_cached(patient.recipe.data, cache.manifest)
    examples = list(islice(examples_of(data, tokenizer), LOOKED_UP))
    there = int((cache.find([example.key for example in examples]) >= 0).sum())
    share = there / max(1, len(examples))
    said = f"{where} has {there:,} of the first {len(examples):,} documents of data.sources ({share:.0%})"
    if share == 1:
        return ok(said)
    if config.model is not None or config.server is not None:
        return ok(f"{said}; the others are computed and added")
    if share == 0:
        pieces = f"cut into pieces of {cache.manifest.piece_bytes:,} bytes"
        return error(f"{said}: it is of other data, or of data that was {pieces}", "build a cache of this data")
    build = "add the others with potstill cache build RECIPE"
    if config.on_missing == "skip":
        return warning(f"{said}; the others are left out (on_missing: skip)", build)
    return error(f"{said}: it is half built, or of other data", f"{build}, or leave them out (on_missing: skip)")
