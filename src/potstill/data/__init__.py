"""Data sets to batches: sources, examples, and the step batches of a run."""

from potstill.data.encoding import Encoded, Encoder, around, untrimmed
from potstill.data.examples import example_maker, ids_key, json_key
from potstill.data.feed import Feed, PreparedStep, check_there, count_left
from potstill.data.layout import collate, pack, without
from potstill.data.loader import COUNTS, StepBatches
from potstill.data.prefetch import Prefetched, StoppedWaiting
from potstill.data.sample import check_lengths, lost_in, with_pieces
from potstill.data.sources import Source, generator
from potstill.data.stream import State, open_stream

__all__ = [
    "COUNTS",
    "Encoded",
    "Encoder",
    "Feed",
    "Prefetched",
    "PreparedStep",
    "Source",
    "State",
    "StepBatches",
    "StoppedWaiting",
    "around",
    "check_lengths",
    "check_there",
    "collate",
    "count_left",
    "example_maker",
    "generator",
    "ids_key",
    "json_key",
    "lost_in",
    "open_stream",
    "pack",
    "untrimmed",
    "with_pieces",
    "without",
]
