"""LoRA students and frozen parameters: what learns, what is saved, and that it is what peft makes of it by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from tiny_runs import InterruptAt, Interrupted, TinyRuns, lines, metrics
from transformers import AutoModelForCausalLM, PreTrainedModel

import potstill
from potstill.config import StudentConfig
from potstill.config.models import LoraConfig
from potstill.config.recipe import load_recipe
from potstill.models import load_student
from potstill.models.adapters import add_lora, freeze, plain_names, plain_weights
from potstill.training.setup import assemble
from potstill.types import PotstillError

STEPS, CPU = 10, torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", seed=7, hidden_size=16, intermediate_size=24)


@pytest.fixture
def runs(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


def student(base: Path, **lora: Any) -> dict[str, Any]:
    return {"model": str(base), "lora": {"r": 4, **lora}}


def plain(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def test_a_run_equals_peft_in_a_bare_loop(runs: TinyRuns, base: Path) -> None:
    """Ten steps of forward KL: the same losses and the same adapter."""
    options = ["train.steps=10", "train.micro_batch_size=4", "checkpoint.every=null", "data.packing=false"]
    recipe = runs.recipe("run", *options, student=student(base))
    parts = assemble(recipe)
    theirs = peft.get_peft_model(plain(base), peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    drawn = dict(parts.student.model.named_parameters())
    named = dict(theirs.base_model.model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(drawn[name])
    assert {name for name, p in named.items() if p.requires_grad} == {n for n, p in drawn.items() if p.requires_grad}
    trained = [p for p in named.values() if p.requires_grad]
    config = recipe.train.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay}],
        lr=0.0, betas=config.betas, eps=config.eps,
    )  # fmt: skip
    teacher, batches, losses = plain(runs.teacher), parts.step_batches(None), []
    run = potstill.train(recipe)
    for line in lines(run.folder / "metrics.jsonl"):
        (batch,) = next(batches).batches
        kinds = {"input_ids": batch.input_ids, "attention_mask": (batch.document > 0).long()}
        rows = batch.rows.student
        with torch.no_grad():
            p = teacher(**kinds).logits.flatten(0, 1)[rows].log_softmax(-1)
        q = theirs(**kinds).logits.flatten(0, 1)[rows].log_softmax(-1)
        loss = (p.exp() * (p - q)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.train.max_grad_norm or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), line["loss"]))
    assert len(losses) == STEPS
    assert max(abs(ours - bare) for bare, ours in losses) < 1e-6 * max(bare for bare, _ in losses)
    saved = load_file(run.checkpoint / "model" / "adapter_model.safetensors")  # type: ignore[operator]
    bare = peft.get_peft_model_state_dict(theirs)
    assert saved.keys() == bare.keys()
    assert max(float((saved[name] - bare[name]).abs().max()) for name in saved) < 1e-5


def test_what_is_exported_is_the_base_with_the_adapter(runs: TinyRuns, base: Path) -> None:
    run = potstill.train(runs.recipe("run", student=student(base, export="both")))
    assert run.checkpoint is not None and run.model == run.folder / "merged"
    adapter = run.checkpoint / "model"
    assert not list(adapter.glob("model*.safetensors")) and not (adapter / "config.json").exists()
    original, merged = load_file(base / "model.safetensors"), load_file(run.model / "model.safetensors")
    by_peft = peft.PeftModel.from_pretrained(plain(base), adapter).merge_and_unload().state_dict()
    assert merged.keys() == original.keys()
    for name, weight in merged.items():
        learnt = "_proj" in name
        assert torch.equal(weight, original[name]) is not learnt, name  # all else is untouched, bit for bit
        assert torch.allclose(weight, by_peft[name], atol=1e-6), name
    again = load_student(StudentConfig(model=str(adapter)), CPU, 0).model.state_dict()
    assert all(torch.allclose(again[name], weight, atol=1e-6) for name, weight in merged.items())


def test_only_the_adapter_learns_and_is_kept(runs: TinyRuns, base: Path) -> None:
    parts = assemble(runs.recipe("run", student=student(base, modules_to_save=["lm_head"])))
    learns = {name for name, p in parts.student.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name == "lm_head.weight" for name in learns) and "lm_head.weight" in learns
    held = {id(p) for optimizer in parts.optimizers for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in parts.student.model.parameters() if p.requires_grad}
    run = potstill.train(runs.recipe("run", student=student(base, modules_to_save=["lm_head"], export="adapter")))
    assert run.checkpoint is not None and run.model == run.checkpoint / "model"
    saved = load_file(run.model / "adapter_model.safetensors")
    assert len(saved) == len(learns) and "base_model.model.lm_head.weight" in saved
    loaded = peft.PeftModel.from_pretrained(plain(base), run.model)
    assert torch.equal(loaded.get_output_embeddings().weight, saved["base_model.model.lm_head.weight"])
    assert json.loads((run.model / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_modules_that_are_trained_whole_load_again(runs: TinyRuns, base: Path) -> None:
    """peft takes `norm` for the ending of any name: the adapter's file has whole paths."""
    run = potstill.train(runs.recipe("run", student=student(base, modules_to_save=["norm", "input_layernorm"])))
    assert run.checkpoint is not None
    merged = load_file(run.model / "model.safetensors")
    again = load_student(StudentConfig(model=str(run.checkpoint / "model")), CPU, 0).model.state_dict()
    assert not torch.equal(merged["model.norm.weight"], load_file(base / "model.safetensors")["model.norm.weight"])
    assert all(torch.allclose(again[name], weight, atol=1e-6) for name, weight in merged.items())


