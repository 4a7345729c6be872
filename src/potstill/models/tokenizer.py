"""Tokenizers: loaded, checked to keep the text, and compared by content."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from potstill.models.language_model import LanguageModel
from potstill.models.libraries import loading, refuse_damaged
from potstill.shipped import locate
from potstill.types import PotstillError

WORDS = ("Hello", "wörld,", "日本語", "spaces", "don't", "2024", "x=1;")  # what a tokenizer is tried on


def load_tokenizer(
    name: str, where: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    refuse_damaged(name, where, weights=False)
    with loading(name, where, "tokenizer"):
        tokenizer = _loaded(name, where, revision, trust_remote_code)
        _check_keeps_text(tokenizer, f"{where}: the tokenizer of {name}")
    return tokenizer


def _loaded(name: str, where: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    file = optional_file(name, "tokenizer.json", revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(name), revision=revision, trust_remote_code=trust_remote_code)
    except ImportError:  # its class needs another package
        if file is None:
            raise
        tokenizer = None
    if file is not None and not isinstance(tokenizer, PreTrainedTokenizerFast):  # mistral-common's reads tekken.json
        tokenizer = _plain(name, revision)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PotstillError(f"{where}: {name} has no fast tokenizer (tokenizer.json), which potstill needs")
    return tokenizer if file is None else _as_its_file_says(tokenizer, file, name, where, revision)


def optional_file(name: str, file: str, revision: str | None) -> str | None:
    """Path of a model's file, where it has one of that name."""
    try:
        found: str | None = cached_file(
            locate(name),
            file,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no folder, and no name that the hub could have: whoever loads the model says so
        return None
    return found


def _plain(name: str, revision: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer in tokenizer.json, whatever class its config names."""
    plain = PreTrainedTokenizerFast.from_pretrained(locate(name), revision=revision)
    if get_tokenizer_config(locate(name), revision=revision).get("add_bos_token"):
        plain.add_bos_token = True  # the named class would do so; the plain one reads it from no config
    return plain


def _as_its_file_says(
    tokenizer: PreTrainedTokenizerFast, file: str, name: str, where: str, revision: str | None
) -> PreTrainedTokenizerFast:
    """The tokenizer, or another of the plain class where the class that its config names cuts text in another way than the
    tokenizer.json beside it, which is what the model was trained with (DeepSeek-V3's names Llama's)."""
    text = " ".join(WORDS)
    backend = tokenizers.Tokenizer.from_file(file)
    backend.no_padding()
    backend.no_truncation()
    right = backend.encode(text, add_special_tokens=False).ids
    if _ids(tokenizer, text) == right:
        return tokenizer
    plain = _plain(name, revision)
    if _ids(plain, text) != right:
        raise PotstillError(
            f"{where}: transformers reads the tokenizer of {name} so that it cuts text in another way than its own "
            "tokenizer.json: mend tokenizer_class in its tokenizer_config.json"
        )
    return plain


def _check_keeps_text(tokenizer: PreTrainedTokenizerFast, who: str) -> None:
    """Refuse a tokenizer that leaves characters or the spaces between words out without a trace. What its own normaliser
    does (lower case, NFC) is no loss; nor is an unknown token, which the model was trained to read in their place."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    for word in WORDS:
        ids = _ids(tokenizer, word)
        meant = word if normalizer is None else normalizer.normalize_str(word)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if _unspaced(back) != _unspaced(meant) and not _has_unknown(tokenizer, ids):
            raise PotstillError(
                f"{who} loses text: it reads {word!r} as {back!r}; its files are broken, or not read as meant"
            )
    ids = _ids(tokenizer, " ".join(WORDS))
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if len(back.replace("▁", " ").split()) == 1 and not _has_unknown(tokenizer, ids):
        raise PotstillError(f"{who} loses the spaces between words; its files are broken, or not read as meant")


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _has_unknown(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> bool:
    model = _content(tokenizer)["model"]
    if "unk_id" in model:  # Unigram
        return model["unk_id"] in ids
    return model.get("unk_token") is not None and tokenizer.convert_tokens_to_ids(model["unk_token"]) in ids


def _unspaced(text: str) -> str:
    return "".join(text.replace("▁", " ").split())  # SentencePiece's space, which a normaliser may put in


def ids_without_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, who: str, where: str) -> list[str]:
    """A note about added tokens that the model has no embedding for and that no text needs (Gemma 3 1B has one, for images).
    An error where text needs them: it is not the model's tokenizer."""
    rows = min(m.weight.shape[0] for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    if len(tokenizer) <= rows:
        return []
    beyond = {token: index for token, index in tokenizer.get_vocab().items() if index >= rows}
    cut = set(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False))
    frame = tokenizer.convert_ids_to_tokens(tokenizer(WORDS[0]).input_ids)
    written = [*frame, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    templates = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    if any(token in cut or token in written or token in templates for token in beyond):
        raise PotstillError(
            f"{who} has {rows} embeddings and its tokenizer {len(tokenizer)} ids: give it the tokenizer it was trained "
            f"with{where}"
        )
    named = sorted(beyond, key=lambda token: beyond[token])
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return [
        f"{who} has no embedding for {named[0]!r} (id {beyond[named[0]]}){more} of its tokenizer: text that holds such "
        "a token "
        "is refused"
    ]


def shared_ids(student: LanguageModel, teacher: LanguageModel, where: str) -> int:
    """How many ids both models have and give the same meaning; an error when their tokenizers are not the same."""
    return min(same_tokenizer(student.tokenizer, teacher.tokenizer, where), student.vocabulary, teacher.vocabulary)


def same_tokenizer(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, where: str) -> int:
    """How many ids both give the same meaning; an error when they are not the same tokenizer."""
    reason = difference(student, teacher)
    if reason is not None:
        raise PotstillError(f"{where}: {reason}")
    return min(len(student), len(teacher))


def difference(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> str | None:
    """Why two tokenizers are not the same, or None.

    Compared by content: the same text must give the same ids, and each id must stand for the same token. Extra ids at the
    end of the teacher's (added tokens, padding of the matrices) are left out of the divergence; the teacher could not read
    such ids of the student's."""
    ours, theirs = _content(student), _content(teacher)
    mine, other = student.convert_ids_to_tokens, teacher.convert_ids_to_tokens
    width = min(len(student), len(teacher))
    for index, (a, b) in enumerate(zip(mine(range(width)), other(range(width)), strict=True)):
        if a != b:
            return f"the teacher's tokenizer is not the student's: id {index} is {b!r} there and {a!r} here"
    differing = [part for part in ours if ours[part] != theirs[part]]
    if differing:
        return f"the teacher's tokenizer has the student's tokens but cuts text differently ({', '.join(differing)})"
    if len(student) > width:
        return (
            f"the student's tokenizer has {mine(width)!r} (id {width}), which the teacher's has not, so the teacher "
            "could not "
            "read it: take the teacher's tokenizer for the student (student.tokenizer)"
        )
    framed, expected = mine(student(WORDS[0]).input_ids), other(teacher(WORDS[0]).input_ids)
    if framed != expected:
        return (
            f"the student's tokenizer makes {framed} of {WORDS[0]!r} and the teacher's {expected}, so the teacher would read "
            "text unlike what it was trained on: take the teacher's tokenizer for the student (student.tokenizer)"
        )
    return None


def _content(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides how a text is cut: normaliser, pre-tokenizer and the model with its merges."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}
