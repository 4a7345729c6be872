from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import BOS, EOS, FIRST, ids, tiny_tokenizer

from potstill.config import DataConfig, SourceConfig
from potstill.data.encoding import Encoded, Encoder
from potstill.data.examples import cut_text, example_maker, json_key, text_key, uniform
from potstill.types import Example, PotstillError

ALPHABET = "ab \n\té€🚀\u3000\r"


def pieces(
    record: dict[str, Any], max_length: int = 64, piece_bytes: int | None = None, **source: Any
) -> list[Example]:
    config = SourceConfig(files="x", **source)
    data = DataConfig(sources=[config], max_length=max_length, piece_bytes=piece_bytes)
    return list(example_maker(data, config, "data.sources[0]", None)(record, "f.jsonl, line 7"))


def encode(
    record: dict[str, Any],
    *,
    tokenizer: Any = None,
    max_length: int = 64,
    append_eos: bool = True,
    evaluation: bool = False,
    **kwargs: Any,
) -> list[Encoded]:
    tokenizer = tokenizer or tiny_tokenizer()
    encoder = Encoder(tokenizer, max_length=max_length, append_eos=append_eos, evaluation=evaluation)
    return encoder(pieces(record, max_length, **kwargs))


def only(encoded: list[Encoded]) -> Example:
    (one,) = encoded
    assert one.example is not None
    return one.example


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 16, 40])
def test_pieces_are_the_text_whatever_it_is_made_of(most: int) -> None:
    choose = random.Random(most)
    for _ in range(300):
        text = "".join(choose.choices(ALPHABET, k=choose.randrange(60)))
        cut = cut_text(text, most)
        assert "".join(cut) == text
        assert all(cut) or text == ""
        for piece in cut:
            assert len(piece.encode()) <= most or len(piece) == 1


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("short", 5, ["short"]),
        ("one two\nthree four", 12, ["one two\n", "three four"]),
        ("a\nlong line of words", 12, ["a\nlong line", " of words"]),  # the break in the first half is too early
        ("one two three", 10, ["one two", " three"]),
        ("abcdefgh", 4, ["abcd", "efgh"]),
        ("ééé", 5, ["éé", "é"]),
        ("🚀🚀", 3, ["🚀", "🚀"]),
        ("one\n\ntwo", 6, ["one\n\n", "two"]),
        ("", 4, [""]),
    ],
)
def test_a_piece_ends_at_a_line_else_before_white_space_else_between_characters(
    text: str, most: int, expected: list[str]
) -> None:
    assert cut_text(text, most) == expected


def test_keys_do_not_change() -> None:
    # From sha256sum: of the text, and of the byte FF and {"completion":" é","prompt":"A"}.
    assert text_key("Hello") == "185f8db32271fe25f561a6fc938b2e26"
    assert json_key({"prompt": "A", "completion": " é"}) == "5d3990d3163a4be7369e6fe08f81e25a"
    assert [p.key for p in pieces({"text": "Hello"})] == ["185f8db32271fe25f561a6fc938b2e26"]
    made = pieces({"q": "A", "a": " é"}, prompt="q", completion="a")
    assert [p.key for p in made] == ["5d3990d3163a4be7369e6fe08f81e25a"]


def test_a_text_that_is_the_json_of_a_pair_has_another_key() -> None:
    (pair,) = pieces({"q": "A", "a": "B"}, prompt="q", completion="a")
    (text,) = pieces({"text": '{"completion":"B","prompt":"A"}'})
    assert pair.key != text.key


def test_share_keeps_by_content_alone() -> None:
    texts = [f"text {i}" for i in range(2000)]
    kept = [t for t in texts if pieces({"text": t}, fraction=0.25)]
    assert kept == [t for t in texts if uniform(text_key(t)) < 0.25]
    assert 440 < len(kept) < 560
    assert set(kept) < {t for t in texts if pieces({"text": t}, fraction=0.5)}


def test_plain_text_is_supervised_but_for_its_first_token_and_ends_with_eos() -> None:
    example = only(encode({"text": "Hé 🚀"}))
    assert example.ids.tolist() == [BOS, *ids("Hé 🚀"), EOS]
    assert example.ids.dtype == np.int32
    assert example.supervised.tolist() == [False] + [True] * 9
    assert example.supervised_bytes == 8
    assert (example.text, example.source, example.messages) == ("Hé 🚀", "f.jsonl, line 7", None)
    without = only(encode({"text": "Hé 🚀"}, append_eos=False))
    assert without.ids.tolist() == [BOS, *ids("Hé 🚀")]


