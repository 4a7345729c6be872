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
from potstill.data import Encoder, Piece, State, generator, open_stream
from potstill.data.stream import Place
from potstill.rollouts.prompts import Prompt, Prompter
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
    before: State | None  # JSON-able; Drafts(…, state=before) gives this one again, and `after` the one after it
    after: State
    counts: dict[str, int]  # of what was read for it
    epoch: int


class Drafts:
    """An iterator of drafts of `groups` groups each. With epochs the last one may be smaller."""

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
        stream, self._fingerprints = open_stream(
            data, tokenizer, seed=seed, epochs=epochs, state=state, changed_data_ok=changed_data_ok
        )
        self._pieces = iter(stream)
        self._number: int = 0 if state is None else state["group"]
        self._before = state
        self._drafts = self._run()

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        return next(self._drafts)

    def _run(self) -> Iterator[PromptBatch]:
        place: Place | None = None
        while True:
            groups: list[Group] = []
            counts: Counter[str] = Counter()
            epoch = 0
            while len(groups) < self._groups:
                taken = self._group(counts)
                if taken is None:
                    break
                group, place = taken
                groups.append(group)
                epoch = max(epoch, place.block.epoch)
            if not groups:
                if self._before is None:
                    raise PotstillError("data.sources gave no prompts and no examples")
                return
            assert place is not None
            after = {
                "start": place.state(after=True),
                "group": self._number,
                "fingerprints": self._fingerprints,
            }
            yield PromptBatch(tuple(groups), self._before, after, dict(counts), epoch)
            self._before = after

    def _group(self, counts: Counter[str]) -> tuple[Group, Place] | None:
        """The next group, and the place of its last piece; None at the end of the data."""
        kind = self.kind(self._number)
        wanted = self._rollouts.num_generations if kind == "data" else 1
        examples: list[Example] = []
        prompt: Prompt | None = None
        unused, since = 0, -1  # pieces in a row of which none could be used, and the epoch of the first
        last: Place | None = None
        while wanted:
            following = next(self._pieces, None)
            if following is None:
                if not examples:
                    return None
                break  # the last group of the last epoch may have fewer
            piece, place = following
            last = place
            counts["documents"] += piece.first
            if kind == "data":
                example = self._example(piece, counts)
                used = example is not None
                examples += [example] if example is not None else []
            else:
                prompt = self._prompters[kind](piece)
                used = prompt is not None
                if prompt is not None:
                    counts["cut_prompts"] += prompt.cut > 0
                    counts["cut_prompt_tokens"] += prompt.cut
            wanted -= used
            counts["dropped_examples"] += not used
            since = place.block.epoch if not unused else since
            unused = 0 if used else unused + 1
            if unused and place.block.epoch > since + 1:
                what = "learn from" if kind == "data" else "go on from: every prompt is empty"
                raise PotstillError(f"data.sources: in all of {unused:,} records there was nothing to {what}")
        assert last is not None
        number, self._number = self._number, self._number + 1
        return Group(number, kind, prompt, tuple(examples)), last

    def _example(self, piece: Piece, counts: Counter[str]) -> Example | None:
        (encoded,) = self._encode([piece])
        if encoded.example is not None:
            counts["cut_examples"] += encoded.cut > 0
            counts["cut_tokens"] += encoded.cut
        return encoded.example

    def kind(self, number: int) -> Kind:
        """Who answers in a group: the same number, the same answer."""
        drawn = generator(self._seed, 6, number).random()
        if drawn < self._rollouts.on_policy_fraction:
            return "student"
        below = drawn < self._rollouts.on_policy_fraction + self._rollouts.teacher_fraction
        return "teacher" if below or not self._rollouts.data_share else "data"
