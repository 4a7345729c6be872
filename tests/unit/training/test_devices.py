"""What a GPU would trip over, without one: tensors on the wrong device, and hidden waits of the host for the device, among
them copies from ordinary memory and indices that are on the host."""

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
from torch.utils._pytree import tree_leaves

from potstill.config import CrossTokenizerConfig, LossConfig, Recipe, SamplingConfig, StudentConfig
from potstill.data import Encoder, PreparedStep
from potstill.evals.fidelity import _binned
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel, load_student, segments
from potstill.objective.student_loss import StudentLoss
from potstill.rollouts.sampling import draw, drawn_from
from potstill.signals.compute import draws
from potstill.teachers.cross_tokenizer import cross_tokenizer_view
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.protocols import Reading, Signal, SignalSource
from potstill.teachers.reading import TeacherReader
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.stored import StoredSignal
from potstill.teachers.teacher import Teacher
from potstill.training import step
from potstill.training.metrics import Stopwatch
from potstill.training.optimizer import make_optimizers
from potstill.training.run import Run
from potstill.training.setup import Parts
from potstill.transfer import exact, to_device
from potstill.types import Example, SampledTarget, StepBatch, TopKTarget

CROSS = ("prefix_marginal", "common_vocab", "projection", "span_likelihood", "uld")

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
        "#define GUARD(D) static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::D> guard_##D; \\\n"
        "static c10::impl::DeviceGuardImplRegistrar registrar_##D(c10::DeviceType::D, &guard_##D);\n"
        "GUARD(CUDA) GUARD(MPS)\n"
    )
    paths = ["-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib")]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", *paths, "guard.cpp", "-lc10", "-o", "guard.so"]
    subprocess.run(command, cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))
    return torch.device("cuda", 0)


class DeviceTraffic(TorchDispatchMode):
    """What goes between host and device. Memory that was pinned is known by `pin_memory`, which is made to tell."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.waits, self.uploads, self._pinned = [], [], []
        monkeypatch.setattr(torch.Tensor, "pin_memory", self._pin)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is each for each in self._pinned))

    @property
    def _pin(self):
        def pin(tensor):
            self._pinned.append(tensor.clone())
            return self._pinned[-1]

        return pin

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        packet, name = function.overloadpacket, str(function)
        tensors = [each for each in tree_leaves([args, kwargs]) if isinstance(each, torch.Tensor)]
        kinds = {each.device.type for each in tensors if each.dim()}
        if packet in WAITS and kinds == {"cuda"} and kwargs.get("output_size") is None:
            self.waits.append(name)
        elif packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[0] if packet is torch.ops.aten._to_copy else args[1]
            self._copied(name, source, out, kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        elif kinds == {"cpu", "cuda"} and function.namespace != "potstill":  # which reads what was there
            self.waits.append(f"{name} with {[(each.device.type, list(each.shape)) for each in tensors]}")
        elif packet is torch.ops.aten.index and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.waits.append(f"{name} with a mask")
        return out

    def _copied(self, name, source, out, non_blocking):
        way = source.device.type, out.device.type
        if way == ("cpu", "cuda"):
            self.uploads.append(list(source.shape))
            if not (non_blocking and any(source is each for each in self._pinned)):
                self.waits.append(f"{name} of {list(source.shape)} that waits")
        elif way == ("cuda", "cpu"):
            self.waits.append(f"{name} of {list(source.shape)} to the host")


TEXTS = ["The people of the United States.", "unhappiness  and runs of spaces", "Peace, commerce and treaties", "2,024"]
PIECES = "shipped:tokenizers/pieces-1k"


def text_batch(student, own=False, packed=True):
    """Real text, for teachers that read it in their own tokens."""
    encode = Encoder(student.tokenizer, max_length=100, append_eos=True)
    documents = [e.example for e in encode([Example(f"{i:032x}", text) for i, text in enumerate(TEXTS)])]
    if own:
        documents = [replace(d, behaviour=np.full(len(d.ids), -7.6, np.float32)) for d in documents]
    return batch_of(documents[:2], *documents[2:]) if packed else batch_of(*documents)


class StoredTexts(SignalSource):
    """As a cache of some kind is a source: what it says is on the host, and comes with the prefetch thread."""

    def __init__(self, kind, reader, teacher, width):
        self._kind, self._reader, self._teacher, self._width = kind, reader, teacher, width

    def read(self, batch, compute):
        return Reading(batch.examples if self._reader is None else self._reader(batch.examples))

    def prepare(self, reading, asked):
        return [self._of(len(one.place)) for one in asked]

    def head(self, device):
        """That of a cache reaches the device once in a run."""
        return self._teacher.output_head(self._width)

    def _of(self, count):
        if self._kind == "hidden":
            return Signal(hidden=torch.zeros(count, LLAMA["hidden_size"] if self._reader else 48))
        ids = (
            torch.stack([torch.randperm(self._width)[:8] for _ in range(count)]) if count else torch.zeros(0, 8).long()
        )
        logprobs = torch.full((count, 8), -3.0)
        target = TopKTarget(ids, logprobs, torch.full((count,), -0.5), self._width)
        if self._kind == "sampled":
            target = SampledTarget(ids, torch.full((count, 8), 0.125), torch.ones(count), self._width)
        return Signal(target, logprobs[:, 0].contiguous())

    signal = StoredSignal.signal


def opened(kind, method, student, teacher):
    """A teacher, live or as a cache of some kind is one, with the student's tokenizer (no method) or another."""
    reader, view, width = None, SameTokenizerView(), 2048
    if method is not None:
        config = CrossTokenizerConfig(method=method)
        view, width = cross_tokenizer_view(student, teacher.tokenizer, teacher.vocabulary, config, 1.0)
        reader = TeacherReader(teacher.tokenizer, teacher.positions, {})
    live = [reader] if reader else []
    source = LiveModel(teacher, width, *live) if kind == "live" else StoredTexts(kind, reader, teacher, width)
    return Teacher(source, view, "teacher")


