"""The method `prefix_marginal`: at each of the student's rows, the teacher's next token as a distribution over the student's.

A row is answered by the last of the teacher's tokens that begins at or before it. Where the row begins inside that token, only
the teacher's tokens that begin with the bytes written since take part. N rows, U teacher tokens in chunks, K kept entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potstill.losses import label_logprobs
from potstill.teachers.protocols import NONE, Asked, Ints, Plan, Signal, flat_places
from potstill.teachers.tokenizer_pair import TokenizerPair, aligned_chunks, expanded
from potstill.text import TokenTable
from potstill.text.tokens import BYTE, TEXT
from potstill.transfer import to_device
from potstill.types import (
    Batch,
    Example,
    HiddenTarget,
    LogitsTarget,
    PrefixMarginalTarget,
    SampledTarget,
    Target,
    TopKTarget,
)

Floats = npt.NDArray[np.float32]


class PrefixMarginalView:
    """Every row of a chunk is answered, also one that begins inside a token of the teacher's."""

    def __init__(self, pair: TokenizerPair, temperature: float = 1.0) -> None:
        self.pair, self.temperature = pair, temperature
        self.table = pair.prefix_table

    def plan(self, batch: Batch, read: Sequence[Example]) -> PrefixMarginalPlan:
        pair, kept = self.pair, aligned_chunks(self.pair, batch, read)
        (s0, s1), (t0, t1) = kept.student, kept.teacher
        ours, step = expanded(s1 - s0)
        theirs, their_step = expanded(t1 - t0)
        rows = kept.first[ours] + step
        labels = np.concatenate([NONE, *(example.ids[example.supervised] for example in batch.examples)])
        asked = Asked.of(read, kept.document[theirs], t0[theirs] + their_step, token_logprobs=True)
        token = asked.token
        # A prefix that a tokenizer made up has no bytes.
        our_places = flat_places(batch.examples, kept.document[ours], s0[ours] + step)
        their_places = flat_places(read, asked.document, asked.place)
        our_dummy = _dummies(pair.student, [e.ids for e in batch.examples])[our_places]
        their_dummy = _dummies(pair.teacher, [e.ids for e in read])[their_places]
        own, their_own = _lengths(pair.student, labels[rows]), _lengths(pair.teacher, token)
        lengths, their_lengths = own - our_dummy, their_own - their_dummy
        begins, size = _begins(lengths, ours, s0)
        their_begins, their_size = _begins(their_lengths, theirs, s0)
        # A stretch of its own for each chunk, also where it has no bytes.
        base = np.cumsum(size + their_size + 1) - size - their_size
        key, their_key = base[ours] + begins, base[theirs] + their_begins
        answer = np.searchsorted(their_key, key, side="right") - 1
        last = np.searchsorted(their_key, key + lengths, side="left") - 1
        # Where both have made up a prefix, it is part of both tokens.
        both = our_dummy & their_dummy[answer] & (key == their_key[answer])
        written = np.where(both, 0, key - their_key[answer] + their_dummy[answer])
        # Nothing is left of the token; or every alternative would begin with a prefix of the student's that has no bytes; or
        # the token began within one of the student's, so that how others would be cut there is not known; or the sizes do not
        # agree after all.
        begun = key[np.searchsorted(key, their_key[answer])] == their_key[answer]
        fits = (
            ((written == 0) | (written < their_own[answer])) & (both | ~our_dummy) & begun & (size == their_size)[ours]
        )
        node, usual = self.table.at(token[answer], np.where(fits, written, 0))
        beyond_owner, beyond_step = expanded(np.maximum(last - answer, 0) * fits)
        known = np.zeros(len(labels), dtype=np.bool_)
        known[rows] = fits
        filled = [np.zeros(len(labels), dtype=np.int64) for _ in range(3)]
        for out, values in zip(filled, (answer, node, usual), strict=True):
            out[rows[fits]] = values[fits]
        return PrefixMarginalPlan(
            asked=[asked],
            known=None if len(known) and known.all() else known,
            counts=kept.counts,
            view=self,
            answer=np.maximum.accumulate(filled[0]),
            node=filled[1],
            usual=np.where(known, filled[2], -1),
            own=labels,
            beyond_row=rows[beyond_owner],
            beyond=answer[beyond_owner] + 1 + beyond_step,
        )


