"""`student.dropout`: every dropout of a model, wherever it keeps the probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import CPU, LLAMA, TOKENIZER

from potstill.config import SamplingConfig, StudentConfig
from potstill.losses.dense import target_logits
from potstill.models import LanguageModel, load_student
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.transformers import TransformersEngine
from potstill.students.dropout import check_dropout, set_dropout
from potstill.types import PotstillError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# Kept in modules, in attributes that functions read, in the config that functions read, for whole layers.
MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.1, "resid_pdrop": 0.2},
    "llama": {**LLAMA, "attention_dropout": 0.1},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "layerdrop": 0.5},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "falcon": {**SIZES, "hidden_dropout": 0.1, "attention_dropout": 0.1, "parallel_attn": False},
    "gpt_neox": {**SIZES, "intermediate_size": 48, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "phi": {**SIZES, "intermediate_size": 48, "resid_pdrop": 0.1, "attention_dropout": 0.1, "max_position_embeddings": 64},
}  # fmt: skip


def load(kind: str) -> LanguageModel:
    keys = {key: value for key, value in MODELS[kind].items() if key != "model_type"}
    return load_student(StudentConfig(config={"model_type": kind, **keys}, tokenizer=TOKENIZER), CPU, 0)


@torch.no_grad()
def gap(model: LanguageModel) -> float:
    """Between the log-probabilities with which a text was written and those of a pass in training mode."""
    ask = GenerationRequest(np.arange(5, 17, dtype=np.int32), 1)
    model.model.train()
    (text,) = TransformersEngine(model, SamplingConfig(max_new_tokens=16), stop_ids=()).generate([ask])
    assert model.model.training
    whole = torch.from_numpy(np.concatenate([ask.ids, text.ids])[None].astype(np.int64))
    torch.manual_seed(0)
    hidden = model.model.base_model(input_ids=whole, use_cache=False).last_hidden_state[0, len(ask.ids) - 1 : -1]
    logp = target_logits(model.at_rows(hidden, len(model.tokenizer)), slice(None)).log_softmax(-1)
    now = logp.gather(-1, whole[0, len(ask.ids) :, None]).squeeze(-1).numpy()
    return float(np.abs(now - text.logprobs).max())


@pytest.mark.parametrize("kind", MODELS)
def test_without_dropout_a_model_trains_as_it_writes(kind) -> None:
    model = load(kind)
    assert gap(model) > 1e-3
    assert max(set_dropout(model.model, 0.0)) in (0.1, 0.2, 0.5)
    assert gap(model) < 1e-5
    assert set_dropout(model.model, 0.0) == []  # nothing is left to change


@pytest.mark.parametrize("kind", MODELS)
def test_a_probability_is_set_everywhere_but_for_whole_layers(kind) -> None:
    model = load(kind)
    set_dropout(model.model, 0.0)
    assert set_dropout(model.model, 0.3) == [0.0]
    assert gap(model) > 1e-3
    kept = {"summary_first_dropout": 0.1, "classifier_dropout": 0.1, "layerdrop": 0.0}
    for key, value in model.model.config.to_dict().items():
        if "drop" in key and value is not None:
            assert value == kept.get(key, 0.3), key


@pytest.mark.parametrize("wrong", [1e300, -0.1, float("nan")])
def test_what_is_no_probability_is_told(wrong: float) -> None:
    student = load("llama")
    check_dropout(student.model)
    student.model.config.attention_dropout = wrong
    with pytest.raises(PotstillError, match=r"attention_dropout is .* a probability of dropout is between 0 and 1"):
        check_dropout(student.model)
