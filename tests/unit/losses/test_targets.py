"""The kinds of targets: rows chosen, moved and spread out, and a teacher with NaN in it named as such, kind by kind."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from tiny_cross import random_case, truncated
from tiny_prefix import random_prefix_marginal

from potstill.losses import fused_linear_kd
from potstill.types import (
    ChunkTarget,
    Head,
    HiddenTarget,
    LogitsTarget,
    MeanTarget,
    PrefixMarginalTarget,
    SampledTarget,
    Target,
    TokenLogprobsTarget,
    TopKTarget,
)

N, V, K = 5, 9, 3


def made() -> dict[str, Target]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    logprobs = randn(N, K + 1).log_softmax(-1)
    hidden = HiddenTarget(randn(N, 4), Head(randn(V, 4), randn(V)))
    return {
        "hidden": hidden,
        "logits": LogitsTarget(randn(N, V)),
        "mean": MeanTarget((0.25, 0.75), (hidden, LogitsTarget(randn(N, V)))),
        "prefix-marginal": random_prefix_marginal(3)[3],
        "top-k": TopKTarget(ids, logprobs[:, :K], logprobs[:, K], tail_samples=ids[:, :1], tail_entropy=torch.ones(N)),
        "sampled": SampledTarget(ids, torch.rand(N, K, generator=g), torch.ones(N)),
        "chunks": random_case(0, "common_vocab")[3],
        "chunks of top-k": truncated(random_case(0, "common_vocab")[3], 5),
        "token log-probabilities": TokenLogprobsTarget(randn(N)),
    }


# What is broken, by kind: where, and how it is called.
BROKEN = {
    "hidden": {"hidden": "hidden states are", "head.weight": "output head is", "head.bias": "output head is"},
    "logits": {"logits": "logits are"},
    "mean": {"parts.1.logits": "logits are", "parts.0.hidden": "hidden states are"},
    "prefix-marginal": {"source.logits": "logits are", "beyond": "log-probabilities are"},
    "top-k": {
        "logprobs": "log-probabilities are",
        "tail": "log-probabilities of the rest are",
        "tail_entropy": "entropies of the rest are",
    },
    "sampled": {"weights": "shares of draws are", "entropy": "entropies are"},
    "chunks": {"start.logits": "logits are", "logprob": "log-probabilities are", "inner": "log-probabilities are"},
    "chunks of top-k": {"start.logprobs": "log-probabilities are", "start.tail": "log-probabilities of the rest are"},
    "token log-probabilities": {"logprobs": "log-probabilities are"},
}


def with_value(record, path: str, value: float):
    """A copy with one number of the tensor at `path` changed."""
    name, _, rest = path.partition(".")
    if isinstance(record, tuple):
        return tuple(with_value(x, rest, value) if i == int(name) else x for i, x in enumerate(record))
    old = getattr(record, name)
    if rest:
        return replace(record, **{name: with_value(old, rest, value)})
    new = old.clone()
    new.view(-1)[-1] = value
    return replace(record, **{name: new})


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in BROKEN.items() for path in paths])
def test_a_teacher_that_is_not_finite_is_named_as_such(kind, path):
    target = made()[kind]
    assert target.not_finite() is None
    for value in (math.nan, math.inf):
        assert with_value(target, path, value).not_finite() == BROKEN[kind][path]
    # An id, or a token, that the teacher gives no mass is −inf where there are logarithms.
    logarithm = path.rpartition(".")[2] in ("logits", "logprobs", "logprob", "tail", "beyond", "inner", "bias")
    assert with_value(target, path, -math.inf).not_finite() == (None if logarithm else BROKEN[kind][path])


def test_every_kind_is_here():
    assert {type(target) for target in made().values()} == set(Target.__subclasses__())


@pytest.mark.parametrize("kind", made())
def test_moving_keeps_everything(kind):
    target = made()[kind]
    moved = target.to(torch.device("cpu"))
    assert type(moved) is type(target)
    for part in fields(target):
        one, other = getattr(target, part.name), getattr(moved, part.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other)


@pytest.mark.parametrize("kind", [kind for kind in made() if kind != "token log-probabilities"])
def test_chosen_rows_have_the_values_they_had(kind):
    """Of chunks: those that lie wholly among the rows. And spread out again they are what they were."""
    target = made()[kind]
    if isinstance(target, ChunkTarget):
        hidden, head, labels, _ = random_case(0, "common_vocab")
        rows = torch.tensor([0, 1, 2, 3, 5, 7, 8, 10, 11, 12, 13, 14, 15])
    elif isinstance(target, PrefixMarginalTarget):
        hidden, head, labels, _ = random_prefix_marginal(3)
        rows = torch.tensor([0, 2, 3, 7, 9])
    else:
        hidden, head, labels = torch.randn(N, 4), torch.randn(V, 4), torch.zeros(N, dtype=torch.int64)
        rows = torch.tensor([0, 1, 4])
    whole = fused_linear_kd(hidden, head, target, labels=labels).kd
    some = target.select(rows)
    found = fused_linear_kd(hidden[rows], head, some, labels=labels[rows]).kd
    wanted = whole[rows]
    if isinstance(target, ChunkTarget) and isinstance(some, ChunkTarget):
        assert 0 < len(some.token) < len(target.token)
        kept = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, some.chunks.first, True)
        wanted = torch.where(kept, wanted, 0.0)
    torch.testing.assert_close(found, wanted)
    spread = some.spread(rows.numpy().astype(np.int64), len(hidden))
    again = fused_linear_kd(hidden, head, spread, labels=labels).kd
    torch.testing.assert_close(again[rows], wanted)
