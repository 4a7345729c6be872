"""A real vLLM: one in this process, one behind HTTP, both of the shipped teacher. The folder is not called `vllm`, because
Python would then find a package of that name here."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from writers import EOS, MAX_LENGTH, Writer, rollouts, shipped_teacher

from potstill.rollouts.engine import Engine
from potstill.rollouts.vllm import open_vllm
from potstill.rollouts.vllm_weights import save_weights
from potstill.shipped import locate

START = 240.0  # seconds; 35 on an idle machine


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    if os.environ.get("POTSTILL_NEEDS_VLLM"):  # make test-vllm: it must not pass with nothing run
        importlib.import_module("vllm")
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm makes an environment with it")


@pytest.fixture(scope="session")
def colocated(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    student = shipped_teacher()
    engine: Engine = open_vllm(
        student, rollouts(), stop_ids=[EOS], max_length=MAX_LENGTH, folder=tmp_path_factory.mktemp("vllm")
    )
    yield Writer(engine, student)
    engine.close()


@pytest.fixture(scope="session")
def vllm_server(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL (with /v1) of a `vllm serve` of the shipped teacher, which takes new weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    flags = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 256 --max-logprobs -1"
    command = [
        shutil.which("vllm", path=Path(sys.executable).parent),
        "serve",
        locate("shipped:teacher"),
        *flags.split(),
    ]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START
        while not _healthy(address):
            assert process.poll() is None, f"vllm serve ended:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"vllm serve did not start:\n{log.read_text()[-4000:]}"
            time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def server_to_update(vllm_server: str, tmp_path: Path) -> Iterator[str]:
    """The same server, which has its own weights again afterwards: other tests ask it for the teacher's opinion."""
    yield vllm_server
    save_weights(shipped_teacher(), tmp_path / "again")
    address = vllm_server.removesuffix("/v1")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "again")}}
    for _ in range(3):  # after weights that did not fit, vLLM may refuse the next ones too, and takes those after them
        answer = httpx.post(f"{address}/collective_rpc", json=body, timeout=60)
        if answer.is_success:
            break
    answer.raise_for_status()
    httpx.post(f"{address}/reset_prefix_cache", timeout=60).raise_for_status()
