"""How texts are dealt to the ranks that write together."""

from __future__ import annotations

import numpy as np
import pytest

from potstill.rollouts.engine import Completion, GenerationRequest
from potstill.rollouts.writing_ranks import ALONE, deal_prompts
from potstill.types import PotstillError

RANDOM = np.random.default_rng(0)


def prompt(length: int) -> bytes:
    return RANDOM.integers(0, 2**31, length, dtype=np.int32).tobytes()


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 7])
def test_every_text_has_one_writer_and_a_prompt_has_one_too(writers: int) -> None:
    prompts = [one for length in (5, 90, 3, 41, 17, 4, 60, 8, 8) for one in [prompt(length)] * 4]
    shares = deal_prompts(prompts, writers, 16)
    assert len(shares) == writers and sorted(i for share in shares for i in share) == list(range(len(prompts)))
    for one in set(prompts):
        assert len({rank for rank, share in enumerate(shares) for i in share if prompts[i] == one}) == 1
    assert shares == deal_prompts(prompts, writers, 16)  # on every rank


def test_all_have_about_as_much_to_do() -> None:
    prompts = [prompt(length) for length in RANDOM.integers(1, 400, 256)]
    tokens = [sum(len(prompts[i]) // 4 + 64 for i in share) for share in deal_prompts(prompts, 8, 64)]
    assert max(tokens) < 1.02 * min(tokens)


def test_the_longest_come_first() -> None:
    by_hand = [prompt(n) for n in (1, 10, 4, 6)]  # with one new token: 2, 11, 5, 7
    assert deal_prompts(by_hand, 2, 1) == [[0, 1], [2, 3]]


def test_more_writers_than_prompts_leave_some_without_work() -> None:
    assert deal_prompts([prompt(3)] * 3, 3, 8) == [[0, 1, 2], [], []]


def test_alone_nothing_is_dealt_and_errors_are_raised_as_they_are() -> None:
    asked = [GenerationRequest(np.array([1, 2], np.int32), seed) for seed in range(3)]
    text = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "eos")
    seen: list[object] = []

    def write(some):
        seen.append(some)
        return [text] * len(some)

    assert ALONE.written(write, asked, 4) == [text] * 3 and seen == [asked]

    def fails():
        raise PotstillError("no")

    with pytest.raises(PotstillError, match=r"^no$") as raised:
        ALONE.together(fails)
    assert type(raised.value) is PotstillError
