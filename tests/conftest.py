"""What the tests share: one thread, no network, and models of a few thousand weights made on the spot."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: results are compared bit for bit, and the cores are shared with other workers.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
from races import is_race
from served import Served
from tiny_models import make_model, write_jsonl

# torch tells its checkpoint logger of every call; a failing test would drown in it.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_race(item.path, item.name):
            item.add_marker(pytest.mark.races)


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(scope="session")
def served(tiny_teacher: Path) -> Iterator[Served]:
    """`potstill serve` over the tiny teacher, to be asked and not to be killed: it takes seconds to start."""
    with Served(tiny_teacher) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 texts of 10 to 60 tokens, no two alike."""
    words = ["union", "people", "congress", "peace", "treasury", "nation", "year", "duty", "law", "commerce"]
    texts = [
        " ".join(words[(i * k * k + k) % 10] for k in range(3 + i * 7 % 17)) + f" in {1790 + i}." for i in range(60)
    ]
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", [{"text": text} for text in texts])
