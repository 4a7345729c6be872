"""Text and tokens: what a vocabulary stands for in bytes, how two of them line up, and how a chat becomes text."""

from potstill.text.align import Alignment, align, align_batch, align_spans
from potstill.text.prefix import prefix_table
from potstill.text.tokens import TokenTable, plain_backend
from potstill.text.vocab import VocabMap, vocab_map
from potstill.types import PrefixTable

__all__ = [
    "Alignment",
    "PrefixTable",
    "TokenTable",
    "VocabMap",
    "align",
    "align_batch",
    "align_spans",
    "plain_backend",
    "prefix_table",
    "vocab_map",
]
