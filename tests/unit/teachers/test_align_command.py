"""What `potstill align` shows: boxes, pages, counts and the worst places."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer
from trained_tokenizers import shipped_text, table, tokenizer, trained

from potstill.report.alignment import Counts, count, encode, show_corpus, show_text
from potstill.text import align
from potstill.types import PotstillError

NAMES = ("student", "teacher")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("POTSTILL_CACHE", str(tmp_path / "cache"))


def pair() -> list:
    return [tiny_tokenizer(merges=[("a", "b")]), trained("pieces")]


def test_boxes(capsys):
    counts = show_text(NAMES, pair(), "abé a\t日")
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "        ┏━━━━━━━┳━━━┳━━━━┳━━━━┳━━━┳━┳━━━━┳━━━━┳━━━━┓",
        "student ┃<|bos|>┃ab ┃\\xc3┃\\xa9┃·│a┃⇥┃\\xe6┃\\x97┃\\xa5┃",
        "teacher ┃<s>    ┃·ab┃\\xc3┃\\xa9┃·a ┃⇥┃\\xe6┃\\x97┃\\xa5┃",
        "        ┗━━━━━━━┻━━━┻━━━━┻━━━━┻━━━┻━┻━━━━┻━━━━┻━━━━┛",
    ]
    assert counts.bytes == counts.bytes_in_chunks == len("abé a\t日".encode())
    assert counts.student_tokens == counts.tokens_in_chunks == len(pair()[0]("abé a\t日").input_ids)
    assert "bytes in chunks      10 of 10, 100.00%" in said


def test_boxes_fit_the_terminal(capsys):
    show_text(("s" * 50, "t"), [trained("bytes"), trained("pieces")], " ".join(shipped_text()[5:9])[:900])
    lines = [line for line in capsys.readouterr().out.splitlines() if "━" in line or "┃" in line]
    assert len(lines) > 40 and len(lines) % 4 == 0 and max(map(len, lines)) <= 60
    for top, ours, theirs, bottom in zip(*(lines[k::4] for k in range(4)), strict=True):
        assert len(top) == len(ours) == len(theirs) == len(bottom) and ours.startswith("…" + "s" * 23)
        assert [at for at, sign in enumerate(top) if sign in "┏┳┓"] == [
            at for at, sign in enumerate(ours) if sign == "┃"
        ]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.outside += [named[key] for key in ("src", "href") if key in named]
        if tag == "div" and "class" in named:
            self.kinds.append(named["class"].removeprefix("chunk "))

    def handle_data(self, data):
        self.texts.append(data)


def test_a_page(tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    counts = show_text(NAMES, [trained("bytes"), trained("bytes, lower case")], "the <b>Union</b> &c.", html=out)
    page = Page(out.read_text(encoding="utf-8"))
    assert page.kinds.count("one") == counts.one_to_one and page.kinds.count("not") == 1
    assert counts.chunks == len(page.kinds) - 1 and not page.outside
    assert "<b>" not in out.read_text(encoding="utf-8")
    assert f"page: {out}" in capsys.readouterr().out
    with pytest.raises(PotstillError, match="is a folder: name a file"):
        show_text(NAMES, pair(), "a", html=tmp_path)
    with pytest.raises(PotstillError, match="choose another place"):
        show_text(NAMES, pair(), "a", html=out / "below" / "a.html")


def test_a_corpus(tmp_path, capsys):
    texts = [(f"text {number}", text) for number, text in enumerate(shipped_text()[:150])]
    texts[100] = ("the odd one", "plain words and THE LOUDEST OF ALL THE WORDS and plain words")
    toks = [trained("bytes"), trained("bytes, lower case")]
    counts = show_corpus(NAMES, toks, iter(texts), worst=3, html=tmp_path / "page.html", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["texts"] == counts.texts == 150 and len(said["worst"]) == 3
    sizes = [place["bytes"] for place in said["worst"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    odd = next(place for place in said["worst"] if place["where"] == "the odd one")
    assert odd["student"].replace("|", "").startswith("·THE·LOUDEST") and odd["teacher"].replace("|", "").startswith(
        "·the·loudest"
    )
    assert 0.8 < said["bytes_covered"] < 1 and 0 < said["chunks_per_token"] < 1
    assert "the odd one" in (tmp_path / "page.html").read_text(encoding="utf-8")
    one_by_one = Counts()
    for _, text in texts:
        x, y = (tok.encode(text).ids for tok in toks)
        one_by_one += count(align(x, y, table("bytes"), table("bytes, lower case")), x, table("bytes"))
    assert one_by_one == counts


def test_a_corpus_in_words(capsys):
    show_corpus(NAMES, [trained("bytes"), trained("pieces")], [("here", "the union"), ("there", "")])
    said = capsys.readouterr().out
    assert (
        "texts                2\n" in said
        and "bytes in chunks      9 of 9, 100.00%" in said
        and "not exact" not in said
    )
    with pytest.raises(PotstillError, match="there is no text to align"):
        show_corpus(NAMES, pair(), [])


def test_counts_by_hand():
    made = tokenizer("bytes")
    x = [made.token_to_id(letter) for letter in "abc"]
    found = align(x, x, table("bytes"), table("bytes"))
    assert count(found, x, table("bytes")) == Counts(1, 3, 3, 3, 3, 3, 3, 3)
    assert count(align([], [], table("bytes"), table("bytes")), [], table("bytes")) == Counts(texts=1)
    half = Counts(
        texts=1,
        student_tokens=4,
        teacher_tokens=3,
        chunks=2,
        one_to_one=1,
        tokens_in_chunks=3,
        bytes=10,
        bytes_in_chunks=5,
    )
    assert half.shares() == {"chunks_per_token": 0.5, "tokens_exact": 0.75, "bytes_covered": 0.5, "one_to_one": 0.5}
    assert (half + half).shares() == half.shares() and (half + half).bytes == 20
    beyond = np.array([*x, 10**6])
    assert count(align(beyond, x, table("bytes"), table("bytes")), beyond, table("bytes")).bytes == 3


def test_text_that_is_no_text():
    for tok in pair():
        with pytest.raises(PotstillError, match="--text: holds half of a surrogate pair"):
            encode(tok, ["\ud800"], "--text")


def test_json_of_one_text(capsys, tmp_path):
    show_text(NAMES, [trained("bytes"), trained("bytes")], "union", as_json=True, html=Path(tmp_path / "a.html"))
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_covered"] == said["one_to_one"] == 1.0 and said["bytes"] == 5
