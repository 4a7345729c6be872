"""What a sample tells before a run: the size of pieces, and what max_length would lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from potstill.config import DataConfig
from potstill.data import StepBatches, check_lengths, lost_in, with_pieces
from potstill.models import load_tokenizer
from potstill.types import PotstillError

CORPUS = {"files": "shipped:corpus/heldout.parquet"}


def data_of(source: dict[str, Any], **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"sources": [source], "packing": False, **keys})


def write(path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"files": str(path)}


@pytest.mark.parametrize(("name", "max_length"), [("bytes-2k", 64), ("pieces-1k", 512), ("bytes alone", 128)])
def test_pieces_are_as_long_as_nearly_all_of_them_fit(name: str, max_length: int) -> None:
    tokenizer = tiny_tokenizer() if name == "bytes alone" else load_tokenizer(f"shipped:tokenizers/{name}", "x")
    data = with_pieces(data_of(CORPUS, max_length=max_length), tokenizer)
    *_, last = StepBatches(data, tokenizer, batch_size=8, micro_batch_size=8, seed=0, epochs=1, limit=500)
    assert last.counts["cut_examples"] < 0.04 * last.counts["examples"]
    assert last.counts["tokens"] > 0.65 * max_length * last.counts["examples"]
    assert check_lengths(data, tokenizer) == []


def test_a_given_size_stays_and_without_plain_text_there_is_none(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    given = data_of(CORPUS, max_length=64, piece_bytes=77)
    assert with_pieces(given, tokenizer) is given
    pairs = data_of({"files": str(tmp_path / "none"), "prompt": "q", "completion": "a"}, max_length=64)
    assert with_pieces(pairs, tokenizer) is pairs


def test_the_size_is_of_all_the_text_whatever_the_share_and_the_order(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("shipped:tokenizers/bytes-2k", "x")
    plain = with_pieces(data_of(CORPUS, max_length=128), tokenizer)
    some = with_pieces(data_of({**CORPUS, "fraction": 0.05}, max_length=128, shuffle=False), tokenizer)
    assert plain.piece_bytes == some.piece_bytes and plain.piece_bytes not in (None, 4 * 128)
    empty = data_of(write(tmp_path / "empty.jsonl", [{"text": ""}]), max_length=128)
    assert with_pieces(empty, tokenizer).piece_bytes is None


def pairs(tmp_path: Path, long: int, short: int, **keys: Any) -> DataConfig:
    """Bytes are tokens: bos, a prompt of 10 or 100, an answer of 10, eos."""
    records = [{"q": "p" * 100, "a": "a" * 10}] * long + [{"q": "p" * 10, "a": "a" * 10}] * short
    return data_of(
        {**write(tmp_path / "pairs.jsonl", records), "prompt": "q", "completion": "a"}, max_length=40, **keys
    )


def test_more_than_a_little_lost_is_a_warning_and_more_than_half_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert check_lengths(pairs(tmp_path, 1, 19), tokenizer) == []
    assert check_lengths(pairs(tmp_path, 10, 90), tokenizer) == [
        "data.max_length: 40 tokens cut 10 of 100 sampled examples, by 10% of all that is to be learnt; 10 of them are "
        "dropped, for nothing is left. 19 of 20 have at most 112: raise it, or leave long ones out"
    ]
    assert len(check_lengths(pairs(tmp_path, 50, 50), tokenizer)) == 1
    with pytest.raises(
        PotstillError, match=r"^data.max_length: 40 tokens cut 60 of 100 sampled examples, by 60% of all"
    ):
        check_lengths(pairs(tmp_path, 60, 40), tokenizer)


def test_long_texts_that_lose_most_of_what_they_say_are_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": "word " * 100}] * 5)
    with pytest.raises(PotstillError, match=r"by 8\d% .* raise it, or lower data.piece_bytes, or leave long ones out$"):
        check_lengths(data_of(source, max_length=60, piece_bytes=1000), tiny_tokenizer())
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 90}]}
    source = {**write(tmp_path / "chat.jsonl", [chat]), "messages": "messages"}
    with pytest.raises(PotstillError, match=r"^data.max_length: 60 tokens cut 1 of 1 sampled examples"):
        check_lengths(data_of(source, max_length=60), tiny_tokenizer(chat_template=CHATML))


def test_records_with_nothing_to_learn_are_told_apart_from_long_ones(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": ""}] * 3 + [{"text": "a b c"}] * 7)
    assert check_lengths(data_of(source, max_length=60), tiny_tokenizer()) == [
        "data.sources: 3 of 10 sampled examples are dropped, for there is nothing to learn in them: empty texts or answers, "
        "conversations without an assistant turn"
    ]


def test_what_a_run_has_lost_is_said_of_its_counts() -> None:
    few = {
        "examples": 97,
        "dropped_examples": 3,
        "cut_examples": 5,
        "tokens": 960,
        "cut_tokens": 20,
        "dropped_tokens": 9,
    }
    assert lost_in(few) is None and lost_in({}) is None
    assert lost_in({**few, "cut_examples": 6, "cut_tokens": 31}) == (
        "of 100 examples 6 were longer than data.max_length and cut, and 3 dropped, in which nothing was left to "
        "learn: 4% of "
        "all tokens"
    )
