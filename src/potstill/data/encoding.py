"""Pieces of text to Examples: tokens, what of them is supervised, and the bytes they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from potstill.data.examples import Piece
from potstill.types import Example, PotstillError

Encode = Callable[[Sequence[Piece]], "list[Encoded]"]


@dataclass(frozen=True)
class Encoded:
    """A piece after tokenizing. One with nothing supervised in it is not kept, and has no example."""

    piece: Piece
    kept: bool
    length: int  # in tokens, after cutting
    cut: int  # tokens beyond max_length
    example: Example | None = None
    further: tuple[Encoded, ...] = ()  # evaluation: what is beyond max_length, in windows of their own
    goes_on: bool = False  # is one of these
    cut_supervised: int = 0  # of the tokens beyond max_length, those that were to be learnt


@dataclass(frozen=True)
class Tokens:
    """A piece's tokens. L of them."""

    ids: npt.NDArray[np.int32]  # [L]
    supervised: npt.NDArray[np.bool_]  # [L]
    sizes: npt.NDArray[np.int64]  # [L]; bytes that each supervised one stands for, and no other does
    ends: npt.NDArray[np.int64] | None = None  # [L]; as Example has them

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: Any) -> Tokens:
        return Tokens(*(None if part is None else part[places] for part in vars(self).values()))  # type: ignore[arg-type]


class Encoder:
    """Tokenizes pieces, many at once.

    What is longer than max_length is cut and counted. For evaluation nothing is: every token of the text is scored, the first
    too, in as many windows as it takes, and nothing but the text, whatever the tokenizer puts around it: else bits per byte of
    two tokenizers would be of different bytes. `ends`: examples know where tokens end.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        append_eos: bool,
        evaluation: bool = False,
        ends: bool = False,
        key: str = "data",
    ) -> None:
        if not tokenizer.is_fast:
            raise PotstillError(
                f"the tokenizer {tokenizer.name_or_path} has no fast version (tokenizer.json), which is needed to tell "
                "which characters a token stands for; set student.tokenizer to one that has"
            )
        self._backend = untrimmed(tokenizer.backend_tokenizer)
        self._max_length = max_length
        self._key = key  # of max_length, for messages
        self._evaluation = evaluation
        self._ends = ends
        self._eos: int | None = tokenizer.eos_token_id if append_eos and not evaluation else None
        self._start: int | None = _start(tokenizer) if evaluation else None
        added = tokenizer.added_tokens_decoder
        self._special = np.zeros(max([len(tokenizer), *(i + 1 for i in added)]), dtype=np.bool_)
        self._special[[i for i, token in added.items() if token.special]] = True
        mask = self._backend.encode("a").special_tokens_mask
        self._before = mask.index(0)  # special tokens the tokenizer itself puts before a text, and after it
        self._after = mask[::-1].index(0)

    def __call__(self, pieces: Sequence[Piece]) -> list[Encoded]:
        encoded: list[Encoded | None] = [None] * len(pieces)
        for template in (False, True):
            chosen = [i for i, piece in enumerate(pieces) if piece.template == template and not piece.dropped]
            encodings = self._backend.encode_batch([pieces[i].text for i in chosen], add_special_tokens=not template)
            for i, encoding in zip(chosen, encodings, strict=True):
                encoded[i] = self._one(pieces[i], encoding)
        return [e or Encoded(piece, False, 0, 0) for e, piece in zip(encoded, pieces, strict=True)]

    def _one(self, piece: Piece, encoding: tokenizers.Encoding) -> Encoded:
        tokens = self._tokens(piece, encoding)
        cut = max(0, len(tokens) - self._max_length)
        if not cut:
            return self._encoded(piece, tokens)
        if not self._evaluation:
            lost = int(tokens.supervised[self._max_length :].sum())
            return replace(self._encoded(piece, tokens.at(slice(self._max_length)), cut), cut_supervised=lost)
        windows = [self._encoded(piece, window) for window in self._windows(piece, tokens)]
        if not windows:
            return Encoded(piece, False, len(tokens), 0)
        return replace(windows[0], further=tuple(replace(window, goes_on=True) for window in windows[1:]))

    def _tokens(self, piece: Piece, encoding: tokenizers.Encoding) -> Tokens:
        """All of them, and what is supervised."""
        ids = np.array(encoding.ids, dtype=np.int32)
        spans = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(ids)).reshape(-1, 2)
        before, after = (0, 0) if piece.template else (self._before, self._after)
        text_end = len(ids) - after
        spans[text_end:] = len(piece.text)
        eos = None if piece.template else self._eos
        if self._evaluation or not piece.last:
            # Of a text that goes on in the next piece the tokenizer does not know that this is not its end.
            ids, spans = ids[:text_end], spans[:text_end]
        elif eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
            spans = np.append(spans, [[len(piece.text)] * 2], axis=0)
        supervised = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in piece.spans or ((0, len(piece.text)),):
            # A token belongs to where it begins: one that straddles the end of a prompt is the prompt's. It is scored all the
            # same: how many bytes an answer has must not depend on the tokenizer.
            supervised |= (spans[:, 0] >= begin) & (spans[:, 0] < end)
            if self._evaluation and begin < end:
                supervised |= (spans[:, 0] < begin) & (spans[:, 1] > begin)
        if not piece.template:
            supervised[text_end:] = True
        if self._start is not None and before == 0 and supervised[:1].any():
            ids, supervised = np.insert(ids, 0, self._start), np.insert(supervised, 0, False)
            spans = np.insert(spans, 0, 0, axis=0)
        supervised[: max(1, before)] = False
        # A template's marks are not text. Where they stand in a text of its own they are as any other part of it.
        marks = self._special[ids] if piece.template or not self._evaluation else np.zeros_like(supervised)
        sizes = np.zeros(len(ids), dtype=np.int64)
        sizes[supervised & ~marks] = _bytes_each(
            piece, spans[supervised & ~marks], spans[marks] if self._evaluation else None
        )
        return Tokens(ids, supervised, sizes, _byte_ends(piece.text, spans[:, 1]) if self._ends else None)

    def _windows(self, piece: Piece, tokens: Tokens) -> Iterator[Tokens]:
        """All that is supervised, each token once, with at least half a window before it where there is as much. Each window
        begins as the text does, where that is with bos."""
        begins = 0 if piece.template else self._before
        if not begins and len(tokens) and tokens.ids[0] == self._start and not tokens.supervised[0]:
            begins = 1
        room = self._max_length - begins
        context = room // 2
        if room - context < 1 or begins + context < 1:
            raise PotstillError(
                f"{self._key}.max_length: {self._max_length} leaves no room for a token and one before it"
            )
        places = np.arange(len(tokens))
        end = 0
        while len(left := np.flatnonzero(tokens.supervised[end:])):
            first = end + int(left[0])
            begin = begins if first < self._max_length else first - context
            end = min(len(tokens), begin + room)
            window = tokens.at(np.concatenate([places[:begins], places[begin:end]]))
            scored = places[: len(window)] >= first - begin + begins
            yield replace(window, supervised=window.supervised & scored, sizes=np.where(scored, window.sizes, 0))

    def _encoded(self, piece: Piece, tokens: Tokens, cut: int = 0) -> Encoded:
        if not tokens.supervised.any():
            return Encoded(piece, False, len(tokens), cut)
        example = Example(
            key=piece.key,
            text=piece.text,
            ids=tokens.ids,
            supervised=tokens.supervised,
            supervised_bytes=int(tokens.sizes.sum()),
            messages=piece.messages,
            tools=piece.tools,
            columns=piece.columns,
            spans=piece.spans,
            ends=tokens.ends,
            source=piece.source,
        )
        return Encoded(piece, True, len(tokens), cut, example)


class LengthsOnly:
    """Encodes without keeping examples, and no text twice: a layout depends on lengths alone."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[bytes, tuple[bool, int, int]] = {}

    def __call__(self, pieces: Sequence[Piece]) -> list[Encoded]:
        digests = [_digest(piece) for piece in pieces]
        new = {digest: piece for digest, piece in zip(digests, pieces, strict=True) if digest not in self._known}
        for digest, encoded in zip(new, self._encode(list(new.values())), strict=True):
            self._known[digest] = (encoded.kept, encoded.length, encoded.cut)
        return [Encoded(_NO_TEXT, *self._known[digest]) for digest in digests]


