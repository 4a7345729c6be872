"""Which messages of a chat are learnt (`data.supervise`), and which turns are written (`rollouts.turn`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from potstill.config import DataConfig, RolloutsConfig, SourceConfig
from potstill.data.encoding import Encoder
from potstill.data.examples import example_maker
from potstill.rollouts.prompt_batches import PromptBatches
from potstill.rollouts.prompts import Prompter
from potstill.text import TokenTable
from potstill.types import PotstillError

CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "add(1)", "tool_calls": CALL},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
OPEN = [*CHAT[:4], CHAT[4], CHAT[5]]  # the last question is not answered
TOKENIZER = tiny_tokenizer(chat_template=CHATML)


def learnt(supervise: Any, messages: list[dict[str, Any]] = CHAT, mask: Any = None) -> list[str]:
    """The supervised stretches of the example, as text."""
    source = SourceConfig(files="x.jsonl", messages="m")
    data = DataConfig.model_validate({"sources": [source.model_dump()], "supervise": supervise})
    (example,) = example_maker(data, source, "data.sources[0]", TOKENIZER)({"m": messages, "keep": mask}, "line 1")
    (encoded,) = Encoder(TOKENIZER, max_length=4096, append_eos=True)([example])
    assert encoded.example is not None
    return [part for part in _stretches(encoded.example.ids, encoded.example.supervised) if part]


def _stretches(ids: Any, on: Any) -> list[str]:
    found, table = [""], TokenTable.from_tokenizer(TOKENIZER)
    for i, s in zip(ids, on, strict=True):
        if s:
            found[-1] += TOKENIZER.convert_ids_to_tokens(int(i)) if int(i) < 4 else table.text_bytes([int(i)]).decode()
        elif found[-1]:
            found.append("")
    return found


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("supervise", "expected"),
    [
        ("all", ["add(1)", "It is 2.", "Yes."]),
        ("last", ["Yes."]),
        ({"roles": ["user"]}, ["Add.", "Sure?"]),
        ({"roles": ["user", "assistant"], "turns": "last"}, ["Yes."]),
        ({"roles": ["system", "user"]}, ["Be brief.", "Add.", "Sure?"]),
        ({"column": "keep"}, ["It is 2."]),
        ({"column": "keep", "roles": ["user", "assistant"]}, ["Add.", "It is 2."]),
    ],
)
def test_what_is_learnt(supervise: Any, expected: list[str]) -> None:
    mask = [True, True, False, True, True, False, False]
    assert learnt(supervise, mask=mask) == [text + END for text in expected]


def test_a_tools_results_are_never_learnt() -> None:
    with pytest.raises(ValueError, match="roles"):
        DataConfig.model_validate({"sources": [{"files": "x", "messages": "m"}], "supervise": {"roles": ["tool"]}})


@pytest.mark.parametrize("mask", [None, [True], "yes", [1] * 7])
def test_a_mask_of_another_length_or_kind_is_refused(mask: Any) -> None:
    with pytest.raises(
        PotstillError, match=r"line 1: column keep \(data.supervise.column\) is not a list of true and false"
    ):
        learnt({"column": "keep"}, mask=mask)


def test_supervise_goes_with_chats() -> None:
    with pytest.raises(ValueError, match="supervise goes with messages"):
        DataConfig.model_validate({"sources": [{"files": "x"}], "supervise": "last"})


def prompts(path: Path, turn: str, state: Any = None, chats: Any = (CHAT, OPEN), **data: Any) -> PromptBatches:
    path.write_text("".join(json.dumps({"m": chat}) + "\n" for chat in chats), encoding="utf-8")
    config = DataConfig.model_validate(
        {"sources": [{"files": str(path), "messages": "m"}], "max_length": 512, "shuffle": False, **data}
    )
    prompter = Prompter(TOKENIZER, most=400, prompt_tokens=8, kwargs={})
    encode = Encoder(TOKENIZER, max_length=512, append_eos=True)
    rollouts = RolloutsConfig.model_validate({"on_policy_fraction": 1.0, "turn": turn})
    return PromptBatches(
        config, rollouts, encode, {"student": prompter}, TOKENIZER, groups=2, seed=0, epochs=2, state=state
    )


def lengths(batches: Any) -> list[int]:
    """How many messages of the data set's stand before each answer."""
    found = [group.prompt for batch in batches for group in batch.groups]
    assert all(prompt.text.endswith("<|im_start|>assistant\n") for prompt in found)
    return [len(prompt.messages) for prompt in found]


def test_which_turn_is_written(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    assert lengths(prompts(path, "last")) == [6, 6] * 2
    assert lengths(prompts(path, "all")) == [2, 4, 6, 2, 4, 6] * 2
    assert lengths(prompts(path, "all", supervise="last")) == [6, 4, 6] * 2
    drawn = lengths(prompts(path, "random", chats=[CHAT] * 40))
    assert len(drawn) == 80 and {drawn.count(n) > 12 for n in (2, 4, 6)} == {True}
    assert drawn == lengths(prompts(path, "random", chats=[CHAT] * 40))
    assert drawn[:40] != drawn[40:]  # another one in the next epoch


@pytest.mark.parametrize("turn", ["random", "all"])
def test_begins_again_anywhere(tmp_path: Path, turn: str) -> None:
    path = tmp_path / "chats.jsonl"
    whole = list(prompts(path, turn))
    for number, batch in enumerate(whole):
        assert lengths(prompts(path, turn, batch.before)) == lengths(whole[number:])


def test_each_turn_of_the_data_set_is_an_example(tmp_path: Path) -> None:
    """Where some of the text is the data set's: every turn once, and nothing twice."""
    source = SourceConfig(files="x.jsonl", messages="m")
    make = example_maker(DataConfig(sources=[source]), source, "data.sources[0]", TOKENIZER, each_turn=True)
    found = list(make({"m": OPEN}, "line 1"))
    said = [[example.text[a:b] for a, b in example.spans or ()] for example in found]
    assert said == [["add(1)" + END], ["It is 2." + END], []]
    assert [example.turns for example in found] == [(2,), (4,), ()]
    assert [example.first for example in found] == [True, False, False] and len({e.key for e in found}) == 3
