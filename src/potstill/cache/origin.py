"""Where a teacher's signal is computed: by a model in this process, or behind a server (remote.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from potstill.cache.reading import dtype_name, template_fingerprint, tokenizer_fingerprint, weights_fingerprint
from potstill.config import StoreConfig
from potstill.data import collate
from potstill.models import LanguageModel
from potstill.signals.compute import uniforms
from potstill.signals.kinds import Signal, SignalKind, kind_for
from potstill.types import Batch, Example, Head, PotstillError

CLOSE = 0.1  # nats, on average: two ways to compute one distribution in few bits differ by less, two positions by more
HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Identity:
    """What a teacher is, as a cache records it and as a server must not change it."""

    name: str
    revision: str | None  # of the hub
    weights: str
    dtype: str
    tokenizer: str
    template: str | None


class TeacherBackend(Protocol):
    """Computes a teacher's signal."""

    tokenizer: Any
    positions: int | None  # that it can read
    identity: Identity
    # Log-probabilities of a text, where nothing else tells a served model from another of its name
    probe: Sequence[float] | None
    at_once: int  # batches that may be under way
    ahead: bool  # asked on the thread that prepares the next step: it does not need this process's device

    def format(self, store: StoreConfig) -> SignalKind:
        """What a cache of it would hold; an error where it cannot give that."""
        ...

    def head(self, width: int) -> Head:
        """Its output head over so many ids."""
        ...

    def begin(self, form: SignalKind, examples: Sequence[Example]) -> Callable[[], Signal]:
        """Start on some documents, each with something to predict; what is given back waits for their rows."""
        ...

    def close(self) -> None: ...


class LiveOrigin:
    """A model in this process."""

    probe: Sequence[float] | None = None
    at_once = 1
    ahead = False

    def __init__(self, teacher: LanguageModel, name: str) -> None:
        self.teacher = teacher
        self.tokenizer, self.positions = teacher.tokenizer, teacher.positions
        self.identity = identity_of_model(teacher, name)

    def format(self, store: StoreConfig) -> SignalKind:
        return format_of(store, self.teacher)

    def head(self, width: int) -> Head:
        return self.teacher.output_head(width)

    def begin(self, form: SignalKind, examples: Sequence[Example]) -> Callable[[], Signal]:
        found = signal_of_examples(self.teacher, form, examples)
        return lambda: found

    def close(self) -> None:
        """It keeps nothing."""


def identity_of_model(teacher: LanguageModel, name: str) -> Identity:
    return Identity(
        name,
        revision=vars(teacher.model.config).get("_commit_hash"),  # None: not from the hub
        weights=weights_fingerprint(teacher),
        dtype=dtype_name(teacher.model.dtype),
        tokenizer=tokenizer_fingerprint(teacher.tokenizer),
        template=template_fingerprint(teacher.tokenizer),
    )


@torch.no_grad()
def signal_of_examples(
    teacher: LanguageModel,
    form: SignalKind,
    examples: Sequence[Example],
    given: Sequence[npt.NDArray[np.int32]] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Of the predicted tokens of some documents in the teacher's tokens, in order. `given`: of each, ids to look up [R, K]."""
    batch = collate([[example] for example in examples], pad_id=0).to(teacher.device)
    hidden = teacher.hidden(batch, batch.rows.teacher)
    _check_rows(torch.isfinite(hidden).all(-1).cpu().numpy(), "hidden states", batch)
    asked: npt.NDArray[Any] | None = None if given is None else np.concatenate(given)
    if form.draws:
        asked = np.concatenate([uniforms(form.seed, e.key, e.supervised_tokens, form.draws) for e in examples])
    found = form.compute(teacher.at_rows(hidden, form.vocabulary), batch.rows.labels, asked)
    for values in found.values():
        if values.dtype.kind == "f":
            _check_rows(np.asarray(~np.isnan(values.reshape(len(values), -1)).any(-1)), "probabilities", batch)
    return found


def _check_rows(sound: npt.NDArray[np.bool_], what: str, batch: Batch) -> None:
    if sound.all():
        return
    ends = np.cumsum([example.supervised_tokens for example in batch.examples])
    example = batch.examples[int(np.searchsorted(ends, int(np.argmin(sound)), side="right"))]
    raise PotstillError(
        f"the teacher's {what} are not finite in {example.source} ({example.key}): try dtype float32, or another teacher; "
        "nothing of this batch is in the cache"
    )


def format_of(store: StoreConfig, teacher: LanguageModel) -> SignalKind:
    """What a cache of a model holds."""
    width = teacher.model.get_output_embeddings().weight.shape[1]
    return kind_for(store, teacher.vocabulary, width, dtype_name(teacher.model.dtype))


def save_head(head: Head, path: Path) -> None:
    """A head as a file; `read_head` has it again."""
    tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
    if any(tensor.isnan().any() for tensor in tensors.values()):
        raise PotstillError("the teacher's head has numbers that are none (NaN): take another teacher")
    numbers = {"softcap": head.softcap, "logit_scale": head.logit_scale}
    metadata = {key: repr(value) for key, value in numbers.items() if value is not None}
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    # Of a float64 model hidden states are kept as float32, and its head goes with them.
    tensors = {key: tensor if tensor.dtype in HEAD_DTYPES else tensor.float() for key, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, path, metadata)


def read_head(
    tensors: Mapping[str, Tensor], about: Mapping[str, str], rows: int | None, width: int | None = None
) -> Head:
    """What `save_head` wrote, over so many ids (None: all), of hidden states of that width. ValueError: what is wrong."""
    numbers = {name: float(about[name]) for name in ("softcap", "logit_scale") if name in about}
    problems = [f"{name} is {value}" for name, value in numbers.items() if not 0 < value < np.inf]
    for problem in chain(_head_problems(tensors, rows, width), problems):  # the first; those after it may rest on it
        raise ValueError(problem)
    bias = tensors.get("bias")
    softcap, scale = numbers.get("softcap"), numbers.get("logit_scale", 1.0)
    return Head(tensors["weight"][:rows], None if bias is None else bias[:rows], softcap, scale)


def _head_problems(tensors: Mapping[str, Tensor], rows: int | None, width: int | None) -> Iterator[str]:
    if not {"weight"} <= set(tensors) <= {"weight", "bias"}:
        yield f"it has {', '.join(sorted(tensors)) or 'nothing'} where weight, and perhaps bias, were expected"
    yield from (f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in HEAD_DTYPES)
    weight = tensors["weight"]
    bias = tensors.get("bias", weight.new_zeros(weight.shape[:1]))
    found = list(weight.shape)
    expected = [rows or "any", width or "any"]
    if len(found) != 2 or found[0] < (rows or 0) or expected[1] not in ("any", found[1]):
        yield f"weight is {found} where {expected} was expected"
    if list(bias.shape) != found[:1]:
        yield f"bias is {list(bias.shape)} where {found[:1]} was expected"
    if not weight.isfinite().all() or bias.isnan().any():
        yield "there are numbers in it that are not finite"
