"""`potstill serve`: a teacher that scores token sequences for whoever asks over HTTP. docs/remote.md."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import mmap
import resource
import signal
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from potstill.cache.origin import Identity, identity_of_model, save_head
from potstill.config import TeacherConfig
from potstill.config.recipe import checked
from potstill.extras import missing_extra
from potstill.http_client import token_from
from potstill.models import load_teacher
from potstill.parallel.mesh import pick_device
from potstill.serving import protocol
from potstill.serving.batching import BUCKETS, Busy, Job, Scorer, TooLarge, check_question
from potstill.types import PotstillError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from potstill.serving.connections import CONNECTION, IDLE_SECONDS, Budget, Clients, Hold, guarded, log_sparsely
except ImportError as error:
    raise missing_extra("potstill serve", "serve") from error

SHUTDOWN_SECONDS = 30  # for what is under way when the server is told to end
READING = 4  # times its size that a request's body takes, until it is read
HEADER = 24  # times its size that its header does
DOCUMENT_BYTES = 1024  # that a document takes besides its arrays
CODES = {ValueError: 400, PotstillError: 400, TooLarge: 413, Busy: 503}  # of a question that is not answered
PIECE = 256 * 2**10  # bytes of an answer that are handed to its connection at once
OTHER_FILES = 128  # that a process has open besides its connections


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
    max_memory_mb: float = 2048.0
    max_connections: int = 512
    client_timeout: float = 30.0
    allowed_hosts: Sequence[str] = ()

    def check(self) -> None:
        """That one request has room, and that there can be so many connections."""
        header = HEADER * min(self.max_body_mb, protocol.HEADER_BYTES / 2**20)
        needed = READING * self.max_body_mb + header + self.max_answer_mb
        if self.max_memory_mb < needed:
            raise PotstillError(
                f"--max-memory-mb {self.max_memory_mb:g}: one request of --max-body-mb {self.max_body_mb:g} and its answer "
                f"of --max-answer-mb {self.max_answer_mb:g} take up to {needed:g}: give that, or smaller ones"
            )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = self.max_connections + OTHER_FILES
        if soft != resource.RLIM_INFINITY and soft < files:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            except (ValueError, OSError) as error:
                raise PotstillError(
                    f"--max-connections {self.max_connections}: a process may have {hard} files open here (ulimit -n): give "
                    f"{max(1, hard - OTHER_FILES)} or fewer"
                ) from error

    def listen(self) -> socket.socket:
        """On IPv4 where a name has both, as its clients expect."""
        try:
            found = socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
            return socket.create_server(address, family=family, backlog=256)
        except OSError as error:
            raise PotstillError(f"cannot listen on {self.host}:{self.port} ({error.strerror or error})") from error


def serve(
    model: str, options: ServeOptions, *, dtype: str, device_name: str, revision: str | None, trust_remote_code: bool
) -> None:
    """Load the model and answer until a signal ends it."""
    token = token_from(options.token_env, "--token-env")
    options.check()
    keys = {"model": model, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    device = pick_device(device_name)
    teacher = load_teacher(checked(TeacherConfig, keys, "MODEL"), device, "MODEL", "MODEL")
    listening = options.listen()
    batch_tokens = options.batch_tokens or (4096 if device.type == "cpu" else 16384)
    scorer = Scorer(teacher, batch_tokens, int(options.max_answer_mb * 2**20))
    service = Service(scorer, identity_of_model(teacher, model), token, options)
    host = f"[{options.host}]" if ":" in options.host else options.host
    ready = (
        f"ready: http://{host}:{listening.getsockname()[1]} serves {model} (weights {service.identity.weights[:12]}, "
        f"{len(teacher.tokenizer):,} ids, {service.identity.dtype})"
    )
    config = uvicorn.Config(
        application(service, lambda: Console(soft_wrap=True).print(ready, highlight=False, markup=False)),
        http=guarded(service.clients),
        ws="none",
        proxy_headers=False,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
    )
    log_sparsely()
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
        self._token, self._options = token, options
        self._most_bytes = int(options.max_body_mb * 2**20)
        limits = [limit for limit in (scorer.teacher.positions, options.max_tokens) if limit is not None]
        self._most_tokens = min(limits, default=None)
        self.budget = Budget(int(options.max_memory_mb * 2**20))
        self.clients = Clients(options.max_connections, options.client_timeout)
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, own.partition(".")[0], options.host.lower()} - {""}
        self._hosts |= {name.lower().rstrip(".") for name in options.allowed_hosts}
        self._headers = {header: str(asdict(identity)[part]) for part, header in protocol.HEADERS.items()}
        self._made: dict[str, bytes | mmap.mmap] = {}  # by what was asked for: the same for all
        self._making = asyncio.Lock()
        self.answers: Counter[str] = Counter()  # by status code
        self._seconds = 0.0
        self._bytes: Counter[str] = Counter()

    def refused(self, request: Request) -> Response | None:
        """The answer to who does not have the token; without a token, to who came under a name that is none of this server's:
        a page in somebody's browser may be made to reach it so (DNS rebinding), but has no token."""
        if self._token is None:
            name = _host_of(request.headers.get("host", ""))
            if name in self._hosts or "*" in self._hosts or _numeric(name):
                return None
            return _error(
                421,
                f"this server does not answer to the name {name[:100]!r}: use its numeric address, or start it with "
                "--allowed-host and that name, or with --token-env",
            )
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return _error(401, f"this server wants a bearer token, and {'this is not it' if given else 'none was sent'}")

    async def health(self, request: Request, hold: Hold) -> Response:
        gone = _error(500, "the thread that runs the model has ended")
        return JSONResponse({"status": "ok"}) if self.scorer.alive else gone

    async def version(self, request: Request, hold: Hold) -> Response:
        teacher = self.scorer.teacher
        rows, width = teacher.model.get_output_embeddings().weight.shape
        found = {"service": protocol.SERVICE, "protocol": protocol.PROTOCOL, "potstill": self._options.version}
        found |= {**asdict(self.identity), "vocabulary": teacher.vocabulary, "rows": rows, "width": width}
        found |= {"positions": self._most_tokens, "max_body_bytes": self._most_bytes}
        return JSONResponse({**found, "max_answer_bytes": self.scorer.most_bytes})

    async def tokenizer(self, request: Request, hold: Hold) -> Response:
        return await self._once("tokenizer", self._tokenizer_files, {"content-type": "application/json"})

    async def head(self, request: Request, hold: Hold) -> Response:
        return await self._once("head", self._head, self._headers)

    async def _once(self, name: str, make: Callable[[], bytes | mmap.mmap], headers: Mapping[str, str]) -> Response:
        try:
            async with self._making:
                if name not in self._made:
                    self._made[name] = await asyncio.to_thread(make)
        except PotstillError as error:
            return _error(422, str(error))
        except (OSError, SafetensorError) as error:  # a disk that is full may have room later
            return _error(503, f"the {name} cannot be written to a temporary file ({error})")
        return streamed([memoryview(self._made[name])], headers)

    def _tokenizer_files(self) -> bytes:
        tokenizer = self.scorer.teacher.tokenizer
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            there = [Path(folder) / name for name in protocol.TOKENIZER_FILES]
            files = {path.name: path.read_text(encoding="utf-8") for path in there if path.exists()}
        if isinstance(tokenizer.chat_template, dict):  # which are saved in a folder of their own
            files[protocol.TEMPLATES] = json.dumps(tokenizer.chat_template)
        return json.dumps(files).encode()

    def _head(self) -> mmap.mmap:
        """As a file that is not in memory and has no name: it may be as large as all answers together."""
        teacher = self.scorer.teacher
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "head.safetensors"
            save_head(teacher.output_head(teacher.vocabulary), path)
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    async def score(self, request: Request, hold: Hold) -> Response:
        begin = time.perf_counter()
        try:
            answer = await self._scored(request, await self._question(request, hold), hold)
        except tuple(CODES) as error:
            return _error(next(code for kind, code in CODES.items() if isinstance(error, kind)), str(error))
        self._seconds += time.perf_counter() - begin
        return answer

    async def _question(self, request: Request, hold: Hold) -> protocol.Question:
        """As much of the budget is held as the question and its answer take, before anything is computed."""
        body = await self._body(request, hold)
        header = min(len(body), protocol.HEADER_BYTES, int.from_bytes(body[:8], "little"))
        hold.set(READING * len(body) + HEADER * header)
        # On a thread: a large body would hold up all others.
        question = await asyncio.to_thread(protocol.read_question, body)
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

    async def _scored(self, request: Request, question: protocol.Question, hold: Hold) -> Response:
        job, over, loop = Job(question), asyncio.Event(), asyncio.get_running_loop()
        job.answer.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
        self.scorer.submit(job)
        gone = asyncio.ensure_future(_disconnected(request))
        gone.add_done_callback(lambda _: over.set())
        try:
            await over.wait()
        finally:  # also when this handler is canceled, as the server ends
            gone.cancel()
            self.scorer.drop(job)
        if job.answer.cancelled():
            return _error(499, "the client has gone")
        if (error := job.answer.exception()) is not None:
            failed = (500, f"scoring failed ({type(error).__name__}: {error})")
            return _error(*((422, str(error)) if isinstance(error, PotstillError) else failed))
        parts = protocol.write_answer(job.answer.result())
        self._bytes["out"] += sum(map(len, parts))
        return streamed(parts, self._headers, left=hold.shrink)

    async def metrics(self, request: Request, hold: Hold) -> Response:
        counts = self.scorer.counts
        sizes = [str(bucket) for bucket in (*BUCKETS, "+Inf")]
        passes = accumulate(counts[size] for size in sizes)
        batches = {f'_bucket{{le="{size}"}}': total for size, total in zip(sizes, passes, strict=True)}
        batches |= {"_sum": counts["documents"], "_count": counts["passes"]}
        table: list[tuple[str, str, str, Mapping[str, float] | float]] = [
            ("requests_total", "counter", "answers by status code", _labels("code", self.answers)),
            ("request_seconds_total", "counter", "time from a request of /score to its answer", self._seconds),
            ("documents_total", "counter", "documents scored", counts["documents"]),
            ("tokens_total", "counter", "tokens scored", counts["tokens"]),
            ("padding_tokens_total", "counter", "padding that was forwarded with them", counts["padding"]),
            ("forward_seconds_total", "counter", "time of forward passes and of their results", self.scorer.seconds),
            ("batch_documents", "histogram", "documents per forward pass", batches),
            ("waiting_requests", "gauge", "requests that wait for the model", self.scorer.waiting),
            ("held_bytes", "gauge", "of requests and answers, of --max-memory-mb", self.budget.held),
            ("connections", "gauge", "clients that are connected", self.clients.now),
            ("clients_cut_off_total", "counter", "connections that ended early", _labels("why", self.clients.cut_off)),
            ("body_bytes_total", "counter", "bytes of bodies", _labels("way", self._bytes)),
        ]
        lines: list[str] = []
        for name, kind, what, values in table:
            lines += [f"# HELP potstill_{name} {what}", f"# TYPE potstill_{name} {kind}"]
            found = values if isinstance(values, Mapping) else {"": values}
            lines += [f"potstill_{name}{label} {value:.15g}" for label, value in found.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _labels(name: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{name}="{value}"}}': count for value, count in sorted(counts.items())}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _host_of(given: str) -> str:
    """Of a Host header, without the port."""
    name = given.partition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
    return name.lower().rstrip(".")


