"""Models of a few thousand weights and files of a few texts, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

TOKENIZER = "shipped:tokenizers/bytes-2k"


def make_model(folder: Path, *, seed: int = 1, dtype: str = "float32", **keys: object) -> Path:
    """A random Llama with the shipped tokenizer, saved to `folder`. Its weights are large, so that it has opinions."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from potstill.models import quiet
    from potstill.shipped import locate

    tokenizer = AutoTokenizer.from_pretrained(locate(TOKENIZER))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "initializer_range": 0.3} | sizes | keys
    torch.manual_seed(seed)
    with quiet():
        LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
