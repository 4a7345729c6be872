"""The families of open language models that docs/models.md is about, each with the config of a tiny random model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

# Sizes by the names that configs have for them; a config gets those that it knows.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "intermediate_size_mlp": 48,
    "ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "n_positions": 256, "model_max_length": 256,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "mamba_chunk_size": 16,
    "sliding_window": 24, "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
SIGHT_OF_LLAMA = {**SIGHT, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
SIGHT_OF_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


@dataclass(frozen=True)
class Family:
    model_type: str
    name: str
    text: Mapping[str, Any] = field(default_factory=dict)  # beside SMALL
    vision: Mapping[str, Any] | None = None  # models that also see

    def config(self) -> dict[str, Any]:
        """As a recipe's student.config has it."""
        known = AutoConfig.for_model(self.model_type).to_dict()
        if self.vision is None:
            return {"model_type": self.model_type, **_small(known), **self.text}
        inner = {**_small(known["text_config"]), **self.text}
        return {"model_type": self.model_type, "text_config": inner, "vision_config": dict(self.vision)}


def _small(known: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {key: value for key, value in SMALL.items() if known.get(key) is not None}
    if "head_dim" in known and "qk_rope_head_dim" in known:  # derived there
        del chosen["head_dim"]
    return chosen


LINEAR = {"num_hidden_layers": 4}  # three layers that carry a state, one of attention
LATENT = {"num_key_value_heads": 4}  # one for each head, made from what all share
LAYERED_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 2048}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 8,
    **LAYERED_INPUT,
}


def in_three(*sections: int) -> dict[str, Any]:
    """Rotary positions in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


FAMILIES = [
    Family("llama", "Llama 2/3"),
    Family("llama4", "Llama 4", {"attention_chunk_size": 64}, SIGHT_OF_LLAMA),
    Family("qwen2", "Qwen2/2.5"),
    Family("qwen3", "Qwen3"),
    Family("qwen3_moe", "Qwen3-MoE"),
    Family("qwen3_next", "Qwen3-Next", LINEAR),
    Family("qwen3_5", "Qwen3.5", LINEAR, SIGHT_OF_QWEN),
    Family("qwen3_5_moe", "Qwen3.5-MoE", LINEAR, SIGHT_OF_QWEN),
    Family("qwen2_5_vl", "Qwen2.5-VL", in_three(2, 1, 1), {**SIGHT_OF_QWEN, "fullatt_block_indexes": [0]}),
    Family("qwen3_vl", "Qwen3-VL", in_three(4, 2, 2), {**SIGHT_OF_QWEN, "deepstack_visual_indexes": [0]}),
    Family("mistral", "Mistral/Nemo"),
    Family("mistral3", "Mistral Small 3.1+/Ministral 3", {}, SIGHT),
    Family("mixtral", "Mixtral"),
    Family("gemma2", "Gemma 2"),
    Family("gemma3_text", "Gemma 3 270M/1B"),
    Family("gemma3", "Gemma 3 4B+", {}, SIGHT),
    Family("gemma3n_text", "Gemma 3n", SHARED_KEYS),
    Family("gemma4_text", "Gemma 4", {"final_logit_softcapping": 30.0, **LAYERED_INPUT}),
    Family("phi3", "Phi-3/4"),
    Family("phi", "Phi-2"),
    Family("gpt_oss", "gpt-oss"),
    Family("deepseek_v2", "DeepSeek-V2", {**LATENT, "num_experts_per_tok": 2}),
    Family("deepseek_v3", "DeepSeek-V3/R1/Kimi-K2", LATENT),
    Family("deepseek_v32", "DeepSeek-V3.2", LATENT),
    Family("deepseek_v4", "DeepSeek-V4"),
    Family("glm4", "GLM-4"),
    Family("glm4_moe", "GLM-4.5+"),
    Family("glm_moe_dsa", "GLM-5", LATENT),
    Family("kimi_linear", "Kimi Linear", {**LINEAR, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    Family("minimax_m2", "MiniMax-M2"),
    Family("smollm3", "SmolLM3"),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3"),
    Family("granite", "Granite 3", {"logits_scaling": 13.0}),
    Family("granitemoehybrid", "Granite 4 hybrid", {"layer_types": ["mamba", "attention"], "logits_scaling": 13.0}),
    Family("falcon_h1", "Falcon-H1", {"lm_head_multiplier": 0.039, "mamba_d_ssm": 64}),
    Family("cohere", "Command R"),
    Family("cohere2", "Command R7B/A"),
    Family("nemotron_h", "Nemotron-H/3"),
    Family("ernie4_5", "ERNIE 4.5"),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE"),
    Family("hunyuan_v1_dense", "Hunyuan", {"head_dim": 16}),
    Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"]}),
    Family("exaone4", "EXAONE 4"),
    Family("seed_oss", "Seed-OSS"),
    Family("starcoder2", "StarCoder2"),
    Family("gpt_neox", "Pythia"),
    Family("gpt2", "GPT-2"),
    Family("opt", "OPT"),
    Family("bloom", "BLOOM"),
    Family("mamba2", "Mamba-2", {"num_heads": 4, "state_size": 8}),
]  # fmt: skip
