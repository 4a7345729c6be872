"""A running `vllm serve` with a copy of the student: text over HTTP, weights over a folder that both processes see. Of several
ranks one writes them; of several servers each rank asks one."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from potstill.config import RemoteConfig, RolloutsConfig, SamplingConfig
from potstill.http_client import SMALL, Connection
from potstill.models import LanguageModel
from potstill.rollouts.engine import Completion, GenerationRequest, asked_tokens
from potstill.rollouts.vllm_requests import completion, read_text, request
from potstill.rollouts.vllm_weights import save_weights
from potstill.rollouts.writing_ranks import WritingRanks
from potstill.serving.openai import ENTRY

AT_ONCE = 128  # requests under way; the server batches them
PATIENCE = 120.0  # seconds for a server that does not answer, which may be starting
ANSWER = 1800.0  # seconds for one answer: the last request of many waits for the others
REFUSALS = (500,)  # of weights that do not fit: it would say so again
MODE = "processed_logprobs"
WEIGHTS = "weights-for-vllm-"  # a name that nothing else in a folder of the user's has
RUN = secrets.token_hex(4)  # of this process


class VLLMServer:
    """The copy is in another process, and has that process's dtype."""

    def __init__(
        self,
        student: LanguageModel,
        rollouts: RolloutsConfig,
        max_length: int,
        folder: Path,
        retry_timeout: float,
        team: WritingRanks,
    ) -> None:
        servers = rollouts.engine.servers
        self._student, self._retry_timeout, self._team = student, retry_timeout, team
        self.tends = team.index < len(servers)  # this rank tells its server of new weights
        # Two runs may be given the same folder: each has one of its own there.
        self._folder = folder.resolve() / f"{WEIGHTS}{team.told(RUN)[0]}"
        self._path = self._folder
        asking = RemoteConfig(
            concurrency=max(1, AT_ONCE * min(len(servers), team.size) // team.size),
            timeout=ANSWER,
            retry_timeout=retry_timeout,
            start_timeout=retry_timeout,
        )
        self._connection = Connection(servers[team.index % len(servers)], asking, "rollouts.engine")
        self.hint = f"Does {self._connection.address} serve this student's model, and read {self._folder}?"
        try:
            team.together(lambda: self._meet(rollouts.sampling, max_length))
        except BaseException:
            self.close()
            raise

    def _meet(self, sampling: SamplingConfig, max_length: int) -> None:
        self._model, self.dtype = self._look(sampling, max_length)
        self._compare_vocabularies()

    @property
    def failures(self) -> int:
        return self._connection.failures

    def _look(self, sampling: SamplingConfig, max_length: int) -> tuple[str, torch.dtype | None]:
        """What the server calls its model, and its dtype. One that was started otherwise than needed is refused."""
        models, info = self._sent("GET", "/v1/models"), self._sent("GET", "/server_info?config_format=json")
        try:
            model, config = dict(models["data"][0]), dict(info["vllm_config"]["model_config"])
            name, longest = str(model["id"]), model.get("max_model_len")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._connection.error(
                f"what it tells of itself is not understood ({error!r}): is it a vLLM of 0.10.2 or later?"
            ) from error
        if longest is not None and longest < max_length:
            raise self._connection.error(
                f"it takes {longest} tokens and data.max_length is {max_length}: start it with --max-model-len {max_length}"
            )
        plain = sampling.temperature in (0, 1) and (sampling.top_p, sampling.top_k, sampling.min_p) == (1, 0, 0)
        if config.get("logprobs_mode", MODE) != MODE and not plain:
            raise self._connection.error(
                f"it tells log-probabilities before temperature and truncation ({config['logprobs_mode']}): start it with "
                f"--logprobs-mode {MODE}"
            )
        dtype = getattr(torch, str(config.get("dtype")).removeprefix("torch."), None)
        return name, dtype if isinstance(dtype, torch.dtype) else None

    def _compare_vocabularies(self) -> None:
        """Before any weights are sent: a server is left half loaded by weights that do not fit."""
        ids = self._ids = int(self._student.model.get_input_embeddings().num_embeddings)
        for token, known in ((ids - 1, True), (ids, False)):
            body = {"model": self._model, "prompt": [token], "max_tokens": 1}
            if self._connection.post("/v1/completions", body, accepted=(400,)).good != known:
                raise self._connection.error(
                    f"it serves {self._model}, which has {'fewer' if known else 'more'} ids than the student's {ids}: start "
                    "it with the student's own model"
                )

    def write(
        self, asked: Sequence[GenerationRequest], sampling: SamplingConfig, stop_ids: Sequence[int]
    ) -> list[Completion]:
        def one(ask: GenerationRequest) -> Completion:
            body = {"model": self._model, "prompt": ask.ids.tolist(), "return_token_ids": True}
            (most,) = asked_tokens([ask], sampling)
            size = SMALL + ENTRY * (len(ask.ids) + most)
            keys = request(sampling, stop_ids, ask.seed, most)
            found = self._sent("POST", "/v1/completions", body | keys, size)
            try:
                choice = found["choices"][0]
                ids, logprobs = read_text(choice, most, self._ids)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise self._connection.error(f"its answer to /v1/completions is not understood ({error})") from error
            return completion(ids, logprobs, choice.get("finish_reason"), sampling, stop_ids)

        return self._connection.each(one, asked)

    def load(self, version: int) -> None:
        """All ranks together."""
        self._path = self._folder / f"{version:08d}"
        self._team.together(self._save)
        self.load_again()
        if self._team.first:
            for older in self._folder.iterdir():
                if older != self._path:
                    shutil.rmtree(older, ignore_errors=True)

    def _save(self) -> None:
        save_weights(self._student, self._path, writes=self._team.first)

    def load_again(self) -> None:
        """The same weights: a server that ended and began again has those it begins with. All ranks together."""
        self._team.together(lambda: self._tell() if self.tends else None)

    def _tell(self) -> None:
        self._sent("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._path)}})
        deadline = time.monotonic() + self._retry_timeout
        while not self._sent("POST", "/reset_prefix_cache").get("success", True):  # as long as requests are under way
            if time.monotonic() > deadline:
                raise self._connection.error(
                    "it does not forget its prefix cache, which is of older weights: does anyone else use it?"
                )
            time.sleep(0.1)

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None, most: int = SMALL) -> dict[str, Any]:
        """The answer's JSON."""
        accepted = () if path.startswith("/v1") else (404,)
        answer = self._connection.send(method, path, body, most, accepted=accepted, fatal=REFUSALS)
        if not answer.good:
            raise self._connection.error(
                f"it has no {path.partition('?')[0]}, which takes new weights: start `vllm serve` with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        try:
            return answer.object() if answer.content else {}
        except ValueError as error:
            raise self._connection.error(f"its answer to {path} is not understood ({error})") from error

    def close(self) -> None:
        self._connection.close()
        if self._team.first:
            shutil.rmtree(self._folder, ignore_errors=True)
