"""What a sample of the data tells before the first step: how long pieces may be, and how much `max_length` would lose.

The sample is spread over the first records of every source. It does not depend on seeds: runs that differ in them alone are
cut alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from potstill.config import DataConfig, SourceConfig
from potstill.data.encoding import Encoded, Encoder
from potstill.data.examples import cut_text, example_maker
from potstill.data.sources import Source
from potstill.types import Example, PotstillError

READ, READ_CHARACTERS = 1024, 2**25  # no more records, and no more text, at the beginning of a source are looked at
PIECES, FEWEST, CHARACTERS = 256, 16, 2**18  # so many pieces, fewer where they hold more text than that
STRETCH = 8  # times max_length: bytes that pieces are tried on
FIT = 0.98  # of the pieces are to fit whole
MARGIN = 0.98  # for what the sample does not show
WARN, REFUSE = 0.05, 0.5  # of what is to be learnt


def with_pieces(data: DataConfig, tokenizer: Any, key: str = "data") -> DataConfig:
    """`data` with the size of its plain texts' pieces, measured where it is not given: nearly all of them fit max_length."""
    plain = [index for index, source in enumerate(data.sources) if source.kind == "text"]
    if data.piece_bytes is not None or not plain:
        return data
    uncut = data.model_copy(update={"piece_bytes": STRETCH * data.max_length})
    texts = list(sampled(uncut, tokenizer, key, plain))
    encode = Encoder(tokenizer, max_length=STRETCH * data.max_length + 64, append_eos=data.append_eos, ends=True)
    stretches = [e.example for e in encode(texts) if e.example is not None]
    if not stretches:
        return data
    least, most = 1, STRETCH * data.max_length  # the largest that fits lies between them
    while least < most:
        size = (least + most + 1) // 2
        fits = [tokens <= data.max_length for example in stretches for tokens in _tokens(example, size)]
        least, most = (size, most) if sum(fits) >= FIT * len(fits) else (least, size - 1)
    return data.model_copy(update={"piece_bytes": max(1, int(MARGIN * least))})


def _tokens(example: Example, size: int) -> list[int]:
    """Tokens that each piece of `size` bytes has, more or less: as many as end in it, bos, and one for its borders."""
    assert example.ends is not None
    ends = np.cumsum([len(part.encode()) for part in cut_text(example.text, size)])
    tokens = np.diff(np.searchsorted(example.ends, ends, side="right"), prepend=0) + 2
    # The last is what is left of a stretch that was cut from its text.
    return [int(count) for count in (tokens if example.last or len(tokens) == 1 else tokens[:-1])]


def check_lengths(data: DataConfig, tokenizer: Any, key: str = "data") -> list[str]:
    """Warnings about what is lost to max_length, and an error where that is more than half of what is to be learnt."""
    encode = Encoder(tokenizer, max_length=data.max_length, append_eos=data.append_eos)
    encoded = encode(list(sampled(data, tokenizer, key)))
    barren = sum(not e.kept and not e.cut for e in encoded)
    if barren == len(encoded):
        return []  # whoever reads it says so
    notes = []
    if barren > WARN * len(encoded):
        notes.append(
            f"{key}.sources: {barren:,} of {len(encoded):,} sampled examples are dropped, for there is nothing to learn in "
            "them: empty texts or answers, conversations without an assistant turn"
        )
    there = [e for e in encoded if e.kept or e.cut]
    cut, dropped = sum(e.cut > 0 for e in there), sum(not e.kept for e in there)
    share = _share_cut(there)
    if max(share, cut / len(there)) <= WARN:
        return notes
    gone = f"; {dropped:,} of them are dropped, for nothing is left" if dropped else ""
    said = (
        f"{key}.max_length: {data.max_length:,} tokens cut {cut:,} of {len(there):,} sampled examples, by {share:.0%} of all "
        f"that is to be learnt{gone}. {_advice(data, there, key)}"
    )
    if max(share, dropped / len(there)) > REFUSE:
        raise PotstillError(said)
    return [*notes, said]


def _share_cut(encoded: Sequence[Encoded]) -> float:
    """Of the tokens that are to be learnt."""
    learnt = sum(e.example.supervised_tokens for e in encoded if e.example is not None)
    lost = sum(e.cut_supervised for e in encoded)
    return lost / max(1, lost + learnt)


def _advice(data: DataConfig, encoded: Sequence[Encoded], key: str) -> str:
    enough = int(np.ceil(np.quantile([e.length + e.cut for e in encoded], 0.95)))
    smaller = f", or lower {key}.piece_bytes" if any(source.kind == "text" for source in data.sources) else ""
    return f"19 of 20 have at most {enough:,}: raise it{smaller}, or leave long ones out"


def lost_in(counts: Mapping[str, int]) -> str | None:
    """A sentence about what a run's counts say was lost, if that is more than a little."""
    of = Counter(counts)
    examples, tokens = of["examples"] + of["dropped_examples"], of["cut_tokens"] + of["dropped_tokens"]
    share = tokens / max(1, of["tokens"] + tokens)
    if max(share, max(of["cut_examples"], of["dropped_examples"]) / max(1, examples)) <= WARN:
        return None
    return (
        f"of {examples:,} examples {of['cut_examples']:,} were longer than data.max_length and cut, and "
        f"{of['dropped_examples']:,} dropped, in which nothing was left to learn: {share:.0%} of all tokens"
    )


def sampled(data: DataConfig, tokenizer: Any, key: str, only: Sequence[int] | None = None) -> Iterator[Example]:
    """Examples of some records of every source; of a mixture, by the sources' weights."""
    total = sum(source.weight or 1.0 for source in data.sources)
    for index, config in enumerate(data.sources):
        if only is None or index in only:
            share = (config.weight or 1.0) / total
            wanted = max(FEWEST, round(PIECES * share))
            yield from _of_source(data, config, f"{key}.sources[{index}]", tokenizer, wanted, CHARACTERS * share)


def _of_source(
    data: DataConfig, config: SourceConfig, key: str, tokenizer: Any, wanted: int, characters: float
) -> Iterator[Example]:
    # Which pieces `fraction` keeps depends on their size, which may be what is asked for.
    maker = example_maker(data, config.model_copy(update={"fraction": 1.0}), key, tokenizer)
    records, read = [], 0
    for record, where, _ in islice(
        Source(config, key, seed=0, shuffle=False, further=data.read_columns).records(0), READ
    ):
        records.append((record, where))
        read += sum(len(value) for value in record.values() if isinstance(value, str))
        if read > READ_CHARACTERS:
            break
    if not records:
        return
    longest = data.piece_bytes or 0
    wanted = max(FEWEST, min(wanted, int(characters / max(1, min(longest, read / len(records))))))
    apart = max(1, len(records) // wanted)
    each = -(-wanted // len(records[::apart]))
    for number, (record, where) in enumerate(records[::apart]):
        made = list(maker(record, where))
        step = max(1, len(made) // each)
        # Not of all records the same part: beginnings are unlike the rest.
        yield from made[number % step :: step][:each]
