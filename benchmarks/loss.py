"""Time and memory of the fused loss, beside its peers and beside its matrix products alone.

python benchmarks/loss.py                 runs what benchmarks/results/loss.json lacks, then writes docs/benchmarks.md
python benchmarks/loss.py --only-docs     writes the page and its plot from the JSON alone
python benchmarks/loss.py --list          the cases; --cases and --contenders choose some of them, --again runs them anew

Each contender runs each case in a process of its own, one process at a time, on one thread. The products and potstill, which
are close to each other, take turns over several rounds; every round counts the fastest call. Half an hour for all, on an idle
core. Peers: pip install -e '.[bench]'; without them the rest runs, and they are shown as missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from loss_page import CONTENDERS, page, plot

HERE = Path(__file__).parent
RESULT = HERE / "results" / "loss.json"
DOCS = HERE.parent / "docs"
PACKAGES = {"liger": "liger-kernel", "liger_compiled": "liger-kernel", "trl_full": "trl", "trl_chunked": "trl"}
DENSE = tuple(CONTENDERS)
TOP_K = ("products", "potstill", "plain", "trl_full")  # the others have no loss against a truncated teacher


@dataclass(frozen=True)
class Case:
    rows: int
    vocabulary: int
    student: int  # width of its hidden states
    teacher: int  # 0 with top_k
    top_k: int  # 0: dense
    divergence: str
    rounds: int  # of the products and of potstill; peers have one process each

    @property
    def name(self) -> str:
        target = f"top-{self.top_k}" if self.top_k else f"dense-{self.teacher}"
        return f"{self.divergence}/{target}/{self.rows}x{self.vocabulary}x{self.student}"

    @property
    def contenders(self) -> tuple[str, ...]:
        return TOP_K if self.top_k else DENSE

    @property
    def work(self) -> float:
        """Floating-point operations of the products, for the estimate of the time left."""
        return 2.0 * self.rows * self.vocabulary * (3 * self.student + self.teacher)


CASES = (
    Case(1024, 49152, 576, 1152, 0, "forward_kl", 5),
    Case(1024, 49152, 576, 1152, 0, "reverse_kl", 5),
    Case(1024, 49152, 576, 1152, 0, "jsd", 4),
    Case(1024, 49152, 576, 0, 64, "forward_kl", 4),
    Case(1024, 151936, 896, 2048, 0, "forward_kl", 2),
    Case(1024, 151936, 896, 0, 64, "forward_kl", 2),
    Case(4096, 151936, 896, 2048, 0, "forward_kl", 2),
    Case(4096, 49152, 576, 1152, 0, "jsd", 5),
    Case(4096, 49152, 576, 0, 64, "reverse_kl", 5),
    Case(1024, 151936, 896, 1152, 0, "reverse_kl", 2),
    Case(1024, 151936, 896, 2048, 0, "jsd", 2),
    Case(4096, 151936, 896, 0, 64, "forward_kl", 2),
)
# Times the products', roughly, and seconds to start: only for the estimate of the time left.
COST = {
    "products": 1,
    "potstill": 1.1,
    "plain": 1.7,
    "liger": 2.6,
    "liger_compiled": 3,
    "trl_full": 2.3,
    "trl_chunked": 2.5,
}
STARTING = 6.0


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.list:
        print("\n".join(case.name for case in CASES))
        return
    if not options.only_docs:
        cases = [Case(**json.loads(options.one))] if options.one else list(CASES)
        run(options, [case for case in cases if any(part in case.name for part in options.cases)])
    results = json.loads(options.result.read_text(encoding="utf-8"))
    options.docs.mkdir(parents=True, exist_ok=True)
    write(options.docs / "benchmarks-loss.svg", plot(results))
    write(options.docs / "benchmarks.md", page(results))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--only-docs", action="store_true", help="write the page from the results there are")
    parser.add_argument("--cases", nargs="+", default=[""], help="cases whose name has one of these in it")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--again", action="store_true", help="run what is chosen also where there is a result")
    parser.add_argument(
        "--memory-gb", type=float, default=20.0, help="what a process may use; more is shown as too much"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="what a process may take; more is shown as too long"
    )
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--one", help="a case as JSON, in place of the ones that are listed")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, cases: list[Case]) -> None:
    if not cases:
        sys.exit("no case has that in its name; --list shows them")
    results: dict[str, Any] = {"machine": machine(), "memory_gb": options.memory_gb, "cases": {}}
    if options.result.exists():
        old = json.loads(options.result.read_text(encoding="utf-8"))
        if old["machine"] != results["machine"] and old["cases"]:
            sys.exit(
                f"{options.result.name} is of another machine or of other versions: {old['machine']}. Results of two are "
                "not put side by side: remove the file, or choose another with --result"
            )
        results["cases"] = old["cases"]
        results |= {key: old[key] for key in ("remarks",) if key in old}  # by hand: what was run anew, and why
    for name in sorted({PACKAGES[c] for c in options.contenders if c in PACKAGES}):
        if name not in results["machine"]["versions"]:
            print(f"{name} is not installed, and will be shown as missing: pip install -e '.[bench]'", flush=True)
    todo = [one for case in cases for one in missing(case, results, options)]
    left = sum(expected(case, contender) for case, contender in todo)
    for number, (case, contender) in enumerate(todo, 1):
        minutes = f"about {max(1, round(left / 60))} min left"
        print(f"[{number}/{len(todo)}] {case.name} · {CONTENDERS[contender]} · {minutes}", flush=True)
        outcome = measure(case, contender, options)
        entry = results["cases"].setdefault(case.name, {"case": asdict(case), "contenders": {}})
        add(entry["contenders"], contender, outcome)
        options.result.parent.mkdir(parents=True, exist_ok=True)
        write(options.result, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(f"        {said(outcome)}", flush=True)
        left -= expected(case, contender)


def expected(case: Case, contender: str) -> float:
    return STARTING + case.work / 100e9 * COST[contender]


def missing(case: Case, results: dict[str, Any], options: argparse.Namespace) -> list[tuple[Case, str]]:
    """What is still to be run, round by round: what takes turns is slowed down alike by whatever else the machine does."""
    entry = results["cases"].get(case.name, {"contenders": {}})
    todo = []
    for turn in range(case.rounds):
        for contender in case.contenders:
            if contender not in options.contenders or (turn and contender not in ("products", "potstill")):
                continue
            if options.again and turn == 0:
                entry["contenders"].pop(contender, None)
            there = entry["contenders"].get(contender)
            if (
                there is None
                or (there["status"] == "ok" and there["processes"] <= turn)
                or there["status"] == "missing"
            ):
                todo.append((case, contender))
    return todo


def add(contenders: dict[str, Any], name: str, outcome: dict[str, Any]) -> None:
    """Fold one process into what is known of a contender: the fastest call, and the highest peak."""
    old = contenders.get(name)
    if outcome["status"] != "ok" or old is None or old["status"] != "ok":
        contenders[name] = {**outcome, "processes": 1}
        return
    outcome["runs"] = old["runs"] + outcome["runs"]
    contenders[name] = {**outcome, "processes": old["processes"] + 1}


def measure(case: Case, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    # A second call where it is cheap, or where the first one has to make what is kept for the next.
    calls = 2 if case.work < (0.5e12 if contender in ("plain", "liger", "trl_full", "trl_chunked") else 2e12) else 1
    order = {
        "contender": contender,
        "case": asdict(case),
        "calls": calls,
        "memory_bytes": int(options.memory_gb * 2**30),
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(HERE / "loss_contenders.py"), json.dumps(order)]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.seconds)
    except subprocess.TimeoutExpired:
        return {"status": "time"}
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        if child.returncode in (-9, 137):  # the system's own limit
            return {"status": "memory"}
        why = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": "error", "why": why[:300]}
    outcome: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return outcome


def said(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "ok":
        return " ".join([outcome["status"], outcome.get("why", "")])
    last = outcome["runs"][-1]
    return f"{last['seconds']:.2f} s (of the processor: {last['cpu_seconds']:.2f}), {last['peak_bytes'] / 2**30:.2f} GB"


def machine() -> dict[str, Any]:
    """What the numbers depend on, and nothing that names this one machine."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "liger-kernel", "trl", "triton"):
        try:
            versions[package] = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    info: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": 1, "versions": versions}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        info["cpu"] = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), info["cpu"])
        kilobytes = int(Path("/proc/meminfo").read_text().split()[1])
        info["memory_gb"] = round(kilobytes / 2**20)
    return info


def write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    if path.suffix in (".md", ".svg"):
        print(f"wrote {path.name}", flush=True)


if __name__ == "__main__":
    begin = time.perf_counter()
    main(sys.argv[1:])
    print(f"{time.perf_counter() - begin:.0f} s")