def _digest(piece: Piece) -> bytes:
    """Of what is encoded. A piece's key does not do: it is of a chat before its template."""
    flags = repr((piece.spans, piece.template, piece.last, piece.dropped))
    return hashlib.blake2b(f"{flags}\n{piece.text}".encode(), digest_size=16).digest()


_NO_TEXT = Piece("", "")


def _start(tokenizer: Any) -> int:
    """What stands before a text's first token, so that it can be scored too: bos, or what is most like it."""
    names = ("bos", "eos", "cls", "sep", "pad", "unk")
    return int(next((i for name in names if (i := getattr(tokenizer, f"{name}_token_id")) is not None), 0))


def _bytes_each(
    piece: Piece, spans: npt.NDArray[np.int64], marks: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """UTF-8 bytes of what is to be supervised that the token of each character span is the first to cover. Of several tokens
    of one character the first has it. With `marks`, the spans of a template's own tokens, every byte outside them counts: what
    a tokenizer leaves out (accents that it composed, spaces that it joined) belongs to the token after it, or to the last."""
    wanted = np.zeros(len(piece.text), dtype=np.bool_)
    for begin, end in piece.spans or ((0, len(piece.text)),):
        wanted[begin:end] = True
    for begin, end in () if marks is None else marks:
        wanted[begin:end] = False
    upto = _bytes_before(piece.text, wanted)
    order = np.argsort(spans[:, 0], kind="stable")
    begins, ends = spans[order].T
    reached = np.maximum.accumulate(ends)
    known = np.concatenate([[0], reached[:-1]])[: len(order)]
    if marks is not None and len(order):
        reached[-1] = len(piece.text)
        begins = known
    sizes = np.empty(len(order), dtype=np.int64)
    sizes[order] = upto[reached] - upto[np.minimum(np.maximum(begins, known), reached)]
    return sizes


def _byte_ends(text: str, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ends of tokens in characters, as ends in UTF-8 bytes. Of several tokens of one character each ends where it does."""
    ends = np.maximum.accumulate(ends)
    return ends if text.isascii() else _bytes_before(text, None)[ends]


def _bytes_before(text: str, wanted: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    """How many UTF-8 bytes stand before each character, and before the end. Only characters that are `wanted` count."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    result: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes if wanted is None else sizes * wanted)])
    return result


def untrimmed(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy whose offsets are true: many byte-level tokenizers leave white space out of them, and then it cannot be
    told whether a token begins before or after the end of a prompt."""
    # In the JSON as it is: taking a large vocabulary apart and together again takes most of a second. No token can hold this,
    # for its quotes would be escaped.
    copy = tokenizers.Tokenizer.from_str(backend.to_str().replace('"trim_offsets":true', '"trim_offsets":false'))
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy
