"""Text written by a transformers model in this process: batched, with its keys and values kept.

B rows under way, P positions of the longest prompt, H hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from potstill.config import SamplingConfig
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel
from potstill.rollouts.engine import Ask, Written
from potstill.rollouts.sampling import draw, uniforms
from potstill.types import PotstillError

SPARE = 128  # positions that keys and values have room for beyond what is there
LOOK_EVERY = 8  # tokens between looks at which texts are finished, on devices where a look means waiting
TOLERANCE = {torch.float32: 2e-3}  # of log-probabilities, token by token against all at once; of other dtypes: 0.25


class TransformersEngine:
    """`stop_ids`: whichever comes first ends a text. `copies`: write with a copy of the weights, as they were at the last
    update, so that texts can be written while the model trains. `autocast`: a context to compute in."""

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
    ) -> None:
        self.version = 0
        self._original = language_model
        if copies:
            language_model = replace(language_model, model=copy.deepcopy(language_model.model))
        self._writer = language_model
        self._sampling, self._batch_size = sampling, batch_size
        self._width = min(len(language_model.tokenizer), language_model.model.get_output_embeddings().weight.shape[0])
        self._stop = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=language_model.model.device)
        self._autocast = autocast
        self._check(who)

    def update(self, version: int) -> None:
        self.version = version
        if self._writer is not self._original:
            with torch.no_grad():
                for mine, theirs in zip(
                    self._writer.model.state_dict().values(), self._original.model.state_dict().values(), strict=True
                ):
                    mine.copy_(theirs)

    def close(self) -> None:
        """It keeps nothing."""

    @torch.no_grad()
    def generate(self, asked: Sequence[Ask]) -> list[Written]:
        found: list[Written | None] = [None] * len(asked)
        with _writing(self._writer.model), self._autocast():
            for some in self._parts(asked):
                for i, written in zip(some, self._write([asked[i] for i in some]), strict=True):
                    found[i] = written
        return [written for written in found if written is not None]

    def _parts(self, asked: Sequence[Ask]) -> Iterator[list[int]]:
        """What is written at once: prompts of like lengths; of equal ones, where the model takes no masks of ours (one that
        carries a state along reads padding as text)."""
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i].ids), asked[i].ids.tobytes()))
        part: list[int] = []
        for i in order:
            other = part and self._writer.masks == "own" and len(asked[part[0]].ids) != len(asked[i].ids)
            if len(part) == self._batch_size or other:
                yield part
                part = []
            part.append(i)
        if part:
            yield part

    def _write(self, asked: Sequence[Ask]) -> list[Written]:
        device = self._writer.model.device
        most, rows = self._sampling.max_new_tokens, len(asked)
        random = torch.from_numpy(uniforms([ask.seed for ask in asked], most)).to(device)
        run = _Run(self._writer, asked, device)
        ids = torch.zeros(rows, most, dtype=torch.int64, device=device)
        logprobs = torch.zeros(rows, most, device=device)
        lengths = torch.full((rows,), most, dtype=torch.int64, device=device)  # of those that no stop id ends
        stops = _StopTexts(self._sampling.stop, self._writer.tokenizer, rows)
        for at in range(most):
            logits = target_logits(self._writer.at_rows(run.hidden, self._width), slice(None))
            chosen, logprob = draw(logits, random[run.rows, at], self._sampling)
            ids[run.rows, at], logprobs[run.rows, at] = chosen, logprob.float()
            ended = torch.isin(chosen, self._stop) & (lengths[run.rows] == most)
            lengths[run.rows] = torch.where(ended, at + 1, lengths[run.rows])
            last = at + 1 == most
            if stops:
                stops.look(ids[:, max(0, at + 1 - stops.look_back) : at + 1].cpu().numpy(), at + 1, lengths)
            if not last and (device.type == "cpu" or stops or (at + 1) % LOOK_EVERY == 0):
                under_way = lengths[run.rows] == most
                left = int(under_way.sum())
                if not left:
                    break
                if left <= 0.75 * len(run.rows):  # making the batch smaller moves all keys and values
                    run.keep(under_way)
                    chosen = chosen[under_way]
            if not last:
                run.step(chosen)
        return [
            Written(row[:n].astype(np.int32), chances[:n], self._end(row[:n], bool(stops.hit[i])))
            for i, (row, chances, n) in enumerate(
                zip(ids.cpu().numpy(), logprobs.cpu().numpy(), lengths.tolist(), strict=True)
            )
        ]

    def _end(self, ids: npt.NDArray[Any], stopped: bool) -> Literal["eos", "stop", "length"]:
        if len(ids) and int(ids[-1]) in self._stop.tolist():
            return "eos"
        return "stop" if stopped else "length"

    def _check(self, who: str) -> None:
        """That what is written token by token, beside a longer prompt, is what the model says of the whole text."""
        model, few = self._writer.model, 4
        ids = (np.arange(12, dtype=np.int32) * 7 + 3) % self._width
        asked = [Ask(ids[:5], 1), Ask(ids, 2)]
        plain = SamplingConfig(max_new_tokens=few)
        engine = copy.copy(self)
        engine._sampling, engine._stop = plain, self._stop[:0]
        try:
            written = engine.generate(asked)
            with torch.no_grad(), _writing(model), self._autocast():
                for ask, text in zip(asked, written, strict=True):
                    whole = torch.from_numpy(np.concatenate([ask.ids, text.ids])[None].astype(np.int64)).to(
                        model.device
                    )
                    hidden = model.base_model(input_ids=whole, use_cache=False).last_hidden_state[
                        0, len(ask.ids) - 1 : -1
                    ]
                    logp = target_logits(self._writer.at_rows(hidden, self._width), slice(None)).float().log_softmax(-1)
                    chances = logp.gather(-1, whole[0, len(ask.ids) :, None]).squeeze(-1).cpu().numpy()
                    off = float(np.abs(chances - text.logprobs).max())
                    tolerance = TOLERANCE.get(model.dtype, 0.25) if self._autocast is nullcontext else 0.25
                    if not off <= tolerance:
                        raise PotstillError(
                            f"policy.engine: {who} ({model.config.model_type}) says something else when it writes token by "
                            f"token (log-probabilities differ by {off:.3g}): choose policy.engine.kind: vllm"
                        )
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            raise PotstillError(
                f"policy.engine: {who} ({model.config.model_type}) cannot write text with transformers here "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): choose policy.engine.kind: vllm"
            ) from error


class _Run:
    """Rows under way: their last hidden states [B, H], and the keys and values behind them."""

    def __init__(self, writer: LanguageModel, asked: Sequence[Ask], device: torch.device) -> None:
        self._model = writer.model
        self._cache: Any = DynamicCache(config=writer.model.config)
        for i, layer in enumerate(self._cache.layers):
            if type(layer) is DynamicLayer:
                self._cache.layers[i] = _RoomyLayer()
        prompts: dict[bytes, npt.NDArray[np.int32]] = {ask.ids.tobytes(): ask.ids for ask in asked}
        place = {key: i for i, key in enumerate(prompts)}
        widest = max(len(ids) for ids in prompts.values())
        ids = np.zeros((len(prompts), widest), dtype=np.int64)
        there = np.zeros((len(prompts), widest), dtype=np.int64)
        for i, prompt in enumerate(prompts.values()):
            ids[i, widest - len(prompt) :] = prompt
            there[i, widest - len(prompt) :] = 1
        self.rows = torch.arange(len(asked), device=device)
        # Without padding the model needs no mask, and its fastest attention can run.
        self._mask: Tensor | None = None if there.all() else torch.from_numpy(there).to(device)
        self._next = torch.from_numpy(there.sum(-1)).to(device)  # position of the next token
        positions = torch.from_numpy(np.maximum(there.cumsum(-1) - 1, 0)).to(device)
        hidden = self._forward(torch.from_numpy(ids).to(device), positions)
        owner = torch.tensor([place[ask.ids.tobytes()] for ask in asked], device=device)
        if len(prompts) == len(asked) and bool((owner == self.rows).all()):
            self.hidden = hidden
        else:  # several texts of one prompt, which was read once
            self._choose(owner)
            self.hidden = hidden[owner]

    def step(self, chosen: Tensor) -> None:
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], -1)
        self.hidden = self._forward(chosen[:, None], self._next[:, None])
        self._next = self._next + 1

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows only."""
        index = rows.nonzero().squeeze(-1)
        self.rows = self.rows[index]
        self._choose(index)

    def _choose(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        self._next = self._next[index]
        self._mask = None if self._mask is None else self._mask[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self._model.base_model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]


class _RoomyLayer(DynamicLayer):
    """Keys and values with room for what is still to come: nothing is moved when a token is added."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self._rooms: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._longer(0, self.keys, key_states)
        self.values = self._longer(1, self.values, value_states)
        return self.keys, self.values

    def _longer(self, which: int, old: Tensor, new: Tensor) -> Tensor:
        have = old.shape[-2] if old.numel() else 0
        need, room = have + new.shape[-2], self._rooms[which]
        if room is None or (have and room.data_ptr() != old.data_ptr()) or room.shape[-2] < need:
            room = new.new_empty(*new.shape[:-2], need + SPARE, new.shape[-1])
            if have:
                room[..., :have, :] = old
            self._rooms[which] = room
        room[..., have:need, :] = new
        return room[..., :need, :]


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
    training, base = model.training, model.base_model
    compiled = base._compiled_call_impl
    base._compiled_call_impl = None
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        base._compiled_call_impl = compiled
