"""Write docs/compatibility.md from the table in src/potstill/config/compatibility.py.

python tools/write_compatibility_docs.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

from potstill.config import CrossTokenizerConfig, LossConfig
from potstill.config.compatibility import MOVING, RULES, Combination, Rule, reasons, refusals

DOC = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"

OPENING = """\
# What goes with what

<!-- Written by tools/write_compatibility_docs.py from src/potstill/config/compatibility.py: change that file, not this one. -->

A recipe that asks for something that cannot be is refused before anything is trained, with every reason at once. What the
recipe alone tells is refused when it loads; what only a cache's manifest, a server and the tokenizers tell, when the teachers
are opened. Each table below varies two things and leaves the rest at the recipe's defaults (`policy_gradient_kl` on the
student's own text). **✓** trains; a number is that of the [reason](#reasons). A test takes a training step with every
combination that the tables allow.
"""

FIELDS = {name: field.annotation for name, field in LossConfig.model_fields.items()}
METHODS = get_args(CrossTokenizerConfig.model_fields["method"].annotation)
WEIGHTINGS = get_args(get_args(FIELDS["teacher_weighting"])[0])
STORED = {"holder": "cache", "temperatures": (1.0, 2.0)}
SERVED = {"holder": "server", "server": "potstill"}

# Each axis: what its values are called, and what they are.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "signal": {
        "live": {},
        "cache, `hidden`": {"holder": "cache", "signal": "hidden"},
        "cache, `top_k`": {**STORED, "signal": "top_k"},
        "cache, `top_k` at 2 only": {"holder": "cache", "signal": "top_k", "temperatures": (2.0,)},
        "cache, `top_k`, imported": {**STORED, "signal": "top_k", "imported": True},
        "cache, `sampled`": {"holder": "cache", "signal": "sampled"},
        "cache, `token_logprobs`": {"holder": "cache", "signal": "token_logprobs"},
        "server, `hidden`": {**SERVED, "signal": "hidden"},
        "server, `top_k`": {**SERVED, "signal": "top_k"},
        "server, `token_logprobs`": {**SERVED, "signal": "token_logprobs"},
        "server, `student_top_k`": {**SERVED, "signal": "student_top_k"},
    },
    "divergence": {f"`{name}`": {"divergence": name} for name in get_args(FIELDS["divergence"])},
    "tokenizer": {
        "the student's": {},
        **{f"another, `{name}`": {"tokenizer": "other", "method": name} for name in METHODS},
        "the student's, with a `context_column`": {"context_column": True},
    },
    "temperature": {
        "1": {},
        "2, which the cache has": {"temperature": 2.0},
        "3, which it has not": {"temperature": 3.0},
        "moving": {"temperature": MOVING},
    },
    "text": {
        "the data set's": {"text": frozenset({"data"})},
        "the student's": {"text": frozenset({"student"})},
        "the student's, `temperature: 0`": {"text": frozenset({"student"}), "greedy": True},
        "the teacher's": {"text": frozenset({"teacher"}), "writes": True},
    },
    "teachers": {
        "`sum`": {},
        "`average`": {"combine": "average"},
        "`best`": {"combine": "best"},
        **{f"`sum`, weighted by `{name}`": {"weighting": name} for name in WEIGHTINGS},
        "`average`, weighted": {"combine": "average", "weighting": "ce"},
        "`average`, with a `filter`": {"combine": "average", "filter": True},
        "`best`, with a `filter`": {"combine": "best", "filter": True},
    },
    "loss": {
        "plain": {},
        "`entropy_gate`": {"entropy_gate": True},
        "`dynamic_scaling`": {"dynamic_scaling": True},
        "`student_top_k`": {"student_top_k": True},
        "`rollouts.reward`": {"reward": True},
        "`token_clip`": {"token_clip": True},
        "`token_weights` with `decay` or `by_position`": {"uneven_weights": True},
    },
    "parallel": {
        "one process": {},
        "`teachers[0].ranks: 1`, vLLM in the student's processes": {"ranks": 2, "own_ranks": True, "vllm_within": True},
        "`parallel.tp: 2`": {"tp": 2},
        "`parallel.cp: 2`": {"cp": 2},
        "`parallel.ep: 2`": {"ep": 2},
        "`teachers[0].ranks: 1`": {"own_ranks": True},
        "`teachers[0].placement: shard`": {"placement": "shard"},
    },
    "server": {"`potstill serve`": {"server": "potstill"}, "OpenAI-compatible (vLLM)": {"server": "openai"}},
    "asked": {
        "`top_k`": {"holder": "server", "signal": "top_k"},
        "`top_k` at 2": {"holder": "server", "signal": "top_k", "temperature": 2.0},
        "`token_logprobs`": {"holder": "server", "signal": "token_logprobs", "divergence": "policy_gradient_kl"},
        "`hidden`": {"holder": "server", "signal": "hidden"},
        "`student_top_k`": {"holder": "server", "signal": "student_top_k"},
        "a cache of `top_k`": {"holder": "cache", "signal": "top_k"},
        "a cache of `top_k` at 1 and 2": {**STORED, "signal": "top_k"},
        "a cache of `top_k`, with `tail_samples`": {"holder": "cache", "signal": "top_k", "tail_samples": True},
        "a cache of `hidden`": {"holder": "cache", "signal": "hidden"},
        "a cache of `sampled`": {"holder": "cache", "signal": "sampled"},
        "text": {"holder": "server", "signal": "top_k", "text": frozenset({"teacher"}), "writes": True},
    },
    "compared": {
        "a model": {"compared": True},
        "a model with another tokenizer": {"compared": True, "tokenizer": "other"},
        "a cache beside a model": {"compared": True, "holder": "cache", "signal": "hidden"},
        "a cache alone": {"compared": True, "holder": "cache", "signal": "hidden", "alone": True},
        "a server": {"compared": True, **SERVED, "signal": "hidden"},
    },
    "evaluation": {"`eval.on_policy_samples`, and no other teacher": {}},
    "own": {
        "a copy (`student: frozen`)": {"own": "frozen"},
        "a copy that follows (`student: ema`)": {"own": "ema"},
        "the student that trains (`student: live`, or `adapter: false`)": {"own": "live", "in_place": True},
    },
    "cache": {"beside a model or server": {}, "alone": {"alone": True}},
}
TABLES = [
    ("Signals and divergences", "signal", "divergence"),
    ("Signals and tokenizers", "tokenizer", "signal"),
    ("Signals and temperatures", "signal", "temperature"),
    ("Signals and several teachers", "signal", "teachers"),
    ("Tokenizers and several teachers", "tokenizer", "teachers"),
    ("Tokenizers and temperatures", "tokenizer", "temperature"),
    ("Divergences and whose text is trained on", "divergence", "text"),
    ("Divergences and temperatures", "divergence", "temperature"),
    ("Divergences and the rest of the loss", "divergence", "loss"),
    ("Tokenizers and the rest of the loss", "tokenizer", "loss"),
    ("Signals and the rest of the loss", "signal", "loss"),
    ("How the work is spread and the rest of the loss", "parallel", "loss"),
    ("Servers and what they are asked for", "asked", "server"),
    ("Teachers that the student's own text is compared with", "compared", "evaluation"),
    ("Caches and whose text is trained on", "cache", "text"),
    ("The student as its own teacher and whose text is trained on", "own", "text"),
    ("The student as its own teacher and how the work is spread", "own", "parallel"),
    ("Whose text is trained on and how the work is spread", "parallel", "text"),
]


def combined(*fields: dict[str, Any]) -> Combination:
    """A combination with what each axis sets."""
    return Combination(**{name: value for some in fields for name, value in some.items()})


def compatibility_docs() -> str:
    examples = _examples()
    numbers = {rule: number for number, rule in enumerate(examples, 1)}
    parts = [OPENING]
    for title, down, right in TABLES:
        parts += [f"## {title}\n", _table(down, right, numbers)]
    parts.append("## Reasons\n\nAs they are said of one of the combinations that they refuse.\n")
    parts += [f"{numbers[rule]}. {reason}" for rule, reason in examples.items()]
    return "\n".join(parts) + "\n"


def _examples() -> dict[Rule, str]:
    """Every rule with what it says of one of the combinations of three axes that it refuses."""
    found: dict[Rule, str] = {}
    for axes in combinations(AXES.values(), 3):
        for fields in product(*(axis.values() for axis in axes)):
            combination = combined(*fields)
            for rule, reason in zip(refusals(combination), reasons(combination, "teachers[0]"), strict=True):
                found.setdefault(rule, reason)
    return {rule: found[rule] for rule in RULES}


def _table(down: str, right: str, numbers: dict[Rule, int]) -> str:
    lines = [f"| | {' | '.join(AXES[right])} |", "|---" * (len(AXES[right]) + 1) + "|"]
    for name, row in AXES[down].items():
        cells = [_cell(combined(*_setting(down, right), row, column), numbers) for column in AXES[right].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _setting(*axes: str) -> list[dict[str, Any]]:
    """What else a table supposes."""
    return [{"holder": "cache", "signal": "hidden"}] if "cache" in axes else []


def _cell(combination: Combination, numbers: dict[Rule, int]) -> str:
    if combination.policy_gradient and not combination.text:
        combination = replace(combination, text=frozenset({"student"}))
    return ", ".join(str(numbers[rule]) for rule in refusals(combination)) or "✓"


if __name__ == "__main__":
    DOC.write_text(compatibility_docs(), encoding="utf-8")
    print(f"wrote {DOC.relative_to(Path.cwd()) if DOC.is_relative_to(Path.cwd()) else DOC.name}")
