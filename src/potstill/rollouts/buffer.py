"""All texts of a generation, written in one call and trained on slice by slice.

    drafts ─► generation (one engine call a writer) ─► slices of batch_size rows ─► StepBatch

With `rollouts.overlaps` the next generation is written, with the weights as they are now, while the present one trains. Which
weights write what depends on the steps alone, never on how fast anything was: a run that was killed goes on as it would have.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from potstill.config import RolloutsConfig
from potstill.data import COUNTS, State, StepBatch, collate, pack
from potstill.files import write_bytes
from potstill.rollouts.engine import Completion, Engine, GenerationRequest
from potstill.rollouts.prompt_batches import Group, Kind, PromptBatch
from potstill.rollouts.prompts import Answers
from potstill.rollouts.sampling import rollout_seed
from potstill.types import Batch, Example, PotstillError

FILE = "rollouts.safetensors"
ENDS: tuple[Literal["eos", "stop", "length"], ...] = ("eos", "stop", "length")
NGRAMS = (1, 2, 3)
EMPTY_GENERATIONS = 16  # in a row, after which a run gives up
WRITTEN_COUNTS = (
    "cut_prompts", "cut_prompt_tokens", "written_examples", "written_tokens", "empty_answers", "unknown_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """What was written for a draft."""

    draft: PromptBatch
    written: Mapping[tuple[int, int], Completion]  # by group number and place in it
    version: int  # of the student that wrote
    seconds: float


@dataclass(frozen=True)
class Row:
    example: Example
    written: Completion | None  # None: from the data set


@dataclass(frozen=True)
class Layout:
    """How rows become batches."""

    batch_size: int  # rows of an optimizer step
    micro_batch_size: int
    pad_id: int
    packing: bool


class Buffer:
    """An iterator of generations, each as the windows of its steps. `waiting`: generations that a checkpoint held; `taken`:
    slices of the first that were used; `last`: optimizer steps of the run."""

    def __init__(
        self,
        drafts: Iterable[PromptBatch],
        writers: Mapping[Kind, Engine],
        answers: Answers,
        rollouts: RolloutsConfig,
        layout: Layout,
        *,
        seed: int,
        version: int = 0,
        counts: Mapping[str, int] | None = None,
        waiting: Sequence[SavedGeneration] = (),
        taken: int = 0,
        translates: bool = False,
        last: int | None = None,
    ) -> None:
        self._drafts = iter(drafts)
        self._writers, self._answers, self._rollouts, self._layout = writers, answers, rollouts, layout
        self._seed, self._version, self._translates, self._last = seed, version, translates, last
        self._counts: Counter[str] = Counter(counts or {})
        self._waiting = list(waiting)
        self._taken = taken
        self._pool = ThreadPoolExecutor(1, "rollouts") if rollouts.overlaps else None
        self._following: Future[Generation | None] | None = None
        self._present: Generation | None = None
        self._generations = self._run()

    def __iter__(self) -> Iterator[list[StepBatch]]:
        return self

    def __next__(self) -> list[StepBatch]:
        return next(self._generations)

    def advance(self, version: int) -> None:
        """The student has new weights, after so many optimizer steps."""
        self._version = version

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for writer in self._writers.values():
            writer.close()

    def save(self, folder: Path, state: State) -> None:
        """What was written and, when a run goes on from `state`, is still to be trained on: of the present generation, and
        the next one (waited for)."""
        found = [self._present, self._following_now()]
        begin = 0 if state["draft"] is None else state["draft"]["group"]
        kept = [each for each in found if each is not None and each.draft.groups[0].number >= begin]
        if kept:
            write_bytes(folder / FILE, saved(kept))

    def _following_now(self) -> Generation | None:
        """Waited for. What is wrong with it is told when it is to be trained on: the steps before it are to be saved."""
        if self._following is None or self._following.exception() is not None:
            return None
        return self._following.result()

    def _run(self) -> Iterator[list[StepBatch]]:
        empty = 0
        while (generation := self._next()) is not None:
            self._present = generation
            rows = list(self._rows(generation))
            size = self._layout.batch_size
            slices = [rows[i : i + size] for i in range(0, len(rows), size)]
            if not self._taken:
                self._counts.update(generation.draft.counts)
                self._counts.update(self._answers.counts)
            self._answers.counts.clear()
            windows: list[StepBatch] = []
            for number, some in enumerate(slices[self._taken :], self._taken + 1):
                version = self._version + len(windows)  # when it is trained on
                window = self._window(generation, some, None if number == len(slices) else number, version)
                if any(batch.supervised_tokens for batch in window.batches):
                    windows.append(window)
            self._taken = 0
            empty = 0 if windows else empty + 1
            if empty > EMPTY_GENERATIONS:
                raise PotstillError(
                    f"rollouts: nothing was written in {empty} generations in a row: every answer is empty. Is the student "
                    "broken, or does rollouts.sampling.stop end every text at once?"
                )
            if windows:
                yield windows

    def _next(self) -> Generation | None:
        """The generation to train on now; with overlap, the one after it is begun."""
        if self._pool is None:
            draft = next(self._drafts, None)
            return None if draft is None else self._written(draft, self._updated())
        if self._following is not None:
            present = self._following.result()
        else:
            draft = next(self._drafts, None)
            present = None if draft is None else self._written(draft, self._updated())
        self._following = None
        # Steps that are done when it would be trained on.
        begin = self._version + self._rollouts.steps_per_generation - self._taken
        if present is not None and (self._last is None or begin < self._last):
            self._following = self._pool.submit(self._ahead, self._updated())
        return present

    def _ahead(self, version: int) -> Generation | None:
        draft = next(self._drafts, None)
        return None if draft is None else self._written(draft, version)

    def _updated(self) -> int:
        """Hand the student's weights over. Nothing is being written now."""
        engine = self._writers.get("student")
        if engine is not None and engine.version != self._version:
            engine.update(self._version)
        return self._version

    def _written(self, draft: PromptBatch, version: int) -> Generation:
        """What a checkpoint held, or else what is written now."""
        found = self._waiting.pop(0) if self._waiting else None
        if found is not None and found.asked == asked_of(draft):
            return Generation(draft, found.written, found.version, found.seconds)
        begin = time.perf_counter()
        written: dict[tuple[int, int], Completion] = {}
        for kind, engine in self._writers.items():
            places = [
                (g.number, i) for g in draft.groups if g.kind == kind for i in range(self._rollouts.num_generations)
            ]
            prompts = {group.number: group.prompt for group in draft.groups if group.kind == kind}
            asked = []
            for number, i in places:
                prompt = prompts[number]
                assert prompt is not None
                asked.append(GenerationRequest(prompt.ids, rollout_seed(self._seed, number, i)))
            if asked:
                written.update(zip(places, engine.generate(asked), strict=True))
        return Generation(draft, written, version, time.perf_counter() - begin)

    def _rows(self, generation: Generation) -> Iterator[Row]:
        for group in generation.draft.groups:
            if group.kind == "data":
                yield from (Row(example, None) for example in group.examples)
                continue
            for i in range(self._rollouts.num_generations):
                text = generation.written[group.number, i]
                example = self._answer(group, text, generation.version)
                if not example.supervised.any() and not self._taken:
                    self._counts["empty_answers"] += 1
                yield Row(example, text)

    def _answer(self, group: Group, text: Completion, version: int) -> Example:
        assert group.prompt is not None
        if group.kind == "teacher" and self._translates:
            return self._answers.translated(group.prompt, text)
        return self._answers.own(group.prompt, text, group.kind, version if group.kind == "student" else None)

    def _window(self, generation: Generation, rows: Sequence[Row], taken: int | None, version: int) -> StepBatch:
        """`taken`: slices used of the generation after this one; None: all. `version`: of the student that it trains."""
        batches = laid_out([row.example for row in rows], self._layout)
        examples = [row.example for row in rows]
        tokens = sum(len(example.ids) for example in examples)
        texts = [row.written for row in rows if row.written is not None]
        self._counts.update(
            examples=len(rows),
            tokens=tokens,
            supervised_tokens=sum(batch.supervised_tokens for batch in batches),
            padding_tokens=sum(batch.input_ids.numel() for batch in batches) - tokens,
            written_examples=len(texts),
            written_tokens=sum(len(text.ids) for text in texts),
        )
        counts = {name: self._counts[name] for name in (*COUNTS, *WRITTEN_COUNTS)}
        draft = generation.draft
        place: State = {"draft": draft.after, "taken": 0} if taken is None else {"draft": draft.before, "taken": taken}
        own = any(row.example.writer == "student" for row in rows)
        facts = about(texts) | (_about_generation(generation) if texts else {})
        facts |= {"rollout_staleness": version - generation.version} if own else {}
        state = {**place, "settings": settings_of(self._rollouts, self._layout), "counts": counts}
        return StepBatch(batches, state, counts, draft.epoch, facts)


