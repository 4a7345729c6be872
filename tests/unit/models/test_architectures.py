"""What differs between architectures: what they do around their heads, whether packed documents see each other, what else they
have than a language model, and tokenizers that do not quite fit."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import CPU, LLAMA, TOKENIZER, batch_of, example, examples, tiny

from potstill.config import DataConfig, StudentConfig, TeacherConfig
from potstill.config.recipe import load_recipe
from potstill.losses.dense import target_logits
from potstill.models import backbone, check_fit, hidden_states, load_student, load_teacher, load_tokenizer, shared_ids
from potstill.models.probe import _with_another_first
from potstill.training.loop import train
from potstill.training.setup import assemble
from potstill.types import PotstillError

MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 8}
HYBRIDS = {
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 32, **MAMBA},
    "jamba": {
        "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "mamba_d_state": 4, "use_mamba_kernels": False,
    },
    "zamba": {
        "model_type": "zamba", "num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 0,
        "attention_hidden_size": 64, "attention_head_dim": 32, "mamba_d_state": 4, "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
}  # fmt: skip
SCALED = {
    "soft cap": {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 30.0},
    "bias": {"model_type": "phi"},
    "a scale that is no power of two": {"model_type": "granite", "logits_scaling": 13.0},
    "a scale before the head": {"model_type": "minicpm3", "dim_model_base": 7, "num_key_value_heads": 2},
    "a head kept in float32": {"model_type": "mamba", "state_size": 4},
    "a hybrid with a multiplier": {**HYBRIDS["falcon_h1"], "lm_head_multiplier": 0.039},
}


def model_of(config, dtype="float32", **changes):
    """A tiny model of any kind: of a Llama's sizes it takes those that its config has a name for."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(config["model_type"]).to_dict()
    sizes = {key: value for key, value in LLAMA.items() if key in known and key != "model_type"}
    return load_student(
        StudentConfig(config={**sizes, **config, **changes}, tokenizer=TOKENIZER, dtype=dtype), CPU, seed=0
    )


@pytest.mark.parametrize("config", SCALED.values(), ids=SCALED.keys())
def test_bfloat16_models_are_probed_as_exactly_as_float32_ones(config):
    half, whole = model_of(config, "bfloat16"), model_of(config)
    assert half.head == whole.head
    for parameter in whole.model.parameters():  # biases are trivial at the start
        torch.nn.init.normal_(parameter, std=0.2)
    batch = batch_of(*examples([20, 20]))
    with torch.no_grad():
        logits = whole.model.eval()(batch.input_ids).logits
        ours = target_logits(whole.at_rows(hidden_states(whole.model, batch, "own").flatten(0, 1)), slice(None))
    torch.testing.assert_close(ours, logits.flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_of_four_hundredths_is_not_taken_for_rounding(dtype, monkeypatch):
    from potstill.models import probe

    monkeypatch.setattr(probe, "HEAD_KEYS", {})
    with pytest.raises(PotstillError, match="between its last hidden state and its logits"):
        tiny(0, model_type="granite", logits_scaling=1.04) if dtype == "float32" else model_of(
            {"model_type": "granite", "logits_scaling": 1.04}, dtype
        )


INKLING = {
    "model_type": "inkling_text", "head_dim": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
}  # fmt: skip


def test_head_that_gives_fewer_logits_than_it_has_rows():
    """Inkling: its matrices are padded, its logits are not, and what enters its head is divided."""
    student = model_of(INKLING, vocab_size=2112, unpadded_vocab_size=2048)
    assert student.head == {"logit_scale": 1 / 24.0} and student.rows == student.vocabulary == 2048
    batch = batch_of(*examples([20]))
    with torch.no_grad():
        logits = student.model.eval()(batch.input_ids).logits[0]
        ours = target_logits(student.at_rows(hidden_states(student.model, batch, "own")[0]), slice(None))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", HYBRIDS.values(), ids=HYBRIDS.keys())
def test_hybrids_whose_state_runs_on_into_the_next_document_are_found(config, dtype):
    student = model_of(config, dtype)
    assert student.attention == "own"
    with pytest.raises(PotstillError, match=r"sdpa attention\) cannot keep packed .* set data.packing to false$"):
        check_fit(DataConfig(sources=[{"files": "x"}], packing=True, max_length=64), "data", "the student", student)


SOUND = {
    "llama": LLAMA,
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    "gemma2": SCALED["soft cap"],
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", SOUND.values(), ids=SOUND.keys())
def test_another_first_document_does_not_change_the_second_at_all(config, dtype):
    student = model_of(config, dtype)
    assert student.attention == "varlen"
    first, second = examples([20, 20])
    batch = batch_of([first, second])
    with torch.no_grad():
        one = hidden_states(student.model.eval(), batch, "varlen")
        other = hidden_states(student.model, _with_another_first(batch, 2048), "varlen")
    assert (one[:, :20] - other[:, :20]).abs().max() > 0.01
    assert (one[:, 20:] - other[:, 20:]).abs().max() <= (1e-5 if config is SOUND["mixtral"] else 0.0)


def test_experts_that_round_by_company_may_be_packed():
    """Large enough that a product's rounding depends on how many tokens share an expert."""
    changes = {"hidden_size": 512, "intermediate_size": 768, "num_local_experts": 16}
    assert model_of({"model_type": "mixtral"}, **changes).attention == "varlen"


LONGROPE = {
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


def test_short_texts_beside_a_long_one_keep_the_factors_for_short_ones():
    student = model_of(LONGROPE)
    for parameter in student.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    student.model.eval()
    texts = examples([20, 60, 32, 33])

    def read(*some):
        batch = batch_of(*some)
        return student.hidden(batch, batch.rows.student)

    with torch.no_grad():
        torch.testing.assert_close(read(*texts), torch.cat([read(text) for text in texts]))
        batch = batch_of(*texts)
        together = hidden_states(student.model, batch, "varlen").flatten(0, 1)[batch.rows.student]
        assert (together - read(*texts)).abs().max() > 1e-2
    data = DataConfig(sources=[{"files": "x"}], packing=True, max_length=64)
    with pytest.raises(
        PotstillError, match=r"longer than 32 tokens \(longrope\): set data.packing to false, or data.max_l"
    ):
        check_fit(data, "data", "the student", student)
    check_fit(data.model_copy(update={"max_length": 32}), "data", "the student", student)


def test_texts_are_not_written_past_where_the_factors_change(tmp_path):
    recipe = {
        "student": {"config": {**LLAMA, **LONGROPE}, "tokenizer": TOKENIZER},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "shipped:corpus/heldout.parquet"}], "packing": False, "max_length": 64},
        "rollouts": {"on_policy_fraction": 1.0, "sampling": {"max_new_tokens": 8}},
        "train": {"steps": 1},
        "run": str(tmp_path),
    }
    with pytest.raises(PotstillError, match=r"max_length is 64 and the student cannot write texts beyond 32 tokens"):
        assemble(load_recipe(recipe))
    recipe["data"]["max_length"] = 32
    assemble(load_recipe(recipe))
    held_out = {"sources": [{"files": "shipped:corpus/heldout.parquet"}], "max_length": 64, "packing": False}
    recipe["eval"] = {"data": held_out, "on_policy_samples": 2}
    with pytest.raises(PotstillError, match=r"eval.data.max_length is 64 and the student cannot write texts beyond 32"):
        assemble(load_recipe(recipe))


SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
TEXT = {key: value for key, value in LLAMA.items() if key not in ("model_type", "tie_word_embeddings")}
IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
WRAPPERS = {
    "qwen2_5_vl": ({"rope_parameters": IN_THREE}, {**EYES, "fullatt_block_indexes": [0]}),
    "qwen3_5": ({"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, **LINEAR}, EYES),
    "llama4": (
        {"intermediate_size_mlp": 32, "head_dim": 16, "num_local_experts": 2},
        {**SIGHT, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "mistral3": ({"head_dim": 16}, SIGHT),
}


def wrapper(kind):
    text, vision = WRAPPERS[kind]
    config = {"model_type": kind, "text_config": {**TEXT, **text}, "vision_config": vision}
    return load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_models_that_also_see_learn_as_language_models_and_are_saved_whole(kind, tmp_path):
    from transformers import AutoModelForImageTextToText

    made = wrapper(kind)
    made.save(tmp_path / "made")
    (tmp_path / "made" / "preprocessor_config.json").write_text('{"size": 32}')
    student = load_student(StudentConfig(model=str(tmp_path / "made")), CPU, 0)
    assert type(student.model) is type(made.model) and "ForConditionalGeneration" in type(student.model).__name__
    assert "also sees: its language model learns, its other parts are saved as they are" in student.notes[-1]
    batch = batch_of(*examples([20, 30]))
    with torch.no_grad():
        logits = student.model.eval()(batch.input_ids[1:]).logits[0]
        ours = target_logits(student.at_rows(student.hidden(batch, torch.arange(30, 60))), slice(None))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    student.hidden(batch, batch.rows.student).square().sum().backward()
    torch.optim.SGD([p for p in student.model.parameters() if p.grad is not None], lr=1.0).step()
    student.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text() == '{"size": 32}'
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "saved"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("vis" in name or "projector" in name for name in changed)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(batch.input_ids).logits, student.model.eval()(batch.input_ids).logits)
    teacher = load_teacher(TeacherConfig(model=str(tmp_path / "saved")), CPU, "teachers[0]")
    assert type(teacher.model) is type(made.model) and backbone(teacher.model) is not teacher.model


def test_a_language_model_saved_without_its_eyes_is_loaded_without(tmp_path):
    text, _ = WRAPPERS["qwen3_5"]
    config = {"model_type": "qwen3_5", "text_config": {**TEXT, **text}}  # no vision_config: none is wanted
    made = load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0)
    assert type(made.model).__name__ == "Qwen3_5ForCausalLM" and not made.notes
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = load_student(StudentConfig(model=str(tmp_path)), CPU, 0)
    assert type(loaded.model) is type(made.model)


def test_gradient_checkpointing_where_transformers_has_none_is_a_sentence(tmp_path):
    recipe = {
        "student": {"config": JETMOE, "tokenizer": TOKENIZER},
        "data": {"sources": [{"files": "shipped:corpus/heldout.parquet"}], "packing": False, "max_length": 32},
        "train": {"steps": 1, "gradient_checkpointing": True},
        "run": str(tmp_path),
    }
    with pytest.raises(
        PotstillError, match=r"^train\.gradient_checkpointing: transformers has none for jetmoe models: set"
    ):
        assemble(load_recipe(recipe))
    recipe["train"]["gradient_checkpointing"] = False
    parts = assemble(load_recipe(recipe))
    assert not parts.notes
    assert parts.module.routers.coefficient == 0.01  # which it calls aux_loss_coef


JETMOE = {"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8}
JETMOE |= {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128}


def with_idle_token(**changes):
    """A model and a tokenizer with one token more than it has rows, as Gemma 3 1B is published."""
    saved = tiny(0, **changes)
    saved.tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    return saved


def test_an_added_token_without_a_row_is_said_and_refused_in_text_only(tmp_path):
    saved = with_idle_token()
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    student = load_student(StudentConfig(model=str(tmp_path)), CPU, 0)
    teacher = load_teacher(TeacherConfig(model=str(tmp_path)), CPU, "teachers[0]")
    assert "no embedding for '<image_soft_token>' (id 2048) of its tokenizer" in student.notes[0]
    assert "no embedding for '<image_soft_token>' (id 2048)" in teacher.notes[0]
    assert shared_ids(student, teacher, "teachers[0]") == student.vocabulary == 2048
    batch = batch_of(*examples([20]))
    assert student.hidden(batch, batch.rows.student).shape == (len(batch.rows), 32)
    ids = student.tokenizer("see <image_soft_token>").input_ids
    assert ids[-1] == 2048
    batch = batch_of(example(np.array(ids)))
    for model in (student, teacher):
        with pytest.raises(
            PotstillError, match=r"holds '<image_soft_token>' \(id 2048\), for which .* has no embedding"
        ):
            model.hidden(batch, batch.rows.student)
    saved.tokenizer.chat_template = "{{ '<image_soft_token>' }}"
    saved.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PotstillError, match="2048 embeddings and its tokenizer 2049 ids: give it the tokenizer it was"):
        load_student(StudentConfig(model=str(tmp_path)), CPU, 0)


@pytest.mark.parametrize("method", ["prefix_marginal", "projection"])
def test_an_added_token_without_a_row_changes_nothing_across_tokenizers(method, tmp_path):
    losses = []
    for idle in (False, True):
        folder = tmp_path / str(idle)
        pair = {
            name: tiny_with(tokenizer) for name, tokenizer in (("student", TOKENIZER), ("teacher", OTHER_TOKENIZER))
        }
        for name, model in pair.items():
            if idle:
                model.tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
            model.save(folder / name)
        recipe = {
            "student": {"model": str(folder / "student")},
            "teachers": [{"model": str(folder / "teacher"), "cross_tokenizer": {"method": method}}],
            "data": {"sources": [{"files": "shipped:corpus/heldout.parquet"}], "max_length": 64},
            "train": {"steps": 1, "batch_size": 2},
            "log": {"tensorboard": False},
            "run": str(folder / "run"),
        }
        run = train(load_recipe(recipe))
        losses.append(json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] == losses[1] > 0.01


OTHER_TOKENIZER = "shipped:tokenizers/pieces-1k"


def tiny_with(tokenizer):
    return load_student(StudentConfig(config={**LLAMA, "initializer_range": 0.3}, tokenizer=tokenizer), CPU, 0)


def test_text_that_the_model_has_no_rows_for_is_refused_at_once(tmp_path):
    saved = tiny(0)
    saved.model.resize_token_embeddings(1900)
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PotstillError, match="1900 embeddings and its tokenizer 2048 ids"):
        load_student(StudentConfig(model=str(tmp_path)), CPU, 0)
    with pytest.raises(PotstillError, match="1900 embeddings and its tokenizer 2048 ids"):
        load_teacher(TeacherConfig(model=str(tmp_path)), CPU, "teachers[0]")


@pytest.mark.parametrize("installed", [True, False])
def test_tokenizer_json_beside_a_tekken_file_needs_no_mistral_common(installed, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    right = load_tokenizer(TOKENIZER, "student.tokenizer")
    right.save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {}, "vocab": [], "special_tokens": []}))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "MistralCommonBackend"}))
    if installed:  # it is then what AutoTokenizer gives, and no fast tokenizer
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **keys: object())
    loaded = load_tokenizer(str(tmp_path), "student.tokenizer")
    assert loaded("Hello wörld").input_ids == right("Hello wörld").input_ids
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(PotstillError, match="no fast tokenizer" if installed else "mistral-common"):
        load_tokenizer(str(tmp_path), "student.tokenizer")
