"""Narrower students: cut by activations, cut at random, and fresh, before they learn and after 200 steps.

python benchmarks/pruning.py      writes benchmarks/results/pruning.json and the table of docs/students.md

Two teachers: the shipped one on the shipped text, and stories15M on TinyStories, where the folder of assets is there
(POTSTILL_ASSETS). A student has about half of its teacher's channels, neurons and heads, and learns from it by forward KL. The
held-out text has no part in what is measured or learnt. The best of two learning rates, by the KL at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "pruning.json"
PAGE = ROOT / "docs" / "students.md"
ASSETS = Path(os.environ.get("POTSTILL_ASSETS", ROOT.parent / "shared" / "assets"))
STEPS, LRS, SEED = 200, (1e-3, 4e-3), 0
WAYS = {"activations": "by activations", "random": "at random", "fresh": "fresh, of the same size"}
TEACHERS: dict[str, dict[str, Any]] = {
    "the shipped teacher": {
        "model": "shipped:teacher",
        "width": {"hidden": 112, "intermediate": 304, "heads": 4, "kv_heads": 4},
        "train": "shipped:corpus/train.parquet",
        "held_out": "shipped:corpus/heldout.parquet",
    },
    "stories15M": {
        "model": str(ASSETS / "models" / "stories15M"),
        "width": {"hidden": 144, "intermediate": 384, "heads": 3, "kv_heads": 3},
        "train": "train.jsonl",
        "held_out": "held-out.jsonl",
    },
}


def split_stories(folder: Path) -> None:
    """One story of twenty is held out."""
    lines = (ASSETS / "data" / "tinystories" / "stories_clean.jsonl").read_text(encoding="utf-8").splitlines()
    parts: dict[str, list[str]] = {"train.jsonl": [], "held-out.jsonl": []}
    for number, line in enumerate(lines):
        parts["held-out.jsonl" if number % 20 == 0 else "train.jsonl"].append(line)
    for name, some in parts.items():
        (folder / name).write_text("\n".join(some) + "\n", encoding="utf-8")


def make_student(case: dict[str, Any], data: dict[str, Any], way: str, folder: Path) -> None:
    """Saved as a model: every way of making it is then trained by the same recipe."""
    import torch

    from potstill.config import DataConfig, StudentConfig
    from potstill.config.models import WidthConfig
    from potstill.models import load_student
    from potstill.students.pruning import Importance, calibration, cut, kept, measured, pruned

    whole = load_student(StudentConfig(model=case["model"]), torch.device("cpu"), SEED)
    width = WidthConfig(**case["width"])
    if way == "random":
        generator, config = torch.Generator().manual_seed(SEED), whole.model.config
        layers = range(config.num_hidden_layers)
        importance = Importance(
            torch.rand(config.hidden_size, generator=generator),
            [torch.rand(config.intermediate_size, generator=generator) for _ in layers],
            [torch.rand(config.num_attention_heads, generator=generator) for _ in layers],
        )
    else:
        importance = measured(whole, calibration(DataConfig(**data), whole.tokenizer, width.examples))
    made = cut(whole.model, kept(importance, width, whole.model))
    if way == "fresh":
        torch.manual_seed(SEED)
        made = type(made)(made.config)
    pruned(whole, made).save(folder)


def run(
    case: dict[str, Any], data: dict[str, Any], held_out: dict[str, Any], student: Path, lr: float, folder: Path
) -> Any:
    import potstill

    done = potstill.train(
        {
            "run": str(folder / "run"),
            "student": {"model": str(student)},
            "teachers": [{"model": case["model"]}],
            "data": data,
            "train": {
                "steps": STEPS if lr > 1e-9 else 1,
                "batch_size": 8,
                "seed": SEED,
                "optimizer": {"lr": lr},
                "lr_schedule": {"shape": "wsd", "warmup_steps": 10, "decay": 0.5},
            },
            "eval": {"data": held_out, "examples": 100},
            "checkpoint": {"every_minutes": None},
            "log": {"tensorboard": False, "stat_rows": 0, "every": 100},
        }
    )
    assert done.evaluation is not None
    return {key: round(done.evaluation[key], 4) for key in ("kl", "bits_per_byte", "agreement")}


def measure(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    if name == "stories15M":
        split_stories(folder)
    train, held = (
        each if each.startswith("shipped:") else str(folder / each) for each in (case["train"], case["held_out"])
    )
    data = {"sources": [{"files": train}], "max_length": 128}
    held_out = {"sources": [{"files": held}], "max_length": 128}
    found: dict[str, Any] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as inner:
            student = Path(inner) / "student"
            make_student(case, data, way, student)
            after = {}
            for lr in (1e-12, *LRS):
                with tempfile.TemporaryDirectory() as place:
                    after[lr] = run(case, data, held_out, student, lr, Path(place))
                print(name, way, lr, after[lr], flush=True)
        best = min(LRS, key=lambda lr: after[lr]["kl"])
        found[way] = {"before": after[1e-12], "after": after[best], "lr": best}
    return found


def main() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"settings": {}, "students": {}}
    found["settings"] = {
        "steps": STEPS,
        "lrs": LRS,
        "seed": SEED,
        "width": {n: c["width"] for n, c in TEACHERS.items()},
    }
    for name, case in TEACHERS.items():
        if name not in found["students"] and (case["model"].startswith("shipped:") or Path(case["model"]).is_dir()):
            with tempfile.TemporaryDirectory() as folder:
                found["students"][name] = measure(name, case, Path(folder))
            RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_docs()


def write_docs() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str) -> str:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    lines = [
        "| teacher | student | KL before | KL after | bits per byte after | agreement after |",
        "|---|---|---|---|---|---|",
    ]
    for name, ways in found["students"].items():
        for way, each in ways.items():
            after = each["after"]
            lines.append(
                f"| {name} | {WAYS[way]} | {each['before']['kl']:.3f} | {after['kl']:.3f} | {after['bits_per_byte']:.3f} | "
                f"{after['agreement']:.1%} |"
            )
    begin, end = "<!-- pruning.json -->\n", "\n<!-- end of pruning -->"
    head, _, rest = text.partition(begin)
    return head + begin + "\n".join(lines) + end + rest.partition(end)[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-docs", action="store_true", help="write the table of docs/students.md from the JSON")
    write_docs() if parser.parse_args().only_docs else main()
