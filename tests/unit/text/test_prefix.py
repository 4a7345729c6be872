"""A teacher's tokens in a student's: cut by the student's own tokenizer, where a row can begin."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from potstill.shipped import locate
from potstill.text import TokenTable, plain_backend, prefix_table, vocab_map
from potstill.text.prefix import segmented

LETTERS = ["Ġ", *"abcdefghijklmnopqrstuvwxyz"]


def byte_level(*merges: str) -> Tokenizer:
    """A byte-level tokenizer with these merges, in their order."""
    pairs = [tuple(merge.split("+")) for merge in merges]
    words = [*LETTERS, *(a + b for a, b in pairs)]
    tok = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tok


def test_the_tokenizer_cuts_and_not_the_longest_match():
    """b+c comes before a+b: `abc` is a, bc, although it begins with `ab`."""
    tok = byte_level("b+c", "a+b")
    table = TokenTable.from_tokenizer(tok, cache=None)
    assert [table.token_bytes(i) for i in table.longest_words(b"abc")] == [b"ab", b"c"]
    found = segmented(tok, table, [b"abc", b"ab"])
    assert [[table.token_bytes(i) for i in ids] for ids in found] == [[b"a", b"bc"], [b"ab"]]


def test_a_token_takes_part_only_where_the_student_would_cut_it():
    """After ` t` come the rests of ` ta` and ` ton`; not that of ` the`, which the student writes in one."""
    student = byte_level("Ġ+t", "h+e", "Ġt+he")
    teacher = byte_level("Ġ+t", "h+e", "Ġt+he", "Ġt+a", "o+n", "Ġt+on", "Ġthe+n")
    ours, theirs = (TokenTable.from_tokenizer(tok, cache=None) for tok in (student, teacher))
    table = prefix_table(theirs, ours, vocab_map(theirs, ours), student)
    name = {theirs.token_bytes(i): i for i in range(len(theirs))}
    said = {ours.token_bytes(i): i for i in range(len(ours))}
    node, then = (int(x[0]) for x in table.at(np.array([name[b" ta"]]), np.array([2])))
    span = slice(table.begin[node], table.begin[node + 1])
    assert dict(zip(table.token[span].tolist(), table.then[span].tolist(), strict=True)) == {
        name[b" ta"]: said[b"a"],
        name[b" ton"]: said[b"o"],
    }
    assert then == said[b"a"]
    # The actual token may still be cut there; what it would be counted for is then nothing.
    assert [int(x[0]) for x in table.at(np.array([name[b" the"]]), np.array([2]))] == [node, -1]
    assert table.first[name[b" then"]] == said[b" the"] and table.first[name[b" the"]] == said[b" the"]


@pytest.mark.parametrize("name", ["bytes-2k", "pieces-1k"])
def test_shipped_tokenizers_cut_words_as_in_a_text(name):
    """Also where a prefix is made up, with and without a space before, and half a character."""
    tok = plain_backend(Tokenizer.from_file(f"{locate('shipped:tokenizers')}/{name}/tokenizer.json"))
    table = TokenTable.from_tokenizer(tok, cache=None)
    contents = [b" governments", b"ments", "naïve".encode(), b", and", b" ", b"\xe6\x97", b"2024"]
    for content, ids in zip(contents, segmented(tok, table, contents), strict=True):
        assert b"".join(table.token_bytes(i) for i in ids) == content
    whole = tok.encode("The governments", add_special_tokens=False).ids
    (cut,) = segmented(tok, table, [b" governments"])
    assert whole[-len(cut) :] == cut


def test_padding_and_truncation_that_a_caller_switched_on_do_not_count():
    tok = byte_level("a+b")
    tok.enable_truncation(1)
    tok.enable_padding(length=9)
    table = TokenTable.from_tokenizer(byte_level("a+b"), cache=None)
    assert segmented(plain_backend(tok), table, [b"abab"]) == segmented(byte_level("a+b"), table, [b"abab"])
    assert tok.truncation is not None
