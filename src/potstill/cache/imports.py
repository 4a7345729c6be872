"""Other people's files as a cache: MaxText-style array_record files, and parquet with lists of top-k entries.

They hold tokens and no text, and a cache is keyed by text. So the tokens are decoded, and a document is taken only where its
text gives the same tokens again. L tokens of a record, M entries of top-k, K values of each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from potstill.cache.codec import STEPS_PER_NAT
from potstill.cache.document import to_bytes
from potstill.cache.foreign import Record, maxtext_records, parquet_records
from potstill.cache.kinds import LARGEST_VOCABULARY, TopK, wrong_ids
from potstill.cache.manifest import IMPORTED, signal_keys
from potstill.cache.reading import TeacherText, template_fingerprint, tokenizer_fingerprint
from potstill.cache.store import SHARD_BYTES, Cache, Writer, begun_cache, create
from potstill.data.examples import text_key
from potstill.files import could_not_write, new_file
from potstill.models import load_tokenizer
from potstill.types import Example, PotstillError

Layout = Literal["maxtext", "parquet"]
Values = Literal["auto", "logits", "logprobs"]
READERS: Mapping[str, Callable[[Path, Mapping[str, str]], Iterator[Record]]] = {
    "maxtext": maxtext_records,
    "parquet": parquet_records,
}
COLUMNS = {
    "maxtext": {"tokens": "inputs", "ids": "top_k_indices", "values": "top_k_logits"},
    "parquet": {"tokens": "input_ids", "ids": "top_k_indices", "values": "top_k_logprobs"},
}
ROLES = ("tokens", "ids", "values", "normaliser", "text")

NOT_CUT = 2**30  # bytes of text: an imported document is one piece, however long
LAST_TOKENS = 4  # a text that was cut inside a word may give its last tokens in another way: so many may be left off
ABOVE_ONE = 0.02  # that probabilities may sum to beyond 1, by the rounding of a short float
UNKNOWN = -(2**16 - 1) / STEPS_PER_NAT  # log-probability of a token that is not among the entries
REASONS = {
    "text": "whose text does not give the same tokens again",
    "entries": "with fewer entries than k at some token",
    "twice": "that are there twice",
    "empty": "with nothing to predict in them",
}


@dataclass(frozen=True)
class Imported:
    documents: int  # added
    tokens: int
    there: int  # documents that were in the cache already
    left_out: Mapping[str, int]  # by reason: see REASONS
    shortened: int  # documents that lost up to LAST_TOKENS tokens at their end
    without_end: int  # documents with no entries for what follows their last token: train with append_eos: false
    rest: bool  # whether the mass of what is not among the entries is known


def import_cache(
    files: Sequence[Path],
    out: Path,
    *,
    layout: Layout,
    tokenizer: str,
    teacher_name: str,
    texts: Path | None = None,
    columns: Mapping[str, str] | None = None,
    k: int | None = None,
    values: Values = "auto",
    temperatures: Sequence[float] = (1.0,),
    predicts: Literal["next", "this"] = "next",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """Write a cache of kind top_k from files of another system, and to `texts` the texts to train on.

    `columns`: what tokens, ids, values (and, where there are such, normaliser: the log of the sum of all exponentials; text)
    are called. `predicts`: whether the entries at a token are for the token that follows it, or for itself.
    """
    named = {**COLUMNS[layout], **(columns or {})}
    unknown = sorted(set(named) - set(ROLES))
    if unknown:
        raise PotstillError(f"--column {unknown[0]}=…: there is no such column; there are {', '.join(ROLES)}")
    if texts is None and "text" not in named:
        raise PotstillError("--texts: say where the texts go that the tokens stand for; a student is trained on them")
    if not files:
        raise PotstillError("name at least one file to import")
    words = _Words(load_tokenizer(tokenizer, "--tokenizer"))
    first = next(READERS[layout](files[0], named), None)
    if values == "auto" and layout == "maxtext" and "normaliser" not in named:
        values = "logits"  # its script keeps what the head gives
    kind = _Kind.of(first, files[0], len(words.tokenizer), values, k, temperatures)
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    with closing(_start(out, words, kind, layout, teacher_name)) as writer, _lines(texts) as write_line:
        there = Cache(out)
        for number, file in enumerate(files):
            progress(number, len(files))
            for record in READERS[layout](file, named):
                for document in words.documents(record, predicts, counts):
                    if document.key in seen:
                        counts["twice"] += 1
                        continue
                    seen.add(document.key)
                    data = kind.bytes_of(document)
                    if data is None:
                        counts["entries"] += 1
                        continue
                    write_line(document.text)
                    if there.find([document.key])[0] >= 0:
                        counts["there"] += 1
                        continue
                    writer.add(document.key, len(document.example.ids), data)
                    counts["documents"] += 1
                    counts["tokens"] += len(document.example.ids)
                    if writer.size >= SHARD_BYTES:
                        writer.flush()
        writer.flush()
    return Imported(
        counts["documents"],
        counts["tokens"],
        counts["there"],
        {reason: counts[reason] for reason in REASONS if counts[reason]},
        counts["shortened"],
        counts["without_end"],
        kind.rest,
    )


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Texts to a jsonl file, which appears when it is whole."""
    if path is None:
        yield lambda text: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise could_not_write(path, error) from error
    with new_file(path) as file:

        def write(text: str) -> None:
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")

        yield write


