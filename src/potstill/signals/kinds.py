"""What can be kept of a teacher for each predicted token: one class per kind, and one line of KINDS for each.

R rows (predicted tokens), V ids, K entries, M and N draws, H hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from potstill.config import StoreConfig
from potstill.config.registry import CACHE_KINDS, load
from potstill.signals import codec
from potstill.signals.codec import ENTROPY, TOKEN_LOGPROB, Array, Bytes, Code, Packed, Raw, Steps
from potstill.signals.compute import draws, in_blocks, largest, largest_left, log_mass
from potstill.types import HiddenTarget, PotstillError, SampledTarget, Target, TokenLogprobsTarget, TopKTarget

Signal = Mapping[str, Array]  # arrays of R rows each; their names are those of a kind's `layout`
Take = Callable[[int], Bytes]  # the next so many bytes of a document

LARGEST_VOCABULARY = 2**24
MOST_DRAWS = 4096
SLACK = 1e-3  # by which masses may be off one
NO_MASS = -64.0  # a log-probability that stands for all that are smaller
Draws = Annotated[int, Field(ge=0, le=MOST_DRAWS)]


@dataclass(frozen=True)
class SignalKind:
    """What is kept, by its parameters: those that a kind has no use for keep their defaults. A manifest and a request to a
    server have all of them."""

    vocabulary: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]  # of the tokenizer, without padding of the matrices
    k: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] = 0
    temperatures: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=1000)] = (1.0,)
    tail_samples: Draws = 0  # draws from the rest
    num_samples: Draws = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of the draws
    width: Annotated[int, Field(ge=0, le=2**24)] = 0
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    kind: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()  # that it has a use for, besides the vocabulary
    has_head: ClassVar[bool] = False  # the teacher's output head is kept beside it
    # What a document computed again may differ by, on the mean of its rows: more is another teacher, or damage. Sums come
    # out in another order, and a short float has few digits. Of float32; of bfloat16 and float16.
    tolerance: ClassVar[tuple[float, float]] = (0.05, 0.3)
    differs_by: ClassVar[str] = "difference_of_log_probabilities"
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def __post_init__(self) -> None:
        for name in {"k", "num_samples", "width"}.intersection(self.parameters):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and kind {self.kind} needs at least 1")
        if self.k > self.vocabulary:
            raise ValueError(f"k is {self.k} and the teacher has {self.vocabulary} ids: choose a k of at most that")
        if self.tail_samples and self.k == self.vocabulary:
            raise ValueError(f"k is all of the teacher's {self.vocabulary} ids: there is no rest to draw from")
        if self.tail_samples and 1.0 not in self.temperatures:
            raise ValueError(
                "tail_samples: draws from the rest are at temperature 1, and a loss at another cannot use them: add 1 to "
                "temperatures, or leave tail_samples out"
            )

    @property
    def id_bits(self) -> int:
        return max(4, (self.vocabulary - 1).bit_length())

    @property
    def draws(self) -> int:
        """Random numbers that it takes for each row."""
        return self.num_samples or self.tail_samples

    def describe(self) -> str:
        """What it keeps, in words."""
        raise NotImplementedError

    # Arrays

    def streams(self) -> dict[str, Code]:
        """How its arrays are stored, in this order."""
        raise NotImplementedError

    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Of each array of a signal: what a row of it looks like, and its dtype."""
        return {name: (code.shape, code.dtype) for name, code in self.streams().items()}

    def no_rows(self) -> dict[str, Array]:
        """The signal of a document in which nothing is predicted."""
        return {name: np.zeros((0, *shape), dtype=dtype) for name, (shape, dtype) in self.layout().items()}

    def compute(self, target: HiddenTarget, labels: Tensor, asked: Array | None = None) -> dict[str, Array]:
        """The signal of R rows, given as hidden states and a head over the vocabulary. `asked` [R, n]: random numbers for
        draws; of kind `given`, the ids to look up."""
        return in_blocks(self.of_logits, target, self.vocabulary, labels, asked)

    def of_logits(self, z: Tensor, labels: Tensor, asked: Tensor | None) -> dict[str, Tensor]:
        """The signal of some rows, from their logits, which it may write over."""
        raise NotImplementedError

    # Bytes

    def encode(self, signal: Signal) -> dict[str, Bytes]:
        """The streams of R rows [R, bytes of a row]."""
        return {name: code.encode(signal[name]) for name, code in self.streams().items()}

    def decode(self, name: str, stream: Callable[[str], Bytes]) -> Array:
        """One array of the signal, from the streams that it needs."""
        return self.streams()[name].decode(stream(name))

    def write(self, streams: Mapping[str, Bytes]) -> list[Bytes]:
        """A document's rows, as they stand in a file."""
        return [streams[name] for name in self.streams()]

    def read(self, rows: int, take: Take) -> dict[str, Bytes]:
        """What `write` wrote. ValueError: it cannot have."""
        return {name: take(rows * code.width).reshape(rows, code.width) for name, code in self.streams().items()}

    # What it says

    def target(self, rows: Signal, temperature: float = 1.0, width: int | None = None) -> Target:
        """What a loss learns from, on the host. `width`: ids that the student has too."""
        raise NotImplementedError

    def check(self, signal: Signal, rows: int) -> None:
        """That these are the rows of a teacher: arrays, shapes, dtypes, numbers, ids and masses. ValueError: what is wrong."""
        expected = self.layout()
        if set(signal) != set(expected):
            there = ", ".join(sorted(signal)) or "nothing"
            raise ValueError(f"it has {there} where {', '.join(expected)} were asked for")
        for name, (shape, dtype) in expected.items():
            values = signal[name]
            found, wanted = f"{values.dtype} {list(values.shape)}", f"{dtype} {[rows, *shape]}"
            if found != wanted:
                raise ValueError(f"{name} is {found} where {wanted} was asked for")
        for problem in self.problems(signal):
            raise ValueError(f"it has {problem}")

    def problems(self, signal: Signal) -> Iterator[str]:
        """What no teacher says, each as words that follow "it has"."""
        for name in self.layout():
            values = signal[name]
            if values.dtype.kind == "f" and np.isnan(values).any():
                yield f"{name} that are no numbers (NaN)"
            elif name in ("logprobs", "token_logprobs", "tail") and values.max(initial=0) > SLACK:
                yield f"{name} with a log-probability of {values.max():.3g}, above 0"
            rows = values if name == "ids" else values.reshape(-1, 1)  # `ids` are different ones in each row
            if values.dtype.kind == "i" and (problem := wrong_ids(rows, self.vocabulary)):
                yield problem
        masses = self.total_mass(signal)
        if (off := np.abs(masses - 1)).max(initial=0.0) > SLACK:
            yield f"a token whose probabilities and that of the rest sum to {masses.flat[off.argmax()]:.4f}"

    def total_mass(self, rows: Signal) -> Array:
        """The sums of all that rows say, which are to be 1."""
        return np.ones(0)

    def difference(self, stored: Signal, now: Signal, of_entries: bool) -> tuple[Array, float]:
        """By how much each row differs from what was computed again, and the share of entries that are of the same ids.
        `of_entries`: the mass beyond them is not known, so they are compared as all there is."""
        (name,) = self.layout()
        return np.abs(stored[name] - now[name]).reshape(len(now[name]), -1).max(-1), 1.0

    def smaller(self, k: int | None, temperatures: Sequence[float] | None) -> Self:
        """With fewer entries, or for fewer temperatures. ValueError: it cannot be made so."""
        raise ValueError(f"it is of kind {self.kind}: only top_k can be made smaller")

    def convert(self, rows: Signal, streams: Mapping[str, Bytes], to: Self) -> dict[str, Bytes]:
        """The streams of a kind that `smaller` gave, from those of this one and the signal that they are read as."""
        raise NotImplementedError


