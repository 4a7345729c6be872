"""What a real vLLM writes, in this process and over HTTP, is what the recipe asks for and what the student would write."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expected import asks, drawn_logprobs, likeliest, prompt
from writers import EOS, MAX_LENGTH, Writer, rollouts, shipped_teacher

from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.vllm import open_vllm
from potstill.types import PotstillError

pytestmark = pytest.mark.vllm

TEXTS = ["The people of the United States", "I have the honor to", "Our", "In the year 1863, the Congress"]


@pytest.fixture(scope="module")
def served(vllm_server: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    student = shipped_teacher()
    folder = tmp_path_factory.mktemp("weights")
    engine = open_vllm(student, rollouts(vllm_server), stop_ids=[EOS], max_length=MAX_LENGTH, folder=folder)
    yield Writer(engine, student)
    engine.close()


@pytest.fixture(params=["colocated", "served"])
def writer(request: pytest.FixtureRequest) -> Writer:
    """Both, with one set of expectations."""
    chosen: Writer = request.getfixturevalue(request.param)
    chosen.ends_with(EOS)
    chosen.sampling()
    return chosen


def test_the_likeliest_text_is_the_students(writer: Writer) -> None:
    writer.sampling(temperature=0, top_p=0.5, top_k=3)
    asked = asks(writer.student, TEXTS)
    for ask, text in zip(asked, writer.engine.generate(asked), strict=True):
        assert text.ids.tolist() == likeliest(writer.student, ask.ids, 16)
        assert text.end == "length"
        assert text.ids.dtype == np.int32 and text.logprobs.dtype == np.float32
        assert text.logprobs.tolist() == [0.0] * 16


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_log_probabilities_are_of_what_was_drawn_from(writer: Writer, keys: dict[str, Any]) -> None:
    sampling = writer.sampling(**keys)
    asked = asks(writer.student, TEXTS, seeds=range(4))
    differences = []
    for ask, text in zip(asked, writer.engine.generate(asked), strict=True):
        differences.append(drawn_logprobs(writer.student, ask, text, sampling) - torch.from_numpy(text.logprobs))
    assert float(torch.cat(differences).abs().max()) < 1e-4
    assert any(text.logprobs.min() < -1 for text in writer.engine.generate(asked))


def test_several_ids_end_a_text_and_stay_in_it(writer: Writer) -> None:
    writer.sampling(temperature=0)
    [ask] = asks(writer.student, TEXTS[:1])
    whole = likeliest(writer.student, ask.ids, 16)
    late = next(place for place in range(4, 16) if whole[place] not in whole[:place])
    for stops, place in (((whole[late],), late), ((whole[late], whole[1]), whole.index(whole[1]))):
        writer.ends_with(*stops)
        [text] = writer.engine.generate([ask])
        assert (text.ids.tolist(), text.end) == (whole[: place + 1], "eos")
        assert len(text.logprobs) == place + 1


def test_no_other_id_ends_a_text(writer: Writer) -> None:
    """Not even the eos of the model's config, when the recipe's tokenizer has another."""
    writer.sampling(max_new_tokens=100, temperature=2)  # so hot that the eos comes up
    asked = asks(writer.student, TEXTS, seeds=range(24))
    texts = writer.engine.generate(asked)
    ended = [text for text in texts if text.end == "eos"]
    assert ended and all(text.ids[-1] == EOS and EOS not in text.ids[:-1] for text in ended)
    writer.ends_with()
    texts = writer.engine.generate(asked)
    assert all(len(text.ids) == 100 and text.end == "length" for text in texts)
    assert any(EOS in text.ids[:-1] for text in texts)


def test_stop_strings(writer: Writer) -> None:
    writer.sampling(temperature=0)
    [ask] = asks(writer.student, TEXTS[:1])
    whole = likeliest(writer.student, ask.ids, 16)
    pieces = [writer.student.tokenizer.decode([token]) for token in whole]
    across = pieces[6][-1] + pieces[7][:2]  # begins in one token and ends within the next
    text = "".join(pieces)
    end = text.index(across) + len(across)
    kept = next(count for count in range(1, 17) if len("".join(pieces[:count])) >= end)
    writer.sampling(temperature=0, stop=["never written", across])
    [stopped] = writer.engine.generate([ask])
    assert (stopped.ids.tolist(), stopped.end) == (whole[:kept], "stop")
    # as the last token that was allowed
    writer.sampling(temperature=0, stop=[across], max_new_tokens=kept)
    [stopped] = writer.engine.generate([ask])
    assert (stopped.ids.tolist(), stopped.end) == (whole[:kept], "stop")


def test_a_special_token_can_be_a_stop_string(writer: Writer) -> None:
    writer.ends_with()
    eos = writer.student.tokenizer.convert_ids_to_tokens(EOS)
    writer.sampling(max_new_tokens=100, temperature=2, stop=[eos])
    texts = writer.engine.generate(asks(writer.student, TEXTS, seeds=range(24)))
    stopped = [text for text in texts if text.end == "stop"]
    assert stopped and all(text.ids[-1] == EOS and EOS not in text.ids[:-1] for text in stopped)


def test_lengths(writer: Writer) -> None:
    assert writer.engine.generate([]) == []
    student = writer.student
    writer.sampling(max_new_tokens=1)
    [text] = writer.engine.generate(asks(student, TEXTS[:1]))
    assert len(text.ids) == len(text.logprobs) == 1
    writer.ends_with()
    writer.sampling(max_new_tokens=MAX_LENGTH - 1)
    [text] = writer.engine.generate([GenerationRequest(prompt(student, TEXTS[0])[:1], 0)])
    assert (len(text.ids), text.end) == (MAX_LENGTH - 1, "length")
    with pytest.raises(PotstillError, match=r"prompt of 2 tokens and .*max_new_tokens 127 .* data.max_length 128"):
        writer.engine.generate([GenerationRequest(prompt(student, TEXTS[0])[:2], 0)])


def test_a_text_depends_on_its_prompt_and_seed_alone(writer: Writer) -> None:
    writer.sampling(temperature=0.9, top_p=0.95)
    seeds = [0, 1, 2**31, 2**63 + 5, 2**64 - 1]
    asked = asks(writer.student, TEXTS, seeds)
    together = writer.engine.generate(asked)
    alone = [writer.engine.generate([ask])[0] for ask in asked[:6]]
    mixed = writer.engine.generate(asked[::-1])[::-1]
    for first, second in [*zip(together, alone, strict=False), *zip(together, mixed, strict=True)]:
        assert first.ids.tolist() == second.ids.tolist()
    assert len({tuple(text.ids) for text in together}) == len(asked)


def test_the_trainings_own_state_is_left_alone(colocated: Writer) -> None:
    colocated.ends_with(EOS)
    asked = asks(colocated.student, TEXTS)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.random(), np.random.rand(), torch.rand(1).item(), torch.get_num_threads()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    colocated.engine.generate(asked)
    colocated.engine.update(colocated.engine.version + 1)
    assert (random.random(), np.random.rand(), torch.rand(1).item(), torch.get_num_threads()) == before
    assert torch.set_num_threads.__name__ == "set_num_threads"


def test_on_another_thread(colocated: Writer) -> None:
    colocated.ends_with(EOS)
    colocated.sampling()
    asked = asks(colocated.student, TEXTS)
    expected = [text.ids.tolist() for text in colocated.engine.generate(asked)]
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(t.ids.tolist() for t in colocated.engine.generate(asked)))
    thread.start()
    thread.join()
    assert found == expected


def test_options_that_are_not_the_users(needs_vllm: None, tmp_path: Path) -> None:
    for options, match in (
        ({"logprobs_mode": "raw_logprobs"}, r"options\.logprobs_mode is potstill's"),
        ({"no_such_option": 1}, "no_such_option"),
    ):
        with pytest.raises(PotstillError, match=match):
            open_vllm(
                shipped_teacher(), rollouts(options=options), stop_ids=[EOS], max_length=MAX_LENGTH, folder=tmp_path
            )
