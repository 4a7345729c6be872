"""A data set as a teacher reads it: every document once, whole, in the teacher's own tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from potstill.cache.manifest import Manifest
from potstill.config import DataConfig
from potstill.data import Encoder, Source, example_maker
from potstill.data.examples import text_key
from potstill.models import LanguageModel
from potstill.models.adapters import plain_names
from potstill.parallel.weights import whole
from potstill.types import Example, PotstillError

LONGEST = 2**20  # tokens, of a teacher that does not say how many it can read


def examples_of(data: DataConfig, tokenizer: Any, key: str = "data", answered: bool = True) -> Iterator[Example]:
    """The examples of a data set in order, each once however often it is there. `answered`: those with something to learn;
    else conversations too that end with a question."""
    seen: set[bytes] = set()
    for number, config in enumerate(data.sources):
        source = Source(config, f"{key}.sources[{number}]", seed=0, shuffle=False, further=data.read_columns)
        make = example_maker(data, config, source.key, tokenizer)
        for record, where, _ in source.records(0):
            for example in make(record, where):
                known = bytes.fromhex(example.key)
                if (example.text or (not answered and example.messages)) and known not in seen:
                    seen.add(known)
                    yield example


def as_cached(data: DataConfig, manifest: Manifest) -> DataConfig:
    """`data`, cut into pieces as a cache's texts were, where it does not say itself."""
    return data if data.piece_bytes else data.model_copy(update={"piece_bytes": manifest.piece_bytes})


class TeacherText:
    """Examples in a teacher's tokens. Every document ends with eos, whether or not a student will see it there:
    what comes before is the same. A document longer than the teacher can read is cut."""

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._encode = Encoder(tokenizer, max_length=positions or LONGEST, append_eos=True, ends=True)

    def __call__(self, examples: Sequence[Example]) -> list[Example | None]:
        """None: there is nothing to predict in it."""
        return [encoded.example for encoded in self._encode([replace(example, last=True) for example in examples])]


def chat_kwargs(data: DataConfig) -> dict[str, Any]:
    """The arguments of the chat template, which must be the same for all of a cache: keys are of what comes before it."""
    found = [source.chat_template_kwargs for source in data.sources if source.messages]
    if any(kwargs != found[0] for kwargs in found):
        raise PotstillError(
            "data.sources: where text is cached, written, or read by a teacher with other tokens, conversations are rendered "
            "in one way, and chat_template_kwargs differ between the sources"
        )
    return found[0] if found else {}


def weights_fingerprint(teacher: LanguageModel) -> str:
    """Of names, shapes and some values of every tensor (reading all of a large model would take minutes), and of the
    configuration, which decides what is computed with them; adapters have no part in it. Of a model that lies over ranks it is
    asked for by all of them."""
    if teacher.fingerprint is not None:
        return teacher.fingerprint
    config = _meaning(teacher.model.config.to_diff_dict())
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(plain_names(teacher.model).items()):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        flat = whole(tensor.detach()).flatten()
        chosen = flat[:: max(1, flat.numel() // 1024)]
        digest.update((chosen.float() if chosen.is_floating_point() else chosen.long()).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


NO_MEANING = ("name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def _meaning(config: Any) -> Any:
    """A configuration without what does not change the numbers: names, paths, versions; the dtype is recorded beside."""
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if key not in NO_MEANING and not str(key).startswith("_")}
    return {key: _meaning(value) for key, value in kept.items()}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of everything that decides which ids a text becomes."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    content = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")}
    return text_key(json.dumps([content, tokenizer.eos_token_id], sort_keys=True, ensure_ascii=False))


def template_fingerprint(tokenizer: Any) -> str | None:
    return text_key(json.dumps(tokenizer.chat_template, sort_keys=True)) if tokenizer.chat_template else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
