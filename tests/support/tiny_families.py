"""Tiny models of many families in float64, batches of packed documents, and targets of every kind for them.

Everything is made from a seed: every process can make the same, and no tensor has to be sent to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tiny_cross import chunks, relation, truncated
from tiny_prefix import random_prefix_marginal
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from potstill.data import collate
from potstill.models import LanguageModel, backbone
from potstill.models.attention import choose
from potstill.models.probe import HEAD_KEYS
from potstill.objective.student_loss import LossSettings
from potstill.types import (
    Batch,
    ChunkTarget,
    Example,
    Head,
    HiddenTarget,
    LogitsTarget,
    MeanTarget,
    SampledTarget,
    Target,
    TopKTarget,
)

V, TEACHER_V = 101, 29  # nothing divides 101; ids of a teacher with another tokenizer
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64, "vocab_size": V,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "attn_implementation": "eager", "final_logit_softcapping": 5.0, **WINDOW},
    "gemma3": {"model_type": "gemma3_text", **WINDOW},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "attn_implementation": "eager",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **WINDOW,
    },
    "phi3": {"model_type": "phi3", "tie_word_embeddings": False, "resid_pdrop": 0.0},
    "granite": {
        "model_type": "granite",
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "qwen3-moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {"model_type": "mixtral", "tie_word_embeddings": False, "num_local_experts": 4},
}


def make_model(family: str, seed: int = 0, **changes: Any) -> LanguageModel:
    keys = {**SIZES, **FAMILIES[family], **changes}
    kind, attention = keys.pop("model_type"), keys.pop("attn_implementation", "sdpa")
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, **{key: value for key, value in keys.items() if key in known})
    more = {"experts_implementation": "eager"} if "experts" in str(known) else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention, **more)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # norms and biases start at ones and zeros: make everything matter
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05)
    known = config.get_text_config().to_dict()
    head = {part: make(known[key]) for key, (part, make) in HEAD_KEYS.items() if known.get(key) is not None}
    choose(backbone(model), "varlen", attention)
    return LanguageModel(model, range(V), head, "varlen")  # type: ignore[arg-type]


def make_rows(count: int = 4, seed: int = 0, behaviour: bool = False) -> list[list[Example]]:
    """Rows of one to three packed documents; one of them has nothing supervised."""
    random = np.random.default_rng(seed)
    rows = []
    for r in range(count):
        row = []
        for i in range(1 + (r + seed) % 3):
            ids = random.integers(3, V - 4, int(random.integers(3, 14))).astype(np.int32)
            ids[0] = 0 if i else 1  # the padding id as a word of the text
            mask = random.random(len(ids)) < 0.7
            mask[0], mask[-1] = False, True
            if r == count - 1 and i == 0:
                mask[:] = False
            wrote = -random.exponential(2.0, len(ids)).astype(np.float32) if behaviour and i % 2 == 0 else None
            row.append(Example(f"{seed}-{r}-{i}", "", ids, mask, int(mask.sum()), behaviour=wrote))
        rows.append(row)
    return rows


def settings(divergence: str = "jsd", temperature: float = 1.7, **more: Any) -> LossSettings:
    return LossSettings(divergence, 0.3, 0.1, temperature, 0.8, 0.2, **more)


def random_logits(batch: Batch, width: int, seed: int) -> Tensor:
    """Rows that depend on the batch's labels and places alone."""
    words = torch.cat([batch.rows.labels, batch.rows.student]).tolist()
    generator = torch.Generator().manual_seed(seed + sum(i * word for i, word in enumerate(words)))
    return 2 * torch.randn(len(batch.rows), width, generator=generator, dtype=torch.float64)


