"""`potstill align`: how two tokenizers line up, and whether the losses between them are what they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from potstill.config import CrossTokenizerConfig, SourceConfig
from potstill.config.recipe import checked
from potstill.data import Source, collate
from potstill.losses import fused_linear_kd
from potstill.models import load_tokenizer
from potstill.report.alignment import encode, show_corpus, show_text
from potstill.teachers.cross_tokenizer import ChunkView
from potstill.teachers.prefix_marginal import PrefixMarginalView
from potstill.teachers.protocols import Signal
from potstill.teachers.tokenizer_pair import TokenizerPair, aligned_chunks
from potstill.types import Batch, Example, LogitsTarget, PotstillError, Target

CHECKED_TEXT = (
    "The cafés of Zürich, naïve façades: 2,024 prices (€5) – “quoted”, 日本語 and 🙂.\n\tdef f(x): return x\n"
)
WIDTH = 16  # of the random hidden states the losses are tried on
METHODS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")


def align_pair(
    student: str,
    teacher: str,
    *,
    source: dict[str, Any] | None,
    text: str | None,
    check: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    tokenizers = [load_tokenizer(name, where) for name, where in ((student, "A"), (teacher, "B"))]
    if (source is None) == (text is None) and not (check and source is None):
        raise PotstillError("give a text with --text, or a FILE, or --check")
    names = (student, teacher)
    if source is not None:
        opened = Source(checked(SourceConfig, source, "FILE"), "FILE", seed=0, shuffle=False)
        column = opened.config.text or "text"
        texts = ((where, record[column]) for record, where, _ in opened.records(0))
        show_corpus(names, tokenizers, texts, html=html, as_json=as_json)
    elif text is not None or html is not None:
        show_text(names, tokenizers, text or CHECKED_TEXT, html=html, as_json=as_json)
    if check:
        check_pair(names, tokenizers, text or CHECKED_TEXT, Console(soft_wrap=True, highlight=False, stderr=as_json))


def check_pair(names: tuple[str, str], tokenizers: list[Any], text: str, console: Console) -> None:
    """Try every method on random models: a pair of a tokenizer with itself must give the plain divergence, and no true
    divergence may be below 0 or have a gradient that moves mass into or out of the vocabulary."""
    examples = [_example(tokenizer, text) for tokenizer in tokenizers]
    itself = TokenizerPair(tokenizers[0], tokenizers[0], CrossTokenizerConfig())
    both = TokenizerPair(tokenizers[0], tokenizers[1], CrossTokenizerConfig())
    batch = collate([[examples[0]]], pad_id=0)
    failed = []
    for method in ("prefix_marginal", "common_vocab", "projection"):
        worst = _identity(itself, method, batch)
        console.print(f"{method}, {names[0]} with itself: differs from the plain divergence by {worst:.1e}")
        failed += [f"{method} with itself"] if worst > 1e-4 else []
    counts = aligned_chunks(both, batch, [examples[1]]).counts
    covered = counts["tokens_in_chunks"] / max(1, len(batch.rows))
    console.print(f"{counts['chunks']} chunks, {covered:.0%} of {names[0]}'s tokens in exact ones")
    for method in METHODS:
        lowest, drift = _signs(both, method, batch, examples[1])
        console.print(f"{method}: lowest value {lowest:.1e}, largest sum of a row's gradient {drift:.1e}")
        failed += [method] if lowest < -1e-5 or drift > 1e-4 else []
    if failed:
        raise PotstillError(f"{names[0]} and {names[1]}: {', '.join(failed)} is not what it should be")
    console.print("all is well")


def _example(tokenizer: Any, text: str) -> Example:
    ids = np.array(encode(tokenizer, [text], "--text")[0], dtype=np.int32)
    supervised = np.ones(len(ids), dtype=np.bool_)
    supervised[0] = False
    return Example("", text, ids, supervised, len(text.encode()))


def _target(
    pair: TokenizerPair, method: Any, batch: Batch, read: Example, seed: int
) -> tuple[Target, torch.Tensor, LogitsTarget]:
    """A random teacher, the rows at which it says something, and what it says there over its own ids. By the methods of chunks,
    the other tokens of a chunk have a likelihood of e^−1 each."""
    device = torch.device("cpu")
    if method == "prefix_marginal":
        marginal = PrefixMarginalView(pair).plan(batch, [read])
        source = LogitsTarget(_random(len(marginal.token), len(pair.teacher), seed))
        known = np.ones(len(batch.rows), dtype=np.bool_) if marginal.known is None else marginal.known
        rows = torch.from_numpy(np.flatnonzero(known))
        target = marginal.target([Signal(source)], device)
        return target, rows, source.select(torch.from_numpy(marginal.answer)[rows])
    plan = ChunkView(pair, config=CrossTokenizerConfig(method=method)).plan(batch, [read])
    source = LogitsTarget(_random(len(plan.chunks.first), len(pair.teacher), seed))
    inner = -torch.ones(len(plan.inner_owner))
    return plan.target([Signal(source), Signal(token_logprobs=inner)], device), plan.chunks.first, source


def _random(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _student(pair: TokenizerPair, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return _random(len(batch.rows), WIDTH, 1).requires_grad_(), _random(len(pair.student), WIDTH, 2) / 2


def _identity(pair: TokenizerPair, method: str, batch: Batch) -> float:
    hidden, head = _student(pair, batch)
    target, rows, start = _target(pair, method, batch, batch.examples[0], 3)
    logits = torch.zeros(len(batch.rows), len(pair.teacher)).index_copy_(0, rows, start.logits)
    gradients = []
    for one in (target, LogitsTarget(logits)):
        weight = torch.zeros(len(batch.rows)).index_fill_(0, rows, 1.0)
        out = fused_linear_kd(hidden, head, one, labels=batch.rows.labels, row_weight=weight)
        (gradient,) = torch.autograd.grad(out.loss, hidden)
        gradients.append(torch.cat([out.kd[rows], gradient[rows].flatten()]))
    return float((gradients[0] - gradients[1]).abs().max())


def _signs(pair: TokenizerPair, method: str, batch: Batch, read: Example) -> tuple[float, float]:
    """The lowest value of a row, and how far a row's gradient is from summing to 0 over the vocabulary."""
    hidden, head = _student(pair, batch)
    target, rows, _ = _target(pair, method, batch, read, 4)
    bias = torch.zeros(len(pair.student), requires_grad=True)
    lowest = np.inf
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        out = fused_linear_kd(hidden, head, target, labels=batch.rows.labels, bias=bias, divergence=divergence)
        lowest = min(lowest, float(out.kd[rows].min()))
        (gradient,) = torch.autograd.grad(out.loss, bias)
    return float(lowest), float(gradient.sum().abs())
