"""What the ids of a vocabulary stand for, in every family of tokenizer."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from trained_tokenizers import ASSETS, KEEP_TEXT, MAKERS, NASTY, REAL, real, table, tokenizer, trained

from potstill.text import TokenTable
from potstill.text.tokens import ABSENT, BYTE, SPECIAL, TEXT
from potstill.types import PotstillError

needs_real = pytest.mark.skipif(not (ASSETS / "tokenizers").is_dir(), reason=f"no real tokenizers at {ASSETS}")


def as_normalised(name: str, text: str) -> bytes:
    """What the tokenizer makes of a text before it cuts it, with SentencePiece's signs taken back."""
    normalizer = tokenizer(name).normalizer
    text = text if normalizer is None else normalizer.normalize_str(text)
    if "pieces" in name or name == "mistral_7b_v0_1":
        text = text.replace("▁", " ")
        if "no prefix" not in name:
            text = text[1:]  # normalize_str puts the dummy prefix
    return text.encode()


@pytest.mark.parametrize(
    "name", [*KEEP_TEXT, "bytes, NFC", "bytes, lower case", *(pytest.param(n, marks=needs_real) for n in REAL)]
)
def test_tokens_concatenate_to_the_normalised_text(name):
    made, known = tokenizer(name), table(name)
    for text in NASTY.values():
        ids = made.encode(text, add_special_tokens=False).ids
        assert known.text_bytes(ids) == as_normalised(name, text)
        if known.identity and "▁" not in text:
            assert known.text_bytes(ids) == text.encode()
    assert known.identity == (name not in ("bytes, NFC", "bytes, lower case", "qwen3"))


@needs_real
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_on_real_languages(name):
    folder = ASSETS / "data" / "udhr" / "txt"
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        ids = real(name).encode(text).ids
        assert table(name).text_bytes(ids) == as_normalised(name, text), path.name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(max_size=60), name=st.sampled_from(KEEP_TEXT))
def test_any_text(text, name):
    ids = trained(name).encode(text).ids
    known = table(name)
    if "▁" not in text and not any(content in text for content in known.contents.values()):
        assert known.text_bytes(ids) == text.encode()


@pytest.mark.parametrize("name", MAKERS)
def test_lengths_are_those_of_the_bytes(name):
    known = table(name)
    assert known.lengths.dtype == np.int32 and len(known) == trained(name).get_vocab_size()
    assert known.lengths.tolist() == [len(known.token_bytes(index)) for index in range(len(known))]
    specials = {index for ids in known.special.values() for index in ids}
    assert specials == set(np.flatnonzero(known.kinds == SPECIAL).tolist()) and not known.lengths[list(specials)].any()


def test_byte_level_letters():
    known = table("bytes")
    made = trained("bytes")
    single = {known.token_bytes(made.token_to_id(letter)) for letter in pre_tokenizers.ByteLevel.alphabet()}
    assert single == {bytes([byte]) for byte in range(256)}
    assert known.token_bytes(made.token_to_id("Ġ")) == b" " and known.token_bytes(made.token_to_id("Ċ")) == b"\n"


def test_pieces_fallbacks_and_prefix():
    known, made = table("pieces"), trained("pieces")
    newline = made.token_to_id("<0x0A>")
    assert known.token_bytes(newline) == b"\n" and known.kinds[newline] == BYTE
    assert known.token_bytes(made.token_to_id("▁the")) == b" the" and known.kinds[made.token_to_id("▁the")] == TEXT
    assert (known.prefix, known.prefix_always) == ("every", True)
    ids = made.encode("the").ids
    assert [made.id_to_token(index) for index in ids] == ["<s>", "▁the"] and known.text_bytes(ids) == b"the"
    # Every stretch between special tokens gets a prefix of its own.
    ids = made.encode("the</s>the").ids
    assert [made.id_to_token(index) for index in ids] == ["<s>", "▁the", "</s>", "▁the"] and known.text_bytes(
        ids
    ) == b"thethe"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bytes", ("none", True)),
        ("bytes, spaced", ("every", False)),
        ("pieces, no prefix", ("none", True)),
        ("unigram", ("first", False)),
        ("word pieces", ("every", True)),
    ],
)
def test_where_a_dummy_prefix_stands(name, expected):
    assert (table(name).prefix, table(name).prefix_always) == expected