def hidden_target(batch: Batch, seed: int = 7) -> HiddenTarget:
    """Over four ids less than the student has, with a cap."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V - 4, 6, generator=generator, dtype=torch.float64)
    return HiddenTarget(random_logits(batch, 6, seed), Head(weight, None, 9.0, 0.7))


def top_k_target(batch: Batch, temperature: float) -> TopKTarget:
    top = (random_logits(batch, V - 4, 3) / temperature).log_softmax(-1).topk(6)
    return TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1)), width=V - 4)


def sampled_target(batch: Batch) -> SampledTarget:
    p = random_logits(batch, V - 4, 4).softmax(-1)
    ids = (
        torch.multinomial(p, 5, replacement=True, generator=torch.Generator().manual_seed(2))
        if len(p)
        else p[:, :5].long()
    )
    entropy = -(p * p.log()).sum(-1)
    return SampledTarget(ids, torch.full(ids.shape, 0.2, dtype=torch.float64), entropy, width=V - 4)


def mean_target(batch: Batch) -> MeanTarget:
    return MeanTarget((0.3, 0.7), (hidden_target(batch), hidden_target(batch, 8)))


def chunk_target(batch: Batch, method: str, k: int | None = None) -> ChunkTarget:
    """Chunks of one to three rows, none over two documents, and rows in none."""
    lengths, gaps, gap = [], [], 0
    for number, example in enumerate(batch.examples):
        left = example.supervised_tokens
        while left:
            size = min(left, 1 + (number + left) % 3)
            if (number + left) % 5 == 4:
                gap += size
            else:
                lengths.append(size)
                gaps.append(gap)
                gap = 0
            left -= size
    where = chunks(lengths, gaps)
    vs, vt = V - 4, TEACHER_V
    pairs = {x * 3: y for y, x in enumerate(range(0, vt, 2))}
    projection = {x: {pairs[x]: 1.0} if x in pairs else {x % vt: 0.75, (x + 1) % vt: 0.25} for x in range(vs - 2)}
    start = random_logits(batch, vt, 5)[where.first]
    token = batch.rows.labels[where.first] % vt
    inner = -0.3 * (token % 4).double()
    logprob = start.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
    target = ChunkTarget(
        method, where, relation(pairs, projection, vs, vt), LogitsTarget(start), token, logprob, inner, 2.0
    )
    return target if k is None else truncated(target, k)


def prefix_target(batch: Batch) -> Target:
    return random_prefix_marginal(3, students=V - 4, rows=max(1, len(batch.rows)))[3].select(
        torch.arange(len(batch.rows))
    )


Make = Callable[[Batch], list[tuple[float | Tensor, Target]]]


def by_row(batch: Batch) -> Tensor:
    return 0.2 + (batch.rows.labels % 5).double() / 4


TARGETS: dict[str, tuple[LossSettings, Make]] = {
    **{
        f"hidden · {name} · T {t}": (settings(name, t), lambda batch: [(1.0, hidden_target(batch))])
        for name in ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd")
        for t in (1.0, 1.7)
    },
    "hidden · repeat": (settings(repeat_weight=0.3), lambda batch: [(1.0, hidden_target(batch))]),
    **{
        f"top-k · {name} · T {t}": (settings(name, t), lambda batch, t=t: [(1.0, top_k_target(batch, t))])
        for name, t in (("forward_kl", 1.0), ("jsd", 1.7), ("tvd", 1.0))
    },
    "sampled": (settings("forward_kl", 1.0), lambda batch: [(1.0, sampled_target(batch))]),
    "gate": (settings("reverse_kl", 1.7, entropy_gate=1.5), lambda batch: [(1.0, hidden_target(batch))]),
    "mean": (settings(), lambda batch: [(1.0, mean_target(batch))]),
    "two, by row": (
        settings("jsd", 1.0),
        lambda batch: [(by_row(batch), hidden_target(batch)), (0.4, top_k_target(batch, 1.0))],
    ),
    "nothing but the text": (settings(), lambda batch: []),
    **{
        f"{method} · {'dense' if k is None else 'top-k'}": (
            settings("jsd", 1.0 if method == "span_likelihood" or k else 1.7),
            lambda batch, method=method, k=k: [(1.0, chunk_target(batch, method, k))],
        )
        for method in ("common_vocab", "projection", "span_likelihood", "uld")
        for k in (None, 6)
    },
    "prefix_marginal": (settings("forward_kl", 1.7), lambda batch: [(1.0, prefix_target(batch))]),
    "policy_gradient_kl": (
        settings("policy_gradient_kl", 1.0, discount=0.9),
        lambda batch: [(1.0, hidden_target(batch)), (0.5, hidden_target(batch, 8))],
    ),
}
FAMILY_TARGET = replace(settings(), discount=0.0), TARGETS["hidden · jsd · T 1.7"][1]


def batches(count: int, behaviour: bool = False, rows: int = 4) -> list[Batch]:
    """So many micro-batches of a step."""
    return [collate(make_rows(rows, seed, behaviour), 0) for seed in range(count)]
