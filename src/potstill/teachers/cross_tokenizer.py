"""Teachers with another tokenizer than the student's: they read the same text in their own tokens, and answer at chunks that
cover the same bytes. Alignment happens on the prefetch thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.cache.codec import Document, Format
from potstill.cache.reader import SignalSource
from potstill.cache.reading import TeacherText, piece_of
from potstill.cache.scored import Chosen, Documents, Scored, read_hidden, read_token_logprobs, read_top_k
from potstill.config import CrossTokenizerConfig, LossConfig
from potstill.config.sections import fixed_value
from potstill.data import Piece, collate
from potstill.losses import label_logprobs
from potstill.models import LanguageModel
from potstill.teachers.prefix_marginal import Spelled, Speller, spell_rows
from potstill.teachers.tokenizer_pair import Aligned, TokenizerPair, align_rows
from potstill.text.chat import ChatRenderer
from potstill.types import Batch, CrossTarget, DenseTarget, Example, PotstillError, Target, TopKTarget


class Rereader:
    """Examples of the student's as the teacher reads them. `prompt`: the column with what it reads first, and the student
    does not."""

    def __init__(
        self, tokenizer: Any, positions: int | None, kwargs: Mapping[str, Any], prompt: str | None = None
    ) -> None:
        self._text = TeacherText(tokenizer, positions)
        self._tokenizer, self._kwargs, self._prompt = tokenizer, kwargs, prompt
        self._renderer: ChatRenderer | None = None

    def __call__(self, examples: Sequence[Example]) -> list[Example]:
        read = self._text([self.piece(example) for example in examples])
        return [_NOTHING if example is None else example for example in read]

    def piece(self, example: Example) -> Piece:
        piece, prompt = piece_of(example), None if self._prompt is None else example.columns[self._prompt]
        if example.messages is not None:
            return self._conversation(piece, example, prompt)
        if prompt is None:
            return piece
        # In place of the prompt that the student reads, where there is one.
        begin = 0 if example.spans is None else example.spans[0][0]
        text = prompt + example.text[begin:]
        return replace(piece, text=text, spans=((len(prompt), len(text)),))

    def _conversation(self, piece: Piece, example: Example, prompt: str | None) -> Piece:
        assert example.messages is not None
        messages = list(example.messages)
        if prompt is not None:
            others = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": prompt}, *others]
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._kwargs, "teachers")
        try:
            rendered = self._renderer.render(messages, example.tools, example.source)
        except PotstillError:
            if example.writer is None:
                raise
            return replace(piece, text="", dropped=True)  # the student may write what no template can show
        # Of a conversation whose last turn was written, only that turn is learnt.
        spans = rendered[0].spans if example.writer is None else rendered[0].spans[-1:]
        return replace(piece, text=rendered[0].text, spans=spans)


_NOTHING = Example("", "", np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_), 0)


@dataclass(frozen=True)
class Found:
    """A batch aligned, and what is said of it."""

    found: Aligned | Spelled

    @property
    def counts(self) -> Mapping[str, int]:
        return self.found.counts

    @property
    def known(self) -> npt.NDArray[np.bool_] | None:
        return self.found.known


@dataclass(frozen=True)
class Asked(Found):
    """A teacher's own batch, and the positions in it that predict what is asked for: those of `prefix_marginal`, or the
    chunks' first tokens and then their others."""

    batch: Batch
    positions: Tensor  # int64


class AlignedTeacher:
    """A frozen model with another tokenizer than the student's, or with another text to read before the same one."""

    ahead = 1

    def __init__(
        self,
        language_model: LanguageModel,
        pairing: TokenizerPair,
        name: str,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        kwargs: Mapping[str, Any] | None = None,
        prompt: str | None = None,
    ) -> None:
        self.language_model = language_model
        self.name = name
        self.weight = weight
        self._pairing, self._speller = pairing.opened(), Speller(pairing)
        self._temperature = temperature
        self._reread = Rereader(language_model.tokenizer, language_model.positions, kwargs or {}, prompt)

    def missing(self, batch: Batch) -> Sequence[int]:
        return ()

    def prepare(self, batch: Batch) -> Asked:
        read = self._reread(batch.examples)
        theirs = collate([[example] for example in read], pad_id=0)
        width = theirs.input_ids.shape[1]
        found: Aligned | Spelled
        if self._pairing.cross_tokenizer.method == "prefix_marginal":
            found = spell_rows(self._pairing, batch, read)
            positions = found.document * width + found.place - 1
        else:
            found = align_rows(self._pairing, batch, read)
            first = found.document * width + found.begin - 1
            inner = found.document[found.inner_owner] * width + found.inner - 1
            positions = np.concatenate([first, inner])
        return Asked(found, theirs, torch.from_numpy(positions))

    def complete(self, batch: Batch, prepared: Asked) -> Asked:
        return prepared

    @torch.no_grad()
    def targets(self, batch: Batch, prepared: Asked) -> Target:
        device, found = batch.input_ids.device, prepared.found
        hidden = self.language_model.hidden(prepared.batch.to(device), prepared.positions.to(device))
        head = self.language_model.at_rows(hidden, len(self._pairing.teacher))
        if isinstance(found, Spelled):
            return self._speller.dense(found, head, device, self._temperature)
        at_first, at_inner = (replace(head, hidden=h) for h in hidden.split([len(found.begin), len(found.inner)]))
        return cross_target(self._pairing, found, at_first, at_inner, device, self._temperature)

    def close(self) -> None:
        """It keeps nothing."""


