"""All texts of a generation, written in one call and trained on slice by slice.

    prompt batch ─► generation (one engine call per writer) ─► slices of batch_size rows ─► StepBatch

With several ranks all of this is the same on each of them, but for the micro-batches, which are its own: texts that others
wrote are gathered, and any number of ranks can go on with what a checkpoint holds.

With `rollouts.overlaps` the next generation is written, with the weights as they are now, while the present one trains. Which
weights write what depends on the steps alone, never on how fast anything was: a run that was killed resumes as it would have
gone on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch

from potstill.config import RolloutsConfig
from potstill.config.sections import Schedule
from potstill.data import COUNTS, Prefetched, State, collate, pack
from potstill.data.dealing import Share, deal
from potstill.files import write_bytes
from potstill.parallel.mesh import ranks
from potstill.rollouts.engine import Completion, Engine, GenerationRequest
from potstill.rollouts.prompt_batches import Kind, PromptBatch
from potstill.rollouts.prompts import Answers
from potstill.rollouts.rewards import advantages, open_reward, reward_of
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.writing_ranks import ALONE, WritingRanks
from potstill.transfer import CPU, handed_over
from potstill.types import Batch, Example, PotstillError, StepBatch

FILE = "rollouts.safetensors"
ENDS: tuple[Literal["eos", "stop", "length"], ...] = ("eos", "stop", "length")
AHEAD = 2  # prompt batches that wait to be written
NGRAMS = (1, 2, 3)
EMPTY_GENERATIONS = 16  # in a row, after which a run gives up
WRITTEN_COUNTS = (
    "cut_prompts", "cut_prompt_tokens", "written_examples", "written_tokens", "empty_answers", "unknown_ids",
)  # fmt: skip
DECIDING = (
    "num_generations",
    "steps_per_generation",
    "on_policy_fraction",
    "teacher_fraction",
    "prompt_tokens",
    "turn",
)


@dataclass(frozen=True)
class Generation:
    """What was written for a prompt batch."""

    asked: str  # as asked_of says
    written: Mapping[tuple[int, int], Completion]  # by group number and place in it
    version: int  # of the student that wrote
    seconds: float
    rewards: Mapping[tuple[int, int], float] = field(
        default_factory=dict
    )  # of what the student wrote, where there are any


Row = tuple[Example, Completion | None]  # None: from the data set


@dataclass(frozen=True)
class Layout:
    """How rows become batches."""

    batch_size: int  # rows of an optimizer step
    share: Share  # of them, that this rank has
    pad_id: int
    packing: bool


class Buffer:
    """The step batches of one generation after another (a `RolloutSource`). `saved`: generations that a checkpoint held;
    `taken`: slices of the first that were used; `last`: optimizer steps of the run; `team`: the ranks that all have one;
    `device`: where the student trains."""

    def __init__(
        self,
        prompts: Iterable[PromptBatch],
        writers: Mapping[Kind, Engine],
        answers: Answers,
        rollouts: RolloutsConfig,
        layout: Layout,
        *,
        seed: int,
        version: int = 0,
        counts: Mapping[str, int] | None = None,
        saved: Sequence[Generation] = (),
        taken: int = 0,
        last: int | None = None,
        team: WritingRanks = ALONE,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._prompts, self._team = Prefetched(prompts, AHEAD), team
        self._writers, self._answers, self._rollouts, self._layout = writers, answers, rollouts, layout
        self._seed, self._version, self._last = seed, version, last
        self._reward = None if rollouts.reward is None else open_reward(rollouts.reward)
        self._counts: Counter[str] = Counter(counts or {})
        self._saved, self._taken = list(saved), taken
        self._pool = ThreadPoolExecutor(1, "rollouts") if rollouts.overlaps else None
        self._following: Future[tuple[PromptBatch, Generation] | None] | None = None
        self._present: tuple[PromptBatch, Generation] | None = None
        self._steps: deque[StepBatch] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        empty = 0
        while not self._steps:
            self._present = self._next()
            if self._present is None:
                raise StopIteration
            self._steps.extend(self._step_batches(*self._present))
            empty += not self._steps
            if empty > EMPTY_GENERATIONS:
                raise PotstillError(
                    f"rollouts: nothing was written in {empty} generations in a row: every answer is empty. Is the student "
                    "broken, or does rollouts.sampling.stop end every text at once?"
                )
        return self._steps.popleft()

    @property
    def waiting(self) -> int:
        return len(self._steps)

    @property
    def notes(self) -> list[str]:
        return [note for writer in self._writers.values() for note in writer.notes]

    def advance(self, version: int) -> None:
        self._version = version

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._prompts.close()
        for writer in self._writers.values():
            writer.close()

    def save(self, folder: Path, state: State) -> None:
        """Of the present generation, and the next one (waited for). It is the same on all ranks: the first writes it."""
        if not ranks().first:
            return
        found = [self._present]
        # What is wrong with the next is told when it is to be trained on: the steps before it are to be saved.
        if self._following is not None and self._following.exception() is None:
            found.append(self._following.result())
        begin = 0 if state["prompts"] is None else state["prompts"]["group"]
        kept = [each[1] for each in found if each is not None and each[0].groups[0].number >= begin]
        if kept:
            write_bytes(folder / FILE, as_file(kept))

    def _next(self) -> tuple[PromptBatch, Generation] | None:
        """The generation to train on now; with overlap, the one after it is begun."""
        present = self._generate(None) if self._following is None else self._following.result()
        self._following = None
        # Steps that are done when the one after it would be trained on.
        begin = self._version + self._rollouts.steps_per_generation - self._taken
        if self._pool is not None and present is not None and (self._last is None or begin < self._last):
            version = self._updated()
            self._following = self._pool.submit(self._generate_beside, handed_over(self._device), version)
        return present

    def _updated(self) -> int:
        """Hand the student's weights over. Nothing is being written now."""
        engine = self._writers.get("student")
        if engine is not None and engine.version != self._version:
            engine.update(self._version)
        return self._version

    def _generate_beside(
        self, beside: AbstractContextManager[None], version: int
    ) -> tuple[PromptBatch, Generation] | None:
        """On the thread that writes while the run trains: the two do not wait for each other on the device."""
        with beside:
            return self._generate(version)

    def _generate(self, version: int | None) -> tuple[PromptBatch, Generation] | None:
        """What a checkpoint held, or else what is written now. `version`: of the weights; None: the present ones."""
        prompts, saved = self._read()
        if prompts is None:
            return None
        version = self._updated() if version is None else version
        if saved is not None:
            return prompts, saved
        begin = time.perf_counter()
        most = self._horizon(version)
        written: dict[tuple[int, int], Completion] = {}
        for kind, engine in self._writers.items():
            asked = {
                (group.number, i): GenerationRequest(group.prompt.ids, rollout_seed(self._seed, group.number, i), most)
                for group in prompts.groups
                if group.kind == kind and group.prompt is not None
                for i in range(self._rollouts.num_generations)
            }
            if asked:
                written.update(zip(asked, engine.generate(list(asked.values())), strict=True))
        seconds = time.perf_counter() - begin
        return prompts, Generation(asked_of(prompts), written, version, seconds, self._rewards(prompts, written))

    def _rewards(
        self, prompts: PromptBatch, written: Mapping[tuple[int, int], Completion]
    ) -> dict[tuple[int, int], float]:
        """Of what the student wrote. One rank asks, and tells the others: the function may not give all of them the same."""
        reward, asked = (
            self._reward,
            {group.number: group.prompt for group in prompts.groups if group.kind == "student"},
        )
        if reward is None:
            return {}

        def judged() -> dict[tuple[int, int], float]:
            if not self._team.first:
                return {}
            own = {
                place: (prompt, text) for place, text in written.items() if (prompt := asked.get(place[0])) is not None
            }
            return {
                place: reward_of(reward, prompt, self._answers.text(prompt, text))
                for place, (prompt, text) in own.items()
            }

        return self._team.together(judged)[0]

    def _horizon(self, version: int) -> int:
        """Tokens of a text that these weights write, at most."""
        return self._rollouts.sampling.horizon(version / max(1, (self._last or 1) - 1))

    def _read(self) -> tuple[PromptBatch | None, Generation | None]:
        """The next prompts, and what was written for them before the run was resumed. An error of one rank is everybody's."""
        prompts: list[PromptBatch | None] = []
        self._team.together(lambda: prompts.append(next(self._prompts, None)))
        saved, asked = self._saved.pop(0) if self._saved else None, None if prompts[0] is None else asked_of(prompts[0])
        seen, kept = zip(*self._team.told((asked, saved is not None and saved.asked == asked)), strict=True)
        if other := [rank for rank, each in enumerate(seen) if each != seen[0]]:
            raise PotstillError(
                f"rollouts: rank {other[0]} read other prompts than rank 0: give every host the same files as data.sources"
            )
        return prompts[0], saved if all(kept) else None

    def _step_batches(self, prompts: PromptBatch, generation: Generation) -> list[StepBatch]:
        """Those that have something to learn from, without what was trained on before a resume."""
        rows, size, taken = list(self._rows(prompts, generation)), self._layout.batch_size, self._taken
        self._taken = 0
        if not taken:
            self._counts.update(prompts.counts)
            self._counts.update(self._answers.counts)
            self._counts["empty_answers"] += sum(text is not None and not e.supervised.any() for e, text in rows)
        self._answers.counts.clear()
        slices = [rows[i : i + size] for i in range(0, len(rows), size)]
        steps: list[StepBatch] = []
        for number, some in enumerate(slices[taken:], taken + 1):
            place: State = {"prompts": prompts.before, "taken": number}
            if number == len(slices):
                place = {"prompts": prompts.after, "taken": 0}
            version = self._version + len(steps)  # when it is trained on
            facts = _facts(some, generation, version)
            if generation.rewards:
                facts["reward_mean"] = float(np.mean(list(generation.rewards.values())))
                facts["reward_std"] = float(np.std(list(generation.rewards.values())))
            if isinstance(self._rollouts.sampling.max_new_tokens, Schedule):
                facts["rollout_horizon"] = self._horizon(generation.version)
            step = self._step_batch(some, prompts.epoch, place, facts)
            if any(example.supervised.any() for example, _ in some):
                steps.append(step)
        return steps

    def _rows(self, prompts: PromptBatch, generation: Generation) -> Iterator[Row]:
        for group in prompts.groups:
            if group.prompt is None:
                yield from ((example, None) for example in group.examples)
                continue
            texts = [generation.written[group.number, i] for i in range(self._rollouts.num_generations)]
            examples = [self._answers(group.prompt, text, group.kind, generation.version) for text in texts]
            if self._reward is not None and group.kind == "student":
                worth = advantages([generation.rewards[group.number, i] for i in range(len(texts))])
                examples = [replace(each, advantage=value) for each, value in zip(examples, worth, strict=True)]
            yield from zip(examples, texts, strict=True)

    def _step_batch(self, rows: Sequence[Row], epoch: int, place: State, facts: Mapping[str, float]) -> StepBatch:
        examples, texts = [example for example, _ in rows], [text for _, text in rows if text is not None]
        passes = list(_passes(examples, self._layout))
        tokens = sum(len(example.ids) for example in examples)
        self._counts.update(
            examples=len(rows),
            tokens=tokens,
            supervised_tokens=sum(example.supervised_tokens for example in examples),
            padding_tokens=sum(_room(some) for by_rank in passes for some in by_rank) - tokens,
            written_examples=len(texts),
            written_tokens=sum(len(text.ids) for text in texts),
        )
        counts = {name: self._counts[name] for name in (*COUNTS, *WRITTEN_COUNTS)}
        state = {**place, "settings": settings_of(self._rollouts, self._layout), "counts": counts}
        return StepBatch(_own(passes, self._layout), state, counts, epoch, facts)