def _start(out: Path, words: _Words, kind: _Kind, layout: str, teacher_name: str) -> Writer:
    identity = {
        "kind": "top_k",
        "signal": signal_keys(kind.form),
        "teacher": {"model": teacher_name, "weights": IMPORTED, "dtype": "unknown"},
        "tokenizer": tokenizer_fingerprint(words.tokenizer),
        "chat": {"template": template_fingerprint(words.tokenizer), "kwargs": {}},
        "piece_bytes": NOT_CUT,
        "imported": {"layout": layout, "values": kind.values, "rest": kind.rest_known},
    }
    there = begun_cache(out)
    if there is not None and ("imported" not in there or there["teacher"]["model"] != teacher_name):
        raise PotstillError(
            f"{out} is a cache of {there['teacher']['model']}, and what is imported is of {teacher_name}: choose another "
            "folder (--out)"
        )
    return create(out, identity, lambda folder: words.tokenizer.save_pretrained(folder / "tokenizer"))


@dataclass(frozen=True)
class _Found:
    """A document of a record: its text and tokens as potstill reads them, and the entries for each token to predict."""

    key: str
    text: str
    example: Example
    ids: npt.NDArray[np.int64]  # [R, K]
    values: npt.NDArray[np.float64]  # [R, K], −inf where there is no entry


