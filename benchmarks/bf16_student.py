"""The quickstart's distilled student with bfloat16 weights: with float32 masters, and without, beside float32.

python benchmarks/bf16_student.py [--steps N] [--seeds N] [FOLDER]

Writes benchmarks/results/bf16_student.json and prints a table.

Each run is a process of its own. Loss curves are compared window by window (means over WINDOW steps) with what another seed
changes in float32; the evaluation at the end is on the quickstart's held-out text. `bfloat16 alone` is what one gets without
masters: weights, AdamW's and Muon's state and sums of gradients all in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import torch

RESULT = Path(__file__).parent / "results" / "bf16_student.json"
WAYS = ("float32", "bfloat16 with masters", "bfloat16 alone")
WINDOW = 20
CODE = """
import json, sys
from pathlib import Path
import torch
from potstill.config.recipe import load_recipe
from potstill.shipped import locate
from potstill.training import optimizer
from potstill.training.loop import train
torch.set_num_threads(1)
way, seed, steps, folder = sys.argv[1:]
if way == "bfloat16 alone":
    optimizer.NARROW = ()
changes = [f"run={folder}", f"train.seed={seed}", f"train.steps={steps}", f"student.dtype={way.split()[0]}"]
run = train(load_recipe(locate("shipped:quickstart.yaml"), changes))
kept = {key: run.evaluation[key] for key in ("bits_per_byte", "kl", "agreement")}
losses = [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
Path(folder, "found.json").write_text(json.dumps({"held_out": kept, "losses": losses}))
"""


def main(folder: Path, steps: int, seeds: int) -> None:
    runs: dict[str, dict[str, dict]] = {way: {} for way in WAYS}
    for seed in range(seeds):
        for way in WAYS:
            out, begin = folder / f"{way.replace(' ', '-')}-{seed}", time.perf_counter()
            subprocess.run([sys.executable, "-c", CODE, way, str(seed), str(steps), str(out)], check=True)
            found = json.loads((out / "found.json").read_text(encoding="utf-8"))
            curve = [mean(found["losses"][at : at + WINDOW]) for at in range(0, steps, WINDOW)]
            runs[way][str(seed)] = {
                "seconds": round(time.perf_counter() - begin, 1),
                "held_out": found["held_out"],
                "curve": [round(value, 5) for value in curve],
            }
            print(f"{way}, seed {seed}: {runs[way][str(seed)]['seconds']} s", flush=True)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    made = {"machine": machine, "steps": steps, "window": WINDOW, "summary": summary(runs), "runs": runs}
    RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(table(made["summary"]))


def summary(runs: dict[str, dict[str, dict]]) -> dict[str, dict[str, float]]:
    """Of each way: its evaluations, and how far its curve is from float32's with the same seed, beside how far float32's own
    seeds are apart, as the mean over the windows and as the largest of one window."""
    wide = runs["float32"]
    found = {}
    for way, by_seed in runs.items():
        apart = [
            [abs(a - b) for a, b in zip(run["curve"], wide[seed]["curve"], strict=True)]
            for seed, run in by_seed.items()
        ]
        found[way] = {
            "bits_per_byte": mean(run["held_out"]["bits_per_byte"] for run in by_seed.values()),
            "kl": mean(run["held_out"]["kl"] for run in by_seed.values()),
            "mean_distance": mean(mean(each) for each in apart),
            "largest_distance": max(max(each) for each in apart),
        }
    ranges = [max(values) - min(values) for values in zip(*(run["curve"] for run in wide.values()), strict=True)]
    held_out = [run["held_out"]["bits_per_byte"] for run in wide.values()]
    found["float32"] |= {
        "seeds_mean_range": mean(ranges),
        "seeds_largest_range": max(ranges),
        "seeds_bits_per_byte_range": max(held_out) - min(held_out),
    }
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    wide = found["float32"]
    lines = [
        "| student | bits per byte | KL to the teacher | mean distance of the loss curve | largest |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {way} | {one['bits_per_byte']:.4f} | {one['kl']:.4f} | {one['mean_distance']:.4f} | {one['largest_distance']:.4f} |"
        for way, one in found.items()
    ]
    apart = (f"{wide[f'seeds_{name}']:.4f}" for name in ("bits_per_byte_range", "mean_range", "largest_range"))
    lines.append("| float32, seeds apart | {} | | {} | {} |".format(*apart))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/bf16-student"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    main(asked.folder, asked.steps, asked.seeds)
