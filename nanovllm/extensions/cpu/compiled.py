"""A decode step as one compiled function, which every thread runs: from embeddings to the last norm.

Between two barriers threads compute different outputs or heads. What is short (norms, and the quantisation of
what a product reads) each of them does by itself, which takes less time than to wait. What a product reads is
quantised to integers of two digits, a byte each, with a scale for GROUP of them; all else is float32. (With
one digit the logits of a small model were four times as far from those in float32 as bfloat16's.)
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from nanovllm.extensions.cpu.packing import BYTES, GROUP, HALF, LANES, NIBBLES
from nanovllm.extensions.cpu.vectors import (
    DIGIT_BITS,
    HAS_DOT,
    add_bytes,
    add_halves,
    add_nibbles,
    as_float,
    barrier,
    load,
    on_threads,
    store,
)

f32, i32 = np.float32, np.int32
LARGEST = 127 << DIGIT_BITS  # of an input's codes
QKV, OUT, GATE_UP, DOWN = range(4)
MAX_ROWS = 8 if HAS_DOT else 1  # of a step; torch is faster with more
compiled = njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
entry = njit(cache=True, nogil=True)


class Step(NamedTuple):
    """Arrays, float32 unless said otherwise."""

    matrices: np.ndarray  # int64 [layers, 4, parts, (address, kind, first tile, the one behind)], see `pack`
    norms: np.ndarray  # [layers, 2, hidden]
    head_norms: np.ndarray  # [layers, 2, head_dim], of q and k; or without layers
    last_norm: np.ndarray  # [hidden]
    angles: np.ndarray  # [positions, head_dim], cosines, then sines
    eps: float
    scale: float
    cache: np.ndarray  # uint16, the bits of bfloat16: [2, layers, blocks, block_size, kv_heads, head_dim]


@compiled
def exp(x):
    """2^n times a Taylor series, to float32's precision."""
    power = min(max(x * f32(1 / math.log(2)), f32(-126)), f32(126))
    n = i32(power)
    rest, series = (power - f32(n)) * f32(math.log(2)), f32(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = series * rest + f32(factor)
    return series * as_float((n + i32(127)) << i32(23))


@compiled
def from_bf16(bits):
    return as_float(i32(bits) << i32(16))


@compiled
def to_bf16(bits):
    return np.uint16((bits + i32(0x7FFF) + ((bits >> i32(16)) & i32(1))) >> i32(16))


@compiled
def share(count, thread, threads):
    """Begin and end of what a thread computes of so many."""
    return count * thread // threads, count * (thread + 1) // threads


@compiled
def rms_norm(x, weight, eps, y):
    total = f32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = f32(1) / np.sqrt(total / f32(len(x)) + eps)
    for i in range(len(x)):
        y[i] = x[i] * factor * weight[i]


@compiled
def store_digits(x, codes, place):
    """The integer next to x, whose digits are stored GROUP bytes apart."""
    number = i32(x + f32(LARGEST + 1.5)) - i32(LARGEST + 1)  # what is cut off is positive
    high = (number + i32(1 << DIGIT_BITS - 1)) >> i32(DIGIT_BITS)
    codes[place], codes[place + GROUP] = high, number - (high << i32(DIGIT_BITS))
    return number


@compiled
def make_inputs(rows, width):
    """
    Memory for what a thread's products read: codes int8 [rows, 2 * width], of each group the high digits
    first; their scales [rows, groups]; and sums of the codes of a group's halves, int32 [rows, groups, 2].
    """
    groups = width // GROUP
    return (
        np.empty((rows, 2 * width), np.int8),
        np.empty((rows, groups), f32),
        np.empty((rows, groups, 2), i32),
    )


@compiled
def quantise(inputs, row, x):
    """What products read of a row."""
    codes, scales, sums = inputs
    for group in range(len(x) // GROUP):
        start, largest = group * GROUP, f32(0)
        for i in range(start, start + GROUP):
            largest = max(largest, abs(x[i]))
        inverse = f32(LARGEST) / max(largest, f32(1e-30))
        first = second = i32(0)
        for i in range(HALF):
            first += store_digits(x[start + i] * inverse, codes[row], 2 * start + i)
            second += store_digits(x[start + HALF + i] * inverse, codes[row], 2 * start + HALF + i)
        scales[row, group], sums[row, group, 0], sums[row, group, 1] = largest / f32(LARGEST), first, second


@compiled
def multiply(inputs, matrix, width, begin, end, y):
    """LANES outputs of each of these tiles, y [rows, outputs], from so many inputs that are quantised."""
    codes, scales, sums = inputs
    for part in range(len(matrix)):
        address, kind, first, last = matrix[part]
        groups, block_bytes = width // GROUP, LANES * (4 + (HALF if kind == NIBBLES else GROUP))
        for tile in range(max(begin, first), min(end, last)):
            start = address + (tile - first) * (4 * LANES + groups * block_bytes)
            for row in range(len(y)):
                x, total, block = codes[row].ctypes.data, load(start), start + 4 * LANES
                for group in range(groups):
                    numbers = block, x, scales[row, group], sums[row, group, 0], sums[row, group, 1]
                    if kind == NIBBLES:
                        total = add_nibbles(total, *numbers)
                    elif kind == BYTES:
                        total = add_bytes(total, *numbers)
                    else:
                        total = add_halves(total, *numbers)
                    x, block = x + 2 * GROUP, block + block_bytes
                store(y[row, tile * LANES :].ctypes.data, total)


@compiled
def multiply_add(inputs, thread, threads, matrix, width, x):
    """Add the product to x [rows, hidden]."""
    begin, end = share(x.shape[1] // LANES, thread, threads)
    added = np.empty_like(x)
    multiply(inputs, matrix, width, begin, end, added)
    for row in range(len(x)):
        for i in range(begin * LANES, end * LANES):
            x[row, i] += added[row, i]


@compiled
def rotate_and_store(step, layer, qkv, head, position, slot):
    """A head of a token's queries or keys, in place; or of its values."""
    size, kv_heads, dim = step.cache.shape[3:]
    heads = len(qkv) - 2 * kv_heads
    x, is_query, is_value = qkv[head], head < heads, head >= heads + kv_heads
    if not is_value:
        if len(step.head_norms):
            rms_norm(x, step.head_norms[layer, i32(not is_query)], step.eps, x)
        for i in range(dim // 2):
            cos, sin, half = step.angles[position, i], step.angles[position, dim // 2 + i], x[dim // 2 + i]
            x[i], x[dim // 2 + i] = x[i] * cos - half * sin, half * cos + x[i] * sin
    if not is_query and slot >= 0:
        row = step.cache[i32(is_value), layer, slot // size, slot % size, (head - heads) % kv_heads]
        bits = x.view(np.int32)
        for i in range(dim):
            row[i] = to_bf16(bits[i])


@compiled
def attend(query, keys, values, head, table, length, scale, scores, out):
    """A query head, which reads this kv head; keys and values are a layer's."""
    size, highest, total = keys.shape[1], f32(-np.inf), f32(0)
    out[:] = f32(0)
    for token in range(length):
        key, score = keys[table[token // size], token % size, head], f32(0)
        for i in range(len(query)):
            score += query[i] * from_bf16(key[i])
        scores[token] = score * scale
        highest = max(highest, scores[token])
    for token in range(length):
        scores[token] = exp(scores[token] - highest)
        total += scores[token]
    for token in range(length):
        value, weight = values[table[token // size], token % size, head], scores[token] / total
        for i in range(len(out)):
            out[i] += weight * from_bf16(value[i])


@compiled
def silu_and_mul(gates, begin, end):
    """The first half of a row are gates; in place."""
    for row in gates:
        for i in range(begin, end):
            row[i] *= row[len(row) // 2 + i] / (f32(1) + exp(-row[i]))


@compiled
def wait(threads):
    if threads > 1:
        barrier()


@compiled
def run_layers(arguments, thread, threads):
    step, x, positions, slots, lengths, tables, qkv, attended, gates = arguments
    (rows, hidden), width, kv_heads = x.shape, gates.shape[1] // 2, step.cache.shape[4]
    heads, dim = attended.shape[1:]
    flat_qkv, normed = qkv.reshape(rows, -1), np.empty(hidden, f32)
    inputs = make_inputs(rows, max(hidden, heads * dim, width))
    scores = np.empty(tables.shape[1] * step.cache.shape[3], f32)
    for layer in range(len(step.matrices)):
        matrix = step.matrices[layer]
        for row in range(rows):
            rms_norm(x[row], step.norms[layer, 0], step.eps, normed)
            quantise(inputs, row, normed)
        begin, end = share(flat_qkv.shape[1] // LANES, thread, threads)
        multiply(inputs, matrix[QKV], hidden, begin, end, flat_qkv)
        wait(threads)
        for item in range(thread, rows * qkv.shape[1], threads):
            row, head = item // qkv.shape[1], item % qkv.shape[1]
            rotate_and_store(step, layer, qkv[row], head, positions[row], slots[row])
        wait(threads)
        for item in range(thread, rows * heads, threads):
            row, head = item // heads, item % heads
            seen = step.cache[0, layer], step.cache[1, layer], head // (heads // kv_heads)
            its = tables[row], lengths[row], step.scale, scores, attended[row, head]
            attend(qkv[row, head], *seen, *its)
        wait(threads)
        for row in range(rows):
            quantise(inputs, row, attended[row].reshape(-1))
        multiply_add(inputs, thread, threads, matrix[OUT], heads * dim, x)
        wait(threads)
        for row in range(rows):
            rms_norm(x[row], step.norms[layer, 1], step.eps, normed)
            quantise(inputs, row, normed)
        begin, end = share(width // LANES, thread, threads)
        for half in range(2):
            start = half * width // LANES
            multiply(inputs, matrix[GATE_UP], hidden, start + begin, start + end, gates)
        silu_and_mul(gates, begin * LANES, end * LANES)
        wait(threads)
        for row in range(rows):
            quantise(inputs, row, gates[row, :width])
        multiply_add(inputs, thread, threads, matrix[DOWN], width, x)
        wait(threads)
    for row in range(thread, rows, threads):
        rms_norm(x[row], step.last_norm, step.eps, x[row])


@compiled
def run_head(arguments, thread, threads):
    head, x, logits = arguments
    inputs = make_inputs(*x.shape)
    for row in range(len(x)):
        quantise(inputs, row, x[row])
    begin, end = share(logits.shape[1] // LANES, thread, threads)
    multiply(inputs, head, x.shape[1], begin, end, logits)


@entry
def decode_step(arguments, threads):
    """
    x [rows, hidden] becomes hidden states; of (step, x, positions, slots, lengths, tables) and what threads
    share: qkv [rows, heads + 2 * kv_heads, head_dim], attended [rows, heads, head_dim], gates [rows, 2 *
    width].
    """
    if threads == 1:
        run_layers(arguments, 0, 1)
    else:
        on_threads(run_layers, arguments, threads)


@entry
def compute_logits(arguments, threads):
    """From hidden states x to logits [rows, outputs]; of (head as a Step's matrix, x, logits)."""
    if threads == 1:
        run_head(arguments, 0, 1)
    else:
        on_threads(run_head, arguments, threads)
