from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from campaign import Forge
from tiny_runs import TinyRuns


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.hard)
            item.add_marker(pytest.mark.timeout(7200))


@pytest.fixture
def runs(tmp_path: Path, tiny_teacher: Path, tiny_text: Path) -> TinyRuns:
    return TinyRuns(tmp_path, tiny_teacher, tiny_text)


@pytest.fixture
def forge(tmp_path: Path) -> Iterator[Forge]:
    folder = tmp_path / "at-work"
    folder.mkdir()
    with Forge(folder) as found:
        yield found