def _numeric(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _error(code: int, text: str) -> Response:
    return JSONResponse({"error": text}, code, {"retry-after": "1"} if code == 503 else None)


def streamed(
    parts: Sequence[memoryview], headers: Mapping[str, str], left: Callable[[int], None] = lambda size: None
) -> Response:
    """Handed over piece by piece, each when the one before is on its way: what a client has not read is not copied. A part that
    is on its way is let go of; `left` is told how many bytes the others have."""

    async def pieces() -> AsyncIterator[memoryview]:
        while waiting:
            left(sum(map(len, waiting)))
            for at in range(0, len(waiting[0]), PIECE):
                yield waiting[0][at : at + PIECE]
            waiting.popleft()

    waiting = deque(parts)
    length = {"content-type": "application/octet-stream", "content-length": str(sum(map(len, waiting)))}
    del parts
    return StreamingResponse(pieces(), headers={**length, **headers})


class Endpoint:
    """What one address does. What its request holds of the budget is given back as the answer is written."""

    def __init__(self, service: Service, handler: Callable[[Request, Hold], Awaitable[Response]]) -> None:
        self._service, self._handler = service, handler
        self._free = handler == service.health

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)

        async def counted(message: Any) -> None:
            hold.sent(len(message.get("body", b"")))
            await send(message)

        with Hold(self._service.budget, scope.get("state", {}).get(CONNECTION)) as hold:
            answer = None if self._free else self._service.refused(request)
            try:
                answer = answer or await self._handler(request, hold)
                self._service.answers[str(answer.status_code)] += 1
                await answer(scope, receive, counted)
            except ClientDisconnect:  # its connection has told of it
                self._service.answers["499"] += 1


def application(service: Service, ready: Callable[[], None] = lambda: None) -> Starlette:
    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        service.answers[str(error.status_code)] += 1
        there = ", ".join(f"{'POST' if route.path == '/score' else 'GET'} {route.path}" for route in routes)
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}; there is {there}")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ready()
        yield

    gets = (service.health, service.version, service.metrics, service.tokenizer, service.head)
    routes = [Route(f"/{one.__name__}", Endpoint(service, one), methods=["GET"]) for one in gets]
    routes.append(Route("/score", Endpoint(service, service.score), methods=["POST"]))
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: elsewhere})
