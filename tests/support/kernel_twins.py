"""Calls of the loss by the Triton kernels and by the torch blocks, in float32 and float64: every kind of target, divergence,
temperature, width and number of vocabulary slices. tests/unit/losses/test_kernels.py runs them in Triton's interpreter, and
`make gpu-check` on a GPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tiny_prefix import random_prefix_marginal
from torch import Tensor

from potstill.losses import DIVERGENCES, DenseTarget, SampledTarget, TopKTarget, fused, fused_linear_kd
from potstill.losses.kernels import choose
from potstill.parallel.vocab import VocabShard
from potstill.types import LogitsTarget, MeanTarget, Target

HIDDEN, TEACHER, KEPT = 6, 5, 12
# Of values and of gradients, relative to the largest. A gradient in bfloat16 is cut off by the interpreter, not rounded.
TOLERANCE = {torch.float32: (3e-5, 3e-5), torch.bfloat16: (3e-5, 2**-6)}


@dataclass(frozen=True)
class Twin:
    """One call, made from a seed; `slices` are the sizes of the ranks' vocabularies."""

    target: str
    divergence: str = "forward_kl"
    temperature: float = 1.0
    width: int = 700
    narrower: int = 0  # by so many ids is the teacher's vocabulary smaller
    slices: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [self.target, self.divergence, f"T{self.temperature:g}", f"V{self.width}"]
        parts += [f"-{self.narrower}"] * bool(self.narrower) + ["bf16"] * (self.dtype == torch.bfloat16)
        parts += ["+".join(map(str, self.slices))] * bool(self.slices)
        return " ".join([*parts, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def _columns(self) -> slice:
        """That this rank holds."""
        rank = dist.get_rank()
        return slice(sum(self.slices[:rank]), sum(self.slices[: rank + 1]))

    def run(
        self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> dict[str, Tensor]:
        """Values and gradients, with the logits and all that follows in at least `dtype`."""
        made = _Made(self, device)
        options = {**self.options}
        ce = options.pop("ce_weight", 0.0)
        hidden, weight, bias = (made.leaf(name, dtype) for name in ("hidden", "weight", "bias"))
        target = made.target(dtype)
        if group is not None:
            weight, bias = (x.detach()[self._columns].clone().requires_grad_() for x in (weight, bias))
            if isinstance(target, LogitsTarget):
                start, held = self._columns.start, self.width - self.narrower
                target = target.narrow(min(start, held), min(max(held - start, 0), self._columns.stop - start))
        out = fused_linear_kd(
            hidden, weight, target, labels=made.labels, row_weight=made.row_weight, divergence=self.divergence,
            temperature=self.temperature, beta=0.3, bias=bias, kd_weight=0.7, ce_weight=made.per_row if ce == "rows" else ce,
            group=group, chunk_rows=3, **options,
        )  # fmt: skip
        (3.0 * out.loss).backward()
        found = {"kd": out.kd, "ce": out.ce, "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
        if self.slices and group is None:
            found |= {"weight": found["weight"][self._columns], "bias": found["bias"][self._columns]}
        return {name: value.detach().double().cpu() for name, value in found.items()}


class _Made:
    """The tensors of a twin."""

    def __init__(self, twin: Twin, device: torch.device) -> None:
        g = torch.Generator().manual_seed(7)
        self._twin, self._device = twin, device
        n, v = 5, twin.width
        self._prefix = None
        if twin.target == "prefix_marginal":
            hidden, weight, _, self._prefix = random_prefix_marginal(2, students=v - 4, rows=n, dtype=torch.float32)
        else:
            hidden, weight = torch.randn(n, HIDDEN, generator=g), torch.randn(v, HIDDEN, generator=g)
        self._leaves = {"hidden": hidden, "weight": weight, "bias": torch.randn(v, generator=g)}
        own = hidden @ weight.t() + self._leaves["bias"]
        self._teacher = own[:, : v - twin.narrower] + torch.randn(n, v - twin.narrower, generator=g)
        labels = torch.randint(0, v, (n,), generator=g)
        logp = (self._teacher / twin.temperature).log_softmax(-1)
        self._logp, self._ids = logp.topk(min(KEPT, logp.shape[1]))
        labels[0], labels[1] = self._ids[0, 2], self._ids[1, 0]  # two labels are kept entries
        self._tail = torch.logsumexp(logp.scatter(-1, self._ids, -math.inf), -1)
        rest = logp.scatter(-1, self._ids, -math.inf).exp()
        self._samples = torch.multinomial(rest + 1e-30 * (rest > 0), 9, replacement=True, generator=g)
        self._drawn = torch.multinomial(logp.exp(), KEPT, replacement=True, generator=g)
        self.labels, self.row_weight = labels.to(device), (torch.rand(n, generator=g) + 0.5).to(device)
        self.per_row = torch.randn(n, generator=g).to(device)

    def leaf(self, name: str, dtype: torch.dtype) -> Tensor:
        """The student's own dtype is that of its hidden states; the others are as they are trained."""
        value = self._leaves[name].to(self._device)
        if name != "bias" and self._twin.dtype == torch.bfloat16:
            value = value.bfloat16()
        return (value if dtype == torch.float32 else value.to(dtype)).clone().requires_grad_()

    def target(self, dtype: torch.dtype) -> Target | None:
        teacher, d = self._teacher.to(dtype), self._device
        kind, width = self._twin.target, self._twin.width - self._twin.narrower
        cut = None if width == self._twin.width else width
        if kind == "none":
            return None
        if kind == "dense":
            return DenseTarget(logits=teacher).to(d)
        if kind == "minus infinity":
            teacher = teacher.clone()
            teacher[0, 5] = teacher[1, ::2] = -math.inf
            return DenseTarget(logits=teacher).to(d)
        if kind == "mean":
            return MeanTarget(shares=(0.3, 0.7), parts=(LogitsTarget(teacher), LogitsTarget(teacher.flip(-1)))).to(d)
        if kind == "prefix_marginal":
            assert self._prefix is not None
            source = LogitsTarget(self._prefix.source.logits.to(dtype))
            return replace(self._prefix, source=source, beyond=self._prefix.beyond.to(dtype)).to(d)
        if kind == "sampled":
            shares = torch.full(self._drawn.shape, 1 / KEPT, dtype=dtype)
            return SampledTarget(self._drawn, shares, width=cut).to(d)
        entries = TopKTarget(self._ids, self._logp.to(dtype), self._tail.to(dtype), width=cut)
        if kind == "tail samples":
            entries = replace(
                entries, tail_samples=self._samples, tail_entropy=torch.linspace(0.1, 0.9, 5, dtype=dtype)
            )
        if kind == "absent entries":
            absent = torch.zeros_like(self._ids, dtype=torch.bool)
            absent[0, 3:5], absent[2] = True, True
            ids = torch.where(absent, self._ids[:, :1], self._ids)
            entries = replace(
                entries, ids=ids, logprobs=self._logp.to(dtype).masked_fill(absent, -math.inf), absent=absent
            )
        return entries.to(d)


@contextmanager
def by_kernels(wanted: bool, block: int | None = None) -> Iterator[None]:
    """Whether the calls inside are made by the kernels, on a device that runs them; in blocks of so many columns."""
    chooser, usual = fused.kernels_for, None
    if wanted and block is not None:
        from potstill.losses.kernels import chunk

        usual, chunk.BLOCK = chunk.BLOCK, block
    fused.kernels_for = _must if wanted else _never
    try:
        yield
    finally:
        fused.kernels_for = chooser
        if usual is not None:
            chunk.BLOCK = usual


def _must(call: Any) -> Any:
    found = choose.kernels_for(call)
    assert found is not None, "the kernels were not chosen"
    return found


def _never(call: Any) -> None:
    return None


def errors(twin: Twin, device: str = "cpu", block: int | None = 256, group: Any = None) -> dict[str, float]:
    """How far the kernels are from the torch blocks, in float32 and in float64: of values and gradients, relative to the
    largest there is."""
    where = torch.device(device)
    with by_kernels(True, block):
        found = twin.run(torch.float32, where, group)
    with by_kernels(False):
        torch_blocks, exact = twin.run(torch.float32, where, group), twin.run(torch.float64, torch.device("cpu"))
    apart: dict[str, float] = {}
    for other, reference in (("torch", torch_blocks), ("float64", exact)):
        for name, value in found.items():
            assert torch.isfinite(value).all(), f"{twin.name}: {name} is not finite"
            size = reference[name].abs().max().clamp(min=1e-6)
            apart[f"{name} / {other}"] = float((value - reference[name]).abs().max() / size)
    return apart


def check(twin: Twin, device: str = "cpu", block: int | None = 256, group: Any = None) -> float:
    """AssertionError where a twin is further off than rounding; the largest error of its gradients otherwise."""
    of_value, of_gradient = TOLERANCE[twin.dtype]
    found = errors(twin, device, block, group)
    for name, error in found.items():
        allowed = of_value if name.split()[0] in ("kd", "ce") else of_gradient
        assert error <= allowed, f"{twin.name}: {name} is off by {error:.1e}, and {allowed:.1e} is allowed"
    return max(found.values())


def twins(quick: bool) -> list[Twin]:
    """Every divergence × target × temperature × width; the quick ones have each of these at least once."""
    cap = {"softcap": 4.0, "logit_scale": 0.5}
    found = []
    for number, (divergence, kind) in enumerate(itertools.product(DIVERGENCES, ("dense", "top-k"))):
        for temperature, narrower, ce in ((1.0, 0, 0.0), (2.0, 33, 0.5), (0.7, 0, "rows"), (1.0, 7, 0.5)):
            width = (700, 1024, 513, 4099)[number % 4]
            found.append(Twin(kind, divergence, temperature, width, narrower, options={"ce_weight": ce}))
        found.append(Twin(kind, divergence, options={**cap, "entropy_gate": 0.7, "ce_weight": 0.3}))
        found.append(Twin(kind, divergence, dtype=torch.bfloat16, options={"ce_weight": 0.3}))
    for divergence in DIVERGENCES:
        found.append(Twin("minus infinity", divergence, options={"ce_weight": 0.3}))
        found.append(Twin("mean", divergence, 1.5))
        found.append(Twin("prefix_marginal", divergence, 1.3, 29))
        found.append(Twin("dense", divergence, width=13))
    for kind, dtype in itertools.product(("sampled", "none", "tail samples", "absent entries"), TOLERANCE):
        for narrower, options in ((0, {}), (21, {"ce_weight": 0.5}), (0, {**cap, "ce_weight": "rows"})):
            found.append(Twin(kind, narrower=narrower, dtype=dtype, options=options))
        if kind in ("sampled", "none"):
            found.append(Twin(kind, temperature=2.0, dtype=dtype, options={"ce_weight": 0.5}))
    return found[::7] + found[-9:] if quick else found


def sliced(quick: bool) -> list[Twin]:
    """Over two ranks: even and uneven slices, one of which may have none of the teacher's ids."""
    found = []
    cuts = ((350, 350), 0, 1.0), ((699, 1), 33, 2.0), ((300, 400), 410, 1.0), ((320, 380), 0, 2.0)
    for slices, narrower, temperature in cuts:
        usual = {"slices": slices, "narrower": narrower, "temperature": temperature}
        for kind, divergence in itertools.product(("dense", "top-k"), DIVERGENCES):
            found.append(Twin(kind, divergence, options={"ce_weight": 0.5}, **usual))
            found.append(Twin(kind, divergence, options={"entropy_gate": 0.7, "softcap": 4.0}, **usual))
        for kind in ("sampled", "none", "tail samples", "absent entries", "minus infinity"):
            found.append(Twin(kind, options={"ce_weight": 0.5}, dtype=torch.bfloat16, **usual))
    return found[::5] if quick else found


def check_traffic(group: dist.ProcessGroup) -> None:
    """A step of training sends as few floats a row by the kernels as by the torch blocks: at most 6 with a dense teacher."""
    reduce, sent = VocabShard._reduced, []

    def counted(shard: VocabShard, rows: tuple[Tensor, ...], operation: Any) -> tuple[Tensor, ...]:
        sent.extend(row.numel() for row in rows)
        return reduce(shard, rows, operation)

    VocabShard._reduced = counted  # type: ignore[method-assign]
    for divergence, temperature in itertools.product(DIVERGENCES, (1.0, 2.0)):
        options = {"ce_weight": 0.5, "row_values": False}
        twin, floats = Twin("dense", divergence, temperature, slices=(320, 380), options=options), {}
        for kernels in (True, False):
            sent.clear()
            with by_kernels(kernels):
                found = twin.run(torch.float32, torch.device("cpu"), group)
            floats[kernels] = sum(sent) / len(found["kd"])
        assert floats[True] <= floats[False] <= 6, f"{twin.name}: {floats}"
    VocabShard._reduced = reduce  # type: ignore[method-assign]


def main(tier: str, rank: str = "0", world: str = "1", meet: str = "") -> None:
    """A process of its own, started with TRITON_INTERPRET=1: Triton decides when its own functions and ours are decorated. On
    two ranks the twins with slices, with real reductions between the passes. The last line is how many there were."""
    torch.set_num_threads(1)
    quick = tier == "quick"
    if int(world) == 1:
        found = [check(twin) for twin in twins(quick)]
    else:
        dist.init_process_group("gloo", f"file://{meet}", rank=int(rank), world_size=int(world))
        found = [check(twin, group=dist.group.WORLD) for twin in sliced(quick)]
        check_traffic(dist.group.WORLD)
        dist.destroy_process_group()
    print(f"largest error {max(found):.1e}\n{len(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
