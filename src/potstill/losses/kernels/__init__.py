"""Row kernels in Triton for the loss, where a device runs them. Importing this imports no Triton."""

from potstill.losses.kernels.choose import kernels_for, kernels_note, without_kernels

__all__ = ["kernels_for", "kernels_note", "without_kernels"]
