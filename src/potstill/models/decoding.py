"""Texts under way as rows of a batch: what the model read of them is kept, or read again for each token.

B rows under way, H hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from potstill.models.language_model import LanguageModel, backbone

Ids = npt.NDArray[np.int32]
SPARE = 128  # positions that keys and values have room for beyond what is there


class Kept:
    """Rows under way: their last hidden states [B, H], and the keys, values and states behind them."""

    def __init__(self, writer: LanguageModel, prompts: Sequence[Ids], device: torch.device, selects: bool) -> None:
        self._backbone = backbone(writer.model)
        taken = inspect.signature(self._backbone.forward).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        self._takes = [name for name in ("attention_mask", "position_ids") if every or name in taken]
        # Named otherwise, the cache is of the model's own kind, and the first pass makes it.
        self._cache_name = next((name for name in ("cache_params", "state") if name in taken), "past_key_values")
        self._cache: Any = _roomy_cache(writer.model.config) if self._cache_name == "past_key_values" else None
        if not selects:  # states inside the model: a pass without a cache makes it forget them
            self._backbone(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
        # Several texts of one prompt: it is read once, where rows can be chosen afterwards.
        places: dict[bytes | int, int] = {}
        owner = [places.setdefault(prompt.tobytes() if selects else i, len(places)) for i, prompt in enumerate(prompts)]
        ids, there = _left_padded([prompts[owner.index(place)] for place in places.values()])
        self.rows = torch.arange(len(prompts), device=device)
        # Without padding the model needs no mask, and its fastest attention can run.
        self._mask: Tensor | None = None if there.all() else torch.from_numpy(there).to(device)
        self._next = torch.from_numpy(there.sum(-1)).to(device)  # position of the next token
        positions = torch.from_numpy(np.maximum(there.cumsum(-1) - 1, 0)).to(device)
        self.hidden = self._forward(torch.from_numpy(ids).to(device), positions)
        if len(places) < len(prompts):
            index = torch.tensor(owner, device=device)
            self._choose(index)
            self.hidden = self.hidden[index]

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
        if isinstance(self._cache, list | tuple):
            self._cache = _rows_of(self._cache, index, len(self._next))
        else:
            vars(self._cache).update(_rows_of(vars(self._cache), index, len(self._next)))
        self._next = self._next[index]
        self._mask = None if self._mask is None else self._mask[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        given = {"attention_mask": self._mask, "position_ids": positions}
        out = self._backbone(
            input_ids=ids,
            use_cache=True,
            **{name: value for name, value in given.items() if name in self._takes},
            **({} if self._cache is None else {self._cache_name: self._cache}),
        )
        if self._cache is None:
            self._cache = out[self._cache_name]
        return out.last_hidden_state[:, -1]


class Reread:
    """Rows under way, of one length, which are read again for each token."""

    def __init__(self, writer: LanguageModel, prompts: Sequence[Ids], device: torch.device, selects: bool) -> None:
        self._backbone = backbone(writer.model)
        self.rows = torch.arange(len(prompts), device=device)
        self._ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(device)
        self.step(self._ids[:, :0])

    def step(self, chosen: Tensor) -> None:
        self._ids = torch.cat([self._ids, chosen.view(len(self.rows), -1)], -1)
        self.hidden = self._backbone(input_ids=self._ids, use_cache=False).last_hidden_state[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.rows, self._ids = self.rows[rows], self._ids[rows]


def _roomy_cache(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers[:] = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _left_padded(prompts: Sequence[Ids]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Prompts as rows of one width, and 1 where there is a token of theirs."""
    ids, there = np.zeros((2, len(prompts), max(len(prompt) for prompt in prompts)), dtype=np.int64)
    for row, mask, prompt in zip(ids, there, prompts, strict=True):
        row[-len(prompt) :], mask[-len(prompt) :] = prompt, 1
    return ids, there


def _rows_of(value: Any, index: Tensor, rows: int) -> Any:
    """Chosen rows of whatever a model keeps of what it read: every tensor with a place for each of `rows`. (The methods that
    caches have for this leave out what some architectures add to them.)"""
    if isinstance(value, Tensor):
        return value.index_select(0, index.to(value.device)) if value.dim() and value.shape[0] == rows else value
    if isinstance(value, dict):
        return {key: _rows_of(each, index, rows) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rows_of(each, index, rows) for each in value)
    if isinstance(value, _RoomyLayer):
        value.choose(index)
    elif isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        vars(value).update(_rows_of(vars(value), index, rows))
    return value


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

    def choose(self, index: Tensor) -> None:
        """Go on with these rows, in one copy."""
        if self.is_initialized:
            length = self.keys.shape[-2]
            self._rooms = [
                None if room is None else room.index_select(0, index.to(room.device)) for room in self._rooms
            ]
            self.keys, self.values = (room[..., :length, :] for room in self._rooms if room is not None)

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