PackedRows = list[list[Example]]


def laid_out(examples: Sequence[Example], layout: Layout) -> tuple[Batch, ...]:
    """This rank's micro-batches, of like lengths; as many as every other rank has, empty where there is nothing left."""
    return _own(_passes(examples, layout), layout)


def _own(passes: Iterable[Sequence[PackedRows]], layout: Layout) -> tuple[Batch, ...]:
    return tuple(collate(by_rank[layout.share.index], layout.pad_id) for by_rank in passes)


def _passes(examples: Sequence[Example], layout: Layout) -> Iterator[list[PackedRows]]:
    """The rows of every rank, pass by pass: longest first. With packing short texts share rows no longer than the longest of
    their batch; where passes are filled by tokens, of the step."""
    order = sorted(examples, key=lambda example: -len(example.ids))
    if layout.share.tokens is not None:
        rows = _packed(order, layout.packing)
        for by_rank in deal([sum(len(example.ids) for example in row) for row in rows], layout.share):
            yield [[rows[j] for j in some] for some in by_rank]
        return
    size = layout.share.micro_batch_size * layout.share.size
    for i in range(0, len(order), size):
        lengths = [len(example.ids) for example in order[i : i + size]]
        (by_rank,) = deal(lengths, layout.share)
        yield [_packed([order[i + j] for j in some], layout.packing) for some in by_rank]


