"""Micro-batches of a fixed number of rows against micro-batches filled up to a number of tokens: padding, passes and processor
time of a step, on texts of very different length.

python benchmarks/token_batches.py      writes benchmarks/results/token_batches.json and prints a table

The texts are cut from the shipped corpus, their lengths drawn from a log-normal distribution, one document per row. Both ways
have the same ceiling: ROWS rows of MAX_LENGTH positions in a pass. With several ranks, all ranks' passes are made in this
process, one after another: their time is the work of all ranks together. In turns, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow.parquet as pq
import torch

from potstill.config import DataConfig, StudentConfig
from potstill.data import StepBatches
from potstill.models import load_student
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.shipped import locate
from potstill.teachers.live import live_teacher
from potstill.types import Batch

RESULT = Path(__file__).parent / "results" / "token_batches.json"
MAX_LENGTH, ROWS, BATCH_SIZE = 512, 8, 128
MODEL = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "tie_word_embeddings": True}
SIZES = {
    "student": {"hidden_size": 96, "intermediate_size": 256},
    "teacher": {"hidden_size": 128, "intermediate_size": 384},
}
WAYS: dict[str, dict[str, Any]] = {"rows": {}, "tokens": {"tokens_per_micro_batch": ROWS * MAX_LENGTH}}
LOSS = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)


def write_texts(path: Path, count: int) -> None:
    """Of 100 tokens in the middle, and from 8 to all that a row holds; a token is about 3 bytes."""
    whole = "\n".join(
        str(text) for text in pq.read_table(locate("shipped:corpus/train.parquet")).column("text").to_pylist()
    )
    random = np.random.default_rng(0)
    lengths = np.clip(3 * random.lognormal(np.log(100), 1.0, count), 24, 3 * MAX_LENGTH).astype(int)
    begins = random.integers(0, len(whole) - lengths.max(), count)
    texts = [whole[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def steps_of(
    data: DataConfig, tokenizer: Any, ranks: int, way: str, count: int
) -> tuple[list[list[list[Batch]]], float]:
    """The first steps, as each rank's micro-batches; and the share of padding among their positions."""
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "micro_batch_size": ROWS,
        "seed": 0,
        "epochs": None,
        **WAYS[way],
    }
    dealt = [StepBatches(data, tokenizer, rank=(rank, ranks), **options) for rank in range(ranks)]
    steps = [[next(one) for one in dealt] for _ in range(count)]
    counts = steps[-1][0].counts
    share = counts["padding_tokens"] / (counts["padding_tokens"] + counts["tokens"])
    return [[list(of_rank.batches) for of_rank in step] for step in steps], share


def step_seconds(module: StudentLoss, teacher: Any, step: list[list[Batch]]) -> float:
    """Processor time of all ranks' passes of a step, forward and backward."""
    tokens = sum(batch.supervised_tokens for batches in step for batch in batches)
    begin = time.process_time()
    for batch in (batch for batches in step for batch in batches if batch.examples):
        loss, _ = module(batch, [(1.0, teacher.targets(batch))], tokens, LOSS)
        loss.backward()
    module.zero_grad()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="of a group, which holds texts of all lengths")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    student, model = (
        load_student(
            StudentConfig(config={**MODEL, **SIZES[who]}, tokenizer="shipped:tokenizers/bytes-2k"),
            torch.device("cpu"),
            seed,
        )
        for seed, who in enumerate(SIZES)
    )
    module, teacher = StudentLoss(student).train(), live_teacher(model, student.vocabulary, "teacher")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder) / "texts.jsonl", 2 * BATCH_SIZE * asked.steps)
        data = DataConfig.model_validate(
            {
                "sources": [{"files": f"{folder}/texts.jsonl"}],
                "max_length": MAX_LENGTH,
                "packing": False,
                "piece_bytes": 4096,
            }
        )
        for ranks in (1, 8):
            dealt = {way: steps_of(data, student.tokenizer, ranks, way, asked.steps) for way in WAYS}
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(asked.rounds):
                for way, (steps, _) in dealt.items():
                    seconds[way].append(sum(step_seconds(module, teacher, step) for step in steps) / asked.steps)
            for way, (steps, share) in dealt.items():
                case = {
                    "padding_share": round(share, 4),
                    "passes_per_step": sum(len(step[0]) for step in steps) / asked.steps,
                    "largest_pass": max(b.input_ids.numel() for step in steps for batches in step for b in batches),
                    "processor_seconds_per_step": [round(each, 3) for each in sorted(seconds[way])],
                }
                found[f"{ranks} ranks, by {way}"] = case
                print(f"{ranks} ranks, by {way}: {json.dumps(case)}", flush=True)
    settings = {"max_length": MAX_LENGTH, "rows": ROWS, "batch_size": BATCH_SIZE, "steps": asked.steps, "models": SIZES}
    asked.result.write_text(json.dumps({"settings": settings, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
