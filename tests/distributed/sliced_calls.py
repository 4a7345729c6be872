"""Calls of the loss whose head is cut into slices of the vocabulary, and the processes that make them.

Every call is made whole, from a seed; a rank cuts its own columns out of it. So the parent can make the same call in one
process, and no tensor has to be sent to a child.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tiny_cross import random_case, truncated
from tiny_prefix import random_prefix_marginal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from potstill.losses import DIVERGENCES, DenseTarget, SampledTarget, TopKTarget, fused, fused_linear_kd
from potstill.types import Dense, LogitsTarget, MeanTarget

VOCABULARY, ROWS = 37, 8
# 37 is no multiple of either; one rank holds a single id, and not always the last.
SLICES = {2: [36, 1], 4: [11, 1, 14, 11]}


@dataclass(frozen=True)
class SlicedCall:
    sizes: list[int]
    hidden: Tensor
    weight: Tensor
    targets: list[tuple[float, Any]]
    bias: Tensor | None = None
    whole_teacher: bool = False  # each rank is given all of the teacher's ids
    chunk_bytes: int = fused.CHUNK_BYTES
    options: dict[str, Any] = field(default_factory=dict)

    def columns(self, rank: int) -> slice:
        return slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))

    def run(
        self, rank: int | None = None, group: dist.ProcessGroup | None = None, joined: bool = True
    ) -> dict[str, Tensor]:
        """Value and gradients; of all columns, or of this rank's. `joined`: values in parts are put together."""
        columns = slice(None) if rank is None else self.columns(rank)
        weight = self.weight[columns].clone().requires_grad_()
        bias = None if self.bias is None else self.bias[columns].clone().requires_grad_()
        hidden = self.hidden.clone().requires_grad_()
        targets = [(share, t if self.whole_teacher or not t.dense else cut(t, columns)) for share, t in self.targets]
        usual, fused.CHUNK_BYTES = fused.CHUNK_BYTES, self.chunk_bytes
        try:
            out = fused_linear_kd(hidden, weight, targets, bias=bias, group=group, **self.options)
        finally:
            fused.CHUNK_BYTES = usual
        (3.0 * out.loss).backward()
        found = {"loss": out.loss.detach(), "kd": out.kd, "ce": out.ce, "hidden": hidden.grad, "weight": weight.grad}
        if out.here is not None and joined:
            assert not out.ce[~out.here].any()  # it is whole on one rank
            for values in (out.kd, out.ce):
                dist.all_reduce(values, group=group)
        return found if bias is None else {**found, "bias": bias.grad}


def cut(target: Dense, columns: slice) -> Dense:
    """The teacher's ids among these columns."""
    start, stop, _ = columns.indices(target.width)
    return target.narrow(start, max(0, stop - start))


# "everything" is labels, bias, cap, scale, weights of rows, chunks smaller than the rows and a student with padding ids.
OPTION_SETS = ["plain", "everything", "gate", "empty ids"]
KINDS = ["dense hidden", "dense logits", "top-k", "sampled"]


def make(world: int, divergence: str, kind: str, temperature: float, option_set: str) -> SlicedCall:
    generator = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    everything = option_set == "everything"
    width = VOCABULARY - 12 if everything else VOCABULARY  # the last of four ranks has no id of the teacher
    hidden, weight, bias = randn(ROWS, 5), randn(VOCABULARY, 5), randn(VOCABULARY)
    teacher = DenseTarget(randn(ROWS, 6), randn(width, 6), bias=randn(width), logit_scale=0.8)
    options: dict[str, Any] = {"divergence": divergence, "temperature": temperature, "beta": 0.3}
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[0], labels[1] = 0, VOCABULARY - 1
    if option_set != "plain":
        options |= {"labels": labels, "ce_weight": 0.4, "kd_weight": 0.7}
    if everything:
        options |= {"softcap": 5.0, "logit_scale": 1.3, "chunk_rows": 5}
        options["row_weight"] = torch.rand(ROWS, dtype=torch.float64, generator=generator)
        teacher = replace(teacher, head=replace(teacher.head, softcap=4.0))
    if option_set == "gate":
        options["entropy_gate"] = 1.5
    if option_set == "empty ids":  # on both sides, on the student's, on the teacher's; and all that some rank holds
        bias[[2, 5, 11, VOCABULARY - 1]] = -math.inf
        teacher.head.bias[[2, 7, 11]] = -math.inf
        labels[1] = 5
    head = teacher.head
    logits = (teacher.hidden @ head.weight.t() + head.bias) * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    target: Any = teacher
    if kind == "dense logits":
        target = DenseTarget(logits=logits)
    elif kind == "top-k":
        top = (logits / temperature).log_softmax(-1).topk(6)
        target = TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1)))
    elif kind == "sampled":
        shares = torch.rand(ROWS, 5, dtype=torch.float64, generator=generator)
        target = SampledTarget(torch.randint(width, (ROWS, 5), generator=generator), shares / shares.sum(-1)[:, None])
    with_bias = everything or option_set == "empty ids"
    return SlicedCall(SLICES[world], hidden, weight, [(1.0, target)], bias if with_bias else None, options=options)


