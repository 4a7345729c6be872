"""`potstill serve`: a teacher that scores token sequences for whoever asks over HTTP. docs/remote.md."""

from __future__ import annotations

import asyncio
import hmac
import json
import mmap
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from potstill.cache.codec import Signal
from potstill.cache.origin import Identity, identity_of_model, save_head
from potstill.config import TeacherConfig
from potstill.config.recipe import checked
from potstill.extras import lacking
from potstill.models import load_teacher
from potstill.parallel.mesh import pick_device
from potstill.serving.answers import as_json, host_of, numeric, streamed, words
from potstill.serving.batching import BUCKETS, Job, Scorer, TooLarge, check_question
from potstill.serving.held import CONNECTION, Budget, Busy, Clients, Hold
from potstill.serving.options import JSON, READING, ServeOptions, check_limits, listen, token_of
from potstill.serving.protocol import (
    HEADER_BYTES,
    HEADERS,
    PROTOCOL,
    SERVICE,
    TEMPLATES,
    TOKENIZER_FILES,
    Question,
    read_question,
    write_answer,
)
from potstill.types import PotstillError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

SHUTDOWN_SECONDS = 30  # for what is under way when the server is told to end
DOCUMENT_BYTES = 1024  # that a document takes besides its arrays


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
    from potstill.serving.guard import IDLE_SECONDS, guarded, sparsely

    token = token_of(options.token_env)
    check_limits(options)
    keys = {"model": model, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    device = pick_device(device_name)
    teacher = load_teacher(checked(TeacherConfig, keys, "MODEL"), device, "MODEL", "MODEL")
    try:
        listening = listen(options.host, options.port)
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
        http=guarded(service.clients),
        ws="none",
        proxy_headers=False,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
    )
    sparsely()
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is answered
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
        listening.close()
        scorer.close()


