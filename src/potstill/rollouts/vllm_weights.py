"""The student's weights under the names that vLLM knows."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from potstill.files import UNFINISHED, could_not_write, refusal
from potstill.models import LanguageModel
from potstill.types import PotstillError

SHARD_BYTES = 2**31  # safetensors holds a file's bytes in memory once more while it writes


def named_weights(student: LanguageModel) -> dict[str, Tensor]:
    """With the names that files have. A head that shares the embeddings' weights is named like any other: where it packs
    them for its products (on CPUs), vLLM keeps the old ones unless it is given them under the head's name too."""
    return revert_weight_conversion(student.model, student.model.state_dict())


def save_weights(student: LanguageModel, path: Path) -> None:
    """A folder of safetensors, written beside and renamed. Not synced: after a crash the next run writes its own."""
    beside = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        for left in (beside, path):
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir(parents=True)
        for number, shard in enumerate(_shards(named_weights(student))):
            save_file(shard, beside / f"model-{number:05d}.safetensors", {"format": "pt"})
        beside.rename(path)
    except Exception as error:  # safetensors makes something else of a full disk
        refused = refusal(beside, error)
        shutil.rmtree(beside, ignore_errors=True)
        if refused is not None:
            raise could_not_write(path, refused) from error
        raise PotstillError(f"could not write the student's weights to {path} ({error})") from error


def _shards(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    seen, size = set(), 0
    for name, tensor in weights.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        # safetensors refuses two names of one memory
        shards[-1][name] = tensor.contiguous() if tensor.data_ptr() not in seen else tensor.clone()
        seen.add(tensor.data_ptr())
        size += tensor.nbytes
    return shards
