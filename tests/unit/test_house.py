"""Each rule of tools/check_house.py, broken once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_house.py"


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("check_house", TOOL)
    assert spec is not None and spec.loader is not None
    sys.modules["check_house"] = tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_every_rule_can_fail(house, tmp_path: Path) -> None:
    source = tmp_path / "src" / "potstill"
    files = {
        source
        / "losses"
        / "kd.py": "import torch\nfrom potstill.training.loop import x\nfrom potstill import data, types\n",
        source / "losses" / "near.py": "from . import kd\nfrom potstill.losses import kd\n",
        source / "cellar" / "x.py": "",
        source / "data" / "long.py": "x = 1\n" * 701,
        source / "files.py": "import pickle\nimport torch\ntorch.load(1)\nFOLDER = '/home/me/'\n",
        tmp_path / "docs" / "a.md": "# A title\n\n[b](b.md) [c](#none) [d](#a-title) [e](https://x)\n",
        tmp_path
        / "recipes"
        / "a.yaml": "  policy: {}\nteachers: [{across: {method: spelled}}]\nloss: {several_ways: 1}\n",
        tmp_path / "README.md": "```text\nsrc/potstill\n  losses  x\n  gone  y\n```\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = [line.removeprefix(f"{tmp_path}/") for line in house.breaches(tmp_path, sorted(files))]
    assert sorted(found) == sorted(
        [
            "src/potstill/data/long.py: 701 lines, and a file has at most 700",
            "README.md: the tree shows src/potstill/gone, which is not there",
            "README.md: the tree leaves out cellar",
            "README.md: the tree leaves out data",
            "README.md: the tree leaves out files.py",
            "docs/a.md: b.md leads nowhere",
            "docs/a.md: #none names no heading",
            "recipes/a.yaml:1: 'policy:' has another name now",
            "recipes/a.yaml:2: 'across:' has another name now",
            "recipes/a.yaml:2: 'method: spelled' has another name now",
            "src/potstill/cellar/x.py: cellar is a new room: give it a line in ORDER of tools/check_house.py",
            "src/potstill/files.py: pickle reads or writes pickles",
            "src/potstill/files.py: torch.load reads or writes pickles",
            "src/potstill/files.py: names /home/, a folder of one machine",
            "src/potstill/losses/kd.py:2: losses imports training, which comes after it",
            "src/potstill/losses/kd.py:3: losses imports data, which comes after it",
            "src/potstill/losses/near.py:1: imports are written in full",
        ]
    )


def test_a_room_has_an_end(house, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}.py").write_text("x = 1\n" * 520)
    assert [line.split(": ")[1] for line in house.sizes(tmp_path)] == ["2600 lines, and a room has at most 2500"]
