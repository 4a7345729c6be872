"""The Triton programs: one per row of a chunk, each pass reading the row's logits once.

    dense teachers      stats → (sums →) gradient       2 or 3 reads of both sides, 1 write
    truncated, sampled  rest_stats → rest_gradient      2 reads of the student's side, 1 write

Between the passes only vectors [n] exist, which ranks that share the vocabulary reduce (kernels/chunk.py). Logarithms are in
base 2, for exp2 and log2 are one instruction each on a GPU; `scale` is log₂ e / T. Constants are literals, because Triton's
interpreter cannot mix constexpr globals with tensors: 14426.95 is −LOG_FLOOR in base 2, and −3.4e38 the least maximum.

Rows are padded to 16 columns, so that a mask is constant over 128 bits whatever the width; the true width is a `where`.
S, T: the student's and the teacher's logits, float32; G: the gradient, which may lie in place of S; n rows, V ids of the
student, W that the teacher shares. `Rows` [k, n] holds the vectors that a pass needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What the passes compute, as a constexpr.
FORWARD_KL, REVERSE_KL, JSD, SKEW_KL, SKEW_REVERSE_KL, TVD = range(6)


@triton.jit
def _load(ptr, at, width):
    """−inf beyond the width."""
    x = tl.load(ptr + at, mask=at < (width + 15) // 16 * 16, other=0.0)
    return tl.where(at < width, x, float("-inf"))


@triton.jit
def _tanh(x):
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _student(S, at, V, cap, CAP: tl.constexpr):
    """Logits, soft-capped, and the slope of the cap at each. −inf stays: it is a column beyond the width, or a dropped one."""
    x = _load(S, at, V)
    slope = x
    if CAP:
        tanh = _tanh(x / cap)
        slope = 1.0 - tanh * tanh
        x = tl.where(x < -3.4e38, x, cap * tanh)
    return x, slope


@triton.jit
def _online(m, z, x):
    """Running maximum and mass with one more block; what the old mass was multiplied by; and the block's weights."""
    larger = tl.maximum(m, tl.max(x, 0))
    w = tl.exp2(x - larger)
    c = tl.exp2(m - larger)
    return larger, z * c + tl.sum(w, 0), c, w


@triton.jit
def _cost(w, x, y):
    """Σ w·(x − y) and the mass of w where y is floored, so low that it counts as the floor. w is 0 where x is −inf."""
    seen = y > -14000.0
    difference = tl.where(x > -3.4e38, x, 0.0) - tl.where(seen, y, 0.0)
    return tl.sum(w * difference, 0), tl.sum(tl.where(seen, 0.0, w), 0)


