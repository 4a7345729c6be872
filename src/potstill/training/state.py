"""What training resumes from, as named tensors in safetensors files: weights and optimizers' state.

Nothing here is a pickle: torch.distributed.checkpoint puts where each piece belongs as JSON into the files' headers. What the
checkpoint's model/ holds bit for bit is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Muon, Optimizer

from potstill.models import quiet
from potstill.parallel.weights import weights_of
from potstill.types import PotstillError

FILE_BYTES = 1 << 28  # of one file, since each is put together in memory
# Each parameter that is trained, as `optimizer.parameter`.
Slots = dict[str, tuple[Optimizer, nn.Parameter]]


def save_state(folder: Path, model: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Into the new `folder`, beside `model`, the student as transformers saved it."""
    weights = weights_of(module)
    held = set(_held(model, weights))
    tensors = {name: tensor for name, tensor in weights.items() if name not in held}
    for slot, (optimizer, parameter) in _slots(module, optimizers).items():
        tensors |= {f"{slot}.{key}": value.detach() for key, value in optimizer.state.get(parameter, {}).items()}
    writer = HuggingFaceStorageWriter(str(folder), _files(tensors), save_distributed=True)
    with quiet():
        save(tensors, storage_writer=writer, no_dist=not torch.distributed.is_initialized())


def load_state(checkpoint: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put a checkpoint's tensors into module and optimizers. Of one that does not fit, nothing."""
    if not list((checkpoint / "state").glob("*.safetensors")):
        raise PotstillError(
            f"checkpoint {checkpoint} is of an earlier version of potstill, whose state/ could run code when it is read: end "
            f"the run with that version, or begin another with student.model={checkpoint / 'model'} and run="
        )
    try:
        with quiet():
            _load(checkpoint, module, optimizers)
    except (CheckpointException, SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PotstillError(
            f"checkpoint {checkpoint} cannot be read ({reason}): choose another folder with run="
        ) from error


def _load(checkpoint: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    state, model = checkpoint / "state", checkpoint / "model"
    stored, beside = _shapes(state), {f"model.{name}": shape for name, shape in _shapes(model).items()}
    weights, slots = weights_of(module), _slots(module, optimizers)
    # A parameter that never had a gradient has no optimizer state.
    kept = {name: _room(*slots[slot], key) for name, slot, key in _parted(stored) if slot in slots}
    tensors = weights | kept
    if misfit := _misfit(tensors, stored, beside):
        raise PotstillError(
            f"checkpoint {checkpoint} does not fit this recipe's student and optimizer ({misfit}): choose another folder with "
            "run="
        )
    _read(state, {name: tensor for name, tensor in tensors.items() if name in stored})
    _read(model, {name.removeprefix("model."): tensor for name, tensor in weights.items() if name not in stored})
    for name, slot, key in _parted(kept):
        optimizer, parameter = slots[slot]
        optimizer.state[parameter][key] = kept[name]


def _parted(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each name, the part before its last dot and the part after it."""
    for name in names:
        slot, _, key = name.rpartition(".")
        yield name, slot, key


def _room(optimizer: Optimizer, parameter: nn.Parameter, key: str) -> Tensor:
    """For what an optimizer keeps of a parameter: as large as that, but for the number of its steps."""
    if key == "step":
        return torch.empty((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
    return torch.empty_like(parameter.detach())


def seed_step(seed: int, step: int, dp_index: int) -> None:
    """Before each optimizer step. What it draws then depends on nothing that came before it: there is no random state to save,
    none to put back when a step is not taken, and a run can go on with any number of ranks. Ranks that share rows share it."""
    mixed = hashlib.blake2b(f"{seed} {step} {dp_index}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(mixed, "little"))


def _slots(module: nn.Module, optimizers: Sequence[Optimizer]) -> Slots:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: Slots = {}
    for optimizer in optimizers:
        kind = "muon" if isinstance(optimizer, Muon) else "adamw"
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        found |= {f"{kind}.{names[id(parameter)]}": (optimizer, parameter) for parameter in parameters}
    return found


def _misfit(tensors: Mapping[str, Tensor], stored: Mapping[str, torch.Size], beside: Mapping[str, torch.Size]) -> str:
    """The first tensor that is not there, is of another shape, or has no place; the empty string if there is none."""
    for name, tensor in tensors.items():
        there = stored.get(name, beside.get(name))
        if there is None:
            return f"{name} is not in it"
        if there != tensor.shape:
            return f"{name} is {list(there)} there and {list(tensor.shape)} here"
    without_place = [name for name in stored if name not in tensors]
    return f"{without_place[0]} has no place here" if without_place else ""


def _shapes(folder: Path) -> dict[str, torch.Size]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: about.size for name, about in found.items() if isinstance(about, TensorStorageMetadata)}


def _read(folder: Path, tensors: dict[str, Any]) -> None:
    if tensors:
        reader = HuggingFaceStorageReader(str(folder))
        load(tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized())


def _held(model: Path, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Which weights stand in the model's own files under the same name, bit for bit. Some architectures are saved in other
    pieces than they are trained in."""
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                mine, saved = weights.get(f"model.{name}"), file.get_tensor(name)
                if mine is not None and saved.dtype == mine.dtype and torch.equal(saved, mine.cpu()):
                    yield f"model.{name}"


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes into."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + tensor.nbytes
    return numbers