@dataclass(frozen=True, kw_only=True)
class PrefixMarginalPlan(Plan):
    """The rows of a batch, each with the teacher's token that answers it. Asked about: all teacher tokens in chunks [U]."""

    view: PrefixMarginalView
    answer: Ints  # [N], never falling; which of the U answers a row
    node: Ints  # [N]; what is written of it
    usual: Ints  # [N]; what of the student's it would be counted for
    own: Ints  # [N]; what the student wrote
    beyond_row: Ints  # rows whose token goes on into the teacher's further tokens …
    beyond: Ints  # … and those, of the U
    entries: TopKTarget | None = None  # on the host: all that a truncated teacher says

    @property
    def token(self) -> Ints:
        return self.asked[0].token

    def prepared(self, signals: Sequence[Signal]) -> PrefixMarginalPlan:
        if not signals or not isinstance(signals[0].target, TopKTarget) or not len(self.token):
            return self
        assert signals[0].token_logprobs is not None
        target, logprobs = signals[0].target, signals[0].token_logprobs
        entries, told = self.top_k(*(x.numpy() for x in (target.ids, target.logprobs, target.tail, logprobs)))
        known = told if self.known is None else told & self.known
        return replace(self, entries=entries, known=None if known.all() else known)

    def target(self, signals: Sequence[Signal], device: torch.device) -> Target:
        if self.entries is not None:
            return self.entries.to(device)
        source = signals[0].target
        assert source is not None and not isinstance(source, TopKTarget | SampledTarget)
        return self.dense(source, device)

    def dense(self, source: HiddenTarget | LogitsTarget, device: torch.device) -> PrefixMarginalTarget:
        """The target of a teacher that is there with its head, at the U places."""

        def moved(array: Ints) -> Tensor:
            return to_device(array, device)

        odd = self.usual != self.own
        odd[self.beyond_row] = True
        beyond = torch.zeros(len(self.own), device=device)
        if len(self.beyond):
            further, token = source.select(moved(self.beyond)), moved(self.token[self.beyond])
            logprobs = label_logprobs(further, token, self.view.temperature).float()
            beyond.index_add_(0, moved(self.beyond_row), logprobs)
        return PrefixMarginalTarget(
            source=source,
            table=self.view.table.on(device),
            place=moved(self.answer),
            node=moved(self.node),
            actual=moved(self.token[self.answer]),
            usual=moved(self.usual),
            own=moved(self.own),
            beyond=beyond,
            place_host=self.answer,
            node_host=self.node,
            odd_host=odd,
        )

    def top_k(
        self, ids: Ints, logprobs: Floats, tail: Floats, chosen: Floats
    ) -> tuple[TopKTarget, npt.NDArray[np.bool_]]:
        """The target of a truncated teacher, given at the U places: its entries [U, K], the log-mass of the rest, and the
        log-probabilities of the tokens that were there. On the host. And the rows of which something is known."""
        table = self.view.table
        beyond = np.zeros(len(self.own), dtype=np.float64)
        np.add.at(beyond, self.beyond_row, chosen[self.beyond])
        tokens, actual = ids[self.answer], self.token[self.answer]
        mass, rest = np.exp(logprobs[self.answer].astype(np.float64)), np.exp(tail[self.answer].astype(np.float64))
        written = table.depth[self.node][:, None]  # bytes of the answering token: what its node says
        node, then = table.at(tokens, np.minimum(written, np.maximum(table.lengths[tokens] - 1, 0)))
        fits = (node == self.node[:, None]) & ((written < table.lengths[tokens]) | (written == 0))
        mass = np.where(fits, mass, 0.0)
        is_actual = tokens == actual[:, None]
        listed = is_actual.any(-1)
        # What was written is taken from its entry, or from the rest that it is part of; what of it would have left the
        # student's token stays where it is usual.
        unlisted = np.minimum(np.exp(chosen[self.answer].astype(np.float64)), rest)
        whole = np.where(listed, (mass * is_actual).sum(-1), unlisted)
        certain = whole * np.exp(beyond)
        rest = np.maximum(rest - np.where(listed, 0.0, whole), 0.0)
        students = np.concatenate([then, self.own[:, None], self.usual[:, None]], -1)
        left = np.where(listed, 0.0, whole - certain) * (self.usual >= 0)
        mass = np.maximum(mass - is_actual * certain[:, None], 0.0) * (then >= 0)
        mass = np.concatenate([mass, certain[:, None], left[:, None]], -1)
        # What the student has no word for leaves; inside a token it is not known how much of the rest begins so: as much as of
        # the entries.
        total = np.maximum(mass.sum(-1), 1e-300)
        rest = np.where(self.node > 0, rest, rest / (total + rest))
        mass *= ((1 - rest) / total)[:, None]
        return _merged(students, mass, rest, table.students), certain > 0


def _dummies(table: TokenTable, sequences: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Which tokens of all sequences, one after the other, hold a made-up prefix."""
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(np.minimum(ids, len(table) - 1) for ids in sequences)])
    return table.dummies(flat.astype(np.int64), np.cumsum([0, *map(len, sequences)])[:-1])


def _lengths(table: TokenTable, ids: Ints) -> Ints:
    inside = np.minimum(ids, len(table) - 1)
    text = np.isin(table.kinds[inside], (TEXT, BYTE)) & (ids < len(table))
    return np.where(text, table.lengths[inside], 0).astype(np.int64)


def _begins(lengths: Ints, owner: Ints, chunks: Ints) -> tuple[Ints, Ints]:
    """Where tokens begin in their chunks, and the chunks' sizes, in bytes."""
    size = np.bincount(owner, lengths, len(chunks)).astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return before - (np.cumsum(size) - size)[owner], size


def _merged(ids: Ints, mass: npt.NDArray[np.float64], rest: npt.NDArray[np.float64], students: int) -> TopKTarget:
    """Entries with one id as one, and those without mass as absent."""
    ids = np.where(mass > 0, ids, students)
    order = np.argsort(ids, axis=1, kind="stable")
    ids, mass = np.take_along_axis(ids, order, 1), np.take_along_axis(mass, order, 1)
    new = np.ones(ids.shape, dtype=np.bool_)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    run = np.cumsum(new.ravel()) - 1
    sums = np.bincount(run, mass.ravel())[run].reshape(ids.shape)
    absent = ~new | (ids == students)
    with np.errstate(divide="ignore"):
        logprobs = np.where(absent, -np.inf, np.log(sums))
        tail = np.log(rest)
    ids = np.where(absent, np.minimum(ids[:, :1], students - 1), ids)  # the first one is there, if any is
    return TopKTarget(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(logprobs.astype(np.float32)),
        torch.from_numpy(tail.astype(np.float32)),
        width=students,
        absent=torch.from_numpy(absent),
    )
