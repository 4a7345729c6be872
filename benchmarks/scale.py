"""What a run over many ranks sends, holds and waits for, measured with real processes over gloo; and what that means for GPUs.

python benchmarks/scale.py --work DIR      writes benchmarks/results/scale.json and prints it as the tables of docs/scaling.md

Bytes are those that a rank hands to collectives in a step, counted by operation at torch's dispatcher. Memory is the largest
resident size of a rank, less that of a process that has imported everything. The teacher's share is the part of a step that a
student stands still for its teacher, with ranks of its own and in place. The restart is the time from a SIGKILL of a rank until
the run, begun anew by torchrun, has taken a step more than it had. Nothing here is a GPU's figure: the cost model is an
estimate, with its assumptions beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "scale.json"
STUDENT = {
    "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
STEPS = 6
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp 2": (2, {}),
    "dp 4": (4, {}),
    "hsdp 2 × 2": (4, {"parallel": {"dp_replicate": 2, "dp_shard": 2}}),
    "tp 2": (2, {"parallel": {"tp": 2}}),
    "dp 2 × tp 2": (4, {"parallel": {"tp": 2}}),
    "cp 2": (2, {"parallel": {"cp": 2}}),
    "teacher in place": (1, {}),
    "teacher on a rank of its own": (2, {"teachers": [{"model": "shipped:teacher", "ranks": 1}]}),
}


def recipe(run: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": str(run),
        "student": {"tokenizer": "shipped:tokenizers/bytes-2k", "config": STUDENT},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "shipped:corpus/train.parquet", "fraction": 0.02}], "max_length": 128},
        "train": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2},
        "checkpoint": {"every_minutes": None},
        "log": {"tensorboard": False, "stat_rows": 0},
    } | changes


def one(run: Path, changes: dict[str, Any]) -> None:
    """A rank of a case: trains, and leaves what it counted beside the run's folder."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import potstill
    from potstill.training import loop
    from potstill.training.metrics import peak_memory_bytes, reset_peak_memory

    torch.set_num_threads(1)
    cpu, counted = torch.device("cpu"), []
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().split("::")[-1].split(".")[0]
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                counted[-1][name.strip("_")] += sum(tensor.nbytes for tensor in tensors[-1:])
            return func(*args, **(kwargs or {}))

    step = loop.optimizer_step

    def watched(*arguments: Any) -> Any:
        counted.append(Counter())
        with Collectives():
            return step(*arguments)

    loop.optimizer_step = watched
    potstill.train(recipe(run, changes))
    rank = os.environ.get("RANK", "0")
    found = {"bytes": counted[-1] if counted else {}, "memory": peak_memory_bytes(cpu) - before}
    run.with_name(f"{run.name}-{rank}.json").write_text(json.dumps(found))


def command(processes: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]


