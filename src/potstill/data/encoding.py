"""Examples in a tokenizer's tokens: what of them is supervised, and the bytes they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from potstill.config.training import TokenWeightsConfig
from potstill.data.weighing import weigh
from potstill.types import Example, PotstillError

Encode = Callable[[Sequence[Example]], "list[Encoded]"]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Encoded:
    """An example after tokenizing."""

    raw: Example  # as it came
    example: Example | None  # in tokens; None: nothing is supervised in it
    length: int  # in tokens, after cutting
    cut: int = 0  # tokens beyond max_length …
    cut_supervised: int = 0  # … and those of them that were to be learnt
    supervised: int = 0  # tokens that are learnt
    further: tuple[Encoded, ...] = ()  # evaluation: what is beyond max_length, in windows of their own
    continues: bool = False  # is one of these
    here: bool = True  # False: another rank tokenized it, and `example` has no tokens yet

    @property
    def kept(self) -> bool:
        return self.example is not None


@dataclass(frozen=True)
class Tokens:
    """A text's tokens. L of them."""

    ids: npt.NDArray[np.int32]  # [L]
    supervised: Mask  # [L]
    sizes: Ints  # [L]; bytes that each supervised one stands for, and no other does
    ends: Ints | None  # [L]; as Example has them

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: Any) -> Tokens:
        return Tokens(*(None if part is None else part[places] for part in vars(self).values()))  # type: ignore[arg-type]


class Encoder:
    """Tokenizes examples, many at once.

    What is longer than max_length is cut and counted. For evaluation nothing is: every token of the text is scored, the first
    too, in as many windows as it takes, and nothing but the text, whatever the tokenizer puts around it: else bits per byte of
    two tokenizers would be of different bytes. `ends`: examples know where tokens end. `token_weights`: what each counts.
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
        token_weights: TokenWeightsConfig | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise PotstillError(
                f"the tokenizer {tokenizer.name_or_path} has no fast version (tokenizer.json), which is needed to tell "
                "which characters a token stands for; set student.tokenizer to one that has"
            )
        self._backend = untrimmed(tokenizer.backend_tokenizer)
        self._max_length, self._key = max_length, key  # the key of max_length's section, for messages
        self._evaluation, self._ends, self._weights = evaluation, ends, token_weights
        self._eos: int | None = tokenizer.eos_token_id if append_eos and not evaluation else None
        self._start: int | None = _start(tokenizer) if evaluation else None
        added = tokenizer.added_tokens_decoder
        self._special = np.zeros(max([len(tokenizer), *(i + 1 for i in added)]), dtype=np.bool_)
        self._special[[i for i, token in added.items() if token.special]] = True
        self._before, self._after = around(self._backend)

    def __call__(self, examples: Sequence[Example]) -> list[Encoded]:
        encoded = [Encoded(example, None, 0) for example in examples]
        for template in (False, True):  # a template has written the special tokens already
            chosen = [i for i, e in enumerate(examples) if (e.messages is not None) == template and e.text]
            encodings = self._backend.encode_batch([examples[i].text for i in chosen], add_special_tokens=not template)
            for i, encoding in zip(chosen, encodings, strict=True):
                encoded[i] = self._one(examples[i], encoding)
        return encoded

    def _one(self, raw: Example, encoding: tokenizers.Encoding) -> Encoded:
        tokens = self._tokens(raw, encoding)
        cut = max(0, len(tokens) - self._max_length)
        if not cut:
            return self._encoded(raw, tokens)
        if self._evaluation:
            windows = [self._encoded(raw, window, continues=True) for window in self._windows(raw, tokens)]
            if not windows:
                return Encoded(raw, None, len(tokens))
            return replace(windows[0], continues=False, further=tuple(windows[1:]))
        lost = int(tokens.supervised[self._max_length :].sum())
        return self._encoded(raw, tokens.at(slice(self._max_length)), cut=cut, cut_supervised=lost)

    def _encoded(self, raw: Example, tokens: Tokens, **more: Any) -> Encoded:
        if not tokens.supervised.any():
            return Encoded(raw, None, len(tokens), **more)
        example = replace(
            raw,
            ids=tokens.ids,
            supervised=tokens.supervised,
            supervised_bytes=int(tokens.sizes.sum()),
            ends=tokens.ends,
            behaviour=None,  # of other tokens
        )
        example = weigh(example, tokens.sizes, self._weights)
        if not example.supervised.any():
            return Encoded(raw, None, len(tokens), **more)
        return Encoded(raw, example, len(tokens), supervised=example.supervised_tokens, **more)

    def _tokens(self, raw: Example, encoding: tokenizers.Encoding) -> Tokens:
        """All of them, and what is supervised."""
        template = raw.messages is not None
        ids = np.array(encoding.ids, dtype=np.int32)
        spans = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(ids)).reshape(-1, 2)
        before, after = (0, 0) if template else (self._before, self._after)
        text_end = len(ids) - after
        spans[text_end:] = len(raw.text)
        eos = None if template else self._eos
        if self._evaluation or not raw.last:
            # Of a text that goes on in the next piece the tokenizer does not know that this is not its end.
            ids, spans = ids[:text_end], spans[:text_end]
        elif eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
            spans = np.append(spans, [[len(raw.text)] * 2], axis=0)
        supervised = self._supervised(raw, spans)
        if not template:
            supervised[text_end:] = True
        if self._start is not None and before == 0 and supervised[:1].any():
            ids, supervised = np.insert(ids, 0, self._start), np.insert(supervised, 0, False)
            spans = np.insert(spans, 0, 0, axis=0)
        supervised[: max(1, before)] = False
        ends = _byte_ends(raw.text, spans[:, 1]) if self._ends else None
        return Tokens(ids, supervised, self._sizes(raw, ids, spans, supervised), ends)

    def _sizes(self, raw: Example, ids: npt.NDArray[np.int32], spans: Ints, supervised: Mask) -> Ints:
        """Bytes of each token. A template's marks are not text; where they stand in a text of its own they are as any other
        part of it."""
        marks = self._special[ids]
        if self._evaluation and raw.messages is None:
            marks = np.zeros_like(supervised)
        words = supervised & ~marks
        sizes = np.zeros(len(ids), dtype=np.int64)
        sizes[words] = _bytes_each(raw, spans[words], spans[marks] if self._evaluation else None)
        return sizes

    def _supervised(self, raw: Example, spans: Ints) -> Mask:
        """A token belongs to where it begins: one that straddles the end of a prompt is the prompt's. In evaluation it is
        scored all the same: how many bytes an answer has must not depend on the tokenizer."""
        supervised = np.zeros(len(spans), dtype=np.bool_)
        for begin, end in raw.spans or ((0, len(raw.text)),):
            supervised |= (spans[:, 0] >= begin) & (spans[:, 0] < end)
            if self._evaluation and begin < end:
                supervised |= (spans[:, 0] < begin) & (spans[:, 1] > begin)
        return supervised

    def _windows(self, raw: Example, tokens: Tokens) -> Iterator[Tokens]:
        """All that is supervised, each token once, with at least half a window before it where there is as much. Each window
        begins as the text does, where that is with bos."""
        begins = 0 if raw.messages is not None else self._before
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


def lengths_only(encode: Encode) -> Encode:
    """Encodes without keeping examples, and no text twice: a layout depends on lengths alone."""
    nothing = Example("", "")
    known: dict[bytes, Encoded] = {}

    def lengths(examples: Sequence[Example]) -> list[Encoded]:
        digests = [_digest(example) for example in examples]
        new = {digest: example for digest, example in zip(digests, examples, strict=True) if digest not in known}
        for digest, found in zip(new, encode(list(new.values())), strict=True):
            known[digest] = Encoded(nothing, nothing if found.kept else None, found.length, found.cut)
        return [known[digest] for digest in digests]

    return lengths


def _digest(example: Example) -> bytes:
    """Of what is encoded. An example's key does not do: it is of a chat before its template."""
    flags = repr((example.spans, example.messages is not None, example.last, sorted(example.columns.items())))
    return hashlib.blake2b(f"{flags}\n{example.text}".encode(), digest_size=16).digest()


