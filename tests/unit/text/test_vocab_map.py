"""How two vocabularies relate: injective pairs, and rows that sum to one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_align import hand_table
from trained_tokenizers import ASSETS, MAKERS, real, table, trained

from potstill.text import TokenTable, VocabMap, vocab_map
from potstill.text.tokens import ABSENT, BYTE, SPECIAL
from potstill.types import PotstillError

needs_real = pytest.mark.skipif(not (ASSETS / "tokenizers").is_dir(), reason=f"no real tokenizers at {ASSETS}")


def pairs(found: VocabMap) -> dict[int, int]:
    return dict(zip(found.student.tolist(), found.teacher.tolist(), strict=True))


def check(found: VocabMap, student: TokenTable, teacher: TokenTable) -> None:
    assert found.shape == (len(student), len(teacher))
    assert (np.diff(found.student) > 0).all() and len(set(found.teacher.tolist())) == len(found.teacher), "injective"
    plain = (student.kinds[found.student] != SPECIAL).nonzero()[0]
    for s, t in zip(found.student[plain].tolist(), found.teacher[plain].tolist(), strict=True):
        assert student.token_bytes(s) == teacher.token_bytes(t) != b""
    rows = np.diff(found.indptr)
    assert (rows[student.kinds != ABSENT] >= 1).all() and not rows[student.kinds == ABSENT].any()
    sums = np.zeros(len(student))
    np.add.at(sums, np.repeat(np.arange(len(student)), rows), found.values)
    np.testing.assert_allclose(sums[student.kinds != ABSENT], 1, atol=1e-6)
    assert (found.values > 0).all() and found.indices.min() >= 0 and found.indices.max() < len(teacher)
    assert not (teacher.kinds[found.indices] == ABSENT).any()
    partner = found.teacher_of
    assert all(found.row(s) == [(int(partner[s]), 1.0)] for s in found.student.tolist())


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(MAKERS, 2)))
def test_trained_pairs(a, b):
    check(vocab_map(table(a), table(b)), table(a), table(b))
    check(vocab_map(table(a), table(b), decay=0.5, top=2), table(a), table(b))


@pytest.mark.parametrize(
    "name", [*MAKERS, *(pytest.param(name, marks=needs_real) for name in ("mistral_7b_v0_1", "smollm2"))]
)
def test_with_itself_it_is_the_identity(name):
    known = table(name)
    found = vocab_map(known, known)
    everything = np.flatnonzero(known.kinds != ABSENT)
    paired = found.student[known.lengths[found.student] + (known.kinds[found.student] == SPECIAL) > 0]
    assert np.array_equal(found.student, paired) and np.array_equal(found.student, found.teacher)
    assert len(found.student) == (known.lengths[everything] > 0).sum() + (known.kinds == SPECIAL).sum()


def test_by_hand():
    student = hand_table(
        [b"the", b" quick", b"quickly", b"zz", b"a", None, "<s>", "</s>", "<|odd|>", "<pad>"],
        bos=(6,),
        eos=(7,),
        pad=(9,),
    )
    teacher = hand_table(
        [b"a", b"q", b"quick", b"ly", b"the", b" ", b"z", "<eos>", "<bos>", b"<", b"<|"], bos=(8,), eos=(7,)
    )
    found = vocab_map(student, teacher)
    check(found, student, teacher)
    assert pairs(found) == {0: 4, 4: 0, 6: 8, 7: 7}
    assert [found.row(i) for i in (1, 2, 3, 5)] == [[(5, 1.0)], [(2, 1.0)], [(6, 1.0)], []]
    assert found.row(8) == [(10, 1.0)], "written out, the special begins with <|"
    spread = vocab_map(student, teacher, decay=0.5)
    assert spread.row(2) == [(2, pytest.approx(2 / 3)), (3, pytest.approx(1 / 3))]
    assert spread.row(3) == [(6, 1.0)], "one piece twice"
    assert vocab_map(student, teacher, decay=0.5, top=1).row(2) == [(2, 1.0)]


def test_each_byte_twice_pairs_like_with_like():
    """SentencePiece has A as <0x41> and as a letter."""
    pieces, letters = table("pieces"), table("bytes")
    byte, letter = trained("pieces").token_to_id("<0x41>"), trained("pieces").token_to_id("A")
    assert pieces.token_bytes(byte) == pieces.token_bytes(letter) == b"A" and pieces.kinds[byte] == BYTE
    itself = pairs(vocab_map(pieces, pieces))
    assert (itself[byte], itself[letter]) == (byte, letter)
    there = vocab_map(pieces, letters)
    single = trained("bytes").token_to_id("A")
    assert pairs(there)[letter] == single and byte not in pairs(there) and there.row(byte) == [(single, 1.0)]
    high = trained("pieces").token_to_id("<0xE9>")
    assert letters.token_bytes(pairs(there)[high]) == b"\xe9"
    back = vocab_map(letters, pieces)
    assert pairs(back)[single] == letter


def test_specials_by_role_then_by_name():
    student = hand_table(
        ["<s>", "</s>", "<|im_end|>", "<tool>", "<pad>"], bos=(0,), eos=(1, 2), end_of_turn=(2,), pad=(4,)
    )
    teacher = hand_table(["<|endoftext|>", "<|eot_id|>", "<tool>"], bos=(0,), eos=(0,), pad=(0,), end_of_turn=(1,))
    found = vocab_map(student, teacher)
    assert pairs(found) == {1: 0, 2: 1, 3: 2}, "the end before the beginning; pad is only what eos is as well"
    assert found.row(0) == [(0, 1.0)], "without a partner of its own, a special still goes where its role is"


def test_what_a_vocabulary_cannot_say():
    found = vocab_map(hand_table([b"x", b"", "<s>"], bos=(2,)), hand_table([b"y", "<unk>"], unk=(1,)))
    assert [found.row(i) for i in range(3)] == [[(1, 1.0)], [(1, 1.0)], [(1, 1.0)]] and not pairs(found)


def test_saved_and_loaded(tmp_path):
    a, b = table("pieces"), table("bytes")
    path = tmp_path / "map.safetensors"
    found = vocab_map(a, b, decay=0.3)
    found.save(path)
    again = VocabMap.load(path, a, b)
    for name in ("student", "teacher", "indptr", "indices", "values"):
        ours, theirs = getattr(found, name), getattr(again, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert again.shape == found.shape and again.fingerprints == (a.fingerprint, b.fingerprint)
    with pytest.raises(PotstillError, match="was made for another student"):
        VocabMap.load(path, b, b)
    with pytest.raises(PotstillError, match="was made for another teacher"):
        VocabMap.load(path, a, a)
    path.write_bytes(b"nothing")
    with pytest.raises(PotstillError, match="cannot read the vocabulary map"):
        VocabMap.load(path, a, b)
    with pytest.raises(PotstillError, match="cannot read the vocabulary map"):
        VocabMap.load(tmp_path / "absent", a, b)
    with pytest.raises(PotstillError, match="could not write"):
        found.save(tmp_path / "no" / "folder")


def test_options_that_make_no_sense():
    with pytest.raises(PotstillError, match="a decay from 0 to 1"):
        vocab_map(table("bytes"), table("bytes"), decay=2)
    with pytest.raises(PotstillError, match="at least 1 piece"):
        vocab_map(table("bytes"), table("bytes"), top=0)


@needs_real
def test_real_pairs():
    for a, b, expected in [("gpt2", "mistral_7b_v0_1", 21241), ("smollm2", "gpt2", 36961), ("gpt2", "smollm2", 36961)]:
        found = vocab_map(table(a), table(b))
        check(found, table(a), table(b))
        assert len(found.student) == expected
    # Byte-level vocabularies spell equal bytes equally.
    assert len(set(real("gpt2").get_vocab()) & set(real("smollm2").get_vocab())) == 36961
