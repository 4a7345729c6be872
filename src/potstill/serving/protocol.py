"""What `potstill serve` and its client say to each other: safetensors bodies both ways. docs/remote.md has it in ten lines.

D documents, T tokens of all of them, R predicted tokens, K ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from potstill.cache.codec import Format, Signal
from potstill.cache.scored import layout
from potstill.types import Example

PROTOCOL = 1
SERVICE = "potstill serve"
# Headers of every answer: what gave it, as its Identity has it
HEADERS = {part: f"x-potstill-{part}" for part in ("weights", "dtype", "tokenizer", "template")}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TEMPLATES = "chat_templates"  # beside the files, of a tokenizer with several: an object of them, as JSON
MOST_DRAWS = 4096  # as a cache has them
MOST_TEMPERATURES = 16
MOST_DOCUMENTS = 2**14  # of one question
HEADER_BYTES = 2**22  # of what stands in a body besides its arrays
DTYPES = {"int32": "I32", "float32": "F32", "uint16": "U16"}  # of an answer, as safetensors names them
NEEDED = {"top_k": "k", "sampled": "num_samples", "hidden": "width", "token_logprobs": "vocabulary", "given": "k"}
SLACK = 1e-3  # by which masses may be above one


@dataclass(frozen=True)
class Question:
    """Documents to score."""

    form: Format
    examples: Sequence[Example]  # with ids, what is predicted, and a key for draws
    given: Sequence[npt.NDArray[np.int32]] | None = None  # of each document [R, K]; kind `given`

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def answer_bytes(self) -> int:
        return answer_bytes(self.form, sum(example.supervised_tokens for example in self.examples))


def answer_bytes(form: Format, rows: int) -> int:
    """Of the arrays of an answer."""
    return rows * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout(form).values())


def write_question(question: Question) -> bytes:
    examples = question.examples
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": np.concatenate([example.ids for example in examples]).astype(np.int32),
        "lengths": np.array([len(example.ids) for example in examples], dtype=np.int32),
        "predicted": np.concatenate([example.supervised for example in examples]).astype(np.uint8),
    }
    if question.given is not None:
        arrays["given"] = np.concatenate(question.given).astype(np.int32)
    about = {"format": json.dumps(asdict(question.form)), "keys": json.dumps([e.key for e in examples])}
    return safetensors.numpy.save(arrays, metadata=about)


def read_question(body: bytes) -> Question:
    """ValueError: what is wrong with it."""
    if int.from_bytes(body[:8], "little") > HEADER_BYTES:  # it may take 24 times as many when it is read
        raise ValueError(f"it is no safetensors body, or its header has more than {HEADER_BYTES:,} bytes")
    arrays, about = read_body(body)
    try:
        form = _form(json.loads(about["format"]))
        examples = _examples(arrays, json.loads(about["keys"]), form.vocabulary)
        return Question(form, examples, _given(form, arrays, examples) if form.kind == "given" else None)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the request lacks {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"the request has numbers or lists beyond all bounds ({type(error).__name__})") from error


def _form(keys: Any) -> Format:
    if not isinstance(keys, dict):
        raise ValueError("format must be an object")
    try:
        form = Format(**{**keys, "temperatures": tuple(float(t) for t in keys.get("temperatures", (1.0,)))})
    except TypeError as error:
        raise ValueError(f"format: {error}") from error
    for name in ("vocabulary", "k", "tail_samples", "num_samples", "width", "seed"):
        if type(getattr(form, name)) is not int:
            raise ValueError(f"format: {name} must be a whole number")
    if form.kind not in NEEDED:
        raise ValueError(f"format: there is no kind {form.kind!r}")
    if getattr(form, NEEDED[form.kind]) < 1 or not isinstance(form.dtype, str):
        raise ValueError(f"format: {NEEDED[form.kind]} or dtype is out of bounds")
    for name, kind in (("num_samples", "sampled"), ("tail_samples", "top_k")):
        most = MOST_DRAWS if form.kind == kind else 0
        if not 0 <= getattr(form, name) <= most:
            raise ValueError(f"format: {name} must be from 0 to {most} for kind {form.kind}")
    if not all(0 < t < 1e6 for t in form.temperatures) or not 1 <= len(form.temperatures) <= MOST_TEMPERATURES:
        raise ValueError(f"format: temperatures must be above 0, and at most {MOST_TEMPERATURES}")
    return form


def _examples(arrays: Mapping[str, npt.NDArray[Any]], keys: Any, vocabulary: int) -> list[Example]:
    ids, lengths, predicted = (arrays[name] for name in ("ids", "lengths", "predicted"))
    if [array.dtype.name for array in (ids, lengths, predicted)] != ["int32", "int32", "uint8"]:
        raise ValueError("ids and lengths must be int32, predicted uint8")
    if ids.ndim != 1 or lengths.ndim != 1 or ids.shape != predicted.shape or not len(lengths):
        raise ValueError("ids, lengths and predicted must be flat, with an entry of predicted for each id")
    if len(lengths) > MOST_DOCUMENTS:
        raise ValueError(f"there are {len(lengths):,} documents, and a request has up to {MOST_DOCUMENTS:,}")
    if int(lengths.min()) < 2 or int(lengths.sum(dtype=np.int64)) != len(ids):
        raise ValueError("lengths must sum to the number of ids, and each document needs at least two")
    if not isinstance(keys, list) or [type(key) for key in keys] != [str] * len(lengths):
        raise ValueError("keys must be a list with a string for each document")
    _check_ids("ids", ids, vocabulary)
    ends = np.cumsum(lengths)[:-1]
    masks = np.split(predicted.astype(np.bool_), ends)
    if any(mask[0] or not mask.any() for mask in masks):
        raise ValueError("each document needs a predicted token, and its first one cannot be: nothing comes before it")
    parts = zip(np.split(ids, ends), masks, keys, strict=True)
    return [Example(key, "", part, mask, 0, source="a document") for part, mask, key in parts]


def _given(
    form: Format, arrays: Mapping[str, npt.NDArray[Any]], examples: Sequence[Example]
) -> list[npt.NDArray[np.int32]]:
    counts = [example.supervised_tokens for example in examples]
    given = arrays.get("given")
    if given is None or given.dtype != np.int32 or given.shape != (sum(counts), form.k):
        raise ValueError(f"given must be int32 of shape [{sum(counts)}, {form.k}]: ids for each predicted token")
    _check_ids("given", given, form.vocabulary)
    in_order = np.sort(given, -1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():  # its mass would be counted twice
        raise ValueError("given has an id twice for one token")
    return np.split(given, np.cumsum(counts)[:-1])


def _check_ids(name: str, ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}; there is {_outside(ids, vocabulary)}")


def _outside(ids: npt.NDArray[Any], vocabulary: int) -> int:
    return int(ids[(ids < 0) | (ids >= vocabulary)].flat[0])


def write_answer(signal: Signal) -> list[memoryview]:
    """The parts of a safetensors body. The arrays are not copied: an answer may be large, and its client slow."""
    header, parts, at = {}, [], 0
    for name, values in signal.items():
        entry = {"dtype": DTYPES[values.dtype.name], "shape": list(values.shape)}
        header[name] = entry | {"data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
        parts.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *parts]


def read_answer(body: bytes, form: Format, rows: int) -> dict[str, npt.NDArray[Any]]:
    """ValueError: what is wrong with it."""
    signal, _ = read_body(body)
    check_signal(signal, form, rows)
    return signal


def check_signal(signal: Signal, form: Format, rows: int) -> None:
    """That these are the rows of a teacher: shapes, dtypes, numbers, ids and masses. ValueError: what is wrong."""
    expected = layout(form)
    if set(signal) != set(expected):
        raise ValueError(f"it has {', '.join(sorted(signal)) or 'nothing'} where {', '.join(expected)} were asked for")
    for name, (shape, dtype) in expected.items():
        found = signal[name]
        if found.shape != (rows, *shape) or found.dtype != dtype:
            wanted = f"{dtype} {[rows, *shape]}"
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)} where {wanted} was asked for")
        if name == "hidden":
            if not finite(found, form.dtype):
                raise ValueError("there are hidden states that are not finite")
        elif found.dtype.kind == "f" and np.isnan(found).any():
            raise ValueError(f"there are {name} that are no numbers (NaN)")
        elif found.dtype.kind == "i" and found.size and not 0 <= found.min() <= found.max() < form.vocabulary:
            raise ValueError(f"{name} has id {_outside(found, form.vocabulary)} of {form.vocabulary}")
    for name in ("logprobs", "token_logprobs", "tail"):
        if name in signal and signal[name].size and float(signal[name].max()) > SLACK:
            raise ValueError(f"{name} has a log-probability of {float(signal[name].max()):.3g}, above 0")
    if form.kind == "top_k":
        _check_top_k(signal, form)
    if form.kind == "given":
        _check_mass(np.exp(signal["logprobs"].astype(np.float64)).sum(-1), np.exp(signal["tail"].astype(np.float64)))


def finite(hidden: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16":  # as bits: an exponent of ones is infinite, or no number
        return not bool(((hidden & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(hidden).all())


def _check_top_k(signal: Signal, form: Format) -> None:
    ids, logprobs = signal["ids"], signal["logprobs"]
    in_order = np.sort(ids, -1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        raise ValueError("an id is twice among the top k of one token")
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():
        raise ValueError("the top k of a token are not in order, largest first")
    kept = np.exp(logprobs.astype(np.float64)).sum(-1)
    odds = signal["odds"].astype(np.float64)
    if 1.0 in form.temperatures:
        _check_mass(kept, np.exp(-np.logaddexp(0.0, -odds[:, form.temperatures.index(1.0)])))
    elif kept.size and float(kept.max()) > 1 + SLACK:
        raise ValueError(f"probabilities sum to {float(kept.max()):.4f}")


def _check_mass(kept: npt.NDArray[np.float64], rest: npt.NDArray[np.float64]) -> None:
    total = kept + rest
    if not total.size or float(np.abs(total - 1).max()) <= SLACK:
        return
    worst = float(total[np.abs(total - 1).argmax()])
    raise ValueError(f"the probabilities of a token and of the rest sum to {worst:.4f}")


def read_body(
    body: bytes, load: Callable[[bytes], dict[str, Any]] = safetensors.numpy.load
) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays of a body, and its metadata. ValueError: what is wrong with it."""
    try:
        arrays = load(body)
        length = int.from_bytes(body[:8], "little")
        about = json.loads(body[8 : 8 + length]).get("__metadata__", {})
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no safetensors body ({error})") from error
    return arrays, about
