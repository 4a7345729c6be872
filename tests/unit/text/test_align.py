"""Two tokenizations of one text: chunks against a slow implementation that shares nothing with the fast one."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_letters
from trained_tokenizers import ASSETS, KEEP_TEXT, MAKERS, NASTY, REAL, table, tokenizer

from potstill.text import Alignment, TokenTable, align, align_batch, align_spans
from potstill.text.edits import equal_stretches
from potstill.text.tokens import ABSENT, SPECIAL, TEXT
from potstill.types import PotstillError

needs_real = pytest.mark.skipif(not (ASSETS / "tokenizers").is_dir(), reason=f"no real tokenizers at {ASSETS}")
LETTERS = {letter: byte for byte, letter in enumerate(byte_letters())}


def hand_table(pieces: Sequence[bytes | str | None], prefix: str = "none", **special: tuple[int, ...]) -> TokenTable:
    """Bytes are text, a string is the name of a special, None is an id that no token has."""
    texts = [piece if isinstance(piece, bytes) else b"" for piece in pieces]
    names = {i: piece for i, piece in enumerate(pieces) if isinstance(piece, str)}
    return TokenTable(
        buffer=np.frombuffer(b"".join(texts), dtype=np.uint8),
        offsets=np.cumsum([0, *map(len, texts)]),
        kinds=np.array(
            [TEXT if isinstance(p, bytes) else ABSENT if p is None else SPECIAL for p in pieces], dtype=np.uint8
        ),
        added=np.array([isinstance(p, str) for p in pieces]),
        special={
            **{name: (i,) for i, name in names.items() if not any(i in ids for ids in special.values())},
            **special,
        },
        contents=names,
        identity=True,
        prefix=prefix,  # type: ignore[arg-type]
        prefix_always=True,
        fingerprint=repr(pieces),
    )


def entries(alignment: Alignment) -> list[tuple[int, int, int, int, bool]]:
    columns = (
        alignment.student_start,
        alignment.student_end,
        alignment.teacher_start,
        alignment.teacher_end,
        alignment.exact,
    )
    assert [column.dtype for column in columns] == [np.dtype(np.int32)] * 4 + [np.dtype(np.bool_)]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def lined_up(
    student: Sequence[bytes | str], teacher: Sequence[bytes | str], **options
) -> list[tuple[int, int, int, int, bool]]:
    """The entries for two lists of tokens, each id its own."""
    ours, theirs = hand_table(student, **options), hand_table(teacher)
    return entries(align(range(len(student)), range(len(teacher)), ours, theirs))


def pieces_of(name: str, ids: Sequence[int]) -> list[bytes | None]:
    """What each token of a sequence stands for, by the rules of its family written down once more; None for specials."""
    made, found = tokenizer(name), []
    specials = {i for i, token in made.get_added_tokens_decoder().items() if token.special}
    added = set(made.get_added_tokens_decoder())
    for at, index in enumerate(ids):
        token = made.id_to_token(index)
        if index in specials:
            found.append(None)
        elif index in added:
            found.append(token.encode())
        elif "pieces" in name or name == "mistral_7b_v0_1":
            byte = len(token) == 6 and token.startswith("<0x")
            piece = bytes([int(token[3:5], 16)]) if byte else token.replace("▁", " ").encode()
            starts = at == 0 or ids[at - 1] in added
            found.append(piece[1:] if starts and "no prefix" not in name and piece[:1] == b" " else piece)
        else:
            found.append(bytes(LETTERS[letter] for letter in token))
    return found


def slowly(student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> list[tuple[int, int, int, int, bool]]:
    """Of equal texts with a special in front at most: wherever both have a token that ends after so many bytes. A token
    without bytes belongs to what follows."""
    found = []
    lead_s, lead_t = int(student[:1] == [None]), int(teacher[:1] == [None])
    if lead_s or lead_t:
        found.append((0, lead_s, 0, lead_t, bool(lead_s and lead_t)))

    def ends(pieces: Sequence[bytes | None], lead: int) -> dict[int, int]:
        reached: dict[int, int] = {}
        total = 0
        for at in range(lead, len(pieces)):
            total += len(pieces[at])
            if pieces[at]:
                reached[total] = at + 1
        return reached

    ends_s, ends_t = ends(student, lead_s), ends(teacher, lead_t)
    i, j = lead_s, lead_t
    for position in sorted(set(ends_s) & set(ends_t)):
        found.append((i, ends_s[position], j, ends_t[position], True))
        i, j = ends_s[position], ends_t[position]
    return found


def check_tiles(alignment: Alignment, student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> None:
    """Tiles both sides in order; exact chunks have equal bytes and cannot be split; no two others are neighbours."""
    i = j = 0
    before = True
    for s0, s1, t0, t1, exact in entries(alignment):
        assert (s0, t0) == (i, j) and s1 >= s0 and t1 >= t0 and (s1 > s0 or t1 > t0)
        i, j = s1, t1
        ours, theirs = student[s0:s1], teacher[t0:t1]
        assert before or exact, "two inexact entries in a row are one"
        before = exact
        if not exact:
            continue
        assert ours and theirs
        if None in ours or None in theirs:
            assert ours == theirs == [None], "a special is a chunk of its own"
            continue
        assert b"".join(ours) == b"".join(theirs) != b""
        inner_s = set(itertools.accumulate(map(len, ours[:-1]))) - {0}
        inner_t = set(itertools.accumulate(map(len, theirs[:-1]))) - {0}
        assert not inner_s & inner_t, "a chunk that could be split"
    assert (i, j) == (len(student), len(teacher))


# What MATHS.md asks to keep


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ([b"201"], [b"2", b"0", b"1"], [(0, 1, 0, 3, True)]),
        ([b"un", b"happi", b"ness"], [b"unh", b"app", b"iness"], [(0, 3, 0, 3, True)]),
        ([b"\xc3", b"\xa9"], ["é".encode()], [(0, 2, 0, 1, True)]),
        ([b"x", b"_init"], [b"x", b" init"], [(0, 1, 0, 1, True), (1, 2, 1, 2, False)]),
        ([b"a", b"\t", b"b"], [b"a", b"\n", b"b"], [(0, 1, 0, 1, True), (1, 2, 1, 2, False), (2, 3, 2, 3, True)]),
        ([b"a", b"\\", b"n", b"b"], [b"a", b"\n", b"b"], [(0, 1, 0, 1, True), (1, 3, 1, 2, False), (3, 4, 2, 3, True)]),
        ([b"ab", b"c"], [b"a", b"bc"], [(0, 2, 0, 2, True)]),
        ([b"a", b"b"], [b"a", b"b"], [(0, 1, 0, 1, True), (1, 2, 1, 2, True)]),
        ([], [], []),
        ([b"a"], [], [(0, 1, 0, 0, False)]),
        ([], [b"a"], [(0, 0, 0, 1, False)]),
        ([b"a"], [b"b"], [(0, 1, 0, 1, False)]),
    ],
)  # fmt: skip
def test_by_hand(student, teacher, expected):
    assert lined_up(student, teacher) == expected


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        # paired by role, whatever they are called
        (["<s>", b"a", "</s>"], ["<bos>", b"a", "<eos>"], [(0, 1, 0, 1, True), (1, 2, 1, 2, True), (2, 3, 2, 3, True)]),
        (["<s>", b"ab"], [b"a", b"b"], [(0, 1, 0, 0, False), (1, 2, 0, 2, True)]),
        ([b"a", "</s>"], ["<bos>", b"a"], [(0, 0, 0, 1, False), (0, 1, 1, 2, True), (1, 2, 2, 2, False)]),
        ([b"a", "<s>", b"b"], [b"a", "</s>", b"b"], [(0, 1, 0, 1, True), (1, 2, 1, 2, False), (2, 3, 2, 3, True)]),
        # in the middle of what is one token for the other
        ([b"a", "<s>", b"b"], [b"ab"], [(0, 3, 0, 1, False)]),
        ([b"x", b"a", "<s>", b"b", b"y"], [b"x", b"ab", b"y"],
         [(0, 1, 0, 1, True), (1, 4, 1, 2, False), (4, 5, 2, 3, True)]),
        # unknown to both by role, but of one name
        ([b"a", "<|odd|>"], [b"a", "<|odd|>"], [(0, 1, 0, 1, True), (1, 2, 1, 2, True)]),
        ([b"a", "<|odd|>"], [b"a", "<|even|>"], [(0, 1, 0, 1, True), (1, 2, 1, 2, False)]),
    ],
)  # fmt: skip
def test_specials(student, teacher, expected):
    roles = {"<s>": "bos", "<bos>": "bos", "</s>": "eos", "<eos>": "eos"}

    def named(pieces: list[bytes | str]) -> TokenTable:
        return hand_table(pieces, **{roles[p]: (i,) for i, p in enumerate(pieces) if isinstance(p, str) and p in roles})

    found = align(range(len(student)), range(len(teacher)), named(student), named(teacher))
    assert entries(found) == expected


def test_one_token_with_two_roles_does_not_join_them():
    """GPT-2's only special begins and ends a text: it pairs with bos and with eos, and these not with each other."""
    one = hand_table([b"a", "<|endoftext|>"], bos=(1,), eos=(1,))
    two = hand_table([b"a", "<s>", "</s>"], bos=(1,), eos=(2,))
    assert all(entry[4] for entry in entries(align([1, 0, 1], [1, 0, 2], one, two)))
    both = hand_table([b"a", "<|endoftext|>", "<s>", "</s>"], bos=(1, 2), eos=(1, 3))
    assert entries(align([1, 0], [3, 0], two, both)) == [(0, 1, 0, 1, False), (1, 2, 1, 2, True)]
    assert entries(align([1, 0], [2, 0], two, both)) == [(0, 1, 0, 1, True), (1, 2, 1, 2, True)]


