"""Batches on their way to a device: by which streams and threads, seen on a stand-in for torch.cuda."""

import threading
from contextlib import contextmanager

import pytest
import torch
from tiny import CPU, batch_of, examples

from potstill import transfer
from potstill.data.upload import Uploads
from potstill.parallel.mesh import pick_device
from potstill.types import Batch, Rows, TopKTarget

CUDA = torch.device("cuda", 1)


class Cuda:
    """Notes who did what on which stream."""

    def __init__(self):
        self.noted, self.current = [], "main"

    def Stream(self, device):
        return _Stream(self, "side")

    def current_stream(self, device):
        return _Stream(self, self.current)

    def set_device(self, device):
        self.noted.append(("set_device", device, threading.current_thread().name))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class _Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def record_event(self):
        self.cuda.noted.append(("event", self.name))
        return f"event of {self.name}"

    def wait_event(self, event):
        self.cuda.noted.append(("wait", self.name, event))


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    for name in ("Stream", "current_stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_a_batch_is_copied_on_a_stream_of_its_own(cuda, monkeypatch):
    """The stream that trains waits for the copy; its memory is kept until that stream has used it."""
    host = batch_of(*[[e] for e in examples([9, 5])])
    there = Batch(**{**vars(host), "rows": Rows(**vars(host.rows))})
    monkeypatch.setattr(Batch, "to", lambda batch, device: cuda.noted.append(("copy", cuda.current)) or there)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream.name)))
    arriving = Uploads(CUDA).begin(host)
    assert cuda.noted == [("copy", "side"), ("event", "side")]
    assert arriving() is there
    assert cuda.noted[2:] == [("wait", "main", "event of side")]
    assert {name for _, name in recorded} == {"main"} and len(recorded) == 6  # three of the batch, three of its rows


def test_on_a_cpu_there_is_no_stream():
    host = batch_of(*[[e] for e in examples([9, 5])])
    uploads = Uploads(CPU)
    assert torch.equal(uploads.begin(host)().input_ids, host.input_ids)
    assert uploads.pinned(host) is host


def test_what_teachers_made_ready_is_pinned_on_their_thread(cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    target = TopKTarget(torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2))
    found = Uploads(CUDA).pinned(target)
    assert (found.ids == 1).all() and (found.logprobs == 1).all() and (found.tail == 1).all()
    assert found.tail_samples is None


def test_work_that_is_handed_over_begins_after_what_was_asked_before(cuda):
    beside = transfer.handed_over(CUDA)
    assert cuda.noted == [("event", "main")]
    seen = []

    def work():
        with beside:
            seen.append(cuda.current)

    thread = threading.Thread(target=work, name="rollouts")
    thread.start()
    thread.join()
    assert seen == ["side"]
    assert cuda.noted[1:] == [("set_device", CUDA, "rollouts"), ("wait", "side", "event of main")]


def test_the_chosen_device_is_this_threads(cuda, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, device: type("Made", (), {"device": torch.device(device)}))
    assert pick_device("cuda:1") == CUDA
    assert cuda.noted == [("set_device", CUDA, "MainThread")]
    assert pick_device("cpu") == CPU
    assert len(cuda.noted) == 1
