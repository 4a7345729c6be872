"""What a run over many ranks sends, holds and waits for, measured with real processes over gloo; and an estimate for GPUs.

python benchmarks/scale.py --work DIR     measures what benchmarks/results/scale.json lacks, then writes docs/scaling.md
python benchmarks/scale.py --only-docs    writes the tables from the results there are

Bytes are those of the tensors that collectives work on (of a gather the whole, not a rank's part), counted at torch's
dispatcher from the beginning of one optimizer step to the next. Memory is resident memory of a rank, less what it had after
its imports; glibc gives freed memory back at once (MALLOC_MMAP_THRESHOLD_). Each case has processes of its own. No figure
here is a GPU's: `estimated` is a calculation, with its assumptions beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

RESULT = Path(__file__).parent / "results" / "scale.json"
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
MB = 2**20
LAYERS, WIDTH, MLP, VOCABULARY = 8, 768, 2048, 2048
STUDENT = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + VOCABULARY * WIDTH + WIDTH
SPREAD: dict[str, dict[str, int]] = {  # by name: `parallel`; the product of its sizes is the number of processes
    "1": {},
    "dp 2": {"dp_shard": 2},
    "dp 4": {"dp_shard": 4},
    "hsdp 2 × 2": {"dp_replicate": 2, "dp_shard": 2},
    "tp 2": {"tp": 2, "dp_shard": 1},
    "dp 2 × tp 2": {"tp": 2, "dp_shard": 2},
    "cp 2": {"cp": 2, "dp_shard": 1},
}
STEPS = 3
# A teacher that takes about 0.6 of its student's time, and text that is read or written.
TEACHER = STUDENT | {"hidden_size": 512, "intermediate_size": 1408}
SMALLER = STUDENT | {"hidden_size": 384, "intermediate_size": 1024}
WRITTEN = {"on_policy_fraction": 1.0, "prompt_tokens": 32, "sampling": {"max_new_tokens": 32}}
HANDOVER: dict[str, dict[str, Any]] = {
    "off-policy": {},
    "on-policy": {"rollouts": WRITTEN},
    "on-policy, one step stale": {"rollouts": WRITTEN | {"max_staleness": 1}},
}
HANDOVER_STEPS = 8
PLANNED_TOKENS = 3_000_000  # tokens whose plan is timed
PLANNING = {"1": 1, "2": 2, "4": 4}  # ranks, by their name in the results
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd")


def recipe(run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": str(run),
        "student": {"tokenizer": "shipped:tokenizers/bytes-2k", "config": STUDENT},
        "teachers": [{"model": "shipped:teacher"}],
        "data": {"sources": [{"files": "shipped:corpus/train.parquet", "fraction": 0.02}], "max_length": 64},
        "train": {"steps": STEPS, "batch_size": 4, "micro_batch_size": 1},
        "checkpoint": {"every_minutes": None},
        "log": {"tensorboard": False, "stat_rows": 0},
    } | changes


# What a rank measures.


@contextmanager
def marked(owner: type, name: str, marks: list[str], mark: str) -> Iterator[None]:
    """What a method does has a name while it does it."""
    inner = getattr(owner, name)

    def method(*arguments: Any, **options: Any) -> Any:
        marks.append(mark)
        try:
            return inner(*arguments, **options)
        finally:
            marks.pop()

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, inner)


@contextmanager
def collectives(counted: list[Counter[str]]) -> Iterator[None]:
    """Adds to the last of `counted`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from potstill.losses.fused import _HeadProduct
    from potstill.parallel.vocab import VocabShard

    marks: list[str] = []
    kinds = {"allgather": "gather", "all_gather": "gather", "reduce_scatter": "scatter", "allreduce": "all-reduce"}
    kinds |= {
        "all_reduce": "all-reduce",
        "broadcast": "broadcast",
        "alltoall": "all-to-all",
        "all_to_all": "all-to-all",
    }

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", func.name()):
                name = func.name().split("::")[-1].strip("_")
                kind = next((kind for begin, kind in kinds.items() if name.startswith(begin)), name)
                # What is gathered or scattered comes as one tensor or as a list of its parts.
                lists = [[leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)] for part in args]
                size = max((sum(tensor.nbytes for tensor in each) for each in lists), default=0)
                counted[-1][marks[-1] if marks else kind] += size
            return func(*args, **(kwargs or {}))

    with (
        marked(VocabShard, "_reduced", marks, "rows of the loss"),
        marked(_HeadProduct, "gradients", marks, "hidden gradient"),
        Counting(),
    ):
        yield


