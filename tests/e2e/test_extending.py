"""docs/extending.md: what a stranger adds, added to a copy of the source, and trained with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"DIVERGENCES", "CACHE_KINDS", "TEACHER_SOURCES", "ROLLOUT_ENGINES"}
SCRIPT = """
import json, sys
import torch
import potstill
from potstill.losses import DenseTarget, fused_linear_kd

torch.manual_seed(0)
z, w, t = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (9, 4), (5, 9)))
fused = fused_linear_kd(z, w, DenseTarget(logits=t.detach()), divergence="hellinger").loss
plain = 5 - ((z @ w.T).softmax(-1).sqrt() * t.detach().softmax(-1).sqrt()).sum()
ours, theirs = torch.autograd.grad(fused, [z, w]), torch.autograd.grad(plain, [z, w])
torch.testing.assert_close(fused, plain)
for a, b in zip(ours, theirs):
    torch.testing.assert_close(a, b)
for recipe in json.load(sys.stdin):
    potstill.train(recipe)
"""


def copied(folder: Path) -> Path:
    """The source with all that the page adds to it."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    registry = source / "potstill" / "config" / "registry.py"
    found = set()
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text("utf-8"), re.M | re.S):
        name, code = block.removeprefix("# ").split("\n", 1)
        if name in TABLES:
            text, begin = registry.read_text("utf-8"), f"{name}: Table = {{\n"
            assert text.count(begin) == 1 and code.count("\n") == 1, "one line"
            registry.write_text(text.replace(begin, begin + code), "utf-8")
            found.add(name)
        else:
            path = folder / name
            assert path.parent.is_dir() and not path.exists()
            path.write_text(code, "utf-8")
    assert found == TABLES
    return source


def test_a_stranger_adds_one_of_each(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> None:
    def recipe(name: str, teacher: dict[str, object], **keys: object) -> dict[str, object]:
        return {
            "run": str(tmp_path / name),
            "student": {"from": str(tiny_teacher), "layers": [0]},
            "teachers": [teacher],
            "data": {"sources": [{"files": str(tiny_text)}], "max_length": 48},
            "train": {"steps": 3, "batch_size": 4, "optimizer": {"lr": 1e-3}},
            "log": {"tensorboard": False},
            **keys,
        }

    live, cache = {"model": str(tiny_teacher)}, {"cache": str(tmp_path / "cache"), "store": {"kind": "half_logits"}}
    recipes = [
        recipe("hellinger", live, loss={"divergence": "hellinger"}),
        recipe("live", live),
        recipe("cached", {**live, **cache}),
        recipe("smoothing", {"source": "smoothing", "options": {"share": 0.1}}),
        recipe(
            "plain",
            live,
            loss={"divergence": "reverse_kl"},
            rollouts={
                "on_policy_fraction": 1.0,
                "prompt_tokens": 4,
                "sampling": {"max_new_tokens": 5},
                "engine": {"kind": "plain"},
            },
        ),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(recipes),
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(copied(tmp_path))},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

    def kd(name: str) -> list[float]:
        return [json.loads(line)["kd"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    assert all(0 < value < 1 for value in kd("hellinger"))  # it is at most 1
    for live_kd, cached in zip(kd("live"), kd("cached"), strict=True):
        assert abs(cached / live_kd - 1) < 5e-3  # what half precision costs
    assert all(value > 1 for value in kd("smoothing")) and all(value > 0 for value in kd("plain"))
