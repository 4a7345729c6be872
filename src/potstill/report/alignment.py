"""`potstill align`: two tokenizations over one another, in the terminal or as a page, and what a corpus says of a pair."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from potstill.files import write_text
from potstill.text.align import Alignment, align, align_batch
from potstill.text.tokens import ABSENT, SPECIAL, TokenTable
from potstill.types import PotstillError

SIGNS = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\0": "␀", "\x1b": "␛"})
STYLES = {"one": "green", "many": "yellow", "not": "bold red"}  # 1:1 · n:m · not exact
BATCH, LONGEST, LABEL = 64, 160, 24  # texts aligned at once; characters shown of a place, and of a name


@dataclass(frozen=True)
class Counts:
    """What an alignment amounts to; sums over texts with +."""

    texts: int = 0
    student_tokens: int = 0
    teacher_tokens: int = 0
    chunks: int = 0  # exact ones
    one_to_one: int = 0  # of them
    tokens_in_chunks: int = 0  # the student's
    bytes: int = 0  # of the text, as the student's tokens spell it
    bytes_in_chunks: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})

    def shares(self) -> dict[str, float]:
        return {
            "chunks_per_token": self.chunks / max(self.student_tokens, 1),
            "tokens_exact": self.tokens_in_chunks / max(self.student_tokens, 1),
            "bytes_covered": self.bytes_in_chunks / self.bytes if self.bytes else 1.0,
            "one_to_one": self.one_to_one / max(self.chunks, 1),
        }


def count(alignment: Alignment, student_ids: npt.ArrayLike, table: TokenTable) -> Counts:
    ids = np.asarray(student_ids, dtype=np.int64)
    before = np.append(0, np.cumsum(_lengths(ids, table)))
    wide = alignment.student_end - alignment.student_start
    one = (wide == 1) & (alignment.teacher_end - alignment.teacher_start == 1)
    covered = (before[alignment.student_end] - before[alignment.student_start])[alignment.exact]
    return Counts(
        texts=1,
        student_tokens=len(ids),
        teacher_tokens=int(alignment.teacher_end[-1]) if len(alignment) else 0,
        chunks=int(alignment.exact.sum()),
        one_to_one=int((one & alignment.exact).sum()),
        tokens_in_chunks=int(wide[alignment.exact].sum()),
        bytes=int(before[-1]),
        bytes_in_chunks=int(covered.sum()),
    )


def _lengths(ids: npt.NDArray[np.int64], table: TokenTable) -> npt.NDArray[np.int32]:
    """Bytes of the text that each token of a sequence stands for."""
    known = np.minimum(ids, len(table) - 1)
    dummy = table.dummies(known, np.zeros(1, dtype=np.int64))
    return np.asarray((table.lengths[known] - dummy) * (ids < len(table)))


@dataclass(frozen=True)
class Chunk:
    """One entry, as it is shown."""

    student: tuple[str, ...]
    teacher: tuple[str, ...]
    kind: str  # of STYLES


@dataclass(frozen=True, order=True)
class Place:
    """Something that is not exact: the larger, the worse."""

    bytes: int
    where: str
    student: str
    teacher: str


def show_text(
    names: Sequence[str], toks: Sequence[Any], text: str, *, html: Path | None = None, as_json: bool = False
) -> Counts:
    """Print how two tokenizers (of these names) cut `text`, or write it to the page `html`; the counts follow either way."""
    tables = [TokenTable.from_tokenizer(tok) for tok in toks]
    student, teacher = (encode(tok, [text], "--text")[0] for tok in toks)
    alignment = align(student, teacher, *tables)
    counts = count(alignment, student, tables[0])
    chunks = list(_chunks(alignment, student, teacher, tables))
    console = Console(soft_wrap=True, highlight=False)
    if html is not None:
        write_page(html, _page(names, chunks, counts))
    if as_json:
        print(json.dumps({**asdict(counts), **counts.shares()}))
        return counts
    if html is None:
        for line in _boxes(names, chunks, Console().width):
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    else:
        console.print(f"page: {html}", markup=False)
    _print_counts(console, names, counts)
    return counts


def show_corpus(
    names: Sequence[str],
    toks: Sequence[Any],
    texts: Iterable[tuple[str, str]],
    *,
    worst: int = 10,
    html: Path | None = None,
    as_json: bool = False,
) -> Counts:
    """Print what many texts, each with where it is from, say of a pair: counts, shares, and the worst places."""
    tables = [TokenTable.from_tokenizer(tok) for tok in toks]
    counts, places = Counts(), list[Place]()
    progress = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=progress, transient=True, disable=not progress.is_terminal) as bar:
        task = bar.add_task("", said="reading")
        texts = iter(texts)
        while batch := list(islice(texts, BATCH)):
            ours, theirs = ([encode(tok, [text], where)[0] for where, text in batch] for tok in toks)
            aligned = align_batch(ours, theirs, *tables)
            for (where, _), student, teacher, found in zip(batch, ours, theirs, aligned, strict=True):
                counts += count(found, student, tables[0])
                places = heapq.nlargest(worst, [*places, *_places(where, found, student, teacher, tables, worst)])
            bar.update(task, said=f"{counts.texts:,} texts, {counts.student_tokens:,} tokens")
    if not counts.texts:
        raise PotstillError("there is no text to align")
    if html is not None:
        write_page(html, _page(names, [], counts, places))
    if as_json:
        print(
            json.dumps({**asdict(counts), **counts.shares(), "worst": [asdict(p) for p in places]}, ensure_ascii=False)
        )
        return counts
    console = Console(soft_wrap=True, highlight=False)
    _print_counts(console, names, counts)
    for place in places:
        console.print(f"\n{place.where}: {place.bytes:,} bytes not exact", markup=False)
        console.print(f"  {names[0]}  {place.student}\n  {names[1]}  {place.teacher}", markup=False)
    return counts


def encode(tok: Any, texts: Sequence[str], where: str) -> list[list[int]]:
    """Ids as the tokenizer gives them for a whole text, its bos and eos included."""
    try:
        if isinstance(tok, tokenizers.Tokenizer):
            return [encoding.ids for encoding in tok.encode_batch(list(texts))]
        return [list(ids) for ids in tok(list(texts), truncation=False, padding=False, verbose=False).input_ids]
    except (UnicodeEncodeError, TypeError) as error:
        raise PotstillError(
            f"{where}: holds half of a surrogate pair, which is no character; repair the text"
        ) from error


def shown_tokens(ids: Sequence[int], table: TokenTable) -> tuple[str, ...]:
    """Tokens for the eye: spaces and line ends as signs, bytes that are no character as hexadecimal."""
    shown = []
    for index in ids:
        if index >= len(table) or table.kinds[index] == ABSENT:
            shown.append(f"[{index}]")
        elif table.kinds[index] == SPECIAL:
            shown.append(table.contents[index])
        else:
            text = table.token_bytes(index).decode("utf-8", "backslashreplace").translate(SIGNS)
            shown.append("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))
    return tuple(shown)


def _chunks(
    alignment: Alignment, student: Sequence[int], teacher: Sequence[int], tables: Sequence[TokenTable]
) -> Iterator[Chunk]:
    columns = (alignment.student_start, alignment.student_end, alignment.teacher_start, alignment.teacher_end)
    for s0, s1, t0, t1, exact in zip(*(column.tolist() for column in columns), alignment.exact.tolist(), strict=True):
        kind = "not" if not exact else "one" if s1 - s0 == t1 - t0 == 1 else "many"
        yield Chunk(shown_tokens(student[s0:s1], tables[0]), shown_tokens(teacher[t0:t1], tables[1]), kind)


def _places(
    where: str,
    alignment: Alignment,
    student: Sequence[int],
    teacher: Sequence[int],
    tables: Sequence[TokenTable],
    most: int,
) -> Iterator[Place]:
    sizes = []
    for ids, begin, end, table in (
        (student, alignment.student_start, alignment.student_end, tables[0]),
        (teacher, alignment.teacher_start, alignment.teacher_end, tables[1]),
    ):
        before = np.append(0, np.cumsum(_lengths(np.asarray(ids, dtype=np.int64), table)))
        sizes.append(before[end] - before[begin])
    size = np.maximum(*sizes) * ~alignment.exact
    for at in islice(np.argsort(-size, kind="stable").tolist(), most):
        if size[at]:
            parts = (
                "|".join(shown_tokens(ids[int(begin[at]) : int(end[at])], table))
                for ids, begin, end, table in (
                    (student, alignment.student_start, alignment.student_end, tables[0]),
                    (teacher, alignment.teacher_start, alignment.teacher_end, tables[1]),
                )
            )
            yield Place(
                int(size[at]), where, *(part if len(part) <= LONGEST else f"{part[:LONGEST]}…" for part in parts)
            )


def _boxes(names: Sequence[str], chunks: Sequence[Chunk], width: int) -> Iterator[Text]:
    """Rows of chunks in boxes, the student's tokens above the teacher's, as many to a row as fit."""
    names = [name if len(name) <= LABEL else f"…{name[1 - LABEL :]}" for name in names]
    label = max(map(cell_len, names)) + 1
    row: list[tuple[Chunk, int]] = []
    used = label + 1
    for chunk in chunks:
        wide = max(cell_len("│".join(chunk.student)), cell_len("│".join(chunk.teacher)), 1)
        if row and used + wide + 1 > width:
            yield from _box(names, row, label)
            row, used = [], label + 1
        row.append((chunk, wide))
        used += wide + 1
    if row:
        yield from _box(names, row, label)


def _box(names: Sequence[str], row: Sequence[tuple[Chunk, int]], label: int) -> Iterator[Text]:
    yield Text(" " * label + "┏" + "┳".join("━" * wide for _, wide in row) + "┓", style="dim")
    for name, side in zip(names, ("student", "teacher"), strict=True):
        line = Text(name.ljust(label), style="dim")
        for chunk, wide in row:
            tokens = "│".join(chunk.student if side == "student" else chunk.teacher)
            line.append("┃", style="dim")
            line.append(tokens + " " * (wide - cell_len(tokens)), style=f"not dim {STYLES[chunk.kind]}")
        yield line.append("┃", style="dim")
    yield Text(" " * label + "┗" + "┻".join("━" * wide for _, wide in row) + "┛", style="dim")


def _print_counts(console: Console, names: Sequence[str], counts: Counts) -> None:
    for key, value in _facts(names, counts):
        console.print(f"{key:<20} {value}", markup=False)


def _facts(names: Sequence[str], counts: Counts) -> list[tuple[str, str]]:
    shares = counts.shares()
    return [
        ("texts", f"{counts.texts:,}"),
        ("student's tokens", f"{counts.student_tokens:,} ({names[0]})"),
        ("teacher's tokens", f"{counts.teacher_tokens:,} ({names[1]})"),
        ("exact chunks", f"{counts.chunks:,}, {shares['chunks_per_token']:.3f} a token of the student's"),
        ("one to one", f"{counts.one_to_one:,}, {shares['one_to_one']:.1%} of the chunks"),
        ("tokens in chunks", f"{counts.tokens_in_chunks:,}, {shares['tokens_exact']:.2%} of the student's"),
        ("bytes in chunks", f"{counts.bytes_in_chunks:,} of {counts.bytes:,}, {shares['bytes_covered']:.2%}"),
    ]


def write_page(path: Path, page: str) -> None:
    """With the folders above it."""
    if path.is_dir():
        raise PotstillError(f"{path} is a folder: name a file for the page, such as {path / 'align.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PotstillError(f"cannot write {path}: {error.strerror}; choose another place for the page") from None
    write_text(path, page)


STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --ink: #1d1b19; --quiet: #68625b; --rule: #cfc8be; --one: #00805e;
  --many: #8a6a00; --not: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #15161a; --ink: #e9e6e1; --quiet: #a29c94; --rule: #44474f;
  --one: #36c79c; --many: #e3c24d; --not: #ff8a80; } }
body { margin: 2rem auto; max-width: 78rem; padding: 0 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
.chunk { display: inline-block; border: 1px solid var(--rule); border-radius: 4px; margin: 2px; padding: 0 4px;
  vertical-align: top; font: 14px/1.5 ui-monospace, monospace; white-space: pre-wrap; }
.chunk div { min-height: 1.5em; min-width: .6em; } .one { color: var(--one); } .many { color: var(--many); }
.not { color: var(--not); border-style: dashed; } i { color: var(--rule); font-style: normal; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top; } th { color: var(--quiet); font-weight: 500; }
code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def _page(names: Sequence[str], chunks: Sequence[Chunk], counts: Counts, places: Sequence[Place] = ()) -> str:
    title = f"{escape(names[0])} and {escape(names[1])}"
    boxes = "\n".join(
        f'<div class="chunk {chunk.kind}"><div>{_tokens(chunk.student)}</div><div>{_tokens(chunk.teacher)}</div></div>'
        for chunk in chunks
    )
    facts = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in _facts(names, counts))
    rows = "".join(
        f"<tr><td>{escape(p.where)}</td><td>{p.bytes}</td><td><code>{escape(p.student)}</code><br>"
        f"<code>{escape(p.teacher)}</code></td></tr>"
        for p in places
    )
    worst = (
        f"<h2>The worst places</h2><table><tr><th>where</th><th>bytes</th><th>tokens</th></tr>{rows}</table>"
        if rows
        else ""
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title} · potstill</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        "<p>The student's tokens stand above the teacher's. A box is a chunk: <span class=\"one\">one token each</span>, "
        '<span class="many">several</span>, <span class="not">not exact</span>.</p>\n'
        f"<section>{boxes}</section>\n<table>{facts}</table>\n{worst}</body></html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def _tokens(tokens: Sequence[str]) -> str:
    return "<i>│</i>".join(escape(token) for token in tokens)