def test_a_dummy_prefix_has_no_bytes():
    table_s = hand_table([b" hello", b" ", b"\n", b" world", "<s>", b"x"], prefix="every")
    table_t = hand_table([b"hello", b"\n", b" world", b"x"])
    assert entries(align([4, 0, 3], [0, 2], table_s, table_t)) == [
        (0, 1, 0, 0, False),
        (1, 2, 0, 1, True),
        (2, 3, 1, 2, True),
    ]
    # A token that is nothing but the prefix joins the one that follows it.
    assert entries(align([1, 2, 3], [1, 2], table_s, table_t)) == [(0, 2, 0, 1, True), (2, 3, 1, 2, True)]
    assert entries(align([4, 1, 2], [1], table_s, table_t)) == [(0, 1, 0, 0, False), (1, 3, 0, 1, True)]
    assert entries(align([5, 4, 1, 2], [3, 1], table_s, table_t)) == [
        (0, 1, 0, 1, True),
        (1, 2, 1, 1, False),
        (2, 4, 1, 2, True),
    ]
    # With no text after it, there is nothing to join.
    assert entries(align([4, 1], [], table_s, table_t)) == [(0, 2, 0, 0, False)]
    assert entries(align([4, 1, 4], [3], table_s, table_t)) == [(0, 3, 0, 1, False)]


