"""Recipes: what is refused and in which words, overrides, and the way there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from potstill.config import Recipe
from potstill.recipe import changed_keys, load_recipe, recipe_yaml
from potstill.sections import Schedule, value_at
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
    "override, words",
    [
        ("train.steps=many", "train.steps: should be a whole number, not 'many'"),
        ("train.steps=1.5", "train.steps: should be a whole number, not 1.5"),
        ("train.steps=0", "train.steps: should be greater than 0, not 0"),
        ("train.clip=0", "train.clip: should be greater than 0, not 0"),
        ("train.compile=7", "train.compile: should be true or false, not 7"),
        ("train.precision=fp16", "train.precision: should be 'fp32' or 'bf16', not 'fp16'"),
        ("train=5", "train: should be a section with keys, not 5"),
        ("run=[a]", "run: should be text, not ['a']"),
        ("teachers=5", "teachers: should be a list, not 5"),
        (
            "teachers.0.dtype=int8",
            "teachers[0].dtype: should be 'float32', 'bfloat16' or 'float16' or 'auto', not 'int8'",
        ),
        ("data.sources=[]", "data.sources: should have at least 1, not []"),
        ("data.sources.0.share=2", "data.sources[0].share: should be less than or equal to 1, not 2"),
        ("loss.divergence=kl", "loss.divergence: should be 'forward_kl', 'reverse_kl', 'jsd', "),
        ("loss.temperature=hot", "loss.temperature: should be a number or a section with keys, not 'hot'"),
        ("loss.kd_weight.start=1", "loss.kd_weight.end: is missing"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas[1]: is missing"),
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
        ({"student": {"from": "b"}}, "student: `from` and `layers` go together"),
        ({"student": {"model": "b", "layers": [0]}}, "student: `from` and `layers` go together"),
        ({"student": {"config": {"hidden_size": 8}, "tokenizer": "t"}}, "student: config needs a model_type"),
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
            {"train": {"steps": 1, "batch_size": 8, "micro_batch_size": 3}},
            "train: micro_batch_size 3 does not divide batch_size 8",
        ),
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
    assert load_recipe(smallest()).train.micro == 8
    assert load_recipe(smallest(train={"steps": 1, "micro_batch_size": 2})).train.micro == 2
    source = {"files": "a", "prompt": "p", "completion": "c"}
    assert load_recipe(smallest(data={"sources": [source]})).data.sources[0].kind == "completion"
    assert load_recipe(smallest()).data.sources[0].kind == "text"


# Overrides


@pytest.mark.parametrize(
    "override, read",
    [
        ("train.steps=200", lambda r: r.train.steps == 200),
        ("train.optimizer.lr=1e-3", lambda r: r.train.optimizer.lr == 1e-3),
        ("train.clip=null", lambda r: r.train.clip is None),
        ("train.clip=", lambda r: r.train.clip is None),
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
                "data": {"sources": [{"files": ["é.txt"], "share": 0.1}]},
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
