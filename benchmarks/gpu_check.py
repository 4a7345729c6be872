"""What only a GPU can tell, in one command and under ten minutes: `make gpu-check`. It writes gpu-check.json, to be sent in.

- twins: every kernel of the loss on the device, against torch's operations there and float64 on the CPU
- steps: steps of training of every kind on the device, against the CPU's numbers
- loss: time and memory of the loss beside plain PyTorch and, where it is installed, Liger
- quickstart: tokens per second of the quickstart's step
- parallel: data parallel over two GPUs, and tensor parallel over two, against one

Without a GPU it runs to its end on the CPU, with the kernels in Triton's interpreter, at sizes that measure nothing: so that
it is known to work. A part that fails is told and the next one begins; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from kernel_twins import by_kernels, check, twins
from loss_contenders import CONTENDERS, make_inputs

from potstill.config.recipe import load_recipe
from potstill.losses.kernels import without_kernels
from potstill.shipped import locate
from potstill.training.loop import train
from potstill.training.run import Callback, Run

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd")
METHODS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")
OTHER_TOKENIZER = "student.tokenizer=shipped:tokenizers/pieces-1k"
NEAR = {"loss": 1e-3, "grad_norm": 1e-2}  # relative; float32 on both, added up in other orders


@dataclass(frozen=True)
class Check:
    """Where, and how large."""

    device: torch.device
    tiny: bool
    folder: Path

    def small(self) -> list[str]:
        """A recipe's overrides that make a step short."""
        sizes = {"batch_size": 2, "piece_bytes": 60} if self.tiny else {"batch_size": 8, "piece_bytes": 480}
        texts = [f"data.piece_bytes={sizes['piece_bytes']}", f"train.batch_size={sizes['batch_size']}"]
        return [*texts, "eval=null", "train.precision=fp32", "log.every=1000"]


class Kept(Callback):
    """Every step's numbers."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def stepped(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.steps.append(dict(metrics))


def of_run(at: Check, name: str, device: torch.device, *overrides: str) -> list[dict[str, Any]]:
    """The numbers of a run of the quickstart's recipe, changed."""
    kept, run = Kept(), at.folder / name.replace(" ", "-")
    changes = [f"run={run}", f"train.device={device}", *overrides]
    train(load_recipe(locate("shipped:quickstart.yaml"), changes), callbacks=[kept])
    return kept.steps


def of_twins(at: Check) -> dict[str, Any]:
    reason = without_kernels(at.device)
    if reason is not None:
        return {"skipped": reason}
    # An interpreter's blocks are small, so that there are several of them.
    errors, failed = [], []
    for twin in twins(quick=at.tiny):
        try:
            errors.append(check(twin, str(at.device), 256 if at.tiny else None))
        except AssertionError as error:
            failed.append(str(error))
    return {
        "ok": not failed,
        "twins": len(errors) + len(failed),
        "largest_error": max(errors, default=None),
        "failed": failed,
    }


def of_steps(at: Check) -> dict[str, Any]:
    """Two steps of each kind: the second one has the optimizer's work in it."""
    kinds = {name: [f"loss.divergence={name}"] for name in DIVERGENCES}
    kinds |= {
        "temperature": ["loss.divergence=jsd", "loss.temperature=2", "loss.ce_weight=0.5"],
        "entropy gate": ["loss.divergence=reverse_kl", "loss.entropy_gate=1"],
        "text only": ["loss.kd_weight=0", "loss.ce_weight=1"],
        "adamw": ["train.optimizer={name: adamw, lr: 1e-3}"],
    }
    kinds |= {name: [OTHER_TOKENIZER, f"teachers.0.cross_tokenizer={{method: {name}}}"] for name in METHODS}
    if at.tiny:
        kinds = {name: kinds[name] for name in ("jsd", "temperature", "text only", "prefix_marginal", "uld")}
    found = {}
    for name, changes in kinds.items():
        options = [*at.small(), *changes, "train.steps=2"]
        with on_torch():
            ours = of_run(at, f"{name} cpu", torch.device("cpu"), *options)
        theirs = of_run(at, f"{name} device", at.device, *options)
        apart = {
            key: max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(ours, theirs, strict=True)) for key in NEAR
        }
        found[name] = {"loss": ours[0]["loss"], "apart": apart}
    far = [name for name, one in found.items() if any(one["apart"][key] > NEAR[key] for key in NEAR)]
    return {"ok": not far, "far": far, "kinds": found}


def on_torch() -> AbstractContextManager[None]:
    """The loss by torch's operations, on any device."""
    return by_kernels(False)