def test_a_tokenizer_that_puts_a_space_only_where_there_is_none():
    spaced, plain = "bytes, spaced", "bytes"
    for text in ("people of the union", " people of the union", "   people", " ", "", "\npeople"):
        a, b = tokenizer(spaced).encode(text).ids, tokenizer(plain).encode(text).ids
        for found in (align(a, b, table(spaced), table(plain)), align(b, a, table(plain), table(spaced))):
            assert found.exact.all() and bool(len(found)) == bool(text)


def test_ids_beyond_the_vocabulary_are_nothing_to_anybody():
    tokens = hand_table([b"a", None, b"b"])
    assert entries(align([0, 7, 2], [0, 7, 2], tokens, tokens)) == [
        (0, 1, 0, 1, True),
        (1, 2, 1, 2, False),
        (2, 3, 2, 3, True),
    ]
    assert entries(align([0, 1, 2], [0, 2], tokens, tokens)) == [
        (0, 1, 0, 1, True),
        (1, 2, 1, 1, False),
        (2, 3, 1, 2, True),
    ]
    with pytest.raises(PotstillError, match="the teacher's ids hold the id -100"):
        align([0], [-100], tokens, tokens)
    with pytest.raises(PotstillError, match="not an array of float64"):
        align([0.5], [0], tokens, tokens)
    with pytest.raises(PotstillError, match="1 sequences of the student's to be aligned with 2"):
        align_batch([[0]], [[0], [0]], tokens, tokens)


