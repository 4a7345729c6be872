"""A teacher behind `potstill serve` against the live one: losses and gradients of the student, from every kind, also through a
cache that is filled from the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import Served
from taught import batches_of, data_of, relative, step, targets_of, write_files
from tiny import CPU, tiny

from potstill.config import DataConfig, LossConfig, TeacherConfig
from potstill.models import LanguageModel, load_teacher, shared_ids
from potstill.teachers.live import LiveTeacher
from potstill.teachers.several import open_teachers


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> LanguageModel:
    return load_teacher(TeacherConfig(model=str(tiny_teacher)), CPU, "teachers[0]")


@pytest.fixture(scope="module")
def served(tiny_teacher: Path):
    with Served(tiny_teacher) as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return data_of(write_files(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0, max_position_embeddings=128)


def opened(student: LanguageModel, data: DataConfig, config: dict[str, Any], **loss: Any):
    configs = [TeacherConfig.model_validate(config)]
    return open_teachers(configs, student, data, LossConfig(**loss), CPU).teachers[0]


def live_of(teacher: LanguageModel, student: LanguageModel) -> LiveTeacher:
    return LiveTeacher(teacher, shared_ids(student, teacher, "teachers[0]"), "tiny")


@pytest.mark.parametrize("layout", [{}, {"packing": False}, {"max_length": 40}, {"append_eos": False}], ids=str)
def test_hidden_states_give_the_live_loss_and_gradients(served, teacher, student, data, layout):
    data = data.model_copy(update=layout)
    batches = batches_of(data, student)
    live = live_of(teacher, student)
    found = opened(student, data, {"server": served.address, "remote": {"kind": "hidden"}})
    loss, gradients = step(student, batches, targets_of(found, batches))
    expected, live_gradients = step(student, batches, [live.targets(batch) for batch in batches])
    assert loss == pytest.approx(expected, rel=1e-5) and expected > 0.1
    assert relative(gradients, live_gradients) <= 1e-5
    found.close()