@dataclass(frozen=True)
class Decoded(Found):
    """A batch with what a cache holds about it, on the host."""

    hidden: Tensor | None = None  # of kind hidden, in the order of `Asked.positions`
    start: TopKTarget | None = None  # of kind top_k: at the chunks' first tokens, or, spelled, at the rows
    logprob: Tensor | None = None  # [C]
    inner: Tensor | None = None  # [C]


class AlignedCached:
    """A teacher on disk or behind a server, with another tokenizer than the student's."""

    def __init__(
        self, source: SignalSource, pairing: TokenizerPair, name: str, weight: float = 1.0, *, temperature: float = 1.0
    ) -> None:
        self.name = name
        self.weight = weight
        self.source = source
        self.form = source.form
        self.ahead = source.ahead
        self._pairing, self._speller = pairing.opened(), Speller(pairing)
        self._temperature = temperature

    def missing(self, batch: Batch) -> Sequence[int]:
        return self.source.missing(batch)

    def prepare(self, batch: Batch) -> Decoded | None:
        """None when some of it is still to be computed."""
        documents = self.source.documents(batch.examples)
        if documents is None:
            return None
        read = [_as_read(d, example) for d, example in zip(documents, batch.examples, strict=True)]
        if self._pairing.cross_tokenizer.method == "prefix_marginal":
            return self._spelled(spell_rows(self._pairing, batch, read), documents)
        found = align_rows(self._pairing, batch, read)
        first = _chosen(documents, found.document, found.begin)
        inner = _chosen(documents, found.document[found.inner_owner], found.inner)
        if self.form.kind == "hidden":
            return Decoded(found, hidden=torch.cat([read_hidden(first), read_hidden(inner)]))
        start = None
        logprob = torch.from_numpy(read_token_logprobs(first))
        if self._pairing.cross_tokenizer.method != "span_likelihood":
            ids, logprobs, tail = map(torch.from_numpy, read_top_k(first, self._temperature))
            start = TopKTarget(ids.long(), logprobs, tail)
            logprob = _agreeing(start, torch.from_numpy(found.token), logprob)
        owner = torch.from_numpy(found.inner_owner)
        sums = torch.zeros(len(logprob)).index_add_(0, owner, torch.from_numpy(read_token_logprobs(inner)))
        return Decoded(found, start=start, logprob=logprob, inner=sums)

    def _spelled(self, found: Spelled, documents: Documents) -> Decoded:
        rows = _chosen(documents, found.document, found.place)
        if self.form.kind == "hidden":
            return Decoded(found, hidden=read_hidden(rows))
        if not len(found.token):
            return Decoded(found)
        start, known = self._speller.top_k(found, *read_top_k(rows, self._temperature), read_token_logprobs(rows))
        heard = known if found.known is None else known & found.known
        return Decoded(replace(found, known=None if heard.all() else heard), start=start)

    def complete(self, batch: Batch, prepared: Decoded | None) -> Decoded | None:
        if prepared is None:
            self.source.compute(batch.examples)
            prepared = self.prepare(batch)
        return prepared

    @torch.no_grad()
    def targets(self, batch: Batch, prepared: Decoded | None) -> Target:
        prepared = self.complete(batch, prepared)
        assert prepared is not None
        device, found = batch.input_ids.device, prepared.found
        if prepared.hidden is not None:
            head = replace(
                self.source.head(device, len(self._pairing.teacher)),
                hidden=prepared.hidden.to(device, non_blocking=True),
            )
            if isinstance(found, Spelled):
                return self._speller.dense(found, head, device, self._temperature)
            assert head.hidden is not None
            parts = head.hidden.split([len(found.begin), len(found.inner)])
            at_first, at_inner = (replace(head, hidden=h) for h in parts)
            return cross_target(self._pairing, found, at_first, at_inner, device, self._temperature)
        start = None if prepared.start is None else prepared.start.to(device)
        if isinstance(found, Spelled):
            assert start is not None
            return start
        assert prepared.logprob is not None and prepared.inner is not None
        return CrossTarget(
            self._pairing.cross_tokenizer.method,
            found.chunks.to(device),
            self._pairing.relation(device),
            start,
            torch.from_numpy(found.token).to(device),
            prepared.logprob.to(device),
            prepared.inner.to(device),
            self._pairing.cross_tokenizer.chunk_temperature,
        )

    def close(self) -> None:
        self.source.close()


