"""Decoding as one compiled function (numba): the loops behind `compiled.py`, with the bits of torch's ops.

Every function repeats, operation by operation, what torch does with a row: products as chains (`lanes_llvm`), the
exponential of its softmax and SiLU (Shibata's SLEEF, 1 ulp), its orders of summation, its fused multiply-adds.
Shapes: B sequences with one new token each, L layers, d width, H / K query and key heads of width D, E experts of
width f, k a token, S keys.
"""

from __future__ import annotations

import numpy as np
from numba import int32

from headway.kernels.lanes_llvm import (
    PANEL,
    accumulate,
    apart,
    fma,
    inner,
    nearest,
    outer,
    product_1x1,
    product_1x4,
    product_2x1,
    product_4x1,
    product_8x1,
    transpose,
    two_to,
)
from headway.kernels.numerics import LANES, PAGE

KV_BLOCK = 128
"""Keys whose weighted values are summed in one chain, as in `attention.attend`."""
_F = np.float32
_ZERO, _ONE, _LOW, _HIGH = _F(0), _F(1), _F(-104), _F(100)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(1.442695040888963407), _F(0.693145751953125), _F(1.428606765330187045e-06)
_C5, _C4, _C3, _C2, _C1 = (
    _F(c) for c in (0.000198527617612853646, 0.00139304355252534151, 0.00833336077630519867, 0.0416664853692054749,
                    0.166666671633720397)
)  # fmt: skip
_HALF = _F(0.5)
_SUM_LANES = 8  # torch sums rows in vectors of eight, four of them side by side


@inner
def _exp(x):
    """SLEEF's expf of 1 ulp."""
    at = x
    if x < _LOW:
        at = _LOW
    if x > _HIGH:
        at = _HIGH
    turns = nearest(at * _LOG2_E)
    power = int32(turns)
    rest = fma(turns, -_LN2_LOW, fma(turns, -_LN2_HIGH, at))
    u = fma(fma(fma(fma(fma(_C5, rest, _C4), rest, _C3), rest, _C2), rest, _C1), rest, _HALF)
    u = _ONE + fma(rest * rest, u, rest)
    half = int32(power >> int32(1))
    u = u * two_to(half) * two_to(int32(power - half))
    if x < _LOW:
        u = _ZERO
    if x > _HIGH:
        u = _F(np.inf)
    return u


@inner
def _inverse_rms(x, eps):
    """Of x [n], n a multiple of 8, at most 512: squares are summed as torch sums a row."""
    sums, vectors = np.zeros((4, _SUM_LANES), np.float32), x.size // _SUM_LANES
    side = vectors // 4
    for i in range(4 * side):
        for lane in range(_SUM_LANES):
            value = x[i * _SUM_LANES + lane]
            sums[i % 4, lane] += value * value
    for i in range(4 * side, vectors):
        for lane in range(_SUM_LANES):
            value = x[i * _SUM_LANES + lane]
            sums[0, lane] += value * value
    total = _ZERO
    for lane in range(_SUM_LANES):
        total += ((sums[0, lane] + sums[1, lane]) + sums[2, lane]) + sums[3, lane]
    return _ONE / np.sqrt(total / _F(x.size) + eps)


@inner
def _norm(x, weight, eps, out):
    """RMS norm of the rows of x [B, d]."""
    apart()
    for b in range(x.shape[0]):
        scale = _inverse_rms(x[b], eps)
        for j in range(x.shape[1]):
            out[b, j] = (x[b, j] * scale) * weight[j]


