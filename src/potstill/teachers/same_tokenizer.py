"""The view of a teacher with the student's tokenizer: it reads the student's tokens, and answers at each of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from potstill.teachers.protocols import NONE, Asked, Plan, Signal
from potstill.types import Batch, Example, PotstillError, Target, TokenLogprobsTarget


class SamePlan(Plan):
    def target(self, signals: Sequence[Signal], device: torch.device) -> Target:
        (signal,) = signals
        if signal.target is not None:
            return signal.target
        assert signal.token_logprobs is not None
        return TokenLogprobsTarget(signal.token_logprobs)


class SameTokenizerView:
    """`logprobs_only`: the loss asks how likely the text's own tokens are, and no more."""

    def __init__(self, *, logprobs_only: bool = False) -> None:
        self._logprobs_only = logprobs_only

    def plan(self, batch: Batch, read: Sequence[Example]) -> SamePlan:
        for example, theirs in zip(batch.examples, read, strict=True):
            if theirs is not example:
                _check_tokens(example, theirs)
        places = [np.flatnonzero(example.supervised) for example in batch.examples]
        owner = np.repeat(np.arange(len(places)), [len(place) for place in places])
        what = {"distribution": not self._logprobs_only, "token_logprobs": self._logprobs_only}
        return SamePlan(asked=[Asked.of(batch.examples, owner, np.concatenate([NONE, *places]), **what)])


def _check_tokens(example: Example, stored: Example) -> None:
    """That a stored document has the tokens that the example supervises, and those before them."""
    length = int(np.flatnonzero(example.supervised)[-1]) + 1 if example.supervised.any() else 0
    there, where = len(stored.ids), f"{example.source} ({example.key})"
    if length and not there:
        raise PotstillError(
            f"{where}: the cache's teacher had nothing to predict in it, for its prompt is longer than the teacher can read: "
            "leave it out of the data, or set data.max_length to at most what the teacher reads"
        )
    if length > there:
        raise PotstillError(
            f"{where}: the cache has the first {there} tokens of it, which is all its teacher can read, and {length} are "
            "trained on: set data.max_length to at most that"
        )
    differ = stored.ids[:length] != example.ids[:length]
    if differ.any():
        at = int(np.argmax(differ))
        raise PotstillError(
            f"{where}: the cache has other tokens for it (token {at} is {stored.ids[at]} there and {example.ids[at]} here): "
            "it was read with other settings of the tokenizer or of the chat template"
        )
