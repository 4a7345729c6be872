"""One contender on one case, in a process of its own: makes the inputs, warms up, times whole calls, reads the peak memory.

python benchmarks/loss_contenders.py '{"rows": …}'     prints one line of JSON; benchmarks/loss.py starts these

Every contender gets hidden states [N, H] and a head [V, H] that want gradients, and leaves them in `.grad`. N rows, V ids.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # the same convention in potstill, Liger and TRL
PRODUCT_CHUNK_BYTES = 192 * 2**20  # of one [n, V] buffer; larger and smaller ones were not faster


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    teacher_hidden: Tensor | None  # [N, H′], dense
    teacher_head: Tensor | None  # [V, H′]
    ids: Tensor | None  # [N, K], top-k
    logprobs: Tensor | None  # [N, K]
    tail: Tensor | None  # [N]
    divergence: str

    def first(self, rows: int) -> Inputs:
        """The first rows alone, with the same heads."""
        cut = [None if t is None else t[:rows] for t in (self.teacher_hidden, self.ids, self.logprobs, self.tail)]
        hidden = self.hidden.detach()[:rows].requires_grad_()
        return Inputs(hidden, self.head, cut[0], self.teacher_head, cut[1], cut[2], cut[3], self.divergence)


def make_inputs(case: dict[str, Any]) -> Inputs:
    """Logits of standard deviation 2 on both sides: rows neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(0)
    n, v, h, teacher_h, k = (case[key] for key in ("rows", "vocabulary", "student", "teacher", "top_k"))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape).normal_(0.0, scale, generator=generator)

    hidden, head = normal(n, h).requires_grad_(), normal(v, h, scale=2 / math.sqrt(h)).requires_grad_()
    if k == 0:
        teacher = normal(n, teacher_h), normal(v, teacher_h, scale=2 / math.sqrt(teacher_h))
        return Inputs(hidden, head, *teacher, None, None, None, case["divergence"])
    ids = (torch.randint(v, (n, 1), generator=generator) + torch.arange(k) * (v // k)) % v  # no id twice in a row
    buckets = (normal(n, k + 1) * 2).log_softmax(-1)
    logprobs, tail = buckets[:, :k].contiguous(), buckets[:, k].contiguous()
    return Inputs(hidden, head, None, None, ids, logprobs, tail, case["divergence"])


Call = Callable[[Inputs], float | None]


def potstill() -> Call:
    from potstill.losses import DenseTarget, TopKTarget, fused_linear_kd

    def call(x: Inputs) -> float:
        if x.teacher_hidden is not None:
            target: Any = DenseTarget(hidden=x.teacher_hidden, weight=x.teacher_head)
        else:
            assert x.ids is not None and x.logprobs is not None and x.tail is not None
            target = TopKTarget(ids=x.ids, logprobs=x.logprobs, tail=x.tail)
        row_weight = torch.full((len(x.hidden),), 1 / len(x.hidden), device=x.hidden.device)
        out = fused_linear_kd(x.hidden, x.head, target, divergence=x.divergence, row_weight=row_weight)
        out.loss.backward()
        return out.loss.item()

    return call


def products() -> Call:
    """The products that no contender can leave out, and nothing else. The logits' buffers are older than the timed call."""
    student, teacher = torch.empty(0), torch.empty(0)

    def call(x: Inputs) -> None:
        nonlocal student, teacher
        hidden, head = x.hidden.detach(), x.head.detach()
        n = max(1, PRODUCT_CHUNK_BYTES // (4 * len(head)))
        if not len(student):
            student = torch.zeros(n, len(head))
            teacher = torch.zeros_like(student) if x.teacher_head is not None else teacher
        grad_hidden, grad_head = torch.empty_like(hidden), torch.empty_like(head)
        for start in range(0, len(hidden), n):
            rows = slice(start, min(start + n, len(hidden)))
            logits = student[: rows.stop - start]
            torch.mm(hidden[rows], head.t(), out=logits)
            if x.teacher_hidden is not None and x.teacher_head is not None:
                torch.mm(x.teacher_hidden[rows], x.teacher_head.t(), out=teacher[: rows.stop - start])
            torch.mm(logits, head, out=grad_hidden[rows])
            if start == 0:
                torch.mm(logits.t(), hidden[rows], out=grad_head)
            else:
                grad_head.addmm_(logits.t(), hidden[rows])
        return None

    return call


def plain() -> Call:
    def kl(logp: Tensor, logq: Tensor) -> Tensor:
        return F.kl_div(logq, logp, log_target=True, reduction="batchmean")

    def call(x: Inputs) -> float:
        logits = x.hidden @ x.head.t()
        if x.teacher_hidden is not None and x.teacher_head is not None:
            logq = logits.log_softmax(-1)
            with torch.no_grad():
                logp = (x.teacher_hidden @ x.teacher_head.t()).log_softmax(-1)
        else:
            assert x.ids is not None and x.logprobs is not None and x.tail is not None
            lse = logits.logsumexp(-1, keepdim=True)
            rest = logits.scatter(-1, x.ids, -math.inf).logsumexp(-1, keepdim=True)
            logq = torch.cat([logits.gather(-1, x.ids), rest], -1) - lse
            logp = torch.cat([x.logprobs, x.tail[:, None]], -1)
        beta = BETA[x.divergence]
        if beta == 0.0:
            loss = kl(logp, logq)
        elif beta == 1.0:
            loss = kl(logq, logp)
        else:
            logm = torch.logaddexp(logp + math.log(beta), logq + math.log(1 - beta))
            loss = beta * kl(logp, logm) + (1 - beta) * kl(logq, logm)
        loss.backward()
        return loss.item()

    return call


def liger(compiled: bool) -> Call:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    def call(x: Inputs) -> float:
        module = LigerFusedLinearJSDLoss(0.0, 1.0, beta=BETA[x.divergence], compiled=compiled)
        labels = torch.zeros(len(x.hidden), dtype=torch.int64, device=x.hidden.device)
        loss = module(x.hidden, x.head, x.teacher_hidden, x.teacher_head, labels)
        loss.backward()
        return loss.item()

    return call


def trl_full() -> Call:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.server_distillation import server_distillation_trainer as server

    def call(x: Inputs) -> float:
        logits, beta = x.hidden @ x.head.t(), BETA[x.divergence]
        if x.teacher_hidden is not None and x.teacher_head is not None:
            with torch.no_grad():
                teacher = x.teacher_hidden @ x.teacher_head.t()
            loss = GKDTrainer.generalized_jsd_loss(
                logits[None], teacher[None], beta=beta, num_items_in_batch=len(x.hidden)
            )
        else:  # what its trainer for remote teachers does with their top-k
            assert x.ids is not None and x.logprobs is not None
            everywhere = torch.ones_like(x.ids, dtype=torch.bool)
            logq, mask = server._add_tail_bucket(logits.log_softmax(-1).gather(-1, x.ids), everywhere)
            logp, _ = server._add_tail_bucket(x.logprobs, everywhere)
            loss = server._jsd_divergence(logq, logp, beta, support_mask=mask).sum() / len(x.hidden)
        loss.backward()
        return loss.item()

    return call


def trl_chunked() -> Call:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def call(x: Inputs) -> float:
        beta = BETA[x.divergence]
        rows, _ = ChunkedDivergenceFunction.apply(x.hidden, x.head, None, x.teacher_hidden, x.teacher_head, None, beta)
        loss = rows.mean()
        loss.backward()
        return loss.item()

    return call


CONTENDERS: dict[str, Callable[[], Call]] = {
    "products": products,
    "potstill": potstill,
    "plain": plain,
    "liger": lambda: liger(compiled=False),
    "liger_compiled": lambda: liger(compiled=True),
    "trl_full": trl_full,
    "trl_chunked": trl_chunked,
}


def reset_peak() -> int:
    """Give back what is free, set the mark of the highest resident memory to what is resident now, and say how much."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(key + ":")]
    return int(line.split()[1]) * 1024


def work(order: dict[str, Any]) -> dict[str, Any]:
    limit = order["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    name = order["contender"]
    try:
        call = CONTENDERS[name]()
    except ImportError as error:
        return {"status": "missing", "why": str(error).splitlines()[0]}
    try:
        x = make_inputs(order["case"])
        # Compiled code is made for the shapes it meets; the others only have to load their libraries.
        call(x if name == "liger_compiled" else x.first(16))
        runs = []
        for _ in range(order["calls"]):
            x.hidden.grad = x.head.grad = None
            before = reset_peak()
            begin, cpu = time.perf_counter(), time.process_time()
            loss = call(x)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            peak, load = max(0, status("VmHWM") - before), os.getloadavg()[0]
            runs.append({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak, "load": round(load, 1)})
        result: dict[str, Any] = {"status": "ok", "runs": runs}
        if name != "products":
            assert x.hidden.grad is not None and x.head.grad is not None
            norms = [x.hidden.grad.norm().item(), x.head.grad.norm().item()]
            result["loss"], result["gradient_norms"] = loss, norms
        return result
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return {"status": "memory"}
        raise


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    result = work(order)
    result["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__.split("+")[0]}
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # nothing is left to do, and gigabytes need not be given back one by one
