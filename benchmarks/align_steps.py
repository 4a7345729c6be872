"""What another tokenizer costs a training step: one student, and a teacher of one size with its tokenizer and with another.

python benchmarks/align_steps.py --work DIR      writes benchmarks/results/align_steps.json and prints a table

Needs real tokenizers and text: the folder named by POTSTILL_ASSETS, or ../shared/assets. The student (SmolLM2's tokenizer,
49,152 ids) reads the same rows throughout; the teacher is random and of one shape, with SmolLM2's tokenizer, or GPT-2's (50,257
ids). Each run is a process of its own, one thread, in turns; a run's step is the median of its steps, and the best of the
rounds counts. `data` is the time that a step waits for its batch: what alignment costs that the prefetch thread cannot hide.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
RESULT = Path(__file__).parent / "results" / "align_steps.json"
STUDENT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
TEACHER = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
CASES = {
    "the same tokenizer": ("smollm2", "prefix_marginal"),
    "another one, prefix_marginal": ("gpt2", "prefix_marginal"),
    "another one, common_vocab": ("gpt2", "common_vocab"),
    "another one, projection": ("gpt2", "projection"),
    "another one, span_likelihood": ("gpt2", "span_likelihood"),
}


def make_teacher(tokenizer: str, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tok = AutoTokenizer.from_pretrained(ASSETS / "tokenizers" / tokenizer)
    LlamaForCausalLM(LlamaConfig(**TEACHER, vocab_size=len(tok), tie_word_embeddings=True)).save_pretrained(folder)
    tok.save_pretrained(folder)


def run(name: str, work: Path, steps: int) -> dict[str, float]:
    tokenizer, method = CASES[name]
    if not (work / tokenizer).exists():
        make_teacher(tokenizer, work / tokenizer)
    text = (ASSETS / "data" / "wikitext2_raw" / "wiki.test.raw").read_text(encoding="utf-8")
    (work / "text.txt").write_text(text[:400_000], encoding="utf-8")
    recipe = {
        "run": str(work / "run"),
        "student": {
            "config": {"model_type": "llama", **STUDENT, "tie_word_embeddings": True},
            "tokenizer": str(ASSETS / "tokenizers" / "smollm2"),
        },
        "teachers": [{"model": str(work / tokenizer), "cross_tokenizer": {"method": method}}],
        "data": {
            "sources": [{"files": str(work / "text.txt")}],
            "max_length": 256,
            "piece_bytes": 900,
            "packing": False,
        },
        "train": {"steps": steps, "batch_size": 8},
        "log": {"stat_rows": 0},
    }
    shutil.rmtree(work / "run", ignore_errors=True)
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "potstill", "train", str(work / "recipe.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()][2:]
    parts = ("data", "teacher", "student", "optimizer")
    whole = [sum(line[f"seconds_{part}"] for part in parts) for line in lines]
    found = {"step": median(whole), "data_share": sum(line["seconds_data"] for line in lines) / sum(whole)}
    return found | {part: median(line[f"seconds_{part}"] for line in lines) for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-align-steps"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if not (ASSETS / "tokenizers").is_dir():
        sys.exit(f"there are no real tokenizers at {ASSETS}: name their folder with POTSTILL_ASSETS")
    options.work.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name in CASES:
            runs[name].append(run(name, options.work, options.steps))
            print(f"{name}: {runs[name][-1]}", flush=True)
    best: dict[str, Any] = {name: min(some, key=lambda one: one["step"]) for name, some in runs.items()}
    same = best["the same tokenizer"]["step"]
    for numbers in best.values():
        numbers["ratio"] = numbers["step"] / same
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()}
    RESULT.write_text(json.dumps({"machine": machine, "best": best, "runs": runs}, indent=1) + "\n")
    for name, numbers in best.items():
        print(f"{name}: {numbers['step']:.3f} s, {numbers['ratio']:.2f} ×, data {numbers['data_share']:.1%}")


if __name__ == "__main__":
    main()
