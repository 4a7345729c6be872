"""A model that lies over ranks: the student, or a teacher over the student's ranks or over ranks of its own. Each has a part of
every matrix (tensor parallel), of every layer (FSDP2), or both.

One rank reads it into the host's memory; all others are sent one tensor at a time, and keep their part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from potstill.config import StudentConfig, TeacherConfig
from potstill.models.attention import choose
from potstill.models.language_model import LanguageModel, backbone
from potstill.models.loading import hollow_student, load_hollow, load_student, load_student_tokenizer, load_teacher
from potstill.parallel.context import plain_kind
from potstill.parallel.shard import layers
from potstill.parallel.team import Team
from potstill.parallel.tensor import check_tensors, split_tensors
from potstill.types import Batch, PotstillError


@dataclass(frozen=True)
class Spread:
    """Over which ranks a model lies, and how."""

    team: Team  # all of them; the first one reads it
    tp: DeviceMesh | None = None
    fsdp: DeviceMesh | None = None
    offload: bool = False  # shards are in the host's memory while they are not computed with
    head_rows: int | None = (
        None  # ids of the student's head, cut over `tp`: a head of as many is cut with it; None: whole
    )

    def without_tp(self) -> Spread:
        return Spread(self.team, None, self.fsdp, self.offload)


def load_student_by_first(
    config: StudentConfig, device: torch.device, seed: int, team: Team
) -> tuple[LanguageModel, Callable[[], Filling]]:
    """By all ranks of the student: one without weights, and what fills it once its matrices are cut."""
    whole: LanguageModel | None = None

    def read() -> Mapping[str, Any]:
        nonlocal whole
        whole = load_student(config, device, seed)
        kept = {name: getattr(whole, name) for name in ("head", "attention", "rows", "notes", "processor")}
        dtypes = {name: tensor.dtype for name, tensor in _tensors(whole.model).items()}
        words = {"writes": whole.model.generation_config, "plain": plain_kind(whole.model)}
        return {"kept": kept, "dtype": whole.model.dtype, "dtypes": dtypes, **words}

    about = team.of_first(read)
    tokenizer = load_student_tokenizer(config)
    model = hollow_student(config, tokenizer, about["dtype"])
    model.generation_config = about["writes"]

    def filling() -> Filling:
        return Filling(model, None if whole is None else whole.model, about["dtypes"], team, device)

    student = LanguageModel(model, tokenizer, **about["kept"])
    choose(backbone(model), student.attention, about["plain"])
    return student, filling


def load_spread(
    config: TeacherConfig,
    device: torch.device,
    where: str,
    spread: Spread,
    fingerprint: Callable[[LanguageModel], str | None] = lambda _: None,
    key: str | None = None,
) -> LanguageModel:
    """By all ranks of the team. `fingerprint`: of the whole model, where it will be asked for. A `tp` that does not fit is an
    error if it was asked for, else there is none, and a note."""
    whole: LanguageModel | None = None

    def read() -> Mapping[str, Any]:
        nonlocal whole
        whole = load_teacher(config, device, where, key, on_host=True)
        kept = {name: getattr(whole, name) for name in ("head", "attention", "rows", "notes")}
        dtypes = {name: tensor.dtype for name, tensor in _tensors(whole.model).items()}
        kept["fingerprint"] = fingerprint(whole)
        return {"kept": kept, "dtype": whole.model.dtype, "dtypes": dtypes, "plain": plain_kind(whole.model)}

    about = spread.team.of_first(read)
    model, tokenizer = load_hollow(config, about["dtype"], where, key)
    language_model = LanguageModel(model, tokenizer, **about["kept"])
    choose(backbone(model), language_model.attention, about["plain"])
    if spread.tp is not None and (reason := _no_tensors(model, spread.tp.size(), where)):
        if config.tp != "auto":
            raise PotstillError(reason)
        language_model.notes = [*language_model.notes, f"{where}: it is whole on every tp rank, for {reason}"]
        spread = spread.without_tp()
    if spread.tp is not None:
        cut = spread.head_rows == model.get_output_embeddings().weight.shape[0]
        split_tensors(model, spread.tp, head=cut)
        language_model.group = spread.tp.get_group() if cut else None
    filling = Filling(model, None if whole is None else whole.model, about["dtypes"], spread.team, device)
    filling.fill(model.get_output_embeddings())
    if spread.fsdp is None:
        filling.fill(backbone(model))
    else:
        language_model.placed = _sharded(language_model, spread.fsdp, spread.offload, filling)
    return language_model


def _no_tensors(model: PreTrainedModel, tp: int, where: str) -> str:
    """Why a model cannot be cut over so many ranks; the empty string: it can."""
    try:
        check_tensors(model, tp)
    except PotstillError as error:
        return str(error).replace("parallel.tp", f"{where}.tp")
    return ""


class Filling:
    """Gives a model on meta the tensors of the same one on the first rank of a team (`whole`; None: it is not here), part after
    part. What no pass needs, the eyes of a model that also sees, is left where it is."""

    def __init__(
        self,
        model: PreTrainedModel,
        whole: PreTrainedModel | None,
        dtypes: Mapping[str, torch.dtype],
        team: Team,
        device: torch.device,
    ) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._whole = {} if whole is None else _tensors(whole)
        self._dtypes, self._team, self._device = dtypes, team, device
        # Only what is tied is held: everything else may go once FSDP has cut it.
        count = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {parameter for parameter, times in count.items() if times > 1}
        self._filled: dict[nn.Parameter, nn.Parameter] = {}

    def fill(self, module: nn.Module) -> None:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    found = self._filled.get(parameter)
                    if found is None:
                        here = _cut(self._received(part, name, parameter), parameter, self._device)
                        found = nn.Parameter(here, requires_grad=parameter.requires_grad)
                    if parameter in self._tied:
                        self._filled[parameter] = found
                    part._parameters[name] = found
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = self._received(part, name, buffer).to(self._device)

    def _received(self, part: nn.Module, name: str, empty: Tensor) -> Tensor:
        full = f"{self._names[part]}.{name}".removeprefix(".")
        if self._team.leads:
            values = self._whole[full].detach().to("cpu").contiguous()
            assert values.shape == empty.shape, full
        else:
            values = torch.empty(empty.shape, dtype=self._dtypes[full])
        self._team.send(values)
        return values


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Also buffers that are in no state dict: rotary frequencies, scales of embeddings."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _cut(whole: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a tensor that every rank has, laid out as `like`."""
    if not isinstance(like, DTensor):
        return whole.to(device)
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local().clone()
    mesh, placements, shape = like.device_mesh, like.placements, whole.shape
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=whole.stride())


