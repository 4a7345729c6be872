"""The quickstart over several seeds: how much better distilling is than training on the text alone, and how sure that is.

python benchmarks/quickstart.py            writes benchmarks/results/quickstart.json and prints the README's table

Each seed is other first weights and another order of the text, the same for both students. The text that the student gets
(5 %, chosen by content) and the teacher are the same throughout.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

SEEDS = (0, 1, 2)
RESULT = Path(__file__).parent / "results" / "quickstart.json"
CODE = """
import json, sys
from pathlib import Path
from potstill.cli.quickstart import quickstart
results = quickstart(Path(sys.argv[1]), seed=int(sys.argv[2]))
Path(sys.argv[1], "results.json").write_text(json.dumps(results, ensure_ascii=False))
"""


def main(folder: Path) -> None:
    by_seed = {}
    for seed in SEEDS:
        out, begin = folder / f"seed-{seed}", time.perf_counter()
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", CODE, str(out), str(seed)], check=True)  # its own process, as a user's
        by_seed[seed] = {
            "seconds": round(time.perf_counter() - begin, 1),
            "results": json.loads((out / "results.json").read_text(encoding="utf-8")),
        }
    summary = {name: spread([run["results"][name] for run in by_seed.values()]) for name in by_seed[0]["results"]}
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"machine": machine, "summary": summary, "seeds": by_seed}, indent=1, ensure_ascii=False) + "\n"
    )
    print(table(summary))


def spread(results: list[dict[str, float | None]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation, lowest and highest of every number over the seeds."""
    numbers: dict[str, dict[str, float]] = {}
    for key in ("bits_per_byte", "kl", "agreement", "ece"):
        values = [value for r in results if (value := r[key]) is not None]
        if values:
            numbers[key] = {"mean": mean(values), "sd": stdev(values), "low": min(values), "high": max(values)}
    return numbers


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| student | bits per byte | KL to the teacher | top-1 agreement | calibration error |",
        "|---|---|---|---|---|",
    ]
    for name, numbers in summary.items():
        cells = [
            f"{numbers[key]['mean']:{form}} ± {numbers[key]['sd']:{form}}" if key in numbers else "–"
            for key, form in (("bits_per_byte", ".3f"), ("kl", ".3f"), ("agreement", ".1%"), ("ece", ".3f"))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/benchmark-quickstart"))