SOURCES = ("live", "top-k", "sampled", "hidden")
WHOLE_STEPS = [
    ("live", None, False, "muon"),
    ("live", None, True, "adamw"),  # on-policy, by the tokens that were drawn
    # Off-policy, and on-policy by the divergence; draws do not serve a teacher with another tokenizer.
    *((kind, None, own, "adamw") for kind in SOURCES for own in (False, "text")),
    *((kind, method, False, "adamw") for kind in SOURCES for method in CROSS if kind != "sampled"),
    *((kind, "prefix_marginal", "text", "adamw") for kind in SOURCES if kind != "sampled"),
]


@pytest.mark.parametrize(
    ("packed", "kind", "method", "own", "optimizer"),
    [
        (packed, *cell)
        for n, cell in enumerate(WHOLE_STEPS)
        for packed in (True, False)
        if packed == (n % 2 == 0) or n < 4
    ],
)
def test_a_step_on_fake_cuda_tensors_waits_once(fake_cuda, packed, kind, method, own, optimizer, monkeypatch):
    """Everything of a step but autograd's engine, which wants a real device: our gradients are made in the forward pass. No
    devices are mixed, no index is on the host, every copy is from pinned memory and waits for nothing; the one read of the
    metrics is all that the host waits for."""
    student, teacher = tiny(0), tiny(1, hidden_size=48)
    if method is not None:
        teacher = load_student(StudentConfig(config=LLAMA, tokenizer=PIECES), CPU, 1)
    settings = recipe(own is True, precision="bf16", optimizer={"name": optimizer})
    if own == "text" or method is not None or kind == "sampled":
        loss = {"divergence": "forward_kl", "ce_weight": 0.5}
        settings = settings.model_copy(update={"loss": LossConfig(**loss)})
    reads = []
    monkeypatch.setattr(step, "read", lambda values: reads.append(values) or [0.5] * values.shape[0])
    monkeypatch.setattr(step, "peak_memory_bytes", lambda device: 0)
    host = text_batch(student, bool(own), packed)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        there = [on_device(m, fake_cuda) for m in (student, teacher)]
    asked = opened(kind, method, *there)
    prepared = asked.prepare(host)
    with mode:
        parts = parts_of(there[0], there[1], fake_cuda, settings)
        parts = replace(parts, teachers=[asked])
        # Tables of two vocabularies reach the device once in a run.
        if method is not None:
            table = asked.view.table if method == "prefix_marginal" else asked.view.pair
            with DeviceTraffic(monkeypatch):
                table.on(fake_cuda) if method == "prefix_marginal" else table.relation(fake_cuda)

        def backward(loss):
            assert loss.device == fake_cuda and loss.requires_grad
            for p in parts.module.parameters():
                p.grad = torch.empty_like(p)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        future = Future()
        future.set_result(prepared)
        ready_step = PreparedStep(StepBatch((host,), {}, {"supervised_tokens": 1}, 0), [[future]])
        with DeviceTraffic(monkeypatch) as traffic:
            metrics = step.optimizer_step(parts, ready_step, 9, Run(Path(), total_steps=3), Stopwatch())
    assert metrics["step"] == 1
    assert [values.device for values in reads] == [fake_cuda]
    assert traffic.waits == []
    assert len(traffic.uploads) >= 6  # of the batch at least: they are seen
    assert all(p.device == fake_cuda for p in parts.module.parameters())