def train_counted(keys: dict[str, Any]) -> dict[str, Any]:
    """Of the step before the last: its bytes by collective, its rows; and the memory."""
    import torch

    import potstill
    from potstill.training import loop
    from potstill.training.metrics import peak_memory_bytes, reset_peak_memory

    cpu = torch.device("cpu")
    counted: list[Counter[str]] = [Counter()]
    found: dict[str, Any] = {}
    reset_peak_memory(cpu)
    imported = peak_memory_bytes(cpu)
    step = loop.optimizer_step

    def watched(parts: Any, prepared: Any, *others: Any) -> Any:
        if len(counted) == 1:
            found["memory_loading"] = peak_memory_bytes(cpu) - imported
        if len(counted) == 2:
            reset_peak_memory(cpu)  # the optimizer has its moments now
        counted.append(Counter())
        metrics = step(parts, prepared, *others)
        if len(counted) == STEPS:
            batches = prepared.step.batches
            found["passes"] = len(batches)
            found["rows"] = sum(batch.supervised_tokens for batch in batches)
            found["positions"] = sum(batch.input_ids.numel() for batch in batches)
        found["memory"] = peak_memory_bytes(cpu) - imported
        return metrics

    loop.optimizer_step = watched
    with collectives(counted):
        potstill.train(keys)
    return found | {"bytes": dict(counted[STEPS - 1])}


def train_handed(keys: dict[str, Any]) -> dict[str, Any]:
    """Of a run with a teacher on a rank of its own: what came from it, how long each pass was waited for, and, on the
    teacher's rank, how long it computed."""
    import potstill
    from potstill.models import placed

    begin, compute = placed.OwnRanks.begin, placed._hidden_of
    came, waits, computed = Counter[str](), [], []

    def counted(self: placed.OwnRanks, batch: Any, positions: Any) -> Any:
        wait = begin(self, batch, positions)

        def answer() -> Any:
            before = self.waited
            found = wait()
            waits.append(self.waited - before)
            came.update(answers=found.nbytes, requests=placed.request_of(batch, positions).nbytes)
            came.update(rows=batch.supervised_tokens, positions=batch.input_ids.numel())
            return found

        return answer

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return compute(*arguments)
        finally:
            computed.append(time.perf_counter() - started)

    placed.OwnRanks.begin, placed._hidden_of = counted, timed  # type: ignore[method-assign]
    potstill.train(keys)
    return {"handed": dict(came), "waits": waits, "computed": computed}


def loss_floats() -> dict[str, dict[str, float]]:
    """Floats a row that the loss of a training step sends with a vocabulary over two ranks, by divergence and temperature."""
    import torch
    import torch.distributed as dist

    from potstill.losses import fused_linear_kd
    from potstill.types import LogitsTarget

    dist.init_process_group("gloo")
    group, rows, found = dist.group.WORLD, 64, {}
    torch.manual_seed(0)
    hidden, labels = torch.randn(rows, 16), torch.randint(0, 100, (rows,))
    head, logits = (torch.randn(100, size).chunk(2)[dist.get_rank()] for size in (16, rows))
    for divergence in DIVERGENCES:
        found[divergence] = {}
        for temperature in (1.0, 2.0):
            counted: list[Counter[str]] = [Counter()]
            own, target = hidden.clone().requires_grad_(), LogitsTarget(logits.t().contiguous())
            options = {"divergence": divergence, "temperature": temperature, "labels": labels, "group": group}
            with collectives(counted):
                out = fused_linear_kd(own, head, target, row_values=False, **options)  # type: ignore[arg-type]
                out.loss.backward()
            found[divergence][str(temperature)] = counted[0]["rows of the loss"] / 4 / rows
    dist.destroy_process_group()
    return found


