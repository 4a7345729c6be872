"""A packed row of long and short documents by varlen attention and by a dense mask: memory and processor time of a step.

python benchmarks/attention.py                     writes benchmarks/results/attention.json and prints a line per case
python benchmarks/attention.py --case WAY LENGTH   one case, in this process; prints its JSON

A step is the teacher's pass, the student's forward and backward pass and its loss. Each case has a process of its own, for a
peak of memory is that of a process; ways take turns, on one thread. Two families: all layers see whole documents (Llama), or
half of them a window of 256 (Gemma 3).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from potstill.config import StudentConfig
from potstill.data import collate
from potstill.models import LanguageModel, load_student
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.live import live_teacher
from potstill.types import Batch, Example

RESULT = Path(__file__).parent / "results" / "attention.json"
LENGTHS, LONGEST = (2048, 8192, 16384), 32768
WAYS = {"varlen": "varlen", "dense": "sdpa"}  # by what `attn_implementation` each is asked for
SIZES = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "max_position_embeddings": LONGEST, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
NAMES = {"llama": "Llama", "gemma3": "Gemma 3, window 256"}  # of the families, in docs/gpu.md
HEADING = (
    "| tokens | family | peak, `varlen` | peak, `dense` | processor seconds, `varlen` | `dense` |\n"
    + "|---" * 6
    + "|\n"
)
LOSS = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)


def row(length: int, vocabulary: int) -> Batch:
    """One row: documents of 400 tokens in the middle, log-normal, up to 4,096."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < length:
        drawn = int(np.clip(random.lognormal(np.log(400), 1.0), 8, 4096))
        lengths.append(min(drawn, length - sum(lengths)))
    examples = []
    for i, n in enumerate(lengths):
        supervised = np.ones(n, np.bool_)
        supervised[0] = False
        examples.append(Example(str(i), "", random.integers(3, vocabulary, n).astype(np.int32), supervised))
    return collate([examples], pad_id=0)


def load(family: str, way: str, seed: int) -> LanguageModel:
    config = StudentConfig(
        config={**SIZES, **FAMILIES[family]}, tokenizer="shipped:tokenizers/bytes-2k", attn_implementation=WAYS[way]
    )
    model = load_student(config, torch.device("cpu"), seed)
    assert model.attention == way
    return model


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, length: int, family: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    student, model = load(family, way, 0), load(family, way, 1)
    module, teacher = StudentLoss(student).train(), live_teacher(model, student.vocabulary, "teacher")
    batch, seconds, before = row(length, student.vocabulary), [], peak_mb()
    for _ in range(steps):
        begin = time.process_time()
        loss, _ = module(batch, [(1.0, teacher.targets(batch))], batch.supervised_tokens, LOSS)
        loss.backward()
        module.zero_grad()
        seconds.append(time.process_time() - begin)
    return {
        "documents": len(batch.examples),
        "loaded_mb": round(before),
        "peak_mb": round(peak_mb()),
        "processor_seconds": round(min(seconds), 2),
    }


def in_own_process(*case: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", *case]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def with_table(text: str) -> str:
    """docs/gpu.md with the results' table in place of the one that is there."""
    before, head, after = text.partition(HEADING)
    return before + head + "".join(f"{line}\n" for line in table_lines()) + after[after.index("\n\n") + 1 :]


def table_lines() -> list[str]:
    cases, lines = json.loads(RESULT.read_text(encoding="utf-8"))["cases"], []
    for family, name in NAMES.items():
        for length in (*LENGTHS, LONGEST):
            found = [cases.get(f"{family}, {length}, {way}") for way in WAYS]
            peaks = " | ".join(f"{one['peak_mb']:,} MB" if one else "" for one in found)
            seconds = " | ".join(f"{one['processor_seconds']:.2f}" if one else "" for one in found)
            lines.append(f"| {length:,} | {name} | {peaks} | {seconds} |".replace("|  |", "| |"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", metavar="WAY LENGTH [FAMILY]")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.case:
        way, length, *family = asked.case
        print(json.dumps(measure(way, int(length), *(family or ["llama"]), asked.steps)))
        return
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for length in LENGTHS:
            for way in WAYS:
                found[f"{family}, {length}, {way}"] = in_own_process(way, str(length), family)
                print(f"{family}, {length}, {way}: {found[f'{family}, {length}, {way}']}", flush=True)
        found[f"{family}, {LONGEST}, varlen"] = in_own_process("varlen", str(LONGEST), family)
        print(f"{family}, {LONGEST}, varlen: {found[f'{family}, {LONGEST}, varlen']}", flush=True)
    asked.result.write_text(json.dumps({"model": SIZES, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