def test_without_bos_the_first_token_of_the_text_is_not_supervised() -> None:
    example = only(encode({"text": "Hi"}, tokenizer=tiny_tokenizer(bos=False)))
    assert example.ids.tolist() == [*ids("Hi"), EOS]
    assert example.supervised.tolist() == [False, True, True]
    assert example.supervised_bytes == 1


def test_only_the_last_piece_of_a_text_ends_with_eos() -> None:
    for own_eos, append_eos in ((False, True), (True, True), (True, False)):
        first, second = encode(
            {"text": "one two"}, tokenizer=tiny_tokenizer(eos=own_eos), append_eos=append_eos, piece_bytes=5
        )
        assert first.example is not None and second.example is not None
        assert first.example.ids.tolist() == [BOS, *ids("one")]
        assert second.example.ids.tolist() == [BOS, *ids(" two"), EOS]
        assert second.example.supervised.tolist() == [False] + [True] * 5
        assert [first.raw.first, second.raw.first] == [True, False]


def test_a_tokenizer_that_adds_eos_itself_gets_no_second_one() -> None:
    record = {"q": "ab", "a": "c"}
    example = only(encode(record, tokenizer=tiny_tokenizer(eos=True), prompt="q", completion="a"))
    assert example.ids.tolist() == [BOS, *ids("abc"), EOS]
    assert example.supervised.tolist() == [False, False, False, True, True]
    assert example.supervised_bytes == 1
    kept = only(encode({"text": "a"}, tokenizer=tiny_tokenizer(eos=True), append_eos=False))
    assert kept.ids.tolist() == [BOS, *ids("a"), EOS]


@pytest.mark.parametrize("own_bos", [False, True])
@pytest.mark.parametrize("own_eos", [False, True])
def test_evaluation_scores_all_of_a_text_and_nothing_else(own_bos: bool, own_eos: bool) -> None:
    tokenizer = tiny_tokenizer(bos=own_bos, eos=own_eos)
    for named in ("<|bos|>", None):
        tokenizer.bos_token = named
        start = BOS if own_bos or named else EOS
        first, second = encode({"text": "é🚀 two"}, tokenizer=tokenizer, evaluation=True, piece_bytes=7)
        for encoded, text in ((first, "é🚀"), (second, " two")):
            assert encoded.example is not None
            assert encoded.example.ids.tolist() == [start, *ids(text)]
            assert encoded.example.ids.dtype == np.int32
            assert encoded.example.supervised.tolist() == [False] + [True] * len(ids(text))
            assert encoded.example.supervised_bytes == len(text.encode())
            assert encoded.length == len(ids(text)) + 1


def test_evaluation_puts_nothing_before_a_prompt_and_another_token_where_there_is_no_bos() -> None:
    tokenizer = tiny_tokenizer(bos=False)
    asked = only(encode({"q": "ab", "a": "c"}, tokenizer=tokenizer, evaluation=True, prompt="q", completion="a"))
    assert asked.ids.tolist() == ids("abc")
    assert asked.supervised.tolist() == [False, False, True]
    opened = only(encode({"q": "", "a": "c"}, tokenizer=tokenizer, evaluation=True, prompt="q", completion="a"))
    assert opened.ids.tolist() == [BOS, *ids("c")]
    assert opened.supervised_bytes == 1
    tokenizer.bos_token = tokenizer.eos_token = None
    bare = only(encode({"text": "abc"}, tokenizer=tokenizer, evaluation=True))
    assert bare.ids.tolist() == [0, *ids("abc")]
    assert bare.supervised.tolist() == [False, True, True, True]


