"""What answers in place of a `vllm serve`: its addresses and words, and a model behind them that takes new weights."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from json_server import JsonServer
from safetensors.torch import load_file

from potstill.config import SamplingConfig
from potstill.models import LanguageModel
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.transformers import TransformersEngine


class StandIn(JsonServer):
    """`fails_at`: the request for text at which it ends and begins again, with the weights that it began with."""

    def __init__(self, model: LanguageModel, max_length: int, fails_at: int | None = None) -> None:
        self._model, self._max_length, self._fails_at = model, max_length, fails_at
        self._first = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
        self._lock = threading.Lock()
        self._engines: dict[str, TransformersEngine] = {}
        self.seeds: list[int] = []
        self.paths: list[str] = []
        super().__init__(self._one_at_a_time)

    def _one_at_a_time(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            return self._answer(path, body)

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": self._max_length}]}
        if path.startswith("/server_info"):
            config = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
            return 200, {"vllm_config": {"model_config": config}}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            self.paths.append(folder.name)
            weights = {name: tensor for file in sorted(folder.iterdir()) for name, tensor in load_file(file).items()}
            self._model.model.load_state_dict(weights)
            return 200, {"results": [None]}
        if "seed" not in body:
            return (200, {}) if body["prompt"][0] < self._model.vocabulary else (400, {"error": {"message": "no id"}})
        self.seeds.append(body["seed"])
        if len(self.seeds) == self._fails_at:
            self._model.model.load_state_dict(self._first)
            return 503, {}
        return 200, {"choices": [self._written(body)]}

    def _written(self, body: dict[str, Any]) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "min_p", "stop")
        sampling = SamplingConfig(max_new_tokens=body["max_tokens"], **{name: body[name] for name in names})
        how = json.dumps([sampling.model_dump(), body["stop_token_ids"]])
        if how not in self._engines:
            self._engines[how] = TransformersEngine(self._model, sampling, stop_ids=body["stop_token_ids"])
        (text,) = self._engines[how].generate([GenerationRequest(np.array(body["prompt"], np.int32), body["seed"])])
        return {
            "token_ids": text.ids.tolist(),
            "logprobs": {"token_logprobs": text.logprobs.tolist()},
            "finish_reason": "length" if text.end == "length" else "stop",
        }
