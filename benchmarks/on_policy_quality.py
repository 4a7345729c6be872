"""What a student learns from its own text, from its teacher's and from a data set's, at equal optimizer steps.

python benchmarks/on_policy_quality.py --work DIR       runs what results/on_policy_quality.json lacks, and writes it
python benchmarks/on_policy_quality.py --only-docs      writes the table of docs/on-policy.md

First the quickstart's student (0.4 million parameters, two layers) is distilled from the shipped teacher on a data set's text,
400 steps. From there it goes on for 200 steps of 16 texts, each a prompt of 24 tokens and an answer of 64 of which all is
learnt: the data set's, its own, or its teacher's. So every variant sees the same prompts, and as many tokens. Measured on
held-out text, and on 256 answers of 64 tokens that each student writes to held-out beginnings: KL(student‖teacher) there is
what on-policy training minimises. Seeds are paired, the first 400 steps too; the interval is the standard deviation over them.
One process a run, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULT = Path(__file__).parent / "results" / "on_policy_quality.json"
PAGE = Path(__file__).parents[1] / "docs" / "on-policy.md"
RECIPE = Path(__file__).parents[1] / "recipes" / "on-policy.yaml"
DISTIL = RECIPE.with_name("distil.yaml")
BEGIN, END = "<!-- table: quality -->", "<!-- end of table -->"
SEEDS = (0, 1, 2)
KEYS = ("on_policy_reverse_kl", "on_policy_forward_kl", "kl", "bits_per_byte", "on_policy_distinct_2")
PROMPT, ANSWER = 24, 64
COMMON = [
    "rollouts.num_generations=1",
    "train.steps=200",
    "checkpoint.every=null",
    "eval.every=null",
    "eval.examples=300",
    "eval.on_policy_samples=256",
    "log.tensorboard=false",
]
CASES: dict[str, list[str]] = {
    "before": ["rollouts.on_policy_fraction=0", "train.steps=1", "train.optimizer.lr=1e-9"],
    "the data set's text, forward KL": ["rollouts.on_policy_fraction=0", "loss.divergence=forward_kl"],
    "the data set's text, reverse KL": ["rollouts.on_policy_fraction=0", "loss.divergence=reverse_kl"],
    "the student's own, reverse KL": ["rollouts.on_policy_fraction=1", "loss.divergence=reverse_kl"],
    "half and half, reverse KL": ["rollouts.on_policy_fraction=0.5", "loss.divergence=reverse_kl"],
    "the student's own, forward KL": ["rollouts.on_policy_fraction=1", "loss.divergence=forward_kl"],
    "the teacher's, forward KL": [
        "rollouts.on_policy_fraction=0",
        "rollouts.teacher_fraction=1",
        "loss.divergence=forward_kl",
    ],
    "the student's own, by drawn tokens": ["rollouts.on_policy_fraction=1", "loss.divergence=policy_gradient_kl"],
}


def potstill(recipe: Path, overrides: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "potstill", "train", str(recipe), *overrides]
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)


def prepare(work: Path, seed: int) -> None:
    """Prompts with answers out of the shipped text, and the student to begin with."""
    from transformers import AutoTokenizer

    from potstill.shipped import locate

    work.mkdir(parents=True, exist_ok=True)
    if not (work / "answers.jsonl").exists():
        import pyarrow.parquet

        tokenizer = AutoTokenizer.from_pretrained(locate("shipped:tokenizers/bytes-2k"))
        texts = pyarrow.parquet.read_table(locate("shipped:corpus/train.parquet")).column("text").to_pylist()
        lines = []
        for text in texts[::10]:
            spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
            for start in range(0, len(spans) - PROMPT - ANSWER, PROMPT + ANSWER):
                a, b, c = (spans[start + n][0] for n in (0, PROMPT, PROMPT + ANSWER))
                lines.append(json.dumps({"prompt": text[a:b], "answer": text[b:c]}))
        (work / "answers.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not (work / f"first-{seed}").exists():
        folder = work / "first"
        shutil.rmtree(folder, ignore_errors=True)
        potstill(DISTIL, [f"run={folder}", f"train.seed={seed}", "eval=null", "log.tensorboard=false"])
        shutil.copytree(folder / "checkpoints" / "latest" / "model", work / f"first-{seed}")


def run(name: str, seed: int, work: Path) -> dict[str, float]:
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    source = f"{{files: {work / 'answers.jsonl'}, prompt: prompt, completion: answer}}"
    places = [
        f"run={folder}",
        f"student={{model: {work / f'first-{seed}'}}}",
        f"data.sources=[{source}]",
        "data.append_eos=false",
        "data.packing=false",
        f"train.seed={seed}",
    ]
    potstill(RECIPE, [*places, *COMMON, *CASES[name]])
    last = json.loads((folder / "evals.jsonl").read_text().strip().splitlines()[-1])
    return {key: last[key] for key in KEYS}


def table(result: dict[str, Any]) -> str:
    def cell(values: list[float], digits: int = 3) -> str:
        return (
            f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" if len(values) > 1 else f"{values[0]:.{digits}f}"
        )

    lines = [
        "| text, divergence | KL(student‖teacher) on its own text | KL(teacher‖student) on held-out text | bits per byte |",
        "|---|---|---|---|",
    ]
    for name, by_seed in result.items():
        columns = [
            [found[key] for found in by_seed.values()] for key in ("on_policy_reverse_kl", "kl", "bits_per_byte")
        ]
        lines.append(f"| {name} | {' | '.join(cell(values) for values in columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only-docs", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if not options.only_docs:
        for seed in SEEDS:
            prepare(options.work, seed)
            for name in CASES:
                if str(seed) not in result.setdefault(name, {}):
                    result[name][str(seed)] = run(name, seed, options.work)
                    print(f"{name}, seed {seed}: {result[name][str(seed)]}", flush=True)
                    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
