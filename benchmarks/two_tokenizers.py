"""What a student learns from a teacher with another tokenizer, by method: the quickstart's pair, and a real one.

python benchmarks/two_tokenizers.py --work DIR [--assets DIR --smollm MODEL]    runs what results/two_tokenizers.json lacks
python benchmarks/two_tokenizers.py --only-docs                                 writes the tables of docs/cross-tokenizer.md

*Quickstart*: the shipped teacher (2,048 ids, byte-level BPE) and a student of 0.4 million parameters with 1,024 ids in the
manner of SentencePiece, otherwise the quickstart's own recipe. *Real*: SmolLM2-135M (49,152 ids), from a cache of its hidden
states, and stories15M (32,000 ids, Llama's), which has only ever read stories for children, on encyclopedia text. Seeds are
paired. One process a run, one thread.
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

RESULT = Path(__file__).parent / "results" / "two_tokenizers.json"
PAGE = Path(__file__).parents[1] / "docs" / "cross-tokenizer.md"
RECIPE = Path(__file__).parents[1] / "src" / "potstill" / "shipped" / "quickstart.yaml"
TEXT = ["loss.kd_weight=0", "loss.ce_weight=1"]


def method(name: str, ce: float) -> list[str]:
    return [f"loss.ce_weight={ce}", f"teachers.0.cross_tokenizer.method={name}"]


# By name: overrides, and how many seeds.
QUICKSTART: dict[str, tuple[list[str], int]] = {
    "text only": (TEXT, 3),
    "prefix_marginal": (method("prefix_marginal", 0.3), 3),
    "prefix_marginal, with repeat_weight": (
        [*method("prefix_marginal", 0.3), "loss.repeat_weight={start: 0.3, end: 0, over: 0.25}"],
        3,
    ),
    "prefix_marginal, from a cache of hidden states": (method("prefix_marginal", 0.3), 3),
    "prefix_marginal, from a cache of the top 64": (method("prefix_marginal", 0.3), 3),
    "prefix_marginal, without cross-entropy": (method("prefix_marginal", 0.0), 1),
    "projection": (method("projection", 1.0), 1),
    "projection, less cross-entropy": (method("projection", 0.3), 1),
    "common_vocab": (method("common_vocab", 1.0), 1),
    "common_vocab, without cross-entropy": (method("common_vocab", 0.0), 1),
    "span_likelihood": (method("span_likelihood", 1.0), 1),
    "uld": (method("uld", 1.0), 1),
}
REAL: dict[str, tuple[list[str], int]] = {
    "text only": (TEXT, 1),
    "prefix_marginal": (method("prefix_marginal", 0.3), 1),
    "projection": (method("projection", 1.0), 1),
    "common_vocab": (method("common_vocab", 1.0), 1),
    "span_likelihood": (method("span_likelihood", 1.0), 1),
    "uld": (method("uld", 1.0), 1),
}


def potstill(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "potstill", *arguments], check=True, env=environment, stdout=subprocess.DEVNULL
    )


def trained(recipe: Path, run: Path, overrides: list[str]) -> dict[str, float]:
    shutil.rmtree(run, ignore_errors=True)
    potstill("train", str(recipe), f"run={run}", *overrides)
    last = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {"bits_per_byte": last["bits_per_byte"], "ece": last["ece"]}
    for key in ("align_chunks_per_token", "align_one_to_one", "align_bytes", "shared_mass"):
        if key in steps[-1]:
            found[key] = mean(step[key] for step in steps)
    return found


def quickstart(name: str, seed: int, work: Path) -> dict[str, float]:
    overrides = ["student.tokenizer=shipped:tokenizers/pieces-1k", f"train.seed={seed}", *QUICKSTART[name][0]]
    if "cache" in name:
        kind = "hidden" if "hidden" in name else "top_k"
        folder = work / f"quickstart-{kind}"
        if not (folder / "manifest.json").exists():
            potstill("cache", "build", str(RECIPE), "--out", str(folder), "--kind", kind)
        overrides += ["teachers.0.model=null", f"teachers.0.cache={folder}"]
    return trained(RECIPE, work / "run", overrides)


def real(name: str, seed: int, work: Path, assets: Path, smollm: Path) -> dict[str, float]:
    recipe = work / "real.yaml"
    if not recipe.exists():
        text = (assets / "data" / "wikitext2_raw" / "wiki.test.raw").read_text(encoding="utf-8")
        for split, part in (("train", slice(0, 170_000)), ("test", slice(600_000, 660_000))):
            (work / f"{split}.txt").write_text(text[part], encoding="utf-8")
        layout = {"max_length": 256, "piece_bytes": 700, "packing": False}
        recipe.write_text(
            json.dumps(
                {
                    "student": {"model": str(assets / "models" / "stories15M")},
                    "teachers": [{"cache": str(work / "real-hidden")}],
                    "data": {"sources": [{"files": str(work / "train.txt")}], **layout},
                    "train": {"steps": 40, "batch_size": 4, "optimizer": {"lr": 5e-4}},
                    "eval": {
                        "data": {"sources": [{"files": str(work / "test.txt")}], **layout},
                        "examples": 60,
                        "prompts": [],
                    },
                }
            )
        )
    if not (work / "real-hidden" / "manifest.json").exists():
        data = ["--data", str(work / "train.txt"), "--piece-bytes", "700"]
        potstill("cache", "build", str(smollm), *data, "--out", str(work / "real-hidden"), "--kind", "hidden")
    return trained(recipe, work / "run", [f"train.seed={seed}", *REAL[name][0]])


def main(options: Any) -> None:
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"quickstart": {}, "real": {}}
    options.work.mkdir(parents=True, exist_ok=True)
    for pair, cases in (("quickstart", QUICKSTART), ("real", REAL)):
        for seed in range(3):
            for name, (_, seeds) in cases.items():
                there = results[pair].setdefault(name, {})
                if seed >= seeds or str(seed) in there or pair not in options.pairs:
                    continue
                if pair == "real" and (options.assets is None or options.smollm is None):
                    continue
                print(f"{pair}, seed {seed}: {name}", flush=True)
                there[str(seed)] = (
                    quickstart(name, seed, options.work)
                    if pair == "quickstart"
                    else real(name, seed, options.work, options.assets, options.smollm)
                )
                RESULT.write_text(json.dumps(results, indent=1) + "\n")
    write_docs()


def write_docs() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")


def with_tables(text: str) -> str:
    """The page with the tables of the results between their marks."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    for pair in ("quickstart", "real"):
        begin, end = f"<!-- two_tokenizers.json: {pair} -->", "<!-- end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table(results[pair])}\n{end}{rest.split(end, 1)[1]}"
    return text


