"""What a GPU would trip over, without one: tensors on the wrong device, and hidden waits of the host for the device."""

import copy
import ctypes
import functools
import shutil
import subprocess
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, LLAMA, TOKENIZER, batch_of, examples, tiny
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from potstill.config import Recipe
from potstill.data import PreparedStep
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel
from potstill.teachers.live import live_teacher
from potstill.training import step
from potstill.training.metrics import Stopwatch
from potstill.training.optimizer import make_optimizers
from potstill.training.run import Run
from potstill.training.setup import Parts
from potstill.training.student import StudentLoss
from potstill.types import StepBatch

# Operators that make the host wait: they read a value, or their output's shape depends on one.
WAITS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_dim,
    torch.ops.aten.repeat_interleave,
}


class CountWaits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        boolean_index = function.overloadpacket is torch.ops.aten.index and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if function.overloadpacket in WAITS or boolean_index:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def ready(parts, steps):
    def prepared(teacher, batch):
        future = Future()
        future.set_result(teacher.prepare(batch))
        return future

    return PreparedStep(steps, [[prepared(teacher, batch) for teacher in parts.teachers] for batch in steps.batches])


OWN = {"divergence": "policy_gradient_kl", "discount": 0.9, "ce_weight": 0.5}


def recipe(own=False, **train):
    """`own`: on text that the student wrote, by its own tokens."""
    return Recipe.model_validate(
        {
            "student": {"config": LLAMA, "tokenizer": TOKENIZER},
            "teachers": [{"model": "unused"}],
            "data": {"sources": [{"files": "unused"}]},
            "rollouts": {"on_policy_fraction": float(own), "sampling": {"max_new_tokens": 16}},
            "loss": OWN if own else {"divergence": "jsd", "temperature": 2.0, "ce_weight": 0.5},
            "train": {"steps": 3, "batch_size": 4, **train},
        }
    )


def parts_of(student, teacher, device, settings):
    module = StudentLoss(student).train()
    optimizers = make_optimizers(student.model, student.model.get_output_embeddings(), settings.train.optimizer)
    live = live_teacher(teacher, 2048, "teacher")
    return Parts(settings, device, student, module, [live], optimizers, None, None)


def window(packed, micro_batches, own=False):
    documents = examples([9, 17, 4, 12])
    if own:
        documents = [replace(d, behaviour=np.full(len(d.ids), -7.6, np.float32)) for d in documents]
    rows = [[documents[0], documents[1]], [documents[2], documents[3]]] if packed else [[d] for d in documents]
    size = len(rows) // micro_batches
    batches = tuple(batch_of(*rows[i : i + size]) for i in range(0, len(rows), size))
    return StepBatch(batches, {}, {"supervised_tokens": 1}, 0)


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory):
    """A build of torch without CUDA refuses to index even a fake cuda tensor, for want of a device guard; a guard that does
    nothing is what a CUDA build without a GPU uses under FakeTensorMode. Six lines of C++ register it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the device guard with")
    folder, torch_folder = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(
        "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
        "static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;\n"
        "static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);\n"
    )
    paths = ["-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib")]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", *paths, "guard.cpp", "-lc10", "-o", "guard.so"]
    subprocess.run(command, cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("optimizer", "own"), [("adamw", False), ("muon", False), ("adamw", True)])
def test_a_step_on_fake_cuda_tensors_mixes_no_devices(fake_cuda, packed, optimizer, own, monkeypatch):
    """Everything of a step but autograd's engine, which wants a real device: our gradients are made in the forward pass."""
    student, teacher = tiny(0), tiny(1, hidden_size=48)
    settings = recipe(own, precision="bf16", optimizer={"name": optimizer})
    reads = []
    monkeypatch.setattr(step, "read", lambda values: reads.append(values) or [0.5] * values.shape[0])
    monkeypatch.setattr(step, "peak_memory_bytes", lambda device: 0)
    with FakeTensorMode() as mode:
        parts = parts_of(*(on_device(m, fake_cuda) for m in (student, teacher)), fake_cuda, settings)

        def backward(loss):
            assert loss.device == fake_cuda and loss.requires_grad
            for p in parts.module.parameters():
                p.grad = torch.empty_like(p)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        batches = tuple(fake_batch(mode, batch) for batch in window(packed, 1, own).batches)
        steps = StepBatch(batches, {}, {"supervised_tokens": 1}, 0)
        metrics = step.optimizer_step(parts, ready(parts, steps), 9, Run(Path(), total_steps=3), Stopwatch())
    assert metrics["step"] == 1
    assert reads[0].device == fake_cuda
    assert all(p.device == fake_cuda for p in parts.module.parameters())


def test_a_tensor_left_behind_is_noticed(fake_cuda):
    """The test above can fail: labels that stayed on the CPU are an error."""
    with FakeTensorMode():
        hidden, weight = torch.zeros(3, 4, device=fake_cuda), torch.zeros(9, 4, device=fake_cuda)
        with pytest.raises(RuntimeError, match="device"):
            fused_linear_kd(hidden, weight, None, labels=torch.zeros(3, dtype=torch.int64), ce_weight=1.0)


def on_device(language_model, device):
    config = copy.deepcopy(language_model.model.config)
    config.pad_token_id = None
    with device:
        model = type(language_model.model)(config)
    return LanguageModel(model, language_model.tokenizer, language_model.head, language_model.masks)


def fake_batch(mode, batch):
    def fake(t):
        return mode.from_tensor(t)

    parts = {name: getattr(batch.rows, name) for name in ("student", "teacher", "labels", "behaviour")}
    rows = replace(batch.rows, **{name: None if t is None else fake(t) for name, t in parts.items()})
    moved = {name: fake(getattr(batch, name)) for name in ("input_ids", "position_ids", "document")}
    return replace(batch, rows=rows, **moved)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("micro_batches", "own"), [(1, False), (2, False), (2, True)])
def test_the_host_waits_once_a_step(packed, micro_batches, own, monkeypatch):
    """None per micro-batch; only the step's one batched read for the log, which is not counted here but seen."""
    settings, steps = recipe(own), window(packed, micro_batches, own)
    parts = parts_of(tiny(0), tiny(1, hidden_size=48), CPU, settings)
    reads = []
    real = step.read
    monkeypatch.setattr(step, "read", lambda values: reads.append(values.shape) or real(values))
    step.optimizer_step(parts, ready(parts, steps), 9, Run(Path(), total_steps=3), Stopwatch())
    with CountWaits() as counter:
        for method in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            note = functools.partial(noting, counter.seen, getattr(torch.Tensor, method), method)
            monkeypatch.setattr(torch.Tensor, method, functools.partialmethod(note))
        metrics = step.optimizer_step(parts, ready(parts, steps), 9, Run(Path(), step=1, total_steps=3), Stopwatch())
    assert len(reads) == 2
    assert (metrics.keys() >= {"sampling_logprob_gap", "ratio_mean", "ratio_clipped", "advantage"}) == own
    assert counter.seen == ["tolist"]  # the one read, for the log


def noting(seen, method, name, tensor, *args, **kwargs):
    seen.append(name)
    return method(tensor, *args, **kwargs)
