"""The log files of a run when it begins again."""

from __future__ import annotations

import json
from pathlib import Path

from potstill.training.logging import keep_until


def test_steps_without_a_checkpoint_are_told_once_for_both_logs(tmp_path: Path) -> None:
    def write(name: str, *steps: int) -> None:
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in steps).rstrip("\n"))

    said: list[str] = []
    (tmp_path / "metrics.1.jsonl").touch()  # of an attempt before that, which had no evaluation
    write("metrics.jsonl", 1, 2, 3)
    write("evals.jsonl", 2)
    keep_until(tmp_path, 0, said.append)
    assert said == [
        "steps 1–3 of an earlier attempt had no checkpoint: starting again at step 1; its metrics.jsonl and evals.jsonl are "
        f"kept as {tmp_path}/metrics.2.jsonl and {tmp_path}/evals.2.jsonl"
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.2.jsonl").open()] == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "evals.jsonl").read_text() == ""


def test_a_resume_drops_the_lines_of_steps_that_come_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}')
    keep_until(tmp_path, 2, lambda message: None)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not (tmp_path / "evals.jsonl").exists()
