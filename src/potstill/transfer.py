"""From the host's memory to a device without making the host wait, and threads that work on a device beside the main one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CPU = torch.device("cpu")
NO_FLOAT64 = ("mps",)


def to_device(values: Tensor | npt.NDArray[Any], device: torch.device) -> Tensor:
    """Host values on a device. CUDA copies from ordinary memory only while the host waits, so they go by way of pinned memory,
    which torch does not use again before the copy is done."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if host.dtype == torch.float64 and device.type in NO_FLOAT64:
        host = host.float()
    if device.type == "cuda" and host.device.type == "cpu":
        host = pinned(host)
    return host.to(device, non_blocking=True)


def exact(values: Tensor) -> Tensor:
    """In float64, for sums over many; in float32 on devices that have no float64."""
    return values.float() if values.device.type in NO_FLOAT64 else values.double()


def pinned(host: Tensor) -> Tensor:
    """In memory that a CUDA device reads by itself."""
    return host if host.is_pinned() else host.pin_memory()


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where a CUDA device is to read it. Of a CUDA tensor it is there after the next
    synchronisation."""
    cuda = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=cuda).copy_(tensor, non_blocking=cuda)


def use_device(device: torch.device) -> None:
    """On this thread: CUDA's current device is each thread's own, and the first one until it is said."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def handed_over(device: torch.device) -> AbstractContextManager[None]:
    """For work that another thread does on a device: made where it is handed over, entered where it is done. There it has a
    stream of its own, which begins once all that was asked of the device before is done."""
    if device.type != "cuda":
        return nullcontext()
    return _beside(device, torch.cuda.current_stream(device).record_event())


@contextmanager
def _beside(device: torch.device, before: torch.cuda.Event) -> Iterator[None]:
    use_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(before)
    with torch.cuda.stream(stream):
        yield
