"""What the tests of servers share."""

from __future__ import annotations

import pytest
from taught import data_of, write_files
from tiny import tiny

from potstill.config import DataConfig
from potstill.models import LanguageModel


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return data_of(write_files(tmp_path_factory.mktemp("data")), "text")


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0, max_position_embeddings=128)
