"""LoRA beside training all weights: peak memory and processor seconds of steps, and the loss alone with a frozen head.

python benchmarks/lora.py      writes benchmarks/results/lora.json and the table of docs/students.md

The student has the size of SmolLM2-135M (random weights), the teacher's top 64 tokens come from a cache of a small model. Each
case has a process of its own, one thread; peak memory is what the process has more at its end than before the model was
loaded. The loss alone: rows of 576 numbers, 49,152 ids, top-64 targets, best of several, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RESULT = Path(__file__).parent / "results" / "lora.json"
PAGE = Path(__file__).parents[1] / "docs" / "students.md"
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA, r 16": {"lora": {"r": 16, "export": "adapter"}},
    "LoRA, r 16, checkpointed activations": {"lora": {"r": 16, "export": "adapter"}},
}
STEPS, ROWS, ROUNDS = 3, 2048, 7


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from potstill.shipped import locate

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate("shipped:tokenizers/bytes-2k")).save_pretrained(folder)


def steps(folder: str, way: str) -> dict[str, float]:
    """Of a run that learns from the shipped teacher's hidden states."""
    import torch

    from potstill.config.recipe import load_recipe
    from potstill.training.loop import train

    torch.set_num_threads(1)
    keys = {
        "run": f"{folder}/run",
        "student": {"model": f"{folder}/model", **WAYS[way]},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "shipped:corpus/train.parquet"}], "max_length": 256},
        "train": {
            "steps": STEPS,
            "batch_size": 2,
            "gradient_checkpointing": "checkpointed" in way,
            "optimizer": {"lr": 1e-4},
        },
        "checkpoint": {"every_minutes": None},
        "log": {"tensorboard": False, "stat_rows": 0},
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    train(load_recipe(keys))
    seconds = (time.process_time() - begin) / STEPS
    kept = sum(path.stat().st_size for path in Path(folder, "run", "checkpoints", f"step-{STEPS:08d}").rglob("*"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "peak_mb": round(peak / 1024),
        "processor_seconds_a_step": round(seconds, 1),
        "checkpoint_mb": round(kept / 2**20),
    }


def loss(frozen: bool) -> float:
    """Processor seconds of the loss alone, forward and backward."""
    import torch

    from potstill.losses import TopKTarget, fused_linear_kd

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, ids = SIZES["hidden_size"], SIZES["vocab_size"]
    hidden = torch.randn(ROWS, width, requires_grad=True)
    weight = (0.02 * torch.randn(ids, width)).requires_grad_(not frozen)
    logits = torch.randn(ROWS, 64).log_softmax(-1) - 0.1
    chosen = torch.stack([torch.randperm(ids)[:64] for _ in range(ROWS)])
    target = TopKTarget(chosen, logits, (1 - logits.exp().sum(-1)).log())
    begin = time.process_time()
    fused_linear_kd(hidden, weight, target).loss.backward()
    return time.process_time() - begin


def in_process(what: str, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, "--do", what, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    found: dict[str, Any] = {"settings": {"student": SIZES, "steps": STEPS, "rows": ROWS}, "steps": {}, "loss": {}}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            in_process("model", folder)
            found["steps"][way] = in_process("steps", folder, way)
        print(way, found["steps"][way], flush=True)
    times: dict[str, list[float]] = {"trained": [], "frozen": []}
    for _ in range(ROUNDS):
        for head, seen in times.items():
            seen.append(in_process("loss", head))
    found["loss"] = {head: round(min(seen), 3) for head, seen in times.items()}
    found["loss"]["ratio"] = round(min(times["frozen"]) / min(times["trained"]), 3)
    print(found["loss"], flush=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_docs()


def write_docs() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str) -> str:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    lines = [
        "| a student of the size of SmolLM2-135M | peak memory | processor seconds per step | checkpoint |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {way} | {each['peak_mb']:,} MB | {each['processor_seconds_a_step']} | {each['checkpoint_mb']:,} MB |"
        for way, each in found["steps"].items()
    ]
    lines.append(
        f"\nThe loss alone (top-64 targets, {ROWS:,} rows, 49,152 ids) takes {found['loss']['ratio']} of the processor "
        "time when the head is frozen. Measured on one CPU thread by `benchmarks/lora.py`; 2 rows of 256 tokens per step."
    )
    begin, end = "<!-- lora.json -->", "<!-- end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only-docs", action="store_true")
    chosen = parser.parse_args()
    if chosen.do:
        what, *words = chosen.do
        if what == "model":
            write_model(Path(words[0], "model"))
            print("true")
        else:
            print(json.dumps(steps(*words) if what == "steps" else loss(words[0] == "frozen")))
    elif chosen.only_docs:
        write_docs()
    else:
        main()
