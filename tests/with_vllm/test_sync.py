"""New weights reach a real vLLM, in this process and over HTTP; and when they do not, that is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expected import asks, drawn_logprobs, likeliest
from tiny_models import make_model
from writers import EOS, MAX_LENGTH, Writer, rollouts, shake, shipped_teacher

from potstill.config import StudentConfig
from potstill.models import LanguageModel, load_student
from potstill.rollouts import vllm_server as server_module
from potstill.rollouts.vllm import open_vllm
from potstill.rollouts.vllm_weights import save_weights
from potstill.types import PotstillError

pytestmark = pytest.mark.vllm

TEXTS = ["The people of the United States", "I have the honor to"]


def follows(writer: Writer, tolerance: float = 1e-4) -> None:
    """The engine's log-probabilities are those of the student as it is now."""
    sampling = writer.sampling(temperature=0.9)
    asked = asks(writer.student, TEXTS, seeds=range(3))
    for ask, text in zip(asked, writer.engine.generate(asked), strict=True):
        theirs = torch.from_numpy(text.logprobs)
        assert float((drawn_logprobs(writer.student, ask, text, sampling) - theirs).abs().mean()) < tolerance


def open_for(student: LanguageModel, folder: Path, server: str | None = None) -> Writer:
    engine: Any = open_vllm(student, rollouts(server), stop_ids=[EOS], max_length=MAX_LENGTH, folder=folder, version=5)
    return Writer(engine, student)


@pytest.fixture(params=["colocated", "served"])
def writer(request: pytest.FixtureRequest, needs_vllm: None, tmp_path: Path) -> Any:
    server = request.getfixturevalue("server_to_update") if request.param == "served" else None
    writer = open_for(shipped_teacher(), tmp_path / "vllm", server)
    yield writer
    writer.engine.close()


def test_new_weights_arrive(writer: Writer) -> None:
    engine, student = writer.engine, writer.student
    assert engine.version == 5
    for version in (6, 7, 8, 9, 10):
        old = engine.generate(asks(student, TEXTS, seeds=range(3)))
        shake(student, version)
        # Until it is told, the engine writes with the weights it had: it holds copies.
        assert [t.ids.tolist() for t in engine.generate(asks(student, TEXTS, seeds=range(3)))] == [
            t.ids.tolist() for t in old
        ]
        engine.update(version)
        assert engine.version == version
        follows(writer)
    writer.sampling(temperature=0)
    asked = asks(student, TEXTS)
    for ask, text in zip(asked, engine.generate(asked), strict=True):
        assert text.ids.tolist() == likeliest(student, ask.ids, 16)


def test_weights_that_do_not_arrive_in_the_process(needs_vllm: None, tmp_path: Path) -> None:
    writer = open_for(shipped_teacher(), tmp_path / "vllm")
    try:
        shake(writer.student, 1)
        writer.engine.copy.llm.collective_rpc = lambda *_, **__: None
        with pytest.raises(
            PotstillError, match=r"did not take the student's weights of step 6, .* those of step 5: .* 64"
        ):
            writer.engine.update(6)
    finally:
        writer.engine.close()


def test_weights_that_do_not_arrive_at_the_server(
    server_to_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads the folder, and what is in it are the weights of the step before."""
    writer = open_for(shipped_teacher(), tmp_path / "weights", server_to_update)
    follows(writer)
    shake(writer.student, 1)
    old = shipped_teacher()
    monkeypatch.setattr(server_module, "save_weights", lambda _, path, **keys: save_weights(old, path, **keys))
    with pytest.raises(PotstillError, match=r"did not take the student's weights of step 6.*Does http.* read"):
        writer.engine.update(6)
    writer.engine.close()


def test_a_server_of_another_model(server_to_update: str, tmp_path: Path) -> None:
    student = load_student(StudentConfig(model=str(make_model(tmp_path / "other"))), torch.device("cpu"), 0)
    with pytest.raises(PotstillError, match=r"rollouts\.engine: .*: POST /collective_rpc is refused \(500\)"):
        open_for(student, tmp_path / "weights", server_to_update)


@pytest.mark.parametrize(("ids", "has"), [(2100, "fewer"), (2049, "fewer"), (2047, "more")])
def test_a_server_with_another_vocabulary(vllm_server: str, tmp_path: Path, ids: int, has: str) -> None:
    student = shipped_teacher()
    student.model.resize_token_embeddings(ids)
    with pytest.raises(PotstillError, match=rf"which has {has} ids than the student's {ids}"):
        open_for(student, tmp_path / "weights", vllm_server)
    assert not (tmp_path / "weights").exists()


def test_a_server_with_less_room(vllm_server: str, tmp_path: Path) -> None:
    with pytest.raises(
        PotstillError, match=r"takes 256 tokens and data.max_length is 512: start it with --max-model-len 512"
    ):
        open_vllm(shipped_teacher(), rollouts(vllm_server), stop_ids=[EOS], max_length=512, folder=tmp_path)


def test_only_the_newest_weights_stay(server_to_update: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (folder / "step-00000001").mkdir(parents=True)  # someone else's
    writer = open_for(shipped_teacher(), folder, server_to_update)
    writer.engine.update(6)
    (own,) = [path for path in folder.iterdir() if path.name != "step-00000001"]  # of this run
    assert [path.name for path in own.iterdir()] == ["00000006"]
    writer.engine.close()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    "keys", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}], ids=["tied", "untied"]
)
def test_bfloat16(needs_vllm: None, tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = make_model(tmp_path / "tiny", hidden_size=64, initializer_range=0.1, **keys)
    config = StudentConfig(model=str(folder), dtype="bfloat16")
    writer = open_for(load_student(config, torch.device("cpu"), 0), tmp_path / "vllm")
    try:
        shake(writer.student, 1)
        writer.engine.update(6)
        follows(writer, 0.05)
    finally:
        writer.engine.close()