def wrong_ids(ids: Array, vocabulary: int, there: npt.NDArray[np.bool_] | None = None) -> str | None:
    """What is wrong with the ids of each row [R, K], which are to be different ones, or None. `there`: which of them count."""
    counted = ids if there is None else ids[there]
    outside = counted[(counted < 0) | (counted >= vocabulary)]
    if outside.size:
        return f"the id {outside.flat[0]}, and the teacher has {vocabulary} ids"
    if there is not None:  # what does not count is made different from all that does
        ids = np.where(there, ids, vocabulary + np.arange(ids.shape[1]))
    ordered = np.sort(ids, -1)
    again = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
    return f"the id {again[0]} twice at one token" if again.size else None


@dataclass(frozen=True)
class TopK(SignalKind):
    """The k likeliest ids and the mass of all the others, at some temperatures; perhaps draws from those others."""

    kind = "top_k"
    parameters = ("k", "temperatures", "tail_samples", "seed")

    @property
    def fine(self) -> int:
        """How many of the gaps between entries are stored finely."""
        return min(codec.FINE_GAPS, self.k - 1)

    def describe(self) -> str:
        drawn = f"; {self.tail_samples} draws from the rest, seed {self.seed}" if self.tail_samples else ""
        return f"top {self.k} and the rest, at temperatures {', '.join(f'{t:g}' for t in self.temperatures)}{drawn}"

    def streams(self) -> dict[str, Code]:
        found: dict[str, Code] = {
            "ids": Packed(self.k, self.id_bits),
            "fine": Packed(self.fine, codec.FINE_BITS),
            "coarse": Packed(self.k - 1 - self.fine, codec.COARSE_BITS),
            "odds": Steps("<i2", codec.STEPS_PER_NAT, (len(self.temperatures),)),
            "token_logprobs": TOKEN_LOGPROB,
        }
        if self.tail_samples:
            found |= {"tail_samples": Packed(self.tail_samples, self.id_bits), "tail_entropy": ENTROPY}
        return found

    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        found = super().layout()
        del found["fine"], found["coarse"]
        return {"ids": found["ids"], "logprobs": ((self.k,), "float32"), **found}

    def of_logits(self, z: Tensor, labels: Tensor, asked: Tensor | None) -> dict[str, Tensor]:
        chosen = z.gather(-1, labels).squeeze(-1)
        values, ids = largest(z, self.k)
        z.scatter_(-1, ids, -torch.inf)
        rest_largest = largest_left(z, values)

        def masses(temperature: float) -> tuple[Tensor, Tensor]:
            # A sum over the other ids, not 1 − Σ: a small rest would be lost in the rounding of a large sum.
            return (values / temperature).logsumexp(-1), log_mass(z, rest_largest, temperature)

        at = {temperature: masses(temperature) for temperature in {*self.temperatures, 1.0}}
        odds = torch.stack([at[t][1] - at[t][0] for t in self.temperatures], -1)
        mass = torch.logaddexp(*at[1.0])
        found = {"ids": ids.int(), "logprobs": values - mass[:, None], "odds": odds, "token_logprobs": chosen - mass}
        if self.tail_samples:
            assert asked is not None
            drawn = draws(z, asked, 1.0)
            found |= {"tail_samples": drawn["samples"], "tail_entropy": drawn["entropy"]}
        return found

    def encode(self, signal: Signal) -> dict[str, Bytes]:
        fine, coarse = codec.encode_gaps(signal["logprobs"], self.fine)
        return super().encode({**signal, "fine": fine, "coarse": coarse})

    def decode(self, name: str, stream: Callable[[str], Bytes]) -> Array:
        if name == "values":  # log-probabilities up to a factor of each row, which temperatures have no use for
            return -codec.decode_gaps(stream("fine"), stream("coarse"), self.k)
        if name == "logprobs" and 1.0 in self.temperatures:
            return self.entries({part: self.decode(part, stream) for part in ("values", "odds", "ids")}, 1.0)[1]
        if name == "logprobs":  # of the entries as all there is
            return _log_softmax(self.decode("values", stream))
        return super().decode(name, stream)

    def entries(self, rows: Signal, temperature: float) -> tuple[Array, Array, Array]:
        """ids [R, K], log-probabilities [R, K] and the log-mass of the rest [R], at one of the temperatures."""
        odds, values = rows["odds"][:, self.temperatures.index(temperature)], rows.get("values")
        if values is not None or temperature != 1.0:
            values = (rows["logprobs"] if values is None else values) / np.float32(temperature)
            logprobs = _log_softmax(values) - np.logaddexp(0.0, odds)[:, None]
        else:
            logprobs = rows["logprobs"]
        return rows["ids"], logprobs, -np.logaddexp(0.0, -odds)

    def target(self, rows: Signal, temperature: float = 1.0, width: int | None = None) -> TopKTarget:
        ids, logprobs, tail = map(torch.from_numpy, self.entries(rows, temperature))
        target = TopKTarget(ids.long(), logprobs, tail, width=width)
        if not self.tail_samples or temperature != 1.0:  # which they were drawn at
            return target
        drawn, entropy = (torch.from_numpy(rows[name]) for name in ("tail_samples", "tail_entropy"))
        return replace(target, tail_samples=drawn.long(), tail_entropy=entropy)

    def problems(self, signal: Signal) -> Iterator[str]:
        yield from super().problems(signal)
        ids, logprobs, odds = (signal[name] for name in ("ids", "logprobs", "odds"))
        if (logprobs[:, 1:] > logprobs[:, :-1]).any():
            yield "a top k that is not in order, largest first"
        if (kept := np.exp(logprobs).sum(-1).max(initial=0.0)) > 1 + SLACK:
            yield f"probabilities that sum to {kept:.4f}"
        if self.tail_samples:
            row, there = np.arange(len(ids), dtype=np.int64)[:, None] << 32, np.isfinite(odds[:, 0])
            if np.isin((row + signal["tail_samples"])[there], (row + ids)[there]).any():
                yield "draws from the rest that are not of the rest"

    def total_mass(self, rows: Signal) -> Array:
        read = (self.entries(rows, temperature)[1:] for temperature in self.temperatures)
        return np.stack([np.exp(logprobs).sum(-1) + np.exp(tail) for logprobs, tail in read])

    def difference(self, stored: Signal, now: Signal, of_entries: bool) -> tuple[Array, float]:
        first = self.temperatures[0]
        (ids, before, _), (ids_now, exact, _) = self.entries(stored, first), self.entries(now, first)
        exact = _at_ids(ids, ids_now, np.maximum(exact, NO_MASS), self.vocabulary)
        if of_entries:
            before, exact = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (before, exact))
        row = np.arange(len(ids), dtype=np.int64)[:, None] * self.vocabulary
        common = float(np.isin(row + ids, row + ids_now).mean())
        return (np.abs(before - exact) * np.exp(np.maximum(before, exact))).sum(-1), common

    def smaller(self, k: int | None, temperatures: Sequence[float] | None) -> Self:
        if k is not None and not 1 <= k <= self.k:
            raise ValueError(f"--k {k}: it has {self.k} entries a token; choose from 1 to that")
        wanted = self.temperatures if temperatures is None else tuple(sorted(set(temperatures)))
        unknown = [t for t in wanted if t not in self.temperatures]
        if unknown or not wanted:
            known = ", ".join(f"{t:g}" for t in self.temperatures)
            raise ValueError(
                f"--temperature {unknown[0] if unknown else '…'}: it knows the mass of the rest at {known} only"
            )
        kept = k in (None, self.k) and 1.0 in wanted  # the draws: they are of this rest, at 1
        drawn = (self.tail_samples, self.seed) if kept else (0, 0)
        return replace(self, k=k or self.k, temperatures=wanted, tail_samples=drawn[0], seed=drawn[1])

    def convert(self, rows: Signal, streams: Mapping[str, Bytes], to: Self) -> dict[str, Bytes]:
        """What is kept keeps its codes: nothing is rounded a second time but the rest, which is exact: the entries that were
        dropped, and the rest they stood beside."""
        odds = []
        for temperature in to.temperatures:
            if to.k == self.k:
                odds.append(rows["odds"][:, self.temperatures.index(temperature)])
                continue
            _, logprobs, tail = self.entries(rows, temperature)
            left, dropped = (np.logaddexp.reduce(x.astype(np.float64), -1) for x in np.split(logprobs, [to.k], -1))
            odds.append(np.logaddexp(dropped, tail) - left)
        found = {name: streams[name] for name in to.streams()} | {
            "odds": to.streams()["odds"].encode(np.stack(odds, -1))
        }
        for name in ("ids", "fine", "coarse"):
            old, new = self.streams()[name], to.streams()[name]
            if new != old:
                found[name] = new.encode(old.decode(streams[name])[:, : new.shape[0]])
        return found


