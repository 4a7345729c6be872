"""The client of `potstill serve`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.torch

from potstill.cache.codec import Format, Signal
from potstill.cache.origin import Identity, format_for, read_head
from potstill.cache.reading import template_fingerprint, tokenizer_fingerprint
from potstill.config import StoreConfig
from potstill.models import load_tokenizer
from potstill.serving.http import Answer, Connection, plain
from potstill.serving.protocol import (
    HEADER_BYTES,
    HEADERS,
    PROTOCOL,
    SERVICE,
    TEMPLATES,
    TOKENIZER_FILES,
    Question,
    read_answer,
    read_body,
    write_question,
)
from potstill.types import DenseTarget, Example, PotstillError

REQUEST_TOKENS = 2048  # documents that share a request
TOKENIZER_BYTES = 256 * 2**20  # of its files; the largest known have 40 MB
WIDEST = 2**16  # hidden states
LONGEST = 2**40  # any other number of /version
MOST_LETTERS, MAY_LACK = 1000, ("revision", "template")  # of its texts
WHAT = {"weights": "model", "dtype": "precision (dtype)", "tokenizer": "tokenizer", "template": "chat template"}


class Server(Protocol):
    """A teacher behind an address."""

    connection: Connection
    tokenizer: Any
    positions: int | None
    identity: Identity
    vocabulary: int
    request_tokens: int  # of documents that share a request; 0: each has its own
    probe: Sequence[float] | None  # as the Origin's
    whole: bool  # gives hidden states, draws, likelihoods of any ids, and any temperature

    def format(self, store: StoreConfig) -> Format: ...

    def score(
        self, form: Format, examples: Sequence[Example], given: Sequence[npt.NDArray[np.int32]] | None = None
    ) -> Signal:
        """Their rows, checked. On any thread."""
        ...

    def head(self, width: int) -> DenseTarget: ...


class PotstillServer:
    """A running `potstill serve`."""

    request_tokens = REQUEST_TOKENS
    probe: Sequence[float] | None = None
    whole = True

    def __init__(self, connection: Connection, version: dict[str, Any]) -> None:
        self.connection = connection
        if version.get("protocol") != PROTOCOL:
            raise connection.error(
                f"it speaks protocol {version.get('protocol')} and this potstill {PROTOCOL}: use the same version on "
                "both sides"
            )
        try:
            self.identity = _identity(version)
            self.vocabulary, self._width = _whole(version, "vocabulary", LONGEST), _whole(version, "width", WIDEST)
            self.positions = None if version["positions"] is None else _whole(version, "positions", LONGEST)
            self._most_bytes = _whole(version, "max_body_bytes", LONGEST)
            self._most_answer = _whole(version, "max_answer_bytes", LONGEST)
        except (KeyError, ValueError) as error:
            raise connection.error(f"its /version is not understood ({error})") from error
        self.tokenizer = self._tokenizer()

    def _tokenizer(self) -> Any:
        files = _object(self.connection, self.connection.get("/tokenizer", TOKENIZER_BYTES))
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENIZER_FILES:  # no others: a name could lead anywhere
                if isinstance(files.get(name), str):
                    (Path(folder) / name).write_text(files[name], encoding="utf-8")
            try:
                tokenizer = load_tokenizer(folder, "what /tokenizer gives")
                if TEMPLATES in files:
                    tokenizer.chat_template = self._templates(files[TEMPLATES])
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

    def _templates(self, text: Any) -> dict[str, str]:
        """Of a tokenizer with several, by name."""
        found = json.loads(text)
        if not isinstance(found, dict) or not all(isinstance(template, str) for template in found.values()):
            raise PotstillError("the chat templates are no JSON object of strings")
        return found

    def format(self, store: StoreConfig) -> Format:
        return format_for(store, self.vocabulary, self._width, self.identity.dtype)

    def head(self, width: int) -> DenseTarget:
        answer = self.connection.get("/head", 4 * self.vocabulary * (self._width + 1) + HEADER_BYTES)
        self._check_same(answer)
        try:
            tensors, about = read_body(answer.content, safetensors.torch.load)
            return read_head(tensors, about, width, self._width)
        except ValueError as error:
            raise self.connection.error(f"its head is wrong: {error}; no step was taken with it") from error

    def score(
        self, form: Format, examples: Sequence[Example], given: Sequence[npt.NDArray[np.int32]] | None = None
    ) -> Signal:
        question = Question(form, examples, given)
        body = write_question(question)
        large = len(body) > self._most_bytes or question.answer_bytes > self._most_answer
        if large and len(examples) > 1:
            return self._in_halves(form, examples, given)
        answer = self.connection.post("/score", body, question.answer_bytes + HEADER_BYTES)
        self._check_same(answer)
        rows = sum(example.supervised_tokens for example in examples)
        try:
            return read_answer(answer.content, form, rows)
        except ValueError as error:
            raise self.connection.error(f"its answer is wrong: {error}; no step was taken with it") from error

    def _in_halves(
        self, form: Format, examples: Sequence[Example], given: Sequence[npt.NDArray[np.int32]] | None
    ) -> Signal:
        middle = len(examples) // 2
        halves = [
            self.score(form, examples[part], None if given is None else given[part])
            for part in (slice(middle), slice(middle, None))
        ]
        return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}

    def _check_same(self, answer: Answer) -> None:
        known = asdict(self.identity)
        for part, header in HEADERS.items():
            now, before = answer.headers.get(header, "none")[:80], str(known[part])
            if now != before:
                raise self.connection.error(
                    f"it now serves another {WHAT[part]} than when the run began ({now}, before {before}): start the one it "
                    "had again, or begin another run"
                )


def potstill_version(connection: Connection) -> dict[str, Any] | None:
    """What the server says it is; None: it is no `potstill serve`."""
    response = connection.find("/version")
    if response is None:
        return None
    try:
        found = response.json()
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("service") == SERVICE else None


def _object(connection: Connection, response: Answer) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise connection.error(f"its answer is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise connection.error(f"its answer is no JSON object: {json.dumps(found)[:80]}")
    return found


def _identity(version: dict[str, Any]) -> Identity:
    found: dict[str, Any] = {part.name: version[part.name] for part in fields(Identity)}
    for name, value in found.items():
        if not (isinstance(value, str) and len(value) <= MOST_LETTERS) and not (value is None and name in MAY_LACK):
            raise ValueError(f"{name} is {str(value)[:80]!r}")
    # It is shown, and kept in a cache's manifest.
    shown: dict[str, Any] = {name: value if value is None else plain(value) for name, value in found.items()}
    return Identity(**shown)


def _whole(version: dict[str, Any], name: str, most: int) -> int:
    value = version[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} is {str(value)[:80]!r}")
    return value