def grid() -> Iterator[tuple[str, str, float, str]]:
    for divergence in DIVERGENCES:
        for kind in KINDS:
            if kind != "sampled" or divergence == "forward_kl":
                for temperature in (1.0, 2.5):
                    for option_set in OPTION_SETS:
                        if option_set != "gate" or temperature != 1.0:
                            yield divergence, kind, temperature, option_set


def special(world: int) -> dict[str, SlicedCall]:
    plain = make(world, "jsd", "dense hidden", 1.0, "everything")
    top_k = make(world, "jsd", "top-k", 2.5, "everything")
    logits = make(world, "reverse_kl", "dense logits", 1.0, "everything")
    hidden = make(world, "forward_kl", "dense hidden", 1.0, "everything")
    no_rows = replace(plain, hidden=plain.hidden[:0], targets=[(1.0, plain.targets[0][1].select(torch.arange(0)))])
    no_rows.options.update(labels=torch.zeros(0, dtype=torch.int64), row_weight=torch.zeros(0))
    again = make(world, "jsd", "dense hidden", 1.0, "everything")
    return {
        "no rows": no_rows,
        "two targets": replace(again, targets=[(0.3, again.targets[0][1]), (1.7, top_k.targets[0][1])]),
        "weights by row": replace(
            again, targets=[(torch.arange(ROWS) / 3.0, again.targets[0][1]), (0.4, hidden.targets[0][1])]
        ),
        "values in parts": in_parts(again),
        "values in parts, T ≠ 1": in_parts(make(world, "skew_kl", "dense logits", 2.5, "gate")),
        "values in parts, no labels": in_parts(make(world, "forward_kl", "dense logits", 2.5, "plain")),
        "values in parts, top-k": in_parts(make(world, "reverse_kl", "top-k", 2.5, "everything")),
        "values in parts, top-k with draws": in_parts(
            with_draws(make(world, "forward_kl", "top-k", 1.0, "everything"))
        ),
        "values in parts, sampled": in_parts(make(world, "forward_kl", "sampled", 2.5, "everything")),
        "values in parts, across": in_parts(across(world)["across · projection · dense · jsd"]),
        "cross-entropy's weights by row": by_row(again),
        "cross-entropy's weights by row, T ≠ 1": by_row(top_k),
        "cross-entropy alone, weights by row": replace(by_row(again), targets=[]),
        "the mean of two": replace(again, targets=[(1.0, mean_of(again, top=4.0))]),
        "the mean of two, T ≠ 1": mean_call(make(world, "forward_kl", "dense hidden", 2.5, "everything")),
        "the mean of two, whole": replace(mean_call(logits), sizes=even(world), whole_teacher=True),
        "whole teacher, hidden and head": replace(again, sizes=even(world), whole_teacher=True),
        "whole teacher, logits": replace(make(world, "tvd", "dense logits", 2.5, "plain"), whole_teacher=True),
        "whole narrower teacher, logits": replace(logits, sizes=even(world), whole_teacher=True),
        "whole narrower teacher, hidden and head": replace(hidden, sizes=even(world), whole_teacher=True),
        "chunks from a memory budget": many_rows(world),
        "one id a rank": one_id_a_rank(world),
        "top-k with absent entries": with_absent(make(world, "jsd", "top-k", 1.0, "everything")),
        "top-k with draws from the rest": with_draws(make(world, "forward_kl", "top-k", 1.0, "everything")),
        **across(world),
        **prefix_marginal(world),
        **clamped(world),
        "bfloat16": narrow_dtype(again, torch.bfloat16),
        "float32": narrow_dtype(again, torch.float32),
    }


def clamped(world: int) -> dict[str, SlicedCall]:
    """Some of the rows lie beyond the limit, and some do not."""
    made = {
        "clamped": make(world, "reverse_kl", "dense hidden", 2.5, "everything"),
        "clamped, top-k": make(world, "jsd", "top-k", 1.0, "everything"),
    }
    for name, call in list(made.items()):
        clip = 1.001 * float(call.run()["kd"].median())
        made[name] = replace(call, options={**call.options, "token_clip": clip})
        made[f"{name}, in parts"] = in_parts(made[name])
    return made