def _packed(examples: Sequence[Example], packing: bool) -> PackedRows:
    if not packing or not examples:
        return [[example] for example in examples]
    lengths = [len(example.ids) for example in examples]
    packed, _ = pack(lengths, rows=len(examples), row_length=max(lengths))
    return [[examples[j] for j in row] for row in packed]


def _room(rows: PackedRows) -> int:
    """Positions of a micro-batch."""
    return len(rows) * max((sum(len(example.ids) for example in row) for row in rows), default=0)


def about(texts: Sequence[Completion]) -> dict[str, float]:
    """What was written, for the log."""
    if not texts:
        return {}
    facts = {
        "rollout_length": sum(len(text.ids) for text in texts) / len(texts),
        "completions_ended": sum(text.end == "eos" for text in texts) / len(texts),
        "completions_clipped": sum(text.end == "length" for text in texts) / len(texts),
    }
    for n in NGRAMS:
        grams = [gram for text in texts for gram in zip(*(text.ids[i:].tolist() for i in range(n)), strict=False)]
        facts[f"rollout_distinct_{n}"] = len(set(grams)) / len(grams) if grams else 1.0
    return facts


def _facts(rows: Sequence[Row], generation: Generation, version: int) -> dict[str, float]:
    """`version`: of the student that trains on them."""
    facts = about([text for _, text in rows if text is not None])
    if facts:
        tokens = sum(len(text.ids) for text in generation.written.values())
        facts["rollout_tokens_per_second"] = tokens / max(generation.seconds, 1e-9)
        facts["rollout_seconds"] = generation.seconds
    if any(example.writer == "student" for example, _ in rows):
        facts["rollout_staleness"] = version - generation.version
    return facts


