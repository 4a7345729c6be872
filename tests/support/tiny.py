"""Tiny models and batches for the tests of numbers."""

import numpy as np
import torch

from potstill.config import StudentConfig
from potstill.data import collate
from potstill.models import LanguageModel, load_student
from potstill.types import Example

CPU = torch.device("cpu")
TOKENIZER = "shipped:tokenizers/bytes-2k"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def tiny(seed=0, **changes) -> LanguageModel:
    config = StudentConfig(config={**LLAMA, **changes}, tokenizer=TOKENIZER)
    return load_student(config, CPU, seed)


def example(ids, supervised=None) -> Example:
    ids = np.asarray(ids, dtype=np.int32)
    mask = np.ones(len(ids), dtype=bool) if supervised is None else np.asarray(supervised, dtype=bool)
    mask[0] = False
    return Example(key=str(ids.tolist()), text="", ids=ids, supervised=mask, supervised_bytes=1)


def examples(lengths, seed=0, vocabulary=2048) -> list[Example]:
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = generator.random(length) < 0.8
        mask[-1] = True
        made.append(example(generator.integers(5, vocabulary, length), mask))
    return made


def batch_of(*rows):
    """A batch of rows, each a list of examples (or one example)."""
    return collate([[row] if isinstance(row, Example) else row for row in rows], 0)