@inner
def _softmax(x, count, padded):
    """Of x[:count] in place; x[count:padded] becomes 0. Rows shorter than a vector are summed one by one."""
    apart()
    top = x[0]
    for i in range(1, count):
        top = max(top, x[i])
    for i in range(count):
        x[i] = _exp(x[i] - top)
    for i in range(count, padded):
        x[i] = _ZERO
    if count < LANES and padded == count:
        total = x[0]
        for i in range(1, count):
            total += x[i]
    else:
        sums = np.zeros(LANES, np.float32)
        for i in range(0, padded - LANES + 1, LANES):
            for lane in range(LANES):
                sums[lane] += x[i + lane]
        for i in range(padded // LANES * LANES, padded):
            sums[i % LANES] += x[i]
        width = LANES // 2
        while width:
            for lane in range(width):
                sums[lane] += sums[lane + width]
            width //= 2
        total = sums[0]
    inverse = _ONE / total
    for i in range(count):
        x[i] *= inverse


@inner
def _multiply(x, x_at, x_width, which, first, count, w, at, k, chain, columns, out, o, o_width):
    """Rows which[first : first + count] of x, from element `x_at` on, x_width apart, times w, packed as by
    `compiled.pack` for chains of at most `chain`, from element `at` on, written from element `o` of out on, o_width
    apart. All arrays are flat and no number a literal (hence `origin`, a 0), so that this is compiled once."""
    apart()
    if k <= chain:
        _chain(x, x_at, x_width, which, first, count, w, at, k, columns, out, o, o_width)
        return
    half, origin, rest = k // 2, k - k, np.empty(count * columns, np.float32)
    _chain(x, x_at, x_width, which, first, count, w, at, half, columns, out, o, o_width)
    _chain(x, x_at + half, x_width, which, first, count, w, at + half * columns, half, columns, rest, origin, columns)
    for row in range(count):
        for column in range(columns):
            out[o + row * o_width + column] += rest[row * columns + column]


@inner
def _chain(x, x_at, x_width, which, first, count, w, at, k, columns, out, o, o_width):
    """`_multiply` in one chain, w [columns / PANEL, k, PANEL]. Some rows are computed twice, alike."""
    apart()
    if count == 1:
        column = 0
        while column + 4 * PANEL <= columns:
            product_1x4(x, x_at, x_width, which, first, w, at + column * k, k, out, o + column, o_width)
            column += 4 * PANEL
        while column < columns:
            product_1x1(x, x_at, x_width, which, first, w, at + column * k, k, out, o + column, o_width)
            column += PANEL
        return
    for column in range(0, columns, PANEL):
        panel, row = at + column * k, 0
        while row + 8 <= count:
            product_8x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)
            row += 8
        if row + 4 < count and count >= 8:
            row = count - 8
            product_8x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)
            row = count
        while row + 4 <= count:
            product_4x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)
            row += 4
        if row < count and count >= 4:
            row = count - 4
            product_4x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)
            row = count
        while row + 2 <= count:
            product_2x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)
            row += 2
        if row < count:
            product_1x1(x, x_at, x_width, which, first + row, w, panel, k, out, o + row * o_width + column, o_width)


