"""Which curves the page draws, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Panel:
    key: str  # also its id in the page
    group: str
    title: str
    about: str
    lines: tuple[tuple[str, str], ...]  # (column, name); the second and later are drawn dotted
    source: Literal["metrics", "evals"] = "metrics"
    unit: Literal["number", "percent", "bytes", "seconds", "count"] = "number"
    smooth: bool = True  # a schedule or a high-water mark is exact: averaging would only blur it
    only_moving: bool = False  # left out when it never changes


def one(key: str, group: str, title: str, about: str, **more: Any) -> Panel:
    """A panel with one curve."""
    return Panel(key, group, title, about, ((key, ""),), **more)


LEARNING, WRITTEN, OPTIMISATION = "Learning", "Completion text", "Optimisation"
COST, FURTHER = "Time and memory", "Further metrics"
EVALUATED: dict[str, Any] = {"source": "evals", "smooth": False}
# With a teacher of other tokens these are taken of what it says in the student's, which is another measure than the other
# runs' and than an evaluation's.
CROSS_TOKENIZER = {"kl": "cross_tokenizer_kl", "agreement": "cross_tokenizer_agreement"}

PANELS: tuple[Panel, ...] = (
    one("loss", LEARNING, "Loss", "what is minimised, per supervised token"),
    one("kd", LEARNING, "Distillation loss", "divergence from the teacher, before its weight"),
    one("ce", LEARNING, "Cross-entropy", "to the text, nats per token, before its weight"),
    one("kl", LEARNING, "KL to the teacher", "at temperature 1, nats per token"),
    one("agreement", LEARNING, "Top-1 agreement", "share of tokens with the teacher's first choice", unit="percent"),
    one(
        "cross_tokenizer_kl", LEARNING, "KL to the teacher, cross-tokenizer",
        "for a teacher with other tokens: to its next token in the student's tokens, at temperature 1",
    ),
    one(
        "cross_tokenizer_agreement", LEARNING, "Top-1 agreement, cross-tokenizer",
        "for a teacher with other tokens: with its first choice in the student's tokens", unit="percent",
    ),
    one("bits_per_byte", LEARNING, "Bits per byte", "on held-out text", **EVALUATED),
    one(
        "on_policy_reverse_kl", WRITTEN, "KL on its own text",
        "reverse KL to the teacher on what the student writes, at evaluations", **EVALUATED,
    ),
    one("rollout_length", WRITTEN, "Length", "tokens per answer", unit="count"),
    Panel(
        "rollout_ends", WRITTEN, "How answers end", "line: by an eos, dots: cut at the limit",
        (("completions_ended", "eos"), ("completions_clipped", "cut")), unit="percent",
    ),
    Panel(
        "rollout_distinct", WRITTEN, "Distinct n-grams", "share of different ones; line: pairs, dots: triples",
        (("rollout_distinct_2", "pairs"), ("rollout_distinct_3", "triples")), unit="percent",
    ),
    one("sampling_logprob_gap", WRITTEN, "Sampling gap", "between a token's log-probability now and when it was drawn"),
    one("rollout_staleness", WRITTEN, "Staleness", "steps since the weights that wrote", smooth=False, only_moving=True),
    one("rollout_tokens_per_second", WRITTEN, "Writing", "tokens per second", unit="count"),
    Panel(
        "entropy", OPTIMISATION, "Entropy", "nats per token; line: student, dots: teacher",
        (("student_entropy", "student"), ("teacher_entropy", "teacher")),
    ),
    one("grad_norm", OPTIMISATION, "Gradient norm", "before clipping"),
    one("lr", OPTIMISATION, "Learning rate", "as the schedule sets it", smooth=False),
    one("temperature", OPTIMISATION, "Temperature", "of both softmaxes", smooth=False, only_moving=True),
    Panel(
        "weights", OPTIMISATION, "Loss weights", "line: distillation, dots: cross-entropy",
        (("kd_weight", "distillation"), ("ce_weight", "cross-entropy")), smooth=False, only_moving=True,
    ),
    one("tokens_per_second", COST, "Tokens per second", "supervised tokens", unit="count"),
    one("seconds_data", COST, "Data", "seconds per step", unit="seconds"),
    one("seconds_teacher", COST, "Teacher", "seconds per step", unit="seconds"),
    one("seconds_student", COST, "Student", "seconds per step, forward and backward", unit="seconds"),
    one("seconds_optimizer", COST, "Optimizer", "seconds per step", unit="seconds"),
    one("peak_memory_bytes", COST, "Peak memory", "of the run so far", unit="bytes", smooth=False),
)  # fmt: skip

# The columns with a panel, and those of the tables. Anything but a number or null under these keys is a damaged line; of other
# keys only numbers are looked at, and have panels of their own.
KEYS = {
    source: {key for panel in PANELS if panel.source == source for key, _ in panel.lines} | others
    for source, others in (
        ("metrics", {"tokens", "epoch"}),
        ("evals", {"perplexity", "kl", "agreement", "ece", "tokens", "bytes"}),
    )
}
