"""What a server's likeliest tokens tell of a distribution, and which ids it means by their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.cache.codec import Format

LEAST_REST = 1e-10  # of the mass: what float32 log-probabilities of the others leave is no better known
COMPARED = 5  # likeliest tokens of each place that are looked at


def top_k_signal(
    form: Format, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float64], chosen: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[Any]]:
    """Of k ids, largest first [R, k], and of the text's own token [R]."""
    kept = np.exp(logprobs).sum(-1)
    # The text's own token is given too where it is not among the k: the rest is no smaller than that.
    outside = np.where(chosen < logprobs[:, -1], np.exp(chosen), 0.0)
    most = (form.vocabulary - form.k) * np.exp(logprobs[:, -1])
    rest = np.minimum(np.maximum(1 - kept, np.maximum(outside, LEAST_REST)), most)
    with np.errstate(divide="ignore"):  # no rest: k is the whole vocabulary
        odds = np.log(rest) - np.log(kept)
    found = {"logprobs": logprobs, "odds": odds[:, None], "token_logprobs": chosen}
    return {"ids": ids, **{name: values.astype(np.float32) for name, values in found.items()}}


def ids_of_text(tokenizer: Any) -> dict[str, int]:
    """Tokens by what they say, where no other says the same."""
    found: dict[str, list[int]] = {}
    for i in range(len(tokenizer)):
        for text in {tokenizer.decode([i], clean_up_tokenization_spaces=False), tokenizer.convert_ids_to_tokens(i)}:
            found.setdefault(text, []).append(i)
    return {text: ids[0] for text, ids in found.items() if len(ids) == 1}


@dataclass(frozen=True)
class Row:
    """What a server says about one token of a prompt. Tokens are named by what they say, or as token_id:7."""

    chosen: float
    entries: Mapping[str, float]


def distance(rows: Sequence[Row], expected: Mapping[int, Mapping[str, float]], shift: int) -> float:
    """Between the probe's rows and what the server says when it writes, in nats."""
    differences = []
    for place, likeliest in expected.items():
        if 0 < place + shift <= len(rows):
            entries = rows[place - 1 + shift].entries
            # One that is not among them is no likelier than the least of the likeliest.
            least = min(sorted(entries.values(), reverse=True)[:COMPARED], default=np.inf)
            for token, value in likeliest.items():
                differences.append(abs(entries[token] - value) if token in entries else max(0.0, value - least))
    return float(np.mean(differences)) if differences else float("inf")
