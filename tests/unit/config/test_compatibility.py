"""Every combination of signal, divergence, tokenizer, text, temperature and teachers: either it takes a training step, or it is
refused in the table's own words."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import Served
from taught import batches_of, builder, sentence
from tiny import CPU, LLAMA
from tiny_models import write_jsonl
from torch import Tensor, nn

from potstill.config import DataConfig, LossConfig, RolloutsConfig, SamplingConfig, StudentConfig, TeacherConfig
from potstill.config.compatibility import MOVING, RULES, Combination, Rule, reasons, refusals
from potstill.config.recipe import load_recipe
from potstill.data import collate
from potstill.evals.reference import RunEvaluation
from potstill.models import LanguageModel, load_student, load_teacher
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.rollouts.remote_writer import RemoteWriter
from potstill.teachers.combine import compute_targets
from potstill.teachers.open import open_teachers
from potstill.teachers.remote import RemoteOrigin
from potstill.teachers.teacher import Teacher
from potstill.types import Batch, Head, HiddenTarget, PotstillError, Prepared, Target

ROOT = Path(__file__).resolve().parents[3]


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "write_compatibility_docs.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()
STEPPED = ("signal", "divergence", "tokenizer", "temperature", "text", "teachers")
SMALL = {**LLAMA, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
STORES = {
    "hidden": {"kind": "hidden"},
    "top_k": {"kind": "top_k", "k": 8, "temperatures": (1.0, 2.0)},
    "sampled": {"kind": "sampled", "num_samples": 8},
    "token_logprobs": {"kind": "token_logprobs"},
}


def test_the_page_is_up_to_date() -> None:
    text = TOOL.DOC.read_text(encoding="utf-8")
    assert text == TOOL.compatibility_docs(), "run python tools/write_compatibility_docs.py"


@cache
def every_combination() -> dict[Combination, tuple[Rule, ...]]:
    """With the rules that each breaks. Caches are alone where that may be, and beside their model where text is written."""
    found = {}
    for fields in product(*(TOOL.AXES[axis].values() for axis in STEPPED)):
        made = TOOL.combined(*fields)
        alone = made.holder == "cache" and (made.imported or made.text == {"data"})
        if not made.greedy:
            made = replace(made, alone=alone)
            found[made] = tuple(refusals(made))
    return found


class Fixed:
    """A student whose hidden states are the parameters: the loss and its gradients are real, and take a millisecond."""

    context = None

    def __init__(self, student: LanguageModel, batch: Batch) -> None:
        self.model = nn.Module()
        self.model.hidden = nn.Parameter(student.hidden(batch, batch.rows.student).detach())
        self.model.weight = nn.Parameter(student.output_head().weight.detach().clone())

    def hidden(self, batch: Batch, rows: Tensor) -> Tensor:
        return self.model.hidden

    def at_rows(self, hidden: Tensor) -> HiddenTarget:
        return HiddenTarget(hidden, Head(self.model.weight))


class Told:
    """A teacher that has answered."""

    def __init__(self, teacher: Teacher[Any], batch: Batch) -> None:
        self.name, self.weight = teacher.name, teacher.weight
        self.answered = teacher.answer(batch, teacher.prepare(batch))

    def answer(self, batch: Batch, prepared: Prepared) -> tuple[Target | None, Prepared]:
        return self.answered


class Bench:
    """Teachers of all kinds, opened once each, and a batch of text of both kinds for each student."""

    def __init__(self, teacher: Path, server: str, folder: Path, caches: Any) -> None:
        self.teacher, self.server, self.folder, self.caches = str(teacher), server, folder, caches
        self.students = {
            name: load_student(StudentConfig(config=SMALL, tokenizer=f"shipped:tokenizers/{tokenizer}"), CPU, 0)
            for name, tokenizer in (("same", "bytes-2k"), ("other", "pieces-1k"))
        }
        self.file = folder / "text.jsonl"
        self.data = DataConfig.model_validate(
            {
                "sources": [{"files": str(self.file)}],
                "max_length": 48,
                "piece_bytes": 300,
                "columns": ["hint", "part"],
                "packing": False,
            }
        )
        self.batches = {name: self._batches(student) for name, student in self.students.items()}
        self.modules = {
            name: StudentLoss(Fixed(self.students[name], batch[False])) for name, batch in self.batches.items()
        }
        self.opened: dict[Any, Any] = {}
        self.answers: dict[Any, Told] = {}

    def _batches(self, student: LanguageModel) -> dict[bool, Batch]:
        (plain,) = batches_of(self.data, student, rows=3)
        written = [
            [replace(e, writer="student", behaviour=np.full(len(e.ids), -2.0, dtype=np.float32))]
            for e in plain.examples
        ]
        return {False: plain, True: collate(written, 0)}

    def teacher_keys(self, c: Combination) -> dict[str, Any]:
        keys: dict[str, Any] = {"cross_tokenizer": {"method": c.method}}
        if c.context_column:
            keys["context_column"] = "hint"
        if c.filter:
            keys["filter"] = {"part": "a"}
        if c.holder == "server":
            return keys | {"server": self.server, "remote": {"kind": c.signal, "k": 8}}
        if c.holder == "cache":
            store = {**STORES[str(c.signal)]}
            if c.signal == "top_k":
                store["temperatures"] = c.temperatures
            keys |= {"cache": str(self.caches(store, c.imported)), "store": store}
        return keys if c.alone else keys | {"model": self.teacher}

    def loss_keys(self, c: Combination) -> dict[str, Any]:
        temperature = {"start": 1.0, "end": 2.0} if c.temperature == MOVING else c.temperature
        return {
            "divergence": c.divergence,
            "temperature": temperature,
            "combine_teachers": c.combine,
            "teacher_weighting": c.weighting,
            "entropy_gate": 1.0 if c.entropy_gate else None,
            "dynamic_scaling": c.dynamic_scaling,
        }

    def recipe(self, c: Combination) -> dict[str, Any]:
        fractions = {"student": "on_policy_fraction", "teacher": "teacher_fraction"}
        return {
            "student": {"config": SMALL, "tokenizer": "shipped:tokenizers/bytes-2k"},
            "teachers": [self.teacher_keys(c)],
            "data": {**self.data.model_dump(exclude_none=True), "max_length": 512},
            "loss": self.loss_keys(c),
            "rollouts": {fractions[who]: 1 for who in c.text if who in fractions},
            "train": {"steps": 1},
        }

    def open(self, c: Combination) -> Any:
        student = self.students[c.tokenizer or "same"]
        configs = [TeacherConfig.model_validate(self.teacher_keys(c))]
        opened = open_teachers(configs, student, self.data, LossConfig.model_validate(self.loss_keys(c)), CPU)
        if c.writes and isinstance(opened.writer, RemoteOrigin):
            RemoteWriter(opened.writer, SamplingConfig(), [])
        return opened.teachers[0]

    def told(self, c: Combination) -> Told:
        own, what = "student" in c.text, (c.signal, c.holder, c.imported, c.temperatures, c.temperature)
        opening = (*what, c.tokenizer, c.context_column, c.method, c.policy_gradient)
        if opening not in self.opened:
            self.opened[opening] = self.open(replace(c, filter=False, combine="sum", weighting=None))
        if (opening, own, c.filter) not in self.answers:
            teacher = self.opened[opening]
            if c.filter:
                teacher = Teacher(teacher.source, teacher.view, teacher.name, teacher.weight, {"part": "a"})
            self.answers[opening, own, c.filter] = Told(teacher, self.batches[str(c.tokenizer)][own])
        return self.answers[opening, own, c.filter]

    def step(self, c: Combination) -> None:
        """A step from this teacher and a live one: its loss and gradients are finite."""
        own, fixed = "student" in c.text, 1.0 if c.temperature == MOVING else c.temperature
        beside = Combination(tokenizer=c.tokenizer, divergence=c.divergence, temperature=fixed, text=c.text)
        batch, module = self.batches[str(c.tokenizer)][own], self.modules[str(c.tokenizer)]
        loss = LossConfig.model_validate(self.loss_keys(c))
        teachers = [self.told(one) for one in (c, beside)]
        settings = LossSettings(
            c.divergence, 0.5, 0.1, 1.5 if c.temperature == MOVING else fixed, 1.0, 0.0, loss.entropy_gate
        )
        module.zero_grad()
        value, _ = module(
            batch, compute_targets(teachers, [Prepared(), Prepared()], batch, loss), batch.supervised_tokens, settings
        )
        value.backward()
        norms = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
        assert math.isfinite(value.item()) and bool(norms.isfinite().all()) and float(norms.sum()) > 0, c


@pytest.fixture(scope="module")
def bench(tiny_teacher: Path, served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    records = [{"text": sentence(i, 3 + i), "hint": "Of law: ", "part": "ab"[i % 2]} for i in range(3)]
    write_jsonl(folder / "text.jsonl", records)
    made: dict[str, Path] = {}
    language_model = load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")
    build = builder(
        language_model, DataConfig(sources=[{"files": str(folder / "text.jsonl")}], piece_bytes=300), tmp_path_factory
    )

    def caches(store: dict[str, Any], imported: bool) -> Path:
        built = build(**store)
        if not imported:
            return built
        name = f"imported-{built.name}"
        if name not in made:
            made[name] = shutil.copytree(built, folder / name)
            manifest = json.loads((built / "manifest.json").read_text())
            manifest["imported"] = {"layout": "l", "values": "v", "rest": "none"}
            (made[name] / "manifest.json").write_text(json.dumps(manifest))
        return made[name]

    bench = Bench(tiny_teacher, served.address, folder, caches)
    yield bench
    for teacher in bench.opened.values():
        teacher.close()


def test_what_is_allowed_takes_a_step(bench: Bench) -> None:
    allowed = [c for c, rules in every_combination().items() if not rules]
    plain = [c for c in allowed if (c.combine, c.weighting, c.filter) == ("sum", None, False)]
    gated = [c for c in (replace(c, entropy_gate=True) for c in plain) if not refusals(c)]
    # To a step, text of the teacher's is like the data set's, and 3 is a temperature like 2. Temperatures, and that the text
    # is the student's own, change how teachers are combined in no case but that of the policy gradient.
    chosen = [c for c in allowed if (c.text == {"data"} and c.temperature == 1.0) or c.policy_gradient]
    chosen += [c for c in plain if c.text == {"data"} and c.temperature in (2.0, MOVING)]
    chosen += [c for c in [*plain, *gated] if c.text == {"student"} and not c.policy_gradient]
    for c in chosen:
        bench.step(c)
    assert len(chosen) > 2_000


def test_what_is_refused_is_refused_when_the_recipe_loads_or_its_teachers_open(bench: Bench) -> None:
    """One combination of every set of rules that are broken together; all reasons are given at once."""
    examples = {rules: c for c, rules in every_combination().items() if rules}
    opened: set[Rule] = set()
    for rules, c in examples.items():
        keys = bench.recipe(c)
        told = reasons(Combination.of(*_configs(keys)), "teachers[0]")
        if told:
            with pytest.raises(PotstillError) as caught:
                load_recipe(keys)
            assert all(reason in str(caught.value) for reason in told)
        elif not opened >= set(rules):  # each rule once: a teacher takes a while to load
            load_recipe(keys)
            opened |= set(rules)
            with pytest.raises(PotstillError) as caught:
                bench.open(c)
            # Who writes is asked once the teachers are open.
            told = reasons(replace(c, writes=False), "teachers[0]") or reasons(c, "teachers[0]")
            assert str(caught.value) == "\n".join(told)


def _configs(keys: dict[str, Any]) -> tuple[TeacherConfig, LossConfig, RolloutsConfig]:
    return (
        TeacherConfig.model_validate(keys["teachers"][0]),
        LossConfig.model_validate(keys["loss"]),
        RolloutsConfig.model_validate(keys["rollouts"]),
    )


def test_every_rule_refuses_something() -> None:
    broken = {rule for rules in every_combination().values() for rule in rules}
    pairs = product(*(TOOL.AXES[axis].values() for axis in ("signal", "divergence", "text", "loss", "parallel")))
    broken |= {rule for fields in pairs for rule in refusals(TOOL.combined(*fields))}
    servers = product(*(TOOL.AXES[axis].values() for axis in ("asked", "server")))
    own = product(*(TOOL.AXES[axis].values() for axis in ("own", "text", "parallel")))
    others = (*servers, *own, *product(TOOL.AXES["compared"].values()))
    others += (*product(*(TOOL.AXES[axis].values() for axis in ("tokenizer", "loss"))),)
    broken |= {rule for fields in others for rule in refusals(TOOL.combined(*fields))}
    assert broken == set(RULES)


def test_own_text_is_compared_with_a_live_teacher(bench: Bench) -> None:
    """Caches alone and servers are refused when the recipe loads; another tokenizer, when the evaluation is made."""
    held_out = {"data": {**bench.data.model_dump(exclude_none=True), "max_length": 512}, "on_policy_samples": 2}
    (rule,) = (rule for rule in RULES if rule.key == "eval.on_policy_samples")
    for name, fields in TOOL.AXES["compared"].items():
        c = TOOL.combined(fields)
        keys = bench.recipe(c) | {"eval": held_out}
        if c.alone or c.server:
            with pytest.raises(PotstillError) as caught:
                load_recipe(keys)
            assert str(caught.value).endswith(f"{rule.key}: {rule.reason}"), name
            continue
        recipe, student = load_recipe(keys), bench.students[str(c.tokenizer)]
        teachers = open_teachers(recipe.teachers, student, recipe.data, recipe.loss, CPU)
        if refusals(c):
            with pytest.raises(PotstillError) as caught:
                RunEvaluation(recipe, student, teachers, CPU)
            assert str(caught.value) == f"{rule.key}: {rule.reason}"
        else:
            RunEvaluation(recipe, student, teachers, CPU)
        for teacher in teachers.teachers:
            teacher.close()
