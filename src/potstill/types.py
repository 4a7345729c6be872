"""What flows through potstill: Example → Batch → Rows + Target → loss. Of ours it
imports errors, how matrices are multiplied and how tensors reach a device, nothing else.

Shapes: B rows of a batch, L positions, N loss rows, V vocabulary, H hidden width, K entries of a truncated target.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from potstill.errors import PotstillError as PotstillError
from potstill.products import wide_product
from potstill.transfer import to_device

Ints = npt.NDArray[np.int64]


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _no_mask() -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True)
class Example:
    """One text and what is supervised in it; once it is tokenized, in the student's tokens too.

    The raw text stays beside the student's ids because a teacher with another tokenizer reads the text, not the ids.
    """

    key: str  # stable hash of the text, or of the canonical JSON of the messages before any chat template
    # As the student's tokenizer reads it (for a chat: as its template rendered it); "": nothing to learn from
    text: str
    ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)  # [L]; empty until it is tokenized
    # [L]; token i is to be predicted. Token 0 never is: nothing comes before it
    supervised: npt.NDArray[np.bool_] = field(default_factory=_no_mask)
    supervised_bytes: int = 0  # UTF-8 bytes of `text` that the supervised tokens stand for
    weights: npt.NDArray[np.float32] | None = None  # [L]; what each supervised token counts in the loss; None: 1
    answers: npt.NDArray[np.bool_] | None = None  # [L]; `supervised` before tokens of weight 0 left it; None: none did
    messages: Sequence[Mapping[str, Any]] | None = None  # the conversation, for a teacher with its own template
    tools: Sequence[Any] | None = None  # that were offered in it
    turns: tuple[int, ...] | None = None  # the messages whose `spans` these are; None: every assistant turn
    spans: tuple[tuple[int, int], ...] | None = None  # characters of `text` that are supervised; None: all
    ends: npt.NDArray[np.int64] | None = None  # [L]; where each token ends in `text`, in bytes, when asked for
    columns: Mapping[str, str] = field(default_factory=dict)  # of its record, that teachers ask for
    source: str = ""  # where it came from, for error messages: file and record
    first: bool = True  # of its record's examples
    last: bool = True  # of its text's pieces: eos may follow
    split: bool = False  # part of a conversation whose template rewrites earlier turns
    writer: str | None = None  # "student" or "teacher", who wrote the supervised part; None: it is the data set's
    behaviour: npt.NDArray[np.float32] | None = None  # [L]; log-probability each was sampled with; 0 in the prompt
    version: int | None = None  # optimizer steps of the student that wrote it
    advantage: float | None = None  # of an answer with a reward: what it is worth among the answers to its prompt

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised.sum())


@dataclass(frozen=True)
class Rows:
    """The positions that enter the loss, flat over the batch. Shifting by one and masking happen when these are made."""

    student: Tensor  # int64 [N]; flat position (of B·L) whose hidden state predicts
    teacher: Tensor  # int64 [N]; flat teacher position that answers
    labels: Tensor  # int64 [N]; the token that comes next
    # [N]; log-probability with which the student wrote that token; NaN: it did not write it. None: it wrote none of them
    behaviour: Tensor | None = None
    weight: Tensor | None = None  # float32 [N]; what each counts in the loss; None: 1
    advantage: Tensor | None = None  # float32 [N]; of the answers they stand in, by their rewards; None: there are none

    def to(self, device: torch.device) -> Rows:
        return _moved(self, device)

    def __len__(self) -> int:
        return self.student.shape[0]


@dataclass(frozen=True)
class Batch:
    """A micro-batch: documents packed or padded into B rows of L positions, and the rows of the loss over them."""

    input_ids: Tensor  # int64 [B, L]
    position_ids: Tensor  # int64 [B, L]; restarts at 0 with every document
    document: Tensor  # int32 [B, L]; 0 is padding, equal numbers in a row may attend to each other
    packed: bool  # some row holds more than one document
    rows: Rows
    supervised_tokens: int  # on the host: the step's divisor is summed without touching a device
    examples: tuple[Example, ...]
    lengths: tuple[int, ...] = ()  # packed: of documents and runs of padding, in their order; (): `document` says it
    bounds: Tensor | None = None  # int32 [S + 1]; … where each begins, flat over the batch, and where the last one ends

    def to(self, device: torch.device) -> Batch:
        return _moved(self, device)


@dataclass(frozen=True)
class Head:
    """A model's output head, a teacher's or the student's: logits are softcap(logit_scale · (hidden · weightᵀ + bias))."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0
    group: dist.ProcessGroup | None = None  # the ranks that share its ids, each holding a slice, in the ranks' order

    @property
    def width(self) -> int:
        """How many ids it is over, on this rank."""
        return self.weight.shape[0]

    def to(self, device: torch.device) -> Head:
        return _moved(self, device)

    def narrow(self, start: int, width: int) -> Head:
        """The same head over some of its ids; views, no copies."""
        start = min(start, self.width)
        bias = None if self.bias is None else self.bias.narrow(0, start, width)
        return replace(self, weight=self.weight.narrow(0, start, width), bias=bias)

    def check(self, hidden: Tensor, whose: str = "") -> None:
        """ValueError: what does not fit hidden states [N, H]."""
        weight = self.weight
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            shapes = f"{whose}hidden {list(hidden.shape)} and weight {list(weight.shape)}"
            raise ValueError(f"{shapes} must be [N, H] and [V, H]")
        if not (hidden.is_floating_point() and weight.is_floating_point()):
            raise ValueError(f"{whose}hidden and weight must be floating point, not {hidden.dtype} and {weight.dtype}")
        if self.bias is not None:
            expect(f"{whose}bias", self.bias, self.width)
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"{whose}softcap must be above 0, not {self.softcap}")

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """In float32 at least."""
        logits = wide_product(hidden, self.weight.to(hidden.dtype).t(), out)
        if self.bias is not None:
            logits += self.bias
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@dataclass(frozen=True)
class Target:
    """What a teacher says at N rows: each kind is one of the classes below. Its tensors have a row in each entry of their first
    dimension; what belongs to all rows (a head, a table) is an object of its own."""

    dense: ClassVar[bool] = False  # it is a distribution over all ids, and has a `width`

    def to(self, device: torch.device) -> Self:
        return _moved(self, device)

    def select(self, rows: Tensor | Ints) -> Self:
        """The same at other rows, outside autograd. `rows` are on the host, or where the target is."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        tensors = {name: x.detach() for name, x in parts.items() if isinstance(x, Tensor)}
        at = to_device(rows, next(iter(tensors.values())).device)
        return replace(self, **{name: x[at] for name, x in tensors.items()})

    def spread(self, rows: Ints, count: int) -> Self:
        """A target of `rows` as one of `count` rows. The others repeat what comes before them: give them no weight."""
        return self.select(np.maximum(np.searchsorted(rows, np.arange(count), side="right") - 1, 0))

    def check(self, call: TargetCheck) -> None:
        """ValueError: what of it does not fit the call, from shapes and types alone."""
        raise NotImplementedError

    def not_finite(self) -> str | None:
        """What of it is NaN or infinite, in words ("logits are"); None: nothing. Reads all of its values."""
        return _not_finite(self)


@dataclass(frozen=True)
class TargetCheck:
    """What a target has to fit."""

    rows: int
    ids: int | None  # of the student; None: each rank has some of them, and they are compared later
    divergence: str
    temperature: float
    labels: bool  # there are labels

    def width(self, width: int) -> None:
        if self.ids is not None and width > self.ids:
            refuse_wide(width, self.ids)


def refuse_wide(width: int, ids: int) -> NoReturn:
    raise ValueError(f"the teacher has {width} ids and the student's head {ids}: narrow the teacher to the shared ids")


def expect(name: str, tensor: Tensor, *shape: int | str, integer: bool = False) -> None:
    """A ValueError unless the tensor has this shape (a letter: any size above 0) and is floating point, or int64."""
    fits = tensor.dim() == len(shape) and all(
        size > 0 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or (tensor.dtype != torch.int64 if integer else not tensor.is_floating_point()):
        wanted = f"[{', '.join(map(str, shape))}] of {'torch.int64' if integer else 'floating point'}"
        least = "".join(f", with {size} at least 1" for size in shape if isinstance(size, str))
        raise ValueError(f"{name} {list(tensor.shape)} of {tensor.dtype} must be {wanted}{least}")


@dataclass(frozen=True)
class HiddenTarget(Target):
    """The teacher's hidden states and its output head: the loss multiplies them chunk by chunk."""

    hidden: Tensor  # [N, H]
    head: Head
    dense = True

    @property
    def width(self) -> int:
        return self.head.width

    def narrow(self, start: int, width: int) -> HiddenTarget:
        return replace(self, head=self.head.narrow(start, width))

    def check(self, call: TargetCheck) -> None:
        self.head.check(self.hidden, "the teacher's ")
        expect("the teacher's hidden", self.hidden, call.rows, self.hidden.shape[1])
        call.width(self.width)


