from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_runs import TinyRuns


@pytest.fixture
def runs(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command itself, from its arguments to its exit code, without the seconds a process takes to import torch."""
    from potstill.cli.main import main

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["potstill", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Said(code, *capsys.readouterr())

    return call
