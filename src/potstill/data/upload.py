"""Batches on their way to a device, ahead of the step that trains on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from potstill.transfer import pinned
from potstill.types import Batch

Arriving = Callable[[], Batch]
Record = TypeVar("Record")


class Uploads:
    """Called on the thread that prepares steps. On CUDA the copy goes over a stream of its own, from pinned memory; what was
    begun is waited for by the device, where the batch is first used, and not by the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, batch: Batch) -> Arriving:
        """What is given back is called on the thread that trains."""
        if self._stream is None:
            return lambda: batch.to(self._device)
        with torch.cuda.stream(self._stream):
            there = batch.to(self._device)
            done = self._stream.record_event()

        def arrived() -> Batch:
            training = torch.cuda.current_stream(self._device)
            training.wait_event(done)
            for tensor in _tensors(there):
                tensor.record_stream(
                    training
                )  # it was allocated for the other stream, and is not to be used again there
            return there

        return arrived

    def pinned(self, prepared: Record) -> Record:
        """What a teacher made ready, with its tensors in pinned memory where the device is CUDA."""
        return prepared if self._stream is None else _pinned(prepared)


def _pinned(value: Any) -> Any:
    """Within dataclasses and sequences of them; all else stays as it is."""
    if isinstance(value, Tensor):
        return pinned(value) if value.device.type == "cpu" else value
    if isinstance(value, list | tuple):
        return type(value)(map(_pinned, value)) if any(is_dataclass(each) for each in value) else value
    if not is_dataclass(value) or isinstance(value, type):
        return value
    found = {each.name: (getattr(value, each.name), _pinned(getattr(value, each.name))) for each in fields(value)}
    changed = {name: after for name, (before, after) in found.items() if after is not before}
    return replace(value, **changed) if changed else value


def _tensors(batch: Batch) -> list[Tensor]:
    values = [getattr(record, each.name) for record in (batch, batch.rows) for each in fields(record)]
    return [value for value in values if isinstance(value, Tensor)]
