"""The arithmetic of generations: who answers what, how often engines are called, and that no text is lost or used twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tiny import tiny

from potstill.config import DataConfig, RolloutsConfig, SamplingConfig, SourceConfig
from potstill.config.recipe import load_recipe
from potstill.data import Encoder
from potstill.data.dealing import Share
from potstill.rollouts.buffer import Buffer, Layout, about, laid_out, load_saved
from potstill.rollouts.engine import Completion
from potstill.rollouts.prompt_batches import PromptBatches
from potstill.rollouts.prompts import Answers, Prompter
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.transformers import TransformersEngine
from potstill.types import PotstillError

MODEL = tiny()


class Counting(TransformersEngine):
    """The real engine, which notes what it was asked."""

    def __init__(self, rollouts: RolloutsConfig, **keys: Any) -> None:
        self.calls: list[list[tuple[bytes, int]]] = []
        self.updates: list[int] = []
        super().__init__(MODEL, rollouts.sampling, stop_ids=(), **keys)
        self.calls.clear()  # of its own check

    def generate(self, asked):
        self.calls.append([(ask.ids.tobytes(), ask.seed) for ask in asked])
        return super().generate(asked)

    def update(self, version: int) -> None:
        self.updates.append(version)
        super().update(version)


@dataclass
class Made:
    """A buffer over a file of numbered prompts, and its parts."""

    path: Any
    rollouts: RolloutsConfig
    batch_size: int = 4
    micro: int = 2
    seed: int = 0
    epochs: int | None = None
    state: Any = None
    saved: Any = ()
    version: int = 0
    counts: Any = None
    records: int = 40
    engine: Any = field(init=False)
    buffer: Any = field(init=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            rows = (f'{{"q": "Question {i} is ", "a": "answer {i}."}}\n' for i in range(self.records))
            self.path.write_text("".join(rows))
        self.engine = Counting(self.rollouts, copies=self.rollouts.overlaps)
        self.buffer = Buffer(
            self.prompts(None if self.state is None else self.state["prompts"]),
            {"student": self.engine},
            Answers(MODEL, self.encoder(), {}),
            self.rollouts,
            Layout(self.batch_size, Share(self.micro), 0, True),
            seed=self.seed,
            version=self.version,
            counts=self.counts,
            saved=self.saved,
            taken=0 if self.state is None else self.state["taken"],
        )

    def encoder(self) -> Encoder:
        return Encoder(MODEL.tokenizer, max_length=48, append_eos=True)

    def prompts(self, state=None) -> PromptBatches:
        source = SourceConfig(files=str(self.path), prompt="q", completion="a")
        data = DataConfig(sources=[source], max_length=48, shuffle_buffer=8)
        groups = self.batch_size * self.rollouts.steps_per_generation // self.rollouts.num_generations
        prompter = Prompter(MODEL.tokenizer, most=40, prompt_tokens=8, kwargs={})
        return PromptBatches(
            data,
            self.rollouts,
            self.encoder(),
            {"student": prompter, "teacher": prompter},
            MODEL.tokenizer,
            groups=groups,
            seed=self.seed,
            epochs=self.epochs,
            state=state,
        )

    def steps(self, count: int, start: int = 0) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            found.append(next(self.buffer))
            if not self.buffer.waiting:
                self.buffer.advance(start + len(found))
        return found[:count]


def rollouts(**keys: Any) -> RolloutsConfig:
    return RolloutsConfig(**({"on_policy_fraction": 1.0, "sampling": SamplingConfig(max_new_tokens=4)} | keys))


def texts(steps) -> list[tuple[int, ...]]:
    return [tuple(e.ids.tolist()) for step in steps for batch in step.batches for e in batch.examples]


def test_one_call_writes_all_texts_of_a_generation(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(num_generations=2, steps_per_generation=3, max_staleness=2))
    steps = made.steps(6)
    assert [len(call) for call in made.engine.calls] == [12, 12]
    assert len(steps) == 6 and all(sum(len(b.examples) for b in w.batches) == 4 for w in steps)
    for call, first in zip(made.engine.calls, (0, 6), strict=True):
        assert [seed for _, seed in call] == [rollout_seed(0, g, i) for g in range(first, first + 6) for i in range(2)]
        assert len({ids for ids, _ in call}) == 6  # unique prompts
    assert made.engine.updates == [3]  # the weights that write are those at the beginning of a generation
    assert [w.facts["rollout_staleness"] for w in steps] == [0, 1, 2, 0, 1, 2]
    versions = [{e.version for b in w.batches for e in b.examples} for w in steps]
    assert versions == [{0}, {0}, {0}, {3}, {3}, {3}]


def test_strictly_on_policy_every_step_writes_with_the_newest_weights(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts())
    made.steps(3)
    assert made.engine.updates == [1, 2] and [len(call) for call in made.engine.calls] == [4, 4, 4]


def test_with_staleness_the_next_texts_are_written_one_step_ahead(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(max_staleness=1))
    steps = made.steps(4)
    assert [w.facts["rollout_staleness"] for w in steps] == [0, 1, 1, 1]
    assert [next(iter(w.batches[0].examples)).version for w in steps] == [0, 0, 1, 2]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_who_answers_depends_on_seed_and_number_alone(tmp_path, share) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(on_policy_fraction=share, teacher_fraction=min(0.2, 1 - share)))
    batches = made.prompts()
    kinds = [batches.kind(n) for n in range(4000)]
    shares = {kind: kinds.count(kind) / 4000 for kind in ("student", "teacher", "data")}
    assert shares["student"] == pytest.approx(share, abs=0.03)
    assert shares["teacher"] == pytest.approx(min(0.2, 1 - share), abs=0.03)
    other = Made(
        tmp_path / "x.jsonl", rollouts(on_policy_fraction=share, teacher_fraction=min(0.2, 1 - share)), batch_size=8
    )
    others = other.prompts()
    assert [others.kind(n) for n in range(200)] == kinds[:200]


def test_a_group_of_the_data_set_is_that_many_of_its_examples(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(on_policy_fraction=0.5, num_generations=2), batch_size=8)
    batch = next(made.prompts())
    assert {g.kind for g in batch.groups} == {"student", "data"}
    seen = []
    for group in batch.groups:
        if group.kind == "data":
            assert len(group.examples) == 2 and group.prompt is None
            seen += [example.text for example in group.examples]
        else:
            seen.append(group.prompt.text)
    assert len(seen) == len(set(seen))
    (step,) = made.steps(1)
    rows = [e for b in step.batches for e in b.examples]
    assert len(rows) == 8 and {e.writer for e in rows} == {"student", None}
    assert step.counts["written_examples"] == sum(e.writer == "student" for e in rows)


def test_prompt_batches_go_on_from_any_of_them(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(on_policy_fraction=0.6, num_generations=2))
    batches = made.prompts()
    first = [next(batches) for _ in range(8)]
    for i, batch in enumerate(first[:-1]):
        again = made.prompts(batch.after)
        for expected in first[i + 1 :]:
            found = next(again)
            assert [(g.number, g.kind) for g in found.groups] == [(g.number, g.kind) for g in expected.groups]
            for a, b in zip(found.groups, expected.groups, strict=True):
                assert [e.key for e in a.examples] == [e.key for e in b.examples]
                assert (a.prompt and a.prompt.text) == (b.prompt and b.prompt.text)
        if batch.before is not None:
            assert [g.number for g in next(made.prompts(batch.before)).groups] == [g.number for g in batch.groups]


@pytest.mark.parametrize("keys", [{}, {"steps_per_generation": 3, "max_staleness": 2}, {"max_staleness": 1}], ids=str)
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_what_was_written_is_in_a_checkpoint_and_no_text_is_lost_or_used_twice(tmp_path, keys, stop) -> None:
    """The weights do not change here, so what an engine writes is known: what matters is which texts are used."""
    mix = rollouts(on_policy_fraction=0.7, num_generations=2, **keys)
    whole = Made(tmp_path / "x.jsonl", mix).steps(8)
    first = Made(tmp_path / "x.jsonl", mix)
    before = first.steps(stop)
    first.buffer.save(tmp_path, before[-1].state)
    waiting = load_saved(tmp_path)
    first.buffer.close()
    expected_waiting = 1 if keys.get("max_staleness") == 1 or (keys and stop % 3) else 0
    assert len(waiting) == expected_waiting
    last = before[-1]
    second = Made(tmp_path / "x.jsonl", mix, state=last.state, saved=waiting, version=stop, counts=last.counts)
    after = second.steps(8 - stop, stop)
    assert texts(before) + texts(after) == texts(whole)
    assert [w.counts for w in after] == [w.counts for w in whole[stop:]]
    assert [w.facts.get("rollout_staleness") for w in after] == [w.facts.get("rollout_staleness") for w in whole[stop:]]
    behaviours = [[e.behaviour for b in w.batches for e in b.examples] for w in (after[0], whole[stop])]
    for a, b in zip(*behaviours, strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)


def test_the_last_generation_of_the_epochs_may_be_smaller(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(), epochs=1, records=10)
    steps = list(made.buffer)
    assert [sum(len(b.examples) for b in w.batches) for w in steps] == [4, 4, 2]
    prompts = [e.text.split(" is ")[0] for w in steps for b in w.batches for e in b.examples]
    assert sorted(prompts) == sorted(f"Question {i}" for i in range(10))


def test_micro_batches_are_of_like_lengths_and_no_wider_than_their_longest(tmp_path) -> None:
    made = Made(tmp_path / "x.jsonl", rollouts(on_policy_fraction=0.5), batch_size=8, micro=3)
    (step,) = made.steps(1)
    lengths = [[len(e.ids) for e in b.examples] for b in step.batches]
    flat = [n for some in lengths for n in some]
    assert [sorted(some) for some in lengths] == [sorted(sorted(flat, reverse=True)[i : i + 3]) for i in range(0, 8, 3)]
    for batch, some in zip(step.batches, lengths, strict=True):
        assert batch.input_ids.shape[1] == max(some)
    alone = laid_out([e for b in step.batches for e in b.examples], Layout(8, Share(8), 0, packing=False))
    assert alone[0].input_ids.shape == (8, max(flat)) and not alone[0].packed


def test_facts_about_what_was_written() -> None:
    def text(ids, end):
        return Completion(np.array(ids, dtype=np.int32), np.zeros(len(ids), np.float32), end)

    facts = about([text([1, 2, 1, 2], "eos"), text([1, 2], "length"), text([], "stop")])
    assert facts == {
        "rollout_length": 2.0,
        "completions_ended": 1 / 3,
        "completions_clipped": 1 / 3,
        "rollout_distinct_1": 2 / 6,
        "rollout_distinct_2": 2 / 4,  # 12 and 21, of 12 21 12 and 12
        "rollout_distinct_3": 1.0,
    }


def test_a_student_that_writes_nothing_is_told_of(tmp_path) -> None:
    class Silent(Counting):
        def generate(self, asked):
            return [Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "stop") for _ in asked]

    made = Made(tmp_path / "x.jsonl", rollouts())
    made.buffer._writers = {"student": object.__new__(Silent)}
    made.buffer._writers["student"].version = 0
    with pytest.raises(PotstillError, match="nothing was written in 17 generations in a row"):
        next(made.buffer)


# What a recipe refuses.


def recipe(policy_keys, teachers=({"model": "shipped:teacher"},), **sections) -> dict[str, Any]:
    return {
        "student": {"model": "shipped:teacher"},
        "teachers": list(teachers),
        "data": {"sources": [{"files": "x.jsonl", "prompt": "q", "completion": "a"}], "max_length": 64},
        "rollouts": {"sampling": {"max_new_tokens": 16}, **policy_keys},
        "train": {"steps": 1, "batch_size": 8},
    } | sections


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"num_generations": 3},
            "num_generations 3 does not divide the 8 rows of a generation (train.batch_size 8): 1, 2, 4",
        ),
        (
            {"num_generations": 2, "generation_batch_size": 8},
            "generation_batch_size 8 × num_generations 2 = 16, and a generation has 8 rows (train.batch_size 8): "
            "generation_batch_size 4 would fit, or train.batch_size 16",
        ),
        (
            {"num_generations": 2, "generation_batch_size": 3, "steps_per_generation": 2, "max_staleness": 1},
            "a generation has 16 rows (train.batch_size 8 × steps_per_generation 2): generation_batch_size 8 would fit",
        ),
        (
            {"steps_per_generation": 4},
            "max_staleness is 0: set max_staleness to 3, or steps_per_generation to 1",
        ),
        ({"teacher_fraction": 0.5}, "are shares of the same prompts and sum to more than 1"),
        ({"sampling": {"max_new_tokens": 64}}, "leaves no room for a prompt in data.max_length 64"),
        ({"engine": {"server": "http://x"}}, "server goes with kind: vllm"),
        ({"engine": {"kind": "vllm", "folder": "x"}}, "folder goes with server"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_would(keys, words) -> None:
    with pytest.raises(PotstillError) as refused:
        load_recipe(recipe({"on_policy_fraction": 1.0, **keys}))
    assert words in str(refused.value)


def test_what_cannot_be_is_refused_when_the_recipe_loads() -> None:
    with pytest.raises(
        PotstillError, match=r"teachers\[0\]: a cache alone cannot know fresh text: put model or server beside"
    ):
        load_recipe(recipe({"on_policy_fraction": 0.5}, teachers=[{"cache": "c"}]))
    with pytest.raises(PotstillError, match="text is written, and there is no teacher to learn from"):
        load_recipe(recipe({"on_policy_fraction": 0.5}, teachers=[], loss={"ce_weight": 1.0}))
    alone = {"data": {"sources": [{"files": "x.jsonl", "prompt": "q"}], "max_length": 64}}
    with pytest.raises(PotstillError, match="a source has a prompt and no completion"):
        load_recipe(recipe({"on_policy_fraction": 0.9}, **alone))
    load_recipe(recipe({"on_policy_fraction": 0.75, "teacher_fraction": 0.25}, **alone))
    load_recipe(recipe({"on_policy_fraction": 0.5}, teachers=[{"model": "shipped:teacher", "cache": "c"}]))
    with pytest.raises(PotstillError, match="policy_gradient_kl learns from tokens that the student drew itself"):
        load_recipe(recipe({"on_policy_fraction": 0.5}, loss={"divergence": "policy_gradient_kl"}))


def test_shares_that_miss_one_by_rounding_leave_nothing_to_the_data_set() -> None:
    alone = {"data": {"sources": [{"files": "x.jsonl", "prompt": "q"}], "max_length": 64}}
    loaded = load_recipe(recipe({"on_policy_fraction": 0.7, "teacher_fraction": 0.3}, **alone))
    assert loaded.rollouts.data_share == 0.0


@pytest.mark.parametrize(
    ("policy_keys", "sections", "words"),
    [
        ({"on_policy_fraction": 1}, {"loss": {"kd_weight": 0, "ce_weight": 1}}, "all text is the student's own"),
        (
            {"on_policy_fraction": 1, "sampling": {"temperature": 0, "max_new_tokens": 8}},
            {"loss": {"divergence": "policy_gradient_kl"}},
            "rollouts.sampling.temperature 0 draws none",
        ),
        (
            {"on_policy_fraction": 1, "num_generations": 2, "sampling": {"temperature": 0, "max_new_tokens": 8}},
            {},
            "writes the same answer so many times",
        ),
        (
            {"teacher_fraction": 1},
            {"teachers": [{"model": "shipped:teacher", "context_column": "hint"}]},
            "the first teacher has a prompt of its own",
        ),
        ({"on_policy_fraction": 1, "sampling": {"stop": [""], "max_new_tokens": 8}}, {}, "rollouts.sampling.stop[0]"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_would_teach_nothing_or_something_else_is_refused(policy_keys, sections, words) -> None:
    with pytest.raises(PotstillError) as refused:
        load_recipe(recipe(policy_keys) | sections)
    assert words in str(refused.value)


def test_texts_that_were_written_for_other_prompts_are_not_used(tmp_path) -> None:
    first = Made(tmp_path / "x.jsonl", rollouts(max_staleness=1))
    before = first.steps(2)
    first.buffer.save(tmp_path, before[-1].state)
    first.buffer.close()
    (saved,) = load_saved(tmp_path)
    changed = Made(tmp_path / "x.jsonl", rollouts(max_staleness=1), state=before[-1].state, saved=[saved], version=2)
    changed.engine.calls.clear()
    same = changed.steps(1)
    assert len(changed.engine.calls) == 1  # the one after it, ahead
    other = Made(tmp_path / "y.jsonl", rollouts(max_staleness=1), records=39, version=2, saved=[saved])
    assert texts(other.steps(1)) != texts(same) and len(other.engine.calls) == 2


def test_an_engine_that_fails_ahead_does_not_take_the_checkpoint_with_it(tmp_path) -> None:
    class Failing(Counting):
        def generate(self, asked):
            if len(self.calls) == 2:
                raise PotstillError("the engine broke")
            return super().generate(asked)

    made = Made(tmp_path / "x.jsonl", rollouts(max_staleness=1))
    broken = Failing(made.rollouts, copies=True)
    made.buffer._writers = {"student": broken}
    steps = made.steps(2)
    made.buffer.save(tmp_path, steps[-1].state)
    assert load_saved(tmp_path) == []
    with pytest.raises(PotstillError, match="the engine broke"):
        next(made.buffer)


def test_a_file_of_empty_prompts_is_told_of_after_two_passes(tmp_path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"q": "", "a": "x"}\n' * 5)
    made = Made(path, rollouts())
    kinds = made.prompts()
    kinds._prompters["student"] = lambda piece: None
    with pytest.raises(PotstillError, match="in all of 11 records there was nothing to go on from"):
        next(kinds)