def in_parts(call: SlicedCall) -> SlicedCall:
    return replace(call, options={**call.options, "row_values": False})


def by_row(call: SlicedCall) -> SlicedCall:
    """Some below 0, one 0."""
    return replace(call, options={**call.options, "ce_weight": torch.arange(ROWS) / 4.0 - 0.75})


def mean_of(call: SlicedCall, top: float = 1.0) -> MeanTarget:
    """With the same teacher upside down."""
    target = call.targets[0][1]
    name = "logits" if isinstance(target, LogitsTarget) else "hidden"
    return MeanTarget((0.3, 0.7), (target, replace(target, **{name: -top * getattr(target, name)})))


def mean_call(call: SlicedCall) -> SlicedCall:
    return replace(call, targets=[(1.0, mean_of(call))])


def with_absent(call: SlicedCall) -> SlicedCall:
    """The second and the last entry are none, and repeat the first one's id."""
    ((share, target),) = call.targets
    absent = torch.zeros_like(target.ids, dtype=torch.bool)
    absent[:, [1, -1]] = True
    ids = torch.where(absent, target.ids[:, :1], target.ids)
    tail = torch.logaddexp(target.tail, target.logprobs[:, [1, -1]].logsumexp(-1))
    whole = replace(target, ids=ids, logprobs=target.logprobs.masked_fill(absent, -math.inf), tail=tail, absent=absent)
    return replace(call, targets=[(share, whole)])


def with_draws(call: SlicedCall) -> SlicedCall:
    """Three ids of each row that are not among those kept, one of them twice."""
    ((share, target),) = call.targets
    others = torch.ones(ROWS, VOCABULARY - 12).scatter(-1, target.ids, 0.0).nonzero()[:, 1].view(ROWS, -1)
    rest = others[:, [0, 7, 11, 7]]
    entropy = torch.full((ROWS,), 0.5, dtype=torch.float64)
    return replace(call, targets=[(share, replace(target, tail_samples=rest, tail_entropy=entropy))])


def across(world: int) -> dict[str, SlicedCall]:
    """Teachers with another tokenizer, by every method; chunks of several rows, and rows in no chunk."""
    found = {}
    sizes = {2: [22, 1], 4: [7, 1, 9, 6]}[world]
    for method in ("common_vocab", "projection", "span_likelihood", "uld"):
        hidden, weight, labels, target = random_case(3, method)
        for kind in ("dense", "top-k"):
            for divergence in ("forward_kl", "jsd"):
                whole = target if kind == "dense" else truncated(target, 6)
                options = {"labels": labels, "ce_weight": 0.4, "divergence": divergence, "chunk_rows": 5}
                call = SlicedCall(sizes, hidden, weight, [(1.0, whole)], options=options)
                found[f"across · {method} · {kind} · {divergence}"] = call
    return found


def prefix_marginal(world: int) -> dict[str, SlicedCall]:
    """29 ids, of which the last 4 are padding; one rank holds a single id, another none that the teacher knows."""
    found = {}
    for name, sizes in (("uneven", {2: [28, 1], 4: [11, 1, 14, 3]}), ("even", {2: [15, 14], 4: [8, 7, 7, 7]})):
        for temperature, divergence in ((1.0, "forward_kl"), (2.5, "jsd")):
            hidden, weight, labels, target = random_prefix_marginal(3)
            options = {
                "labels": labels,
                "ce_weight": 0.4,
                "divergence": divergence,
                "temperature": temperature,
                "chunk_rows": 5,
            }
            call = SlicedCall(sizes[world], hidden, weight, [(1.0, target)], whole_teacher=True, options=options)
            found[f"prefix-marginal · {name} · {divergence}"] = call
    return found


