"""Draws from the rest of a truncated teacher: forward KL learns what is in it, without bias; other divergences leave them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from read_rows import read_tail_samples, read_top_k

from potstill.losses import DenseTarget, TopKTarget, compare_rows, fused_linear_kd
from potstill.signals.compute import uniforms
from potstill.signals.document import from_bytes, to_bytes
from potstill.signals.kinds import TopK

ROWS, WIDTH, IDS, KEPT = 6, 5, 40, 7


def case(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(ROWS, WIDTH, generator=g, dtype=dtype), torch.randn(IDS, WIDTH, generator=g, dtype=dtype)
    logp = torch.randn(ROWS, IDS, generator=g, dtype=dtype).log_softmax(-1)
    return hidden, head, logp, g


def truncated(logp, draws, g):
    kept, ids = logp.topk(KEPT, -1)
    inside = logp.exp().scatter(-1, ids, 0.0)
    mass = inside.sum(-1)
    share = inside / mass[:, None]
    entropy = -(share * share.clamp(min=1e-38).log()).sum(-1)
    rest = torch.multinomial(share, draws, True, generator=g)
    return TopKTarget(ids, kept, mass.log(), tail_samples=rest, tail_entropy=entropy), mass


def gradients(target, hidden, head, **options):
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    out = fused_linear_kd(h, w, target, **options)
    out.loss.backward()
    return out.kd, h.grad, w.grad


def test_value_and_gradient_are_those_of_the_definition():
    hidden, head, logp, g = case()
    target, mass = truncated(logp, 9, g)
    kd, grad_hidden, grad_head = gradients(target, hidden, head, chunk_rows=4)
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logq = (h @ w.t()).log_softmax(-1)
    kept = (target.logprobs.exp() * (target.logprobs - logq.gather(-1, target.ids))).sum(-1)
    rest = mass * (mass.log() - target.tail_entropy - logq.gather(-1, target.tail_samples).mean(-1))
    (kept + rest).sum().backward()
    torch.testing.assert_close(kd, (kept + rest).detach())
    torch.testing.assert_close(grad_hidden, h.grad)
    torch.testing.assert_close(grad_head, w.grad)


def test_the_mean_over_draws_is_the_whole_divergence():
    """Within five standard errors of each number, over draws that are independent."""
    hidden, head, logp, g = case(1)
    samples = []
    for _ in range(400):
        target, _ = truncated(logp, 4, g)
        kd, _, grad_head = gradients(target, hidden, head)
        samples.append(torch.cat([kd, grad_head.flatten()]))
    found = torch.stack(samples)
    kd, _, grad_head = gradients(DenseTarget(logits=logp), hidden, head)
    wanted = torch.cat([kd, grad_head.flatten()])
    error = found.std(0) / math.sqrt(len(samples))
    assert ((found.mean(0) - wanted).abs() <= 5 * error + 1e-12).all()
    without = torch.cat(
        [x.flatten() for x in gradients(TopKTarget(target.ids, target.logprobs, target.tail), hidden, head)[::2]]
    )
    assert ((without - wanted).abs() > 5 * error).any()  # the bucket alone is something else


@pytest.mark.parametrize("name", ["reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"])
def test_other_divergences_leave_them_out(name):
    hidden, head, logp, g = case(2)
    target, _ = truncated(logp, 4, g)
    plain = TopKTarget(target.ids, target.logprobs, target.tail)
    for got, wanted in zip(
        gradients(target, hidden, head, divergence=name), gradients(plain, hidden, head, divergence=name), strict=True
    ):
        assert torch.equal(got, wanted)


def test_padded_ids_and_logged_numbers():
    """Ids beyond the target's width take no part; the logged KL is of the buckets, with and without draws."""
    hidden, head, logp, g = case(3, torch.float32)
    target, _ = truncated(logp, 4, g)
    wider = torch.cat([head, torch.randn(9, WIDTH, generator=g)])
    padded = TopKTarget(target.ids, target.logprobs, target.tail, IDS, target.tail_samples, target.tail_entropy)
    kd, grad_hidden, grad_head = gradients(padded, hidden, wider)
    kd_narrow, grad_narrow, grad_head_narrow = gradients(target, hidden, head)
    torch.testing.assert_close(kd, kd_narrow)
    torch.testing.assert_close(grad_hidden, grad_narrow)
    torch.testing.assert_close(grad_head[:IDS], grad_head_narrow)
    assert not grad_head[IDS:].any()
    labels = torch.zeros(ROWS, dtype=torch.int64)
    rows = torch.arange(ROWS)
    found = compare_rows(DenseTarget(hidden=hidden, weight=wider), labels, padded.select(rows))
    plain = TopKTarget(target.ids, target.logprobs, target.tail, IDS)
    torch.testing.assert_close(found.kl, compare_rows(DenseTarget(hidden=hidden, weight=wider), labels, plain).kl)


def test_they_go_through_a_cache_s_bytes():
    _, _, logp, _ = case(4, torch.float32)
    form = TopK(IDS, k=KEPT, tail_samples=11)
    target = DenseTarget(logp, torch.eye(logp.shape[1]))
    found = form.compute(target, torch.zeros(ROWS, dtype=torch.int64), uniforms(0, "key", ROWS, 11))
    kept = logp.topk(KEPT, -1).indices
    assert not (torch.from_numpy(found["tail_samples"]).long()[:, :, None] == kept[:, None, :]).any()
    inside = logp.exp().scatter(-1, kept, 0.0)
    share = inside / inside.sum(-1, keepdim=True)
    entropy = -(share * share.clamp(min=1e-38).log()).sum(-1)
    torch.testing.assert_close(torch.from_numpy(found["tail_entropy"]), entropy, rtol=0, atol=1e-5)
    predicted = np.array([False] + [True] * ROWS)
    data = to_bytes(form, np.arange(ROWS + 1), np.arange(ROWS + 1), predicted, form.encode(found))
    document = from_bytes(form, np.frombuffer(data, dtype=np.uint8), ROWS + 1)
    rest, read_entropy = read_tail_samples([(document, np.arange(ROWS))])
    assert np.array_equal(rest, found["tail_samples"])
    assert np.abs(read_entropy - found["tail_entropy"]).max() <= 0.5 / 2048 + 1e-6
    ids, _, _ = read_top_k([(document, np.arange(ROWS))], 1.0)
    assert np.array_equal(ids, found["ids"])
