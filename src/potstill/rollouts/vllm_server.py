"""A running `vllm serve` as the engine: text over HTTP, weights over a folder that both processes see. docs/vllm.md."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any

import torch

from potstill.config import RemoteConfig, RolloutsConfig, SamplingConfig
from potstill.models import LanguageModel
from potstill.rollouts.engine import Completion, GenerationRequest
from potstill.rollouts.sync_check import TOLERANCE, SyncCheck
from potstill.rollouts.vllm_requests import check_lengths, read_text, request, written
from potstill.rollouts.vllm_weights import save_weights
from potstill.serving.http import SMALL, Connection
from potstill.serving.openai import ENTRY
from potstill.teachers.asking import Asking

AT_ONCE = 128  # requests under way; the server batches them
PATIENCE = 120.0  # seconds for a server that does not answer, which may be starting
ANSWER = 1800.0  # seconds for one answer: the last request of many waits for the others
RESTARTS = 5  # that one generation may see
REFUSALS = (500,)  # of weights that do not fit: it would say so again
MODE = "processed_logprobs"
WEIGHTS = "weights-for-vllm-"  # a name that nothing else in a folder of the user's has
RUN = secrets.token_hex(4)  # of this process


class Server:
    """An `Engine` whose model is in another process, and has that process's dtype."""

    def __init__(
        self,
        student: LanguageModel,
        rollouts: RolloutsConfig,
        stop_ids: Sequence[int],
        max_length: int,
        folder: Path,
        version: int,
        retry_timeout: float = PATIENCE,
    ):
        assert rollouts.engine.server is not None
        self.student, self.sampling, self.stop_ids, self.max_length = student, rollouts.sampling, stop_ids, max_length
        self.version: int = version
        # Two runs may be given the same folder: each has one of its own there.
        self.folder, self.retry_timeout = folder.resolve() / f"{WEIGHTS}{RUN}", retry_timeout
        asking = RemoteConfig(
            concurrency=AT_ONCE, timeout=ANSWER, retry_timeout=retry_timeout, start_timeout=retry_timeout
        )
        self._connection = Connection(rollouts.engine.server.rstrip("/").removesuffix("/v1"), asking, "rollouts.engine")
        try:
            self._model, dtype = self._look()
            self._compare_vocabularies()
            self._check = SyncCheck(
                student,
                rollouts.sampling,
                lambda asked, sampling: self._write(asked, sampling, ()),
                dtype,
                max_length,
                f"Does {self._connection.address} serve this student's model, and read {self.folder}?",
            )
            self._take(version, None)
        except BaseException:
            self.close()
            raise

    def _look(self) -> tuple[str, torch.dtype]:
        """What the server calls its model, and its dtype; refuses one that was started otherwise than needed."""
        models, info = self._ask("GET", "/v1/models"), self._ask("GET", "/server_info?config_format=json")
        try:
            model, config = dict(models["data"][0]), dict(info["vllm_config"]["model_config"])
            name, longest = str(model["id"]), model.get("max_model_len")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._connection.error(
                f"what it tells of itself is not understood ({error!r}): is it a vLLM of 0.10.2 or later?"
            ) from error
        if longest is not None and longest < self.max_length:
            raise self._connection.error(
                f"it takes {longest} tokens and data.max_length is {self.max_length}: start "
                f"it with --max-model-len {self.max_length}"
            )
        how = self.sampling
        plain = how.temperature in (0, 1) and how.top_p == 1 and how.top_k == 0 and how.min_p == 0
        if config.get("logprobs_mode", MODE) != MODE and not plain:
            raise self._connection.error(
                f"it tells log-probabilities before temperature and truncation "
                f"({config['logprobs_mode']}): start it with --logprobs-mode {MODE}"
            )
        dtype = getattr(torch, str(config.get("dtype")).removeprefix("torch."), None)
        return name, dtype if dtype in TOLERANCE else self.student.model.dtype

    def _compare_vocabularies(self) -> None:
        """Before any weights are sent: a server is left half loaded by weights that do not fit."""
        ids = self._ids = int(self.student.model.get_input_embeddings().num_embeddings)
        for token, known in ((ids - 1, True), (ids, False)):
            body = {"model": self._model, "prompt": [token], "max_tokens": 1}
            if (self._connection.send("POST", "/v1/completions", body, absent=(400,)) is not None) != known:
                raise self._connection.error(
                    f"it serves {self._model}, which has {'fewer' if known else 'more'} ids "
                    f"than the student's {ids}: start it with the student's own model"
                )

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        check_lengths(asked, self.sampling, self.max_length)
        for _ in range(RESTARTS):
            before = self._connection.failures
            texts = self._write(asked, self.sampling, self.stop_ids)
            if self._connection.failures == before:
                return texts
            # It may have ended and begun again, with the weights it begins with: what it wrote is not the student's.
            self._take(self.version, None)
        raise self._connection.error("the connection to it breaks again and again while it writes")

    def _write(
        self, asked: Sequence[GenerationRequest], sampling: SamplingConfig, stop_ids: Sequence[int]
    ) -> list[Completion]:
        if not asked:
            return []

        def one(ask: GenerationRequest) -> Completion:
            body = {"model": self._model, "prompt": ask.ids.tolist(), "return_token_ids": True}
            most = SMALL + ENTRY * (len(ask.ids) + sampling.max_new_tokens)
            found = self._ask("POST", "/v1/completions", body | request(sampling, stop_ids, ask.seed), most)
            try:
                choice = found["choices"][0]
                ids, logprobs = read_text(choice, sampling, self._ids)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise self._connection.error(f"its answer to /v1/completions is not understood ({error})") from error
            return written(ids, logprobs, choice.get("finish_reason"), sampling, stop_ids)

        asking = Asking(AT_ONCE, lambda: self._connection.error("the run has ended"))
        try:
            futures = [asking.submit(one, ask) for ask in asked]
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            return [future.result() for future in futures]
        except BaseException:  # also Ctrl-C; nobody waits for the other texts
            self._connection.close()
            raise
        finally:
            asking.close()

    def update(self, version: int) -> None:
        self._take(version, self.version)

    def _take(self, version: int, before: int | None) -> None:
        path = self.folder / f"{version:08d}"
        save_weights(self.student, path)
        self._ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        deadline = time.monotonic() + self.retry_timeout
        while not self._ask("POST", "/reset_prefix_cache").get("success", True):  # as long as requests are under way
            if time.monotonic() > deadline:
                raise self._connection.error(
                    "it does not forget its prefix cache, which is of older weights: does anyone else use it?"
                )
            time.sleep(0.1)
        self.version = version
        self._check.after_update(version, before)
        for older in self.folder.iterdir():
            if older != path:
                shutil.rmtree(older, ignore_errors=True)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, most: int = SMALL) -> dict[str, Any]:
        """The answer's JSON."""
        absent = () if path.startswith("/v1") else (404,)
        answer = self._connection.send(method, path, body, absent, REFUSALS, most)
        if answer is None:
            raise self._connection.error(
                f"it has no {path.partition('?')[0]}, which takes new weights: start `vllm serve` with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        try:
            return dict(answer.json()) if answer.content else {}
        except (ValueError, TypeError) as error:
            raise self._connection.error(f"its answer to {path} is not understood ({error})") from error

    def close(self) -> None:
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)
