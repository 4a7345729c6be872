"""What each generation goes on from: prompts with who answers them, and examples of the data set.

Who answers is drawn for each group of `num_generations` rows, by the run's seed and the group's number in the whole run: it
does not depend on ranks, on resuming, or on what was drawn before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from potstill.config import DataConfig, RolloutsConfig
from potstill.data import Encoder, State, generator, open_stream
from potstill.data.stream import Place
from potstill.rollouts.prompts import Prompt, Prompter, with_turn
from potstill.types import Example, PotstillError

Kind = Literal["student", "teacher", "data"]


@dataclass(frozen=True)
class Group:
    """`num_generations` rows: answers to one prompt, or as many examples of the data set."""

    number: int  # in the whole run
    kind: Kind
    prompt: Prompt | None
    examples: tuple[Example, ...] = ()  # of kind data


@dataclass(frozen=True)
class PromptBatch:
    """The rows of one generation before anything is written."""

    groups: tuple[Group, ...]
    before: State | None  # JSON-able; PromptBatches(…, state=before) gives this one again, and `after` the one after it
    after: State
    counts: dict[str, int]  # of what was read for it
    epoch: int


class PromptBatches:
    """An iterator of prompt batches of `groups` groups each. With epochs the last one may be smaller."""

    def __init__(
        self,
        data: DataConfig,
        rollouts: RolloutsConfig,
        encode: Encoder,
        prompters: dict[Kind, Prompter],
        tokenizer: Any,
        *,
        groups: int,
        seed: int,
        epochs: int | None,
        state: State | None = None,
        changed_data_ok: bool = False,
    ) -> None:
        self._rollouts, self._seed, self._groups = rollouts, seed, groups
        self._encode, self._prompters = encode, prompters
        self._stream, self._fingerprints = open_stream(
            data,
            tokenizer,
            seed=seed,
            epochs=epochs,
            state=state,
            changed_data_ok=changed_data_ok,
            each_turn=rollouts.turn == "all",
        )
        self._number: int = 0 if state is None else state["group"]
        self._before = state
        self._place: Place | None = None  # of the last example read

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        groups: list[Group] = []
        counts: Counter[str] = Counter()
        while len(groups) < self._groups and (group := self._group(counts)) is not None:
            groups.append(group)
        if not groups:
            if self._before is None:
                raise PotstillError("data.sources gave no prompts and no examples")
            raise StopIteration
        assert self._place is not None
        before, start = self._before, self._place.state(after=True)
        self._before = {"start": start, "group": self._number, "fingerprints": self._fingerprints}
        return PromptBatch(tuple(groups), before, self._before, dict(counts), self._place.epoch)

    def _group(self, counts: Counter[str]) -> Group | None:
        """The next group, the last of which may have fewer examples; None at the end of the data."""
        number, kind = self._number, self.kind(self._number)
        prompt: Prompt | None = None
        examples: list[Example] = []
        unused, since = 0, 0  # examples in a row of which none could be used, and the epoch of the first
        while prompt is None and len(examples) < self._rollouts.num_generations:
            following = next(self._stream, None)
            if following is None:
                break
            raw, self._place = following
            counts["documents"] += raw.first
            if kind == "data":
                example = self._read(raw, counts)
                examples += [] if example is None else [example]
                used = example is not None
            else:
                prompt = self._prompt(kind, raw, counts)
                used = prompt is not None
            counts["dropped_examples"] += not used
            since = since if unused else self._place.epoch
            unused = 0 if used else unused + 1
            if unused and self._place.epoch > since + 1:
                what = "learn from" if kind == "data" else "go on from: every prompt is empty"
                raise PotstillError(f"data.sources: in all of {unused:,} records there was nothing to {what}")
        if prompt is None and not examples:
            return None
        self._number += 1
        return Group(number, kind, prompt, tuple(examples))

    def _read(self, raw: Example, counts: Counter[str]) -> Example | None:
        (encoded,) = self._encode([raw])
        if encoded.kept:
            counts["cut_examples"] += encoded.cut > 0
            counts["cut_tokens"] += encoded.cut
        return encoded.example

    def _prompt(self, kind: Kind, raw: Example, counts: Counter[str]) -> Prompt | None:
        if self._rollouts.turn == "random":
            raw = with_turn(raw, int(generator(self._seed, 7, self._number).integers(2**31)))
        prompt = self._prompters[kind](raw)
        if prompt is not None:
            counts["cut_prompts"] += prompt.cut > 0
            counts["cut_prompt_tokens"] += prompt.cut
        return prompt

    def kind(self, number: int) -> Kind:
        """Who answers in a group: the same number, the same answer."""
        drawn = generator(self._seed, 6, number).random()
        if drawn < self._rollouts.on_policy_fraction:
            return "student"
        below = drawn < self._rollouts.on_policy_fraction + self._rollouts.teacher_fraction
        return "teacher" if below or not self._rollouts.data_share else "data"