def test_word_pieces_are_as_their_decoder_joins_them():
    known, made = table("word pieces"), trained("word pieces")
    ids = made.encode("The nation, and the people.", add_special_tokens=False).ids
    assert known.text_bytes(ids) == b"the nation, and the people." == made.decode(ids).encode()
    continued = next(token for token in made.get_vocab() if token.startswith("##") and len(token) > 3)
    assert known.token_bytes(made.token_to_id(continued)) == continued[2:].encode()
    assert known.special == {"cls": (2,), "sep": (3,), "pad": (0,), "unk": (1,)} and not known.identity


def vocabulary(*tokens: str, decoder: decoders.Decoder | None = None, **options) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], **options))
    if decoder is not None:
        made.decoder = decoder
    return made


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        (decoders.ByteLevel(), "Ã©Ġ", "é ".encode()),
        (decoders.ByteLevel(), "日本", "日本".encode()),  # no letter of a byte: text already
        (decoders.Metaspace(), "▁▁a", b"  a"),
        (decoders.Replace("x", "yy"), "axb", b"ayyb"),
        (decoders.Replace(tokenizers.Regex("[0-9]"), "#"), "a1b2", b"a#b#"),
        (decoders.Strip("_", 2, 1), "___a__", b"_a_"),
        (decoders.Sequence([decoders.Strip("_", 1, 0), decoders.Fuse()]), "_a", b"a"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]), " a", b" a"),
        (decoders.Sequence([decoders.Sequence([decoders.Replace("▁", " ")]), decoders.ByteFallback()]), "<0xe9>", b"\xe9"),
        (decoders.ByteFallback(), "<0xZZ>", b"<0xZZ>"),
        (decoders.WordPiece("@@", cleanup=False), "@@a", b"a"),
        (decoders.WordPiece("@@", cleanup=False), ",", b" ,"),
        (decoders.BPEDecoder("</w>"), "a</w>", b"a "),
        (None, "word", b" word"),
    ],
)  # fmt: skip
def test_decoders(decoder, token, expected):
    known = TokenTable.from_tokenizer(vocabulary("unk", token, decoder=decoder, unk_token="unk"), cache=None)
    assert known.token_bytes(1) == expected


def test_added_tokens():
    made = vocabulary("a", "▁", "▁▁", decoder=decoders.Metaspace())
    made.add_tokens(
        [AddedToken("<tool_call>", special=False), AddedToken("é▁", special=False), AddedToken("▁▁", special=False)]
    )
    made.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<|what|>")])
    known = TokenTable.from_tokenizer(made, cache=None)
    # As it is written, unless the model has the token as well: then it is a piece like others.
    assert [known.token_bytes(i) for i in range(7)] == [b"a", b" ", b"  ", b"<tool_call>", "é▁".encode(), b"", b""]
    assert known.special == {"end_of_turn": (5,), "<|what|>": (6,)}
    assert known.contents == {5: "<|im_end|>", 6: "<|what|>"}


def test_ids_that_no_token_has():
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    known = TokenTable.from_tokenizer(made, cache=None)
    assert known.kinds.tolist() == [SPECIAL, ABSENT, ABSENT, ABSENT, ABSENT, TEXT]
    assert known.lengths.tolist() == [0, 0, 0, 0, 0, 2]


def test_roles_are_what_the_tokenizer_declares_before_what_names_suggest():
    known = TokenTable.from_tokenizer(tiny_tokenizer(pad="<|eos|>"), cache=None)
    assert known.special == {"eos": (1,), "end_of_turn": (3,), "bos": (0,), "start_of_turn": (2,), "pad": (1,)}
    assert [known.token_bytes(4 + byte) for byte in (0, 65, 255)] == [b"\x00", b"A", b"\xff"]


