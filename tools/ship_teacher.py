"""Put a trained teacher where `shipped:teacher` finds it: its weights as float16, its tokenizer, and how it was trained.

python tools/ship_teacher.py runs/teacher
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from potstill.shipped import FOLDER


def main(run: Path) -> None:
    source, target = run / "checkpoints" / "best" / "model", FOLDER / "teacher"
    shutil.rmtree(target, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    evaluations = [json.loads(line) for line in (run / "evals.jsonl").read_text(encoding="utf-8").splitlines()]
    parameters = sum(p.numel() for p in model.parameters())
    history = [{key: e[key] for key in ("step", "bits_per_byte", "perplexity", "ece")} for e in evaluations]
    record = {"recipe": "recipes/teacher.yaml", "parameters": parameters, "evaluations": history}
    (target / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    size = sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file())
    print(f"{target}: {parameters:,} parameters; everything that ships: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