def _log_softmax(values: Array) -> Array:
    return torch.from_numpy(values).log_softmax(-1).numpy()


def _at_ids(wanted: Array, ids: Array, values: Array, vocabulary: int) -> Array:
    """The values [R, K] of some ids, largest first, at other ids [R, K]. What is not among them is at most the smallest; with
    equally likely ids, which of them is kept is chance."""
    row = np.arange(len(ids), dtype=np.int64)[:, None] * vocabulary
    here = (row + ids).ravel()
    order = np.argsort(here)
    at = np.searchsorted(here[order], row + wanted).clip(max=max(0, here.size - 1))
    return np.where(here[order][at] == row + wanted, values.ravel()[order][at], values[:, -1:])


@dataclass(frozen=True)
class Sampled(SignalKind):
    """Draws with replacement, in the order of their ids."""

    kind = "sampled"
    parameters = ("num_samples", "seed")
    tolerance = (0.1, 0.5)  # of the draws
    differs_by = "share_of_draws_that_differ"

    def describe(self) -> str:
        return f"{self.num_samples} draws, seed {self.seed}"

    def streams(self) -> dict[str, Code]:
        return {"samples": Raw("<i4", (self.num_samples,)), "entropy": ENTROPY}

    def of_logits(self, z: Tensor, labels: Tensor, asked: Tensor | None) -> dict[str, Tensor]:
        assert asked is not None
        return draws(z, asked, self.temperatures[0])

    def write(self, streams: Mapping[str, Bytes]) -> list[Bytes]:
        """In place of equal draws one after another: which are the first of their id, and those ids."""
        samples = self.decode("samples", streams.__getitem__)
        first = _first_of_id(samples)
        return [
            np.packbits(first, bitorder="little"),
            codec.pack(samples[first][None], self.id_bits),
            streams["entropy"],
        ]

    def read(self, rows: int, take: Take) -> dict[str, Bytes]:
        count = rows * self.num_samples
        first = np.unpackbits(take(codec.packed_bytes(count, 1)), count=count, bitorder="little").view(np.bool_)
        if not first[:: self.num_samples].all():
            raise ValueError("a row's first draw is no new one")
        distinct = int(np.count_nonzero(first))
        ids = codec.unpack(take(codec.packed_bytes(distinct, self.id_bits))[None], distinct, self.id_bits)[0]
        samples = ids[np.cumsum(first) - 1].reshape(rows, self.num_samples)
        width = self.streams()["entropy"].width
        return {"samples": samples.view(np.uint8), "entropy": take(rows * width).reshape(rows, width)}

    def target(self, rows: Signal, temperature: float = 1.0, width: int | None = None) -> SampledTarget:
        ids, shares = self.shares(rows)
        entropy = torch.from_numpy(rows["entropy"])
        return SampledTarget(torch.from_numpy(ids).long(), torch.from_numpy(shares), entropy, width=width)

    def shares(self, rows: Signal) -> tuple[Array, Array]:
        """The different ids of each row [R, M], and their shares of the draws [R, M]: 0 where there are fewer than M."""
        samples = rows["samples"]
        first = _first_of_id(samples)
        distinct = first.sum(-1)
        there = np.arange(int(distinct.max(initial=1))) < distinct[:, None]
        ids, shares = np.zeros(there.shape, dtype=np.int32), np.zeros(there.shape, dtype=np.float32)
        ids[there] = samples[first]
        begins = np.flatnonzero(first)  # a row begins with a first one, so the next one of all rows ends its run
        shares[there] = np.diff(begins, append=first.size) / self.num_samples
        return ids, shares

    def problems(self, signal: Signal) -> Iterator[str]:
        yield from super().problems(signal)
        if (np.diff(signal["samples"], axis=-1) < 0).any():
            yield "draws that are not in the order of their ids"

    def difference(self, stored: Signal, now: Signal, of_entries: bool) -> tuple[Array, float]:
        return share_that_differs(stored["samples"], now["samples"], self.vocabulary), 1.0


