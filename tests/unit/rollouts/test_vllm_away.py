"""The parts of the vLLM engine that need no vLLM: what it says when there is none, and how it talks to a server."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from json_server import Answer, JsonServer
from safetensors.torch import load_file

from potstill.config import StudentConfig
from potstill.config.rollouts import EngineConfig, RolloutsConfig, SamplingConfig
from potstill.models import LanguageModel, load_student
from potstill.rollouts import vllm_weights
from potstill.rollouts.engine import Engine
from potstill.rollouts.vllm import open_vllm
from potstill.rollouts.vllm_requests import completion, request
from potstill.types import PotstillError


@pytest.fixture(scope="module")
def student(tiny_teacher: Path) -> LanguageModel:
    return load_student(StudentConfig(model=str(tiny_teacher)), torch.device("cpu"), 0)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(JsonServer(answer)).address


def rollouts(server: str | None = None, **sampling: Any) -> RolloutsConfig:
    return RolloutsConfig(
        on_policy_fraction=1, engine=EngineConfig(kind="vllm", server=server), sampling=SamplingConfig(**sampling)
    )


def asks_for_an_id(path: str, body: dict[str, Any]) -> bool:
    return path == "/v1/completions" and "seed" not in body


def look(path: str, body: dict[str, Any], mode: str = "processed_logprobs") -> tuple[int, Any]:
    """What every vLLM answers when it is asked what it is."""
    if asks_for_an_id(path, body):
        return (200, {}) if body["prompt"] < [2048] else (400, {"error": {"message": "out of vocabulary"}})
    if path == "/v1/models":
        return 200, {"data": [{"id": "m", "max_model_len": 128}]}
    if path.startswith("/server_info"):
        return 200, {"vllm_config": {"model_config": {"dtype": "torch.float32", "logprobs_mode": mode}}}
    if path in ("/collective_rpc", "/reset_prefix_cache"):
        return 200, {"results": [None], "success": True}
    return 404, {"detail": "Not Found"}


def connect(student: LanguageModel, server: str, folder: Path, retry_timeout: float = 5.0, **sampling: Any) -> Engine:
    keys = {"stop_ids": [1], "max_length": 128, "folder": folder, "retry_timeout": retry_timeout}
    return open_vllm(student, rollouts(server, **sampling), **keys)


def test_without_vllm(student: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PotstillError, match=r"tools/setup_vllm .* pip install vllm"):
        open_vllm(student, rollouts(), stop_ids=[1], max_length=64, folder=tmp_path)


@pytest.mark.parametrize(("temperature", "words"), [(0.005, "would take 0.01"), (2.5, "at most 2")])
def test_temperatures_that_vllm_would_change(
    student: LanguageModel, tmp_path: Path, temperature: float, words: str
) -> None:
    with pytest.raises(PotstillError, match=rf"rollouts\.sampling\.temperature {temperature:g}: .*{words}"):
        open_vllm(student, rollouts(temperature=temperature), stop_ids=[1], max_length=64, folder=tmp_path)


def test_nobody_is_there(student: LanguageModel, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        PotstillError, match=rf"rollouts\.engine: the server at {address}: it cannot be reached .*refused"
    ):
        connect(student, address, tmp_path, retry_timeout=1.0)


def test_a_server_without_the_dev_mode(student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str]) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return look(path, body) if path.startswith("/v1") else (404, {"detail": "Not Found"})

    with pytest.raises(PotstillError, match="VLLM_SERVER_DEV_MODE=1"):
        connect(student, serve(answer), tmp_path)


def test_a_server_with_other_log_probabilities(
    student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str]
) -> None:
    address = serve(lambda path, body: look(path, body, "raw_logprobs"))
    with pytest.raises(PotstillError, match="--logprobs-mode processed_logprobs"):
        connect(student, address, tmp_path, top_p=0.9)


def test_the_servers_own_words(student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str]) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions" and not asks_for_an_id(path, body):
            return 400, {"error": {"message": "Token id 3000 is out of vocabulary"}}
        return look(path, body)

    with pytest.raises(
        PotstillError, match=r"POST /v1/completions is refused \(400\): Token id 3000 is out of vocabulary"
    ):
        connect(student, serve(answer), tmp_path)


def test_a_server_that_makes_its_text_up(
    student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str]
) -> None:
    """It is busy at first, then takes everything and changes nothing."""
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(path)
        if len(asked) <= 2:
            return 503, {}
        if path != "/v1/completions" or asks_for_an_id(path, body):
            return look(path, body)
        assert (body["prompt"], body["logprobs"], body["ignore_eos"]) == (
            student.tokenizer("The")["input_ids"],
            0,
            True,
        )
        many = body["max_tokens"]
        logprobs = {"token_logprobs": [-1.0] * many}
        return 200, {"choices": [{"token_ids": [7] * many, "logprobs": logprobs, "finish_reason": "length"}]}

    address = serve(answer)
    with pytest.raises(PotstillError, match=r"did not take the student's weights of step 0: the log-prob.*64 tokens"):
        connect(student, f"{address}/v1/", tmp_path)
    assert asked[:3] == ["/v1/models"] * 3
    assert {"/collective_rpc", "/reset_prefix_cache"} <= set(asked)


def test_an_error_does_not_wait_for_the_texts_under_way(
    student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str]
) -> None:
    """The first text is never written, and the second is refused."""
    waiting, over = threading.Event(), threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/completions" or asks_for_an_id(path, body):
            return look(path, body)
        if body["seed"] == 0:
            waiting.set()
            over.wait(600)
        waiting.wait(600)
        return 400, {"error": {"message": "enough"}}

    with ThreadPoolExecutor(1) as pool:
        try:
            error = pool.submit(connect, student, serve(answer), tmp_path).exception(timeout=120)
        finally:
            over.set()
    assert isinstance(error, PotstillError) and "is refused (400): enough" in str(error)


@pytest.mark.parametrize("said", [{"vllm_config": "--model m"}, {"config": {}}, [1, 2]])
def test_a_server_of_another_shape(
    student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str], said: Any
) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, said) if path.startswith("/server_info") else look(path, body)

    with pytest.raises(PotstillError, match="is not understood"):
        connect(student, serve(answer), tmp_path)


def test_a_folder_is_shared_without_touching_what_others_have_there(
    student: LanguageModel, tmp_path: Path, serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of another run, and a proxy that only the world outside is behind."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    theirs = tmp_path / "weights-for-vllm-0123abcd" / "00000000"
    theirs.mkdir(parents=True)
    paths: list[Path] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/collective_rpc":
            paths.append(Path(body["kwargs"]["weights_path"]))
        if path == "/v1/completions" and not asks_for_an_id(path, body):
            return 400, {"error": {"message": "enough"}}
        return look(path, body)

    with pytest.raises(PotstillError, match="enough"):
        connect(student, serve(answer), tmp_path)
    (sent,) = paths
    assert sent.parent.parent == tmp_path and sent.parent != theirs.parent
    assert theirs.exists() and [path.name for path in tmp_path.iterdir()] == [theirs.parent.name]


def test_requests_say_everything() -> None:
    sampling = SamplingConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop=["x"], max_new_tokens=9)
    said = request(sampling, [1, 2], 2**64 - 1, 9)
    assert said["seed"] == 2**63 - 1 and request(sampling, [], 7, 9)["seed"] == 7
    assert (said["top_k"], said["top_p"], said["min_p"], said["temperature"]) == (3, 0.9, 0.1, 0.5)
    assert (said["stop"], said["stop_token_ids"], said["max_tokens"]) == (["x"], [1, 2], 9)


def test_how_a_text_ended() -> None:
    plain, greedy = SamplingConfig(), SamplingConfig(temperature=0)
    assert completion([5, 1], [-1.0, -2.0], "stop", plain, [1, 2]).end == "eos"
    assert completion([5, 1], [-1.0, -2.0], "stop", plain, [2]).end == "stop"
    assert completion([5, 3], [-1.0, -2.0], "length", plain, [1, 2]).end == "length"
    assert completion([5, 3], [-1.0, -2.0], "length", greedy, [1, 2]).logprobs.tolist() == [0.0, 0.0]
    with pytest.raises(PotstillError, match="broke off a text"):
        completion([5], [-1.0], "abort", plain, [1])


def test_weights_are_named_as_files_have_them_and_the_tied_head_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "SHARD_BYTES", 100_000)
    tied = load_student(StudentConfig(model="shipped:teacher"), torch.device("cpu"), 0)
    vllm_weights.save_weights(tied, tmp_path / "w")
    vllm_weights.save_weights(tied, tmp_path / "w")  # again, in the place of the first
    files = sorted((tmp_path / "w").iterdir())
    assert len(files) > 3 and [path.name for path in tmp_path.iterdir()] == ["w"]
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert found.keys() == tied.model.state_dict().keys()


def test_weights_that_cannot_be_written(student: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PotstillError, match="could not write"):
        vllm_weights.save_weights(student, tmp_path / "file" / "w")
