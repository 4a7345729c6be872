"""Tokenizers: loaded, checked to keep the text, and compared by content."""

from __future__ import annotations

import json
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from potstill.models.language_model import LanguageModel
from potstill.models.libraries import cannot_load
from potstill.shipped import locate
from potstill.types import PotstillError


def load_tokenizer(name: str, where: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(name), revision=revision)
    except (OSError, ValueError) as error:
        raise cannot_load(name, where, "tokenizer", error) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PotstillError(f"{where}: {name} has no fast tokenizer (tokenizer.json), which potstill needs")
    return tokenizer


def shared_ids(student: LanguageModel, teacher: LanguageModel, where: str) -> int:
    """How many ids both tokenizers give the same meaning; an error when they are not the same tokenizer.

    Compared by content: the same text must give the same ids, and each id must stand for the same token. Extra ids at the
    end of either (added tokens, padding of the matrices) are left out of the divergence."""
    ours, theirs = _content(student.tokenizer), _content(teacher.tokenizer)
    mine, other = student.tokenizer.convert_ids_to_tokens, teacher.tokenizer.convert_ids_to_tokens
    width = min(len(student.tokenizer), len(teacher.tokenizer))
    for index, (a, b) in enumerate(zip(mine(range(width)), other(range(width)), strict=True)):
        if a != b:
            raise PotstillError(
                f"{where}: the teacher's tokenizer is not the student's: id {index} is {b!r} there and {a!r} here "
                "(potstill trains from a teacher with the student's tokenizer only, so far)"
            )
    differing = [part for part in ours if ours[part] != theirs[part]]
    if differing:
        raise PotstillError(
            f"{where}: the teacher's tokenizer has the student's tokens but cuts text differently ({', '.join(differing)})"
        )
    for who, language_model in (("student", student), ("teacher", teacher)):
        rows = language_model.model.get_output_embeddings().weight.shape[0]
        if rows < width:
            raise PotstillError(f"{where}: the {who}'s head has {rows} rows for {width} shared ids")
    return width


def _content(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides how a text is cut: normaliser, pre-tokenizer and the model with its merges."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}