def _first_of_id(samples: Array) -> npt.NDArray[np.bool_]:
    first = np.ones(samples.shape, dtype=np.bool_)
    first[:, 1:] = samples[:, 1:] != samples[:, :-1]
    return first


def share_that_differs(one: Array, other: Array, vocabulary: int) -> npt.NDArray[np.float64]:
    """Of two times N draws, in the order of their ids [R, N], the share of one that has no partner in the other [R]."""
    rows, count = one.shape

    def numbered(ids: Array) -> npt.NDArray[np.int64]:
        """A number for each draw: its row, its id, and how often that was drawn before."""
        here = (np.arange(rows, dtype=np.int64)[:, None] * vocabulary + ids).ravel()
        before: npt.NDArray[np.int64] = np.arange(len(here)) - np.searchsorted(here, here)
        return here * count + before

    partner = np.isin(numbered(one), numbered(other)).reshape(rows, count)
    share: npt.NDArray[np.float64] = 1 - partner.mean(-1)
    return share


@dataclass(frozen=True)
class Hidden(SignalKind):
    """Hidden states, which with the teacher's head give the whole distribution, at any temperature."""

    kind = "hidden"
    parameters = ("width", "dtype")
    has_head = True
    tolerance = (0.01, 0.1)  # relative to the largest number of a row
    differs_by = "difference_of_hidden_states"

    def describe(self) -> str:
        return f"hidden states of width {self.width} in {self.dtype}, and the head"

    def streams(self) -> dict[str, Code]:
        return {"hidden": Raw(codec.DTYPES[self.dtype], (self.width,))}

    def compute(self, target: HiddenTarget, labels: Tensor, asked: Array | None = None) -> dict[str, Array]:
        hidden = target.hidden.detach().to("cpu", getattr(torch, self.dtype))
        return {"hidden": (hidden.view(torch.uint16) if self.dtype == "bfloat16" else hidden).numpy()}

    def states(self, rows: Signal) -> Tensor:
        """[R, H], in the teacher's dtype."""
        hidden = torch.from_numpy(rows["hidden"])
        return hidden.view(torch.bfloat16) if self.dtype == "bfloat16" else hidden

    def problems(self, signal: Signal) -> Iterator[str]:
        if not self.states(signal).isfinite().all():
            yield "hidden states that are not finite"

    def difference(self, stored: Signal, now: Signal, of_entries: bool) -> tuple[Array, float]:
        before, live = (self.states(signal).float() for signal in (stored, now))
        most = live.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        return ((before - live).abs().amax(-1) / most).numpy(), 1.0