@triton.jit
def stats(
    S, T, Out, n, stride_s, stride_t, V, W, scale, cap,
    CAP: tl.constexpr, CE: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and mass of the student over W (0, 1), of the teacher (2, 3) and of the cross-entropy's softmax, over V at T = 1
    (4, 5); Σ p·(t − s) and the mass p where s is floored (6, 7), Σ q·(s − t) likewise (8, 9), Σ p·(t − maximum) (10), all of
    them with weights that are not normalised yet."""
    row = tl.program_id(0).to(tl.int64)
    S += row * stride_s
    T += row * stride_t
    least, zero = tl.full([], -3.4e38, tl.float32), tl.full([], 0.0, tl.float32)
    ms, zs, mt, zt, mc, zc = least, zero, least, zero, least, zero
    forward, forward_floor, reverse, reverse_floor, entropy = zero, zero, zero, zero, zero
    end = W
    if CE:
        end = V
    for first in range(0, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        raw, _ = _student(S, at, V, cap, CAP)
        s = tl.where(at < W, raw * scale, float("-inf"))
        t = _load(T, at, W) * scale
        before = mt
        ms, zs, c, w = _online(ms, zs, s)
        if REVERSE:
            found, floored = _cost(w, s, t)
            reverse, reverse_floor = reverse * c + found, reverse_floor * c + floored
        old = zt
        mt, zt, c, w = _online(mt, zt, t)
        if FORWARD:
            found, floored = _cost(w, t, s)
            forward, forward_floor = forward * c + found, forward_floor * c + floored
        if ENTROPY:
            entropy = c * (entropy + old * (before - mt)) + tl.sum(tl.where(w > 0.0, w * (t - mt), 0.0), 0)
        if CE:
            mc, zc, _, _ = _online(mc, zc, raw * 1.4426950408889634)
    Out += row
    tl.store(Out, ms)
    tl.store(Out + n, zs)
    tl.store(Out + 2 * n, mt)
    tl.store(Out + 3 * n, zt)
    if CE:
        tl.store(Out + 4 * n, mc)
        tl.store(Out + 5 * n, zc)
    if FORWARD:
        tl.store(Out + 6 * n, forward)
        tl.store(Out + 7 * n, forward_floor)
    if REVERSE:
        tl.store(Out + 8 * n, reverse)
        tl.store(Out + 9 * n, reverse_floor)
    if ENTROPY:
        tl.store(Out + 10 * n, entropy)


@triton.jit
def _sides(S, T, at, V, W, scale, cap, ms, log_zs, mt, log_zt, CAP: tl.constexpr):
    """The student's logits and slope; log₂ and probabilities of both sides. The maximum is taken off before the logarithm of
    the mass, not with it: their sum would round large logits."""
    raw, slope = _student(S, at, V, cap, CAP)
    logq = tl.maximum(raw * scale - ms - log_zs, -14426.95)
    logp = tl.maximum(_load(T, at, W) * scale - mt - log_zt, -14426.95)
    return raw, slope, logq, logp, tl.exp2(logq), tl.exp2(logp)


@triton.jit
def _slopes(logq, logp, q, p, mix, KIND: tl.constexpr):
    """∂f/∂q up to a factor, and what a bucket adds to the value; natural logarithms."""
    if KIND == 1:
        r = 0.6931471805599453 * (logq - logp)
        v = q * r
    elif KIND == 2:
        logm = tl.log2(tl.maximum(q + mix * (p - q), 1e-37))
        r = 0.6931471805599453 * (logq - logm)
        v = mix * p * (0.6931471805599453 * (logp - logm)) + (1.0 - mix) * q * r
    elif KIND == 3:
        m = tl.maximum(q + mix * (p - q), 1e-37)
        r = p / m
        v = p * (0.6931471805599453 * (logp - tl.log2(m)))
    elif KIND == 4:
        m = tl.maximum(p + mix * (q - p), 1e-37)
        r = 0.6931471805599453 * (logq - tl.log2(m))
        v = q * r
        r = r - mix * q / m
    else:
        d = q - p
        r = tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, 0.0))
        v = 0.5 * d * r
    return r, v


@triton.jit
def sums(
    S, T, Rows, Out, n, stride_s, stride_t, V, W, scale, cap, mix,
    CAP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The value (0), and Σ q·∂f/∂q (1), which must be known before a gradient is stored. Rows: as in `gradient`."""
    row = tl.program_id(0).to(tl.int64)
    S += row * stride_s
    T += row * stride_t
    Rows += row
    ms, log_zs, mt, log_zt = tl.load(Rows), tl.load(Rows + n), tl.load(Rows + 2 * n), tl.load(Rows + 3 * n)
    value, mean = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        _, _, logq, logp, q, p = _sides(S, T, at, V, W, scale, cap, ms, log_zs, mt, log_zt, CAP)
        q = tl.where(at < W, q, 0.0)  # as p is there: such a bucket adds nothing
        r, v = _slopes(logq, logp, q, p, mix, KIND)
        value += tl.sum(v, 0)
        mean += tl.sum(q * r, 0)
    tl.store(Out + row, value)
    tl.store(Out + n + row, mean)


@triton.jit
def gradient(
    S, T, G, Label, Rows, n, stride_s, stride_t, stride_g, V, W, scale, cap, mix,
    CAP: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows: maximum and log₂ mass of student (0, 1), teacher (2, 3) and cross-entropy (4, 5), Σ q·∂f/∂q (6), and what the
    gradients of the divergence (7), of the gate's forward KL (8) and of the cross-entropy (9) are multiplied by. Label: a
    column, or −1 where it is another rank's."""
    row = tl.program_id(0).to(tl.int64)
    S += row * stride_s
    T += row * stride_t
    G += row * stride_g
    label = tl.load(Label + row)
    Rows += row
    ms, log_zs, mt, log_zt = tl.load(Rows), tl.load(Rows + n), tl.load(Rows + 2 * n), tl.load(Rows + 3 * n)
    mc, log_zc, mean = tl.load(Rows + 4 * n), tl.load(Rows + 5 * n), tl.load(Rows + 6 * n)
    of_kd, of_gate, of_ce = tl.load(Rows + 7 * n), tl.load(Rows + 8 * n), tl.load(Rows + 9 * n)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        raw, slope, logq, logp, q, p = _sides(S, T, at, V, W, scale, cap, ms, log_zs, mt, log_zt, CAP)
        if KIND == 0:
            g = of_kd * (q - p)
        else:
            r, _ = _slopes(logq, logp, q, p, mix, KIND)
            g = of_kd * q * (r - mean)
        if GATE:
            g += of_gate * (q - p)
        g = tl.where(at < W, g, 0.0)
        if CE:
            g += of_ce * (tl.exp2(raw * 1.4426950408889634 - mc - log_zc) - tl.where(at == label, 1.0, 0.0))
        if CAP:
            g *= slope
        tl.store(G + at, g.to(G.dtype.element_ty), mask=at < (V + 15) // 16 * 16)


@triton.jit
def rest_stats(
    S, Out, n, stride_s, V, W, scale, cap,
    CAP: tl.constexpr, KD: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and mass of the first W ids at the temperature (0, 1), and of V at T = 1 (2, 3). Dropped columns are −inf."""
    row = tl.program_id(0).to(tl.int64)
    S += row * stride_s
    least, zero = tl.full([], -3.4e38, tl.float32), tl.full([], 0.0, tl.float32)
    m, z, mc, zc = least, zero, least, zero
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        raw, _ = _student(S, at, V, cap, CAP)
        if KD:
            m, z, _, _ = _online(m, z, tl.where(at < W, raw * scale, float("-inf")))
        if CE:
            mc, zc, _, _ = _online(mc, zc, raw * 1.4426950408889634)
    Out += row
    if KD:
        tl.store(Out, m)
        tl.store(Out + n, z)
    if CE:
        tl.store(Out + 2 * n, mc)
        tl.store(Out + 3 * n, zc)


@triton.jit
def rest_gradient(
    S, G, Label, Rows, n, stride_s, stride_g, V, W, scale, cap,
    CAP: tl.constexpr, KD: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows: maximum at the temperature (0) and what its weights are multiplied by (1); maximum and log₂ mass of the
    cross-entropy (2, 3) and its weight (4). Dropped columns get 0: their gradient is put there afterwards."""
    row = tl.program_id(0).to(tl.int64)
    S += row * stride_s
    G += row * stride_g
    label = tl.load(Label + row)
    Rows += row
    m, of_kd = tl.load(Rows), tl.load(Rows + n)
    mc, log_zc, of_ce = tl.load(Rows + 2 * n), tl.load(Rows + 3 * n), tl.load(Rows + 4 * n)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        raw, slope = _student(S, at, V, cap, CAP)
        g = tl.zeros([BLOCK], tl.float32)
        if KD:
            g = of_kd * tl.where(at < W, tl.exp2(raw * scale - m), 0.0)
        if CE:
            here = (at == label) & (raw > -3.4e38)
            g += of_ce * (tl.exp2(raw * 1.4426950408889634 - mc - log_zc) - tl.where(here, 1.0, 0.0))
        if CAP:
            g *= slope
        tl.store(G + at, g.to(G.dtype.element_ty), mask=at < (V + 15) // 16 * 16)
