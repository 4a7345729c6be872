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

from potstill.cache.kinds import SERVED, Signal, SignalKind, read_kind
from potstill.types import Example

PROTOCOL = 1
SERVICE = "potstill serve"
# Headers of every answer: what gave it, as its Identity has it
HEADERS = {part: f"x-potstill-{part}" for part in ("weights", "dtype", "tokenizer", "template")}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TEMPLATES = "chat_templates"  # beside the files, of a tokenizer with several: an object of them, as JSON
MOST_TEMPERATURES = 16
HOTTEST = 1e6
MOST_DOCUMENTS = 2**14  # of one question
HEADER_BYTES = 2**22  # of what stands in a body besides its arrays
DTYPES = {"int32": "I32", "float32": "F32", "uint16": "U16"}  # of an answer, as safetensors names them


@dataclass(frozen=True)
class Question:
    """Documents to score."""

    form: SignalKind
    examples: Sequence[Example]  # with ids, what is predicted, and a key for draws
    given: Sequence[npt.NDArray[np.int32]] | None = None  # of each document [R, K]; kind `given`

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def answer_bytes(self) -> int:
        return answer_bytes(self.form, sum(example.supervised_tokens for example in self.examples))


def answer_bytes(form: SignalKind, rows: int) -> int:
    """Of the arrays of an answer."""
    return rows * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in form.layout().values())


def write_question(question: Question) -> bytes:
    examples = question.examples
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": np.concatenate([example.ids for example in examples]).astype(np.int32),
        "lengths": np.array([len(example.ids) for example in examples], dtype=np.int32),
        "predicted": np.concatenate([example.supervised for example in examples]).astype(np.uint8),
    }
    if question.given is not None:
        arrays["given"] = np.concatenate(question.given).astype(np.int32)
    about = {
        "format": json.dumps({"kind": question.form.kind, **asdict(question.form)}),
        "keys": json.dumps([e.key for e in examples]),
    }
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


def _form(keys: Any) -> SignalKind:
    if not isinstance(keys, dict):
        raise ValueError("format must be an object")
    try:
        form = read_kind(keys.pop("kind", None), keys, SERVED)
    except ValueError as error:
        raise ValueError(f"format: {error}") from error
    if len(form.temperatures) > MOST_TEMPERATURES or max(form.temperatures) >= HOTTEST:
        raise ValueError(f"format: temperatures must be below {HOTTEST:g}, and at most {MOST_TEMPERATURES}")
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
    form: SignalKind, arrays: Mapping[str, npt.NDArray[Any]], examples: Sequence[Example]
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
        outside = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}; there is {outside}")


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


def read_answer(body: bytes, form: SignalKind, rows: int) -> dict[str, npt.NDArray[Any]]:
    """ValueError: what is wrong with it."""
    signal, _ = read_body(body)
    form.check(signal, rows)
    return signal


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