def test_what_the_host_would_wait_for_is_noticed(fake_cuda, monkeypatch):
    """The test above can fail."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.zeros(5, 4, device=fake_cuda)
        for number, wait in enumerate(
            (
                lambda: torch.zeros(3).to(fake_cuda, non_blocking=True),  # not pinned
                lambda: torch.zeros(3).pin_memory().to(fake_cuda),  # pinned, and it waits all the same
                lambda: there[torch.tensor([1, 2])],  # an index on the host
                lambda: there.index_put_((torch.tensor([1]),), torch.zeros(4, device=fake_cuda)),
                lambda: there.cpu(),
                lambda: torch.tensor([1.0, 2.0], device=fake_cuda),
            )
        ):
            with DeviceTraffic(monkeypatch) as traffic:
                wait()
            assert len(traffic.waits) == 1, number
        with DeviceTraffic(monkeypatch) as traffic:
            to_device(np.arange(3), fake_cuda)
            there * torch.tensor(2.0)  # a number
        assert traffic.waits == []


class NoFloat64(TorchDispatchMode):
    """As mps has it: a float64 tensor cannot be made there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.device.type == "mps":
                assert each.dtype != torch.float64, function
        return out


SAMPLINGS = [
    {},
    {"top_k": 7},
    {"min_p": 0.1},
    {"top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 7, "min_p": 0.1, "top_p": 0.9},
]


def test_no_float64_reaches_a_device_without_it(fake_cuda, monkeypatch):
    """A step, drawing text and the sums of evaluations, on fake tensors of mps."""
    mps = torch.device("mps", 0)
    settings = recipe(False)
    monkeypatch.setattr(step, "read", lambda values: [0.5] * values.shape[0])
    models = [tiny(seed) for seed in (0, 1)]
    for model in models:
        model.model.set_attn_implementation("eager")  # sdpa's choice of kernel asks for a real device
    host = text_batch(models[0])
    with FakeTensorMode(allow_non_fake_inputs=True), NoFloat64():
        parts = parts_of(*(on_device(model, mps) for model in models), mps, settings)

        def backward(loss):
            for p in parts.module.parameters():
                p.grad = torch.empty_like(p)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        steps = StepBatch((host,), {}, {"supervised_tokens": 1}, 0)
        step.optimizer_step(parts, ready(parts, steps), 9, Run(Path(), total_steps=3), Stopwatch())
        random = to_device(np.random.default_rng(0).random((4, 3)), mps)
        for keys in SAMPLINGS:
            logits = torch.zeros(4, 40, device=mps)
            ids, logprobs = draw(logits, random[:, 0], SamplingConfig(**keys))
            assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32), keys
            drawn_from(logits, SamplingConfig(**keys))
        draws(torch.zeros(4, 300, device=mps), random, 2.0)
        column = torch.zeros(4, device=mps)
        assert _binned(column, column).dtype == torch.float32
        assert exact(column).dtype == torch.float32
        with pytest.raises(AssertionError):
            column.double()


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
    return LanguageModel(model, language_model.tokenizer, language_model.head, language_model.attention)


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
    unnoted = torch.Tensor.tolist
    monkeypatch.setattr(segments, "_read", lambda bounds: unnoted(bounds))  # it never was on a device, and asserts it
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
