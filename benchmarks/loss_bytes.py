"""Bytes that the loss moves over its [n, V] matrices for each logit, by the torch blocks and by the Triton kernels; bytes of
the head's gradient; what compilers make of the kernels; and what the loss then takes on some GPUs (a roofline: an estimate,
nothing here was run on a GPU).

python benchmarks/loss_bytes.py      writes benchmarks/results/loss_bytes.json and prints the tables; about two minutes

Torch's operations are counted on meta tensors, at full size: what each reads and writes, with an expanded dimension read once.
The kernels' loads and stores are counted in Triton's interpreter, in a process of its own, on a few rows of the full width,
together with the torch operations between them. Matrix products are not counted: they are the same either way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from potstill.losses import DenseTarget, SampledTarget, TopKTarget, fused, fused_linear_kd

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
RESULT = Path(__file__).parent / "results" / "loss_bytes.json"
ROWS, VOCABULARY, STUDENT, TEACHER, KEPT = 4096, 128_256, 2048, 4096, 64
FEW = 2  # rows in the interpreter
CASES: dict[str, dict[str, Any]] = {
    "forward KL": {"divergence": "forward_kl"},
    "forward KL, T = 2, cross-entropy 0.5": {"divergence": "forward_kl", "temperature": 2.0, "ce_weight": 0.5},
    "reverse KL": {"divergence": "reverse_kl"},
    "JSD": {"divergence": "jsd"},
    "JSD, cross-entropy 0.5": {"divergence": "jsd", "ce_weight": 0.5},
    "skewed KL": {"divergence": "skew_kl"},
    "skewed reverse KL": {"divergence": "skew_reverse_kl"},
    "TVD": {"divergence": "tvd"},
    "top-64 + tail": {"kind": "top-k"},
    "64 draws": {"kind": "sampled"},
    "cross-entropy alone": {"kind": "none", "ce_weight": 1.0},
}
# Dense bf16 products, TFLOP/s, and memory, TB/s, from the vendors' data sheets; SXM, without sparsity.
GPUS = {"H100": (989.0, 3.35), "A100 80 GB": (312.0, 2.04), "MI300X": (1307.0, 5.3)}
OF_PRODUCTS, OF_MEMORY = 0.7, 0.85  # of the data sheet's figures that are reached; assumptions

A = torch.ops.aten
FREE = {A.empty, A.empty_like, A.new_empty, A.empty_strided, A.detach, A.alias}
SHAPE_ONLY = {A.new_zeros, A.new_ones, A.new_full, A.zeros_like, A.ones_like, A.full_like}
ONLY_WRITTEN = {A.copy_, A.zero_, A.fill_}  # their first argument
SPARSE_READ = {A.gather, A.index_select, A.index}  # read as much as they give
SPARSE_WRITE = {A.scatter_, A.scatter_add_, A.scatter_reduce_, A.index_put_, A.index_copy_}
PRODUCTS = {A.mm, A.addmm, A._addmm_activation}


def size(tensor: Tensor) -> int:
    """Bytes that a kernel touches."""
    return math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.element_size()


class Bytes(TorchDispatchMode):
    """Bytes read and written by torch's operations: of the head's gradient [V, H], of matrices [n, V] and [n, K] that are no
    product's, and of vectors."""

    def __init__(self, head: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._head = head

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        packet, schema = function.overloadpacket, function._schema
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if packet in FREE or views:
            return out
        values = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        outs = [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor)]
        read = [] if packet in SHAPE_ONLY else list(_read(packet, schema, values, outs))
        written = [values["index"]] * 2 if packet in SPARSE_WRITE else outs
        for tensor in (*read, *written):
            if self._head is not None and tuple(tensor.shape) == self._head and tensor.dtype == torch.float32:
                self.found["head gradient"] += size(tensor)
            elif packet not in PRODUCTS:
                wide = tensor.dim() == 2 and tensor.shape[-1] >= KEPT
                self.found["wide" if wide else "vectors"] += size(tensor)
        return out