def measured(work: Path, name: str) -> dict[str, Any]:
    processes, changes = CASES[name]
    run = work / name.replace(" ", "-")
    words = [__file__, "--one", json.dumps(changes), "--work", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command(processes), *words], check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    ranks = [json.loads(run.with_name(f"{run.name}-{rank}.json").read_text()) for rank in range(processes)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
    phases = ("data", "teacher", "student", "optimizer")
    seconds = {phase: sum(line[f"seconds_{phase}"] for line in lines) for phase in phases}
    students = [rank for rank in ranks if rank["bytes"]] or ranks
    return {
        "processes": processes,
        "bytes": students[0]["bytes"],
        "memory_mb": [round(rank["memory"] / 2**20) for rank in students],
        "teacher_share": (seconds["teacher"] + seconds["data"]) / sum(seconds.values()),
    }


def restart(work: Path) -> float:
    """Seconds from the death of a rank to a step beyond those that it had taken."""
    run, path = work / "restart", work / "restart.json"
    path.write_text(json.dumps(recipe(run, {"train": {"steps": 400, "batch_size": 4}, "checkpoint": {"every": 5}})))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = [*command(2, "--max-restarts", "1"), "-m", "potstill", "train", str(path)]
    agent = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        taken = reached(run, 7)
        children = subprocess.check_output(["pgrep", "-P", str(agent.pid)], text=True).split()
        os.kill(int(children[-1]), signal.SIGKILL)
        begin = time.monotonic()
        while steps(run) >= taken:  # the lines of steps that will be taken again are dropped
            time.sleep(0.02)
        reached(run, taken + 1)
        return time.monotonic() - begin
    finally:
        agent.terminate()
        agent.wait()


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def reached(run: Path, step: int) -> int:
    while (taken := steps(run)) < step:
        time.sleep(0.02)
    return taken


# H100s: what the estimate assumes.
PEAK, TRAINS, READS = (
    989e12,
    0.40,
    0.50,
)  # dense bf16 FLOP/s; the share of them that training and a teacher's pass reach
IN_HOST, BETWEEN, HIDDEN, FIXED = (
    370e9,
    40e9,
    0.90,
    4e-3,
)  # bytes/s of a GPU; how much of the traffic compute hides; s a step
MODELS = {  # parameters of student and teacher, tokens a GPU reads in a pass, whether the teacher is sharded
    "8B → 1B, teacher whole": (1.24e9, 8.03e9, 16_384, False),
    "70B → 8B, teacher sharded": (8.03e9, 70.6e9, 8_192, True),
}


def predicted(student: float, teacher: float, tokens: int, sharded: bool, gpus: int) -> float:
    """Tokens/s. A step is one pass on each GPU; parameters are sharded within a host of 8 and replicated over hosts."""
    compute = tokens * (6 * student / TRAINS + 2 * teacher / READS) / PEAK
    gathered = 2 * (
        3 * student + (teacher if sharded else 0)
    )  # bf16: two gathers and a scatter, and the teacher's gather
    within = gathered * 7 / 8 / IN_HOST
    hosts = gpus // 8
    between = 4 * student / 8 * 2 * (hosts - 1) / hosts / BETWEEN if hosts > 1 else 0.0  # float32 gradients of a shard
    return gpus * tokens / (compute + max(0.0, within - HIDDEN * compute) + between / 2 + FIXED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help="measure what is there already too")
    options = parser.parse_args()
    if options.one is not None:
        one(options.work, json.loads(options.one))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULT.read_text()) if RESULT.exists() and not options.again else {"cases": {}}
    for name in CASES:
        if name not in found["cases"]:
            print(f"{name} …", flush=True)
            found["cases"][name] = measured(options.work, name)
            RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    found["parameters"] = parameters()
    if "restart_seconds" not in found:
        print("restart …", flush=True)
        found["restart_seconds"] = round(restart(options.work), 1)
    found["estimate_tokens_per_second"] = {
        name: {str(gpus): round(predicted(*sizes, gpus)) for gpus in (8, 16, 64, 512)} for name, sizes in MODELS.items()
    }
    RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    show(found)


def parameters() -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in STUDENT.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=2048, **keys))
    return sum(parameter.numel() for parameter in model.parameters())


def show(found: dict[str, Any]) -> None:
    whole = 4 * found["parameters"]
    print(f"\nparameters: {found['parameters']:,} ({whole / 2**20:.1f} MB in float32)\n")
    print("| | MB by collective, a rank and step | largest rank, MB |\n|---|---|---|")
    for name, case in found["cases"].items():
        by = ", ".join(f"{what} {count / 2**20:.1f}" for what, count in case["bytes"].items() if count > 2**16)
        print(f"| {name} | {by or '–'} | {max(case['memory_mb'])} |")
    for name in ("teacher in place", "teacher on a rank of its own"):
        print(f"{name}: {found['cases'][name]['teacher_share']:.1%} of a step")
    print(f"restart: {found['restart_seconds']} s")
    for name, rates in found["estimate_tokens_per_second"].items():
        print(name, rates)


if __name__ == "__main__":
    main()
