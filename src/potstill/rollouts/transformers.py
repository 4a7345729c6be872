"""Text written by a transformers model in this process, many texts at once, in the fastest way that is right for the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from potstill.config import SamplingConfig
from potstill.models import LanguageModel, backbone, evaluating
from potstill.models.decoding import Kept, Reread
from potstill.models.libraries import reason
from potstill.models.whole_copy import take_weights, whole_copy
from potstill.rollouts.engine import Completion, Engine, EngineSetup, GenerationRequest, asked_tokens
from potstill.rollouts.sampling import draw, uniforms
from potstill.rollouts.writing_ranks import ALONE, WritingRanks
from potstill.transfer import to_device
from potstill.types import PotstillError

LOOK_EVERY = 8  # tokens between looks at which texts are finished, on devices where a look means waiting
TRIED_TOKENS = 12  # more than are between two looks
# How far log-probabilities, token by token, may be from those of the whole text at once: the mean over a text, as a share of
# the standard deviation of its logits. In float32, and where something is rounded to 16 bits.
EXACT, ROUNDED = 1e-3, 6e-2


@dataclass(frozen=True)
class Way:
    """How texts are written at once. Which ways are right for a model is found out, not believed."""

    pads: bool = False  # prompts of several lengths together, the shorter ones padded on the left
    selects: bool = True  # texts that are finished leave the batch, and a prompt is read once for all its texts
    caches: bool = True  # what was read is kept, not read again for every token
    slower: str = ""  # what the student's user should know


WAYS = (  # fastest first
    Way(pads=True),
    Way(slower="only prompts of one length are written to at once"),
    Way(
        selects=False, slower="only prompts of one length are written to at once, and finished texts stay in the batch"
    ),
    Way(caches=False, slower="the whole text is read again for every token"),
)


def open_engine(setup: EngineSetup) -> Engine:
    return TransformersEngine(
        setup.model,
        setup.rollouts.sampling,
        stop_ids=setup.stop_ids,
        batch_size=setup.rollouts.engine.batch_size,
        copies=setup.student and (setup.rollouts.overlaps or setup.team.size > 1),
        autocast=setup.autocast,
        who="the student" if setup.student else "the teacher",
        team=setup.team,
    )


class TransformersEngine:
    """`stop_ids`: whichever comes first ends a text. `copies`: write with a copy of the weights, as they were at the last
    update, so that texts can be written while the model trains, and by each rank on its own where it is spread over ranks.
    `autocast`: a context to compute in. `team`: the ranks that write together."""

    def __init__(
        self,
        language_model: LanguageModel,
        sampling: SamplingConfig,
        *,
        stop_ids: Sequence[int],
        batch_size: int = 256,
        copies: bool = False,
        autocast: Any = nullcontext,
        who: str = "the student",
        team: WritingRanks = ALONE,
    ) -> None:
        self.version = 0
        self._original, self._copies = language_model, copies
        self._copy: LanguageModel | None = None
        self._sampling, self._batch_size, self._team = sampling, batch_size, team
        self._take()
        self._width = language_model.vocabulary
        self._stop = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=language_model.device)
        self._autocast = autocast
        self.notes: Sequence[str]
        self.way, self.notes = self._team.together(lambda: self._right_way(who))[self._team.index]

    def update(self, version: int) -> None:
        self.version = version
        self._take()

    def _take(self) -> None:
        """The weights as they are now."""
        if not self._copies:
            return
        if self._copy is None:
            self._team.together(self._make_copy)
        take_weights(self.writer, self._original)

    def _make_copy(self) -> None:
        self._copy = whole_copy(self._original)

    @property
    def writer(self) -> LanguageModel:
        """What texts are written with: the model, or its copy."""
        if not self._copies:
            return self._original
        assert self._copy is not None
        return self._copy

    def release(self) -> None:
        """Give the copy's memory back until the next update."""
        self._copy = None

    def close(self) -> None:
        self.release()

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        def write(some: Sequence[GenerationRequest]) -> list[Completion]:
            return self._generate(some, asked_tokens(some, self._sampling), self.way, self._autocast)

        return self._team.written(write, asked, max(asked_tokens(asked, self._sampling), default=1))

    @torch.no_grad()
    def _generate(
        self, asked: Sequence[GenerationRequest], most: Sequence[int], way: Way, autocast: Any
    ) -> list[Completion]:
        """`most`: tokens of each text."""
        found: dict[int, Completion] = {}
        with _writing(self.writer.model), autocast():
            for some in self._parts(asked, way):
                found.update(
                    zip(some, self._write([asked[i] for i in some], [most[i] for i in some], way), strict=True)
                )
        return [found[i] for i in range(len(asked))]

    def _parts(self, asked: Sequence[GenerationRequest], way: Way) -> list[list[int]]:
        """What is written at once: prompts of like lengths; of equal ones, where the model reads padding as text."""
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i].ids), asked[i].ids.tobytes()))
        groups = [order] if way.pads else [list(each) for _, each in groupby(order, lambda i: len(asked[i].ids))]
        size = self._batch_size
        return [group[i : i + size] for group in groups for i in range(0, len(group), size)]

    def _write(self, asked: Sequence[GenerationRequest], most: Sequence[int], way: Way) -> list[Completion]:
        device = self.writer.model.device
        longest, rows = max(most), len(asked)
        random = to_device(uniforms([ask.seed for ask in asked], longest), device)
        run = (Kept if way.caches else Reread)(self.writer, [ask.ids for ask in asked], device, way.selects)
        ids = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        logprobs = torch.zeros(rows, longest, device=device)
        lengths = torch.tensor(most, device=device)  # until a stop ends them
        stops = _StopTexts(self._sampling.stop, self.writer.tokenizer, rows)
        for at in range(longest):
            logits = self.writer.logits(run.hidden, self._width)
            chosen, logprob = draw(logits, random[run.rows, at], self._sampling)
            ids[run.rows, at], logprobs[run.rows, at] = chosen, logprob.float()
            ended = torch.isin(chosen, self._stop) & (lengths[run.rows] > at + 1)
            lengths[run.rows] = torch.where(ended, at + 1, lengths[run.rows])
            last = at + 1 == longest
            if stops:
                stops.look(ids[:, max(0, at + 1 - stops.look_back) : at + 1].cpu().numpy(), at + 1, lengths)
            if not last and (device.type == "cpu" or stops or (at + 1) % LOOK_EVERY == 0):
                under_way = lengths[run.rows] > at + 1
                left = int(under_way.sum())
                if not left:
                    break
                if way.selects and left <= 0.75 * len(run.rows):  # making the batch smaller moves all keys and values
                    run.keep(under_way)
                    chosen = chosen[under_way]
            if not last:
                run.step(chosen)
        ends = self._stop.tolist()
        found = zip(ids.cpu().numpy(), logprobs.cpu().numpy(), lengths.tolist(), stops.hit, strict=True)
        return [_completion(row[:n], chances[:n], ends, bool(stopped)) for row, chances, n, stopped in found]

    def _right_way(self, who: str) -> tuple[Way, list[str]]:
        """The fastest way in which the model writes what it says of the whole text, and what its user should know."""
        model, wrong = self.writer.model, ""
        who = f"rollouts.engine: {who} ({model.config.model_type})"
        for way in WAYS:
            try:
                if way.pads and not self._may_pad():
                    continue
                wrong = self._wrong(way)
            except Exception as error:  # the code of each architecture, which may raise anything
                wrong = f"{type(error).__name__}: {reason(error)}"
            if not wrong:
                return way, [f"{who} writes more slowly than others: {way.slower}"] if way.slower else []
        raise PotstillError(
            f"{who} cannot write text with transformers here ({wrong}): choose rollouts.engine.kind: vllm"
        )

    def _may_pad(self) -> bool:
        """Whether padding may be tried. A model that makes masks of its own may carry a state along, into which padding leaks
        by less than the rounding of 16 bits; one with caches of its own may cut texts from the row's first place on, which a
        short text does not show."""
        if self.writer.attention != "own":
            return True
        caches = DynamicCache(config=self.writer.model.config).layers
        return self.writer.model.dtype == torch.float32 and all(
            type(layer).__module__ == DynamicCache.__module__ for layer in caches
        )

    def _wrong(self, way: Way) -> str:
        """What is wrong with texts that are written in this way; nothing, where they are right. They are asked for as in a
        run: prompts of several lengths and several texts of one, some of which end before the others."""
        longest = min(12, (self.writer.positions or 24) // 2)
        ids = (np.arange(4 * longest, dtype=np.int32) * 7 + 3) % self._width
        prompts = [ids[:5], ids[:5], ids[9:14], ids[:longest], ids[-longest:], ids[-longest:], ids[3:4]]
        asked = [GenerationRequest(prompt, i) for i, prompt in enumerate(prompts)]
        tokens = min(TRIED_TOKENS, longest)
        most = [tokens, tokens // 2, tokens, tokens, tokens // 2, tokens, tokens]
        engine = copy.copy(self)
        engine._sampling, engine._stop = SamplingConfig(), self._stop[:0]
        exact = self.writer.model.dtype == torch.float32
        contexts = [(nullcontext, EXACT)] if exact else []
        if not exact or self._autocast is not nullcontext:
            contexts.append((self._autocast, ROUNDED))
        for autocast, tolerance in contexts:
            for ask, text in zip(asked, engine._generate(asked, most, way, autocast), strict=True):
                off, spread = self._gap(ask, text, autocast)
                if not off <= tolerance * spread:  # also when it is no number
                    return f"what it writes token by token is not what it says of the whole text, by {off:.2g} nats"
        return ""

    @torch.no_grad()
    def _gap(self, ask: GenerationRequest, text: Completion, autocast: Any) -> tuple[float, float]:
        """Between a text's log-probabilities and those of one pass over it, on average; and how far the logits are spread."""
        model = self.writer.model
        whole = torch.from_numpy(np.concatenate([ask.ids, text.ids])[None].astype(np.int64)).to(model.device)
        with _writing(model), autocast():
            hidden = backbone(model)(input_ids=whole, use_cache=False).last_hidden_state[0, len(ask.ids) - 1 : -1]
            logits = self.writer.logits(hidden, self._width).float()
        chances = logits.log_softmax(-1).gather(-1, whole[0, len(ask.ids) :, None]).squeeze(-1).cpu().numpy()
        return float(np.abs(chances - text.logprobs).mean()), max(float(logits.std(-1).mean()), 1e-3)


def _completion(
    ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], ends: Sequence[int], stopped: bool
) -> Completion:
    return Completion(ids.astype(np.int32), logprobs, "eos" if ids[-1] in ends else "stop" if stopped else "length")


class _StopTexts:
    """Which rows have written one of the texts that end them."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, rows: int) -> None:
        self._texts, self._tokenizer = list(texts), tokenizer
        self.look_back = max((len(text.encode()) for text in texts), default=0)  # a token is at least a byte
        self.hit = np.zeros(rows, dtype=np.bool_)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def look(self, ids: npt.NDArray[np.int64], count: int, lengths: Tensor) -> None:
        """`ids` [rows, the last few of `count` tokens]; what ends now has its length set."""
        known = lengths.cpu().numpy()
        for row in np.flatnonzero(~self.hit & (known >= count)):
            text = self._tokenizer.decode(ids[row], skip_special_tokens=False)  # a stop may be a special token
            if any(stop in text for stop in self._texts):
                self.hit[row] = True
                lengths[int(row)] = count


@contextmanager
def _writing(model: Any) -> Iterator[None]:
    """Without dropout, and without the compiled forward pass, which would be compiled anew for every length."""
    base = backbone(model)
    compiled = base._compiled_call_impl
    base._compiled_call_impl = None
    try:
        with evaluating(model):
            yield
    finally:
        base._compiled_call_impl = compiled
