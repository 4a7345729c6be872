"""Recipes: what is refused and in which words, overrides, and the way there and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potstill.config import Recipe
from potstill.config.foreign_names import OUR_NAMES
from potstill.config.recipe import changed_keys, load_recipe, read_keys, recipe_yaml
from potstill.config.sections import Schedule, value_at
from potstill.recipe_text.plain_yaml import read_yaml, write_yaml
from potstill.recipe_text.references import escaped, resolved
from potstill.types import PotstillError


def smallest(**sections: Any) -> dict[str, Any]:
    base = {
        "student": {"model": "shipped:teacher"},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "a.txt"}]},
        "train": {"steps": 10},
    }
    return {**base, **sections}


def refusal(keys: Any, *overrides: str) -> str:
    with pytest.raises(PotstillError) as caught:
        load_recipe(keys, overrides)
    return str(caught.value)


# Problems and their words


@pytest.mark.parametrize(
    "override, words",
    [
        ("trian={steps: 1}", "trian: no such key; did you mean train?"),
        ("train.stesp=3", "train.stesp: no such key; did you mean steps?"),
        ("train.optimizer.learning=1", "train.optimizer.learning: no such key; there are name, lr, muon_lr,"),
        ("student.form=x", "student.form: no such key; did you mean from?"),
        ("data.sources.0.file=b.txt", "data.sources[0].file: no such key; did you mean files?"),
        ("teachers.0.weigth=2", "teachers[0].weigth: no such key; did you mean weight?"),
        ("loss.temperature={start: 1, ende: 2}", "loss.temperature.ende: no such key; did you mean end?"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(override: str, words: str) -> None:
    assert words in refusal(smallest(), override)


@pytest.mark.parametrize(
    "override, ours",
    [
        ("num_train_epochs=3", "train.epochs"),
        ("train.num_train_epochs=3", "train.epochs"),
        ("train.per_device_train_batch_size=4", "train.micro_batch_size"),
        ("train.gradient_accumulation_steps=2", "train.batch_size ÷ train.micro_batch_size"),
        ("train.learning_rate=1e-4", "train.optimizer.lr"),
        ("loss.lmbda=0.5", "rollouts.on_policy_fraction"),
        ("student.max_seq_length=512", "data.max_length"),
        ("train.max_length=512", "data.max_length"),
        ("train.num_generations=4", "rollouts.num_generations"),
        ("teacher_model_name_or_path=x", "teachers[0].model"),
        ("train.output_dir=x", "run"),
        ("train.save_steps=5", "checkpoint.every"),
        ("rollouts.temperature=1", "loss.temperature, of the softmax in the loss, and rollouts.sampling.temperature"),
    ],
)
def test_the_name_that_another_system_has_for_a_key_names_ours(override: str, ours: str) -> None:
    assert f"{override.partition('=')[0]}: no such key; here it is {ours}" in refusal(smallest(), override)


@pytest.mark.parametrize("name, ours", OUR_NAMES.items(), ids=OUR_NAMES)
def test_our_names_are_keys(name: str, ours: str) -> None:
    schema = Recipe.model_json_schema()
    for key in re.findall(r"[a-z_]+(?:(?:\.|\[0\])[a-z_]*)*", ours)[:1]:
        node: Any = schema
        for part in key.replace("[0]", "").split("."):
            options = [node, *node.get("anyOf", ()), *node.get("allOf", ()), node.get("items", {})]
            refs = [schema["$defs"][o["$ref"].rpartition("/")[2]] for o in options if "$ref" in o]
            (node,) = [n["properties"][part] for n in [node, *refs] if part in n.get("properties", {})] or [None]
            assert node is not None, f"{name}: there is no key {key}"
            if part == "options":  # of vllm.LLM, which knows them
                break


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.steps=many", "train.steps: should be a whole number, not 'many'"),
        ("train.steps=1.5", "train.steps: should be a whole number, not 1.5"),
        ("train.steps=0", "train.steps: should be greater than 0, not 0"),
        ("train.max_grad_norm=0", "train.max_grad_norm: should be greater than 0, not 0"),
        ("train.compile=7", "train.compile: should be true or false, not 7"),
        ("train.precision=fp16", "train.precision: should be 'auto', 'fp32', 'tf32' or 'bf16', not 'fp16'"),
        ("train=5", "train: should be a section with keys, not 5"),
        ("run=[a]", "run: should be text, not ['a']"),
        ("teachers=5", "teachers: should be a list, not 5"),
        (
            "teachers.0.dtype=int8",
            "teachers[0].dtype: should be 'float32', 'bfloat16', 'float16' or 'float64' or 'auto', not 'int8'",
        ),
        ("data.sources=[]", "data.sources: should have at least 1, not []"),
        ("data.sources.0.fraction=2", "data.sources[0].fraction: should be less than or equal to 1, not 2"),
        ("loss.divergence=kl", "loss.divergence: should be 'forward_kl', 'reverse_kl', 'jsd', "),
        ("loss.temperature=hot", "loss.temperature: should be a number or a section with keys, not 'hot'"),
        ("loss.kd_weight.start=1", "loss.kd_weight.end: is missing"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas[1]: is missing"),
        ("train.optimizer.betas=[1, 0.9]", "train.optimizer.betas[0]: should be less than 1, not 1"),
        ("eval={every: 5}", "eval.data: is missing"),
    ],
)
def test_a_wrong_value_says_key_value_and_what_is_allowed(override: str, words: str) -> None:
    assert words in refusal(smallest(), override)


def test_all_problems_at_once() -> None:
    keys = smallest(studnet={}, loss={"divergence": "kl", "beta": 2}, train={"steps": -1, "lr": 1})
    message = refusal(keys)
    assert message.splitlines()[0] == "the recipe has 5 problems:"
    assert [line.partition(":")[0] for line in message.splitlines()[1:]] == [
        "  - loss.divergence",
        "  - loss.beta",
        "  - train.steps",
        "  - train.lr",
        "  - studnet",
    ]


def test_rules_between_keys_are_reported_together() -> None:
    """Of several sections; within one section they are read only once each of its values is right."""
    message = refusal(smallest(student={}, loss={"temperature": 0}, train={"steps": 1, "epochs": 1}))
    assert "has 3 problems" in message
    for words in ("student: give exactly one", "loss: temperature must be above 0", "train: give exactly one"):
        assert words in message


def test_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train: {steps: 1}\n")
    message = refusal(path)
    assert message.startswith(f"{path} has 2 problems:") and "student: is missing" in message


@pytest.mark.parametrize("text, words", [("a: [", "not a readable YAML recipe"), ("- 1\n", "is not a recipe")])
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert words in refusal(path)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == f"there is no recipe {tmp_path / 'none.yaml'}"


# Rules between keys


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"student": {}}, "student: give exactly one of model, from and config (given: none)"),
        ({"student": {"model": "a", "from": "b", "layers": [0]}}, "(given: model, from)"),
        ({"student": {"from": "b"}}, "student: `from` goes with `layers`, `width` or both"),
        ({"student": {"model": "b", "layers": [0]}}, "student: `from` goes with `layers`, `width` or both"),
        ({"student": {"config": {"hidden_size": 8}, "tokenizer": "t"}}, "student: config needs a model_type"),
        ({"student": {"config": {"model_type": []}, "tokenizer": "t"}}, "student: config needs a model_type"),
        ({"student": {"config": {"model_type": "llama"}}}, "student: a fresh model (config) needs a tokenizer"),
        ({"data": {"sources": [{}]}}, "data.sources[0]: give exactly one of files and dataset"),
        ({"data": {"sources": [{"files": "a", "dataset": "b"}]}}, "give exactly one of files and dataset"),
        ({"data": {"sources": [{"files": "a", "prompt": "p"}]}}, "has a prompt and no completion"),
        ({"data": {"sources": [{"files": "a", "completion": "c"}]}}, "completion goes with prompt"),
        (
            {"data": {"sources": [{"files": "a", "text": "t", "messages": "m"}]}},
            "data.sources[0]: give one of text, prompt/completion and messages, not text and messages",
        ),
        ({"data": {"sources": [{"files": "a", "tools": "t"}]}}, "data.sources[0]: tools goes with messages"),
        (
            {"data": {"sources": [{"files": "a", "weight": 1}, {"files": "b"}]}},
            "data: give every source a weight, or none",
        ),
        ({"loss": {"temperature": 0}}, "loss: temperature must be above 0, not 0.0"),
        ({"loss": {"temperature": {"start": 2, "end": -1}}}, "loss: temperature must be above 0, not -1.0"),
        ({"loss": {"kd_weight": -1}}, "loss: kd_weight must not be negative, and is -1.0"),
        ({"loss": {"ce_weight": {"start": -0.5, "end": 0}}}, "loss: ce_weight must not be negative, and is -0.5"),
        ({"train": {}}, "train: give exactly one of steps and epochs"),
        ({"train": {"steps": 1, "epochs": 1}}, "train: give exactly one of steps and epochs"),
        (
            {"data": {"sources": [{"files": "a", "weight": 1}]}, "train": {"epochs": 1}},
            "train.epochs reads every source whole, so weights have no meaning: use train.steps",
        ),
        ({"teachers": [], "loss": {"ce_weight": 0}}, "there is no teacher and loss.ce_weight is 0"),
    ],
)
def test_rules_between_keys(sections: dict[str, Any], words: str) -> None:
    assert words in refusal(smallest(**sections))


def test_what_is_present_decides() -> None:
    assert load_recipe(smallest()).ce_weight == 0.0
    assert load_recipe(smallest(teachers=[])).ce_weight == 1.0
    assert load_recipe(smallest(loss={"ce_weight": 0.5})).ce_weight == 0.5
    assert load_recipe(smallest()).train.micro(1) == 8
    assert load_recipe(smallest()).train.micro(3) == 3  # of 8 rows
    assert load_recipe(smallest(train={"steps": 1, "micro_batch_size": 2})).train.micro(4) == 2
    source = {"files": "a", "prompt": "p", "completion": "c"}
    assert load_recipe(smallest(data={"sources": [source]})).data.sources[0].kind == "completion"
    assert load_recipe(smallest()).data.sources[0].kind == "text"


# Overrides


@pytest.mark.parametrize(
    "override, read",
    [
        ("train.steps=200", lambda r: r.train.steps == 200),
        ("train.optimizer.lr=1e-3", lambda r: r.train.optimizer.lr == 1e-3),
        ("train.max_grad_norm=null", lambda r: r.train.max_grad_norm is None),
        ("train.max_grad_norm=", lambda r: r.train.max_grad_norm is None),
        ("train.compile=true", lambda r: r.train.compile is True),
        ("train.optimizer={name: muon, muon_lr: 0.1}", lambda r: r.train.optimizer.muon_lr == 0.1),
        ("train.optimizer.betas=[0.8, 0.9]", lambda r: r.train.optimizer.betas == (0.8, 0.9)),
        ("teachers.0.dtype=bfloat16", lambda r: r.teachers[0].dtype == "bfloat16"),
        ("teachers[0].dtype=bfloat16", lambda r: r.teachers[0].dtype == "bfloat16"),
        ("teachers=[]", lambda r: r.teachers == []),
        ("data.sources.0.files=[a.jsonl, 'b=c.txt']", lambda r: r.data.sources[0].files == ["a.jsonl", "b=c.txt"]),
        ("loss.temperature={start: 4, end: 1}", lambda r: r.loss.temperature == Schedule(start=4, end=1)),
        ("log.wandb=a=b", lambda r: r.log.wandb == "a=b"),
        ("run=runs/x", lambda r: r.run == "runs/x"),
        ("eval.data.sources=[{files: h.txt}]", lambda r: r.eval.data.sources[0].files == "h.txt"),
        ("data.sources.0.files=*.jsonl", lambda r: r.data.sources[0].files == "*.jsonl"),
        ("data.sources.0.files=**/*.jsonl", lambda r: r.data.sources[0].files == "**/*.jsonl"),
        ("data.sources.0.files=data/*.jsonl", lambda r: r.data.sources[0].files == "data/*.jsonl"),
        ("data.sources.0.files=[*.jsonl, b/*.txt]", lambda r: r.data.sources[0].files == ["*.jsonl", "b/*.txt"]),
        ("data.sources.0.files=[ab]*.jsonl", lambda r: r.data.sources[0].files == "[ab]*.jsonl"),
        ("data.sources.0.files=&x", lambda r: r.data.sources[0].files == "&x"),
        ("run=!x", lambda r: r.run == "!x"),
        ("run=runs/${train.steps}", lambda r: r.run == "runs/10"),
        ("train.batch_size=${train.steps}", lambda r: r.train.batch_size == 10),
        ("run=\\${train.steps}", lambda r: r.run == "${train.steps}"),
        ("run=2024-01-01", lambda r: r.run == "2024-01-01"),
    ],
)
def test_overrides(override: str, read: Any) -> None:
    assert read(load_recipe(smallest(), [override]))


def test_numbers_in_free_sections_are_numbers() -> None:
    keys = smallest(student={"config": {"model_type": "llama"}, "tokenizer": "t"})
    recipe = load_recipe(keys, ["student.config.rms_norm_eps=1e-6", "student.config.hidden_size=64"])
    assert recipe.student.config == {"model_type": "llama", "rms_norm_eps": 1e-6, "hidden_size": 64}


def test_a_recipe_file_may_refer_to_its_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(smallest(run="runs/${train.steps}")))
    assert load_recipe(path).run == "runs/10"


def test_a_reference_means_what_the_key_is_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    keys = smallest(
        run="runs/${train.steps}-${train.compile}-${train.max_grad_norm}-${teachers[0].model}",
        student={"config": {"model_type": "llama", "deep": "${student.tokenizer}"}, "tokenizer": "${teachers.0.model}"},
        train={"steps": 10, "batch_size": "${train.steps}", "compile": False, "max_grad_norm": None},
    )
    path.write_text(yaml.safe_dump(keys | {"eval": {"data": "${data}"}}))
    recipe = load_recipe(path, ["train.steps=20"])
    assert recipe.run == "runs/20-false-null-shipped:teacher" and recipe.train.batch_size == 20
    assert recipe.eval is not None and recipe.eval.data == recipe.data
    assert recipe.student.config == {"model_type": "llama", "deep": "shipped:teacher"}


SECRET = "kept-in-the-environment"


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:POTSTILL_SECRET}",
        "a-${oc.env:POTSTILL_SECRET,x}",
        "${oc.decode:${oc.env:POTSTILL_SECRET}}",
        "${oc.select:run}",
        "${oc.create:[1]}",
        "${env:POTSTILL_SECRET}",
        "${anything:}",
        "${train.${run}}",
        "${.steps}",
        "${train.steps",
        "${}",
        "${POTSTILL_SECRET}",
        "\\\\${POTSTILL_SECRET}",
    ],
)
@pytest.mark.parametrize("by", ["file", "override"])
def test_nothing_but_a_key_is_referred_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, by: str) -> None:
    """A borrowed recipe cannot send a secret to an address of its choice, nor write it down."""
    monkeypatch.setenv("POTSTILL_SECRET", SECRET)
    path = tmp_path / "mine.yaml"
    address = f"http://host/{text}"
    path.write_text(yaml.safe_dump(smallest(teachers=[{"server": address if by == "file" else "http://host"}])))
    message = refusal(path, *([f"teachers.0.server='{address}'"] if by == "override" else []))
    assert message.startswith(f"{path}: teachers[0].server: ") and SECRET not in message
    assert "only other keys of it can be referred to, as in ${train.steps}" in message
    assert len(message.splitlines()) == 1
    with pytest.raises(PotstillError, match=r"teachers\[0\].server: "):
        load_recipe(smallest(teachers=[{"server": "http://host"}]), [f"teachers.0.server='{address}'"])


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"run": "${run}"}, "run: ${run} refers to itself, by way of run"),
        ({"run": "${log.wandb}", "log": {"wandb": "${run}"}}, "log.wandb: ${run} refers to itself"),
        ({"run": "a${train}"}, "run: ${train} is a section or a list, and cannot stand inside a text"),
        ({"run": "${teachers[3].model}"}, "run: ${teachers[3].model}: the recipe has no key teachers[3].model"),
        (
            {"student": {"config": {f"k{i}": f"${{student.config.k{i + 1}}}" * 2 for i in range(40)} | {"k40": ""}}},
            "references bring in more than 100,000 characters",
        ),
        (
            {"student": {"config": {f"k{i}": f"${{student.config.k{i + 1}}}" for i in range(600)} | {"k600": 1}}},
            "is reached by more than 100 references, one after the other",
        ),
    ],
)
def test_references_that_lead_nowhere(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(smallest(**keys)))
    assert words in refusal(path)


def bomb(levels: int = 30) -> str:
    lines = ["l0: &l0 [lol, lol]", *(f"l{i}: &l{i} [*l{i - 1}, *l{i - 1}]" for i in range(1, levels))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text, words",
    [
        (bomb(), "it stands for more than 100,000 values (aliases repeat what they name)"),
        (
            bomb().replace("[", "{<<: [").replace("]", "]}").replace("lol", "{a: 1}"),
            "it stands for more than 100,000 values",
        ),
        ('a: "\\ud800"', "line 1: it holds bytes or half of a surrogate pair that are no character"),
        ("a: &a [*a]\n", "it stands for more than 100,000 values"),
        ("a: " + "[" * 3_000, "not a readable YAML recipe: it is nested more than 100 levels deep"),
        ("a: " + "1" * 5000, "a value in it cannot be read (ValueError: Exceeds the limit"),
        ("a: !!timestamp x", "could not determine a constructor for the tag"),
        ("a: !!binary aGk=", "could not determine a constructor for the tag"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("a: !!int x", "a value in it cannot be read (ValueError"),
        ("a: !!bool x", "a value in it cannot be read (KeyError"),
        ("run: a\nrun: b\n", "line 2: the key run stands there twice"),
        ("1: a", "line 1: the key 1 is no text; put it in quotes"),
        ("train:\n  on: a", "line 2: the key on is no text; put it in quotes"),
        ("? [a]\n: b", "line 1: the key of several values is no text"),
        ("a: \x07", "not a readable YAML recipe: unacceptable character"),
    ],
)
def test_yaml_that_is_no_recipe_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refusal(path)
    assert words in message and len(message) < 600
    with pytest.raises(PotstillError) as caught:  # as the report reads it
        read_keys(path)
    assert str(caught.value) == message


def test_the_last_override_wins_and_the_recipe_is_left_alone() -> None:
    keys = smallest()
    assert load_recipe(keys, ["train.steps=1", "train.steps=2"]).train.steps == 2
    assert keys == smallest()


def test_a_section_takes_the_place_of_a_number() -> None:
    recipe = load_recipe(smallest(loss={"temperature": 2.0}), ["loss.temperature.start=4", "loss.temperature.end=1"])
    assert recipe.loss.temperature == Schedule(start=4, end=1)


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.steps", "cannot read the override 'train.steps': write key.sub=value"),
        ("=5", "cannot read the override '=5'"),
        ("teachers.1.dtype=auto", "teachers is a list of 1; '1' is not one of its places"),
        ("teachers.first.dtype=auto", "teachers is a list of 1; 'first' is not one of its places"),
        ("run=\udcff", "cannot apply the override 'run=\\udcff': "),
        ("train.optimizer={name: ", "cannot apply the override 'train.optimizer={name: '"),
    ],
)
def test_overrides_that_cannot_be(override: str, words: str) -> None:
    assert words in refusal(smallest(), override)


# There and back


def test_the_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(
        smallest(
            student={"from": "m", "layers": [0, 2]},
            loss={"temperature": {"start": 4, "end": 1, "shape": "cosine"}, "ce_weight": 1e-5},
            eval={
                "data": {"sources": [{"files": ["é.txt"], "fraction": 0.1}]},
                "prompts": ["yes", "1e3", "a: b", "${run} ${"],
            },
        )
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert load_recipe(recipe) == recipe
    assert recipe_yaml(load_recipe(path)) == recipe_yaml(recipe)
    assert yaml.safe_load(recipe_yaml(recipe))["student"]["from"] == "m"
    assert changed_keys(recipe, load_recipe(path)) == []


ODD = st.sampled_from(
    ["$", "{", "}", "\\", "${", "\\${", "${run}", "${oc.env:HOME}", "'", '"', ":", ": ", " #", "- ", "? ", "|", ">", "&", "*",
     "!", "%", "@", "`", "~", "null", "true", "no", "<<", "=", "1e3", "1_0", "0x1f", "1:30", ".5", "+1", "2024-01-01", "\n",
     "\t", "\r", "\x85", "\u2028", "\ufeff", "\x00", "\x1b", " ", "\xa0", "é", "日", "🙂", "---", "...", "[", "]", ","]
)  # fmt: skip
TEXTS = st.lists(ODD | st.text(max_size=3), max_size=6).map("".join)
NUMBERS = st.integers() | st.floats(allow_nan=False)
TREES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(tree=TREES)
@example(tree={"a": "\\\\${x}", "b": "\\${x}", "${x}": "${"})
@example(tree=["=", "<<", "", "1e3", "-.5", "1:30:00.5", "2024-01-01"])
def test_every_value_comes_back_as_it_was(tree: Any) -> None:
    assert resolved(read_yaml(write_yaml(escaped(tree)))) == tree


@settings(max_examples=25, deadline=None)
@given(text=TEXTS, number=st.floats(1e-30, 1e30), tree=TREES)
@example(text="\\${x}", number=1e-5, tree={"a": "\\\\${x}", "${x}": "${"})
@example(text="1e3", number=1e22, tree=["=", "<<", "", float("inf")])
def test_what_is_saved_is_read_as_it_was(tmp_path_factory: Any, text: str, number: float, tree: Any) -> None:
    keys = smallest(
        run=text,
        student={"config": {"model_type": "llama", "tree": tree}, "tokenizer": f"t{text}"},
        teachers=[{"model": "m", "weight": number}],
        eval={"data": {"sources": [{"files": [text, "b"]}]}, "prompts": [text, f"{text}{text}"]},
    )
    recipe = load_recipe(keys)
    assert recipe.run == text and recipe.student.config == {"model_type": "llama", "tree": tree}
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(recipe_yaml(recipe).encode())
    assert load_recipe(path) == recipe
    assert load_recipe(recipe) == recipe
    assert read_keys(path)[1] == recipe.model_dump(mode="json", by_alias=True)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_an_override_in_quotes_means_itself(text: str) -> None:
    assert load_recipe(smallest(), [f"run={write_word(text)}"]).run == text


def write_word(text: str) -> str:
    """A text as an override that means it and nothing else."""
    return json.dumps(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def test_every_key_of_the_resolved_recipe_is_spelled_out() -> None:
    keys = yaml.safe_load(recipe_yaml(load_recipe(smallest())))
    assert set(keys) == set(Recipe.model_fields)
    assert keys["train"]["optimizer"]["betas"] == [0.9, 0.95]


def test_changed_keys() -> None:
    recipe = load_recipe(smallest())
    other = load_recipe(recipe, ["train.steps=20", "teachers.0.weight=2", "loss.temperature={start: 2, end: 1}"])
    changed = changed_keys(recipe, other)
    assert "train.steps: 10 → 20" in changed and "teachers.0.weight: 1.0 → 2.0" in changed
    assert any(line.startswith("loss.temperature") for line in changed)
    assert all(line.startswith(("train.steps", "teachers.0.weight", "loss.temperature")) for line in changed)


# Schedules


@pytest.mark.parametrize(
    "keys, values",
    [
        ({"shape": "linear"}, [4, 3, 2, 1, 0]),
        ({"shape": "constant"}, [4, 4, 4, 4, 4]),
        ({"shape": "cosine"}, [4, 2 + 2**0.5, 2, 2 - 2**0.5, 0]),
        ({"shape": "linear", "over": 0.5}, [4, 2, 0, 0, 0]),
        ({"shape": "cosine", "over": 0.5}, [4, 2, 0, 0, 0]),
    ],
)
def test_schedules(keys: dict[str, Any], values: list[float]) -> None:
    schedule = Schedule(start=4, end=0, **keys)
    assert [schedule.at(p) for p in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(values)
    assert schedule.at(-1) == 4 and schedule.at(2) == pytest.approx(values[-1])
    assert value_at(schedule, 0.5) == pytest.approx(values[2]) and value_at(1.5, 0.3) == 1.5


def test_paths_are_text_in_a_recipe_written_in_python(tmp_path):
    source = {"files": tmp_path / "a.txt"}
    recipe = load_recipe(
        {"run": tmp_path, "student": {"model": tmp_path}, "data": {"sources": [source]}, "train": {"steps": 1}}
    )
    assert (recipe.run, recipe.student.model) == (str(tmp_path), str(tmp_path))
    assert recipe.data.sources[0].files == str(tmp_path / "a.txt")


def test_nothing_to_learn_from_is_refused():
    keys = {"student": {"model": "x"}, "data": {"sources": [{"files": "a.txt"}]}, "train": {"steps": 1}}
    with pytest.raises(PotstillError, match=r"there is no teacher and loss\.ce_weight is 0"):
        load_recipe({**keys, "loss": {"ce_weight": 0}})
    with pytest.raises(PotstillError, match=r"loss\.kd_weight is 0 and loss\.ce_weight is 0: nothing to learn from"):
        load_recipe({**keys, "teachers": [{"model": "y"}], "loss": {"kd_weight": 0}})


def test_a_cache_is_not_the_folder_of_the_run(tmp_path):
    keys = {"student": {"model": "x"}, "data": {"sources": [{"files": "a.txt"}]}, "train": {"steps": 1}}
    teachers = [
        {"model": "y"},
        {"model": "y", "cache": tmp_path / "b" / ".." / "a"},
    ]  # as one run and one cache lock it
    with pytest.raises(PotstillError, match=r"teachers\[1\]\.cache is the run's own folder"):
        load_recipe({**keys, "run": tmp_path / "a", "teachers": teachers})
    assert load_recipe({**keys, "run": tmp_path, "teachers": teachers}).run == str(tmp_path)


def test_many_backslashes_before_no_reference_take_no_more_time_than_they_have_length() -> None:
    many = "\\" * 500_000  # minutes, were each of them tried as a beginning
    assert resolved({"run": f"{many} ${{log}}", "log": "x"})["run"] == f"{many} x"
    assert escaped(f"{many} ${{log}}") == f"{many} \\${{log}}"
    assert resolved({"run": "\\\\\\\\${log}", "log": "x"})["run"] == "\\\\x"


@pytest.mark.parametrize("word", ["loss.temperature=inf", "train.optimizer.lr=nan", "loss.ce_weight=-inf"])
def test_numbers_are_finite(word: str) -> None:
    with pytest.raises(PotstillError, match="should be a finite number"):
        load_recipe(smallest(), [word])
