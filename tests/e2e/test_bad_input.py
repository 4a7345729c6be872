"""What a person can get wrong ends in one sentence that says where and what to do, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import make_model, write_jsonl
from tiny_runs import TinyRuns, lines, metrics, steps_on_disk

from potstill.files import damage

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]


def assert_refused(said: Any, *parts: str) -> None:
    assert said.code == 1
    assert said.err.startswith("error: ") and len(said.err.splitlines()) == 1, said.err
    for part in parts:
        assert part in said.err, said.err
    assert "Traceback" not in said.out + said.err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.yaml", None, "there is no recipe none.yaml"),
        ("torn.yaml", b"student: {config: [1\n", "torn.yaml is not a readable YAML recipe: while parsing a flow"),
        ("list.yaml", b"- student\n", "list.yaml is not a recipe: expected keys such as student, data and train"),
        ("bytes.yaml", b"\xff\xfe\x00", "bytes.yaml is not a readable YAML recipe: 'utf-8' codec can't decode"),
        ("hole.yaml", b"run: ${nothing.here}\n", "hole.yaml: run: ${nothing.here}: the recipe has no key nothing.here"),
    ],
)
def test_recipe_that_cannot_be_read(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    assert_refused(command("train", name), sentence)


def test_all_problems_of_a_recipe_at_once(command: Command, runs: TinyRuns) -> None:
    recipe = runs.file("run")
    said = command(
        "train", recipe, "train.stepz=3", "loss.divergence=kl", "train.batch_size=-1", "student.model=x", "optimiser=1"
    )
    assert said.code == 1
    first, *problems = said.err.splitlines()
    assert first == f"error: {recipe} has 5 problems:"
    assert {problem.split(":")[0].strip(" -") for problem in problems} == {
        "student",
        "loss.divergence",
        "train.batch_size",
        "train.stepz",
        "optimiser",
    }
    assert "  - train.stepz: no such key; did you mean steps?" in problems
    assert not (runs.folder / "run").exists()


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "no file": (["data.sources.0.files=none.jsonl"], ["data.sources[0].files: there is no file none.jsonl"]),
    "no match": (["data.sources.0.files=no/*.jsonl"], ["data.sources[0].files: no file matches no/*.jsonl"]),
    "no column": (["data.sources.0.text=txet"], [".text: ", "has no column txet (there: text)", "mean text: text?"]),
    "long for the student": (
        ["data.max_length=200"],
        ["data.max_length is 200 and the student has 128 positions: set data.max_length to 128 or less"],
    ),
    "long for the teacher": (
        ["data.max_length=200", "student.config.max_position_embeddings=256"],
        ["data.max_length is 200 and the teacher ", "/teacher has 128 positions"],
    ),
    "cannot pack": (
        ["student.config={model_type: mamba, hidden_size: 16, num_hidden_layers: 1, state_size: 4}"],
        ["data.packing: the student (mamba, ", "cannot keep packed documents apart: set data.packing to false"],
    ),
    "no student folder": (["student={model: ./none}"], ["student.model: cannot load ./none: there is no such folder"]),
    "no hub": (
        ["student={model: some/where}"],
        ["student.model: cannot load some/where: no such folder here, and the"],
    ),
    "no teacher": (["teachers.0.model=./none"], ["teachers[0].model: cannot load ./none: there is no such folder"]),
    "no tokenizer": (["student.tokenizer=./none"], ["student.tokenizer: cannot load ./none: there is no such folder"]),
    "not shipped": (["student.tokenizer=shipped:x"], ["shipped:x does not ship with potstill; what does: "]),
    "model type": (
        ["student.config.model_type=lama"],
        ["student.config.model_type: transformers has no model type 'la"],
    ),
    "config key": (
        ["student.config.hiden_size=8"],
        ["student.config.hiden_size: a llama config has no such key; did you mean hidden_size?"],
    ),
    "config value": (["student.config.hidden_size=wide"], ["student.config: ", "'hidden_size' expected int, got str"]),
    "config sizes": (
        ["student.config.hidden_size=15"],
        ["(15) is not a multiple of the number of attention heads (2)"],
    ),
    "not causal": (["student.config={model_type: t5}"], ["student.config: transformers makes no t5 model of it"]),
    "attention": (["student.attn_implementation=none"], ['attn_implementation="none"` is not supported']),
    "device": (["train.device=cuda:7"], ["train.device: 'cuda:7' cannot be used here", "auto takes what there is"]),
    "layers": (
        ["student={from: TEACHER, layers: [0, 9]}"],
        ["student.layers: [9] are not layers of a model with 3 (0 to 2)"],
    ),
    "override": (
        ["train.steps"],
        ["cannot read the override 'train.steps': write key.sub=value, as in train.steps=200"],
    ),
    "list place": (["teachers.3.model=x"], ["teachers is a list of 1; '3' is not one of its places"]),
    "run is a file": (["run=text.jsonl"], ["run: cannot write to text.jsonl (File exists)"]),
    "eval": (
        ["eval={data: {sources: [{files: text.jsonl}], max_length: 500}}"],
        ["eval.data.max_length is 500 and the student has 128 positions"],
    ),
}


@pytest.mark.parametrize(("overrides", "parts"), REFUSED.values(), ids=REFUSED)
def test_refused_before_the_first_step(
    command: Command, runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, overrides: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(runs.folder)
    write_jsonl(runs.folder / "text.jsonl", [{"text": "A text."}])
    overrides = [override.replace("TEACHER", str(runs.teacher)) for override in overrides]
    assert_refused(command("train", runs.file("run"), *overrides), *parts)
    assert steps_on_disk(runs.folder / "run") == []


BAD_RECORDS: dict[str, tuple[str, str]] = {
    "empty file": ("", "data.sources[0]: bad.jsonl holds no records"),
    "empty texts": ('{"text": ""}\n', "data.sources: nothing to learn from in any of "),
    "a number": (
        '{"text": "A text."}\n{"text": 5}\n',
        "bad.jsonl, line 2: column text holds a int, not text; leave such records out or name another column",
    ),
    "null": ('{"text": null}\n', "bad.jsonl, line 1: column text holds null, not text"),
    "another column": (
        '{"body": "A"}\n',
        "bad.jsonl, line 1 has no column text (there: body); set text to one of them",
    ),
    "not JSON": ('{"text": "A."}\n{"text": \n', "bad.jsonl, line 2 is not JSON: "),
    "a list": ("[1]\n", "bad.jsonl, line 1 holds a list where a record {…} was expected"),
}


@pytest.mark.parametrize(("content", "sentence"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_bad_records(
    command: Command, runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, content: str, sentence: str
) -> None:
    monkeypatch.chdir(runs.folder)
    Path("bad.jsonl").write_text(content)
    said = command("train", runs.file("run"), "data.sources.0.files=bad.jsonl")
    assert_refused(said, sentence)
    assert [line for line in said.out.splitlines() if not line.startswith("train.precision: ")] == []


def test_a_teacher_with_another_tokenizer_of_the_same_size(command: Command, runs: TinyRuns) -> None:
    swapped = shutil.copytree(runs.teacher, runs.folder / "swapped")
    spec = json.loads((swapped / "tokenizer.json").read_text())
    tokens = {number: token for token, number in spec["model"]["vocab"].items()}
    spec["model"]["vocab"][tokens[700]], spec["model"]["vocab"][tokens[701]] = 701, 700
    (swapped / "tokenizer.json").write_text(json.dumps(spec))
    said = command("train", runs.file("run"), f"teachers.0.model={swapped}")
    assert said.code == 0, said
    assert "teachers[0]: the teacher's tokenizer is not the student's: id 700 is " in said.out
    assert "Texts are aligned by bytes, method prefix_marginal" in said.out
    chunked = [f"teachers.0.model={swapped}", "teachers.0.cross_tokenizer.method=span_likelihood", "loss.temperature=2"]
    said = command("train", runs.file("other"), *chunked)
    reason = "a prompt of its own, and loss.temperature is 2; the method span_likelihood compares likelihoods of text"
    assert_refused(said, f"teachers[0]: the teacher has another tokenizer, or {reason}")


def _reshaped(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:8].contiguous()


def _without_a_layer(weights: dict[str, Any]) -> None:
    for key in [key for key in weights if "layers.1.mlp" in key]:
        del weights[key]


def _all_inf(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"].fill_(float("inf"))


BROKEN_MODELS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "lacks": (_without_a_layer, " lack model.layers.1.mlp.down_proj.weight and 2 more, or hold them in another shape"),
    "shape": (_reshaped, " lack model.norm.weight, or hold them in another shape"),
    "inf": (_all_inf, "(llama, float32) gives logits that are not finite: its weights are broken, or too large"),
}


@pytest.mark.parametrize(("hurt", "sentence"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_broken_teachers_are_refused(
    command: Command, runs: TinyRuns, hurt: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    broken = _changed(runs.teacher, runs.folder / "broken", hurt)
    assert_refused(command("train", runs.file("run"), f"teachers.0.model={broken}"), sentence)


def _changed(model: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_torn_weights_are_refused(command: Command, runs: TinyRuns) -> None:
    torn = shutil.copytree(runs.teacher, runs.folder / "torn")
    os.truncate(torn / "model.safetensors", 500)
    assert_refused(
        command("train", runs.file("run"), f"teachers.0.model={torn}"), "cannot load the model in ", "header"
    )


def _with(**keys: Any) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps(json.loads(raw) | keys).encode()


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BROKEN_FILES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "config torn": ("config.json", lambda raw: raw[:100], "cannot load the "),
    "config empty": ("config.json", lambda raw: b"", "cannot load the "),
    "config bytes": ("config.json", lambda raw: raw.replace(b'"', b'"\xff', 1), "cannot load the "),
    "config deep": ("config.json", lambda raw: DEEP, "maximum recursion depth exceeded"),
    "config a list": ("config.json", lambda raw: b"[[1]]", "cannot load the tokenizer in "),
    "config a text": ("config.json", lambda raw: b'"x"', "cannot load the tokenizer in "),
    "config key": ("config.json", _with(hidden_size="wide"), "'hidden_size' expected int, got str"),
    "config rope": ("config.json", _with(rope_parameters={"rope_type": True, "rope_theta": 1.0}), "KeyError: True"),
    "config layers": (
        "config.json",
        _with(num_hidden_layers=2**31),
        "has num_hidden_layers 2147483648: no model is that large",
    ),
    "config positions": ("config.json", _with(max_position_embeddings=-1), "cannot be used: trying it on a short text"),
    "config token": ("config.json", _with(bos_token_id=float("nan")), "'bos_token_id'"),
    "generation": ("generation_config.json", lambda raw: b"[]", "TypeError: 'list' object is not a mapping"),
    "tokenizer torn": ("tokenizer.json", lambda raw: raw[:5000], "cannot load the tokenizer in "),
    "tokenizer keys": ("tokenizer.json", _with(model={"type": "BPE"}), "cannot load the tokenizer in "),
    "tokenizer deep": ("tokenizer.json", lambda raw: DEEP, "cannot load the tokenizer in "),
    "tokenizer config": ("tokenizer_config.json", lambda raw: b'"x"', "AttributeError: 'str' object has no"),
    "tokenizer length": ("tokenizer_config.json", _with(model_max_length="x"), "TypeError: '>' not supported"),
}


@pytest.mark.parametrize(("name", "change", "sentence"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_model_folder_is_a_sentence(
    command: Command, runs: TinyRuns, name: str, change: Callable[[bytes], bytes], sentence: str
) -> None:
    broken = shutil.copytree(runs.teacher, runs.folder / "broken")
    path = broken / name
    path.write_bytes(change(path.read_bytes() if path.exists() else b"{}"))
    assert_refused(command("eval", broken, "--data", runs.text), sentence)


def test_a_teacher_that_breaks_on_one_text_is_named_with_it(command: Command, runs: TinyRuns) -> None:
    """A token of the seventh text has an embedding of inf: every step is well until that text comes."""
    from transformers import AutoTokenizer

    texts = [f"The people of the nation met in {year} and spoke." for year in range(1800, 1810)]
    texts[6] = texts[6].replace("people", "treasury")
    text = write_jsonl(runs.folder / "texts.jsonl", [{"text": text} for text in texts])
    tokenizer = AutoTokenizer.from_pretrained(runs.teacher)
    token = next(
        i for i in tokenizer(texts[6]).input_ids if not any(i in tokenizer(t).input_ids for t in texts if t != texts[6])
    )

    def break_it(weights: dict[str, Any]) -> None:
        weights["model.embed_tokens.weight"][token] = float("inf")

    broken = _changed(runs.teacher, runs.folder / "broken", break_it)
    # Rows with room for one text each, two a step: the seventh is in the fourth step.
    overrides = ["data.max_length=24", "data.shuffle=false", "train.batch_size=2", "train.micro_batch_size=1"]
    overrides += [f"teachers.0.model={broken}", f"data.sources.0.files={text}", "checkpoint.every=1"]
    said = command("train", runs.file("run"), *overrides)
    assert_refused(
        said,
        "the loss is not finite at step 4, micro-batch 1 of 2 (",
        "texts.jsonl, line 7): the teacher's hidden states are not finite: try teachers[0].dtype: float32",
        "the step was not taken and the last checkpoint is untouched",
    )
    assert [line["step"] for line in metrics(runs.folder / "run")] == [1, 2, 3]
    assert steps_on_disk(runs.folder / "run") == [2, 3]
    assert [damage(runs.folder / "run" / "checkpoints" / f"step-{n:08d}") for n in (2, 3)] == [None, None]


def test_a_broken_head_is_the_teachers_fault_too(command: Command, runs: TinyRuns) -> None:
    def break_it(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"][:, 3] = 3e38

    broken = _changed(runs.teacher, runs.folder / "broken", break_it)
    said = command("train", runs.file("run"), f"teachers.0.model={broken}")
    assert said.code == 1 and "the teacher" in said.err and "finite" in said.err


@pytest.mark.parametrize(
    ("lr", "sentence"),
    [
        ("1e38", "step 1 left weights in the student that are not finite (model."),
        ("1e20", "the loss is not finite at step 2, micro-batch 1 of 2 ("),
    ],
)
def test_a_learning_rate_that_explodes(command: Command, runs: TinyRuns, lr: str, sentence: str) -> None:
    recipe = runs.file("run", "train.steps=1", "train.lr_schedule.shape=constant")
    assert command("train", recipe).code == 0
    good = (runs.folder / "run" / "checkpoints" / "step-00000001" / "model" / "model.safetensors").read_bytes()
    (runs.folder / "run").rename(runs.folder / "kept")

    said = command("train", recipe, f"train.optimizer.lr={lr}", "train.steps=4", "checkpoint.every=4")
    assert_refused(said, sentence, "try a lower train.optimizer.lr", "the last checkpoint is untouched")
    assert steps_on_disk(runs.folder / "run") == []
    assert [line["step"] for line in lines(runs.folder / "run" / "metrics.jsonl")] == [1]

    # The same after a good checkpoint: it stays, whole.
    shutil.rmtree(runs.folder / "run")
    (runs.folder / "kept").rename(runs.folder / "run")
    overrides = [f"train.optimizer.lr={lr}", "train.steps=5", "checkpoint.every=4", "checkpoint.resume=force"]
    assert_refused(command("train", recipe, *overrides), "the last checkpoint is untouched")
    assert steps_on_disk(runs.folder / "run") == [1]
    checkpoint = runs.folder / "run" / "checkpoints" / "step-00000001"
    assert damage(checkpoint) is None
    assert (checkpoint / "model" / "model.safetensors").read_bytes() == good


def test_broken_weights_are_not_saved_over_good_ones(command: Command, runs: TinyRuns) -> None:
    recipe = runs.file("run", "checkpoint.every=1", "checkpoint.keep=1", "train.optimizer.lr=1e38")
    assert_refused(command("train", recipe), "step 1 left weights in the student that are not finite")
    assert steps_on_disk(runs.folder / "run") == []


def test_debug_shows_where_it_happened(tmp_path: Path) -> None:
    """As a process, since that is what prints a traceback. `--debug` may stand anywhere."""
    line = [sys.executable, "-m", "potstill", "train", "none.yaml"]
    plain = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (plain.returncode, plain.stdout, plain.stderr) == (1, "", "error: there is no recipe none.yaml\n")
    debug = subprocess.run([*line, "--debug"], capture_output=True, text=True, cwd=tmp_path)
    assert debug.returncode == 1
    assert debug.stderr.startswith("Traceback (most recent call last):")
    assert debug.stderr.endswith("PotstillError: there is no recipe none.yaml\n")


def test_a_half_precision_teacher_is_read_in_float32_on_a_cpu(runs: TinyRuns) -> None:
    import torch

    from potstill.config import TeacherConfig
    from potstill.models import load_teacher

    half = make_model(runs.folder / "half", dtype="float16")
    assert load_file(half / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    cpu = torch.device("cpu")
    assert load_teacher(TeacherConfig(model=str(half)), cpu, "teachers[0]").model.dtype == torch.float32
    kept = load_teacher(TeacherConfig(model=str(half), dtype="float16"), cpu, "teachers[0]").model
    assert kept.dtype == torch.float16 and not any(p.requires_grad for p in kept.parameters())
