"""Data sets to batches: sources, pieces, examples, and the windows of a run."""

from potstill.data.encoding import Encoded, Encoder, untrimmed
from potstill.data.examples import Piece, ids_key, json_key, piece_maker
from potstill.data.layout import collate, pack, without
from potstill.data.pipeline import COUNTS, StepBatch, StepBatches, count_windows
from potstill.data.prefetch import Prefetched, StoppedWaiting
from potstill.data.sample import check_lengths, lost_in, with_pieces
from potstill.data.sources import Source, generator
from potstill.data.stream import State, open_stream

__all__ = [
    "COUNTS",
    "Encoded",
    "Encoder",
    "Piece",
    "Prefetched",
    "Source",
    "State",
    "StepBatch",
    "StepBatches",
    "StoppedWaiting",
    "check_lengths",
    "collate",
    "count_windows",
    "generator",
    "ids_key",
    "json_key",
    "lost_in",
    "open_stream",
    "pack",
    "piece_maker",
    "untrimmed",
    "with_pieces",
    "without",
]
