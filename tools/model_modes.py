"""What a family of models is tried for, each against the plainest computation of the same numbers.

A mode raises where it does not work: PotstillError with a sentence of potstill's own, anything else is a fault. What it gives
back is worth a word in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from model_families import Family
from safetensors.torch import load_file
from torch import Tensor

from potstill.config import DataConfig, SamplingConfig, StudentConfig, TeacherConfig
from potstill.config.recipe import load_recipe
from potstill.data import collate
from potstill.models import LanguageModel, check_fit, load_student, load_teacher, quiet, shared_ids
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.transformers import TransformersEngine
from potstill.teachers.live import live_teacher
from potstill.training.loop import train
from potstill.training.run import Callback, Run
from potstill.types import Batch, Example

CPU = torch.device("cpu")
TOKENIZER = "shipped:tokenizers/bytes-2k"
LEARNER = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
PLAIN = LossSettings("forward_kl", 0.5, 0.1, 1.0, 0.0, 1.0)  # cross-entropy
DISTIL = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
EXACT = 1e-3  # of a loss, and of the largest gradient of a tensor, in float32


class Off(Exception):
    """A number is not what it should be."""


def make(family: Family, folder: Path) -> str:
    """A model of the family as a folder; its parameters, for the record."""
    made = load_student(StudentConfig(config=family.config(), tokenizer=TOKENIZER), CPU, 0)
    with quiet():
        made.model.save_pretrained(folder / "model")
        made.tokenizer.save_pretrained(folder / "model")
    return f"{sum(p.numel() for p in made.model.parameters()):,}"


def student(folder: Path) -> str:
    """Loss and gradient of padded documents are those of each one alone, by the model's own logits."""
    learner = _loaded(folder)
    module = StudentLoss(learner).eval()
    batch = _batch([[text] for text in _texts()])
    ours, gradients = _step(module, batch, [], PLAIN)
    module.zero_grad()
    plain = sum((_own_loss(learner.model, text) for text in _texts()), start=torch.zeros(())) / batch.supervised_tokens
    plain.backward()
    _same("the loss", ours, plain)
    for name, parameter in learner.model.named_parameters():
        if parameter.grad is not None:
            _same(f"the gradient of {name}", gradients[name], parameter.grad)
    return ""


def teacher(folder: Path) -> str:
    """Forward KL to it, and the student's gradient, are those by its own logits."""
    learner = load_student(StudentConfig(config=LEARNER, tokenizer=TOKENIZER), CPU, 1)
    model = load_teacher(TeacherConfig(model=str(folder / "model")), CPU, "teachers[0]")
    width = shared_ids(learner, model, "teachers[0]")
    live = live_teacher(model, width, "teacher")
    module = StudentLoss(learner).eval()
    batch = _batch([[text] for text in _texts()])
    ours, gradients = _step(module, batch, [(1.0, live.targets(batch))], DISTIL)
    module.zero_grad()
    plain = torch.zeros(())
    for text in _texts():
        ids = _ids(text)
        with torch.no_grad():
            expected = model.model(ids, use_cache=False).logits[0, :-1, :width].log_softmax(-1)
        found = learner.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        plain = plain + (expected.exp() * (expected - found)).sum(-1)[torch.from_numpy(text.supervised[1:])].sum()
    (plain / batch.supervised_tokens).backward()
    _same("the divergence", ours, plain / batch.supervised_tokens)
    for name, parameter in learner.model.named_parameters():
        assert parameter.grad is not None
        _same(f"the gradient of {name}", gradients[name], parameter.grad)
    return ""


def packing(folder: Path) -> str:
    """Loss and gradient of documents in one row are those of documents in rows of their own."""
    learner = _loaded(folder)
    check_fit(DataConfig(sources=[{"files": "x"}], max_length=128, packing=True), "data", "the student", learner)
    module = StudentLoss(learner).eval()
    first, second, third = _texts()
    alone, apart = _step(module, _batch([[first], [second], [third]]), [], PLAIN)
    module.zero_grad()
    together, gradients = _step(module, _batch([[first, third], [second]]), [], PLAIN)
    _same("the loss", together, alone)
    for name, gradient in apart.items():
        _same(f"the gradient of {name}", gradients[name], gradient)
    return ""