def test_the_fingerprint_is_of_the_content():
    def of(made) -> str:
        return TokenTable.from_tokenizer(made, cache=None).fingerprint

    first, again = vocabulary("a", "b"), vocabulary("a", "b")
    again.enable_padding(pad_id=0, pad_token="a")
    again.enable_truncation(1)
    assert of(first) == of(again)
    assert len({of(first), of(vocabulary("b", "a")), of(vocabulary("a", "b", decoder=decoders.Fuse()))}) == 3
    normal = vocabulary("a", "b")
    normal.normalizer = normalizers.NFC()
    assert of(normal) != of(first)


def same(a: TokenTable, b: TokenTable) -> bool:
    arrays = all(
        np.array_equal(getattr(a, n), getattr(b, n)) for n in ("buffer", "offsets", "kinds", "added", "lengths")
    )
    rest = ("special", "contents", "identity", "prefix", "prefix_always", "fingerprint", "name")
    return arrays and all(getattr(a, n) == getattr(b, n) for n in rest)


@pytest.mark.parametrize("name", MAKERS)
def test_the_cache_gives_back_the_table(name, tmp_path):
    fresh = TokenTable.from_tokenizer(trained(name), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{fresh.fingerprint}.tokens"
    written = file.stat().st_mtime_ns
    assert same(TokenTable.from_tokenizer(trained(name), cache=tmp_path), fresh) and file.stat().st_mtime_ns == written
    file.write_bytes(file.read_bytes()[:100])
    assert same(TokenTable.from_tokenizer(trained(name), cache=tmp_path), fresh) and file.stat().st_size > 100


def test_the_cache_has_a_place_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("POTSTILL_CACHE", str(tmp_path / "here"))
    known = TokenTable.from_tokenizer(trained("bytes"))
    assert [file.name for file in (tmp_path / "here" / "tokens").iterdir()] == [f"{known.fingerprint}.tokens"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POTSTILL_CACHE", str(tmp_path / "file"))  # cannot be a folder: no cache, no error
    assert same(TokenTable.from_tokenizer(trained("bytes")), known)


def test_tiktoken_files(tmp_path):
    known = table("bytes")
    lines = [
        f"{base64.b64encode(known.token_bytes(index)).decode()} {index}"
        for index in range(len(known))
        if known.kinds[index] == TEXT
    ]
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    read = TokenTable.from_tiktoken(path, {content: index for index, content in known.contents.items()})
    assert np.array_equal(read.lengths, known.lengths) and np.array_equal(read.buffer, known.buffer)
    assert read.special == known.special and read.identity and read.fingerprint != known.fingerprint
    path.write_text("YQ== 0\nnot base64 at all\n")
    with pytest.raises(PotstillError, match="line 2: not a token in base64"):
        TokenTable.from_tiktoken(path)
    with pytest.raises(PotstillError, match="cannot read"):
        TokenTable.from_tiktoken(tmp_path / "absent")


def test_tokenizers_that_cannot_be_read():
    class Slow:
        name_or_path = "org/slow"

    with pytest.raises(PotstillError, match="org/slow has no fast version"):
        TokenTable.from_tokenizer(Slow())
    with pytest.raises(PotstillError, match="a step CTC"):
        TokenTable.from_tokenizer(vocabulary("a", decoder=decoders.CTC()), cache=None)


def test_a_table_that_the_decoder_contradicts_is_refused(monkeypatch):
    made = trained("bytes")
    monkeypatch.setattr("potstill.text.tokens.decode_tokens", lambda tokens, _: ([b"?" for _ in tokens], []))
    with pytest.raises(PotstillError, match="reads its own tokens back as 'Hello"):
        TokenTable.from_tokenizer(made, cache=None)


@needs_real
def test_real_special_tokens_have_roles():
    assert table("qwen3").special["end_of_turn"] == (151645,)
    assert table("qwen3").token_bytes(151667) == b"<think>"  # added, but not special: a part of the text
    assert table("deepseek_v3").special["bos"] == (0,) and table("deepseek_v3").special["eos"] == (1,)
    assert table("mistral_7b_v0_1").special == {"eos": (2,), "bos": (1,), "unk": (0,)}
    assert json.dumps({name: len(table(name)) for name in REAL}) == json.dumps(
        {
            "deepseek_v3": 128815,
            "gpt2": 50257,
            "mistral_7b_v0_1": 32000,
            "phi-4": 100352,
            "qwen3": 151669,
            "smollm2": 49152,
        }
    )
