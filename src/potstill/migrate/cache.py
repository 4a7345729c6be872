"""Other people's files as a cache: MaxText-style array_record files, and parquet with lists of top-k entries.

They hold tokens and no text, and a cache is keyed by text. So the tokens are decoded, and a document is taken only where its
text gives the same tokens again. L tokens of a record, R rows to predict, K entries of each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from potstill.cache.manifest import IMPORTED, TOKENIZER, new_manifest
from potstill.cache.reading import TeacherText, template_fingerprint, tokenizer_fingerprint
from potstill.cache.store import Cache, Writer, begun_cache, create
from potstill.data.examples import text_key
from potstill.files import could_not_write, new_file
from potstill.migrate.records import Record, maxtext_records, parquet_records
from potstill.models import load_tokenizer
from potstill.signals.codec import STEPS_PER_NAT
from potstill.signals.kinds import LARGEST_VOCABULARY, Signal, TopK, wrong_ids
from potstill.types import Example, PotstillError

Layout = Literal["maxtext", "parquet"]
Values = Literal["auto", "logits", "logprobs"]
Rest = Literal["known", "partial", "none"]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
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
NOTES = {  # what was left out or changed, and in how many documents
    "text": "documents whose text does not give the same tokens again were left out",
    "entries": "documents with fewer entries than k at some token were left out",
    "twice": "documents that are there twice were left out",
    "empty": "documents with nothing to predict in them were left out",
    "shortened": f"documents lost up to {LAST_TOKENS} tokens at their end, where they were cut",
    "without_end": "documents have no entries for what follows them: train with data.append_eos=false",
}
NO_REST = (
    "the values are logits without their normaliser: the mass of other tokens is not known, and is taken to be none"
)


@dataclass(frozen=True)
class Imported:
    documents: int  # added
    tokens: int
    there: int  # documents that were in the cache already
    noted: Mapping[str, int]  # see NOTES
    rest: bool  # whether the mass of what is not among the entries is known
    texts: Path | None  # to train on

    def lines(self) -> list[str]:
        """What to tell of it."""
        already = f"; {self.there:,} were there" if self.there else ""
        lines = [f"{self.documents:,} documents imported ({self.tokens:,} tokens){already}"]
        lines += [f"{count:,} {NOTES[name]}" for name, count in self.noted.items()]
        lines += [] if self.rest else [NO_REST]
        return lines if self.texts is None else [*lines, f"texts to train on: {self.texts}"]


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
    named = _checked({**COLUMNS[layout], **(columns or {})}, texts)
    if not files:
        raise PotstillError("name at least one file to import")
    reader = _Reader(load_tokenizer(tokenizer, "--tokenizer"), predicts)
    counts, seen = reader.counts, set[str]()
    first = next(READERS[layout](files[0], named), None)
    if values == "auto" and layout == "maxtext" and "normaliser" not in named:
        values = "logits"  # its script keeps what the head gives
    entries = _Entries.of(first, files[0], len(reader.tokenizer), values, k, temperatures)

    def records() -> Iterator[Record]:
        for number, file in enumerate(files):
            progress(number, len(files))
            yield from READERS[layout](file, named)

    with closing(_start(out, reader.tokenizer, entries, layout, teacher_name)) as writer, _lines(texts) as write_line:
        there = Cache(out)
        for example, ids, logits in (document for record in records() for document in reader.documents(record)):
            signal = None if example.key in seen else entries.signal(example, ids, logits)
            if signal is None:
                counts["twice" if example.key in seen else "entries"] += 1
                continue
            seen.add(example.key)
            write_line(example.text)
            if there.find([example.key])[0] >= 0:
                counts["there"] += 1
                continue
            writer.add_rows(entries.form, [example], entries.form.encode(signal))
        writer.flush()
    noted = {name: counts[name] for name in NOTES if counts[name]}
    return Imported(writer.documents, writer.tokens, counts["there"], noted, entries.rest == "known", texts)


def _checked(columns: Mapping[str, str], texts: Path | None) -> Mapping[str, str]:
    if unknown := sorted(set(columns) - set(ROLES)):
        raise PotstillError(f"--column {unknown[0]}=…: there is no such column; there are {', '.join(ROLES)}")
    if texts is None and "text" not in columns:
        raise PotstillError("--texts: say where the texts go that the tokens stand for; a student is trained on them")
    return columns


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Texts to a jsonl file, which appears when it is whole."""
    if path is None:
        yield lambda text: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise could_not_write(path, error) from error
    with new_file(path) as file:
        yield lambda text: file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def _start(out: Path, tokenizer: Any, entries: _Entries, layout: str, teacher_name: str) -> Writer:
    there = begun_cache(out)
    if there is not None and (there.imported is None or there.teacher.model != teacher_name):
        raise PotstillError(
            f"{out} is a cache of {there.teacher.model}, and what is imported is of {teacher_name}: choose another folder "
            "(--out)"
        )
    manifest = new_manifest(
        out,
        entries.form,
        teacher={"model": teacher_name, "weights": IMPORTED, "dtype": "unknown"},
        tokenizer=tokenizer_fingerprint(tokenizer),
        chat={"template": template_fingerprint(tokenizer), "kwargs": {}},
        piece_bytes=NOT_CUT,
        imported={"layout": layout, "values": entries.values, "rest": entries.rest},
    )
    return create(out, manifest, lambda folder: tokenizer.save_pretrained(folder / TOKENIZER))


