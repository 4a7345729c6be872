"""Who computes the loss of a chunk's rows: the Triton kernels, or the torch blocks of losses/rows.py."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from potstill.losses.rows import Call, DenseRows, SampledRows, TopKRows

OLDEST = (8, 0)  # compute capability: what the kernels are compiled for in the tests
DENSE = {
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skew_kl",
    "skew_reverse_kl",
    "tvd",
}  # with dense teachers; others go by torch


class RowKernels(Protocol):
    def __call__(self, z: Tensor, grad: Tensor | None, rows: slice, call: Call) -> tuple[Tensor, Tensor]:
        """As rows.loss_of_rows, with the gradient put into `grad`."""
        ...


def kernels_for(call: Call) -> RowKernels | None:
    """The kernels where the device runs them and the call is one of theirs; None: the torch blocks, which do everything."""
    kinds = [type(comparison) for _, comparison in call.comparisons]
    ours = kinds in ([], [TopKRows], [SampledRows]) or (kinds == [DenseRows] and call.params.divergence in DENSE)
    ours = ours and call.token_clip is None
    if not ours or call.buffers.dtype != torch.float32 or without_kernels(call.buffers.device) is not None:
        return None
    from potstill.losses.kernels.loss import loss_of_rows

    return loss_of_rows


def without_kernels(device: torch.device) -> str | None:
    """Why the kernels do not run on a device; None where they do."""
    if interpreted():
        return None
    if device.type != "cuda":
        return f"there are none for the device {device.type}"
    return _without_kernels(device.index)


def kernels_note(device: torch.device) -> str | None:
    """What a user of a GPU is told if the loss does without the kernels."""
    reason = None if device.type == "cpu" else without_kernels(device)
    if reason is None:
        return None
    return f"the loss runs on torch's own operations and not on the faster Triton kernels (docs/gpu.md): {reason}"


def interpreted() -> bool:
    """Triton's interpreter is asked for: the kernels then run on tensors of any device, very slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _without_kernels(index: int | None) -> str | None:
    """On a CUDA or ROCm device."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and they need 8.0"
    return None