def test_a_character_cut_in_half_at_the_end():
    """A length limit ended a rollout inside 日; the teacher read what a decoder made of that, or nothing."""
    half = "ab日".encode()[:-1]
    student = hand_table([b"a", b"b", b"\xe6", b"\x97"])
    lost = hand_table([b"ab"])
    assert entries(align([0, 1, 2, 3], [0], student, lost)) == [(0, 2, 0, 1, True), (2, 4, 1, 1, False)]
    replaced = hand_table([b"ab", "\ufffd".encode()])
    assert entries(align([0, 1, 2, 3], [0, 1], student, replaced)) == [(0, 2, 0, 1, True), (2, 4, 1, 2, False)]
    kept = hand_table([b"ab", half[2:]])
    assert entries(align([0, 1, 2, 3], [0, 1], student, kept)) == [(0, 2, 0, 1, True), (2, 4, 1, 2, True)]


def test_ids_are_taken_as_sampled():
    """Letter by letter is not how the tokenizer writes it, and is aligned all the same."""
    name = "bytes"
    letters = [tokenizer(name).token_to_id(byte_letters()[byte]) for byte in "the people’s".encode()]
    other = tokenizer("pieces").encode("the people’s").ids
    assert letters != tokenizer(name).encode("the people’s").ids
    found = align(letters, other, table(name), table("pieces"))
    check_tiles(found, pieces_of(name, letters), pieces_of("pieces", other))
    assert found.exact[1:].all() and not found.exact[0]  # <s> has no partner


def test_a_chunk_is_supervised_if_all_its_tokens_are():
    found = align([0, 1, 2], [0, 1], hand_table([b"a", b"b", b"c"]), hand_table([b"ab", b"c"]))
    assert found.supervised(np.array([False, True, True])).tolist() == [False, True]
    assert found.supervised(np.array([True, True, False])).tolist() == [True, False]
    inexact = align([0], [0], hand_table([b"a"]), hand_table([b"b"]))
    assert inexact.supervised(np.array([True])).tolist() == [False]


def test_messages_of_two_templates():
    """The words around a message are alike here and there, and are not to be taken for the message."""
    student = hand_table([b"user:", b"hi", b"\n", "<|im_end|>", b" yo", b"u", b"hi!"], prefix="first", end_of_turn=(3,))
    teacher = hand_table([b"[", b"h", b"i", b"]", "<eot>", b" you", b"!", b"user"], end_of_turn=(4,))
    # user: hi <im_end> hi! yo u <im_end> \n  ·  user [ h i <eot> ] h i ! you <eot>
    x, y = [0, 1, 3, 6, 4, 5, 3, 2], [7, 0, 1, 2, 4, 3, 1, 2, 6, 5, 4]
    found = align_spans(x, y, student, teacher, [(1, 3, 2, 5), (3, 7, 6, 11)])
    assert entries(found) == [
        (0, 1, 0, 2, False),
        (1, 2, 2, 4, True),
        (2, 3, 4, 5, True),
        (3, 3, 5, 6, False),
        (3, 4, 6, 9, True),
        (4, 6, 9, 10, True),
        (6, 7, 10, 11, True),
        (7, 8, 11, 11, False),
    ]
    assert entries(align_spans(x, y, student, teacher, [])) == [(0, 8, 0, 11, False)]
    whole = align_spans(x, y, student, teacher, [(0, 8, 0, 11)])
    assert entries(whole) == entries(align(x, y, student, teacher))
    with pytest.raises(PotstillError, match="overlap or go beyond the 8 tokens"):
        align_spans(x, y, student, teacher, [(1, 3, 2, 5), (2, 7, 6, 11)])
    with pytest.raises(PotstillError, match="overlap or go beyond the 11 tokens"):
        align_spans(x, y, student, teacher, [(1, 3, 2, 12)])