@dataclass(frozen=True)
class TokenLogprobs(SignalKind):
    """Only how likely the text's own tokens are."""

    kind = "token_logprobs"

    def describe(self) -> str:
        return "log-probabilities of the text's own tokens"

    def streams(self) -> dict[str, Code]:
        return {"token_logprobs": TOKEN_LOGPROB}

    def of_logits(self, z: Tensor, labels: Tensor, asked: Tensor | None) -> dict[str, Tensor]:
        return {"token_logprobs": z.gather(-1, labels).squeeze(-1) - log_mass(z, z.amax(-1))}

    def target(self, rows: Signal, temperature: float = 1.0, width: int | None = None) -> TokenLogprobsTarget:
        return TokenLogprobsTarget(torch.from_numpy(rows["token_logprobs"]))


@dataclass(frozen=True)
class Given(SignalKind):
    """Log-probabilities of k different ids that were asked for, and of all the others as one. A server is asked for it; no
    cache holds it."""

    kind = "given"
    parameters = ("k", "temperatures")

    def streams(self) -> dict[str, Code]:
        return {"logprobs": Raw("<f4", (self.k,)), "tail": Raw("<f4")}

    def of_logits(self, z: Tensor, labels: Tensor, asked: Tensor | None) -> dict[str, Tensor]:
        assert asked is not None
        ids, temperature = asked.long(), self.temperatures[0]
        values = z.gather(-1, ids) / temperature
        z.scatter_(-1, ids, -torch.inf)
        rest = log_mass(z, z.amax(-1).clamp(min=torch.finfo(z.dtype).min), temperature)
        mass = torch.logaddexp(values.logsumexp(-1), rest)
        return {"logprobs": values - mass[:, None], "tail": rest - mass}

    def total_mass(self, rows: Signal) -> Array:
        return np.exp(rows["logprobs"]).sum(-1) + np.exp(rows["tail"])


