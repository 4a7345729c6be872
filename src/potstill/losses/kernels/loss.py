"""The loss of a chunk of rows and its gradient by the Triton programs: what is [n, V] in them, what is [n] or [n, K] in torch.
The same numbers as rows.loss_of_rows, which is their twin in the tests."""

from __future__ import annotations

from torch import Tensor

from potstill.losses.kernels.chunk import KernelChunk
from potstill.losses.kernels.dense import dense_rows
from potstill.losses.kernels.truncated import label_rows, sampled_rows, top_k_rows
from potstill.losses.rows import Call, DenseRows, SampledRows, TopKRows


def loss_of_rows(z: Tensor, grad: Tensor | None, rows: slice, call: Call) -> tuple[Tensor, Tensor]:
    """Divergence and cross-entropy of rows with raw logits `z` [n, V], which are used up; their gradient goes into `grad`,
    which may be `z`. Both have room for one more column in each row."""
    chunk = KernelChunk(z, grad, rows, call)
    if not call.comparisons:
        return label_rows(chunk)
    ((_, comparison),) = call.comparisons
    if isinstance(comparison, DenseRows):
        return dense_rows(chunk, comparison)
    if isinstance(comparison, TopKRows):
        return top_k_rows(chunk, comparison)
    assert isinstance(comparison, SampledRows)
    return sampled_rows(chunk, comparison)
