"""Narrower students: what matters is measured, and what does not is cut."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_families import make_model, make_rows
from tiny_runs import InterruptAt, Interrupted, TinyRuns, assert_same_run
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import potstill
from potstill.cli.main import app
from potstill.config.models import WidthConfig
from potstill.data import collate
from potstill.models import hidden_states
from potstill.students.pruning import Importance, cut, kept, measured, pruned
from potstill.types import PotstillError

TO_CUT = {"hidden": [3, 17, 30, 31], "intermediate": [0, 5, 11, 40], "heads": [2, 3]}  # of 32, 48, and 8 over 4


@pytest.fixture
def runs(tmp_path, tiny_teacher, tiny_text):
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


def batches(count: int = 2):
    return [collate([[row[0]] for row in make_rows(3, seed)], 0) for seed in range(count)]


@torch.no_grad()
def with_idle_parts(family: str):
    """A model of which some channels, neurons and heads do nothing."""
    student = make_model(family)
    channels, neurons, heads = (torch.tensor(TO_CUT[name]) for name in ("hidden", "intermediate", "heads"))
    columns = (heads[:, None] * 4 + torch.arange(4)).flatten()
    for name, tensor in student.model.state_dict().items():
        if "embed_tokens" in name or "lm_head" in name:
            tensor[:, channels] = 0
        elif name.endswith("v_proj.weight") or name.endswith("v_proj.bias"):
            tensor[(heads[::2, None] // 2 * 4 + torch.arange(4)).flatten()] = 0
        elif name.endswith("o_proj.weight"):
            tensor[:, columns] = 0
            tensor[channels] = 0
        elif name.endswith("down_proj.weight"):
            tensor[:, neurons] = 0
            tensor[channels] = 0
        elif name.endswith("up_proj.weight"):
            tensor[neurons] = 0
        elif name.endswith(("o_proj.bias", "down_proj.bias", "up_proj.bias")):
            tensor.zero_()
        elif "norm" in name and tensor.shape == (32,):
            tensor[channels] = 0
    return student


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_what_does_nothing_is_cut_and_the_rest_says_what_the_whole_said(family):
    whole, text = with_idle_parts(family), batches()
    whole.model.config.rms_norm_eps = 0.0
    for module in whole.model.modules():
        if "variance_epsilon" in vars(module):
            module.variance_epsilon = 0.0
    stays = kept(measured(whole, text), WidthConfig(hidden=28, intermediate=44, heads=6, kv_heads=3), whole.model)
    assert stays.hidden == [i for i in range(32) if i not in TO_CUT["hidden"]]
    assert stays.intermediate == [[i for i in range(48) if i not in TO_CUT["intermediate"]]] * 2
    assert stays.heads == [[0, 1, 4, 5, 6, 7]] * 2 and stays.kv_heads == [[0, 2, 3]] * 2
    narrow = pruned(whole, cut(whole.model, stays))
    config = narrow.model.config
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (28, 44, 6)
    assert (config.num_key_value_heads, config.head_dim) == (3, 4)
    with torch.no_grad():
        for name, tensor in narrow.model.state_dict().items():
            if "norm" in name and tensor.shape == (28,):  # a mean over all channels, those that are 0 too
                tensor *= math.sqrt(32 / 28)
        for batch in text:
            ours, theirs = (
                each.logits(hidden_states(each.model, batch, each.attention).flatten(0, 1)) for each in (narrow, whole)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)  # its norms are in float32


@torch.no_grad()
def test_importance_is_the_sum_over_tokens_of_what_the_parts_give():
    """Against each text by itself, without padding, and the products written out."""
    student, text = make_model("llama"), batches()
    found = measured(student, text)
    layer = student.model.model.layers[1]
    neurons, heads, sums = torch.zeros(48).double(), torch.zeros(8).double(), []
    seen: dict[str, torch.Tensor] = {}
    layer.post_attention_layernorm.register_forward_hook(lambda _, __, given: seen.update(before=given))
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(attended=inputs[0]))
    for norm in [m for each in student.model.model.layers for n, m in each.named_modules() if n.endswith("layernorm")]:
        norm.register_forward_hook(lambda _, __, given: sums.append(given[0].abs().sum(0)))
    for batch in text:
        for example in batch.examples:
            hidden_states(student.model, collate([[example]], 0), student.attention)
            mlp, x = layer.mlp, seen["before"][0]
            neurons += (torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)).abs().sum(0)
            heads += seen["attended"][0].view(-1, 8, 4).abs().mean(-1).sum(0)
    torch.testing.assert_close(found.intermediate[1], neurons, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.heads[1], heads, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.hidden, sum(sums), rtol=1e-6, atol=0)


def test_groups_of_heads_stay_whole():
    model = make_model("llama").model  # 8 heads, of which two share keys and values
    heads = [torch.tensor([9.0, 0, 5, 5, 1, 2, 0, 0])] * 2
    importance = Importance(torch.arange(32.0), [torch.arange(48.0)] * 2, heads)
    stays = kept(importance, WidthConfig(heads=2, kv_heads=2), model)
    assert stays.kv_heads == [[0, 1]] * 2  # 9 and 10, not 3 and 0
    assert stays.heads == [[0, 2]] * 2  # the better one of each, of equals the first
    assert stays.hidden == list(range(32)) and stays.sizes["intermediate"] == 48
    with pytest.raises(
        PotstillError, match=r"student.width: 6 heads over 4 kv_heads are not 1 to 2 whole heads for each"
    ):
        kept(importance, WidthConfig(heads=6), model)
    with pytest.raises(PotstillError, match=r"student.width.hidden: 64 is more than the 32"):
        kept(importance, WidthConfig(hidden=64), model)


def test_a_model_of_other_parts_is_refused():
    with pytest.raises(PotstillError, match=r"layers of gpt2 models are not made of q_proj"):
        measured(make_model("gpt2"), batches(1))


def test_a_run_of_a_narrower_student(runs):
    width = {"hidden": 24, "intermediate": 40, "heads": 1, "kv_heads": 1, "examples": 16}
    student = {"from": str(runs.teacher), "layers": [0], "width": width}
    train = {"steps": 4, "batch_size": 4, "optimizer": {"lr": 1e-2}}
    result = CliRunner().invoke(app, ["train", str(runs.file("whole", student=student, train=train))])
    assert result.exit_code == 0, result.output
    saved = AutoModelForCausalLM.from_pretrained(runs.folder / "whole" / "checkpoints" / "latest" / "model")
    config = saved.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (24, 40, 1)
    cut_short = runs.recipe("cut", student=student, train=train)
    with pytest.raises(Interrupted):
        potstill.train(cut_short, [InterruptAt(3)])
    potstill.train(cut_short)
    assert_same_run(runs.folder / "cut", runs.folder / "whole")


@pytest.mark.parametrize(
    ("student", "reason"),
    [
        ({"model": "x", "width": {"hidden": 8}}, "`from` goes with `layers`, `width` or both"),
        ({"from": "x"}, "`from` goes with `layers`, `width` or both"),
    ],
)
def test_what_does_not_go_together(runs, student, reason):
    with pytest.raises(PotstillError, match=reason):
        runs.recipe("x", student=student)
