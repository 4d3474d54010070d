"""Decode attention over 8-bit pages: a kernel of its own, since bytes change every step of the arithmetic.

Bytes become float16 by a permutation (`widen`), which leaves 1152 too much in each: of scores it is taken off
at once, as the product's initial value. A token's key scale is multiplied into its scores, and its value
scale into its weights. Weights are float16 there, so they need a running maximum of their own.
"""

from nanovllm.extensions.int8_cache.kernels.int8_cache import load_int8_tile, widen
from nanovllm.kernels.decode_attention import begin_decode
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    MINUS_INF,
    masked_load,
    pdl_wait_then_launch,
    prefetch_each,
    tl,
    triton,
)
from nanovllm.kernels.split_kv import own_tokens, store_result


@triton.jit(do_not_specialize=["table_stride", "num_multiprocessors"])
def int8_decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, extras, out, partial, counters,
    scale_log2, q_batch_stride, q_head_stride, table_stride, num_multiprocessors,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The frame, and the roles of rows and columns, are those of `_decode_kernel`."""
    TILE: tl.constexpr = SIZES.TILE
    PAGE: tl.constexpr = (2 * SIZES.HEAD_DIM + 4) * SIZES.BLOCK_SIZE  # bytes of a head in a block
    context_len, first, begin, end, used_splits = own_tokens(context_lens, extras, SIZES, HOOKS)
    share = tl.program_id(0)
    kv_head = share // (SIZES.SHARES // SIZES.KV_HEADS)
    seq = tl.program_id(1)
    table = block_tables + seq.to(tl.int64) * table_stride
    if OVERLAP:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if seq * SIZES.SHARES + share < num_multiprocessors:
            _prefetch_tile(k_cache + kv_head * PAGE, SIZES.KV_HEADS * PAGE, table, begin, end, SIZES)
    pdl_wait_then_launch(OVERLAP)
    if SIZES.SPLIT and tl.program_id(2) >= used_splits:
        return

    query, index, highest, total, acc, kept = begin_decode(
        q, q_batch_stride, q_head_stride, extras, SIZES, HOOKS
    )
    query, scale_log2, bias = scale_to_float16(query, scale_log2)
    highest_byte = tl.full([SIZES.HEADS_PAD], -1.0e30, tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < end
        if HOOKS.first_token is not None:
            seen &= token >= first
        key, value, key_scale, value_scale = load_int8_tile(
            k_cache + kv_head * PAGE, SIZES.KV_HEADS * PAGE, table, start, end, SIZES, TILE, True
        )
        score = tl.full([TILE, SIZES.HEADS_PAD], 0.0, tl.float32) + bias[None, :]
        score = tl.dot(widen(key), query, score) * key_scale[:, None] * scale_log2
        if HOOKS.score is not None:
            score = HOOKS.score(extras, score, index[1], (context_len - 1 - token)[:, None], HOOKS)
        score = tl.where(seen[:, None], score, MINUS_INF)
        # Bytes are multiplied by their scale times their probability, in float16, so 1 at most.
        byte_score = score + tl.where(seen, fast_log2(value_scale), 0.0)[:, None]
        tile_highest, byte_highest = tl.reduce((score, byte_score), 0, larger_of_each)
        new_highest = tl.maximum(highest, tile_highest)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score - new_highest[None, :])
        total = total * shrink[None, :] + weight
        highest = new_highest
        new_highest = tl.maximum(highest_byte, byte_highest)
        shrink = tl.exp2(highest_byte - new_highest)
        weight = tl.exp2(byte_score - new_highest[None, :]).to(tl.float16)
        highest_byte = new_highest
        # 1152 = 1024 + 128, by which `widen` gives too much, goes at once: left in the sum over a long
        # context it would cost float32 its last digits. (Of a score it is taken off in `bias`.)
        acc = tl.dot(widen(value) - 1152.0, weight, acc * shrink[None, :])

    total = tl.sum(total, axis=0)
    acc = acc * tl.exp2(highest_byte - tl.where(total > 0, highest, 0.0))[None, :]
    store_result(out, partial, counters, (highest, total, acc), kept, index, used_splits, SIZES, HOOKS)


@triton.jit
def _prefetch_tile(head, block_stride, table, begin, end, SIZES):
    """Start loading the tokens of the tile at `begin` into the L2 cache, if it lies in one block."""
    if SIZES.HEAD_DIM % 16 == 0 and SIZES.BLOCK_SIZE % SIZES.TILE == 0:
        block = masked_load(table + begin // SIZES.BLOCK_SIZE, begin < end).to(tl.int64)
        index = tl.arange(0, SIZES.TILE)
        size = tl.where(begin + index < end, SIZES.HEAD_DIM, 0)
        # The values of 16 tokens take as much as their keys, and lie as far apart.
        row = head + block * block_stride + (begin % SIZES.BLOCK_SIZE + index) * SIZES.HEAD_DIM
        prefetch_each(row, size)
        prefetch_each(row + SIZES.BLOCK_SIZE * SIZES.HEAD_DIM, size)


@triton.jit
def scale_to_float16(query, scale_log2):
    """
    Queries [DIM_PAD, columns] in float16 for a product with widened keys, what scores are to be multiplied by
    [1, columns], and what the product begins with [columns], since each widened value is 1152 too large.
    """
    query = query.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(query), axis=0), 1.0e-30)
    query = (query / largest[None, :]).to(tl.float16)
    return query, (largest * scale_log2)[None, :], -1152.0 * tl.sum(query.to(tl.float32), axis=0)


@triton.jit
def fast_log2(x):
    """-inf for 0. A single instruction, where `tl.log2` is a polynomial."""
    if IS_INTERPRETED:
        return tl.log2(x)
    asm: tl.constexpr = "lg2.approx.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_of_each(a1, a2, b1, b2):
    """For `tl.reduce` of two tensors at once."""
    return tl.maximum(a1, b1), tl.maximum(a2, b2)