def writing(folder: Path) -> str:
    """Texts of several prompts, two of each, of which some end early, have the log-probabilities of a pass over each alone."""
    writer = _loaded(folder)
    stops = range(0, writer.vocabulary, 12)
    engine = TransformersEngine(writer, SamplingConfig(max_new_tokens=24), stop_ids=stops)
    prompts = [text.ids[:length] for text, length in zip(_texts(), (5, 9, 9), strict=True)]
    asked = [GenerationRequest(prompt, seed) for prompt in prompts for seed in (1, 2)]
    written = engine.generate(asked)
    if len({len(text.ids) for text in written}) < 2:
        raise Off("no text ended before another")
    writer.model.eval()
    for ask, text in zip(asked, written, strict=True):
        whole = torch.from_numpy(np.concatenate([ask.ids, text.ids])[None].astype(np.int64))
        with torch.no_grad():
            logits = writer.model(whole, use_cache=False).logits[0, len(ask.ids) - 1 : -1, : writer.vocabulary]
        chances = logits.log_softmax(-1).gather(-1, whole[0, len(ask.ids) :, None]).squeeze(-1)
        _same("the log-probabilities", torch.from_numpy(text.logprobs), chances)
    return engine.way.slower


def bf16(folder: Path) -> str:
    """In bfloat16 it loads as student and as teacher, its loss is near the one in float32, and a step can be taken."""
    batch = _batch([[text] for text in _texts()])
    exact, _ = _step(StudentLoss(_loaded(folder)).eval(), batch, [], PLAIN)
    learner = _loaded(folder, "bfloat16")
    module = StudentLoss(learner).eval()
    ours, gradients = _step(module, batch, [], PLAIN)
    _same("the loss", ours, exact, 5e-2)
    if not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
        raise Off("a gradient is not finite")
    torch.optim.AdamW(learner.model.parameters(), lr=1e-3).step()
    after, _ = _step(module, batch, [], PLAIN)
    if not math.isfinite(float(after)):
        raise Off("the loss after a step is not finite")
    load_teacher(TeacherConfig(model=str(folder / "model"), dtype="bfloat16"), CPU, "teachers[0]")
    return ""


def resume(folder: Path) -> str:
    """A run that is ended after two of three steps and started again has the same weights as one that was not."""
    recipe = {
        "student": {"model": str(folder / "model")},
        "data": {"sources": [{"files": "shipped:corpus/heldout.parquet"}], "max_length": 48, "packing": False},
        "train": {"steps": 3, "batch_size": 2},
        "checkpoint": {"every": 2},
        "log": {"tensorboard": False},
    }
    with redirect_stdout(StringIO()):
        train(load_recipe({**recipe, "run": str(folder / "whole")}))
        try:
            train(load_recipe({**recipe, "run": str(folder / "cut")}), [_EndAfter(2)])
        except _Ended:
            train(load_recipe({**recipe, "run": str(folder / "cut")}))
    whole, cut = (
        load_file(folder / run / "checkpoints" / "latest" / "model" / "model.safetensors") for run in ("whole", "cut")
    )
    before = load_file(folder / "model" / "model.safetensors")
    if all(torch.equal(before[name], whole[name]) for name in before):
        raise Off("nothing was learned")
    for name, tensor in whole.items():
        _same(name, cut[name], tensor, 0.0)
    return ""


MODES: Mapping[str, Callable[[Path], str]] = {
    mode.__name__: mode for mode in (student, teacher, packing, writing, bf16, resume)
}


class _Ended(Exception):
    """Stands for whatever ends a process."""


class _EndAfter(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def saved(self, run: Run, checkpoint: Path) -> None:
        if run.step == self._step:
            raise _Ended


def _loaded(folder: Path, dtype: Any = "float32") -> LanguageModel:
    return load_student(StudentConfig(model=str(folder / "model"), dtype=dtype), CPU, 0)


def _texts() -> list[Example]:
    numbers = np.random.default_rng(0)
    texts = []
    for length in (21, 40, 13):
        ids = numbers.integers(5, 2048, length).astype(np.int32)
        supervised = numbers.random(length) < 0.7
        supervised[0], supervised[-1] = False, True
        texts.append(Example(key=str(length), text="", ids=ids, supervised=supervised, supervised_bytes=1))
    return texts


def _batch(rows: Sequence[Sequence[Example]]) -> Batch:
    return collate(rows, 0)


def _ids(text: Example) -> Tensor:
    return torch.from_numpy(text.ids.astype(np.int64))[None]


def _own_loss(model: Any, text: Example) -> Tensor:
    logits = model(_ids(text), use_cache=False).logits[0, :-1].float()
    wanted = torch.from_numpy(text.supervised[1:])
    return F.cross_entropy(logits[wanted], _ids(text)[0, 1:][wanted], reduction="sum")


def _step(module: StudentLoss, batch: Batch, targets: Any, knobs: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    loss, _ = module(batch, targets, float(batch.supervised_tokens), knobs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None}


def _same(what: str, ours: Tensor, theirs: Tensor, tolerance: float = EXACT) -> None:
    off, largest = (float(x.detach().float().abs().max()) for x in (ours - theirs, theirs))
    if not off <= tolerance * max(largest, 1e-3):
        raise Off(f"{what} is off by {off:.2g} of {largest:.2g}")
