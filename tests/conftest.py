"""What the tests share: one thread, no network, and models of a few thousand weights made on the spot."""

from __future__ import annotations

import logging
import os
from pathlib import Path

# Before torch is imported anywhere: results are compared bit for bit, and the cores are shared with other workers.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
from tiny_models import make_model, write_jsonl

# torch tells its checkpoint logger of every call; a failing test would drown in it.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 texts of 10 to 60 tokens, no two alike."""
    words = ["union", "people", "congress", "peace", "treasury", "nation", "year", "duty", "law", "commerce"]
    texts = [
        " ".join(words[(i * k * k + k) % 10] for k in range(3 + i * 7 % 17)) + f" in {1790 + i}." for i in range(60)
    ]
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", [{"text": text} for text in texts])
