"""Data sets to batches: sources, pieces, examples, and the windows of a run."""

from potstill.data.layout import collate
from potstill.data.pipeline import COUNTS, Window, Windows, count_windows
from potstill.data.prefetch import Prefetched

__all__ = ["COUNTS", "Prefetched", "Window", "Windows", "collate", "count_windows"]
