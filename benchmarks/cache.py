"""What a cache costs and gives: building, reading, training, sizes, rounding, and other systems' files beside it.

python benchmarks/cache.py --work DIR [--assets DIR] [--smollm DIR]      runs the cases that results/cache.json lacks
python benchmarks/cache.py --only-docs                                   writes the tables of docs/cache.md from the results

Each case runs in a process of its own, with one thread; what is compared is measured in turn in one process, several times, and
the best of each counts. DIR of --work takes some 8 GB while it runs. What needs a model or text that is not here is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "cache.json"
PAGE = ROOT / "docs" / "cache.md"
CASES = (
    "training",
    "exactness SmolLM2-135M",
    "exactness stories15M",
    "peers 64",
    "peers 128",
    "opening",
    "reading top_k 64",
    "reading sampled 50",
    "building",
)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.one:
        print(json.dumps(one(options)))
        return
    if not options.only_docs:
        run(options)
    results = json.loads(options.result.read_text(encoding="utf-8"))
    missing = [case for case in CASES if case not in results["cases"]]
    if missing:
        print(f"the page is left as it is: there is no result yet of {', '.join(missing)}", flush=True)
        return
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(filled(page, results), encoding="utf-8")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, help="folder for what is made on the way")
    parser.add_argument("--assets", type=Path, help="models/ and data/, as the cases name them")
    parser.add_argument("--smollm", type=Path, help="SmolLM2-135M in float32, as a model folder")
    parser.add_argument("--cases", nargs="+", default=[""], help="cases whose name has one of these in it")
    parser.add_argument("--again", action="store_true", help="run what is chosen also where there is a result")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--only-docs", action="store_true")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    if options.work is None:
        sys.exit("--work: name a folder for caches, with 8 GB to spare")
    options.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    if options.result.exists():
        results["cases"] = json.loads(options.result.read_text(encoding="utf-8"))["cases"]
    for case in CASES:
        if not any(part in case for part in options.cases) or (case in results["cases"] and not options.again):
            continue
        print(case, flush=True)
        begin, load = time.monotonic(), os.getloadavg()[0]
        flags = ["--quick"] if options.quick else []
        paths = [
            f"--{name}={getattr(options, name)}" for name in ("work", "assets", "smollm") if getattr(options, name)
        ]
        command = [sys.executable, __file__, "--one", case, "--rounds", str(options.rounds), *paths, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{case} failed")
        found = json.loads(done.stdout.splitlines()[-1])
        if "skipped" in found:
            print(f"  skipped: {found['skipped']}", flush=True)
            continue
        loads = [round(load, 1), round(os.getloadavg()[0], 1)]
        results["cases"][case] = {"load": loads, "minutes": round((time.monotonic() - begin) / 60, 1), **rounded(found)}
        options.result.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def one(options: argparse.Namespace) -> dict[str, Any]:
    import cache_cases
    import cache_peers
    import torch

    torch.set_num_threads(1)
    kind, _, what = options.one.partition(" ")
    cases = {
        "training": cache_cases.training,
        "opening": cache_cases.opening,
        "building": cache_cases.build_speed,
        "exactness": cache_cases.exactness(what),
        "reading": cache_cases.reading(what),
        "peers": cache_peers.peers(int(what) if kind == "peers" else 0),
    }
    try:
        return cases[kind](options, options.work)
    except cache_cases.Skipped as why:
        return {"skipped": str(why)}


def rounded(value: Any) -> Any:
    """Four digits are more than a busy machine gives."""
    if isinstance(value, dict):
        return {key: rounded(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [rounded(sub) for sub in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("torch", "transformers", "numpy", "pyarrow", "array-record", "protobuf")
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: found(name) for name in names},
    }


# --- the page ---


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables written anew."""
    for name, text in tables(results).items():
        mark = rf"(<!-- cache\.json: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(mark, lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"the page has {count} places for the table {name}")
    return page


