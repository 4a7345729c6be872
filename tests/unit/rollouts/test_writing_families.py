"""What models of many architectures write, rows ending early and several texts of one prompt, against one pass over each text
alone: hybrids, and models that carry a state along."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import CPU, TOKENIZER

from potstill.config import SamplingConfig, StudentConfig
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel, decoding, load_student
from potstill.rollouts import transformers
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.transformers import TransformersEngine

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MAMBA = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "conv_kernel": 4, "expand": 2}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_chunk_size": 8,
}  # fmt: skip
ZAMBA = {"num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64, "mamba_d_state": 8}
TOGETHER, APART, ALL_STAY, AGAIN = range(4)  # places in WAYS
# model_type, keys, the way that is right for it.
FAMILIES = [
    ("qwen3_next", {**SIZES, **LINEAR, **EXPERTS}, TOGETHER),
    ("qwen3_5_text", {**SIZES, **LINEAR}, TOGETHER),
    ("nemotron_h", {
        "hidden_size": 32, "intermediate_size": 48, "layers_block_type": ["mamba", "attention", "moe"], "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "chunk_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    }, TOGETHER),
    ("jamba", {
        **SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    }, TOGETHER),
    ("bamba", {**SIZES, **MAMBA2, "attn_layer_indices": [1]}, TOGETHER),
    ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, TOGETHER),
    ("granitemoehybrid", {
        **SIZES, **MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    }, TOGETHER),
    ("zamba", {
        **SIZES, **ZAMBA, "num_hidden_layers": 5, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False,
    }, TOGETHER),
    ("zamba2", {
        **SIZES, **ZAMBA, "num_hidden_layers": 3, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1], "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8, "adapter_rank": 4,
    }, TOGETHER),
    ("kimi_linear", {
        **{key: SIZES[key] for key in SIZES if key != "max_position_embeddings"}, "num_key_value_heads": 4, "num_experts": 4,
        "moe_intermediate_size": 16, "num_experts_per_token": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8, "layer_types": LINEAR["layer_types"], "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 8, "linear_num_heads": 4,
    }, TOGETHER),
    ("falcon_h1", {**SIZES, **MAMBA2, "mamba_n_heads": 4, "mamba_d_ssm": 32}, TOGETHER),
    ("mamba", MAMBA, APART),  # reads padding as text
    ("falcon_mamba", MAMBA, APART),
    ("mamba2", {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}, TOGETHER),
    ("recurrent_gemma", {  # its state is inside its modules
        "hidden_size": 32, "lru_width": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 8, "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    }, ALL_STAY),
    ("xlstm", {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16}, AGAIN),
    ("rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}, AGAIN),
]  # fmt: skip
LIKE_ANOTHER = ("zamba2", "falcon_mamba", "xlstm")  # of the families here
KEYS = {kind: keys for kind, keys, _ in FAMILIES}
PROMPTS = [np.random.default_rng(n).integers(5, 2000, n).astype(np.int32) for n in (3, 9, 1, 8, 14)]
ASKED = [GenerationRequest(PROMPTS[i], seed) for seed, i in enumerate((0, 1, 2, 3, 4, 1, 1, 0))]


def load(kind: str, keys: dict) -> LanguageModel:
    return load_student(StudentConfig(config={"model_type": kind, **keys}, tokenizer=TOKENIZER), CPU, 0)


@torch.no_grad()
def alone(model: LanguageModel, ask: GenerationRequest, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities [C, V] at each token of an answer, from one pass over the whole text."""
    whole = torch.from_numpy(np.concatenate([ask.ids, ids])[None].astype(np.int64))
    model.model.eval()
    hidden = model.model.base_model(input_ids=whole, use_cache=False).last_hidden_state[0, len(ask.ids) - 1 : -1]
    return target_logits(model.at_rows(hidden, len(model.tokenizer)), slice(None)).log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "keys", "way"),
    [pytest.param(*each, id=each[0], marks=[pytest.mark.slow] * (each[0] in LIKE_ANOTHER)) for each in FAMILIES],
)
def test_what_is_written_is_what_the_model_says_of_each_text_alone(kind, keys, way) -> None:
    model = load(kind, keys)
    free = TransformersEngine(model, SamplingConfig(max_new_tokens=10), stop_ids=())
    assert free.way == transformers.WAYS[way]
    assert bool(free.notes) == (way != TOGETHER) and all(free.way.slower in note for note in free.notes)
    written = free.generate(ASKED)
    stops = [int(written[i].ids[n]) for i, n in ((0, 1), (1, 2), (5, 3), (7, 5))]
    free._stop = torch.tensor(sorted(set(stops)))
    ended = free.generate(ASKED)
    assert sum(text.end == "eos" for text in ended) >= 4 and max(len(text.ids) for text in ended) == 10
    for ask, before, text in zip(ASKED, written, ended, strict=True):
        assert text.ids.tolist() == before.ids[: len(text.ids)].tolist()
        expected = alone(model, ask, text.ids).gather(-1, torch.from_numpy(text.ids.astype(np.int64))[:, None])
        np.testing.assert_allclose(text.logprobs, expected.squeeze(-1), atol=1e-5)


def test_greedy_text_of_a_hybrid_is_its_own_argmax() -> None:
    model = load("lfm2", KEYS["lfm2"])
    engine = TransformersEngine(model, SamplingConfig(max_new_tokens=10, temperature=0.0), stop_ids=())
    for ask, text in zip(ASKED, engine.generate(ASKED), strict=True):
        assert text.ids.tolist() == alone(model, ask, text.ids).argmax(-1).tolist()


def test_a_state_that_does_not_follow_its_row_is_noticed_before_anything_is_written(monkeypatch) -> None:
    """Row selection that leaves out what is no key or value, as the caches' own methods do for some architectures."""
    chosen = decoding._rows_of

    def forgetful(value, index, count):
        state = isinstance(value, decoding.LinearAttentionCacheLayerMixin)
        return chosen(value, index.roll(1) if state else index, count)

    model = load("mamba2", KEYS["mamba2"])
    monkeypatch.setattr(decoding, "_rows_of", forgetful)
    engine = TransformersEngine(model, SamplingConfig(max_new_tokens=4), stop_ids=())
    assert engine.way == transformers.WAYS[ALL_STAY]
    (note,) = engine.notes
    assert note == (
        "rollouts.engine: the student (mamba2) writes more slowly than others: only prompts of one length are written to at "
        "once, and finished texts stay in the batch"
    )