class _Words:
    """Tokens to texts, and back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if len(tokenizer) > LARGEST_VOCABULARY:
            raise PotstillError(f"a cache holds vocabularies of up to {LARGEST_VOCABULARY:,} ids")
        self._encode = TeacherText(tokenizer, None)
        encoding = tokenizer.backend_tokenizer.encode("a")
        before = encoding.special_tokens_mask.index(0)
        self._before = encoding.ids[:before]  # what the tokenizer itself puts before a text

    def documents(self, record: Record, predicts: str, counts: Counter[str]) -> Iterator[_Found]:
        # Also where no text comes back; those below 0 may be padding.
        if wrong := wrong_ids(np.maximum(record.ids, 0).reshape(-1, 1), len(self.tokenizer)):
            raise self._other_tokenizer(record, wrong)
        for begin, end in _segments(record):
            tokens = record.tokens[begin:end]
            if record.segments is None:
                tokens = self._without_padding(tokens)
            if wrong := wrong_ids(tokens[:, None], len(self.tokenizer)):
                raise self._other_tokenizer(record, wrong)
            found = self._read(tokens, record, counts)
            if found is None:
                continue
            text, example = found
            # The entries for a token stand at the token before it, or at itself.
            rows = np.flatnonzero(example.supervised) + begin - (predicts == "next")
            bound = min(len(record.ids), end)
            if rows[-1] >= bound and len(example.ids) > len(tokens):
                counts["without_end"] += 1
                example, rows = _without_last(example), rows[:-1]
            if not len(rows) or rows[-1] >= bound:
                counts["entries" if len(rows) else "empty"] += 1
                continue
            self._check_entries(record, rows)
            yield _Found(text_key(text), text, example, record.ids[rows], record.values[rows])

    def _check_entries(self, record: Record, rows: npt.NDArray[np.int64]) -> None:
        ids, values = record.ids[rows], record.values[rows]
        there = np.isfinite(values)
        if (~there & ~np.isneginf(values)).any():
            raise PotstillError(
                f"{record.source} has {values[~there & ~np.isneginf(values)][0]} among its values, where numbers were "
                "expected"
            )
        if wrong := wrong_ids(ids, len(self.tokenizer), there):
            raise self._other_tokenizer(record, wrong)

    def _other_tokenizer(self, record: Record, what: str) -> PotstillError:
        return PotstillError(
            f"{record.source} has {what}: name the tokenizer of the teacher (--tokenizer {self.tokenizer.name_or_path} was "
            "read), and the right columns (--column)"
        )

    def _without_padding(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        length = len(tokens)
        while length and tokens[length - 1] == pad and (pad != eos or tokens[length - 2 : length - 1] == pad):
            length -= 1
        return tokens[:length]

    def _read(self, tokens: npt.NDArray[np.int64], record: Record, counts: Counter[str]) -> tuple[str, Example] | None:
        """The text of some tokens and the tokens of that text, which are the same, but for an eos."""
        if record.text is not None:
            example = self._same(record.text, tokens, record.source)
            counts["text"] += example is None
            return None if example is None else (record.text, example)
        ended = len(tokens) > 0 and int(tokens[-1]) == self.tokenizer.eos_token_id
        begun = len(self._before) if tokens[: len(self._before)].tolist() == self._before else 0
        for fewer in range(1 if ended else 1 + LAST_TOKENS):
            some = tokens[: len(tokens) - fewer]
            inner = some[begun : len(some) - ended].tolist()
            if not inner:
                break
            text = self.tokenizer.decode(inner, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            example = self._same(text, some, record.source)
            if example is not None:
                counts["shortened"] += fewer > 0
                return text, example
        counts["text" if len(tokens) > begun + ended else "empty"] += 1
        return None

    def _same(self, text: str, tokens: npt.NDArray[np.int64], source: str) -> Example | None:
        """What potstill reads in a text, where it is these tokens, or they and an eos."""
        if not text:
            return None
        (example,) = self._encode([Example(text_key(text), text, source=source)])
        if example is None or not len(example.ids) - 1 <= len(tokens) <= len(example.ids):
            return None
        return example if np.array_equal(example.ids[: len(tokens)], tokens) else None


def _segments(record: Record) -> Iterator[tuple[int, int]]:
    """Where the documents of a record begin and end; 0 is padding."""
    if record.segments is None:
        yield 0, len(record.tokens)
        return
    edges = np.flatnonzero(np.diff(record.segments)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(record.segments)], strict=True):
        if end > begin and record.segments[begin]:
            yield begin, end


def _without_last(example: Example) -> Example:
    assert example.ends is not None
    return replace(example, ids=example.ids[:-1], supervised=example.supervised[:-1], ends=example.ends[:-1])


@dataclass(frozen=True)
class _Kind:
    """What the values are, and what is made of them."""

    values: str  # logits, without their normaliser; or logprobs
    form: TopK
    more: bool = False  # the files have more entries than are kept

    @property
    def rest(self) -> bool:
        return self.values == "logprobs"

    @property
    def rest_known(self) -> str:
        """What is known of the mass beyond the k entries: all; that of the files' other entries; nothing."""
        return "known" if self.rest else "partial" if self.more else "none"

    @staticmethod
    def of(
        first: Record | None,
        file: Path,
        vocabulary: int,
        values: Values,
        k: int | None,
        temperatures: Sequence[float],
    ) -> _Kind:
        if first is None or not first.ids.size:
            raise PotstillError(f"{file} holds no entries")
        there = np.isfinite(first.values).sum(-1)
        least = int(there[there > 0].min(initial=first.ids.shape[1]))
        if k is not None and not 1 <= k <= least:
            raise PotstillError(f"--k {k}: {file} has {least} entries a token; choose from 1 to that")
        if (k or least) > vocabulary:
            raise PotstillError(
                f"{file} has {least} entries a token, and the tokenizer has {vocabulary} ids: see --column"
            )
        found = (
            "logprobs" if first.normalised else _guessed(first.values[there > 0], file) if values == "auto" else values
        )
        form = TopK(vocabulary, k=k or least, temperatures=tuple(sorted(set(temperatures))))
        if found == "logprobs" and form.temperatures != (1.0,):
            raise PotstillError(
                f"--temperature: {file} has probabilities at temperature 1, and the mass of the rest is known there only"
            )
        return _Kind(found, form, first.ids.shape[1] > form.k)

    def bytes_of(self, document: _Found) -> bytes | None:
        """The document as the cache holds it; None where it has too few entries."""
        values, k = document.values, self.form.k
        if (np.isfinite(values).sum(-1) < k).any():
            return None
        if self.rest and _mass(values).max() > 1 + ABOVE_ONE:
            raise PotstillError(
                f"{document.example.source}: the probabilities at a token sum to {_mass(values).max():.3g}, so these are not "
                "log-probabilities: --values logits takes them as they are"
            )
        order = np.argsort(-values, axis=-1, kind="stable")
        values = np.take_along_axis(values, order, -1)
        ids = np.take_along_axis(document.ids, order, -1)
        labels = document.example.ids[document.example.supervised]
        chosen = np.where(ids == labels[:, None], values, -np.inf).max(-1)
        if not self.rest:  # nothing more is known: what there is counts as all
            chosen = chosen - np.logaddexp.reduce(values, -1)
        streams = self.form.encode(
            {
                "ids": ids[:, :k],
                "logprobs": values[:, :k],
                "odds": np.stack([self._odds(values, t) for t in self.form.temperatures], -1),
                "token_logprobs": np.where(np.isfinite(chosen), np.minimum(chosen, 0.0), UNKNOWN),
            },
        )
        example = document.example
        assert example.ends is not None
        return to_bytes(self.form, example.ids, example.ends, example.supervised, streams)

    def _odds(self, values: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
        """The log of the rest's mass over that of the k entries that are kept; −inf where there is none."""
        kept = np.logaddexp.reduce(values[:, : self.form.k] / temperature, -1)
        if self.rest:
            # expm1: 1 − Σ would lose what is left of a sum near 1.
            with np.errstate(divide="ignore"):
                return np.log(np.maximum(-np.expm1(np.minimum(kept, 0.0)), 0.0)) - kept
        if values.shape[1] == self.form.k:
            return np.full(len(values), -math.inf)
        return np.logaddexp.reduce(values[:, self.form.k :] / temperature, -1) - kept


def _guessed(values: npt.NDArray[np.float64], file: Path) -> str:
    """Logits have any sum of exponentials; that of the largest log-probabilities is at most 1, and mostly near it."""
    mass = _mass(values)
    if mass.max() > 1 + ABOVE_ONE:
        return "logits"
    if np.median(mass) > 0.5:
        return "logprobs"
    raise PotstillError(f"{file}: it cannot be told what its values are: say --values logits, or --values logprobs")


def _mass(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.exp(values).sum(-1)
