"""The client of `potstill serve`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import numpy.typing as npt

from potstill.config import StoreConfig
from potstill.models import load_tokenizer
from potstill.teachers.codec import Format, Signal
from potstill.teachers.connection import Connection
from potstill.teachers.origin import Identity, format_for
from potstill.teachers.reading import template_fingerprint, tokenizer_fingerprint
from potstill.teachers.shelf import load_head
from potstill.teachers.wire import (
    HEADERS,
    PROTOCOL,
    SERVICE,
    TEMPLATES,
    TOKENIZER_FILES,
    Question,
    read_answer,
    write_question,
)
from potstill.types import DenseTarget, Example

REQUEST_TOKENS = 2048  # documents that share a request
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
                f"it speaks protocol {version.get('protocol')} and this potstill {PROTOCOL}: use the same version on both sides"
            )
        try:
            self.identity = Identity(**{part.name: version[part.name] for part in fields(Identity)})
            self.vocabulary, self._width = int(version["vocabulary"]), int(version["width"])
            self.positions = None if version["positions"] is None else int(version["positions"])
            self._most_bytes, self._most_answer = int(version["max_body_bytes"]), int(version["max_answer_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise connection.error(f"its /version is not understood ({error!r})") from error
        self.tokenizer = self._tokenizer()

    def _tokenizer(self) -> Any:
        found = self.connection.get("/tokenizer")
        files = _object(self.connection, found)
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENIZER_FILES:  # no others: a name could lead anywhere
                if isinstance(files.get(name), str):
                    (Path(folder) / name).write_text(files[name], encoding="utf-8")
            tokenizer = load_tokenizer(folder, f"{self.connection.where}: the tokenizer of {self.connection.address}")
        if TEMPLATES in files:
            tokenizer.chat_template = self._templates(files[TEMPLATES])
        said = (self.identity.tokenizer, self.identity.template)
        if (tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)) != said:
            raise self.connection.error("the tokenizer it hands out is not the one that its /version names")
        if len(tokenizer) != self.vocabulary:
            raise self.connection.error(
                f"its tokenizer has {len(tokenizer)} ids and its /version says {self.vocabulary}"
            )
        return tokenizer

    def _templates(self, text: Any) -> dict[str, str]:
        """Of a tokenizer with several, by name."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.connection.error(f"its chat templates are no JSON ({error})") from error
        if not isinstance(found, dict) or not all(isinstance(template, str) for template in found.values()):
            raise self.connection.error("its chat templates are no JSON object of strings")
        return found

    def format(self, store: StoreConfig) -> Format:
        return format_for(store, self.vocabulary, self._width, self.identity.dtype)

    def head(self, width: int) -> DenseTarget:
        response = self.connection.get("/head")
        self._check_same(response)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "head.safetensors").write_bytes(response.content)
            head = load_head(Path(folder), width)
        weight = head.weight
        assert weight is not None
        if weight.shape != (width, self._width) or not weight.isfinite().all():
            raise self.connection.error(
                f"its head is {list(weight.shape)} where {[width, self._width]} was expected, or is not finite"
            )
        return head

    def score(
        self, form: Format, examples: Sequence[Example], given: Sequence[npt.NDArray[np.int32]] | None = None
    ) -> Signal:
        question = Question(form, examples, given)
        body = write_question(question)
        large = len(body) > self._most_bytes or question.answer_bytes > self._most_answer
        if large and len(examples) > 1:
            return self._in_halves(form, examples, given)
        response = self.connection.post("/score", body)
        self._check_same(response)
        rows = sum(example.supervised_tokens for example in examples)
        try:
            return read_answer(response.content, form, rows)
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

    def _check_same(self, response: httpx.Response) -> None:
        known = asdict(self.identity)
        for part, header in HEADERS.items():
            now, before = response.headers.get(header), str(known[part])
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


def _object(connection: Connection, response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise connection.error(f"its answer is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise connection.error(f"its answer is no JSON object: {json.dumps(found)[:80]}")
    return found
