"""The client of `potstill serve`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch

from potstill.cache.kinds import Signal, SignalKind, kind_for
from potstill.cache.origin import Identity, read_head
from potstill.cache.reading import template_fingerprint, tokenizer_fingerprint
from potstill.config import StoreConfig
from potstill.models import load_tokenizer
from potstill.serving import protocol
from potstill.serving.http import NO_SUCH_PATH, Answer, Connection, plain
from potstill.types import Example, Head, PotstillError

TOKENIZER_BYTES = 256 * 2**20  # of its files; the largest known have 40 MB
WIDEST = 2**16  # hidden states
LONGEST = 2**40  # any other number of /version
MOST_LETTERS, OPTIONAL = 1000, ("revision", "template")  # of its texts
WHAT = {"weights": "model", "dtype": "precision (dtype)", "tokenizer": "tokenizer", "template": "chat template"}
Given = Sequence[npt.NDArray[np.int32]]


class PotstillServer:
    """A running `potstill serve`. It has what `OpenAIServer` has."""

    request_tokens = 2048  # of documents that share a request
    probe: Sequence[float] | None = None
    whole = True

    def __init__(self, connection: Connection, version: dict[str, Any]) -> None:
        self.connection = connection
        if version.get("protocol") != protocol.PROTOCOL:
            raise connection.error(
                f"it speaks protocol {version.get('protocol')} and this potstill {protocol.PROTOCOL}: use the same version "
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
            for name in protocol.TOKENIZER_FILES:  # no others: a name could lead anywhere
                if isinstance(files.get(name), str):
                    (Path(folder) / name).write_text(files[name], encoding="utf-8")
            try:
                tokenizer = load_tokenizer(folder, "what /tokenizer gives")
                if protocol.TEMPLATES in files:  # of a tokenizer with several, by name
                    tokenizer.chat_template = templates = json.loads(files[protocol.TEMPLATES])
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
        most = 4 * self.vocabulary * (self._width + 1) + protocol.HEADER_BYTES
        answer = self._checked(self.connection.get("/head", most=most))
        try:
            tensors, about = protocol.read_body(answer.content, safetensors.torch.load)
            return read_head(tensors, about, width, self._width)
        except ValueError as error:
            raise self.connection.error(f"its head is wrong: {error}; no step was taken with it") from error

    def score(self, form: SignalKind, examples: Sequence[Example], given: Given | None = None) -> Signal:
        question = protocol.Question(form, examples, given)
        body = protocol.write_question(question)
        large = len(body) > self._most_bytes or question.answer_bytes > self._most_answer
        if large and len(examples) > 1:
            middle = len(examples) // 2
            halves = [
                self.score(form, examples[part], None if given is None else given[part])
                for part in (slice(middle), slice(middle, None))
            ]
            return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
        answer = self._checked(self.connection.post("/score", body, most=question.answer_bytes + protocol.HEADER_BYTES))
        try:
            return protocol.read_answer(answer.content, form, sum(example.supervised_tokens for example in examples))
        except ValueError as error:
            raise self.connection.error(f"its answer is wrong: {error}; no step was taken with it") from error

    def _checked(self, answer: Answer) -> Answer:
        """An answer of the same teacher as at the start."""
        known = asdict(self.identity)
        for part, header in protocol.HEADERS.items():
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
    return found if found.get("service") == protocol.SERVICE else None


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