def test_an_adapter_of_some_layers_is_not_taken_for_one_of_all(runs: TinyRuns, base: Path) -> None:
    keys = {"from": str(base), "layers": [0, 2], "lora": {"r": 4}}
    run = potstill.train(runs.recipe("run", student=keys))
    assert run.checkpoint is not None
    with pytest.raises(PotstillError, match="an adapter of a model that is saved nowhere"):
        load_student(StudentConfig(model=str(run.checkpoint / "model")), CPU, 0)
    assert load_student(StudentConfig(model=str(run.model)), CPU, 0).model.config.num_hidden_layers == 2


def test_a_run_is_not_resumed_over_another_base(runs: TinyRuns, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
    model = make_model(tmp_path / "model", seed=7, **sizes)
    recipe = runs.recipe("run", student=student(model))
    with pytest.raises(Interrupted):
        potstill.train(recipe, [InterruptAt(5)])
    shutil.rmtree(model)
    make_model(model, seed=8, **sizes)
    with pytest.raises(
        PotstillError, match=r"were put into another model than student.model or student.from gives now"
    ):
        potstill.train(recipe)
    shutil.rmtree(model)
    make_model(model, seed=7, **sizes)
    assert potstill.train(recipe).step == 8


def test_an_adapter_that_lacks_weights_is_refused(runs: TinyRuns, base: Path) -> None:
    run = potstill.train(runs.recipe("run", "train.steps=1", student=student(base, export="adapter")))
    folder = shutil.copytree(run.model, runs.folder / "cut")
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n: w for n, w in weights.items() if ".layers.2." not in n}, folder / "adapter_model.safetensors")
    with pytest.raises(PotstillError, match="missing adapter keys"):
        load_student(StudentConfig(model=str(folder)), CPU, 0)


