"""The numbers of a step: what they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from potstill.training.metrics import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be forgotten here")
def test_peak_memory_is_of_what_follows_the_reset() -> None:
    reset_peak_memory(CPU)
    before, mb = peak_memory_bytes(CPU), 1 << 20
    block = torch.ones(300 * mb // 4)
    assert peak_memory_bytes(CPU) > before + 280 * mb
    del block
    assert peak_memory_bytes(CPU) > before + 280 * mb, "it is a peak"
    reset_peak_memory(CPU)
    assert 0 < peak_memory_bytes(CPU) < before + 100 * mb