def settings_of(rollouts: RolloutsConfig, layout: Layout) -> dict[str, float]:
    """What decides which texts stand where in a generation."""
    given = rollouts.model_dump(include=set(DECIDING))
    return {"train.batch_size": layout.batch_size, **{f"rollouts.{key}": given[key] for key in DECIDING}}


def asked_of(prompts: PromptBatch) -> str:
    """A hash of who was asked to go on from what: what was written for other prompts is not used."""
    digest = hashlib.sha256()
    for group in prompts.groups:
        digest.update(f"{group.number} {group.kind} ".encode())
        if group.prompt is not None:
            digest.update(group.prompt.ids.astype("<i4").tobytes())
    return digest.hexdigest()[:32]


def as_file(generations: Sequence[Generation]) -> bytes:
    """Generations as a safetensors file: their texts one after another."""
    about_each = [{name: getattr(each, name) for name in ("asked", "version", "seconds")} for each in generations]
    places = [(number, *place) for number, each in enumerate(generations) for place in each.written]
    texts = [text for each in generations for text in each.written.values()]
    rewards = [each.rewards.get(place, math.nan) for each in generations for place in each.written]
    arrays: dict[str, npt.NDArray[Any]] = {
        "reward": np.array(rewards, dtype=np.float64),  # NaN: it has none
        "place": np.array(places, dtype=np.int64).reshape(-1, 3),  # generation, group and place in it
        "length": np.array([len(text.ids) for text in texts], dtype=np.int64),
        "end": np.array([ENDS.index(text.end) for text in texts], dtype=np.uint8),
        "ids": np.concatenate([np.zeros(0), *(text.ids for text in texts)]).astype(np.int32),
        "logprobs": np.concatenate([np.zeros(0), *(text.logprobs for text in texts)]).astype(np.float32),
    }
    return safetensors.numpy.save(arrays, metadata={"generations": json.dumps(about_each)})


def load_saved(folder: Path) -> list[Generation]:
    """Those that a checkpoint holds; none, where it holds none."""
    path = folder / FILE
    if not path.exists():
        return []
    with safetensors.safe_open(path, "np") as file:
        about_each = json.loads((file.metadata() or {})["generations"])
        names = ("place", "length", "end", "ids", "logprobs", "reward")
        place, length, end, ids, logprobs, reward = map(file.get_tensor, names)
    written: list[dict[tuple[int, int], Completion]] = [{} for _ in about_each]
    rewards: list[dict[tuple[int, int], float]] = [{} for _ in about_each]
    bounds = np.cumsum(length)[:-1]
    texts = zip(place.tolist(), np.split(ids, bounds), np.split(logprobs, bounds), end, reward, strict=False)
    for (number, group, i), each, chances, code, value in texts:  # none at all: np.split gives one part even then
        written[number][group, i] = Completion(each, chances, ENDS[code])
        rewards[number] |= {} if math.isnan(value) else {(group, i): float(value)}
    found = zip(written, rewards, about_each, strict=True)
    return [Generation(written=texts, rewards=worth, **known) for texts, worth, known in found]
