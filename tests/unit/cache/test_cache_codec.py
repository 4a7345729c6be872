"""A document's signal as bytes and back: bits against a loop over bits, numbers against their stated error."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from read_rows import read_hidden, read_sampled, read_token_logprobs, read_top_k

from potstill.cache.reading import TeacherText, examples_of
from potstill.config import DataConfig, TeacherConfig
from potstill.data import collate
from potstill.models import load_teacher
from potstill.signals import codec
from potstill.signals.codec import COARSE_TABLE, FINE_TABLE
from potstill.signals.compute import uniforms
from potstill.signals.document import blank, from_bytes, to_bytes
from potstill.signals.kinds import KINDS, Hidden, Sampled, SignalKind, TokenLogprobs, TopK
from potstill.types import DenseTarget

CPU = torch.device("cpu")
ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).parents[4] / "shared" / "assets"))
STORIES = ASSETS / "data" / "tinystories" / "stories_clean.jsonl"
EIGHTEEN_BITS = 2**18
DOCUMENTS = 4  # of a real teacher


# Bits


def packed_by_a_loop(values: np.ndarray, bits: int) -> np.ndarray:
    rows, count = values.shape
    out = np.zeros((rows, -(-count * bits // 8)), dtype=np.uint8)
    for row in range(rows):
        for i in range(count):
            for bit in range(bits):
                at = i * bits + bit
                out[row, at // 8] |= (int(values[row, i]) >> bit & 1) << at % 8
    return out


@st.composite
def packable(draw):
    bits = draw(st.integers(4, 24))
    shape = (draw(st.integers(0, 3)), draw(st.integers(0, 37)))
    return draw(hnp.arrays(np.uint32, shape, elements=st.integers(0, 2**bits - 1))), bits


@given(packable())
@settings(deadline=None)
def test_packing_is_the_loop_over_bits(case):
    values, bits = case
    packed = codec.pack(values, bits)
    assert packed.shape[1] == codec.packed_bytes(values.shape[1], bits)
    np.testing.assert_array_equal(packed, packed_by_a_loop(values, bits))
    np.testing.assert_array_equal(codec.unpack(packed, values.shape[1], bits), values)


@pytest.mark.parametrize("bits", range(4, 25))
def test_every_width_holds_its_largest_value(bits):
    values = np.full((2, 41), 2**bits - 1, dtype=np.uint32)
    values[1, ::2] = 0
    np.testing.assert_array_equal(codec.pack(values, bits), packed_by_a_loop(values, bits))
    np.testing.assert_array_equal(codec.unpack(codec.pack(values, bits), 41, bits), values)


@pytest.mark.parametrize(
    ("vocabulary", "bits"), [(1, 4), (16, 4), (17, 5), (32_000, 15), (2**18, 18), (2**18 + 1, 19), (2**24, 24)]
)
def test_ids_have_the_width_the_vocabulary_needs(vocabulary, bits):
    assert TopK(vocabulary, k=1).id_bits == bits


# Documents


def signal_of_logits(form: SignalKind, logits: torch.Tensor, labels: torch.Tensor, seed: int = 0):
    """What a kind says of a teacher whose logits are given: a head with these columns over unit hidden states."""
    rows = logits.shape[0]
    target = DenseTarget(hidden=torch.eye(rows), weight=logits.t().contiguous())
    random = np.random.default_rng(seed).random((rows, form.num_samples)) if form.kind == "sampled" else None
    return form.compute(target, labels, random)


def document(form: SignalKind, signal, tokens: int, predicted: np.ndarray, seed: int = 0):
    """Through bytes and back, with random tokens."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, form.vocabulary, tokens)
    ends = np.cumsum(generator.integers(0, 40, tokens))
    data = to_bytes(form, ids, ends, predicted, form.encode(signal))
    read = from_bytes(form, np.frombuffer(data, dtype=np.uint8), tokens)
    np.testing.assert_array_equal(read.tokens, ids)
    np.testing.assert_array_equal(read.ends, ends)
    np.testing.assert_array_equal(read.predicted, predicted)
    return read, data