@inner
def _turn(qkv, heads, width, weight, cosine, sine, start, eps):
    """Norm and rotate the first `heads` heads of each row of qkv, in place."""
    apart()
    for b in range(qkv.shape[0]):
        at = start[b]
        for h in range(heads):
            head = qkv[b, h * width : (h + 1) * width]
            scale = _inverse_rms(head, eps)
            for j in range(width):
                head[j] = (head[j] * scale) * weight[h, j]
            for j in range(width // 2):
                a, c = head[2 * j], head[2 * j + 1]
                head[2 * j] = a * cosine[at, j] - c * sine[at, j]
                head[2 * j + 1] = a * sine[at, j] + c * cosine[at, j]


@inner
def _narrow(x, w, at, columns, out):
    """x [B, d] times w [d, PANEL], from element `at` on, of at most LANES columns. Products are rounded before they are
    added. A column has a chain for every fourth position, one that is not among four for every eighth."""
    apart()
    rows, fours = 8, columns // 4 * 4  # rows at a time, whose chains don't wait for each other
    size = rows * LANES
    sums = np.empty(8 * size, np.float32)
    for start in range(0, x.shape[0], rows):
        count = min(rows, x.shape[0] - start)
        for lanes, first, last in ((4, 0, fours), (8, fours, columns)):
            for i in range(lanes * size):
                sums[i] = _ZERO
            for i in range(x.shape[1] if first < last else 0):
                for r in range(count):
                    accumulate(x[start + r, i], w, at + i * PANEL, sums, i % lanes * size + r * LANES)
            while lanes > 1:
                lanes //= 2
                for i in range(lanes * size):
                    sums[i] += sums[lanes * size + i]
            for r in range(count):
                for column in range(first, last):
                    out[start + r, column] = sums[r * LANES + column]


@inner
def _attend(qkv, cache, pages, start, query_heads, scale, chain, order, out):
    """Attention of one token a sequence, after its key and value went into its page. cache [pages, 2K, PAGE, D]."""
    apart()
    width, kv_heads = cache.shape[3], cache.shape[1] // 2
    group, slices, origin = query_heads // kv_heads, width // PANEL, order[0]
    longest = (pages.shape[1] + 1) * PAGE
    query, scores = np.empty(group * width, np.float32), np.empty(group * longest, np.float32)
    keys, values = np.empty(width * PANEL, np.float32), np.empty(KV_BLOCK * width, np.float32)
    part = np.empty(group * width, np.float32)
    for b in range(qkv.shape[0]):
        at, page, row = start[b], pages[b, start[b] // PAGE], start[b] % PAGE
        held = at // PAGE + 1
        for h in range(kv_heads):
            key = (query_heads + h) * width
            value = key + kv_heads * width
            for j in range(width):
                cache[page, h, row, j] = qkv[b, key + j]
                cache[page, kv_heads + h, row, j] = qkv[b, value + j]
            for g in range(group):
                for j in range(width):
                    query[g * width + j] = qkv[b, (h * group + g) * width + j] * scale
            for n in range(0, held, 2):
                for i in range(min(2, held - n)):
                    block = cache[pages[b, n + i], h]
                    for j in range(0, width, LANES):
                        transpose(block, j, width, keys, j * PANEL + i * PAGE)
                _multiply(
                    query, origin, width, order, origin, group, keys, origin, width, chain, keys.size // width,
                    scores, n * PAGE, longest,
                )  # fmt: skip
            for g in range(group):
                _softmax(scores[g * longest :], at + 1, held * PAGE)
            for first in range(0, held * PAGE, KV_BLOCK):
                count = min(KV_BLOCK, held * PAGE - first)
                for n in range(count // PAGE):
                    block = cache[pages[b, first // PAGE + n], kv_heads + h]
                    for c in range(slices):
                        for s in range(PAGE):
                            for j in range(PANEL):
                                values[(c * count + n * PAGE + s) * PANEL + j] = block[s, c * PANEL + j]
                _chain(scores, first, longest, order, origin, group, values, origin, count, width, part, origin, width)
                for g in range(group):
                    for j in range(width):
                        column = (h * group + g) * width + j
                        seen = part[g * width + j]
                        out[b, column] = seen if first == 0 else out[b, column] + seen


@inner
def _choose(scores, experts, normalise, factor, ids, weights):
    """The best ids.size experts of a row, best first, with their weights; True when a tie or a NaN leaves it open."""
    apart()
    open_question = False
    for e in range(experts):
        open_question |= np.isnan(scores[e])
    for slot in range(ids.size):
        best = -1
        for e in range(experts):
            taken = False
            for before in range(slot):
                taken |= ids[before] == e
            if not taken:
                if best < 0 or scores[e] > scores[best]:
                    best = e
                elif scores[e] == scores[best]:
                    open_question = True
        ids[slot], weights[slot] = best, scores[best]
    total = weights[0]
    for slot in range(1, ids.size):
        total += weights[slot]
    for slot in range(ids.size):
        if normalise:
            weights[slot] /= total
        if factor != _ONE:
            weights[slot] *= factor
    return open_question


@inner
def _mix(h, ids, weights, w13, w2, layer, experts, f, chain, order, out):
    """Add the weighted experts of the rows of h [B, d] to `out` [B, d]."""
    apart()
    batch, d, k, origin = h.shape[0], h.shape[1], ids.shape[1], order[0]
    starts, place = np.zeros(experts + 1, np.int64), np.empty((batch, k), np.int64)
    for b in range(batch):
        for slot in range(k):
            starts[ids[b, slot] + 1] += 1
    for e in range(experts):
        starts[e + 1] += starts[e]
    token, filled = np.empty(batch * k, np.int64), starts[:experts].copy()
    for b in range(batch):
        for slot in range(k):
            e = ids[b, slot]
            place[b, slot] = filled[e]
            token[filled[e]] = b
            filled[e] += 1
    y, hidden = np.empty((batch * k, d), np.float32), np.empty((batch, 2 * f), np.float32)
    for e in range(experts):
        first, count = starts[e], starts[e + 1] - starts[e]
        if count == 0:
            continue
        at = layer * experts + e
        _multiply(
            h.ravel(), origin, d, token, first, count, w13, at * 2 * f * d, d, chain, 2 * f,
            hidden.ravel(), origin, 2 * f,
        )  # fmt: skip
        for r in range(count):
            for j in range(f):
                gate = hidden[r, j]
                hidden[r, j] = gate / (_ONE + _exp(-gate)) * hidden[r, f + j]
        _multiply(
            hidden.ravel(), origin, 2 * f, order, origin, count, w2, at * d * f, f, chain, d,
            y.ravel(), first * d, d,
        )  # fmt: skip
    for b in range(batch):
        for j in range(d):
            total = y[place[b, 0], j] * weights[b, 0]
            for slot in range(1, k):
                total = fma(y[place[b, slot], j], weights[b, slot], total)
            out[b, j] += total


@outer
def decode(
    x, attention_norm, wqkv, qk_norm, wo, mlp_norm, router, w13, w2, norm, cosine, sine, cache, pages, start,
    query_heads, experts, f, eps, scale, normalise, factor, chain, narrow, routes, scores, hidden,
):  # fmt: skip
    """One token of each sequence through all layers; True when some row's choice of experts is open (see _choose).

    x [B, d]: embeddings, overwritten. Weights are packed, flat, all layers after one another. cache [L, pages, 2K,
    PAGE, D] takes the new keys and values. Fills routes [B, L, k], scores [L, B, E padded] and hidden [B, d].
    """
    batch, d = x.shape
    width, kv_heads = cache.shape[4], cache.shape[2] // 2
    heads, columns, e_width = query_heads + kv_heads, (query_heads + 2 * kv_heads) * width, scores.shape[2]
    order, weights = np.arange(max(batch, query_heads)), np.empty((batch, routes.shape[2]), np.float32)
    h, qkv = np.empty((batch, d), np.float32), np.empty((batch, columns), np.float32)
    seen, projected = np.empty((batch, query_heads * width), np.float32), np.empty((batch, d), np.float32)
    open_question, origin = False, order[0]
    for n in range(attention_norm.shape[0]):
        _norm(x, attention_norm[n], eps, h)
        _multiply(
            h.ravel(), origin, d, order, origin, batch, wqkv, n * columns * d, d, chain, columns,
            qkv.ravel(), origin, columns,
        )  # fmt: skip
        _turn(qkv, heads, width, qk_norm[n], cosine, sine, start, eps)
        _attend(qkv, cache[n], pages, start, query_heads, scale, chain, order, seen)
        inside = query_heads * width
        _multiply(
            seen.ravel(), origin, inside, order, origin, batch, wo, n * d * inside, inside, chain, d,
            projected.ravel(), origin, d,
        )  # fmt: skip
        for b in range(batch):
            for j in range(d):
                x[b, j] += projected[b, j]
        _norm(x, mlp_norm[n], eps, h)
        if narrow:
            _narrow(h, router, n * e_width * d, experts, scores[n])
        else:
            _multiply(
                h.ravel(), origin, d, order, origin, batch, router, n * e_width * d, d, chain, e_width,
                scores[n].ravel(), origin, e_width,
            )  # fmt: skip
        for b in range(batch):
            _softmax(scores[n, b], experts, experts)
            open_question |= _choose(scores[n, b], experts, normalise, factor, routes[b, n], weights[b])
        _mix(h, routes[:, n], weights, w13, w2, n, experts, f, chain, order, x)
    _norm(x, norm, eps, hidden)
    return open_question
