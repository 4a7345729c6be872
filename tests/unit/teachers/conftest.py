"""What the tests of teachers share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import CPU

from potstill.config import TeacherConfig
from potstill.models import LanguageModel, load_teacher


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")
