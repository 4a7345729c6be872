"""What a student loses when its teacher is read from a cache: the quickstart's pair, from each kind of cache and live.

python benchmarks/cache_quality.py             runs what benchmarks/results/cache_quality.json lacks, then writes docs/cache.md
python benchmarks/cache_quality.py --only-docs  writes the table from the results there are

Seeds are paired: for each, all students have the same first weights and read the same text in the same order; only where
the teacher's signal comes from differs. `renormalised` is what others do with a teacher's top k: both sides are normalised
over the k tokens alone, and the rest is forgotten. One process a run, one thread. Text only and live are the quickstart's own
two runs: where benchmarks/quickstart.py has made them for a seed, its numbers are taken.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULT = Path(__file__).parent / "results" / "cache_quality.json"
PAGE = Path(__file__).parents[1] / "docs" / "cache.md"
BEGIN, END = "<!-- cache_quality.json -->", "<!-- end of cache_quality.json -->"
QUICKSTART = Path(__file__).parent / "results" / "quickstart.json"
SEEDS = (0, 1, 2)
FEWER = ("hidden", "renormalised")  # what is plain after two seeds
NUMBERS = ("bits_per_byte", "kl", "agreement", "ece")
K, REST, DRAWS = 64, 32, 50
CACHES = {  # by folder: the options of `potstill cache build`
    "top_k": ["--kind", "top_k", "--k", str(K)],
    "top_k-rest": ["--kind", "top_k", "--k", str(K), "--tail-samples", str(REST)],
    "sampled": ["--kind", "sampled", "--num-samples", str(DRAWS)],
    "hidden": ["--kind", "hidden"],
}
STUDENTS = {
    "text only": None,
    "live": None,
    "hidden": "hidden",
    f"top-{K} + {REST} draws from the rest": "top_k-rest",
    f"top-{K} + rest": "top_k",
    f"sampled, {DRAWS} draws": "sampled",
    f"top-{K}, renormalised": "top_k",
}
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 97.5 % quantile by number of seeds


def main(folder: Path) -> None:
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"bytes_a_token": {}, "seeds": {}}
    for seed, runs in json.loads(QUICKSTART.read_text())["seeds"].items():
        for name, there in (("text only", "text only"), ("live", "distilled")):
            known = {key: runs["results"][there][key] for key in NUMBERS}
            results["seeds"].setdefault(seed, {}).setdefault(name, known)
    for kind, options in CACHES.items():
        if kind not in results["bytes_a_token"] or not (folder / kind).exists():
            command = [sys.executable, "-m", "potstill", "cache"]
            recipe = str(Path(__file__).parents[1] / "src" / "potstill" / "shipped" / "quickstart.yaml")
            subprocess.run([*command, "build", recipe, "--out", str(folder / kind), *options], check=True)
            info = subprocess.run([*command, "info", str(folder / kind), "--json"], check=True, capture_output=True)
            results["bytes_a_token"][kind] = float(json.loads(info.stdout)["bytes a token"])
    for seed in SEEDS:
        for name in STUDENTS:
            if name in results["seeds"].get(str(seed), {}) or (seed > 1 and name.endswith(FEWER)):
                continue
            print(f"seed {seed}: {name}", flush=True)
            command = [sys.executable, __file__, "--one", name, str(seed), str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            numbers = json.loads(done.stdout.splitlines()[-1])
            results["seeds"].setdefault(str(seed), {})[name] = numbers
            RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_docs()


def write_docs() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")


def with_table(text: str) -> str:
    """The page with the table of the results between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(json.loads(RESULT.read_text(encoding='utf-8')))}\n{END}{rest.split(END)[1]}"


def one(name: str, seed: int, folder: Path) -> dict[str, float]:
    """Train one student and measure it against the teacher itself."""
    import torch

    from potstill import train
    from potstill.cli.eval import evaluate_model
    from potstill.config.recipe import load_recipe
    from potstill.shipped import locate

    torch.set_num_threads(1)
    kind = STUDENTS[name]
    run_folder = folder / f"{name}-{seed}"
    shutil.rmtree(run_folder, ignore_errors=True)
    overrides = [f"run={run_folder}", f"train.seed={seed}", "eval=null", "checkpoint.resume=never"]
    if name == "text only":
        overrides += ["loss.kd_weight=0", "loss.ce_weight=1"]
    if kind is not None:
        overrides += ["teachers.0.model=null", f"teachers.0.cache={folder / kind}"]
    if "renormalised" in name:
        forget_the_rest()
    run = train(load_recipe(locate("shipped:quickstart.yaml"), overrides))
    source = {"files": "shipped:corpus/heldout.parquet"}
    result = evaluate_model(
        str(run.model), source, teacher="shipped:teacher", token_env=None, dtype=None, revision=None, trust_remote_code=False,
        max_length=256, piece_bytes=480, packing=False, examples=300, batch_size=8, prompt=[], max_new_tokens=1,
        device="cpu", json_out=True,
    )  # fmt: skip
    return {key: result[key] for key in NUMBERS}


def forget_the_rest() -> None:
    """Put in place of the loss what it is without a rest: KL between two softmaxes over the teacher's k tokens."""
    import torch

    from potstill.losses import FusedLoss
    from potstill.training import student

    def loss(hidden: Any, weight: Any, targets: Any, *, row_weight: Any, **_: Any) -> FusedLoss:
        ((_, target),) = targets
        logq = (hidden @ weight.t()).gather(-1, target.ids).log_softmax(-1)
        logp = target.logprobs.log_softmax(-1)
        kd = (logp.exp() * (logp - logq)).sum(-1)
        return FusedLoss((row_weight * kd).sum(), kd.detach(), torch.zeros_like(kd))

    student.fused_linear_kd = loss  # type: ignore[assignment]


def table(results: Mapping[str, Any]) -> str:
    """The students' means over the seeds, and the difference from live that paired seeds show, with its 95 % interval."""
    lines = [
        "| teacher's signal | bytes a token | bits per byte | lost of the gain | KL to teacher | calibration error | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in STUDENTS.items():
        runs = [seed[name] for seed in results["seeds"].values() if name in seed]
        size = f"{results['bytes_a_token'][kind]:.0f}" if kind is not None else "–"
        cells = [f"{mean(run[key] for run in runs):.3f}" for key in ("bits_per_byte", "kl", "ece")]
        share, margin = lost(results, name)
        loss = "–" if name in ("text only", "live") else f"{share:+.1%} ± {margin:.1%}"
        lines.append(f"| {name} | {size} | {cells[0]} | {loss} | {cells[1]} | {cells[2]} | {len(runs)} |")
    return "\n".join(lines)


def lost(results: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Of what live distilling gains over the text alone, the share that is lost, and half of its 95 % interval."""
    seeds = [seed for seed in results["seeds"].values() if name in seed]
    gain = mean(seed["text only"]["bits_per_byte"] - seed["live"]["bits_per_byte"] for seed in seeds)
    differences = [(seed[name]["bits_per_byte"] - seed["live"]["bits_per_byte"]) / gain for seed in seeds]
    margin = STUDENT_T[len(seeds)] * stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
    return mean(differences), margin


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
    elif sys.argv[1:] == ["--only-docs"]:
        write_docs()
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/benchmark-cache-quality"))