def laid_out(examples: Sequence[Example], layout: Layout) -> tuple[Batch, ...]:
    """Micro-batches of like lengths. With packing short texts share rows no longer than the longest of their batch."""
    order = sorted(examples, key=lambda example: -len(example.ids))
    batches = []
    for i in range(0, len(order), layout.micro_batch_size):
        some = order[i : i + layout.micro_batch_size]
        rows = [[example] for example in some]
        if layout.packing:
            lengths = [len(example.ids) for example in some]
            packed, _ = pack(lengths, rows=len(some), row_length=max(lengths))
            rows = [[some[j] for j in row] for row in packed]
        batches.append(collate(rows, layout.pad_id))
    return tuple(batches)


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


def _about_generation(generation: Generation) -> dict[str, float]:
    tokens = sum(len(text.ids) for text in generation.written.values())
    return {
        "rollout_tokens_per_second": tokens / max(generation.seconds, 1e-9),
        "rollout_seconds": generation.seconds,
    }


def settings_of(rollouts: RolloutsConfig, layout: Layout) -> dict[str, float]:
    """What decides which texts stand where in a generation."""
    return {
        "train.batch_size": layout.batch_size,
        **{
            f"rollouts.{key}": getattr(rollouts, key)
            for key in (
                "num_generations",
                "steps_per_generation",
                "on_policy_fraction",
                "teacher_fraction",
                "prompt_tokens",
            )
        },
    }


