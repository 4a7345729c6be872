"""What training resumes from, as named tensors in safetensors files: weights and optimizers' state.

Each rank writes whole weights of some layers into model/, as transformers would, and its own parts of everything else into
state/; the files' headers say where a part belongs, in the words of torch.distributed.checkpoint. Any number of ranks reads of
that what it needs. Nothing here is a pickle. What model/ holds bit for bit is not written again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from potstill.files import write_text
from potstill.models.adapters import WEIGHTS, adapter, as_in_file, saved_weights
from potstill.parallel.agree import first_alone, together
from potstill.parallel.mesh import ranks
from potstill.parallel.weights import Box, boxes, here, keeps, make_copies_equal, whole
from potstill.training.optimizer import moved
from potstill.types import PotstillError

INDEX = "model.safetensors.index.json"
FILE_BYTES = 50 * 10**9  # of a file of model/, as transformers has it
PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # in a header: {name: {OFFSETS: where the piece begins}}
MASTER = (
    "master"  # beside an optimizer's own keys: the weights that it moves, where the model has them in another dtype
)
LAYER = re.compile(r"(.*?\.\d+)\.")
T = TypeVar("T")
Slots = dict[str, tuple[Optimizer, nn.Parameter]]  # each parameter that is moved, as `optimizer.parameter`


def seed_step(seed: int, step: int, dp_index: int) -> None:
    """Before each optimizer step. What it draws then depends on nothing that came before it: there is no random state to save,
    none to put back when a step is not taken, and a run can go on with any number of ranks. Ranks that share rows share it."""
    mixed = hashlib.blake2b(f"{seed} {step} {dp_index}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(mixed, "little"))


@dataclass(frozen=True)
class WrittenFiles:
    files: list[str]
    weights: dict[str, str]  # those in model/, each with its file there


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint, as it is at one moment."""

    model: PreTrainedModel
    weights: dict[str, dict[str, Tensor]]  # whole ones, by file of model/
    parts: dict[str, list[tuple[Box, Tensor]]]  # of everything else

    def write(self, checkpoint: Path) -> WrittenFiles:
        """Into a folder that has model/ and state/."""
        parts, written = dict(self.parts), WrittenFiles([], {})
        for file, weights in self.weights.items():
            saved = {name: tensor.contiguous() for name, tensor in _as_saved(self.model, weights).items()}
            written.files.append(f"model/{file}")
            save_file(saved, checkpoint / "model" / file, {"format": "pt"})
            written.weights.update(dict.fromkeys(saved, file))
            for (
                name,
                tensor,
            ) in weights.items():  # some architectures are saved in other pieces than they are trained in
                there = saved.get(name)
                if there is None or there.dtype != tensor.dtype or not torch.equal(there, tensor):
                    parts[f"model.{name}"] = [(tuple(slice(0, size) for size in tensor.shape), tensor)]
        for number in range(max([int(ranks().first), *map(len, parts.values())])):  # the first rank's is always there
            few = {name: pieces[number] for name, pieces in parts.items() if number < len(pieces)}
            places = {name: {OFFSETS: [each.start for each in box]} for name, (box, _) in few.items()}
            written.files.append(f"state/{ranks().rank:05d}-{number}.safetensors")
            tensors = {name: tensor for name, (_, tensor) in few.items()}
            save_file(tensors, checkpoint / written.files[-1], {PLACES: json.dumps(places)})
        return written


