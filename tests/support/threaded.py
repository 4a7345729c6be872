"""HTTP servers on a thread of the test's own process: honest ones with a slow or faulty wire, and ones that lie."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from potstill.models import LanguageModel


class Threaded:
    """An ASGI application that is served until the block ends."""

    def __init__(self, application: Any, port: int = 0, **config: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        config = {"log_level": "critical", "timeout_graceful_shutdown": 1, **config}
        self._server = uvicorn.Server(uvicorn.Config(application, **config))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def __enter__(self) -> Threaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        self._socket.close()
        assert not self._thread.is_alive()


class Altered:
    """An application whose answers to one address are changed: `change(body, headers)` gives both anew, or a Response."""

    def __init__(self, application: Any, path: str, change: Callable[[bytes, dict[str, str]], Any]) -> None:
        self.application, self.path, self.change = application, path, change

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != self.path:
            await self.application(scope, receive, send)
            return
        parts: list[bytes] = []
        begun: dict[str, Any] = {}

        async def hold(message: Any) -> None:
            if message["type"] == "http.response.start":
                begun.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self.application(scope, receive, hold)
        headers = {k.decode(): v.decode() for k, v in begun["headers"] if k != b"content-length"}
        changed = self.change(b"".join(parts), headers)
        answer = changed if isinstance(changed, Response) else Response(changed[0], begun["status"], changed[1])
        await answer(scope, receive, send)


class Together:
    """An application that answers requests of one address only when so many are there at once; `most`: that ever were."""

    def __init__(self, application: Any, path: str, count: int, seconds: float = 120.0) -> None:
        self.application, self.path, self.count, self.seconds = application, path, count, seconds
        self.now = self.most = self.total = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != self.path:
            await self.application(scope, receive, send)
            return
        self.now, self.total = self.now + 1, self.total + 1
        self.most = max(self.most, self.now)
        for _ in range(int(self.seconds / 0.01)):
            if self.most >= self.count:
                break
            await asyncio.sleep(0.01)
        await self.application(scope, receive, send)
        self.now -= 1


class Completions:
    """An OpenAI-compatible server over a real model. `way` says how it gives log-probabilities of a prompt:
    vllm, echo (token ids), text (echo with tokens as text), shifted, ignoring, hot (another temperature), or plain wrong."""

    def __init__(self, model: LanguageModel, name: str, way: str = "vllm", most: int = 64) -> None:
        self.model, self.name, self.way, self.most = model, name, way, most
        self.tokenize: Any = None  # of /tokenize; None: it has none
        self.asked: list[dict[str, Any]] = []
        self.failing = 0  # answers with 500 before it works again
        self.defaults: tuple[str, ...] = ()  # sampling keys of its own, where a request does not name them

    @property
    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.name, "max_model_len": 129}]})

    async def _tokenize(self, request: Request) -> Response:
        if self.tokenize is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"tokens": self.tokenize((await request.json())["prompt"])})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.failing:
            self.failing -= 1
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        wanted = max(body.get("prompt_logprobs") or 0, body.get("logprobs") or 0)
        if wanted > self.most:
            words = f"Requested logprobs of {wanted}, which is greater than max allowed: {self.most}"
            return JSONResponse({"error": {"message": words}}, 400)
        return JSONResponse({"choices": [self._choice(body)]})

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def _named(self, i: int) -> str:
        return self.model.tokenizer.decode([i]) if self.way == "text" else f"token_id:{i}"

    def _top(self, row: torch.Tensor, k: int) -> dict[str, float]:
        values, ids = row.topk(k)
        return {self._named(i): round(v, 7) for i, v in zip(ids.tolist(), values.tolist(), strict=True)}

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, k = body["prompt"], body.get("logprobs") or 0
        rows = self._logprobs(ids)
        if any(key not in body for key in self.defaults):
            rows = torch.cat([rows[:-1], (3 * rows[-1:]).log_softmax(-1)])  # as they would be seen in what it writes
        written = len(ids) * 37 % rows.shape[1]  # a draw, which may be any token
        choice: dict[str, Any] = {"text": self.model.tokenizer.decode([written]), "logprobs": None}
        before = {"shifted": rows[1:], "hot": (rows / 3).log_softmax(-1)[:-1]}.get(self.way, rows[:-1])
        if body.get("prompt_logprobs") and self.way in ("vllm", "hot", "shifted"):
            choice["prompt_logprobs"] = [None, *self._prompt_logprobs(before, ids, body["prompt_logprobs"])]
        if k:
            own = [] if not body.get("echo") or self.way == "ignoring" else list(zip(ids[1:], before, strict=True))
            first = [] if not own else [(None, None)]
            listed = [*first, *((row[i].item(), self._top(row, k)) for i, row in own)]
            drawn = rows[-1][written].item()
            listed.append((drawn, {**self._top(rows[-1], k), self._named(written): drawn}))
            tokens = [*(ids if own else []), written]
            choice["logprobs"] = {
                "tokens": [self._named(i) for i in tokens],
                "token_logprobs": [value for value, _ in listed],
                "top_logprobs": [top for _, top in listed],
            }
        return choice

    def _prompt_logprobs(self, rows: torch.Tensor, ids: list[int], k: int) -> list[dict[str, Any]]:
        """As vLLM gives them: the k likeliest, and the token itself where it is not among them."""
        found = []
        for row, i in zip(rows, ids[1:], strict=True):
            values, top = row.topk(k)
            entries = dict(zip(top.tolist(), values.tolist(), strict=True)) | {i: row[i].item()}
            found.append({str(t): {"logprob": float(np.float32(v)), "rank": 1} for t, v in entries.items()})
        return found
