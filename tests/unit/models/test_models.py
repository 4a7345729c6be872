"""Loading: heads of several families, what is probed, layers kept, tokenizers compared by content."""

import sys
import types

import pytest
import torch
from tiny import CPU, LLAMA, TOKENIZER, batch_of, examples, tiny

from potstill.config import StudentConfig, TeacherConfig
from potstill.losses.dense import target_logits
from potstill.models import hidden_states, keep_layers, load_student, load_teacher, load_tokenizer, shared_ids
from potstill.models.loading import _quantization
from potstill.types import PotstillError

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
FAMILIES = {
    "llama tied": {},
    "llama untied": {"tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2 soft-capped": {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 3.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    "granite scaled": {"model_type": "granite", "logits_scaling": 4.0},
    "cohere scaled": {"model_type": "cohere", "logit_scale": 0.25},
    "phi with a bias on its head": {"model_type": "phi"},
}


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_hidden_and_head_give_the_models_logits(changes):
    student = tiny(0, **changes)
    for parameter in student.model.parameters():  # biases and norms are trivial at the start
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        logits = student.model(ids).logits.flatten(0, 1)
        hidden = student.model.base_model(ids).last_hidden_state.flatten(0, 1)
        ours = target_logits(student.at_rows(hidden), slice(None))
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
        assert student.attention == "varlen"


def test_unknown_logits_are_refused(monkeypatch):
    """A model that does something to its logits we do not know: here Granite's scaling, unknown to us."""
    from potstill.models import probe

    monkeypatch.setattr(probe, "HEAD_KEYS", {})
    with pytest.raises(PotstillError, match="between its last hidden state and its logits"):
        tiny(0, model_type="granite", logits_scaling=4.0)


NESTED = {
    "model_type": "gemma3",
    "text_config": {
        **{key: value for key, value in LLAMA.items() if key not in ("model_type", "tie_word_embeddings")},
        "head_dim": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
}


def test_config_of_the_text_nested_in_another_is_the_one_read():
    """At 120 tokens, beyond the window of 40, which the short documents of the probe would never feel."""
    student = load_student(StudentConfig(config=NESTED, tokenizer=TOKENIZER), CPU, 0)
    assert student.attention == "varlen" and student.positions == 128
    assert student.model.config.text_config.sliding_window == 40
    assert student.model.get_input_embeddings().num_embeddings == 2048
    for parameter in student.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = batch_of(*examples([120, 120]))
    with torch.no_grad():
        own = hidden_states(student.model.eval(), batch, "own")
        torch.testing.assert_close(hidden_states(student.model, batch, "varlen"), own)
        for module in student.model.modules():  # the window is felt
            if "sliding_window" in vars(module):
                module.sliding_window = None
        assert (hidden_states(student.model, batch, "varlen") - own).abs().max() > 1e-3
    hidden_states(student.model.train(), batch, "varlen").sum().backward()


@pytest.mark.parametrize("who", ["backbone", "whole"])
def test_a_forward_pass_that_fails_is_a_sentence(who, monkeypatch):
    """Llama 4, say, whose backbone gives no last_hidden_state."""
    from transformers import LlamaForCausalLM, LlamaModel

    def forward(self, *args, **keys):
        raise AttributeError("no such\nlast_hidden_state")

    monkeypatch.setattr(LlamaModel if who == "backbone" else LlamaForCausalLM, "forward", forward)
    with pytest.raises(PotstillError, match=r"the student \(llama\) cannot be used: .* fails \(no such\)$"):
        tiny(0)


def test_model_without_attention_is_used_one_document_a_row():
    config = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    assert load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0).attention == "own"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {**LLAMA, "hiden_size": 3},
            "student.config.hiden_size: a llama config has no such key; did you mean hidden_size",
        ),
        ({"model_type": "lama"}, "transformers has no model type 'lama'"),
    ],
)
def test_fresh_config_is_checked(config, says):
    with pytest.raises(PotstillError, match=says):
        load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0)