def _start(tokenizer: Any) -> int:
    """What stands before a text's first token, so that it can be scored too: bos, or what is most like it."""
    names = ("bos", "eos", "cls", "sep", "pad", "unk")
    return int(next((i for name in names if (i := getattr(tokenizer, f"{name}_token_id")) is not None), 0))


def _bytes_each(raw: Example, spans: Ints, marks: Ints | None) -> Ints:
    """UTF-8 bytes of what is to be supervised that the token of each character span is the first to cover. Of several tokens
    of one character the first has it. With `marks`, the spans of a template's own tokens, every byte outside them counts: what
    a tokenizer leaves out (accents that it composed, spaces that it joined) belongs to the token after it, or to the last."""
    wanted = np.zeros(len(raw.text), dtype=np.bool_)
    for begin, end in raw.spans or ((0, len(raw.text)),):
        wanted[begin:end] = True
    for begin, end in () if marks is None else marks:
        wanted[begin:end] = False
    upto = _bytes_before(raw.text, wanted)
    order = np.argsort(spans[:, 0], kind="stable")
    begins, ends = spans[order].T
    reached = np.maximum.accumulate(ends)
    known = np.concatenate([[0], reached[:-1]])[: len(order)]
    if marks is not None and len(order):
        reached[-1] = len(raw.text)
        begins = known
    sizes = np.empty(len(order), dtype=np.int64)
    sizes[order] = upto[reached] - upto[np.minimum(np.maximum(begins, known), reached)]
    return sizes


def _byte_ends(text: str, ends: Ints) -> Ints:
    """Ends of tokens in characters, as ends in UTF-8 bytes. Of several tokens of one character each ends where it does."""
    ends = np.maximum.accumulate(ends)
    return ends if text.isascii() else _bytes_before(text)[ends]


def _bytes_before(text: str, wanted: Mask | bool = True) -> Ints:
    """How many UTF-8 bytes stand before each character, and before the end. Only characters that are `wanted` count."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    result: Ints = np.concatenate([[0], np.cumsum(sizes * wanted)])
    return result


def around(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """How many special tokens the tokenizer itself puts before a text, and after it."""
    mask = backend.encode("a").special_tokens_mask
    return mask.index(0), mask[::-1].index(0)


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