@dataclass(frozen=True)
class LogitsTarget(Target):
    """The teacher's logits, ready."""

    logits: Tensor  # [N, V]
    dense = True

    @property
    def width(self) -> int:
        return self.logits.shape[-1]

    def narrow(self, start: int, width: int) -> LogitsTarget:
        return replace(self, logits=self.logits.narrow(-1, min(start, self.width), width))

    def check(self, call: TargetCheck) -> None:
        expect("the teacher's logits", self.logits, call.rows, self.width)
        call.width(self.width)


@dataclass(frozen=True)
class MeanTarget(Target):
    """The mean of several teachers' distributions, each a dense target."""

    shares: tuple[float, ...]  # above 0; they sum to one
    parts: tuple[Dense, ...]
    dense = True

    @property
    def width(self) -> int:
        return self.parts[0].width

    def to(self, device: torch.device) -> MeanTarget:
        return replace(self, parts=tuple(part.to(device) for part in self.parts))

    def select(self, rows: Tensor | Ints) -> MeanTarget:
        return replace(self, parts=tuple(part.select(rows) for part in self.parts))

    def narrow(self, start: int, width: int) -> MeanTarget:
        return replace(self, parts=tuple(part.narrow(start, width) for part in self.parts))

    def check(self, call: TargetCheck) -> None:
        total, widths = sum(self.shares), {part.width for part in self.parts}
        if abs(total - 1) > 1e-6 or min(self.shares) <= 0 or len(widths) > 1:
            raise ValueError(
                f"the distributions of a mean must have shares above 0 that sum to 1, not to {total:g}, and be over as many "
                f"ids, not over {sorted(widths)}"
            )
        for part in self.parts:
            part.check(call)

    def not_finite(self) -> str | None:
        return next(filter(None, (part.not_finite() for part in self.parts)), None)


@dataclass(frozen=True)
class PrefixTable:
    """Which of the student's tokens comes first in what is left of a teacher's token once some of its bytes are written
    (`text.prefix_table` makes it). A *node* is what has been written of a teacher's next token; node 0 is nothing.
    E entries: teacher ids that begin as a node says and go on. −1 stands for no token, as of a special the student lacks."""

    students: int  # ids of the student
    first: Ints  # [teacher ids]; the student's first token of each
    whole: npt.NDArray[np.bool_]  # [teacher ids]; that token is all of it
    main: Ints  # [students]; the teacher id that counts for each, its partner if it has one; −1: none does
    more_token: Ints  # [M]; the other teacher ids, in the order of …
    more_then: Ints  # [M]; … what they count for …
    more_slot: Ints  # [M]; … which of these it is:
    several: Ints  # [S]; the student's ids that more than one counts for
    nowhere: Ints  # those that none does
    begin: Ints  # [nodes + 1]; the entries of each node
    token: Ints  # [E]; teacher id
    then: Ints  # [E]; student id
    base: Ints  # [teacher ids + 1]; where an id's own places are below: one for each of its bytes but the first
    node_at: Ints  # [places]; what is written when so many bytes of it are
    then_at: Ints  # [places]; what comes next of the student's
    depth: Ints  # [nodes]; bytes of each
    lengths: Ints  # [teacher ids]; bytes of each, 0 of specials
    # No plain dict: FSDP looks for tensors in all that a module is called with, and would go round and round.
    _on: UserDict[torch.device, PrefixTensors] = field(default_factory=UserDict, repr=False, compare=False)

    def on(self, device: torch.device) -> PrefixTensors:
        """What the loss needs of it on a device; made once for each."""
        if device not in self._on:
            names = [part.name for part in fields(PrefixTensors) if part.name != "host"]
            tensors = {name: to_device(getattr(self, name), device) for name in names}
            self._on[device] = PrefixTensors(**tensors, host=self)
        return self._on[device]

    def at(self, token: Ints, written: Ints) -> tuple[Ints, Ints]:
        """Node, and the student's next token, when so many bytes of each token are written; fewer than it has."""
        place = np.minimum(self.base[token] + written - 1, max(0, len(self.node_at) - 1))
        if not len(self.node_at):
            return np.zeros_like(token), self.first[token]
        begun = written > 0
        return np.where(begun, self.node_at[place], 0), np.where(begun, self.then_at[place], self.first[token])


