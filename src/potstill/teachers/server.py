"""`potstill serve`: a teacher that scores token sequences for whoever asks over HTTP. docs/remote.md."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from potstill.config import TeacherConfig
from potstill.extras import lacking
from potstill.models import load_teacher
from potstill.parallel.mesh import pick_device
from potstill.recipe import checked
from potstill.teachers.codec import Signal
from potstill.teachers.connection import sound_token
from potstill.teachers.origin import Identity, identity_of_model, save_head
from potstill.teachers.scorer import BUCKETS, Busy, Job, Scorer, TooLarge, check_question
from potstill.teachers.wire import (
    HEADERS,
    PROTOCOL,
    SERVICE,
    TEMPLATES,
    TOKENIZER_FILES,
    read_question,
    write_answer,
)
from potstill.types import PotstillError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

SHUTDOWN_SECONDS = 30  # for what is under way when the server is told to end


@dataclass(frozen=True)
class ServeOptions:
    """What the command line says."""

    host: str
    port: int
    token_env: str | None
    max_body_mb: float
    max_tokens: int | None
    batch_tokens: int | None
    max_answer_mb: float = 1024.0
    version: str = ""  # of potstill


def serve(
    model: str,
    options: ServeOptions,
    *,
    dtype: str,
    device_name: str,
    revision: str | None,
    trust_remote_code: bool,
    say: Callable[[str], None] | None = None,
) -> None:
    """Load the model and answer until a signal ends it."""
    try:
        import uvicorn
    except ImportError as error:
        raise lacking("potstill serve", "serve") from error
    token = _token(options.token_env)
    keys = {"model": model, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    device = pick_device(device_name)
    teacher = load_teacher(checked(TeacherConfig, keys, "MODEL"), device, "MODEL", "MODEL")
    try:
        listening = socket.create_server((options.host, options.port), backlog=256)
    except OSError as error:
        raise PotstillError(f"cannot listen on {options.host}:{options.port} ({error.strerror or error})") from error
    batch_tokens = options.batch_tokens or (4096 if device.type == "cpu" else 16384)
    scorer = Scorer(teacher, batch_tokens, int(options.max_answer_mb * 2**20))
    service = Service(scorer, identity_of_model(teacher, model), token, options)
    host = f"[{options.host}]" if ":" in options.host else options.host
    ready = (
        f"ready: http://{host}:{listening.getsockname()[1]} serves {model} (weights {service.identity.weights[:12]}, "
        f"{len(teacher.tokenizer):,} ids, {service.identity.dtype})"
    )
    say = say or (lambda line: Console(soft_wrap=True).print(line, highlight=False, markup=False))
    config = uvicorn.Config(
        application(service, lambda: say(ready)),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=75,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is answered
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
        listening.close()
        scorer.close()


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise PotstillError(f"--token-env {variable}: there is no such environment variable, or it is empty")
    if not sound_token(token):
        raise PotstillError(
            f"--token-env {variable}: it holds spaces, or characters that are not ASCII, within the token: no client could "
            "send it"
        )
    return token


class Service:
    """What the addresses of the server do."""

    def __init__(self, scorer: Scorer, identity: Identity, token: str | None, options: ServeOptions) -> None:
        self.scorer, self.identity = scorer, identity
        self._token, self._version = token, options.version
        self._most_bytes = int(options.max_body_mb * 2**20)
        positions = scorer.teacher.positions
        limits = [limit for limit in (positions, options.max_tokens) if limit is not None]
        self._most_tokens = min(limits) if limits else None
        self._answers: Counter[int] = Counter()
        self._seconds = 0.0
        self._bytes: Counter[str] = Counter()

    def refused(self, request: Request) -> Response | None:
        """The answer to who has not the token."""
        if self._token is None:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        what = "this is not it" if given else "none was sent"
        return _words(401, f"this server wants a bearer token, and {what}")

    def headers(self) -> dict[str, str]:
        found = asdict(self.identity)
        return {header: str(found[part]) for part, header in HEADERS.items()}

    async def health(self, request: Request) -> Response:
        if not self.scorer.alive:
            return _words(500, "the thread that runs the model has ended")
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        teacher = self.scorer.teacher
        head = teacher.model.get_output_embeddings().weight
        return _json(
            {
                "service": SERVICE,
                "protocol": PROTOCOL,
                "potstill": self._version,
                **asdict(self.identity),
                "vocabulary": teacher.vocabulary,
                "rows": int(head.shape[0]),
                "width": int(head.shape[1]),
                "positions": self._most_tokens,
                "max_body_bytes": self._most_bytes,
                "max_answer_bytes": self.scorer.most_bytes,
            }
        )

    async def tokenizer(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._tokenizer_files))

    def _tokenizer_files(self) -> dict[str, str]:
        tokenizer = self.scorer.teacher.tokenizer
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            there = [Path(folder) / name for name in TOKENIZER_FILES]
            files = {path.name: path.read_text(encoding="utf-8") for path in there if path.exists()}
        if isinstance(tokenizer.chat_template, dict):  # which are saved in a folder of their own
            files[TEMPLATES] = json.dumps(tokenizer.chat_template)
        return files

    async def head(self, request: Request) -> Response:
        return _binary(await asyncio.to_thread(self._head), self.headers())

    def _head(self) -> bytes:
        teacher = self.scorer.teacher
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "head.safetensors"
            save_head(teacher.at_rows(torch.empty(0), teacher.vocabulary), path)
            return path.read_bytes()

    async def score(self, request: Request) -> Response:
        begin = time.perf_counter()
        body = await self._body(request)
        if body is None:
            most = f"{self._most_bytes / 2**20:.3g} MB"
            return _words(413, f"the request is larger than {most}, the most this server takes (--max-body-mb)")
        answer = await self._scored(request, body)
        self._seconds += time.perf_counter() - begin
        return answer

    async def _body(self, request: Request) -> bytes | None:
        """None: it is too large."""
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._most_bytes:
            return None
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._most_bytes:
                return None
            parts.append(part)
        self._bytes["in"] += size
        return b"".join(parts)

    async def _scored(self, request: Request, body: bytes) -> Response:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Signal | Exception] = loop.create_future()

        def settle(found: Signal | Exception) -> None:
            if not done.done():
                done.set_result(found)

        def answer(found: Signal | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all who waited
                loop.call_soon_threadsafe(settle, found)

        try:
            # On a thread: a large body would hold up all others.
            question = await asyncio.to_thread(read_question, body)
            check_question(question, self.scorer.teacher, self._most_tokens, self.scorer.most_bytes)
            job = Job(question, answer)
            self.scorer.submit(job)
        except (ValueError, PotstillError) as error:
            return _words(400, str(error))
        except TooLarge as error:
            return _words(413, str(error))
        except Busy as error:
            return _words(503, str(error))
        gone = asyncio.ensure_future(_disconnected(request))
        both: set[asyncio.Future[Any]] = {done, gone}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when this handler is cancelled, as the server ends
            gone.cancel()
            job.abandoned = not done.done()
        if not done.done():
            return _words(499, "the client has gone")
        found = done.result()
        if isinstance(found, PotstillError):
            return _words(422, str(found))
        if isinstance(found, Exception):
            return _words(500, f"scoring failed ({type(found).__name__}: {found})")
        content = await asyncio.to_thread(write_answer, found)
        self._bytes["out"] += len(content)
        return _binary(content, self.headers())

    async def metrics(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(self._metrics(), media_type="text/plain; version=0.0.4")

    def counted(self, code: int) -> None:
        self._answers[code] += 1

    def _metrics(self) -> str:
        counts = self.scorer.counts
        lines: list[str] = []

        def add(name: str, kind: str, what: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP potstill_{name} {what}", f"# TYPE potstill_{name} {kind}"])
            lines.extend(f"potstill_{name}{label} {value:g}" for label, value in values)

        answers = [(f'{{code="{code}"}}', float(n)) for code, n in sorted(self._answers.items())]
        add("requests_total", "counter", "answers by status code", *answers)
        add("request_seconds_total", "counter", "time from a request of /score to its answer", ("", self._seconds))
        add("documents_total", "counter", "documents scored", ("", counts["documents"]))
        add("tokens_total", "counter", "tokens scored", ("", counts["tokens"]))
        add("padding_tokens_total", "counter", "padding that was forwarded with them", ("", counts["padding"]))
        add(
            "forward_seconds_total",
            "counter",
            "time of forward passes and of what is made of them",
            ("", self.scorer.seconds),
        )
        total, values = 0, []
        for bucket in (*BUCKETS, "+Inf"):
            total += counts[f"at most {bucket}"]
            values.append((f'_bucket{{le="{bucket}"}}', float(total)))
        values += [("_sum", float(counts["documents"])), ("_count", float(counts["passes"]))]
        add("batch_documents", "histogram", "documents a forward pass", *values)
        add("waiting_requests", "gauge", "requests that wait for the model", ("", self.scorer.waiting))
        add("body_bytes_total", "counter", "bytes of bodies", *((f'{{way="{k}"}}', v) for k, v in self._bytes.items()))
        return "\n".join(lines) + "\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(service: Service, ready: Callable[[], None] = lambda: None) -> Starlette:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    def guarded(handler: Callable[[Request], Any], free: bool = False) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            answer: Response | None = None if free else service.refused(request)
            if answer is None:
                answer = await handler(request)
            service.counted(answer.status_code)
            return answer

        return handle

    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        service.counted(error.status_code)
        there = ", ".join(f"{'POST' if route.path == '/score' else 'GET'} {route.path}" for route in routes)
        return _words(error.status_code, f"{request.method} {request.url.path}: {error.detail}; there is {there}")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ready()
        yield

    routes = [
        Route("/health", guarded(service.health, free=True)),
        Route("/version", guarded(service.version)),
        Route("/metrics", guarded(service.metrics)),
        Route("/tokenizer", guarded(service.tokenizer)),
        Route("/head", guarded(service.head)),
        Route("/score", guarded(service.score), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: elsewhere})


def _words(code: int, words: str) -> Response:
    return _json({"error": words}, code)


def _json(content: Any, code: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=code)


def _binary(content: bytes, headers: dict[str, str]) -> Response:
    from starlette.responses import Response

    return Response(content, media_type="application/octet-stream", headers=headers)