def made(form: SignalKind, tokens: int = 23, scale: float = 3.0, seed: int = 0):
    """Random logits at some of the tokens, and the document of them."""
    generator = torch.Generator().manual_seed(seed)
    predicted = np.random.default_rng(seed).random(tokens) < 0.7
    predicted[0] = False
    rows = int(predicted.sum())
    logits = scale * torch.randn(rows, form.vocabulary, generator=generator)
    labels = torch.randint(form.vocabulary, (rows,), generator=generator)
    signal = signal_of_logits(form, logits, labels)
    return logits, labels, signal, document(form, signal, tokens, predicted)[0]


def everything(read):
    return [(read, np.arange(int(read.predicted.sum())))]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_hidden_states_come_back_bit_for_bit(dtype):
    form = Hidden(50, width=7, dtype=dtype)
    hidden = torch.randn(5, 7).to(getattr(torch, dtype))
    raw = hidden.view(torch.uint16) if dtype == "bfloat16" else hidden
    predicted = np.array([False, True, True, False, True, True, True])
    read, _ = document(form, {"hidden": raw.numpy()}, 7, predicted)
    assert torch.equal(read_hidden([(read, np.array([0, 3])), (read, np.array([4]))]), hidden[[0, 3, 4]])


def test_sampled_draws_come_back_exactly():
    form = Sampled(97, num_samples=50)
    _, _, signal, read = made(form)
    ids, shares, entropy = read_sampled(everything(read))
    for row, draws in enumerate(signal["samples"]):
        distinct, counts = np.unique(draws, return_counts=True)
        there = shares[row] > 0
        np.testing.assert_array_equal(ids[row][there], distinct)
        np.testing.assert_array_equal(shares[row][there], (counts / 50).astype(np.float32))
        assert shares[row].sum() == pytest.approx(1, abs=1e-6)
    assert ids.shape[1] == max(len(np.unique(draws)) for draws in signal["samples"])
    np.testing.assert_allclose(entropy, signal["entropy"], atol=0.5 / codec.STEPS_PER_ENTROPY + 1e-6)


def test_some_rows_of_several_documents():
    """In any order, from one document or from many, with blank ones between: as each row alone."""
    for form in (Sampled(97, num_samples=20), TopK(97, k=12)):
        _, _, _, one = made(form, seed=1)
        _, _, _, two = made(form, seed=2)
        read = read_sampled if form.kind == "sampled" else lambda chosen: read_top_k(chosen, 1.0)
        nothing = np.zeros(0, dtype=np.int64)
        rows = [(one, np.array([4, 1])), (blank(form), nothing), (two, np.array([0])), (one, nothing)]
        together = read(rows)
        alone = [read([(d, np.array([row]))]) for d, row in ((one, 4), (one, 1), (two, 0))]
        for i, parts in enumerate(alone):
            for whole, part in zip(together, parts, strict=True):
                width = part.shape[1] if part.ndim == 2 else None
                np.testing.assert_array_equal(whole[i : i + 1, :width] if width else whole[i : i + 1], part)
                assert width is None or not whole[i, width:].any() or form.kind == "top_k"


@pytest.mark.parametrize("kind", ["top_k", "sampled", "hidden", "token_logprobs"])
def test_documents_of_which_nothing_is_asked(kind):
    form = KINDS[kind](97, k=5, num_samples=9, width=6)
    chosen = [(blank(form), np.zeros(0, dtype=np.int64))]
    if kind == "top_k":
        assert [part.shape for part in read_top_k(chosen, 1.0)] == [(0, 5), (0, 5), (0,)]
    elif kind == "sampled":
        assert [part.shape for part in read_sampled(chosen)] == [(0, 1), (0, 1), (0,)]
    elif kind == "hidden":
        assert read_hidden(chosen).shape == (0, 6)
    else:
        assert read_token_logprobs(chosen).shape == (0,)