def even(world: int) -> list[int]:
    return [VOCABULARY // world] * (world - 1) + [VOCABULARY - VOCABULARY // world * (world - 1)]


def many_rows(world: int) -> SlicedCall:
    """By the memory budget alone the rank with one id would take all rows at once, and wait for the others for ever."""
    torch.manual_seed(5)
    double = {"dtype": torch.float64}
    hidden, weight = torch.randn(50, 5, **double), torch.randn(VOCABULARY, 5, **double)
    teacher = DenseTarget(logits=torch.randn(50, VOCABULARY, **double))
    budget = 8 * max(SLICES[world]) * 20  # 20 rows of the largest slice
    return SlicedCall(SLICES[world], hidden, weight, [(1.0, teacher)], chunk_bytes=budget)


def one_id_a_rank(world: int) -> SlicedCall:
    """The teacher is uniform; the student is too but for the first id, which has three times the mass of any other."""
    weight = torch.zeros(world, 1, dtype=torch.float64)
    weight[0] = math.log(3.0)
    teacher = DenseTarget(logits=torch.zeros(1, world, dtype=torch.float64))
    return SlicedCall([1] * world, torch.ones(1, 1, dtype=torch.float64), weight, [(1.0, teacher)])


def narrow_dtype(call: SlicedCall, dtype: torch.dtype) -> SlicedCall:
    ((share, t),) = call.targets
    head = replace(t.head, weight=t.head.weight.to(dtype), bias=t.head.bias.to(dtype))
    target = replace(t, hidden=t.hidden.to(dtype), head=head)
    options = {**call.options, "row_weight": call.options["row_weight"].float()}
    parts = {name: getattr(call, name).to(dtype) for name in ("hidden", "weight", "bias")}
    return replace(call, **parts, targets=[(share, target)], options=options)


def calls(world: int) -> dict[str, SlicedCall]:
    named = {" · ".join(map(str, cell)): make(world, *cell) for cell in grid()}
    return {**named, **special(world)}


def traffic_calls(world: int) -> dict[str, SlicedCall]:
    """One chunk each, in two sizes of vocabulary and of K: what travels must not depend on either. "step" is what a step of
    training asks for: no values of single rows."""
    found = {}
    for divergence in DIVERGENCES:
        for kind in KINDS:
            if kind == "sampled" and divergence != "forward_kl":
                continue
            for v, k in ((40, 3), (400, 30)):
                torch.manual_seed(v)
                logp = torch.randn(ROWS, v).log_softmax(-1)
                top = logp.topk(k)
                target = {
                    "dense hidden": DenseTarget(torch.randn(ROWS, 4), torch.randn(v, 4)),
                    "dense logits": DenseTarget(logits=logp),
                    "top-k": TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1))),
                    "sampled": SampledTarget(top.indices, torch.full((ROWS, k), 1 / k)),
                }[kind]
                sizes = [v // world] * world
                base = SlicedCall(sizes, torch.randn(ROWS, 4), torch.randn(v, 4), [(1.0, target)])
                labels = {"labels": torch.zeros(ROWS, dtype=torch.int64), "ce_weight": 0.5}
                kinds_of_loss = {
                    "kd": {},
                    "kd+ce": labels,
                    "kd+ce T=2": {**labels, "temperature": 2.0},
                    "step": {**labels, "row_values": False},
                    "step T=2": {**labels, "temperature": 2.0, "row_values": False},
                    "gate": {"entropy_gate": 1.0},
                }
                for what, more in kinds_of_loss.items():
                    if what != "kd" and "step" not in what and divergence not in ("forward_kl", "jsd"):
                        continue
                    options = {"divergence": divergence, **more}
                    found[f"{divergence} · {kind} · {what} · {v}"] = replace(base, options=options)
    return found


class Traffic(TorchDispatchMode):
    """Every collective and how many bytes this rank gives to it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]  # a gather's output counts too
            self.seen.append((function.name(), sum(t.numel() * t.itemsize for t in tensors)))
        return function(*args, **(kwargs or {}))


REFUSED = {
    "cut elsewhere": ([19, 18], [17, 16], "rank 0 has other ids"),
    "cut elsewhere, into equal parts": ([19, 18], [18, 18], "rank 0 has other ids"),
    "one slice too wide": ([19, 18], [19, 19], "rank 1 has other ids"),
    "whole, with more ids than the student": ([19, 18], [38, 38], "the teacher has 38 ids and the student's head 37"),
}


def refusal(name: str, rank: int, group: dist.ProcessGroup) -> str:
    sizes, widths, _ = REFUSED[name]
    try:
        target = DenseTarget(logits=torch.zeros(2, widths[rank]))
        fused_linear_kd(torch.zeros(2, 3), torch.zeros(sizes[rank], 3), target, group=group)
    except ValueError as error:
        return str(error)
    return ""


def work() -> dict[str, Any]:
    """What one rank finds: it makes every call."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {"results": {name: call.run(rank, group) for name, call in calls(world).items()}}
    if world == 2:
        found["traffic"] = {}
        for name, call in traffic_calls(world).items():
            with Traffic() as traffic:
                call.run(rank, group, joined=False)
            found["traffic"][name] = traffic.seen
        found["refusals"] = {name: refusal(name, rank, group) for name in REFUSED}
    return found