def _as_read(document: Document | Scored, example: Example) -> Example:
    """A document as the teacher read it."""
    if isinstance(document, Scored):
        return document.read
    return replace(example, ids=document.tokens.astype(np.int32), supervised=document.predicted, ends=None)


def _chosen(documents: Documents, owner: Any, place: Any) -> Chosen:
    """Of each document the rows that predict the tokens at `place`; `owner`: whose they are, in order."""
    bounds = np.searchsorted(owner, np.arange(len(documents) + 1))
    chosen: list[tuple[Document | Scored, npt.NDArray[np.int64]]] = []
    for i, document in enumerate(documents):
        at = place[bounds[i] : bounds[i + 1]]
        if not document.predicted[at].all():
            raise PotstillError("the cache does not hold all of a document's supervised tokens: build it anew")
        chosen.append((document, np.cumsum(document.predicted)[at] - 1))
    return chosen


def _agreeing(start: TopKTarget, token: Tensor, logprob: Tensor) -> Tensor:
    """The first tokens' log-probabilities, as the entries have them, or no larger than the rest that they are part of: the two
    were rounded apart, and masses must sum to one."""
    own = start.ids == token[:, None]
    entry = start.logprobs.masked_fill(~own, -torch.inf).amax(-1)
    return torch.where(own.any(-1), entry, torch.minimum(logprob, start.tail))


def cross_target(
    pairing: TokenizerPair,
    found: Aligned,
    at_first: DenseTarget,
    at_inner: DenseTarget,
    device: torch.device,
    temperature: float,
) -> CrossTarget:
    """The target of a teacher that is there with its head."""
    method, chunks = pairing.cross_tokenizer.method, found.chunks
    token = torch.from_numpy(found.token).to(device)
    inner_token, owner = (torch.from_numpy(x).to(device) for x in (found.inner_token, found.inner_owner))
    logprobs = label_logprobs(at_inner, inner_token, temperature)
    inner = logprobs.new_zeros(len(token)).index_add_(0, owner, logprobs)
    return CrossTarget(
        method,
        chunks.to(device),
        pairing.relation(device),
        None if method == "span_likelihood" else at_first,
        token,
        label_logprobs(at_first, token, temperature) if method == "span_likelihood" else torch.zeros_like(inner),
        inner,
        pairing.cross_tokenizer.chunk_temperature,
    )


def check_cross_tokenizer(
    cross_tokenizer: CrossTokenizerConfig, loss: LossConfig, where: str, form: Format | None = None
) -> float:
    """The loss's temperature, where a teacher with another tokenizer can serve it. `form`: of its cache."""
    if loss.policy_gradient:
        raise PotstillError(
            f"{where}: loss.divergence: policy_gradient_kl needs a teacher that reads the student's own tokens, and this one "
            "has another tokenizer or a prompt of its own: use cross_tokenizer.method: span_likelihood with another "
            "divergence"
        )
    temperature = fixed_value(loss.temperature)
    one = cross_tokenizer.method == "span_likelihood" or (form is not None and form.kind != "hidden")
    if temperature is None or (one and temperature != 1.0):
        what = "moves over the run" if temperature is None else f"is {temperature:g}"
        why = (
            "the likelihood of a chunk of tokens is at one temperature"
            if temperature is None
            else "the method chunk compares likelihoods of text, which are at 1"
            if cross_tokenizer.method == "span_likelihood"
            else "the cache has the likelihoods of tokens at 1 only (one of kind hidden serves any temperature)"
        )
        raise PotstillError(f"{where}: the teacher has another tokenizer and loss.temperature {what}; {why}")
    if form is not None and (
        form.kind == "sampled" or (form.kind == "token_logprobs" and cross_tokenizer.method != "span_likelihood")
    ):
        what, how = (
            ("draws of the teacher's own tokens, which say nothing about chunks", "")
            if form.kind == "sampled"
            else (
                "only how likely the text's own tokens were",
                ", or learn from it with cross_tokenizer.method: span_likelihood",
            )
        )
        raise PotstillError(
            f"{where}: the teacher has another tokenizer, and the cache holds {what}: build one of kind top_k or hidden{how}"
        )
    if (
        form is not None
        and form.kind == "top_k"
        and cross_tokenizer.method != "span_likelihood"
        and 1.0 not in form.temperatures
    ):
        known = ", ".join(f"{t:g}" for t in form.temperatures)
        raise PotstillError(
            f"{where}: the cache knows the mass of what it left out at {known} only, and a teacher with another tokenizer is "
            "read at 1: build one with --temperature 1, or of kind hidden"
        )
    return temperature