def _read(packet: Any, schema: Any, values: dict[str, Any], outs: list[Tensor]) -> Any:
    """The tensors that an operation reads."""
    for argument in schema.arguments:
        given = values.get(argument.name)
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if not isinstance(tensor, Tensor):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                if not (argument.kwarg_only or packet in ONLY_WRITTEN or packet in SPARSE_WRITE):
                    yield tensor
            else:
                yield outs[0] if packet in SPARSE_READ and argument.name == "self" else tensor


def call(
    case: dict[str, Any], rows: int, device: str, hidden: int, teacher: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `fused_linear_kd`: bfloat16 hidden states, a float32 head, as a GPU has them by default."""
    options = {**case}
    kind, where = options.pop("kind", "dense"), {"device": device}
    made = torch.zeros if device != "meta" else torch.empty
    weight = made(VOCABULARY, hidden, requires_grad=True, **where)
    states = made(rows, hidden, dtype=torch.bfloat16, **where).requires_grad_()
    ids = made(rows, KEPT, dtype=torch.int64, **where)
    if device != "meta":
        ids += torch.arange(KEPT)
    target = {
        "dense": lambda: DenseTarget(
            hidden=made(rows, teacher, dtype=torch.bfloat16, **where),
            weight=made(VOCABULARY, teacher, dtype=torch.bfloat16, **where),
        ),
        "top-k": lambda: TopKTarget(ids, made(rows, KEPT, **where), made(rows, **where)),
        "sampled": lambda: SampledTarget(ids, made(rows, KEPT, **where)),
        "none": lambda: None,
    }[kind]()
    return (states, weight, target), {**options, "labels": made(rows, dtype=torch.int64, **where)}


def of_torch(case: dict[str, Any]) -> dict[str, float]:
    """As on a GPU: chunks and blocks of its size, products that give float32."""
    arguments, options = call(case, ROWS, "meta", STUDENT, TEACHER)
    chunk = fused.rows_of_a_chunk(torch.device("cuda"), 4 * VOCABULARY)
    torch.autocast = lambda *given, **named: nullcontext()  # "meta" is no device of it
    with Bytes((VOCABULARY, STUDENT)) as counted:
        out = fused_linear_kd(*arguments, **options, chunk_rows=chunk)
        weight = arguments[1].detach()
        # The weight itself has the gradient's shape and type: it is read once, to be narrowed.
        counted.found["head gradient"] -= size(weight)
        # What backward does with it: scaled where it is.
        torch.empty_like(weight).mul_(out.loss.detach())
    found = counted.found
    return {"bytes_per_logit": found["wide"] / ROWS / VOCABULARY, "head_gradient_gb": found["head gradient"] / 1e9}


def of_kernels() -> dict[str, float]:
    """In a process with TRITON_INTERPRET=1."""
    from triton.runtime.interpreter import interpreter_builder as builder

    from potstill.losses.kernels.chunk import KernelChunk

    moved = 0
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(pointers: Any, mask: Any, *others: Any) -> Any:
        nonlocal moved
        found = load(pointers, mask, *others)
        moved += int(mask.data.sum()) * found.data.itemsize * (mask.data.size > 1)
        return found

    def counted_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        nonlocal moved
        moved += int(mask.data.sum()) * value.data.itemsize * (mask.data.size > 1)
        return store(pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    chooser, launch, between = fused.kernels_for, KernelChunk.run, Bytes()

    def uncounted_launch(*given: Any, **named: Any) -> None:
        with _disable_current_modes():  # the interpreter copies whole tensors by torch's operations
            launch(*given, **named)

    KernelChunk.run = uncounted_launch

    def counting(given: Any) -> Any:
        kernels = chooser(given)
        assert kernels is not None

        def run(*arguments: Any) -> Any:
            with between:
                return kernels(*arguments)

        return run

    fused.kernels_for = counting
    result = {}
    for name, case in CASES.items():
        moved = between.found["wide"] = 0
        arguments, options = call(case, FEW, "cpu", 16, 16)
        fused_linear_kd(*arguments, **options)
        result[name] = (moved + between.found["wide"]) / FEW / VOCABULARY
    return result


def estimate(rows: int, bytes_per_logit: float, head_gb: float, dense: bool) -> dict[str, float]:
    """Milliseconds of the whole loss: products of student (logits, two gradients) and teacher (logits), the passes over the
    logits, and what the products write and read of them and of the head's gradient."""
    logits = rows * VOCABULARY
    flops = 2 * logits * (3 * STUDENT + TEACHER * dense)
    # Products write logits (4 bytes a side) and read the gradient twice (2 bytes each).
    moved = logits * (bytes_per_logit + 4 + 4 * dense + 4) + head_gb * 1e9 * rows / ROWS
    return {
        gpu: round(1e3 * (flops / (tera * 1e12 * OF_PRODUCTS) + moved / (memory * 1e12 * OF_MEMORY)), 1)
        for gpu, (tera, memory) in GPUS.items()
    }


def of_compilers() -> dict[str, dict[str, int]]:
    """The most registers and spills of any kernel, for each GPU that the tests compile for."""
    found = {}
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        said = _said("0", str(SUPPORT / "ahead_of_time.py"), target, "all")
        programs = [json.loads(line) for line in said.splitlines()]
        found[target] = {key: max(one[key] for one in programs) for key in ("registers", "spills", "shared_bytes")}
        found[target]["narrow"] = sum(one["narrow"] for one in programs)
    return found


def _said(interpret: str, *words: str) -> str:
    """By a process of its own: whether Triton interprets is decided when it is imported."""
    command = [sys.executable, "-W", "ignore", *words]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", action="store_true", help="only count the kernels, and print JSON")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if options.kernels:
        print(json.dumps(of_kernels()))
        return
    kernels, cases = json.loads(_said("1", __file__, "--kernels").splitlines()[-1]), {}
    for name, case in CASES.items():
        torch_blocks = of_torch(case)
        head, dense = torch_blocks["head_gradient_gb"], "kind" not in case
        cases[name] = {
            "bytes_per_logit": {"torch": round(torch_blocks["bytes_per_logit"], 2), "kernels": round(kernels[name], 2)},
            "head_gradient_gb": round(head, 2),
            "estimated_ms": {
                way: estimate(ROWS, count, head, dense)
                for way, count in (("torch", torch_blocks["bytes_per_logit"]), ("kernels", kernels[name]))
            },
        }
        print(f"{name:38} {cases[name]['bytes_per_logit']} {cases[name]['estimated_ms']['kernels']}", flush=True)
    chunk = fused.rows_of_a_chunk(torch.device("cuda"), 4 * VOCABULARY)
    published = {
        "source": "linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv: distill_jsd_loss, full, 8,192 rows, H100",
        "ms": 60.7,
        "gb": 11.1,
        # Logits of both sides, the gradient in bfloat16, and the head's gradient.
        "ours_estimated_gb": round((chunk * VOCABULARY * (4 + 4 + 2) + 4 * VOCABULARY * STUDENT) / 1e9, 1),
        "ours_estimated_ms": estimate(8192, kernels["JSD, cross-entropy 0.5"], cases["JSD"]["head_gradient_gb"], True)[
            "H100"
        ],
    }
    settings = {
        "rows": ROWS, "vocabulary": VOCABULARY, "student": STUDENT, "teacher": TEACHER,
        "gpus": GPUS, "of_products": OF_PRODUCTS, "of_memory": OF_MEMORY,
    }  # fmt: skip
    found = {"settings": settings, "cases": cases, "liger_jsd": published, "compiled": of_compilers()}
    text = json.dumps(found, indent=1) + "\n"
    options.result.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