KINDS: dict[str, type[SignalKind]] = {name: load(place) for name, place in CACHE_KINDS.items()}
SERVED: dict[str, type[SignalKind]] = {**KINDS, "given": Given}


def kind_for(store: StoreConfig, vocabulary: int, width: int, dtype: str) -> SignalKind:
    """What a cache holds of a teacher with so many ids, and with hidden states of that width and dtype."""
    if vocabulary > LARGEST_VOCABULARY:
        raise PotstillError(
            f"a cache holds vocabularies of up to {LARGEST_VOCABULARY:,} ids; the teacher's has {vocabulary:,}"
        )
    kind = KINDS[store.kind]
    if "temperatures" not in kind.parameters and not kind.has_head and set(store.temperatures) != {1.0}:
        raise PotstillError(
            f"the cache's temperatures: what kind {store.kind} keeps is at temperature 1: leave them out, or choose kind "
            "top_k or hidden"
        )
    asked = vars(store) | {"width": width, "dtype": dtype if dtype in codec.DTYPES else "float32"}
    asked["temperatures"] = tuple(sorted(set(store.temperatures)))
    try:
        form = kind(vocabulary, **{name: asked[name] for name in kind.parameters})
    except ValueError as error:
        raise PotstillError(f"the cache's {error}") from error
    return form if form.draws else replace(form, seed=0)


def read_kind(name: Any, parameters: Any, kinds: Mapping[str, type[SignalKind]] = KINDS) -> SignalKind:
    """A kind as a file or a request describes it. ValueError: what is wrong with it, in one line."""
    if name not in list(kinds):  # it may be of any type
        raise ValueError(f"there is no kind {name!r}")
    try:
        form: SignalKind = TypeAdapter(kinds[name]).validate_json(json.dumps(parameters))
    except ValidationError as error:
        raise ValueError(first_error(error)) from None
    for part in fields(form):
        if (
            part.name not in ("vocabulary", "temperatures", *form.parameters)
            and getattr(form, part.name) != part.default
        ):
            raise ValueError(f"kind {name} has no {part.name}")
    return form


def first_error(error: ValidationError) -> str:
    """Of what someone else wrote, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(shown, first["loc"]))
    return f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"


def shown(value: Any) -> str:
    """For a message: short, and nothing that a terminal would obey."""
    text = str(value)[:80]
    return text if text.isprintable() else ascii(text)