def test_spans_keep_the_prefix_of_the_whole():
    """A span may begin with a space that is in the text; only the first token of a sequence holds a dummy prefix."""
    text = "the people of the union"
    x, y = tokenizer("pieces").encode(text).ids, tokenizer("bytes").encode(text).ids
    found = align_spans(x, y, table("pieces"), table("bytes"), [(1, len(x), 0, len(y))])
    assert entries(found) == entries(align(x, y, table("pieces"), table("bytes")))
    _, s1, _, t1, _ = entries(found)[1]
    later = align_spans(x, y, table("pieces"), table("bytes"), [(s1, len(x), t1, len(y))])
    assert entries(later) == [(0, s1, 0, t1, False), *entries(found)[2:]]


# Against the slow implementation


def check_pair(a: str, b: str, texts: Sequence[str]) -> float:
    """All texts in one batch; gives back the share of the student's bytes in exact chunks."""
    ids_a = [e.ids for e in tokenizer(a).encode_batch(texts)]
    ids_b = [e.ids for e in tokenizer(b).encode_batch(texts)]
    covered = total = 0
    for x, y, found in zip(ids_a, ids_b, align_batch(ids_a, ids_b, table(a), table(b)), strict=True):
        ours, theirs = pieces_of(a, x), pieces_of(b, y)
        check_tiles(found, ours, theirs)
        text_a, text_b = (b"".join(p for p in side if p is not None) for side in (ours, theirs))
        if text_a == text_b and text_a:
            assert entries(found) == slowly(ours, theirs)
        covered += sum(len(p or b"") for s0, s1, _, _, exact in entries(found) if exact for p in ours[s0:s1])
        total += len(text_a)
    return covered / total


def languages() -> list[str]:
    return [
        path.read_text(encoding="utf-8")[:1000] for path in sorted((ASSETS / "data" / "udhr" / "txt").glob("*.txt"))
    ]


@needs_real
@pytest.mark.parametrize(("a", "b"), list(itertools.combinations_with_replacement(REAL, 2)))
def test_real_pairs(a, b):
    texts = [text for key, text in NASTY.items() if key != "sentencepiece's own"]
    assert len(languages()) == 20
    share = check_pair(a, b, [*texts, *languages()])
    if ("qwen3" in (a, b)) == (a == b == "qwen3"):
        assert share == 1.0
    else:  # it composes letters and marks, and the Vietnamese text comes apart into them
        assert 0.955 < share < 0.985


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(KEEP_TEXT, 2)))
def test_trained_pairs_that_keep_the_text(a, b):
    assert check_pair(a, b, [text for text in NASTY.values() if "▁" not in text]) == 1.0


def test_a_literal_sign_of_sentencepiece_costs_its_own_chunk():
    text = NASTY["sentencepiece's own"]
    a, b = tokenizer("bytes").encode(text).ids, tokenizer("pieces").encode(text).ids
    found = align(a, b, table("bytes"), table("pieces"))
    check_tiles(found, pieces_of("bytes", a), pieces_of("pieces", b))
    assert int((~found.exact).sum()) == 2  # <s>, and the sign


@settings(max_examples=80, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), names=st.permutations(KEEP_TEXT))
def test_any_texts_of_pairs_that_keep_them(texts, names):
    a, b = names[:2]
    texts = [text.replace("▁", "").replace("<", "") for text in texts]
    if any(texts):
        assert check_pair(a, b, texts) == 1.0