class Reader(nn.Module):
    """What FSDP wraps: a model is called through its root alone. The head, which others read, is not in it."""

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__()
        self.part = backbone(language_model.model)
        self._computed = language_model.computed

    def forward(self, batch: Batch, positions: Tensor) -> Tensor:
        return self._computed(batch, positions)


@dataclass(frozen=True)
class Sharded:
    """Hidden states of a model of which every rank has shards: all ranks make every pass."""

    reader: Reader
    ahead: bool = False
    waited: float = 0.0

    def begin(self, batch: Batch, positions: Tensor) -> Callable[[], Tensor]:
        return partial(self._read, batch, positions)

    @torch.no_grad()
    def _read(self, batch: Batch, positions: Tensor) -> Tensor:
        found: Tensor = self.reader(batch, positions)
        assert isinstance(self.reader, FSDPModule)
        self.reader.reshard()  # without gradients a root does not do it itself
        return found


def _sharded(language_model: LanguageModel, mesh: DeviceMesh, offload: bool, filling: Filling) -> Sharded:
    """Layer by layer: no rank but the one that reads has more than one whole layer at a time."""
    reader, policy = Reader(language_model), OffloadPolicy()
    if offload:
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    ours = set(reader.modules())
    for layer in (each for each in layers(language_model.model) if each in ours):
        filling.fill(layer)
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    filling.fill(reader.part)
    head = set(language_model.model.get_output_embeddings().parameters())  # a tied one is the embedding: it stays whole
    fully_shard(reader, mesh=mesh, offload_policy=policy, ignored_params=head)
    return Sharded(reader)