def tables(results: dict[str, Any]) -> dict[str, str]:
    cases = results["cases"]
    made = {
        "sizes": _sizes(cases),
        "building": _building(cases["building"]),
        "reading": _reading(cases),
        "training": _training(cases["training"]),
        "peers": _peers(cases),
        "machine": _machine(results),
    }
    return {name: text.strip() for name, text in made.items()}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sizes(cases: dict[str, Any]) -> str:
    teachers = {name.split(" ")[1]: case for name, case in cases.items() if name.startswith("exactness")}
    head = ["kind"]
    for name, case in teachers.items():
        head += [f"{name}, ids of {case['id_bits']} bits", "added KL: mean, largest"]
    head.append("with ids of 18 bits")
    rows = []
    first = next(iter(teachers.values()))
    for kind in first["kinds"]:
        row, wide = [kind], []
        for case in teachers.values():
            numbers = case["kinds"][kind]
            kl = "none"
            if "mean_added_kl" in numbers:
                kl = f"{numbers['mean_added_kl']:.1e}, {numbers['largest_added_kl']:.1e}"
            row += [f"{numbers['bytes_a_token']:.1f}", kl]
            wide.append(numbers["bytes_a_token_18_bits"])
        rows.append([*row, f"{max(wide):.0f}" if kind != "hidden" else "–"])
    distinct = {name: case["kinds"]["sampled 50"]["distinct_a_token"] for name, case in teachers.items()}
    below = ", ".join(f"{value:.1f} ({name})" for name, value in distinct.items())
    return _table(head, rows) + f"\n\nBytes a token, all of the shards counted. Distinct ids of 50 draws: {below}."


def _building(case: dict[str, Any]) -> str:
    rows = []
    for name, numbers in case["contenders"].items():
        shares = [f"{numbers[f'share_{key}']:.1%}" for key in ("tokens_per_second", "per_processor_second")]
        shares = ["–", "–"] if name == "forward" else shares
        label = "the teacher's products alone" if name == "forward" else name
        rows.append(
            [
                label,
                f"{numbers['tokens_per_second']:.0f}",
                shares[0],
                f"{numbers['per_processor_second']:.0f}",
                shares[1],
            ]
        )
    return _table(["", "tokens a second", "of the products", "a second of the processor", "of the products"], rows)


def _reading(cases: dict[str, Any]) -> str:
    student = cases["training"]["students"]["text only"]["tokens_per_second"]
    rows = []
    for kind in ("top_k 64", "sampled 50"):
        case = cases[f"reading {kind}"]
        both = [case[order]["per_processor_second"] for order in ("sequential", "random")]
        disk = case["from_disk"]
        rows.append(
            [kind, *(f"{speed / 1000:,.0f} thousand" for speed in both), f"{both[0] / both[1]:.2f}",
             f"{both[0] / student:.0f} ×, {both[1] / student:.0f} ×",
             f"{disk['sequential'] / 1000:,.0f}, {disk['random'] / 1000:,.0f} thousand"]
        )  # fmt: skip
    opening = cases["opening"]
    head = ["kind", "in order", "random order", "slower by", "× the student's training", "from a cold disk, wall clock"]
    return _table(head, rows) + (
        f"\n\nTokens a second of one core. The quickstart's student trains on {student:,.0f} tokens a second (text alone). "
        f"A cache of {opening['documents']:,} documents opens in {opening['seconds']:.2f} s "
        f"({opening['seconds_from_disk']:.2f} s from a cold disk)."
    )


def _training(case: dict[str, Any]) -> str:
    students = case["students"]
    rows = []
    for name, numbers in students.items():
        rows.append(
            [name, f"{1000 * numbers['step']:.0f} ms", f"{1000 * numbers['teacher']:.1f} ms",
             f"{numbers['teacher'] / numbers['step']:.1%}", f"{students['live']['step'] / numbers['step']:.2f} ×"]
        )  # fmt: skip
    return _table(
        ["the student learns from", "a step", "of it, waiting for the teacher", "share", "faster than live"], rows
    )


def _peers(cases: dict[str, Any]) -> str:
    rows = []
    for name, case in cases.items():
        if not name.startswith("peers"):
            continue
        ours = case["contenders"]["potstill"]
        for contender, numbers in case["contenders"].items():
            size, speed = numbers["bytes_a_token"], numbers["per_processor_second"]
            rows.append(
                [str(case["k"]), contender, f"{size:.0f}", f"{size / ours['bytes_a_token']:.1f} ×",
                 f"{speed / 1000:,.0f} thousand", f"{ours['per_processor_second'] / speed:.1f} ×"]
            )  # fmt: skip
    head = ["k", "", "bytes a token", "larger", "tokens a second read", "slower"]
    return _table(head, rows)


def _machine(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in results["machine"]["versions"].items() if number)
    loads = [load for case in results["cases"].values() for load in case["load"]]
    return (
        f"Measured on {results['machine']['cores']} cores ({results['machine']['machine']}), one thread, float32; python "
        f"{results['machine']['python']}, {versions}. The machine was not idle: its load was {min(loads)} to {max(loads)}. So "
        "speeds are per second of the processor where nothing else is said, which other work disturbs less."
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1:])
