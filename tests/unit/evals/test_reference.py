"""What a run's evaluations are measured against where its teacher is no model in the process."""

from __future__ import annotations

import pytest
from served import Served
from taught import batches_of, data_of, write_files
from tiny import CPU, tiny

from potstill.cache.build import build
from potstill.cache.origin import LiveOrigin
from potstill.config import EvalConfig, LossConfig, StoreConfig, TeacherConfig
from potstill.evals.fidelity import evaluate, evaluation_batches
from potstill.evals.reference import measured_against, reference_of
from potstill.teachers.live import live_teacher
from potstill.teachers.open import open_teachers


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student, a teacher, and where that is saved."""
    student, teacher, folder = tiny(0), tiny(1), tmp_path_factory.mktemp("teacher")
    teacher.model.save_pretrained(folder)
    teacher.tokenizer.save_pretrained(folder)
    return student, teacher, folder


def opened(config, data, held_out, student):
    teacher_set = open_teachers([config], student, data, LossConfig(temperature=2.0), CPU)
    reference = reference_of([config], teacher_set, student, EvalConfig(data=held_out))
    return reference, [reference.note] if reference.note else []


def test_a_cache_is_asked_about_what_it_holds(files, models, tmp_path):
    student, teacher, _ = models
    build(LiveOrigin(teacher, "tiny"), StoreConfig(kind="hidden"), data_of(files, "text", "pairs"), tmp_path / "cache")
    config, data = TeacherConfig(cache=str(tmp_path / "cache")), data_of(files, "text")
    scored = list(evaluation_batches(data, student, 4, None))

    reference, notes = opened(config, data, data, student)
    result = measured_against(reference, student, scored, CPU)
    trained_on = batches_of(data.model_copy(update={"shuffle": False}), student)
    expected = evaluate(student, live_teacher(teacher, 2048, "tiny"), trained_on, CPU)
    assert notes == [] and result["kl"] == pytest.approx(expected["kl"], rel=2e-3) and result["kl"] > 0.005
    assert result["bits_per_byte"] == evaluate(student, None, scored, CPU)["bits_per_byte"]

    reference, notes = opened(config, data, data_of(files, "pairs", "chats"), student)
    assert notes == ["teachers[0].cache: the cache has 5 of 10 held-out examples, and KL is of these"]
    assert measured_against(reference, student, scored, CPU)["agreement"] is not None

    reference, notes = opened(config, data, data_of(files, "chats"), student)
    assert reference.teacher is None and measured_against(reference, student, scored, CPU)["kl"] is None
    assert notes[0].startswith(
        "evaluations have no KL: teachers[0].cache: the cache has none of the 5 held-out examples"
    )


def test_a_server_is_asked_about_all_of_it_and_may_go_away(files, models, capsys):
    student, teacher, folder = models
    held_out = data_of(files, max_length=16)  # in windows
    scored = list(evaluation_batches(held_out, student, 4, None))
    expected = evaluate(student, live_teacher(teacher, 2048, "tiny"), scored, CPU)
    with Served(folder) as served:
        remote = {"kind": "hidden", "retry_timeout": 0.0, "timeout": 60.0}
        # What it teaches by columns of the records plays no part: held-out text has none.
        config = TeacherConfig(server=served.address, remote=remote, filter={"domain": "law"}, context_column="hint")
        reference, notes = opened(config, data_of(files), held_out, student)
        assert notes == [] and reference.teacher is not None
        assert measured_against(reference, student, scored, CPU) == pytest.approx(expected, rel=1e-4)
    result = measured_against(reference, student, scored, CPU)
    assert result["kl"] is None and result["bits_per_byte"] == pytest.approx(expected["bits_per_byte"])
    assert "this evaluation has no KL: " in capsys.readouterr().out
    reference.teacher.close()