def of_loss(at: Check) -> dict[str, Any]:
    """Whole calls: forward, gradients of hidden states and head; bfloat16 as users have it."""
    sizes = {"rows": 4096, "vocabulary": 128_256, "student": 2048, "teacher": 4096}
    if at.tiny:
        sizes = {"rows": 8, "vocabulary": 512, "student": 8, "teacher": 12}
    cases = {"forward KL": ("forward_kl", 0), "JSD": ("jsd", 0), "top-64": ("forward_kl", 64)}
    ways: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
        "potstill": ("potstill", nullcontext),
        "potstill, torch's operations": ("potstill", on_torch),
        "plain PyTorch": ("plain", nullcontext),
        "Liger": ("liger", nullcontext),
        "Liger, compiled": ("liger_compiled", nullcontext),
    }
    found: dict[str, Any] = {}
    for name, (divergence, kept) in cases.items():
        inputs = make_inputs(
            {**sizes, "teacher": 0 if kept else sizes["teacher"], "top_k": kept, "divergence": divergence}
        )
        moved = {key: value for key, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
        for key, value in moved.items():
            narrow = value.detach().to(
                at.device, torch.bfloat16 if value.dim() == 2 and key != "logprobs" and key != "ids" else None
            )
            moved[key] = narrow.requires_grad_(value.requires_grad)
        for way, (contender, context) in ways.items():
            if kept and contender.startswith("liger"):
                continue  # it has no loss against a truncated teacher
            with context():
                found[f"{name}, {way}"] = _timed(at, contender, replace(inputs, **moved))
    best = [found[f"{name}, potstill"] for name in cases]
    return {"ok": all("ms" in one for one in best), "sizes": sizes, "measured": found}


def _timed(at: Check, contender: str, inputs: Any) -> dict[str, Any]:
    """The median of a few calls, and the most memory beyond what was there before."""
    try:
        call, took = CONTENDERS[contender](), []
        before = _peak(at.device, reset=True)
        for _ in range(2 if at.tiny else 8):
            inputs.hidden.grad = inputs.head.grad = None
            _wait(at.device)
            begin = time.perf_counter()
            value = call(inputs)
            _wait(at.device)
            took.append(time.perf_counter() - begin)
        peak = _peak(at.device)
    except ImportError:
        return {"skipped": "not installed"}
    except Exception as error:  # a peer's, or too little memory: the others are measured all the same
        return {"failed": str(error).splitlines()[0][:200] if str(error) else type(error).__name__}
    gigabytes = None if peak is None or before is None else round((peak - before) / 1e9, 2)
    return {"ms": round(1e3 * median(took[1:]), 2), "first_ms": round(1e3 * took[0], 1), "gb": gigabytes, "loss": value}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device, reset: bool = False) -> int | None:
    if device.type != "cuda":
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def of_quickstart(at: Check) -> dict[str, Any]:
    steps = 3 if at.tiny else 60
    overrides = [*at.small(), "train.precision=auto", f"train.steps={steps}"]
    speeds = [one["tokens_per_second"] for one in of_run(at, "quickstart", at.device, *overrides)]
    return {"ok": True, "steps": steps, "tokens_per_second": round(median(speeds[steps // 3 :]))}


def of_parallel(at: Check) -> dict[str, Any]:
    """Three steps over two processes, each with a device of its own, against one process."""
    if at.device.type == "cuda" and torch.cuda.device_count() < 2:
        return {"skipped": "there is one GPU"}
    options = [*at.small(), "loss.divergence=jsd", "train.steps=3", "student.config.num_attention_heads=4"]
    alone = [one["loss"] for one in of_run(at, "one", at.device, *options)]
    found: dict[str, Any] = {"one": alone}
    for name, change in (("dp 2", "parallel.dp_replicate=2"), ("tp 2", "parallel.tp=2")):
        run = at.folder / name.replace(" ", "-")
        words = ["train", str(locate("shipped:quickstart.yaml")), *options, change, f"run={run}"]
        words += ["train.device=cpu"] * (at.device.type != "cuda")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "potstill",
        ]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr.strip()[-800:]}")
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[name] = [json.loads(line)["loss"] for line in lines]
    near = all(
        len(losses) == len(alone)
        and all(abs(a - b) <= NEAR["loss"] * abs(a) for a, b in zip(alone, losses, strict=True))
        for losses in found.values()
    )
    return {"ok": near, "losses": found}


PARTS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "twins": of_twins,
    "steps": of_steps,
    "loss": of_loss,
    "quickstart": of_quickstart,
    "parallel": of_parallel,
}


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on, and nothing that names this one machine."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in ("potstill", "torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"device": device.type, "versions": versions, "kernels": without_kernels(device) or "used"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["memory_gb"] = round(properties.total_memory / 1e9, 1)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args(arguments)
    there = torch.cuda.is_available()
    if not there and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it is imported: so from the start.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv])
    device = torch.device("cuda", 0) if there else torch.device("cpu")
    if not there:
        print("no GPU was found: everything runs on the CPU at tiny sizes, which measures nothing", flush=True)
    results: dict[str, Any] = {"machine": machine(device), "tiny": not there}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for number, name in enumerate(options.parts, 1):
            print(f"[{number}/{len(options.parts)}] {name} …", flush=True)
            begin = time.perf_counter()
            try:
                results[name] = PARTS[name](Check(device, not there, Path(folder)))
            except Exception as error:
                results[name] = {
                    "ok": False,
                    "error": f"{type(error).__name__}: {error}",
                    "where": traceback.format_exc()[-2000:],
                }
            results[name]["seconds"] = round(time.perf_counter() - begin, 1)
            print(f"        {_said(results[name])}", flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}: please attach it to an issue", flush=True)
    return 0 if all(results[name].get("ok", True) for name in options.parts) else 1


def _said(part: dict[str, Any]) -> str:
    if "skipped" in part:
        return f"left out: {part['skipped']}"
    return f"{'as it should be' if part['ok'] else 'NOT AS IT SHOULD BE'}, {part['seconds']} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