class Service:
    """What the addresses of the server do."""

    def __init__(self, scorer: Scorer, identity: Identity, token: str | None, options: ServeOptions) -> None:
        self.scorer, self.identity = scorer, identity
        self._token, self._version = token, options.version
        self._most_bytes = int(options.max_body_mb * 2**20)
        positions = scorer.teacher.positions
        limits = [limit for limit in (positions, options.max_tokens) if limit is not None]
        self._most_tokens = min(limits) if limits else None
        self.budget = Budget(int(options.max_memory_mb * 2**20))
        self.clients = Clients(options.max_connections, options.client_timeout)
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, own.partition(".")[0], options.host.lower()} - {""}
        self._hosts |= {name.lower().rstrip(".") for name in options.allowed_hosts}
        self._made: dict[str, asyncio.Future[Any]] = {}  # by what was asked for: the same for all
        self._answers: Counter[int] = Counter()
        self._seconds = 0.0
        self._bytes: Counter[str] = Counter()

    def refused(self, request: Request) -> Response | None:
        """The answer to who has not the token; without one, to who came under a name that is none of this server's: a page in
        somebody's browser may be made to reach it so (DNS rebinding), but has no token."""
        if self._token is None:
            name = host_of(request.headers.get("host", ""))
            if name in self._hosts or "*" in self._hosts or numeric(name):
                return None
            return words(
                421,
                f"this server does not answer to the name {name[:100]!r}: use its numeric address, or start it with "
                "--allowed-host and that name, or with --token-env",
            )
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        what = "this is not it" if given else "none was sent"
        return words(401, f"this server wants a bearer token, and {what}")

    def headers(self) -> dict[str, str]:
        found = asdict(self.identity)
        return {header: str(found[part]) for part, header in HEADERS.items()}

    async def health(self, request: Request, hold: Hold) -> Response:
        if not self.scorer.alive:
            return words(500, "the thread that runs the model has ended")
        return as_json({"status": "ok"})

    async def version(self, request: Request, hold: Hold) -> Response:
        teacher = self.scorer.teacher
        head = teacher.model.get_output_embeddings().weight
        return as_json(
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

    async def tokenizer(self, request: Request, hold: Hold) -> Response:
        return await self._once("tokenizer", self._tokenizer_files, {}, "application/json")

    async def _once(
        self, name: str, make: Callable[[], bytes | mmap.mmap], headers: Mapping[str, str], media_type: str
    ) -> Response:
        if name not in self._made:

            def forget(made: asyncio.Future[Any]) -> None:
                if made.cancelled() or made.exception() is not None:  # a disk that was full may have room by now
                    del self._made[name]

            self._made[name] = asyncio.ensure_future(asyncio.to_thread(make))
            self._made[name].add_done_callback(forget)
        try:
            content = await asyncio.shield(self._made[name])
        except PotstillError as error:
            return words(422, str(error))
        except (OSError, SafetensorError) as error:
            return words(503, f"the {name} cannot be written to a temporary file ({error})", {"retry-after": "1"})
        return streamed([memoryview(content)], headers, media_type)

    def _tokenizer_files(self) -> bytes:
        tokenizer = self.scorer.teacher.tokenizer
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            there = [Path(folder) / name for name in TOKENIZER_FILES]
            files = {path.name: path.read_text(encoding="utf-8") for path in there if path.exists()}
        if isinstance(tokenizer.chat_template, dict):  # which are saved in a folder of their own
            files[TEMPLATES] = json.dumps(tokenizer.chat_template)
        return json.dumps(files).encode()

    async def head(self, request: Request, hold: Hold) -> Response:
        return await self._once("head", self._head, self.headers(), "application/octet-stream")

    def _head(self) -> mmap.mmap:
        """As a file that is not in memory and has no name: it may be as large as all answers together."""
        teacher = self.scorer.teacher
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "head.safetensors"
            save_head(teacher.at_rows(torch.empty(0), teacher.vocabulary), path)
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    async def score(self, request: Request, hold: Hold) -> Response:
        begin = time.perf_counter()
        try:
            answer = await self._scored(request, await self._question(request, hold), hold)
        except (ValueError, PotstillError) as error:
            return words(400, str(error))
        except TooLarge as error:
            return words(413, str(error))
        except Busy as error:
            return words(503, str(error), {"retry-after": "1"})
        self._seconds += time.perf_counter() - begin
        return answer

    async def _question(self, request: Request, hold: Hold) -> Question:
        """As much of the budget is held as the question and its answer take, before anything is computed."""
        body = await self._body(request, hold)
        hold.set(READING * len(body) + JSON * min(len(body), HEADER_BYTES, int.from_bytes(body[:8], "little")))
        # On a thread: a large body would hold up all others.
        question = await asyncio.to_thread(read_question, body)
        check_question(question, self.scorer.teacher, self._most_tokens, self.scorer.most_bytes)
        hold.set(len(body) + DOCUMENT_BYTES * len(question.examples) + question.answer_bytes)
        return question

    async def _body(self, request: Request, hold: Hold) -> bytes:
        most, parts, size = self._most_bytes, [], 0
        large = f"the request is larger than {most / 2**20:.3g} MB, the most this server takes (--max-body-mb)"
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > most:
            raise TooLarge(large)
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLarge(large)
            hold.set(READING * size)
            parts.append(part)
        self._bytes["in"] += size
        return b"".join(parts)

    async def _scored(self, request: Request, question: Question, hold: Hold) -> Response:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Signal | Exception] = loop.create_future()

        def settle(found: Signal | Exception) -> None:
            if not done.done():
                done.set_result(found)

        def answer(found: Signal | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all who waited
                loop.call_soon_threadsafe(settle, found)

        job = Job(question, answer)
        self.scorer.submit(job)
        gone = asyncio.ensure_future(_disconnected(request))
        both: set[asyncio.Future[Any]] = {done, gone}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when this handler is cancelled, as the server ends
            gone.cancel()
            if not done.done():
                self.scorer.drop(job)
        if not done.done():
            return words(499, "the client has gone")
        found = done.result()
        if isinstance(found, PotstillError):
            return words(422, str(found))
        if isinstance(found, Exception):
            return words(500, f"scoring failed ({type(found).__name__}: {found})")
        parts = write_answer(found)
        self._bytes["out"] += sum(map(len, parts))
        return streamed(parts, self.headers(), left=hold.shrink)

    async def metrics(self, request: Request, hold: Hold) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(self._metrics(), media_type="text/plain; version=0.0.4")

    def counted(self, code: int) -> None:
        self._answers[code] += 1

    def _metrics(self) -> str:
        counts = self.scorer.counts
        lines: list[str] = []

        def add(name: str, kind: str, what: str, *values: tuple[str, float]) -> None:
            lines.extend([f"# HELP potstill_{name} {what}", f"# TYPE potstill_{name} {kind}"])
            lines.extend(f"potstill_{name}{label} {value:.15g}" for label, value in values)

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
        add("held_bytes", "gauge", "of requests and answers, of --max-memory-mb", ("", self.budget.held))
        add("connections", "gauge", "clients that are connected", ("", self.clients.now))
        cut = [(f'{{why="{why}"}}', float(n)) for why, n in sorted(self.clients.cut_off.items())]
        add("clients_cut_off_total", "counter", "connections that ended before their time", *cut)
        add("body_bytes_total", "counter", "bytes of bodies", *((f'{{way="{k}"}}', v) for k, v in self._bytes.items()))
        return "\n".join(lines) + "\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Endpoint:
    """What one address does. What its request holds of the budget is given back as the answer is written."""

    def __init__(
        self, service: Service, handler: Callable[[Request, Hold], Awaitable[Response]], *, free: bool = False
    ) -> None:
        self._service, self._handler, self._free = service, handler, free

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import ClientDisconnect, Request

        request = Request(scope, receive)
        with Hold(self._service.budget, scope.get("state", {}).get(CONNECTION)) as hold:
            answer = None if self._free else self._service.refused(request)
            try:
                answer = answer or await self._handler(request, hold)
                self._service.counted(answer.status_code)
                await answer(scope, receive, send)
            except ClientDisconnect:  # its connection has told of it
                self._service.counted(499)


def application(service: Service, ready: Callable[[], None] = lambda: None) -> Starlette:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        service.counted(error.status_code)
        there = ", ".join(f"{'POST' if route.path == '/score' else 'GET'} {route.path}" for route in routes)
        return words(error.status_code, f"{request.method} {request.url.path}: {error.detail}; there is {there}")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ready()
        yield

    routes = [
        Route("/health", Endpoint(service, service.health, free=True), methods=["GET"]),
        Route("/version", Endpoint(service, service.version), methods=["GET"]),
        Route("/metrics", Endpoint(service, service.metrics), methods=["GET"]),
        Route("/tokenizer", Endpoint(service, service.tokenizer), methods=["GET"]),
        Route("/head", Endpoint(service, service.head), methods=["GET"]),
        Route("/score", Endpoint(service, service.score), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: elsewhere})