@dataclass(frozen=True)
class PrefixTensors:
    """A PrefixTable on a device, for the loss."""

    main: Tensor
    more_token: Tensor
    more_slot: Tensor
    several: Tensor
    nowhere: Tensor
    whole: Tensor
    begin: Tensor
    token: Tensor
    then: Tensor
    host: PrefixTable  # the table itself: parts of it are cut, and sizes known, without waiting for the device

    def to(self, device: torch.device) -> PrefixTensors:
        return self.host.on(device)


@dataclass(frozen=True)
class PrefixMarginalTarget(Target):
    """A teacher's distribution over its own ids as one over the student's: each of its tokens counts for the student's first
    token of what is left of it. N rows, U places of the teacher's."""

    source: HiddenTarget | LogitsTarget  # over the teacher's ids, at U places
    table: PrefixTensors
    place: Tensor  # int64 [N], never falling; which of the places answers
    node: Tensor  # int64 [N]; what is written of the teacher's next token there
    actual: Tensor  # int64 [N]; which token that is …
    usual: Tensor  # int64 [N]; … what of the student's it would be counted for (−1: nothing) …
    own: Tensor  # int64 [N]; … and what it was written with
    beyond: Tensor  # [N]; log-probability of the teacher's further tokens that the student's goes on into
    place_host: Ints  # as `place` and `node`
    node_host: Ints
    odd_host: npt.NDArray[np.bool_]  # [N]; where it was not written as usual, or goes on
    dense = True

    @property
    def width(self) -> int:
        return self.table.host.students

    def select(self, rows: Tensor | Ints) -> PrefixMarginalTarget:
        """`rows` are on the host. Of the places only those stay that answer one of them."""
        at, host = to_device(rows, self.place.device), np.asarray(rows)
        places, index = np.unique(self.place_host[host], return_inverse=True)
        return replace(
            self,
            **{name: getattr(self, name)[at] for name in ("node", "actual", "usual", "own", "beyond")},
            source=self.source.select(places),
            place=to_device(index, self.place.device),
            place_host=index,
            node_host=self.node_host[host],
            odd_host=self.odd_host[host],
        )

    def narrow(self, start: int, width: int) -> PrefixMarginalTarget:
        """It stays whole: its logits are made for the ids that are asked for."""
        return self

    def check(self, call: TargetCheck) -> None:
        expect("the teacher's place", self.place, call.rows, integer=True)
        call.width(self.width)