def test_chosen_is_half_a_step_off_at_most():
    form = TokenLogprobs(97)
    logits, labels, _, read = made(form, scale=8.0)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0].numpy()
    assert exact.min() < -10
    np.testing.assert_allclose(read_token_logprobs(everything(read)), exact, atol=0.5 / codec.STEPS_PER_NAT + 1e-5)


def test_chosen_without_any_mass():
    encoded = TokenLogprobs(9).encode({"token_logprobs": np.array([-np.inf, -1000.0, 0.0], dtype=np.float32)})
    read, _ = document(TokenLogprobs(9), {"token_logprobs": np.array([-np.inf, -1000.0, 0.0])}, 3, np.ones(3, bool))
    assert encoded["token_logprobs"].shape == (3, 2)
    np.testing.assert_allclose(read_token_logprobs(everything(read)), [-65535 / 1024, -65535 / 1024, 0.0], rtol=1e-6)


# Top-k: the error of the gaps


def half_step(table: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """How far a gap can be from the nearest code: half the distance between the codes around it, or around a smaller one."""
    widths = np.maximum.accumulate(np.diff(table))
    return widths[np.clip(np.searchsorted(table, gap, side="right") - 1, 0, len(widths) - 1)] / 2


def error_bound(logprobs: np.ndarray, fine: int) -> np.ndarray:
    """Of each entry's distance from the first. A gap is measured from the decoded neighbour, so that an entry is off by its own
    code's error, or (where that neighbour is already below it) by no more than the neighbour was."""
    bound = np.zeros_like(logprobs)
    for i in range(1, logprobs.shape[1]):
        table = FINE_TABLE if i <= fine else COARSE_TABLE
        gap = logprobs[:, i - 1] - logprobs[:, i]
        bound[:, i] = np.maximum(bound[:, i - 1], half_step(table, gap + bound[:, i - 1]))
    return bound


@pytest.mark.parametrize("k", [1, 2, 9, 10, 50, 64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_no_entry_is_further_off_than_one_code(k, scale):
    form = TopK(300, k=k)
    logits, _, signal, read = made(form, tokens=200, scale=scale)
    ids, decoded, tail = read_top_k(everything(read), 1.0)
    exact = logits.double().log_softmax(-1).numpy()
    np.testing.assert_array_equal(ids, signal["ids"])
    kept = np.take_along_axis(exact, ids.astype(np.int64), -1)
    assert (np.diff(kept, axis=-1) <= 1e-6).all()
    off = np.abs((decoded - decoded[:, :1]) - (kept - kept[:, :1]))
    assert (off <= error_bound(kept, form.fine) + 1e-5).all()
    assert (np.diff(decoded, axis=-1) <= 0).all()
    mass = np.exp(decoded.astype(np.float64)).sum(-1) + np.exp(tail.astype(np.float64))
    np.testing.assert_allclose(mass, 1.0, atol=1e-6)


def test_errors_do_not_add_up():
    """64 gaps that each lie between two codes: were each coded by itself, the last entry would be off by 55 half-steps."""
    between = (COARSE_TABLE[6] + COARSE_TABLE[7]) / 2 * 0.999
    logprobs = -np.arange(64)[None] * between
    fine, coarse = codec.encode_gaps(logprobs, 8)
    decoded = -np.cumsum(np.concatenate([FINE_TABLE[fine], COARSE_TABLE[coarse]], -1), -1)
    off = np.abs(decoded - logprobs[:, 1:])
    assert off.max() <= half_step(COARSE_TABLE, np.array([2 * between])).max()
    alone = np.abs(COARSE_TABLE[6] - between) * 55
    assert alone > 10 * off.max()


def test_steps_of_the_tables_are_as_stated():
    """0, then a constant ratio: half a step is at most 0.5 % of a fine gap and 11.6 % of a coarse one."""
    for table, bits, share in ((FINE_TABLE, 10, 0.005), (COARSE_TABLE, 5, 0.116)):
        assert len(table) == 2**bits and table[0] == 0
        ratio = table[2:] / table[1:-1]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
        assert (ratio[0] - 1) / 2 <= share
    assert (FINE_TABLE[1], FINE_TABLE[-1]) == pytest.approx((0.001, 24.0))
    assert (COARSE_TABLE[1], COARSE_TABLE[-1]) == pytest.approx((0.016, 8.0))


@pytest.mark.parametrize("temperatures", [(1.0,), (0.5, 1.0, 2.0), (2.0, 4.0)])
@pytest.mark.parametrize("k", [1, 16, 40])
def test_every_temperature_is_the_softmax_at_it(temperatures, k):
    """40 is the whole vocabulary: there is no rest."""
    form = TopK(40, k=k, temperatures=temperatures)
    logits, labels, _, read = made(form, tokens=60, scale=2.0)
    bound = error_bound(np.sort(logits.double().log_softmax(-1).numpy())[:, ::-1][:, :k], form.fine)
    for temperature in temperatures:
        ids, decoded, tail = read_top_k(everything(read), temperature)
        exact = (logits.double() / temperature).log_softmax(-1)
        kept = exact.gather(-1, torch.from_numpy(ids).long())
        rest = torch.ones_like(exact).scatter(-1, torch.from_numpy(ids).long(), 0.0).log()
        # The normaliser is off by no more than its terms are, and the rest by half a step of its log-odds.
        allowed = 2 * bound.max(-1) / temperature + 0.5 / codec.STEPS_PER_NAT + 1e-5
        assert (np.abs(decoded - kept.numpy()).max(-1) <= allowed).all()
        if k == 40:
            assert np.isneginf(tail).all()
        else:
            assert (np.abs(tail - (exact + rest).logsumexp(-1).numpy()) <= allowed).all()
        mass = np.exp(decoded.astype(np.float64)).sum(-1) + np.exp(tail.astype(np.float64))
        np.testing.assert_allclose(mass, 1.0, atol=1e-6)
    chosen = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0].numpy()
    np.testing.assert_allclose(read_token_logprobs(everything(read)), chosen, atol=0.5 / codec.STEPS_PER_NAT + 1e-5)


def test_ids_without_any_mass():
    """Fewer ids with mass than are kept: they come back exactly, the others with next to none, and there is no rest."""
    form = TopK(40, k=12)
    logits = torch.full((3, 40), -torch.inf)
    logits[:, [7, 3, 30]] = torch.tensor([2.0, 1.0, -1.0])
    # By a bias: 0 · −inf in a product would be no number.
    target = DenseTarget(hidden=torch.zeros(3, 2), weight=torch.zeros(40, 2), bias=logits[0])
    read, _ = document(form, form.compute(target, torch.tensor([7, 3, 0])), 3, np.ones(3, bool))
    ids, decoded, tail = read_top_k(everything(read), 1.0)
    np.testing.assert_array_equal(ids[:, :3], [[7, 3, 30]] * 3)
    exact = torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64).log_softmax(-1)
    np.testing.assert_allclose(decoded[:, :3], exact.expand(3, 3), atol=0.01)
    assert (np.exp(decoded[:, 3:]).sum(-1) < 1e-9).all()
    assert np.isneginf(tail).all()
    assert np.isfinite(decoded).all()
    np.testing.assert_allclose(read_token_logprobs(everything(read))[:2], exact[:2], atol=0.001)
    assert read_token_logprobs(everything(read))[2] == -65535 / 1024


# Sizes and added KL, on real distributions


def real_rows(name: str, data: DataConfig):
    """Some documents in a teacher's tokens, with its dense target over each and the batch of it."""
    teacher = load_teacher(TeacherConfig(model=name), CPU, "teacher", "teacher")
    text = TeacherText(teacher.tokenizer, teacher.positions)
    pieces = [piece for piece, _ in zip(examples_of(data, teacher.tokenizer), range(DOCUMENTS), strict=False)]
    found = []
    for example in text(pieces):
        batch = collate([[example]], pad_id=0)
        with torch.no_grad():
            hidden = teacher.hidden(batch, batch.rows.teacher)
        found.append((example, teacher.at_rows(hidden, len(teacher.tokenizer)), batch))
    return found


@cache
def stories15m():
    if not STORIES.exists():
        pytest.skip(f"no real models and text at {ASSETS}")
    data = DataConfig.model_validate({"sources": [{"files": str(STORIES)}], "max_length": 256, "piece_bytes": 900})
    return real_rows(str(ASSETS / "models" / "stories15M"), data)


@cache
def shipped():
    data = DataConfig.model_validate({"sources": [{"files": "shipped:corpus/heldout.parquet"}], "max_length": 256})
    return real_rows("shipped:teacher", data)


def at_eighteen_bits(form: SignalKind, example, signal) -> float:
    """Bytes a token of the document, were its ids of a vocabulary of 2^18."""
    wide = replace(form, vocabulary=EIGHTEEN_BITS)
    return len(to_bytes(wide, example.ids, example.ends, example.supervised, wide.encode(signal)))


def added_kl(form: SignalKind, target, signal, read) -> np.ndarray:
    """KL from the exact buckets to the decoded ones, in float64."""
    ids, decoded, tail = read_top_k(everything(read), 1.0)
    logp = (target.hidden @ target.head.weight.t()).double().log_softmax(-1)
    kept = logp.gather(-1, torch.from_numpy(ids).long())
    rest = logp.scatter_(-1, torch.from_numpy(ids).long(), -torch.inf).logsumexp(-1)
    exact = torch.cat([kept, rest[:, None]], -1).numpy()
    ours = np.concatenate([decoded, tail[:, None]], -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(exact), 0.0, np.exp(exact) * (exact - ours))
    return terms.sum(-1)


@pytest.mark.parametrize("teacher", [shipped, stories15m])
@pytest.mark.parametrize(("k", "most"), [(64, 200), (50, 160)])
def test_top_k_of_a_real_teacher_is_small_and_near(teacher, k, most):
    size = tokens = 0
    kl = []
    for example, target, batch in teacher():
        form = TopK(target.width, k=k)
        signal = form.compute(target, batch.rows.labels)
        size += at_eighteen_bits(form, example, signal)
        tokens += len(example.ids)
        read = from_bytes(
            form,
            np.frombuffer(to_bytes(form, example.ids, example.ends, example.supervised, form.encode(signal)), np.uint8),
            len(example.ids),
        )
        kl.append(added_kl(form, target, signal, read))
    index = DOCUMENTS * 32  # key, tokens, offset and checksum of each document
    assert tokens > 500
    assert (size + index) / tokens <= most
    assert -1e-6 <= np.concatenate(kl).mean() <= 1e-4


def test_draws_of_a_real_teacher_are_small():
    size = tokens = distinct = rows = 0
    for example, target, batch in stories15m():
        form = Sampled(target.width, num_samples=50)
        signal = form.compute(target, batch.rows.labels, uniforms(0, example.key, len(batch.rows), 50))
        size += at_eighteen_bits(form, example, signal)
        tokens += len(example.ids)
        distinct += sum(len(np.unique(draws)) for draws in signal["samples"])
        rows += len(batch.rows)
    assert (size + DOCUMENTS * 32) / tokens <= 40
    assert 2 < distinct / rows < 14


def test_twelve_distinct_draws_a_token_are_small():
    generator = np.random.default_rng(0)
    tokens = 300
    draws = np.sort(
        [generator.permutation(np.resize(generator.choice(EIGHTEEN_BITS, 12, False), 50)) for _ in range(tokens - 1)]
    )
    form = Sampled(EIGHTEEN_BITS, num_samples=50)
    signal = {"samples": draws, "entropy": np.full(tokens - 1, 2.0)}
    predicted = np.arange(tokens) > 0
    ids, ends = generator.integers(0, EIGHTEEN_BITS, tokens), np.cumsum(generator.integers(1, 12, tokens))
    assert (len(to_bytes(form, ids, ends, predicted, form.encode(signal))) + 32) / tokens <= 40