@settings(max_examples=80, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), names=st.permutations(list(MAKERS)))
def test_any_texts_of_any_pair(texts, names):
    a, b = names[:2]
    ids_a, ids_b = ([e.ids for e in tokenizer(name).encode_batch(texts)] for name in (a, b))
    together = align_batch(ids_a, ids_b, table(a), table(b))
    for x, y, found in zip(ids_a, ids_b, together, strict=True):
        assert entries(found) == entries(align(x, y, table(a), table(b))), "a batch changes nothing"
        if found.exact.all():
            turned = entries(align(y, x, table(b), table(a)))
            assert [(t0, t1, s0, s1, exact) for s0, s1, t0, t1, exact in entries(found)] == turned
        i = j = 0
        for s0, s1, t0, t1, exact in entries(found):
            assert (s0, t0) == (i, j)
            i, j = s1, t1
            if exact and not (table(a).kinds[x[s0]] == SPECIAL or table(b).kinds[y[t0]] == SPECIAL):
                ours = b"".join(table(a).token_bytes(k) for k in x[s0:s1])
                theirs = b"".join(table(b).token_bytes(k) for k in y[t0:t1])
                assert ours.removeprefix(b" ") == theirs.removeprefix(b" ")  # a dummy prefix may be on one side
        assert (i, j) == (len(x), len(y))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_ids(data):
    """As a model at a high temperature samples them: specials anywhere, halves of characters."""
    a, b = data.draw(st.permutations(KEEP_TEXT))[:2]
    x = data.draw(st.lists(st.integers(0, len(table(a)) + 2), max_size=25))
    y = data.draw(st.lists(st.integers(0, len(table(b)) + 2), max_size=25))
    found = align(x, y, table(a), table(b))
    i = j = 0
    for s0, s1, t0, t1, _ in entries(found):
        assert (s0, t0) == (i, j) and (s1 > s0 or t1 > t0)
        i, j = s1, t1
    assert (i, j) == (len(x), len(y))
    x = [index for index in x if index < len(table(a))]
    if table(a).prefix == "none":
        assert entries(align(x, x, table(a), table(a))) == [(k, k + 1, k, k + 1, True) for k in range(len(x))]


# Where one of them changed the text


