"""The student's weights under the names that vLLM knows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from potstill.files import UNFINISHED, could_not_write, refusal
from potstill.models import LanguageModel
from potstill.models.adapters import plain_names, plain_weights
from potstill.types import PotstillError

SHARD_BYTES = 2**31  # safetensors holds a file's bytes in memory once more while it writes


def named_weights(student: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """With the names that files have, one layer after another; of a student that is spread over ranks with all of them, to the
    end. A head that shares the embeddings' weights is named like any other: where it packs them for its products (on CPUs),
    vLLM keeps the old ones unless it is given them under the head's name too."""
    names: dict[int, list[str]] = {}
    for name, tensor in plain_names(student.model).items():
        names.setdefault(id(tensor), []).append(name)
    others = {first: more for first, *more in names.values()}
    for _, layer in groupby(plain_weights(student.model), lambda found: _layer(found[0])):
        weights = {name: tensor for first, tensor in layer for name in (first, *others[first])}
        yield from revert_weight_conversion(student.model, weights).items()


def _layer(name: str) -> str:
    """How the names of one layer begin; those of no layer with nothing."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def save_weights(student: LanguageModel, path: Path, *, writes: bool = True) -> None:
    """A folder of safetensors, written beside and renamed. Not synced: after a crash the next run writes its own. `writes`: of
    several ranks one does, and the others take part in gathering the weights."""
    weights = named_weights(student)
    try:
        if writes:
            _write(weights, path)
    finally:
        for _ in weights:  # also where they could not be written: the other ranks would wait
            pass


def _write(weights: Iterable[tuple[str, Tensor]], path: Path) -> None:
    beside = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        for left in (beside, path):
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir(parents=True)
        for number, shard in enumerate(_shards(weights)):
            save_file(shard, beside / f"model-{number:05d}.safetensors", {"format": "pt"})
        beside.rename(path)
    except Exception as error:  # safetensors makes something else of a full disk
        refused = refusal(beside, error)
        shutil.rmtree(beside, ignore_errors=True)
        if refused is not None:
            raise could_not_write(path, refused) from error
        raise PotstillError(f"could not write the student's weights to {path} ({error})") from error


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if size and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        # safetensors refuses two names of one memory
        shared = tensor.data_ptr() in {held.data_ptr() for held in shard.values()}
        shard[name] = tensor.clone() if shared else tensor.contiguous()
        size += tensor.nbytes
    yield shard