def take_snapshot(
    model: PreTrainedModel, module: nn.Module, optimizers: Sequence[Optimizer], copy: bool = False
) -> Snapshot:
    """Collective. `module` has `model` as its attribute `model`. `copy`: later steps are not to show."""
    slots = _slots(module, optimizers)
    moments = {
        f"{slot}.{key}": value.detach()
        for slot, (optimizer, parameter) in slots.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    } | _masters(slots, optimizers)
    weights, mine = saved_weights(module), ranks().rank
    files = _files(weights) if adapter(model) is None else {WEIGHTS: (0, list(weights))}
    make_copies_equal([*weights.values(), *moments.values()])
    numbered: dict[str, dict[str, Tensor]] = {}
    for file, (owner, names) in files.items():
        for name in names:
            tensor = whole(weights[name])  # every rank takes part, one keeps it
            if owner == mine:
                kept = numbered.setdefault(file, {})
                kept[name.removeprefix("model.")] = _on_host(tensor, copy, here(weights[name]))
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("model.")} | moments
    parts: dict[str, list[tuple[Box, Tensor]]] = {}
    for number, (name, tensor) in enumerate(rest.items()):
        if keeps(tensor, number):
            part = here(tensor)
            parts[name] = [(there, _on_host(part[at], copy, part)) for there, at in boxes(tensor)]
    return Snapshot(model, numbered, parts)


def _on_host(tensor: Tensor, copy: bool, live: Tensor) -> Tensor:
    held = tensor.detach().cpu().contiguous()
    shared = held.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    return held.clone() if copy and shared else held


def _as_saved(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if adapter(model) is not None:
        return as_in_file(weights)
    ignored = set(model._keys_to_ignore_on_save or ())
    found: dict[str, Tensor] = revert_weight_conversion(model, {n: t for n, t in weights.items() if n not in ignored})
    return found


def _files(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, list[str]]]:
    """Each file of model/, with the rank that writes it and the weights in it. A layer stays together, for transformers may
    make one tensor of several, or several of one."""
    layers: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    for name, tensor in weights.items():
        if name.startswith("model."):
            layer = LAYER.match(name)
            key = layer[1] if layer else ""
            layers.setdefault(key, []).append(name)
            sizes[key] += tensor.numel() * tensor.element_size()
    files, load = [], dict.fromkeys(range(ranks().students), 0)
    open_file: dict[int, tuple[int, list[str]]] = {}  # of each rank: its bytes and weights
    for key, size in sizes.most_common():
        owner = min(load, key=lambda rank: load[rank])
        load[owner] += size
        filled, names = open_file.get(owner, (FILE_BYTES, []))
        if filled + size > FILE_BYTES:
            filled, names = 0, []
            files.append((owner, names))
        names += layers[key]
        open_file[owner] = filled + size, names
    count = len(files)
    names_of_files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return dict(zip(names_of_files if count > 1 else ["model.safetensors"], files, strict=True))


def write_index(checkpoint: Path, weights: Mapping[str, str]) -> list[str]:
    """Of a model in several files, which weight is in which. Gives the files that were written."""
    if len(set(weights.values())) < 2:
        return []
    index = {"metadata": {}, "weight_map": dict(sorted(weights.items()))}
    write_text(checkpoint / "model" / INDEX, json.dumps(index, indent=2) + "\n")
    return [f"model/{INDEX}"]


