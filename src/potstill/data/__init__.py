"""Data sets to batches: sources, pieces, examples, and the windows of a run."""

from potstill.data.examples import Encoder, Piece, piece_maker
from potstill.data.layout import collate, without
from potstill.data.pipeline import COUNTS, Window, Windows, count_windows
from potstill.data.prefetch import Prefetched
from potstill.data.sources import Source

__all__ = [
    "COUNTS",
    "Encoder",
    "Piece",
    "Prefetched",
    "Source",
    "Window",
    "Windows",
    "collate",
    "count_windows",
    "piece_maker",
    "without",
]