def table(cases: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| the student learns from | cross-entropy weight | bits per byte | gained over the text alone |",
        "|---|---|---|---|",
    ]
    alone = [run["bits_per_byte"] for run in cases["text only"].values()]
    for name, runs in cases.items():
        if not runs:
            continue
        values = [run["bits_per_byte"] for run in runs.values()]
        spread = f" ± {stdev(values):.3f} ({len(values)} seeds)" if len(values) > 1 else ""
        gain = mean(alone[int(seed)] - run["bits_per_byte"] for seed, run in runs.items())
        overrides = (QUICKSTART | REAL)[name][0] if name in QUICKSTART | REAL else []
        weight = next((o.split("=")[1] for o in overrides if o.startswith("loss.ce_weight=")), "")
        lines.append(
            f"| {name} | {weight} | {mean(values):.3f}{spread} | {'–' if name == 'text only' else f'{gain:.3f}'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/benchmark-two-tokenizers"), help="folder for what is made on the way"
    )
    parser.add_argument("--assets", type=Path, help="models/ and data/")
    parser.add_argument("--smollm", type=Path, help="SmolLM2-135M in float32, as a model folder")
    parser.add_argument("--pairs", nargs="+", default=["quickstart", "real"])
    parser.add_argument("--only-docs", action="store_true")
    chosen = parser.parse_args()
    write_docs() if chosen.only_docs else main(chosen)