class _Reader:
    """Tokens to texts, and back. `counts`: what was left out or changed, by reason."""

    def __init__(self, tokenizer: Any, predicts: str) -> None:
        self.tokenizer, self.counts = tokenizer, Counter[str]()
        if len(tokenizer) > LARGEST_VOCABULARY:
            raise PotstillError(f"a cache holds vocabularies of up to {LARGEST_VOCABULARY:,} ids")
        self._shift = 1 if predicts == "next" else 0  # the entries for a token stand at the one before it, or at itself
        self._encode = TeacherText(tokenizer, None)
        encoding = tokenizer.backend_tokenizer.encode("a")
        self._before = encoding.ids[: encoding.special_tokens_mask.index(0)]  # what the tokenizer puts before a text

    def documents(self, record: Record) -> Iterator[tuple[Example, Ids, Floats]]:
        """The documents of a record as potstill reads them, and the entries for each token to predict: ids and values
        [R, K], −inf where there is no entry."""
        self._check(np.maximum(record.ids, 0).reshape(-1, 1), record)  # those below 0 may be padding
        for begin, end in _segments(record):
            tokens = record.tokens[begin:end]
            if record.segments is None:
                tokens = self._without_padding(tokens)
            self._check(tokens[:, None], record)
            example = self._read(tokens, record)
            if example is None:
                continue
            rows = np.flatnonzero(example.supervised) + begin - self._shift
            bound = min(len(record.ids), end)
            if rows[-1] >= bound and len(example.ids) > len(tokens):
                self.counts["without_end"] += 1
                example, rows = _without_last(example), rows[:-1]
            if not len(rows) or rows[-1] >= bound:
                self.counts["entries" if len(rows) else "empty"] += 1
                continue
            ids, values = record.ids[rows], record.values[rows]
            if (wrong := values[np.isnan(values) | np.isposinf(values)]).size:
                raise PotstillError(f"{record.source} has {wrong[0]} among its values, where numbers were expected")
            self._check(ids, record, np.isfinite(values))
            yield example, ids, values

    def _check(self, ids: Ids, record: Record, there: npt.NDArray[np.bool_] | None = None) -> None:
        if wrong := wrong_ids(ids, len(self.tokenizer), there):
            raise PotstillError(
                f"{record.source} has {wrong}: name the tokenizer of the teacher (--tokenizer {self.tokenizer.name_or_path} "
                "was read), and the right columns (--column)"
            )

    def _without_padding(self, tokens: Ids) -> Ids:
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        length = len(tokens)
        while length and tokens[length - 1] == pad and (pad != eos or tokens[length - 2 : length - 1] == pad):
            length -= 1
        return tokens[:length]

    def _read(self, tokens: Ids, record: Record) -> Example | None:
        """What potstill reads in the text of some tokens, where it is these tokens, or they and an eos."""
        reason = "empty"
        for text, some in self._texts(tokens, record.text):
            reason = "text"
            (example,) = self._encode([Example(text_key(text), text, source=record.source)]) if text else (None,)
            if example is None or not len(example.ids) - 1 <= len(some) <= len(example.ids):
                continue
            if np.array_equal(example.ids[: len(some)], some):
                self.counts["shortened"] += len(some) < len(tokens)
                return example
        self.counts[reason] += 1
        return None

    def _texts(self, tokens: Ids, text: str | None) -> Iterator[tuple[str, Ids]]:
        """The texts that some tokens may stand for, and the tokens of each."""
        if text is not None:
            yield text, tokens
            return
        ended = bool(len(tokens)) and int(tokens[-1]) == self.tokenizer.eos_token_id
        begun = len(self._before) if tokens[: len(self._before)].tolist() == self._before else 0
        for fewer in range(min(len(tokens), 1 if ended else 1 + LAST_TOKENS)):
            some = tokens[: len(tokens) - fewer]
            if inner := some[begun : len(some) - ended].tolist():
                decoded = self.tokenizer.decode(inner, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                yield decoded, some


def _segments(record: Record) -> Iterator[tuple[int, int]]:
    """Where the documents of a record begin and end; 0 is padding."""
    if record.segments is None:
        yield 0, len(record.tokens)
        return
    edges = [0, *(np.flatnonzero(np.diff(record.segments)) + 1).tolist(), len(record.segments)]
    yield from ((begin, end) for begin, end in pairwise(edges) if end > begin and record.segments[begin])


def _without_last(example: Example) -> Example:
    assert example.ends is not None
    return replace(example, ids=example.ids[:-1], supervised=example.supervised[:-1], ends=example.ends[:-1])


@dataclass(frozen=True)
class _Entries:
    """What the values are, and what is made of them."""

    values: str  # logits, without their normaliser; or logprobs
    form: TopK
    rest: Rest  # of the mass beyond the k entries: all; that of the files' other entries; nothing

    @staticmethod
    def of(
        first: Record | None, file: Path, vocabulary: int, values: Values, k: int | None, temperatures: Sequence[float]
    ) -> _Entries:
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
        if first.normalised:
            values = "logprobs"
        elif values == "auto":
            values = _guessed(first.values[there > 0], file)
        form = TopK(vocabulary, k=k or least, temperatures=tuple(sorted(set(temperatures))))
        if values == "logprobs" and form.temperatures != (1.0,):
            raise PotstillError(
                f"--temperature: {file} has probabilities at temperature 1, and the mass of the rest is known there only"
            )
        unknown: Rest = "partial" if first.ids.shape[1] > form.k else "none"
        return _Entries(values, form, "known" if values == "logprobs" else unknown)

    def signal(self, example: Example, ids: Ids, values: Floats) -> Signal | None:
        """The rows as the cache holds them; None where there are too few entries."""
        k = self.form.k
        if (np.isfinite(values).sum(-1) < k).any():
            return None
        if self.rest == "known" and (most := _mass(values).max()) > 1 + ABOVE_ONE:
            raise PotstillError(
                f"{example.source}: the probabilities at a token sum to {most:.3g}, so these are not log-probabilities: "
                "--values logits takes them as they are"
            )
        order = np.argsort(-values, axis=-1, kind="stable")
        values, ids = np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
        label = np.where(ids == example.ids[example.supervised][:, None], values, -np.inf).max(-1)
        if self.rest != "known":  # nothing more is known: what there is counts as all
            label = label - np.logaddexp.reduce(values, -1)
        return {
            "ids": ids[:, :k],
            "logprobs": values[:, :k],
            "odds": np.stack([self._odds(values, t) for t in self.form.temperatures], -1),
            "token_logprobs": np.where(np.isfinite(label), np.minimum(label, 0.0), UNKNOWN),
        }

    def _odds(self, values: Floats, temperature: float) -> Floats:
        """The log of the rest's mass over that of the k entries that are kept; −inf where there is none."""
        kept = np.logaddexp.reduce(values[:, : self.form.k] / temperature, -1)
        if self.rest == "known":
            # expm1: 1 − Σ would lose what is left of a sum near 1.
            with np.errstate(divide="ignore"):
                return np.log(np.maximum(-np.expm1(np.minimum(kept, 0.0)), 0.0)) - kept
        if values.shape[1] == self.form.k:
            return np.full(len(values), -math.inf)
        return np.logaddexp.reduce(values[:, self.form.k :] / temperature, -1) - kept


def _guessed(values: Floats, file: Path) -> Values:
    """Logits have any sum of exponentials; that of the largest log-probabilities is at most 1, and mostly near it."""
    mass = _mass(values)
    if mass.max() > 1 + ABOVE_ONE:
        return "logits"
    if np.median(mass) > 0.5:
        return "logprobs"
    raise PotstillError(f"{file}: it cannot be told what its values are: say --values logits, or --values logprobs")


def _mass(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.exp(values).sum(-1)