def plan_timed(keys: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the steps that are planned, by all ranks together, and the processor seconds that this rank takes to plan them
    and to make the batches of its own rows."""
    import torch
    from transformers import AutoTokenizer

    from potstill.config import DataConfig, ParallelConfig
    from potstill.data import StepBatches
    from potstill.parallel.agree import Rounds
    from potstill.parallel.mesh import world
    from potstill.shipped import locate

    tokenizer = AutoTokenizer.from_pretrained(locate("shipped:tokenizers/bytes-2k"))
    data = DataConfig(sources=[{"files": "shipped:corpus/train.parquet"}], max_length=512)
    with world(ParallelConfig(), torch.device("cpu")) as here:
        options = {"batch_size": 32, "micro_batch_size": 8, "seed": 0, "epochs": None}
        rounds = None if here.data is None else Rounds(here.data)
        steps = StepBatches(data, tokenizer, rounds=rounds, rank=(here.dp.index, here.dp.size), **options)
        first, began = next(steps).counts["tokens"], time.process_time()
        tokens = next(step.counts["tokens"] for step in steps if step.counts["tokens"] - first > PLANNED_TOKENS) - first
        seconds = time.process_time() - began
        steps.leave()
    return {"tokens": tokens, "seconds": round(seconds, 2)}


JOBS = {"counted": train_counted, "handed": train_handed, "planned": plan_timed}


def one(job: str, work: Path, keys: str) -> None:
    """A rank of a case: leaves what it found beside the run's folder."""
    import torch

    torch.set_num_threads(1)
    found = loss_floats() if job == "loss" else JOBS[job](json.loads(keys))
    work.with_name(f"{work.name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


# The cases.


def launched(processes: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def on_ranks(processes: int, job: str, run: Path, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    shutil.rmtree(run, ignore_errors=True)
    words = [__file__, "--one", job, "--keys", json.dumps(keys), "--work", str(run)]
    with run.with_suffix(".log").open("w") as log:
        subprocess.run([*launched(processes), *words], check=True, env=environment(), stdout=log, stderr=log)
    return [json.loads(run.with_name(f"{run.name}-{rank}.json").read_text()) for rank in range(processes)]


def spread(work: Path, name: str) -> dict[str, Any]:
    parallel, processes = SPREAD[name], 1
    for size in parallel.values():
        processes *= size
    run = work / name.replace(" ", "-")
    ranks = on_ranks(processes, "counted", run, recipe(run, parallel=parallel))
    memory = {key: [rank[key] for rank in ranks] for key in ("memory", "memory_loading")}
    return {key: ranks[0][key] for key in ("bytes", "passes", "rows", "positions")} | memory


def handover(work: Path, text: str) -> dict[str, Any]:
    """Means over a step, without the first two. A step has as many passes as rows."""
    teacher = work / "teacher"
    if not teacher.exists():
        subprocess.run([sys.executable, __file__, "--teacher", "--work", str(work)], check=True, env=environment())
    run, passes, warm = work / text.replace(" ", "-").replace(",", ""), 4, 2
    keys = recipe(
        run,
        student={"tokenizer": "shipped:tokenizers/bytes-2k", "config": SMALLER},
        teachers=[{"model": str(teacher), "ranks": 1}],
        train={"steps": HANDOVER_STEPS, "batch_size": passes, "micro_batch_size": 1},
        **HANDOVER[text],
    )
    load = os.getloadavg()[0]
    student, taught = on_ranks(2, "handed", run, keys)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][warm:]
    phases = ("data", "teacher", "student", "optimizer")
    by_pass = [fmean(student["waits"][warm * passes + number :: passes]) for number in range(passes)]
    seconds = {
        "step": fmean(sum(line[f"seconds_{phase}"] for phase in phases) for line in lines),
        "wait": fmean(line["seconds_teacher_wait"] for line in lines),
        "teacher computes": passes * fmean(taught["computed"][warm * passes :]),
    }
    rounded = {name: round(value, 4) for name, value in seconds.items()}
    waits = [round(value, 4) for value in by_pass]
    return {
        "seconds": rounded,
        "waits_by_pass": waits,
        "handed": student["handed"],
        "load": round(max(load, os.getloadavg()[0]), 1),
    }


def planning(work: Path, name: str) -> dict[str, Any]:
    ranks = on_ranks(PLANNING[name], "planned", work / f"planning-{name}", {})
    return {"tokens": ranks[0]["tokens"], "seconds": [rank["seconds"] for rank in ranks]}


def make_teacher(work: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from potstill.shipped import locate

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, **{key: value for key, value in TEACHER.items() if key != "model_type"})
    draft = work / "teacher-draft"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(draft)
    for path in Path(locate("shipped:teacher")).glob("*token*"):
        shutil.copy(path, draft)
    draft.rename(work / "teacher")


def restart(work: Path) -> float:
    """Seconds from the death of a rank until the run, begun anew by torchrun, has taken its next step."""
    run, path = work / "restart", work / "restart.json"
    shutil.rmtree(run, ignore_errors=True)
    student = {"tokenizer": "shipped:tokenizers/bytes-2k", "config": SMALLER | {"num_hidden_layers": 2}}
    path.write_text(
        json.dumps(recipe(run, student=student, train={"steps": 4000, "batch_size": 4}, checkpoint={"every": 5}))
    )
    words = [*launched(2, "--max-restarts", "1"), "-m", "potstill", "train", str(path)]
    variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with run.with_suffix(".log").open("w") as log:
        agent = subprocess.Popen(words, env=variables, stdout=log, stderr=log)
    try:
        while steps(run) < 7:
            time.sleep(0.02)
            assert agent.poll() is None, run.with_suffix(".log").read_text()[-2000:]
        before = children(agent.pid)
        os.kill(before[-1], signal.SIGKILL)
        begin, last = time.monotonic(), steps(run)
        while (now := steps(run)) <= last or set(before) & set(children(agent.pid)) or not children(agent.pid):
            last = now
            time.sleep(0.02)
            assert agent.poll() is None, run.with_suffix(".log").read_text()[-2000:]
        return time.monotonic() - begin
    finally:
        agent.terminate()
        agent.wait()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


# The bounds, by which measured bytes are judged and from which the estimate is made.


def sharded_bytes(parameters: float, passes: int, of_weight: int, shards: int, replicas: int) -> dict[str, float]:
    """What FSDP may send in a step: in each pass two gathers of the parameters and one scatter of their float32 gradients;
    between replicas one all-reduce of a rank's shard."""
    if shards == 1:
        return {}
    found = {"gather": 2.0 * passes * of_weight * parameters, "scatter": 4.0 * passes * parameters}
    return found | ({"all-reduce": 4.0 * parameters / shards} if replicas > 1 else {})


def split_bytes(positions: int, layers: int, width: int, of_value: int) -> float:
    """What tensor parallelism all-reduces in a step: two results of each layer and their two gradients, and the embedding."""
    return (4.0 * layers + 1) * positions * width * of_value


# Transformers' plan sums the gradients of q, k, v, gate and up one by one: 5 all-reduces of a layer in place of 2.
PLANNED = 7 / 4


def bounds(name: str, case: Mapping[str, Any]) -> dict[str, float]:
    sizes = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1} | SPREAD[name]
    tp, cp = sizes["tp"], sizes["cp"]
    # With tp the matrices are cut, the norms are not; with cp gradients are summed as with dp.
    own = PARAMETERS / tp + (1 - 1 / tp) * (2 * LAYERS + 1) * WIDTH
    found = sharded_bytes(own, case["passes"], 4, sizes["dp_shard"] * cp, sizes["dp_replicate"])
    if tp > 1:
        found["all-reduce"] = found.get("all-reduce", 0.0) + split_bytes(case["positions"], LAYERS, WIDTH, 4)
        found["rows of the loss"] = 6.0 * 4 * case["rows"]
        found["hidden gradient"] = 4.0 * WIDTH * case["rows"]
    if cp > 1:  # keys and values of each layer, and the last hidden states; their gradients come back
        joined = (2 * LAYERS + 1) * case["positions"] * WIDTH * 4.0
        found["gather"] += joined
        found["scatter"] += joined
    return found


# The estimate. Nothing of it was measured on GPUs.

PEAK = 989e12  # FLOP/s of an H100, dense bf16
TRAINS, READS = 0.40, 0.50  # the shares of it that training and a teacher's pass reach
IN_HOST, BETWEEN = 370e9, 40e9  # bytes/s of a GPU to those of its host, and to other hosts
HIDDEN, FIXED = 0.90, 4e-3  # the share of compute that can hide traffic; seconds a step besides
CHANNEL = 2.6e9  # bytes/s of hidden states between two ranks, as TCP on one host was measured
HOST, MEMORY = 8, 76e9  # GPUs of a host; bytes that may be used of each
ACTIVATIONS = 34  # bytes a token, layer and unit of width, without gradient checkpointing
LENGTH = 4096


@dataclass(frozen=True)
class Shape:
    parameters: float
    layers: int
    width: int
    vocabulary: int
    tied: bool = False

    @property
    def table(self) -> float:
        return float(self.vocabulary * self.width)

    def forward(self, length: int) -> float:
        """FLOPs a token: two for each parameter that is multiplied with, and causal attention."""
        return 2 * (self.parameters - (0 if self.tied else self.table)) + 2 * self.layers * self.width * length


SHAPES = {
    "1B": Shape(1.236e9, 16, 2048, 128256, tied=True),
    "3B": Shape(3.21e9, 28, 3072, 128256, tied=True),
    "3.8B": Shape(3.84e9, 32, 3072, 200064, tied=True),
    "8B": Shape(8.03e9, 32, 4096, 128256),
    "70B": Shape(70.55e9, 80, 8192, 128256),
}


@dataclass(frozen=True)
class Plan:
    """Student and teachers; `tokens` that a GPU reads in a pass, of texts of `length`; `passes` of an optimizer step."""

    student: str
    teachers: tuple[str, ...]
    tokens: int
    sharded: bool = False  # the teachers, over the GPUs of a host; else whole on each
    length: int = LENGTH
    passes: int = 1


PLANS = {
    "8B → 1B, teacher whole in place": Plan("1B", ("8B",), 16384),
    "70B → 8B, teacher sharded in place": Plan("8B", ("70B",), 8192, sharded=True),
}
NEMO = Plan("1B", ("3.8B", "3B"), 2048, length=2048, passes=6)


def student_pass(plan: Plan, shards: int, head_of: Shape | None = None) -> tuple[float, float]:
    """Seconds of compute and of traffic in its host. `head_of`: the teacher elsewhere whose head is multiplied with here."""
    model = SHAPES[plan.student]
    compute = 3 * model.forward(plan.length) * plan.tokens / (TRAINS * PEAK)
    if head_of is not None:
        compute += 2 * head_of.table * plan.tokens / (READS * PEAK)
    sent = sum(sharded_bytes(model.parameters, 1, 2, shards, 1).values())
    return compute, sent * (shards - 1) / shards / IN_HOST


def between_hosts(plan: Plan, shards: int, replicas: int) -> float:
    """Seconds of the replicas' all-reduce, half of which the last pass hides."""
    sent = sharded_bytes(SHAPES[plan.student].parameters, 1, 2, shards, replicas).get("all-reduce", 0.0)
    return sent * 2 * (replicas - 1) / replicas / BETWEEN / 2


def in_place(plan: Plan, gpus: int) -> dict[str, float]:
    """Tokens/s and bytes of a GPU: parameters are sharded within a host and replicated over hosts."""
    teachers = [SHAPES[name] for name in plan.teachers]
    compute, traffic = student_pass(plan, HOST)
    for teacher in teachers:
        compute += teacher.forward(plan.length) * plan.tokens / (READS * PEAK)
        traffic += 2 * (teacher.parameters - teacher.table) * (HOST - 1) / HOST / IN_HOST if plan.sharded else 0
    seconds = (
        plan.passes * (compute + max(0.0, traffic - HIDDEN * compute)) + between_hosts(plan, HOST, gpus // HOST) + FIXED
    )
    held = sum(
        2 * ((teacher.parameters - teacher.table) / HOST + teacher.table if plan.sharded else teacher.parameters)
        for teacher in teachers
    )
    memory = held + student_memory(plan, HOST)
    return {"tokens_per_second": gpus * plan.tokens * plan.passes / seconds, "memory": memory}


def student_memory(plan: Plan, shards: int) -> float:
    """Float32 weights, gradients and two moments, sharded; activations; the gathered tables and two layers in bf16; the room of
    the loss."""
    model = SHAPES[plan.student]
    tables = model.table * (1 if model.tied else 2)
    layers = 2 * (model.parameters - tables) / model.layers
    activations = ACTIVATIONS * plan.tokens * model.layers * model.width
    return 16 * model.parameters / shards + activations + 2 * (tables + layers) + 2 * 192 * MB


def on_own_ranks(plan: Plan, gpus: int) -> dict[str, float]:
    """The best split of the GPUs: whole hosts, but for one host; no more copies of the teacher than ranks that ask."""
    (teacher,) = (SHAPES[name] for name in plan.teachers)
    best: dict[str, float] = {"tokens_per_second": 0.0}
    unit = HOST if gpus > HOST else 1
    for taught in range(unit, gpus, unit):
        students, shards = gpus - taught, min(HOST, gpus - taught)
        memory = student_memory(plan, shards) + 2 * teacher.table
        compute, traffic = student_pass(plan, shards, teacher)
        seconds = (
            compute + max(0.0, traffic - HIDDEN * compute) + between_hosts(plan, shards, students // shards) + FIXED
        )
        seconds = max(seconds, plan.tokens * 2 * teacher.width / CHANNEL)
        for tp in (1, 2, 4, 8):
            copies = taught // tp
            if taught % tp or copies > students or memory > MEMORY or 2 * teacher.parameters / tp > MEMORY - 8e9:
                continue
            flops = teacher.forward(plan.length) - 2 * teacher.table
            reading = plan.tokens * flops / (READS * PEAK * tp)
            # Two all-reduces of each layer, in sight.
            reading += 2 * teacher.layers * plan.tokens * teacher.width * 2 * 2 * (tp - 1) / tp / IN_HOST
            rate = min(students * plan.tokens / seconds, copies * plan.tokens / reading)
            if rate > best["tokens_per_second"]:
                best = {"tokens_per_second": rate, "memory": memory, "teacher_gpus": taught, "tp": tp}
    return best


def estimated() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        found[name] = {str(gpus): in_place(plan, gpus) for gpus in (8, 64, 512)}
        own = name.split(",")[0] + ", teacher on ranks of its own"
        found[own] = {str(gpus): on_own_ranks(plan, gpus) for gpus in (8, 64, 512)}
    return found


# The page.


def megabytes(size: float) -> str:
    return f"{size / MB:,.0f}" if size >= 10 * MB else f"{size / MB:.1f}" if size >= MB / 10 else f"{size / MB:.3f}"


def thousands(rate: float) -> str:
    return f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.0f}k"


def bytes_table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| ranks | passes | collective | MB | bound, MB | of the bound |"
    yield "|---|---|---|---|---|---|"
    for name, case in found["spread"].items():
        for kind, bound in bounds(name, case).items():
            sent = case["bytes"].get(kind, 0)
            sizes = f"{megabytes(sent)} | {megabytes(bound)} | {sent / bound:.2f}"
            yield f"| {name} | {case['passes']} | {kind} | {sizes} |"


def floats_table(found: Mapping[str, Any]) -> Iterator[str]:
    floats = found["loss_floats"]
    yield "| floats a row | " + " | ".join(f"`{name}`" for name in floats) + " |"
    yield "|---|" + "---|" * len(floats)
    for temperature, words in (("1.0", "T = 1"), ("2.0", "another T")):
        yield f"| {words} | " + " | ".join(f"{each[temperature]:g}" for each in floats.values()) + " |"


def memory_table(found: Mapping[str, Any]) -> Iterator[str]:
    loading = "MB while loading: first rank | others"
    yield f"| ranks | MB in a step | of one process | weights, gradients, moments alone | {loading} |"
    yield "|---|---|---|---|---|---|"
    whole = max(found["spread"]["1"]["memory"])
    for name, case in found["spread"].items():
        if "memory" not in case:  # its bytes are from a run before the first rank read for all
            continue
        sizes = SPREAD[name]
        cut = sizes.get("dp_shard", 1) * sizes.get("tp", 1) * sizes.get("cp", 1)
        most, state = max(case["memory"]), 16 * PARAMETERS / cut
        first, *others = (f"{loading / MB:,.0f}" for loading in case["memory_loading"])
        shares = f"{most / whole:.2f} | {state / MB:,.0f} (1/{cut})"
        yield f"| {name} | {most / MB:,.0f} | {shares} | {first} | {max(others, default='–', key=int)} |"


def planning_table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| ranks | tokens per processor second of a rank | of one rank's |"
    yield "|---|---|---|"
    rates = {name: case["tokens"] / max(case["seconds"]) for name, case in found["planning"].items()}
    for name, rate in rates.items():
        yield f"| {name} | {thousands(rate)} | {rate / rates['1']:.2f} |"


def handover_table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| text | teacher computes, of a step | waited for, of a step | exposed share | first pass, of all waiting |"
    yield "|---|---|---|---|---|"
    cases = found["handover"]
    for text in HANDOVER:
        seconds, waits = cases[text]["seconds"], cases[text]["waits_by_pass"]
        computes, wait = seconds["teacher computes"], seconds["wait"]
        shares = f"{computes / seconds['step']:.0%} | {wait / seconds['step']:.0%} | {wait / computes:.0%}"
        yield f"| {text} | {shares} | {waits[0] / sum(waits):.0%} |"
    loads = [case["load"] for case in cases.values()]
    yield f"\nOther work kept the machine's {found['cores']} cores busy (load {min(loads):g} to {max(loads):g})."


def rows_table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| text | rows of the loss, of all positions | bytes a row | bound | ids and positions, bytes a row |"
    yield "|---|---|---|---|---|"
    for text in HANDOVER:
        handed = found["handover"][text]["handed"]
        rows, bound = handed["rows"], 4 * TEACHER["hidden_size"]
        sizes = f"{handed['answers'] / rows:,.0f} | {bound:,} | {handed['requests'] / rows:,.0f}"
        yield f"| {text} | {rows / handed['positions']:.0%} | {sizes} |"


def restart_line(found: Mapping[str, Any]) -> Iterator[str]:
    again = found["restart"]
    yield f"{again['seconds']:g} seconds, at a load of {again['load']:g} on {found['cores']} cores."


def estimate_table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| ESTIMATE, tokens per second | 8 H100s | 64 | 512 | GB of a GPU that trains | GPUs of the teacher |"
    yield "|---|---|---|---|---|---|"
    for name, by in found["estimate"].items():
        rates = " | ".join(thousands(each["tokens_per_second"]) for each in by.values())
        memory = max(each["memory"] for each in by.values()) / 1e9
        split = [f"{each['teacher_gpus']:g} (tp {each['tp']:g})" for each in by.values() if "teacher_gpus" in each]
        yield f"| {name} | {rates} | {memory:.0f} | {', '.join(split) or '–'} |"


def nemo_table(found: Mapping[str, Any]) -> Iterator[str]:
    estimate = thousands(found["estimate_of_nemos_run"]["tokens_per_second"])
    yield "| 1B from 3.8B and 3B, 16 GPUs, 2,048 tokens a pass, 6 passes a step | tokens per second |"
    yield "|---|---|"
    yield "| NeMo-RL, published | 29.5k |"
    yield f"| ESTIMATE for H100s, teachers whole in place | {estimate} |"


TABLES = {
    "bytes": bytes_table,
    "floats": floats_table,
    "memory": memory_table,
    "planning": planning_table,
    "handover": handover_table,
    "rows": rows_table,
    "restart": restart_line,
    "estimate": estimate_table,
    "nemo": nemo_table,
}


def with_tables(text: str) -> str:
    """The page with the tables of the results between its marks."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    for name, table in TABLES.items():
        begin, end = f"<!-- scale.json: {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n" + "\n".join(table(found)) + f"\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for runs")
    parser.add_argument("--only-docs", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    parser.add_argument("--teacher", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one(options.one, options.work, options.keys)
    elif options.teacher:
        make_teacher(options.work)
    else:
        if not options.only_docs:
            options.work.mkdir(parents=True, exist_ok=True)
            measure(options.work)
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {PAGE.name}")


def measure(work: Path) -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}

    def keep() -> None:
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def unmeasured(part: str, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
        cases = found.setdefault(part, {})
        for number, name in enumerate(names, 1):
            if name not in cases:
                print(f"{part} {number}/{len(names)}: {name}", flush=True)
                yield cases, name
                keep()

    if "loss_floats" not in found:
        found["loss_floats"] = on_ranks(2, "loss", work / "loss", {})[0]
        keep()
    for cases, name in unmeasured("spread", list(SPREAD)):
        cases[name] = spread(work, name)
    for cases, name in unmeasured("planning", list(PLANNING)):
        cases[name] = planning(work, name)
    for cases, name in unmeasured("handover", list(HANDOVER)):
        cases[name] = handover(work, name)
    if "restart" not in found:
        print("restart", flush=True)
        found["restart"] = {"seconds": round(restart(work), 1), "load": round(os.getloadavg()[0], 1)}
    found["cores"] = os.cpu_count()
    found["estimate"], found["estimate_of_nemos_run"] = estimated(), in_place(NEMO, 2 * HOST)
    keep()


if __name__ == "__main__":
    main()
