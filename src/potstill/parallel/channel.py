"""One rank asks another to compute for it: integers go one way, a matrix comes back, and a few requests are under way.

On one host an answer lies in shared memory and its place is sent; between hosts it is sent itself. Both ends are on the host's
memory and in groups of their own, so that no other collective waits for them.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from potstill.parallel.watch import PeerLost, RanksLost, is_loss
from potstill.types import PotstillError

AHEAD = 2  # answers that are computed, or wait to be taken, at a time
HELLO, STOP = -1, -2  # kinds of requests besides those of whoever answers
GIVEN, FAILED, REFUSED = range(3)  # kinds of answers; what is refused, the user can put right
SENT = -1  # in place of a room: the answer is sent itself
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
IDLE = timedelta(
    days=365
)  # a rank that answers may have nothing to do for long; one that is lost closes the connection
STARTING = 7200.0  # seconds that a model may take to be loaded
LEAVING = 300.0  # that the others have to end in once one that asked ended with an error
LAST_WORDS = 10.0  # that the other end has to take them in, where ranks are lost, it may be among them
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Channel:
    """Two groups of the two ranks: threads do not share one."""

    peer: int  # rank of the other end
    requests: dist.ProcessGroup
    answers: dist.ProcessGroup

    @classmethod
    def between(cls, asks: int, answers: int) -> Channel | None:
        """Made by every rank of the world, whether it is one of the two or not, in one order: torch names groups by how many
        there were before. None: it is not."""
        made = [dist.new_group(sorted((asks, answers)), IDLE, "gloo") for _ in range(2)]
        peer = {asks: answers, answers: asks}.get(dist.get_rank())
        return None if peer is None else cls(peer, *made)


@dataclass(eq=False)
class Request:
    what: int
    numbers: Tensor  # int64 [n]
    size: int  # bytes of the answer, if it is to lie in shared memory
    future: Future[Tensor] = field(default_factory=Future)
    sent: list[dist.Work | None] | None = None
    header: Tensor | None = None
    room: int = SENT


@dataclass
class Room:
    """Shared memory for one answer at a time. It grows by being made anew."""

    number: int
    made: int = 0
    memory: Tensor | None = None  # uint8
    path: Path | None = None  # until both ends have it


class Asker:
    """The end that asks. `seconds`: how long an answer is waited for. `whose`: what messages call the other end."""

    def __init__(self, channel: Channel, whose: str, seconds: float) -> None:
        self._channel, self._whose, self._seconds = channel, whose, seconds
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._dropped: deque[Request] = deque()
        self._under_way = 0
        self._sent: queue.Queue[Request | None] = queue.Queue()
        self._rooms: list[Room] = []
        self._free: list[Room] = []
        self._folder: Path | None = None
        self._lost: BaseException | None = None
        self._last: list[dist.Work | None] = []  # of what is sent, held until it is taken
        self._receiver = threading.Thread(target=self._receive, name="answers", daemon=True)
        self._receiver.start()
        if SHARED.is_dir():
            folder = Path(tempfile.mkdtemp(prefix="potstill-", dir=SHARED))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            shared = self.begin(HELLO, as_numbers(str(folder)), seconds=STARTING)()
            self._folder = folder if int(shared[0, 0]) else None

    def begin(self, what: int, numbers: Tensor, size: int = 0, seconds: float | None = None) -> Callable[[], Tensor]:
        """What is given back waits for the answer; called again, it asks again. `size`: the answer's bytes; 0: not known.
        `seconds`: how long it is waited for, where that is not as long as for others."""
        held = [self._queued(Request(what, numbers, size))]

        def wait() -> Tensor:
            request = held.pop() if held else self._queued(Request(what, numbers, size))
            return self._take(request, self._seconds if seconds is None else seconds)

        weakref.finalize(wait, self._drop, held)
        return wait

    def _drop(self, held: list[Request]) -> None:
        """What nobody waits for any more. Called by the garbage collector, anywhere: the next call tidies up."""
        self._dropped.extend(held)

    def _queued(self, request: Request) -> Request:
        with self._lock:
            self._tidy()
            self._waiting.append(request)
            self._send_waiting()
        return request

    def _take(self, request: Request, seconds: float) -> Tensor:
        with self._lock:
            self._tidy()
            if request.sent is None:  # before its turn: whoever waits comes first
                self._waiting.remove(request)
                self._send(request)
        try:
            return request.future.result(seconds)
        except TimeoutError:
            self._lost = PeerLost(
                f"the connection to {self._whose} timed out: no answer for {seconds:g} s", self._channel.peer
            )
            raise self._lost from None
        finally:
            with self._lock:
                self._under_way -= 1
                self._send_waiting()

    def _tidy(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if request.sent is None:
                self._waiting.remove(request)
            else:
                self._under_way -= 1

    def _send_waiting(self) -> None:
        while self._waiting and self._under_way < AHEAD:
            self._send(self._waiting.popleft())

    def _send(self, request: Request) -> None:
        self._under_way += 1
        request.sent = []
        if self._lost is not None:
            request.future.set_exception(self._lost)
            return
        room = self._room(request.size)
        made, size = (0, 0) if room is None or room.memory is None else (room.made, len(room.memory))
        request.room = SENT if room is None else room.number
        request.header = torch.tensor([request.what, len(request.numbers), request.room, made, size])
        peer, group = self._channel.peer, self._channel.requests
        try:
            request.sent = [dist.isend(part, peer, group) for part in (request.header, request.numbers) if len(part)]
        except Exception as error:  # torch raises several kinds
            request.future.set_exception(self._gone(error))
            return
        self._sent.put(request)

    def _room(self, size: int) -> Room | None:
        """One that is free and large enough; None: there is no shared memory, or not enough of it."""
        if self._folder is None or not size:
            return None
        if not self._free:
            self._rooms.append(Room(len(self._rooms)))
            self._free.append(self._rooms[-1])
        room = self._free[-1]
        if room.memory is None or len(room.memory) < size:
            size = 1 << (size - 1).bit_length()
            path = self._folder / f"{room.number}-{room.made + 1}"
            try:
                _reserve(path, size)
            except OSError:
                return None
            room.made, room.path = room.made + 1, path
            room.memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._free.pop()

    def _receive(self) -> None:
        """On a thread of its own."""
        while (request := self._sent.get()) is not None:
            try:
                found = self._received(request)
            except BaseException as error:  # raised again where the answer is waited for
                request.future.set_exception(self._lost or error)
            else:
                request.future.set_result(found)

    def _received(self, request: Request) -> Tensor:
        status = torch.zeros(5, dtype=torch.int64)
        self._recv(status)
        kind, room_number, rows, width, dtype = status.tolist()
        for work in request.sent or ():
            if work is not None:
                work.wait()
        room = None if request.room == SENT else self._rooms[request.room]
        size = rows * width * DTYPES[dtype].itemsize
        if room_number == SENT:
            data = torch.empty(size, dtype=torch.uint8)
            self._recv(data)
        else:
            assert room is not None and room.memory is not None
            data = room.memory[:size].clone()
        if room is not None:
            if room.path is not None:
                room.path.unlink(missing_ok=True)
                room.path = None
            with self._lock:
                self._free.append(room)
        if kind != GIVEN:
            raise self._said(kind, as_text(data))
        return data.view(DTYPES[dtype]).view(rows, width)

    def _said(self, kind: int, words: str) -> Exception:
        """An error of the other end. Where it lost ranks that the model lies over, it is lost itself."""
        error = (PotstillError if kind == REFUSED else RuntimeError)(words)
        return self._gone(error) if kind == FAILED and is_loss(error) else error

    def _recv(self, tensor: Tensor) -> None:
        try:
            _recv(tensor, self._channel.peer, self._channel.answers)
        except PeerLost as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> PeerLost:
        self._lost = PeerLost(f"the connection to {self._whose} is lost: {error}", self._channel.peer)
        return self._lost

    def close(self, error: BaseException | None = None) -> None:
        """Tell the other end that nothing more will be asked, and why, if it is for an error. One that does not listen is not
        waited for any longer than for an answer."""
        seconds = LAST_WORDS if isinstance(error, RanksLost) else self._seconds
        with self._lock:
            for request in self._waiting:
                request.future.cancel()
            self._waiting.clear()
            text = as_numbers("" if error is None else f"{int(isinstance(error, PotstillError))}{error}")
            with suppress(Exception):  # it may be gone
                for part in (torch.tensor([STOP, len(text), SENT, 0, 0]), text):
                    if len(part):
                        self._last.append(dist.isend(part, self._channel.peer, self._channel.requests))
                for work in self._last if self._lost is None else ():
                    assert work is not None
                    work.wait(timedelta(seconds=seconds))
        self._sent.put(None)
        self._receiver.join(seconds if self._lost is None else 0.0)  # it may wait for what will not come
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Answerer:
    """The end that answers: `serve` goes on until it is told to stop."""

    def __init__(self, channel: Channel, answer: Callable[[int, Tensor], Tensor]) -> None:
        self._channel, self._answer = channel, answer
        self._folder: Path | None = None
        self._rooms: dict[int, tuple[int, Tensor]] = {}

    def serve(self) -> Exception | None:
        """The error that ended the other end, in its words; raises where it is gone."""
        requests, peer = self._channel.requests, self._channel.peer
        while True:
            header = torch.zeros(5, dtype=torch.int64)
            _recv(header, peer, requests)
            what, length, number, made, size = header.tolist()
            numbers = torch.zeros(length, dtype=torch.int64)
            _recv(numbers, peer, requests)
            if what == STOP:
                text = as_text(numbers)
                return (PotstillError if text[0] == "1" else RuntimeError)(text[1:]) if text else None
            if what == HELLO:
                self._folder = Path(as_text(numbers))
                self._send(GIVEN, torch.tensor([[self._folder.is_dir()]], dtype=torch.uint8), SENT)
                continue
            try:
                found, kind = self._answer(what, numbers), GIVEN
            except Exception as error:  # it is the asker's
                found, kind, number = _bytes(str(error) or repr(error)), _kind(error), SENT
            self._send(kind, found, self._placed(found, number, made, size))

    def _placed(self, found: Tensor, number: int, made: int, size: int) -> int:
        """Put an answer into shared memory, if there is a room for it."""
        if number == SENT or found.nbytes > size:
            return SENT
        if self._rooms.get(number, (0,))[0] != made:
            assert self._folder is not None
            path = str(self._folder / f"{number}-{made}")
            try:
                self._rooms[number] = made, torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            except RuntimeError:  # who asked has gone, and removed it
                return SENT
        self._rooms[number][1][: found.nbytes].view(found.dtype).view(found.shape).copy_(found)
        return number

    def _send(self, kind: int, found: Tensor, room: int) -> None:
        status = torch.tensor([kind, room, *found.shape, DTYPES.index(found.dtype)])
        _send(status, self._channel.peer, self._channel.answers)
        if room == SENT:
            data = found.detach().cpu().contiguous().view(-1).view(torch.uint8)
            _send(data, self._channel.peer, self._channel.answers)


def serve_all(answerers: list[Answerer]) -> None:
    """Serve several askers at once, until each has said that it is done. What ended one is raised, but not before the others
    have ended too: they may still have to hear it from here. One that is gone ends it at once."""
    ended: queue.Queue[tuple[bool, BaseException | None]] = queue.Queue()

    def serve(one: Answerer) -> None:
        try:
            ended.put((False, one.serve()))
        except BaseException as error:  # raised again below
            ended.put((True, error))

    for one in answerers:
        threading.Thread(target=partial(serve, one), name="serve", daemon=True).start()
    first: BaseException | None = None
    for _ in answerers:
        try:
            gone, error = ended.get(timeout=None if first is None else LEAVING)
        except queue.Empty:
            break
        first = first or error
        if gone:
            break
    if first is not None:
        raise first


def _kind(error: Exception) -> int:
    return REFUSED if isinstance(error, PotstillError) else FAILED


def _send(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    if len(tensor):
        with _telling_losses(peer):
            dist.send(tensor, peer, group)


def _recv(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    if len(tensor):
        with _telling_losses(peer):
            dist.recv(tensor, peer, group)


@contextmanager
def _telling_losses(peer: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch raises several kinds
        raise PeerLost(str(error), peer) from error


def _reserve(path: Path, size: int) -> None:
    """A file with that much memory behind it: to write where there is none would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)[None]


def as_numbers(text: str) -> Tensor:
    return _bytes(text)[0].long() if text else torch.zeros(0, dtype=torch.int64)


def as_text(values: Tensor) -> str:
    return bytes(values.tolist()).decode()
