"""A horizon that moves against the full one: how near a student comes to its teacher on its own text, and what it took.

python benchmarks/horizon.py --work DIR [--steps 100]    runs what results/horizon.json lacks, writes it and its table

The student is the teacher at about half its depth (recipes/on-policy.yaml: layers 0, 2 and 4 of 5), on-policy with reverse
KL. All variants take the same prompts and as many steps; they differ in how long the answers are
(`rollouts.sampling.max_new_tokens`), or in how much of them is learnt (`loss.token_weights`). All are judged on answers of the
full length. One seed, one process, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "horizon.json"
PAGE = Path(__file__).parents[1] / "docs" / "on-policy.md"
RECIPE = Path(__file__).parents[1] / "recipes" / "on-policy.yaml"
BEGIN, END = "<!-- table: horizon -->", "<!-- end of horizon -->"
FULL = 64
CASES: dict[str, list[str]] = {
    "before": ["train.steps=1", "train.optimizer.lr=1e-9"],
    "full horizon": [],
    "from 8 to 64": [f"rollouts.sampling.max_new_tokens={{start: 8, end: {FULL}}}"],
    "full horizon, as many tokens": ["train.steps=56"],
    "the first 16 of 64 are learnt": ["loss.token_weights={window: 16}"],
}


def run(overrides: list[str], folder: Path) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common = [
        f"run={folder}",
        "checkpoint.every=null",
        "eval.every=null",
        "eval.on_policy_samples=128",
        "eval.prompts=[]",
    ]
    line = [sys.executable, "-m", "potstill", "train", str(RECIPE), *common, "log.tensorboard=false", *overrides]
    begin = time.perf_counter()
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])
    written = sum(step["rollout_length"] for step in steps) * 16
    return {
        "reverse_kl": last["on_policy_reverse_kl"],
        "bits_per_byte": last["bits_per_byte"],
        "steps": len(steps),
        "written_tokens": round(written),
        "learnt_tokens": steps[-1]["tokens"],
        "seconds": time.perf_counter() - begin,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "| answers | KL(student‖teacher) on its own text | tokens written | tokens learnt |",
        "|---|---|---|---|",
    ]
    full = result["full horizon"]
    for name in CASES:
        found = result[name]
        shares = (
            ("–", "–")
            if name == "before"
            else (f"{found[key] / full[key]:.0%}" for key in ("written_tokens", "learnt_tokens"))
        )
        lines.append(f"| {name} | {found['reverse_kl']:.3f} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, overrides in CASES.items():
        if name not in result:
            result[name] = run([f"train.steps={options.steps}", *overrides], options.work / "run")
            print(f"{name}: {result[name]}", flush=True)
            RESULT.write_text(json.dumps(result, indent=2) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
