"""The memory of a step as it is counted before a run, beside what a process really takes.

python benchmarks/memory_account.py    writes benchmarks/results/memory_account.json and prints a table
python benchmarks/memory_account.py --case NAME    one case, in this process: JSON on the last line

Measured on a CPU: the largest resident memory of a process over three steps, less what it had before the models were made, when
a small student had trained already, so that libraries are loaded. Twice: with a malloc that is told to give back what is freed,
so that what is resident is what tensors take, and with its own settings, by which it keeps some for later. Linux only.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from potstill.config import OptimizerConfig, StudentConfig
from potstill.memory import Memory, Step, count_memory, full_batch
from potstill.models import LanguageModel, load_student
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.training.metrics import peak_memory_bytes, reset_peak_memory
from potstill.training.optimizer import make_optimizers

RESULT = Path(__file__).parent / "results" / "memory_account.json"
CPU = torch.device("cpu")
SETTINGS = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.5)
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc's
CASES: dict[str, dict[str, Any]] = {
    "float32, AdamW": {},
    "two passes": {"passes": 2},
    "bfloat16 with masters": {"dtype": "bfloat16"},
    "Muon": {"optimizer": "muon"},
    "gradient checkpointing": {"checkpointing": True},
}


def llama(seed: int, dtype: str = "float32", **sizes: Any) -> LanguageModel:
    config = {"model_type": "llama", "max_position_embeddings": 512, "tie_word_embeddings": True, **sizes}
    config["num_key_value_heads"] = config["num_attention_heads"]
    made = StudentConfig(config=config, tokenizer="shipped:tokenizers/bytes-2k", dtype=dtype)
    return load_student(made, CPU, seed)


def step_of(case: dict[str, Any], rows: int, length: int) -> Step:
    config = OptimizerConfig(name=case.get("optimizer", "adamw"))
    return Step(
        rows,
        length,
        case.get("passes", 1),
        lambda student, batch, targets: StudentLoss(student).train()(batch, targets, 9, SETTINGS)[0],
        lambda student: make_optimizers(student.model, student.model.get_output_embeddings(), config),
        nullcontext,
    )


def take_steps(student: LanguageModel, teacher: LanguageModel, step: Step, count: int) -> None:
    optimizers, batch = step.optimizers(student), full_batch(step.rows, step.length)
    for _ in range(count):
        for _ in range(step.passes):
            with torch.no_grad():
                target = teacher.at_rows(teacher.hidden(batch, batch.rows.teacher))
            step.loss(student, batch, [(1.0, target)]).backward()
            del target
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def models(case: dict[str, Any], **sizes: Any) -> tuple[LanguageModel, LanguageModel]:
    student, teacher = llama(0, case.get("dtype", "float32"), **sizes), llama(1, **sizes)
    teacher.model.eval().requires_grad_(False)
    if case.get("checkpointing"):
        student.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return student, teacher


def measured(case: dict[str, Any]) -> tuple[Memory, int]:
    torch.set_num_threads(1)
    small = models(case, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    take_steps(*small, step_of(case, 2, 32), 2)
    del small
    gc.collect()
    before = resident()
    student, teacher = models(case, **LARGE)
    step = step_of(case, 4, 256)
    reset_peak_memory(CPU)
    take_steps(student, teacher, step, 3)
    taken = peak_memory_bytes(CPU) - before
    return count_memory(student, [teacher], step), taken


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def in_own_process(name: str, settings: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **settings})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    found = {}
    for name in CASES:
        found[name] = in_own_process(name, GIVES_BACK)
        found[name]["measured with malloc's own settings"] = in_own_process(name, {})["measured"]
        print(name, found[name], flush=True)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    RESULT.write_text(json.dumps({"machine": machine, "student": LARGE, "cases": found}, indent=1) + "\n")
    print(table(found))


def table(cases: dict[str, dict[str, Any]]) -> str:
    """As docs/gpu.md has it."""
    lines = [
        "| case | counted, MB | measured, MB | counted ÷ measured | with malloc's own settings, MB |",
        "|---|---|---|---|---|",
    ]
    for name, one in cases.items():
        sizes = (one[each] for each in ("counted", "measured", "measured with malloc's own settings"))
        counted, taken, kept = (f"{size / 1e6:,.0f}" for size in sizes)
        lines.append(f"| {name} | {counted} | {taken} | {one['counted'] / one['measured']:.3f} | {kept} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--case" in sys.argv:
        memory, taken = measured(CASES[sys.argv[-1]])
        print(json.dumps({"counted": memory.total, "measured": taken, "parts": vars(memory)}))
    else:
        main()
