"""Products of matrices, wide whatever their operands are in."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

UPCAST_BYTES = 32 * 2**20  # of a matrix that is widened at a time


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a [n, k] · b [k, m] in float32 at least, or that added to `out`; under autocast too, which would narrow them again.
    Logits that are rounded to bfloat16 drown what a student that is near its teacher has still to learn: at a KL of 0.006 a
    quarter of the gradient would be rounding."""
    device = a.device.type
    narrowing = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if narrowing else nullcontext():
        return _wide_product(a, b, out, add)


def _wide_product(a: Tensor, b: Tensor, out: Tensor | None, add: bool) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    if out is None:
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            return a.to(wide) @ b.to(wide)
        out = a.new_empty(a.shape[0], b.shape[1], dtype=wide)
    if a.dtype == out.dtype:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    if out.dtype == wide and widens(a.device.type):
        return torch.addmm(out, a, b, wide, out=out) if add else torch.mm(a, b, wide, out=out)
    step = max(1, UPCAST_BYTES // (4 * max(1, b.shape[0])))
    a = a.to(wide)
    for first in range(0, b.shape[1], step):
        columns = slice(first, first + step)
        part = a @ b[:, columns].to(wide)
        out[:, columns] = out[:, columns] + part if add else part
    return out


@cache
def widens(device: str) -> bool:
    """Whether a device gives the product of narrow matrices in float32. Asked of the device itself, also while fake tensors are
    counted with: they would say yes for a CPU, which does not, and the answer is kept."""
    try:
        with _disable_current_modes():
            one = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(one, one, torch.float32)
    except (NotImplementedError, RuntimeError, AssertionError):  # the last: a build of torch without the device
        return False
    return True
