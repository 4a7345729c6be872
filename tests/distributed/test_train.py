"""`potstill train` under torchrun, which it cannot use yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SENTENCE = (
    "error: training runs in one process, and this is one of 2 (WORLD_SIZE): start it without torchrun, or with "
    "--nproc-per-node 1 --nnodes 1"
)


def test_every_process_says_the_same_sentence(tmp_path: Path) -> None:
    """Before anything is loaded: the recipe's models are not there."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {tmp_path / 'run'}\nstudent: {{model: none}}\ndata: {{sources: [{{files: none.jsonl}}]}}\ntrain: "
        f"{{steps: 1}}\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    ended = subprocess.run(
        [*launch, *logs, "-m", "potstill", "train", str(recipe)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    said = sorted((tmp_path / "logs").rglob("stderr.log"))
    assert len(said) == 2
    assert not (tmp_path / "run").exists()
    assert [path.read_text().strip() for path in said] == [SENTENCE] * 2