@dataclass(frozen=True)
class SavedGeneration:
    """A generation out of a checkpoint; its draft is read again."""

    asked: str  # as asked_of says
    written: Mapping[tuple[int, int], Completion]
    version: int
    seconds: float


def asked_of(draft: PromptBatch) -> str:
    """A hash of who was asked to go on from what: what was written for other prompts is not used."""
    digest = hashlib.sha256()
    for group in draft.groups:
        digest.update(f"{group.number} {group.kind} ".encode())
        if group.prompt is not None:
            digest.update(group.prompt.ids.astype("<i4").tobytes())
    return digest.hexdigest()[:32]


def saved(generations: Sequence[Generation]) -> bytes:
    """Generations as a safetensors file."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    about_each = []
    for number, generation in enumerate(generations):
        texts = list(generation.written.values())
        none = np.zeros(0)
        arrays |= {
            f"{number}.place": np.array(list(generation.written), dtype=np.int64).reshape(-1, 2),
            f"{number}.length": np.array([len(text.ids) for text in texts], dtype=np.int64),
            f"{number}.end": np.array([ENDS.index(text.end) for text in texts], dtype=np.uint8),
            f"{number}.ids": np.concatenate([none, *(text.ids for text in texts)]).astype(np.int32),
            f"{number}.logprobs": np.concatenate([none, *(text.logprobs for text in texts)]).astype(np.float32),
        }
        asked = asked_of(generation.draft)
        about_each.append({"asked": asked, "version": generation.version, "seconds": generation.seconds})
    return safetensors.numpy.save(arrays, metadata={"generations": json.dumps(about_each)})


def load_saved(folder: Path) -> list[SavedGeneration]:
    """Those that a checkpoint holds; none, where it holds none."""
    path = folder / FILE
    if not path.exists():
        return []
    with safetensors.safe_open(path, "np") as file:
        about_each = json.loads((file.metadata() or {})["generations"])
        names = ("place", "length", "end", "ids", "logprobs")
        loaded = [[file.get_tensor(f"{number}.{name}") for name in names] for number in range(len(about_each))]
    found = []
    for (place, length, end, ids, logprobs), known in zip(loaded, about_each, strict=True):
        bounds = np.cumsum(length)[:-1]
        parts = zip(place.tolist(), end, np.split(ids, bounds), np.split(logprobs, bounds), strict=True)
        written = {(int(g), int(i)): Completion(each, chances, ENDS[code]) for (g, i), code, each, chances in parts}
        found.append(SavedGeneration(known["asked"], written, known["version"], known["seconds"]))
    return found