def changed_bytes(text: str) -> list[tuple[int, int]]:
    """The byte ranges of the letters, with their marks, that NFC writes in another way."""
    clusters: list[str] = []
    for character in text:
        if clusters and (unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"):
            clusters[-1] += character
        else:
            clusters.append(character)
    found, at = [], 0
    for cluster in clusters:
        size = len(cluster.encode())
        if unicodedata.normalize("NFC", cluster) != cluster:
            found.append((at, at + size))
        at += size
    return found


def check_only_what_is_touched(a: str, b: str, text: str) -> int:
    """`b` composes and `a` does not: what is not exact has a changed letter in each of its runs."""
    x = tokenizer(a).encode(text, add_special_tokens=False).ids
    y = tokenizer(b).encode(text, add_special_tokens=False).ids
    found = align(x, y, table(a), table(b))
    ours, theirs = pieces_of(a, x), pieces_of(b, y)
    check_tiles(found, ours, theirs)
    at = [0, *itertools.accumulate(map(len, ours))]
    ranges = changed_bytes(text)
    odd = [(at[s0], at[s1]) for s0, s1, _, _, exact in entries(found) if not exact]
    for begin, end in odd:
        assert any(first < end and begin < last for first, last in ranges), text.encode()[begin:end]
    return len(odd)


def test_what_a_composing_tokenizer_leaves_exact():
    assert check_only_what_is_touched("bytes", "bytes, NFC", NASTY["ascii"] + NASTY["cjk"]) == 0
    assert check_only_what_is_touched("bytes", "bytes, NFC", NASTY["combining"]) > 0
    assert check_only_what_is_touched("bytes", "bytes, NFC", "सभी \u0958 मनुष्यों \u0959 को") == 2
    middle = "the people of the union " * 200
    assert check_only_what_is_touched("more bytes", "bytes, NFC", f"{middle}cafe\u0301 {middle}") == 1


@needs_real
@pytest.mark.parametrize("language", ["ben", "hin", "vie"])
def test_what_qwen_leaves_exact(language):
    text = (ASSETS / "data" / "udhr" / "txt" / f"{language}.txt").read_text(encoding="utf-8")
    assert check_only_what_is_touched("smollm2", "qwen3", text) > 0


def test_lower_case_costs_the_words_it_touches():
    text = "The people of the United States have seen the peace of Europe restored. " * 50
    x, y = tokenizer("bytes").encode(text).ids, tokenizer("bytes, lower case").encode(text).ids
    found = align(x, y, table("bytes"), table("bytes, lower case"))
    lost = [b"".join(pieces_of("bytes", x[s0:s1])) for s0, s1, _, _, exact in entries(found) if not exact]
    assert lost == [b"The", b" United States", b" E", *[b" The", b" United States", b" E"] * 49]


def check_stretches(a: bytes, b: bytes) -> int:
    """How many bytes lie in equal stretches, which are in order and really equal."""
    i = j = total = 0
    for p, q, length in equal_stretches(*(np.frombuffer(side, dtype=np.uint8).astype(np.uint16) for side in (a, b))):
        assert p >= i and q >= j and length > 0 and a[p : p + length] == b[q : q + length]
        i, j = p + length, q + length
        total += length
    return total


@settings(max_examples=300, deadline=None, derandomize=True)
@given(a=st.binary(max_size=40), b=st.binary(max_size=40), shared=st.binary(min_size=20, max_size=40))
def test_any_bytes(a, b, shared):
    check_stretches(a, b)
    assert check_stretches(a + shared, b + shared) >= len(shared)
    assert check_stretches(shared + a, shared + b) >= len(shared)
    assert check_stretches(a, a) == len(a)


def letters(count: int, seed: int) -> bytes:
    return bytes(random.Random(seed).choices(b"abcdefghij klmnop\n", k=count))


def test_stretches_of_long_texts():
    text = letters(300_000, seed=1)
    few = bytearray(text)
    for at in range(500, len(few), 1000):
        few[at] = ord("X")
    assert check_stretches(text, bytes(few)) == len(text) - 300
    shorter = b"".join(text[at : at + 999] for at in range(0, len(text), 1000))
    assert check_stretches(text, shorter) == len(shorter)
    # What only one side has, longer than any window, in front, inside and at the end.
    other = letters(20_000, seed=2)
    longer = other + text[:100_000] + other[::-1] + text[100_000:] + other
    assert check_stretches(text, longer) >= len(text) - 200
    assert check_stretches(b"?" + text, longer) >= len(text) - 200


def test_stretches_where_nothing_or_everything_repeats():
    assert check_stretches(b"a" * 100_000, b"b" * 100_000) == 0
    assert check_stretches(b"a" * 100_000, b"a" * 50_000 + b"b" + b"a" * 50_000) == 100_000
    upper = letters(100_000, seed=3).upper()
    spaces = sum(upper.count(byte) for byte in b" \n")
    assert check_stretches(upper, upper.lower()) == spaces
    prose = letters(100_000, seed=4)
    assert check_stretches(prose.replace(b" ", b"   "), prose) > 0.999 * len(prose), "one side is longer throughout"
    lines = b"the same line again\n" * 5_000
    assert check_stretches(lines, lines.replace(b"same", b"SAME")) == len(lines) - 4 * 5_000


def test_a_megabyte_on_one_line():
    text = "Lorem ipsum dolor sit amet " * 38_000 + "end"
    x, y = tokenizer("bytes").encode(text).ids, tokenizer("pieces").encode(text).ids
    found = align(x, y, table("bytes"), table("pieces"))
    assert len(text) > 1_000_000 and found.exact.sum() == len(found) - 1  # <s>
    assert int(table("bytes").lengths[x].sum()) == len(text)
