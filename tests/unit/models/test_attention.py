"""Packed documents are the same as alone, by every way of attention that runs on a CPU, in hidden states and gradients; what
is given for it is no larger than the row."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, LLAMA, TOKENIZER, tiny
from tiny_families import V, make_model
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import flex_attention as transformers_flex

from potstill.config import StudentConfig
from potstill.data import collate
from potstill.models import attention, backbone, compile_layers, hidden_states, load_student, segments
from potstill.models.attention import block_mask, block_masks, candidates, choose, first_keys, segment_lengths
from potstill.models.segments import segment_attention
from potstill.parallel.context import plain_kind
from potstill.types import Example

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "gpt2", "gpt-oss"]
ROWS = [[23, 9, 14], [31, 2], [1, 40]]  # windows are of 8


def documents(rows=ROWS, vocabulary=V, seed=0):
    random = np.random.default_rng(seed)

    def document(length):
        return Example("", "", random.integers(3, vocabulary, length).astype(np.int32), np.ones(length, np.bool_))

    return [[document(length) for length in row] for row in rows]


def states_and_gradients(model, batches, way):
    """Hidden states of all documents, one after the other, and gradients of a sum of them that weighs each differently."""
    model.zero_grad()
    states = torch.cat([hidden_states(model, batch, way)[batch.document > 0] for batch in batches])
    if not torch.is_grad_enabled():
        return {"states": states}
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    (states * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"states": states.detach()}


def assert_packed_is_alone(family, way, monkeypatch):
    monkeypatch.setattr(segments, "QUERIES", 7)
    model = make_model(family).model.eval()
    rows, plain = documents(), plain_kind(model)
    single = [collate([[one]], 0) for row in rows for one in row]
    choose(backbone(model), "own", plain)
    alone = states_and_gradients(model, single, "own")
    choose(backbone(model), way, plain)
    # Gemma's norms and softmax are computed in float32.
    near = {"rtol": 1e-3, "atol": 1e-4} if "gemma" in family else {"rtol": 1e-8, "atol": 1e-8}
    for batches in ([collate(rows, 0)], single):
        packed = states_and_gradients(model, batches, way)
        assert packed.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(packed[name], expected, **near, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("way", ["varlen", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_alone(family, way, monkeypatch):
    assert_packed_is_alone(family, way, monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mistral"])
def test_packed_is_alone_by_flex_attention(family, monkeypatch):
    """Not compiled. On a CPU it has no backward pass and no sinks, and transformers has none for GPT-2."""
    monkeypatch.setattr(
        transformers_flex.WrappedFlexAttention, "__call__", lambda self: transformers_flex.flex_attention
    )
    assert_packed_is_alone(family, "flex_attention", monkeypatch)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_the_kernel_is_given_is_right(family, monkeypatch):
    """The kernel of a GPU, with a stand-in that does what its documentation says."""
    calls = []

    def stand_in(q, k, v, bounds, keys, longest, longest_key, *, scale, window_size, enable_gqa):
        calls.append(window_size)
        assert bounds is keys and longest == longest_key == int(bounds.diff().max()) and window_size[1] == 0
        assert enable_gqa == (q.shape[1] != k.shape[1])
        window = None if window_size[0] == -1 else window_size[0] + 1
        return segment_attention(q, k, v, bounds, None, scale, window, None)

    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "_has_kernel", lambda q, v: True)
    assert_packed_is_alone(family, "varlen", monkeypatch)
    assert set(calls) == {(-1, 0)} if family == "llama" else {(7, 0)}


def naive(q, k, v, bounds, sinks, scale, window, softcap):
    """All positions against all."""
    T, H, K = len(q), q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    number = torch.bucketize(torch.arange(T), bounds[1:-1].long(), right=True)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (number[:, None] == number) & (distance >= 0) & (distance < (window or T))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(H, T, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :T], v)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads", [(4, 4, 3, 3), (6, 2, 3, 5)])
def test_segments_equal_all_against_all(heads, window, softcap, sunk, monkeypatch):
    monkeypatch.setattr(segments, "QUERIES", 4)
    H, K, D, E = heads
    generator = torch.Generator().manual_seed(1)
    shapes = [(22, H, D), (22, K, D), (22, K, E), (H,)]
    q, k, v, sinks = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    given = (q, k, v, sinks) if sunk else (q, k, v)
    bounds = torch.tensor([0, 9, 10, 14, 22], dtype=torch.int32)
    rest = (bounds, sinks if sunk else None, 0.6, window, softcap)
    ours, theirs = segment_attention(q, k, v, *rest), naive(q, k, v, *rest)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(ours, given, weights), torch.autograd.grad(theirs, given, weights), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def test_the_operator_keeps_the_rules_of_operators():
    q = torch.randn(6, 2, 3, requires_grad=True)
    bounds, sinks = torch.tensor([0, 4, 6], dtype=torch.int32), torch.randn(2, requires_grad=True)
    for sunk in (None, sinks):
        torch.library.opcheck(torch.ops.potstill.segment_attention, (q, q, q, bounds, sunk, 0.5, 3, 2.0))


def test_two_by_two_by_hand():
    """Two segments of two; the second position of each gives its keys e : 1, or with a sink of 0 e : 1 : 1."""
    q = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(4, 1, 1)
    k = torch.tensor([1.0, 0.0, 1.0, 0.0]).view(4, 1, 1)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1)
    bounds, e = torch.tensor([0, 2, 4], dtype=torch.int32), torch.e
    found = segment_attention(q, k, v, bounds, None, 1.0, None, None).flatten()
    torch.testing.assert_close(found, torch.tensor([1, (e + 10) / (e + 1), 100, (100 * e + 1000) / (e + 1)]))
    found = segment_attention(q, k, v, bounds, torch.zeros(1), 1.0, None, None).flatten()
    torch.testing.assert_close(found, torch.tensor([0.5, (e + 10) / (e + 2), 50, (100 * e + 1000) / (e + 2)]))


def test_dropout_drops_probabilities():
    q, k, v = (torch.randn(8, 2, 4) for _ in range(3))
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    torch.manual_seed(3)
    found = segment_attention(q, k, v, bounds, None, 0.5, None, None, dropout=0.4)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
    p = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    torch.manual_seed(3)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", torch.nn.functional.dropout(p, 0.4), v))


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_blocks_for_flex_attention_are_those_of_the_mask(window):
    lengths = [[200, 3, 125, 128, 7], [463], [1, 1, 300]]
    document = collate(documents(lengths), 0).document
    first = first_keys(document, window)
    ours = block_mask(document, window)
    theirs = create_block_mask(
        lambda b, h, q, k: (q >= k) & (k >= first[b, q]), len(document), None, *[document.shape[1]] * 2, device="cpu"
    )
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
    torch.testing.assert_close(ours.kv_num_blocks, theirs.kv_num_blocks)
    torch.testing.assert_close(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_a_dense_mask_by_hand():
    config = make_model("mistral").model.config
    config.sliding_window = 2
    config._attn_implementation = "sdpa"
    document = torch.tensor([[1, 1, 1, 2, 0]], dtype=torch.int32)
    rows = ["1....", "11...", ".11..", "...1.", "....1"]
    expected = torch.tensor([[each == "1" for each in row] for row in rows])
    assert torch.equal(block_masks(config, document, torch.float32)[0, 0], expected)
    part = block_masks(config, document, torch.float32, torch.tensor([1, 4]))
    assert torch.equal(part[0, 0], expected[[1, 4]])


def test_where_segments_begin_is_known_when_a_batch_is_made():
    batch = collate(documents(), 0)
    assert batch.lengths == segment_lengths(batch.document) == (23, 9, 14, 31, 2, 13, 1, 40, 5)
    assert batch.bounds.tolist() == [0, 23, 32, 46, 77, 79, 92, 93, 133, 138]
    bounds, on_host, longest = attention.segments(replace(batch, lengths=(), bounds=None))
    assert torch.equal(bounds, batch.bounds) and torch.equal(on_host, bounds) and longest == 40
    bounds, _, longest = attention.segments(collate(documents([[5], [3]]), 0))
    assert bounds.tolist() == [0, 5, 10] and longest == 5


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and not function.is_view:
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return out


def largest(language_model, way, length):
    """Of hidden states of one row, with windows in one of two layers."""
    batch = collate(documents([[length // 4] * 4]), 0)
    with Largest() as made:
        hidden_states(language_model.model, batch, way).sum().backward()
    return made.bytes


def test_memory_is_linear_in_the_length_without_a_mask():
    language_model = make_model("gemma3", max_position_embeddings=4096)
    model = language_model.model
    # A row's own activations: 48 numbers of 8 bytes at each position. No tensor is larger.
    assert [largest(language_model, "varlen", length) for length in (1024, 4096)] == [1024 * 48 * 8, 4096 * 48 * 8]
    choose(backbone(model), "dense", "sdpa")
    assert largest(language_model, "dense", 4096) >= 4096 * 4096


def test_a_gpu_in_16_bits_is_asked_for_its_kernel_and_nothing_else(monkeypatch):
    """On fake tensors: no mask, no segment by segment, no wait."""
    language_model = make_model("mistral")
    batch = collate(documents(), 0)
    called = []
    real = attention.varlen_attn
    monkeypatch.setattr(attention, "_has_kernel", lambda q, v: True)
    monkeypatch.setattr(attention, "varlen_attn", lambda *a, **k: called.append(a[3].shape) or real(*a, **k))
    with FakeTensorMode(allow_non_fake_inputs=True), Largest() as made:
        states = hidden_states(language_model.model, batch, "varlen")
    assert states.shape == (3, 46, 32) and called == [(10,)] * 2
    assert made.bytes <= 3 * 46 * 48 * 8


def test_ways_in_their_order(monkeypatch):
    gpu = torch.device("cuda")
    plain, capped = make_model("llama").model, make_model("gemma2").model
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name == "flash_attn")
    assert candidates(plain, CPU, None) == ["varlen", "dense"]
    assert candidates(plain, gpu, None) == ["varlen", "flash_attention_2", "flex_attention", "dense"]
    for model in (capped, make_model("gpt-oss").model):
        assert candidates(model, gpu, None) == ["flash_attention_2", "flex_attention", "varlen", "dense"]
    assert [candidates(plain, gpu, asked) for asked in ("sdpa", "varlen", "flash_attention_3")] == [
        ["dense"], ["varlen"], ["flash_attention_3"],
    ]  # fmt: skip


def test_a_model_that_cannot_go_the_best_way_says_so(monkeypatch):
    def refuses(*_, **__):
        raise NotImplementedError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(attention, "_varlen", refuses)
        student = tiny(0)
    assert student.attention == "dense"
    assert student.notes == [
        "the student (llama) is read by dense attention, for it cannot be by varlen (no such kernel): the masks of packed rows "
        "take memory with the square of their length"
    ]
    assert tiny(0).attention == "varlen" and not tiny(0).notes


def test_a_way_that_lets_documents_see_each_other_is_not_taken(monkeypatch):
    real = attention.segments

    def whole_rows(batch):
        return real(replace(batch, packed=False))

    with monkeypatch.context() as patch:
        patch.setattr(attention, "segments", whole_rows)
        student = tiny(0)
    assert student.attention == "dense" and "documents of a row see each other" in student.notes[0]


@pytest.mark.parametrize(("asked", "way"), [("varlen", "varlen"), ("sdpa", "dense"), ("eager", "dense")])
def test_the_recipe_chooses(asked, way):
    config = StudentConfig(config=LLAMA, tokenizer=TOKENIZER, attn_implementation=asked)
    student = load_student(config, CPU, 0)
    assert student.attention == way and not student.notes
    assert plain_kind(student.model) == ("sdpa" if asked == "varlen" else asked)


def test_soft_caps_of_scores_are_not_left_out():
    """sdpa has none, and says nothing."""
    sizes = {
        **LLAMA,
        "model_type": "gemma2",
        "head_dim": 16,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": None,
    }
    student = load_student(StudentConfig(config=sizes, tokenizer=TOKENIZER), CPU, 0)
    for parameter in student.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = collate(documents([[20], [20]], 2000), 0)
    with torch.no_grad():
        ours = hidden_states(student.model.eval(), batch, student.attention)
        choose(backbone(student.model), "own", "eager")
        torch.testing.assert_close(hidden_states(student.model, batch, "own"), ours)
        choose(backbone(student.model), "own", "sdpa")
        assert (hidden_states(student.model, batch, "own") - ours).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_are_compiled_once_for_all_lengths(family):
    """One graph for each kind of layer, packed or not, without a break; and the numbers are the same."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model(family).model
    shapes = [[[20, 9], [13]], [[31, 5, 4], [3, 8]], [[14, 2], [37]], [[12], [20]], [[33], [9]], [[50], [19]]]
    batches = [collate(documents(shape), 0) for shape in shapes]
    expected = [states_and_gradients(model, [batch], "varlen") for batch in batches]
    compile_layers(model, backend="aot_eager")
    graphs = []
    for batch, plain in zip(batches, expected, strict=True):
        for name, value in states_and_gradients(model, [batch], "varlen").items():
            torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    kinds = {"llama": 1, "gemma3": 2}[family]
    assert graphs == [kinds] * 3 + [2 * kinds] * 3 and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_packed_row_of_32768_tokens_trains_within_2_gb():
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "attention.py"
    out = subprocess.run(
        [sys.executable, str(script), "--case", "varlen", "32768"], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(out)["peak_mb"] < 2000
