"""How the kernel that normalises, rotates and stores treats a token of an 8-bit cache: its hooks."""

from typing import NamedTuple

from torch import Tensor

from nanovllm.extensions.int8_cache.kernels.int8_cache import SMALLEST, page_sizes
from nanovllm.kernels.kv_store import StoreHooks
from nanovllm.kernels.runtime import tl, triton

SMALLEST_SCALE = tl.constexpr(SMALLEST)
HEADS_PER_PROGRAM = 4  # fewer than of rows, since they take longer


class StoreConstants(NamedTuple):
    BLOCK_SIZE: int
    STAGES: int  # of the rotation, which mixes 2 ** STAGES dims of each half
    ROUND_KV: bool  # whether k and v become what the cache holds of them


def int8_store_hooks(cache: Tensor, head_dim: int, is_prefill: bool) -> StoreHooks:
    half = head_dim // 2
    stages = (half & -half).bit_length() - 1
    constants = StoreConstants(page_sizes(cache, head_dim)[0], stages, is_prefill)
    return StoreHooks(rotate_heads, store_quantised, HEADS_PER_PROGRAM, constants)


@triton.jit
def rotate_heads(half1, half2, SIZES, HOOKS):
    return rotate_halves(half1, half2, SIZES.HEADS, SIZES.HALF_PAD, HOOKS.constants.STAGES)


@triton.jit
def store_quantised(k_cache, v_cache, slot, head, half, is_v, inside, address, half1, half2, SIZES, HOOKS):
    """What `store_rows` does, in 8-bit pages."""
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_SIZE: tl.constexpr = HOOKS.constants.BLOCK_SIZE
    byte1, byte2, scale, half1, half2 = quantize_halves(half1, half2)
    if HOOKS.constants.ROUND_KV:
        tl.store(address, half1, mask=inside)
        tl.store(address + HALF, half2, mask=inside)
    if slot >= 0:
        place = slot % BLOCK_SIZE
        page = slot // BLOCK_SIZE * SIZES.NUM_KV_HEADS + head
        page = page * ((2 * HEAD_DIM + 4) * BLOCK_SIZE)
        if is_v:
            values = v_cache + page + (BLOCK_SIZE + place // 16 * 16) * HEAD_DIM + place % 16
            tl.store(values + half * 16, byte1, mask=inside)
            tl.store(values + (HALF + half) * 16, byte2, mask=inside)
        else:
            keys = k_cache + page + place * HEAD_DIM + half
            tl.store(keys, byte1, mask=inside)
            tl.store(keys + HALF, byte2, mask=inside)
        scales = (k_cache + page + 2 * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.bfloat16))
        tl.store(scales + 2 * place + is_v, scale, mask=head < SIZES.NUM_KV_HEADS)


@triton.jit
def quantize_halves(half1, half2):
    """The bytes of both halves [rows, dims] of vectors, their scale [rows, 1], and what they stand for."""
    peak = tl.maximum(tl.max(tl.abs(half1), axis=1), tl.max(tl.abs(half2), axis=1))
    scale = (peak / 127.0).to(tl.bfloat16)[:, None]
    step = scale.to(tl.float32)
    inverse = tl.where(step > SMALLEST_SCALE, 1.0 / step, 0.0)
    whole1, whole2 = _round(half1 * inverse), _round(half2 * inverse)
    byte1, byte2 = (whole1 + 128.0).to(tl.uint8), (whole2 + 128.0).to(tl.uint8)
    return byte1, byte2, scale, whole1 * step, whole2 * step


@triton.jit
def _round(x):
    """To the nearest whole number from -127 to 127: float32 has no place for fractions beside 1.5 * 2^23."""
    x = (x + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(x, -127.0), 127.0)


@triton.jit
def rotate_halves(half1, half2, ROWS, WIDTH, STAGES):
    """`hadamard_rotate` of vectors whose halves are [ROWS, WIDTH], mixing 2 ** STAGES dims of each half."""
    norm = tl.rsqrt(tl.full([1, 1], 2.0 * (1 << STAGES), tl.float32))
    half1, half2 = (half1 + half2) * norm, (half1 - half2) * norm
    return _butterflies(half1, ROWS, WIDTH, STAGES), _butterflies(half2, ROWS, WIDTH, STAGES)


@triton.jit
def _butterflies(x, ROWS, WIDTH, STAGES):
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [ROWS, WIDTH // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
        x = tl.reshape(pairs, [ROWS, WIDTH])
    return x
