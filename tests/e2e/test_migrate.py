"""Other systems' configurations as recipes: the keys and values of their examples, and every key that they have."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.migrate.config import DROPPED, OTHER, SYSTEMS, TABLES, migrate, rule_for
from potstill.migrate.values import CONVERSIONS

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(os.environ.get("POTSTILL_ASSETS") or ROOT.parent / "shared" / "assets")
FIELD = {
    "trl.DistillationConfig": "trl-distillation", "trl.GKDConfig": "trl-gkd", "trl.GOLDConfig": "trl-gold",
    "trl.ServerDistillationConfig": "trl-server", "trl.AsyncDistillationConfig": "trl-async",
    "trl.IWOPDConfig": "trl-iw-opd", "trl.SDFTConfig": "trl-sdft", "trl.MiniLLMConfig": "trl-minillm",
    "hf.TrainingArguments+trl.SFTConfig": "hf", "nemo_rl.distillation": "nemo-rl", "nemo_rl.x_token": "nemo-rl-x-token",
    "nemo_rl.mopd": "nemo-rl-mopd", "nemo_automodel.kd": "automodel", "maxtext.distillation": "maxtext",
    "distillkit": "distillkit", "ms_swift.gkd": "ms-swift", "axolotl.kd": "axolotl", "verl.distillation": "verl",
    "kdflow": "kdflow", "slime.opd": "slime", "tinker.on_policy_distillation": "tinker",
}  # fmt: skip


def spelled_out(key: str) -> list[str]:
    """`a.{b,c}` and `a.b / .c` as the keys that they stand for."""
    key = key.removesuffix(" (column)")
    if key.startswith("save_top_k"):
        return [key.replace(" ", ".")]
    parts = [part.strip() for part in key.split(" / ")]
    parts = [parts[0].rpartition(".")[0] + part if part.startswith(".") else part for part in parts]
    found = []
    for part in parts:
        match = re.match(r"(.*)\{(.*)\}(.*)", part)
        found += [match[1] + name + match[3] for name in match[2].split(",")] if match else [part]
    return found


@pytest.mark.skipif(not (ASSETS / "field" / "keys.json").exists(), reason="the list of the field's keys is not here")
def test_every_key_of_the_field_is_known() -> None:
    field = json.loads((ASSETS / "field" / "keys.json").read_text())
    field.pop("_about")
    assert set(field) == set(FIELD) and set(FIELD.values()) == set(SYSTEMS)
    keys = [(FIELD[system], key) for system, names in field.items() for name in names for key in spelled_out(name)]
    assert len(keys) >= 825 and [pair for pair in keys if rule_for(*pair) is None] == []


def recipe_keys(section: Any = Recipe, prefix: str = "") -> set[str]:
    """Every dotted key of a recipe, with [] for places of lists."""
    found = set()
    for name, model_field in section.model_fields.items():
        key = f"{prefix}{model_field.alias or name}"
        found.add(key)
        for inner in _sections(model_field.annotation):
            found |= recipe_keys(inner, f"{key}[]." if "list[" in str(model_field.annotation) else f"{key}.")
    return found


def _sections(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [each for inner in getattr(annotation, "__args__", ()) for each in _sections(inner)]


def test_every_key_that_is_taken_is_a_key_of_a_recipe() -> None:
    known, free = recipe_keys(), ("rollouts.engine.options", "train.optimizer.betas")
    for system, table in TABLES.items():
        for ours in table:
            if ours.startswith((DROPPED, OTHER)):
                assert len(ours) > 6
                continue
            key, _, conversion = (part.strip() for part in ours.partition("|"))
            assert not conversion or conversion in CONVERSIONS, ours
            assert re.sub(r"\[\d*\]", "[]", key) in known or key.startswith(free), (system, ours)


# Short configurations in the words of each system, as ../shared/assets/field/keys.json lists them.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trl-gkd": (
        {
            "model_name_or_path": "S", "teacher_model_name_or_path": "T", "dataset_name": "D", "learning_rate": 2e-5,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "output_dir": "gkd", "lmbda": 0.5,
            "beta": 1.0, "temperature": 0.9, "max_new_tokens": 128, "seq_kd": False, "num_train_epochs": 1.0,
        },
        {
            "student.model": "S", "teachers.0.model": "T", "data.sources.0.dataset": "D", "train.batch_size": 32,
            "train.micro_batch_size": 4, "loss.divergence": "reverse_kl", "rollouts.on_policy_fraction": 0.5,
            "rollouts.sampling.temperature": 0.9, "loss.temperature": 1.0, "train.epochs": 1, "run": "gkd",
        },
    ),
    "trl-gold": (
        {
            "model_name_or_path": "S", "teacher_model_name_or_path": "T", "use_uld_loss": True, "temperature": 2.0,
            "max_steps": 9,
        },
        {"teachers.0.cross_tokenizer.method": "uld", "loss.temperature": 2.0, "train.steps": 9},
    ),
    "nemo-rl": (
        {
            "distillation": {"num_prompts_per_step": 128, "num_generations_per_prompt": 1, "max_num_steps": 1000, "seed": 42},
            "loss_fn": {"kl_type": "mixed", "mixed_kl_weight": 0.5},
            "policy": {
                "model_name": "S", "train_micro_batch_size": 1, "max_total_sequence_length": 8192, "precision": "bfloat16",
                "max_grad_norm": 1.0, "dtensor_cfg": {"tensor_parallel_size": 2, "context_parallel_size": 2},
                "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2e-5, "betas": [0.9, 0.999], "foreach": False}},
                "generation": {"backend": "vllm", "max_new_tokens": 4096, "temperature": 1.0, "top_k": None},
            },
            "teacher": {"model_name": "T"},
        },
        {
            "train.batch_size": 128, "train.steps": 1000, "train.seed": 42, "loss.divergence": "jsd", "student.model": "S",
            "parallel.tp": 2, "parallel.cp": 2, "train.optimizer.betas": [0.9, 0.999], "data.max_length": 8192,
            "rollouts.engine.kind": "vllm", "teachers.0.model": "T", "train.precision": "bf16",
        },
    ),
    "nemo-rl-x-token": (
        {
            "distillation": {"num_prompts_per_step": 64, "max_num_steps": 50},
            "loss_fn": {"temperature": 1.0, "reverse_kl": False, "kl_loss_weight": 1.0, "ce_loss_scale": 0.1},
            "teachers": [{"model_name": "A", "weight": 0.7}, {"model_name": "B", "weight": 0.3}],
        },
        {
            "teachers.0.model": "A", "teachers.1.model": "B", "teachers.1.weight": 0.3, "loss.ce_weight": 0.1,
            "loss.divergence": "forward_kl", "train.batch_size": 64,
        },
    ),
    "automodel": (
        {
            "step_scheduler": {"global_batch_size": 32, "local_batch_size": 1, "num_epochs": 2},
            "model": {"pretrained_model_name_or_path": "S", "torch_dtype": "torch.bfloat16"},
            "teacher_model": {"pretrained_model_name_or_path": "T"}, "kd_ratio": 0.5,
            "kd_loss_fn": {"temperature": 1.0, "ignore_index": -100}, "optimizer": {"lr": 1e-5, "weight_decay": 0},
        },
        {
            "loss.kd_weight": 0.5, "loss.ce_weight": 0.5, "student.dtype": "bfloat16", "train.epochs": 2,
            "train.optimizer.weight_decay": 0.0,
        },
    ),
    "axolotl": (
        {
            "base_model": "S", "kd_trainer": True, "kd_ce_alpha": 0.1, "kd_alpha": 0.9, "kd_temperature": 2.0,
            "sequence_len": 2048, "sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
            "learning_rate": 2e-4, "lr_scheduler": "cosine", "num_epochs": 3, "output_dir": "out",
        },
        {"loss.kd_weight": 0.9, "loss.ce_weight": 0.1, "loss.temperature": 2.0, "train.batch_size": 8, "data.max_length": 2048},
    ),
    "verl": (
        {
            "distillation": {
                "distillation_loss": {"distillation_loss_coef": 1.0},
                "teacher_models": {"math": {"model_path": "A"}, "code": {"model_path": "B"}},
            },
            "data": {"max_response_length": 512},
        },
        {"teachers.0.model": "A", "teachers.1.model": "B", "rollouts.sampling.max_new_tokens": 512},
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", EXAMPLES)
def test_examples_become_recipes(command: Command, system: str, tmp_path: Path) -> None:
    theirs, ours = EXAMPLES[system]
    path, out = tmp_path / "theirs.json", tmp_path / "ours.yaml"
    path.write_text(json.dumps(theirs))
    said = command("migrate", path, "--from", system, "--out", out)
    assert said.code == 0 and "keys taken" in said.err and "to mend" not in said.err, said.err
    made = load_recipe(out).model_dump(mode="json", by_alias=True)
    for key, value in ours.items():
        node: Any = made
        for part in key.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        assert node == value, key
    found = migrate(theirs, system)
    told = {*found.other, *found.dropped, *found.unknown, *found.origins.values()}
    named = {word for each in told for word in each.split(" × ")}
    leaves = [key for key in leaves_of(theirs) if not any(key == name or key.startswith(f"{name}.") for name in named)]
    assert [key for key in leaves if value_at(theirs, key) is not None] == []  # nothing is lost without a word


def leaves_of(value: Any, prefix: str = "") -> list[str]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None or (isinstance(value, list) and not isinstance(value[0], dict)):
        return [prefix]
    return [leaf for key, sub in inner for leaf in leaves_of(sub, f"{prefix}.{key}" if prefix else str(key))]


def value_at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def test_what_cannot_be_taken_is_listed(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "lr_scheduler_type: polynomial\nlearning_rate: fast\nneftune_noise_alpha: 5\nmade_up: 1\neval_steps: 10\n"
    )
    said = command("migrate", path, "--from", "hf")
    assert said.code == 0 and "0 keys taken, 3 with another meaning or place, 1 dropped, 1 not known" in said.err
    for line in (
        "lr_scheduler_type: train.lr_schedule.shape",
        "learning_rate: train.optimizer.lr: 'fast'",
        "#   made_up",
    ):
        assert line in said.out
    assert 'model: "STUDENT" # fill in' in said.out
    refused = command("migrate", path, "--from", "nobody")
    assert refused.code == 1 and "there is no such system here; there are trl-distillation" in refused.err


def test_the_page_is_written_from_the_tables() -> None:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "write_migrating_docs.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    said = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert said == tool.migrating_docs(), "run python tools/write_migrating_docs.py"