def test_the_completion_is_supervised_with_its_eos_and_an_eos_in_the_prompt_is_not() -> None:
    record = {"q": "a<|eos|>b", "a": "cé"}
    example = only(encode(record, tokenizer=tiny_tokenizer(pad="<|eos|>"), prompt="q", completion="a"))
    assert example.ids.tolist() == [BOS, *ids("a"), EOS, *ids("bcé"), EOS]
    assert example.supervised.tolist() == [False] * 4 + [True] * 4
    assert example.supervised_bytes == 3
    silent = only(encode({"q": "a", "a": ""}, prompt="q", completion="a"))
    assert silent.ids.tolist() == [BOS, *ids("a"), EOS]
    assert silent.supervised.tolist() == [False, False, True]
    assert silent.supervised_bytes == 0


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_across_the_border_belongs_to_the_prompt(trim_offsets: bool) -> None:
    # Offsets that leave out white space would say that " b" begins at b and that ".\n" ends before the line break.
    space, newline = "\u0120", "\u010a"
    tokenizer = tiny_tokenizer(merges=[(space, "b"), (".", newline)], trim_offsets=trim_offsets)
    b, dot = FIRST + 256, FIRST + 257

    def mask(prompt: str, completion: str) -> tuple[list[int], list[bool], int]:
        example = only(encode({"q": prompt, "a": completion}, tokenizer=tokenizer, prompt="q", completion="a"))
        return example.ids.tolist(), example.supervised.tolist(), example.supervised_bytes

    assert mask("a ", "bc") == ([BOS, *ids("a"), b, *ids("c"), EOS], [False, False, False, True, True], 1)
    assert mask("a", " bc") == ([BOS, *ids("a"), b, *ids("c"), EOS], [False, False, True, True, True], 3)
    assert mask("a.\n", "c") == ([BOS, *ids("a"), dot, *ids("c"), EOS], [False, False, False, True, True], 1)
    assert mask("a", ".\nc") == ([BOS, *ids("a"), dot, *ids("c"), EOS], [False, False, True, True, True], 3)


def test_special_tokens_in_a_text_have_no_bytes() -> None:
    example = only(encode({"text": "a<|im_end|>b"}))
    assert example.ids.tolist() == [BOS, *ids("a<|im_end|>b"), EOS]
    assert example.supervised_bytes == 2


def test_what_is_too_long_is_cut_and_counted() -> None:
    (encoded,) = encode({"text": "abcdefgh"}, max_length=6)
    assert encoded.example is not None
    assert encoded.example.ids.tolist() == [BOS, *ids("abcde")]
    assert (encoded.length, encoded.cut, encoded.example.supervised_bytes) == (6, 4, 5)
    assert encoded.example.text == "abcdefgh"


def test_a_prompt_that_leaves_no_room_is_dropped_and_counted() -> None:
    (encoded,) = encode({"q": "abcdefgh", "a": "i"}, max_length=6, prompt="q", completion="a")
    assert (encoded.kept, encoded.example, encoded.length, encoded.cut) == (False, None, 6, 5)


def test_empty_records_are_dropped() -> None:
    assert [e.kept for e in encode({"text": ""})] == [False]
    assert [e.kept for e in encode({"q": "", "a": ""}, prompt="q", completion="a")] == [False]


def test_many_pieces_at_once_are_as_each_alone() -> None:
    encoder = Encoder(tiny_tokenizer(), max_length=8, append_eos=True)
    many = [
        Example("1", "<|im_start|>ab", spans=((12, 14),), messages=()),
        Example("2", "abcdefghij"),
        Example("3", ""),
        Example("4", "xy", spans=((1, 2),)),
    ]
    together = encoder(many)
    alone = [encoder([piece])[0] for piece in many]
    for a, b in zip(together, alone, strict=True):
        assert (a.kept, a.length, a.cut) == (b.kept, b.length, b.cut) and a.raw is b.raw
        if a.example is not None and b.example is not None:
            assert a.example.ids.tolist() == b.example.ids.tolist()
            assert a.example.supervised.tolist() == b.example.supervised.tolist()
    assert [e.kept for e in together] == [True, True, False, True]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "f.jsonl, line 7: column text holds null, not text"),
        (3, "f.jsonl, line 7: column text holds a int, not text"),
        (["a"], "f.jsonl, line 7: column text holds a list, not text"),
        ("a\ud800", "f.jsonl, line 7: column text holds half of a surrogate pair"),
    ],
)
def test_a_record_that_is_not_text_is_named(value: Any, message: str) -> None:
    with pytest.raises(PotstillError, match=message):
        pieces({"text": value})


def test_a_tokenizer_with_its_own_limit_neither_cuts_nor_pads() -> None:
    tokenizer = tiny_tokenizer(pad="<|eos|>")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    assert only(encode({"text": "abcd"}, tokenizer=tokenizer)).ids.tolist() == [BOS, *ids("abcd"), EOS]