@pytest.mark.parametrize("config", [{**LLAMA, "num_hidden_layers": 5}, {**GPT2, "n_layer": 5}], ids=["llama", "gpt2"])
def test_student_from_chosen_layers(config, tmp_path):
    whole = load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0)
    whole.model.save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    kept = load_student(StudentConfig.model_validate({"from": str(tmp_path), "layers": [0, 3]}), CPU, 0)
    assert kept.model.config.num_hidden_layers == 2
    keep_layers(whole.model.eval(), [0, 3])
    kept.model.eval()
    ids = torch.arange(5, 25).view(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(kept.model(ids).logits, whole.model(ids).logits)
        # generation numbers its cache by layer: a layer that kept its old index would break it
        assert kept.model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 23)
    with pytest.raises(PotstillError, match=r"\[5\] are not layers of a model with 5 \(0 to 4\)"):
        load_student(StudentConfig.model_validate({"from": str(tmp_path), "layers": [0, 5]}), CPU, 0)


DEEPSEEK = {
    **{key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"},
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def test_layers_that_the_config_cannot_describe_are_refused():
    """Its first layer is dense, whatever layer it was: experts in that place would be loaded as something else."""
    whole = load_student(StudentConfig(config=DEEPSEEK, tokenizer=TOKENIZER), CPU, 0)
    with pytest.raises(
        PotstillError, match=r"cannot describe a model of layers \[1, 2\]; .* another model\.layers\.0\.mlp"
    ):
        keep_layers(whole.model, [1, 2])
    whole = load_student(StudentConfig(config=DEEPSEEK, tokenizer=TOKENIZER), CPU, 0)
    keep_layers(whole.model, [0, 3])


def test_only_lists_over_the_layers_are_cut():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    changes = {"layer_types": kinds, "num_hidden_layers": 3, "eos_token_id": [1, 2, 3], "sliding_window": 8}
    student = tiny(0, model_type="gemma3_text", head_dim=16, **changes)
    keep_layers(student.model, [0, 2])
    assert student.model.config.layer_types == ["sliding_attention", "full_attention"]
    assert student.model.config.eos_token_id == [1, 2, 3]


def test_teacher_saved_in_float16_is_read_as_float32_on_a_cpu(tmp_path):
    teacher = tiny(0)
    teacher.model.half().save_pretrained(tmp_path)
    teacher.tokenizer.save_pretrained(tmp_path)
    loaded = load_teacher(TeacherConfig(model=str(tmp_path)), CPU, "teachers[0]")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    half = load_teacher(TeacherConfig(model=str(tmp_path), dtype="bfloat16"), CPU, "teachers[0]")
    assert half.model.dtype == torch.bfloat16


def test_quantised_teacher_names_its_extra(tmp_path):
    with pytest.raises(PotstillError, match=r"\.\[quant\]"):
        load_teacher(TeacherConfig(model=str(tmp_path), quantize="4bit"), CPU, "teachers[0]")


def test_four_bits_are_nf4_with_products_in_bfloat16(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.49.0")
    four = _quantization("4bit", CPU, "teachers[0]")
    assert four.load_in_4bit and not four.load_in_8bit
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    eight = _quantization("8bit", CPU, "teachers[0]")
    assert eight.load_in_8bit and not eight.load_in_4bit


def test_fp8_is_for_gpus_that_have_it(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for device in (CPU, cuda):
        with pytest.raises(
            PotstillError, match=rf"teachers\[0\]\.quantize: fp8 needs .* 8\.9 or later, and this is {device}"
        ):
            _quantization("fp8", device, "teachers[0]")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _quantization("fp8", cuda, "teachers[0]").quant_method == "fp8"


def swapped(tokenizer, edit):
    """A tokenizer with an edited tokenizer.json."""
    import json

    from tokenizers import Tokenizer

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(content)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))


def test_tokenizers_are_compared_by_content_not_by_size():
    student, teacher = tiny(0), tiny(1)

    def swap_two_tokens(content):
        vocabulary = content["model"]["vocab"]
        a, b = [t for t, i in vocabulary.items() if i in (300, 301)]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]

    swapped(teacher.tokenizer, swap_two_tokens)
    assert len(student.tokenizer) == len(teacher.tokenizer)
    with pytest.raises(PotstillError, match="id 300 is"):
        shared_ids(student, teacher, "teachers[0]")


def test_same_tokens_cut_differently_are_refused():
    student, teacher = tiny(0), tiny(1)
    swapped(teacher.tokenizer, lambda content: content["model"]["merges"].reverse())
    with pytest.raises(PotstillError, match=r"cuts text differently \(model\)"):
        shared_ids(student, teacher, "teachers[0]")


def test_extra_ids_at_the_end_are_left_out():
    student, teacher = tiny(0), tiny(1, vocab_size=2060)
    teacher.tokenizer.add_tokens(["<|extra|>"], special_tokens=True)
    assert shared_ids(student, teacher, "teachers[0]") == 2048


def test_ids_that_the_teacher_does_not_have_are_refused():
    student, teacher = tiny(0, vocab_size=2060), tiny(1, vocab_size=2060)
    student.tokenizer.add_tokens(["<|extra|>", "<|more|>"], special_tokens=True)
    with pytest.raises(
        PotstillError, match=r"the student's tokenizer has '<\|extra\|>' \(id 2048\), which the teacher's"
    ):
        shared_ids(student, teacher, "teachers[0]")


def test_a_teacher_that_would_miss_its_bos_is_refused():
    student, teacher = tiny(0), tiny(1)
    swapped(student.tokenizer, lambda content: content.update(post_processor=None))
    with pytest.raises(PotstillError, match=r"student's tokenizer makes \['H.* of 'Hello' and the teacher's \['<"):
        shared_ids(student, teacher, "teachers[0]")


def test_revision_and_remote_code_reach_the_tokenizer_they_belong_to(monkeypatch, tmp_path):
    from transformers import AutoTokenizer

    asked = []
    real = AutoTokenizer.from_pretrained

    def from_pretrained(name, revision, trust_remote_code):
        asked.append((str(name) == str(tmp_path), revision, trust_remote_code))
        return real(name)

    saved = tiny(0)
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    keys = {"model": str(tmp_path), "revision": "v2", "trust_remote_code": True}
    load_student(StudentConfig(**keys), CPU, 0)
    load_student(StudentConfig(**keys, tokenizer=TOKENIZER), CPU, 0)
    load_teacher(TeacherConfig(**keys), CPU, "teachers[0]")
    assert asked == [(True, "v2", True), (False, None, True), (True, "v2", True)]


def test_missing_models_and_tokenizers_say_where(tmp_path):
    with pytest.raises(PotstillError, match=r"student\.model: cannot load|student\.tokenizer: no tokenizer"):
        load_student(StudentConfig(model=str(tmp_path / "nothing")), CPU, 0)
    with pytest.raises(PotstillError, match=r"bytes-3k does not ship with potstill; what does: "):
        load_tokenizer("shipped:tokenizers/bytes-3k", "student.tokenizer")


def saved_tokenizer(folder, edit):
    """The shipped tokenizer with an edited tokenizer.json, in a folder of its own."""
    tokenizer = load_tokenizer(TOKENIZER, "student.tokenizer")
    swapped(tokenizer, edit)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_tokenizer_that_its_config_calls_another_is_read_from_its_file(tmp_path):
    """As DeepSeek-V3's, which AutoTokenizer makes a Llama tokenizer that drops spaces and all that is not ASCII."""
    import json

    right = load_tokenizer(TOKENIZER, "student.tokenizer")
    right.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    text = "Hello wörld, 日本語 spaces here"
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids != right(text).input_ids
    loaded = load_tokenizer(str(tmp_path), "student.tokenizer")
    assert loaded(text).input_ids == right(text).input_ids
    assert loaded.decode(loaded(text, add_special_tokens=False).input_ids) == text
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (right.bos_token, right.eos_token, right.pad_token)
    loaded.save_pretrained(tmp_path / "again")  # what an export writes can be read by all
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(text).input_ids == right(text).input_ids


def test_tokenizer_that_loses_text_is_refused(tmp_path):
    def drop_letters(content):
        cut = {"type": "Split", "pattern": {"Regex": "[^ -~]"}, "behavior": "Removed", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, content["pre_tokenizer"]]}

    def drop_spaces(content):
        cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, content["pre_tokenizer"]]}

    with pytest.raises(PotstillError, match=r"student\.tokenizer: .* loses text: it reads 'wörld,' as 'wrld,'"):
        load_tokenizer(saved_tokenizer(tmp_path / "letters", drop_letters), "student.tokenizer")
    with pytest.raises(PotstillError, match="loses the spaces between words"):
        load_tokenizer(saved_tokenizer(tmp_path / "spaces", drop_spaces), "student.tokenizer")


def test_normalisers_and_unknown_words_are_no_loss(tmp_path):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "2024": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), "student.tokenizer")("Hello you 2024").input_ids == [1, 0, 2]
