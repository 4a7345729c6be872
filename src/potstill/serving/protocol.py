"""What `potstill serve` and its client say to each other, safetensors bodies both ways, and that client. docs/remote.md has it
in ten lines.

D documents, T tokens of all of them, R predicted tokens, K ids.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import safetensors.torch

from potstill.cache.origin import Identity, read_head
from potstill.cache.reading import template_fingerprint, tokenizer_fingerprint
from potstill.config import StoreConfig
from potstill.http_client import NO_SUCH_PATH, Answer, Connection, plain
from potstill.models import load_tokenizer
from potstill.signals.kinds import SERVED, Signal, SignalKind, kind_for, read_kind
from potstill.types import Example, Head, PotstillError

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
# Of an answer, as safetensors names them
DTYPES = {"int32": "I32", "float32": "F32", "float16": "F16", "uint16": "U16"}
TOKENIZER_BYTES = 256 * 2**20  # of its files; the largest known have 40 MB
WIDEST = 2**16  # hidden states
LONGEST = 2**40  # any other number of /version
MOST_LETTERS, OPTIONAL = 1000, ("revision", "template")  # of its texts
WHAT = {"weights": "model", "dtype": "precision (dtype)", "tokenizer": "tokenizer", "template": "chat template"}
Given = Sequence[npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Question:
    """Documents to score."""

    form: SignalKind
    examples: Sequence[Example]  # with ids, what is predicted, and a key for draws
    given: Given | None = None  # of each document [R, K]; kind `given`

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def rows(self) -> int:
        return sum(example.supervised_tokens for example in self.examples)

    @property
    def answer_bytes(self) -> int:
        """Of the arrays of its answer."""
        layout = self.form.layout().values()
        return self.rows * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout)


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
    _check_lengths(ids, lengths, predicted)
    if not isinstance(keys, list) or [type(key) for key in keys] != [str] * len(lengths):
        raise ValueError("keys must be a list with a string for each document")
    _check_ids("ids", ids, vocabulary)
    ends = np.cumsum(lengths)[:-1]
    masks = np.split(predicted.astype(np.bool_), ends)
    if any(mask[0] or not mask.any() for mask in masks):
        raise ValueError("each document needs a predicted token, and its first one cannot be: nothing comes before it")
    parts = zip(np.split(ids, ends), masks, keys, strict=True)
    return [Example(key, "", part, mask, 0, source="a document") for part, mask, key in parts]


def _check_lengths(ids: npt.NDArray[Any], lengths: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> None:
    if [array.dtype.name for array in (ids, lengths, predicted)] != ["int32", "int32", "uint8"]:
        raise ValueError("ids and lengths must be int32, predicted uint8")
    if ids.ndim != 1 or lengths.ndim != 1 or ids.shape != predicted.shape or not len(lengths):
        raise ValueError("ids, lengths and predicted must be flat, with an entry of predicted for each id")
    if len(lengths) > MOST_DOCUMENTS:
        raise ValueError(f"there are {len(lengths):,} documents, and a request has up to {MOST_DOCUMENTS:,}")
    if int(lengths.min()) < 2 or int(lengths.sum(dtype=np.int64)) != len(ids):
        raise ValueError("lengths must sum to the number of ids, and each document needs at least two")


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


class PotstillServer:
    """A running `potstill serve`. It has what `OpenAIServer` has."""

    request_tokens = 2048  # of documents that share a request
    probe: Sequence[float] | None = None
    api: Literal["potstill"] = "potstill"

    def __init__(self, connection: Connection, version: dict[str, Any]) -> None:
        self.connection = connection
        if version.get("protocol") != PROTOCOL:
            raise connection.error(
                f"it speaks protocol {version.get('protocol')} and this potstill {PROTOCOL}: use the same version "
                "on both sides"
            )
        try:
            self.identity = _identity(version)
            self.vocabulary, self._width = _whole(version, "vocabulary"), _whole(version, "width", WIDEST)
            self.positions = None if version["positions"] is None else _whole(version, "positions")
            self._most_bytes = _whole(version, "max_body_bytes")
            self._most_answer = _whole(version, "max_answer_bytes")
        except (KeyError, ValueError) as error:
            raise connection.error(f"its /version is not understood ({error})") from error
        self.tokenizer = self._tokenizer()

    def _tokenizer(self) -> Any:
        try:
            files = self.connection.get("/tokenizer", most=TOKENIZER_BYTES).object()
        except ValueError as error:
            raise self.connection.error(f"its answer is {error}") from error
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENIZER_FILES:  # no others: a name could lead anywhere
                if isinstance(files.get(name), str):
                    (Path(folder) / name).write_text(files[name], encoding="utf-8")
            try:
                tokenizer = load_tokenizer(folder, "what /tokenizer gives")
                if TEMPLATES in files:  # of a tokenizer with several, by name
                    tokenizer.chat_template = templates = json.loads(files[TEMPLATES])
                    if not all(isinstance(template, str) for template in templates.values()):
                        raise PotstillError("the chat templates are no JSON object of strings")
                found = (tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer))
            except Exception as error:  # libraries raise anything over files that are none
                words = str(error) if isinstance(error, PotstillError) else repr(error)
                raise self.connection.error(
                    f"its tokenizer cannot be read ({words.replace(folder, '/tokenizer')})"
                ) from error
        if found != (self.identity.tokenizer, self.identity.template):
            raise self.connection.error("the tokenizer it hands out is not the one that its /version names")
        if len(tokenizer) < self.vocabulary:
            raise self.connection.error(
                f"its tokenizer has {len(tokenizer)} ids and its /version says {self.vocabulary}"
            )
        return tokenizer

    def format(self, store: StoreConfig) -> SignalKind:
        return kind_for(store, self.vocabulary, self._width, self.identity.dtype)

    def head(self, width: int) -> Head:
        most = 4 * self.vocabulary * (self._width + 1) + HEADER_BYTES
        answer = self._checked(self.connection.get("/head", most=most))
        try:
            tensors, about = read_body(answer.content, safetensors.torch.load)
            return read_head(tensors, about, width, self._width)
        except ValueError as error:
            raise self.connection.error(f"its head is wrong: {error}; no step was taken with it") from error

    def score(self, form: SignalKind, examples: Sequence[Example], given: Given | None = None) -> Signal:
        question = Question(form, examples, given)
        body = write_question(question)
        large = len(body) > self._most_bytes or question.answer_bytes > self._most_answer
        if large and len(examples) > 1:
            middle = len(examples) // 2
            halves = [
                self.score(form, examples[part], None if given is None else given[part])
                for part in (slice(middle), slice(middle, None))
            ]
            return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
        answer = self._checked(self.connection.post("/score", body, most=question.answer_bytes + HEADER_BYTES))
        try:
            return read_answer(answer.content, form, question.rows)
        except ValueError as error:
            raise self.connection.error(f"its answer is wrong: {error}; no step was taken with it") from error

    def _checked(self, answer: Answer) -> Answer:
        """An answer of the same teacher as at the start."""
        known = asdict(self.identity)
        for part, header in HEADERS.items():
            now, before = answer.headers.get(header, "none")[:80], str(known[part])
            if now != before:
                raise self.connection.error(
                    f"it now serves another {WHAT[part]} than when the run began ({now}, before {before}): start the one it "
                    "had again, or begin another run"
                )
        return answer


def potstill_version(connection: Connection) -> dict[str, Any] | None:
    """What the server says it is; None: it is no `potstill serve`."""
    try:
        found = connection.get("/version", accepted=NO_SUCH_PATH).object()
    except ValueError:
        return None
    return found if found.get("service") == SERVICE else None


def _identity(version: dict[str, Any]) -> Identity:
    """As it may be shown, and kept in a cache's manifest."""
    found: dict[str, Any] = {}
    for name in (part.name for part in fields(Identity)):
        value = version[name]
        if not (isinstance(value, str) and len(value) <= MOST_LETTERS) and not (value is None and name in OPTIONAL):
            raise ValueError(f"{name} is {str(value)[:80]!r}")
        found[name] = value if value is None else plain(value)
    return Identity(**found)


def _whole(version: dict[str, Any], name: str, most: int = LONGEST) -> int:
    value = version[name]
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name} is {str(value)[:80]!r}")
    return value