def test_what_ends_a_text_is_kept_in_the_merged_model(runs: TinyRuns, base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "chat")
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 2, 3], "temperature": 0.7, "do_sample": True})
    )
    run = potstill.train(runs.recipe("run", "train.steps=1", student=student(folder)))
    kept = json.loads((run.model / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [1, 2, 3] and kept["temperature"] == 0.7


def test_muon_may_take_all_adapters(runs: TinyRuns, base: Path) -> None:
    run = potstill.train(runs.recipe("run", "train.optimizer.name=muon", "train.steps=3", student=student(base)))
    losses = [line["loss"] for line in lines(run.folder / "metrics.jsonl")]
    assert losses[-1] != losses[0] and run.step == 3


def test_an_interrupted_run_ends_with_the_same_bits(runs: TinyRuns, base: Path) -> None:
    keys = {"student": student(base, dropout=0.1)}
    whole = potstill.train(runs.recipe("whole", **keys))
    with pytest.raises(Interrupted):
        potstill.train(runs.recipe("again", **keys), [InterruptAt(5)])
    again = potstill.train(runs.recipe("again", **keys))
    assert metrics(again.folder) == metrics(whole.folder)
    files = [run.model / "model.safetensors" for run in (whole, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_plain_weights_are_those_that_peft_merges(base: Path, options: dict[str, Any]) -> None:
    """Also where the base is kept transposed (GPT-2)."""
    for make in (lambda: plain(base), _gpt2):
        ours, names = make(), set(make().state_dict())
        add_lora(ours, LoraConfig(r=3, peft={"fan_in_fan_out": make is _gpt2}, **options), str(base))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in ours.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.rand_like(parameter))
        assert set(plain_names(ours)) == names
        found = dict(plain_weights(ours))
        for name, module in ours.named_modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.merge()  # type: ignore[operator]
                weight = module.get_base_layer().weight
                assert torch.allclose(found[f"{name}.weight"], weight, atol=2e-6), name


def _gpt2() -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32))


def test_the_copy_that_writes_has_the_adapter_in_it(runs: TinyRuns, base: Path) -> None:
    """Text is written ahead by a copy without adapters: it must be as sure of its tokens as the student that trains."""
    rollouts = {"on_policy_fraction": 1.0, "max_staleness": 1, "num_generations": 1, "sampling": {"max_new_tokens": 8}}
    keys = {"rollouts": rollouts, "student": student(base), "loss": {"divergence": "reverse_kl"}}
    run = potstill.train(runs.recipe("run", "train.optimizer.lr=1e-4", "checkpoint.every=null", **keys))
    gaps = [line["sampling_logprob_gap"] for line in lines(run.folder / "metrics.jsonl")]
    assert max(gaps) < 0.05 and gaps[0] < 1e-5, gaps


def test_frozen_parameters_stay_and_the_others_learn(runs: TinyRuns, base: Path) -> None:
    patterns = ["embed_tokens", "layers.[0-1].*", "lm_head"]
    run = potstill.train(runs.recipe("run", student={"model": str(base), "freeze": patterns}))
    original, trained = load_file(base / "model.safetensors"), load_file(run.model / "model.safetensors")
    same = {name for name in original if torch.equal(original[name], trained[name])}
    assert same == {name for name in original if not name.startswith(("model.layers.2.", "model.norm"))}


def test_a_pattern_means_parts_between_dots() -> None:
    model = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(12)),
            "head": torch.nn.Linear(1, 1),
        }
    )
    freeze(model, ["layers.1", "head.bias"])  # type: ignore[arg-type]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"layers.1.weight", "head.bias"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"freeze": ["layer.9"]},
            "student.freeze: nothing in the student is called 'layer.9'; its names are like model",
        ),
        ({"freeze": ["*"]}, "student.freeze: it freezes everything"),
        ({"lora": {"target_modules": ["query"]}}, "student.lora: peft makes no adapter of it"),
        ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, "student.lora.target_modules names the head"),
        (
            {"lora": {"modules_to_save": ["lm_heat"]}},
            "student.lora.modules_to_save: the student has no module 'lm_heat'",
        ),
        ({"lora": {"peft": {"rank": 3}}}, "student.lora: peft makes no adapter of it"),
        ({"lora": {"target_modules": ["q_proj", "embed_tokens"]}}, "would learn otherwise than by two matrices beside"),
        ({"lora": {"peft": {"bias": "all"}, "target_modules": ["q_proj"]}}, None),
        ({"lora": {"peft": {"lora_bias": True}}}, "would learn otherwise than by two matrices beside"),
        ({"lora": {"peft": {"init_lora_weights": "pissa"}}}, "student.lora.peft.init_lora_weights"),
        ({"lora": {"modules_to_save": ["mlp"]}}, "student.lora.modules_to_save: 'mlp' has adapters in it"),
    ],
)
def test_what_does_not_fit_the_student_is_one_sentence(
    runs: TinyRuns, base: Path, keys: dict[str, Any], said: str | None
) -> None:
    if said is None:  # this student has no biases
        assemble(runs.recipe("run", student={"model": str(base), **keys}))
        return
    with pytest.raises(PotstillError) as caught:
        assemble(runs.recipe("run", student={"model": str(base), **keys}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"config": {"model_type": "llama"}, "tokenizer": "x", "lora": {}}, "lora goes with model or from"),
        ({"model": "x", "lora": {}, "freeze": ["y"]}, "leave freeze out"),
        ({"from": "x", "layers": [0], "lora": {"export": "both"}}, "lora.export: an adapter of a part"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(keys: dict[str, Any], said: str) -> None:
    data = {"sources": [{"files": "unused"}]}
    with pytest.raises(PotstillError) as caught:
        load_recipe({"student": keys, "data": data, "train": {"steps": 1}, "teachers": [{"model": "unused"}]})
    assert said in str(caught.value)


def test_a_tied_head_cannot_be_trained_whole(tmp_path: Path) -> None:
    tied = make_model(tmp_path / "tied", hidden_size=16, intermediate_size=24, tie_word_embeddings=True)
    with pytest.raises(PotstillError, match="'lm_head' shares its weights"):
        add_lora(plain(tied), LoraConfig(modules_to_save=["lm_head"]), str(tied))