Dense = HiddenTarget | LogitsTarget | MeanTarget | PrefixMarginalTarget


def DenseTarget(  # a function that reads like the class it was: other people's code calls it
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> HiddenTarget | LogitsTarget:
    """The teacher's distribution over its whole vocabulary: hidden states and the output head, or ready logits."""
    if logits is not None:
        return LogitsTarget(logits)
    if hidden is None or weight is None:
        raise ValueError("a DenseTarget needs hidden and weight, or logits")
    return HiddenTarget(hidden, Head(weight, bias, softcap, logit_scale))


@dataclass(frozen=True)
class TopKTarget(Target):
    """K entries normalised over the teacher's full vocabulary, and the log-mass of all the rest (−inf: no rest)."""

    ids: Tensor  # int64 [N, K]
    logprobs: Tensor  # [N, K]
    tail: Tensor  # [N]
    # Ids it is over; the student's further ones leave the divergence's softmax. None: all of its
    width: int | None = None
    tail_samples: Tensor | None = None  # int64 [N, M]; draws from the rest, from which forward KL learns what is in it
    tail_entropy: Tensor | None = None  # [N]; of the teacher within the rest: what these draws cost at least
    absent: Tensor | None = None  # bool [N, K]; entries that are none: they repeat the id of another one of the row

    def check(self, call: TargetCheck) -> None:
        _check_entries(self.ids, self.logprobs, "logprobs", self.width, call)
        expect("target tail", self.tail, call.rows)
        if self.tail_samples is not None:
            expect("target tail_samples", self.tail_samples, call.rows, "M", integer=True)


@dataclass(frozen=True)
class SampledTarget(Target):
    """Draws from the teacher with their shares: unbiased for forward KL and cross-entropy only."""

    ids: Tensor  # int64 [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor | None = None  # [N], of the teacher: the loss is a cross-entropy, and KL is what it has beyond this
    width: int | None = None  # as TopKTarget's

    def check(self, call: TargetCheck) -> None:
        _check_entries(self.ids, self.weights, "weights", self.width, call)
        if self.entropy is not None:
            expect("target entropy", self.entropy, call.rows)
        if call.divergence != "forward_kl":
            raise ValueError(f"sampled targets are unbiased for forward_kl only, not for {call.divergence}")


def _check_entries(ids: Tensor, values: Tensor, name: str, width: int | None, call: TargetCheck) -> None:
    expect("target ids", ids, call.rows, "K", integer=True)
    expect(f"target {name}", values, *ids.shape)
    if width is not None and width < 1:
        raise ValueError(f"the target's width must be at least 1, not {width}")


@dataclass(frozen=True)
class Chunks:
    """Runs of a batch's rows that cover the same bytes as runs of a teacher's tokens. C chunks, M rows within them."""

    first: Tensor  # int64 [C]; the row of each chunk's first token, increasing
    inner: Tensor  # int64 [M]; the other rows of the chunks, increasing
    owner: Tensor  # int64 [M]; the chunk of each
    first_host: Ints  # the same as `first` and `inner`: which rows are where is asked on the host
    inner_host: Ints

    @classmethod
    def at(cls, first: Ints, inner: Ints, device: torch.device | None = None) -> Chunks:
        owner = np.searchsorted(first, inner) - 1
        there = torch.device("cpu") if device is None else device
        first_, inner_, owner_ = (to_device(x, there) for x in (first, inner, owner))
        return cls(first_, inner_, owner_, first, inner)

    def to(self, device: torch.device) -> Chunks:
        return _moved(self, device)


@dataclass(frozen=True)
class Relation:
    """How two vocabularies relate, on a device: `text.VocabMap` as the losses need it. Vs and Vt ids, P pairs, E entries."""

    student: Tensor  # int64 [P], increasing; student[i] and teacher[i] mean the same
    teacher: Tensor  # int64 [P]
    student_alone: Tensor  # int64; the ids that are in no pair, increasing
    teacher_alone: Tensor
    place_student: Tensor  # int64 [Vs]; index in `student`, or −1 − index in `student_alone`
    place_teacher: Tensor  # int64 [Vt]
    start: Tensor  # int64 [E]; the projection: student id, increasing …
    end: Tensor  # int64 [E]; … teacher id …
    value: Tensor  # [E]; … and share
    unmapped: Tensor  # int64; student ids without an entry
    hosts: Mapping[str, Ints]  # student, student_alone, start and unmapped, to cut them on the host

    def to(self, device: torch.device) -> Relation:
        return _moved(self, device)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.place_student.shape[0], self.place_teacher.shape[0]


# How losses/cross_tokenizer.py compares chunks
CHUNK_METHODS = ("common_vocab", "projection", "span_likelihood", "uld")


@dataclass(frozen=True)
class ChunkTarget(Target):
    """What a teacher with other tokens says, chunk by chunk; its rows are those that the chunks lie at. C chunks."""

    method: str  # one of CHUNK_METHODS
    chunks: Chunks
    relation: Relation
    start: HiddenTarget | LogitsTarget | TopKTarget | None  # what it expects where a chunk begins, over its own ids [C]
    token: Tensor  # int64 [C]; its first token of each chunk
    logprob: Tensor  # [C]; log-probability of that token
    inner: Tensor  # [C]; sum of the log-probabilities of its other tokens of the chunk
    chunk_temperature: float = 1.0

    def select(self, rows: Tensor | Ints) -> ChunkTarget:
        """At rows in increasing order: the chunks that lie wholly among them."""
        chunks, chosen = self.chunks, np.asarray(rows)
        owner = np.searchsorted(chunks.first_host, chunks.inner_host) - 1
        kept = np.isin(chunks.first_host, chosen)
        kept[owner[~np.isin(chunks.inner_host, chosen)]] = False
        at = to_device(np.flatnonzero(kept), self.token.device)
        first, inner = (np.searchsorted(chosen, x) for x in (chunks.first_host[kept], chunks.inner_host[kept[owner]]))
        return replace(
            self,
            chunks=Chunks.at(first, inner, self.token.device),
            start=None if self.start is None else self.start.select(at),
            **{name: getattr(self, name)[at] for name in ("token", "logprob", "inner")},
        )

    def spread(self, rows: Ints, count: int) -> ChunkTarget:
        chunks = self.chunks
        return replace(self, chunks=Chunks.at(rows[chunks.first_host], rows[chunks.inner_host], self.token.device))

    def check(self, call: TargetCheck) -> None:
        if self.method not in CHUNK_METHODS:
            raise ValueError(f"unknown method {self.method!r} for two tokenizers; there are {', '.join(CHUNK_METHODS)}")
        if not call.labels:
            raise ValueError("a target of another tokenizer needs labels: the chunks' own tokens")
        if self.method == "span_likelihood" and call.temperature != 1.0:
            raise ValueError(
                f"span_likelihood compares likelihoods of text, which are at temperature 1, not {call.temperature}"
            )
        if self.method != "span_likelihood" and self.start is None:
            raise ValueError(f"{self.method} needs what the teacher expects, not only how likely the text was")
        if isinstance(self.start, SampledTarget):
            raise ValueError("draws do not serve a teacher with another tokenizer: use top-k or dense targets")
        count = self.chunks.first.shape[0]
        expect("target token", self.token, count, integer=True)
        expect("target logprob", self.logprob, count)
        expect("target inner", self.inner, count)


@dataclass(frozen=True)
class TokenLogprobsTarget(Target):
    """Only how likely the text's own next tokens are to the teacher."""

    logprobs: Tensor  # [N]

    def check(self, call: TargetCheck) -> None:
        raise ValueError(
            "a TokenLogprobsTarget tells only how likely the text's own tokens are, and a divergence needs a distribution: "
            "losses.policy_gradient_kl learns from such targets"
        )


# A target's numbers: what they are called, and whether −inf, which is an empty id, is one of them.
NUMBERS = {
    "hidden": ("hidden states are", False),
    "weight": ("output head is", False),
    "bias": ("output head is", True),
    "logits": ("logits are", True),
    "beyond": ("log-probabilities are", True),
    "logprobs": ("log-probabilities are", True),
    "logprob": ("log-probabilities are", True),
    "inner": ("log-probabilities are", True),
    "tail": ("log-probabilities of the rest are", True),
    "tail_entropy": ("entropies of the rest are", False),
    "weights": ("shares of draws are", False),
    "entropy": ("entropies are", False),
}


def _not_finite(record: Any) -> str | None:
    for part in fields(record):
        value, (words, empty) = getattr(record, part.name), NUMBERS.get(part.name, ("", False))
        if isinstance(value, Head | Target) and (found := _not_finite(value)):
            return found
        if (
            words
            and isinstance(value, Tensor)
            and not (value.masked_fill(value == -torch.inf, 0.0) if empty else value).isfinite().all()
        ):
            return words
    return None


def _moved(record: Any, device: torch.device) -> Any:
    """A copy of a frozen dataclass with its tensors, and those of the dataclasses in it, on `device`."""
    changed: dict[str, Any] = {}
    for part in fields(record):
        value = getattr(record, part.name)
        if isinstance(value, Tensor):
            changed[part.name] = to_device(value, device)
        elif isinstance(value, Rows | Head | Target | Chunks | Relation | PrefixTensors):
            changed[part.name] = value.to(device)
    return replace(record, **changed)


@dataclass(frozen=True)
class Prepared:
    """What a teacher prepared for a micro-batch, on the host and ahead of its step."""

    known: npt.NDArray[np.bool_] | None = None  # [N]; the rows that the teacher answers; None: all
    counts: Mapping[str, int] = field(default_factory=dict)  # of the alignment of two tokenizers, for the log


class Teacher(Protocol):
    """Where a teacher's signal comes from is its own business; the loop asks for targets and nothing else."""

    name: str
    weight: float
    ahead: int  # micro-batches that are best prepared at once: requests under way at a server
    fixed: bool  # a missing document is an error: it is neither computed nor left out
    skips: bool  # a missing document is left out

    def missing(self, batch: Batch) -> Sequence[int]:
        """Which examples of the batch are missing and must be left out. Runs on the prefetch thread."""
        ...

    def check_there(self, examples: Sequence[Example]) -> None:
        """Raise if the teacher is fixed and lacks one of them."""
        ...

    def prepare(self, batch: Batch) -> Prepared:
        """What can be done without the device. Runs on the prefetch thread."""
        ...

    def answer(self, batch: Batch, prepared: Prepared) -> tuple[Target | None, Prepared]:
        """The target at each of the batch's rows, on the batch's device, outside autograd; None if the teacher answers none of
        them. And what was prepared, completed by what needed the device: computing what a cache lacks."""
        ...

    def close(self) -> None:
        """At the end of a run, however it ends: put away what was gathered."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step, as micro-batches."""

    batches: tuple[Batch, ...]
    state: dict[str, Any]  # JSON-able: what to resume from after this step
    counts: dict[str, int]  # since the beginning of the run
    epoch: int  # from 0
    facts: Mapping[str, float] = field(default_factory=dict)  # about text that was written for it, for the log


class RolloutSource(Protocol):
    """Step batches of text that a model writes while the run goes on. `data.feed.Feed` reads them as it reads a data set."""

    @property
    def waiting(self) -> int:
        """Step batches that are written already: what comes after them may need weights that are not there yet."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is worth a word before the first step."""
        ...

    def __iter__(self) -> Iterator[StepBatch]: ...

    def __next__(self) -> StepBatch: ...

    def advance(self, version: int) -> None:
        """The student has new weights, after so many optimizer steps."""
        ...

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write to a checkpoint what was written and is still to be trained on after `state`."""
        ...

    def close(self) -> None: ...