def load_state(checkpoint: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put a checkpoint's tensors into module and optimizers. Of one that does not fit, nothing. Collective."""
    stored = first_alone(lambda: _readable(checkpoint, lambda: _stored(checkpoint)))
    weights, slots = saved_weights(module), _slots(module, optimizers)
    # A parameter that never had a gradient has no optimizer state.
    masters = _masters(slots, optimizers)
    kept = {name: _room(*slots[slot], key) for name, slot, key in _parted(stored) if slot in slots and key != MASTER}
    tensors = weights | masters | kept
    if misfit := _misfit(tensors, stored):
        raise PotstillError(
            f"checkpoint {checkpoint} does not fit this recipe's student and optimizer ({misfit}): choose another folder with "
            "run="
        )
    together(lambda: _readable(checkpoint, lambda: _read(checkpoint, tensors, stored)))
    for name, slot, key in _parted(kept):
        optimizer, parameter = slots[slot]
        optimizer.state[parameter][key] = kept[name]
    for master, weight in (pair for optimizer in optimizers for pair in moved(optimizer)):
        if master is not weight and master.dtype == weight.dtype:  # one of the host's, which model/ has
            master.detach().copy_(weight.detach())


def _readable(checkpoint: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PotstillError(
            f"checkpoint {checkpoint} cannot be read ({reason}): choose another folder with run="
        ) from error


@dataclass(frozen=True)
class Piece:
    """Of a stored tensor: its file, its name there, and where it lies in the whole."""

    file: str
    name: str
    box: Box


def _stored(checkpoint: Path) -> dict[str, list[Piece]]:
    """The pieces of every tensor. What is in state/ goes before what model/ has of that name."""
    if not list((checkpoint / "state").glob("*.safetensors")):
        raise PotstillError(
            f"checkpoint {checkpoint} is of an earlier version of potstill, whose state/ could run code when it is read: end "
            f"the run with that version, or begin another with student.model={checkpoint / 'model'} and run="
        )
    return _pieces(checkpoint, "model", "model.") | _pieces(checkpoint, "state")


def _pieces(checkpoint: Path, folder: str, prefix: str = "") -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for path in sorted((checkpoint / folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
            for name in file.keys():  # noqa: SIM118
                sizes = file.get_slice(name).get_shape()
                starts = places[name][OFFSETS] if places else [0] * len(sizes)
                box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                found.setdefault(f"{prefix}{name}", []).append(Piece(f"{folder}/{path.name}", name, box))
    return found


def _read(checkpoint: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, list[Piece]]) -> None:
    """This rank's part of each tensor, each file opened once."""
    wanted: dict[str, list[tuple[str, Box, Tensor]]] = {}
    for name, tensor in tensors.items():
        part, missing = here(tensor), here(tensor).numel()
        for there, at in boxes(tensor):
            for piece in stored[name]:
                cut = [_both(a, b) for a, b in zip(there, piece.box, strict=True)]
                if all(each.start < each.stop for each in cut):
                    source = tuple(_from(each, of.start) for each, of in zip(cut, piece.box, strict=True))
                    room = part[at][tuple(_from(each, of.start) for each, of in zip(cut, there, strict=True))]
                    wanted.setdefault(piece.file, []).append((piece.name, source, room))
                    missing -= room.numel()
        if missing:
            raise ValueError(f"{name} is not whole")
    for file_name, requests in wanted.items():
        with safe_open(checkpoint / file_name, "pt") as file:
            for name, source, room in requests:
                room.copy_(file.get_slice(name)[source] if source else file.get_tensor(name))


def _both(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _from(a: slice, start: int) -> slice:
    return slice(a.start - start, a.stop - start)


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


def _slots(module: nn.Module, optimizers: Sequence[Optimizer]) -> Slots:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: Slots = {}
    for optimizer in optimizers:
        kind = "muon" if isinstance(optimizer, Muon) else "adamw"
        found |= {f"{kind}.{names[id(weight)]}": (optimizer, master) for master, weight in moved(optimizer)}
    return found


def _masters(slots: Slots, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The float32 weights that optimizers move for parameters that the model has, and model/ gets, in another dtype."""
    weights = {id(master): weight for optimizer in optimizers for master, weight in moved(optimizer)}
    return {
        f"{slot}.{MASTER}": parameter.detach()
        for slot, (_, parameter) in slots.items()
        if parameter.dtype != weights[id(parameter)].dtype
    }


def _misfit(tensors: Mapping[str, Tensor], stored: Mapping[str, list[Piece]]) -> str:
    """The first tensor that is not there, is of another shape, or has no place; the empty string if there is none."""
    for name, tensor in tensors.items():
        if name not in stored:
            return f"{name} is not in it"
        there = [max(ends) for ends in zip(*([each.stop for each in p.box] for p in stored[name]), strict=True)]
        if there != list(tensor.shape):
            return f"{name} is {there} there and {list(tensor.shape)} here"
    # What model/ has besides is the student in other pieces.
    without_place = [n for n, pieces in stored.items() if n not in tensors and pieces[0].file.startswith("state/")]
    return f"{without_place[0]} has no place here" if without_place else ""
