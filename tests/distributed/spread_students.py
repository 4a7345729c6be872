"""A student that is spread over ranks, beside the same one in one process: how far loss, sums and gradients are apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tiny_families import FAMILIES, FAMILY_TARGET, TARGETS, Make, V, batches, make_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from potstill.losses import label_logprobs
from potstill.models import LanguageModel, evaluating
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.parallel.context import Context, split_context
from potstill.parallel.tensor import split_tensors
from potstill.teachers.confidence import row_confidence
from potstill.types import Batch

Spread = Callable[[LanguageModel], Any]
STAT_SUMS = ("stat_rows", "kl", "teacher_entropy", "student_entropy", "agreement")


def passes(
    student: LanguageModel, made: Sequence[Batch], settings: LossSettings, make: Make, stat_rows: int = 7
) -> dict[str, Any]:
    """Loss, sums and gradients of a step of several passes. With `context`, of all its ranks."""
    module = StudentLoss(student).train()
    divisor, sums = sum(batch.supervised_tokens for batch in made), {}
    for batch in made:
        loss, found = module(batch, make(batch), divisor, settings, stat_rows)
        loss.backward()
        sums = {name: value + sums.get(name, 0.0) for name, value in found.items()}
    gradients = {name: full(parameter.grad) for name, parameter in student.model.named_parameters()}
    if student.context is not None:
        for name in sorted({*sums, *STAT_SUMS}):  # a rank without rows has none to sample
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64))
        for _, value in sorted({**sums, **gradients}.items()):
            dist.all_reduce(value, group=student.context.group)
    return {"sums": sums, "gradients": gradients}


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each: of sums and of parameters' gradients, as a share of the largest value."""
    assert found["sums"].keys() == alone["sums"].keys() and found["gradients"].keys() == alone["gradients"].keys()
    far = {}
    for part in ("sums", "gradients"):
        for name, value in alone[part].items():
            if not value.isnan().all():
                far[name] = float((found[part][name] - value).abs().max() / value.abs().max().clamp(min=1e-6))
            else:
                far[name] = 0.0 if found[part][name].isnan().all() else 1.0
    return far


def spread_over(tp: int = 1, cp: int = 1) -> Spread:
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))

    def spread(student: LanguageModel) -> None:
        if tp > 1:
            split_tensors(student.model, mesh["tp"])
            student.group = mesh["tp"].get_group()
        if cp > 1:
            student.context = Context(mesh["cp"].get_group(), cp, mesh["cp"].get_local_rank())
            split_context(student.model)

    return spread


@contextmanager
def exact() -> Iterator[None]:
    """Gemma's norms and attention compute in float32, where the order of a sum shows: in float64 it does not."""
    usual, softmax = torch.Tensor.float, torch.nn.functional.softmax

    def unless_in_a_model(tensor: torch.Tensor) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return tensor if caller.startswith("transformers.models.") else usual(tensor)

    torch.Tensor.float = unless_in_a_model  # type: ignore[method-assign,assignment]
    torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim)
    try:
        yield
    finally:
        torch.Tensor.float = usual  # type: ignore[method-assign]
        torch.nn.functional.softmax = softmax


def compare(spread: Spread, family: str, name: str | None = None, passed: int = 2) -> dict[str, float]:
    settings, make = FAMILY_TARGET if name is None else TARGETS[name]
    made = batches(passed, behaviour=name == "policy_gradient_kl")
    student = make_model(family)
    spread(student)
    rows = 7 if student.context is None else 10**6  # all: which are sampled depends on the ranks
    with exact() if family.startswith("gemma") else nullcontext():
        alone = passes(make_model(family), made, settings, make, rows)
        return apart(passes(student, made, settings, make, rows), alone)


QUICK = ["qwen3", "phi3", "hidden · jsd · T 1.7", "top-k · forward_kl · T 1.0", "sampled", "common_vocab · dense"]
QUICK += ["prefix_marginal", "policy_gradient_kl", "hidden · repeat"]
WITHOUT_A_PLAN = ("qwen3-moe", "mixtral", "gpt2", "gpt-oss")


def in_tensors(world: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of families by name, and of targets."""
    spread = spread_over(tp=world)
    found = {name: compare(spread, *((name,) if name in FAMILIES else ("llama-tied", name))) for name in names}
    return found | {"readers": readers(spread)}


QUICK_CONTEXT = ["gemma3", "gemma2", "top-k · forward_kl · T 1.0", "common_vocab · dense", "policy_gradient_kl"]
QUICK_CONTEXT += ["hidden · repeat"]


def in_contexts(cp: int, tp: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    spread = spread_over(tp, cp)
    return {name: compare(spread, *((name,) if name in FAMILIES else ("llama-tied", name))) for name in names}


def everything() -> list[str]:
    return [*(family for family in FAMILIES if family not in WITHOUT_A_PLAN), *TARGETS]


@torch.no_grad()
def readers(spread: Spread) -> dict[str, float]:
    """Whatever reads a head, of a model whose head is spread and of a whole one."""
    whole, student = make_model("gemma2"), make_model("gemma2")
    spread(student)
    (batch,) = batches(1)
    labels = batch.rows.labels
    found: list[dict[str, Tensor]] = []
    for model in (student, whole):
        target = model.at_rows(model.hidden(batch, batch.rows.student), V - 4)
        seen = {"logits": model.logits(target.hidden), "narrow": model.logits(target.hidden, V - 4)}
        seen["labels"] = label_logprobs(target, labels.clone().fill_(V - 2), 1.7).exp()  # one that it does not have
        for what in ("ce", "entropy", "max_probability"):
            confidence = row_confidence(target, labels, what)
            assert confidence is not None
            seen[what] = confidence[0]
        with evaluating(model.model):
            seen["text"] = model.model.generate(
                batch.input_ids[:1, :5],
                attention_mask=torch.ones(1, 5),
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            ).double()
        found.append(seen)
    assert (found[1]["text"][0, 5:] > 0).any() and found[1]["logits"].shape[1] == V
    return {name: float((found[0][name] - value).abs().max()) for name, value in found[1].items()}
