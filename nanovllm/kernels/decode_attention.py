"""Attention of one new token per sequence over its paged KV cache: the kernel that decides decode throughput.

All query heads that share a kv head are computed together, so K and V are read once. When the batch is too
small to fill the GPU, several programs split the context of a sequence (split-KV, as in FlashDecoding), and
the last of them to finish combines the partial results. The number of splits follows from shapes alone, and
their boundaries from context lengths that the kernel reads on the device: one captured graph serves every
length. Longer sequences should come first: programs start in the order of the batch, and when the last ones
are short, all multiprocessors finish at about the same time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.runtime import (
    LOG2_E,
    MIN_DOT_SIZE,
    MINUS_INF,
    arrival_counters,
    cdiv,
    empty_padded,
    has_hopper_shared_memory,
    masked_load,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    pdl_wait_then_launch,
    prefetch_each,
    tl,
    triton,
)
from nanovllm.kernels.split_kv import own_tokens, store_result

MAX_SPLITS = 32
MIN_COLUMNS = 8  # the fewest that the matrix unit computes
PROGRAMS_PER_MULTIPROCESSOR = 3
MAX_APART = 16  # in a small batch query heads are spread over more programs, up to this many for each split
TILE_BYTES = 16384  # of the keys of a tile, and of its values
NUM_WARPS = 2  # with many columns four would multiply by an instruction that wants its operands elsewhere


class DecodeSizes(NamedTuple):
    """
    Constants of a launch. A program computes HEADS query heads of one kv head. With SPLIT it sees only a part
    of the context.
    """

    KV_HEADS: int
    SHARES: int  # programs that compute all heads of a sequence, or of a split; as many for each kv head
    HEADS: int
    HEADS_PAD: int  # rounded up to what the matrix unit takes
    HEAD_DIM: int
    DIM_PAD: int  # rounded up to what the matrix unit takes
    BLOCK_SIZE: int
    TILE: int  # tokens
    SPLIT: bool
    COMBINED_HEADS: int  # HEADS rounded up to a power of two


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """Attention over all tokens of every sequence, in the shape of q.

    q is [batch, heads, head_dim] with a contiguous last dimension, and the caches are contiguous
    [blocks, block_size, kv_heads, head_dim] or what the layout says. `step` is a `Context` of a decode step:
    entries of a block table beyond the end of its sequence are ignored, and a context of 0 (a padded row)
    gives zeros.
    """
    batch, num_heads, head_dim = q.shape
    block_size, kv_heads = layout.page_sizes(k_cache, head_dim)
    multiprocessors = num_multiprocessors(q.device)
    splits = min(cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, batch * kv_heads), MAX_SPLITS)
    heads, shares = num_heads // kv_heads, kv_heads
    # A small batch leaves the GPU room, and combining splits takes most of its time: spread the query heads.
    while not variant.reads_few and heads % 2 == 0 and 2 * shares * batch <= MAX_APART:
        heads, shares = heads // 2, 2 * shares
    combined_heads = next_power_of_2(heads)
    heads_pad = max(MIN_COLUMNS, combined_heads)
    dim_pad = max(MIN_DOT_SIZE, next_power_of_2(head_dim))
    most_tokens = 128
    # A step of the pipeline reads the block table, a later one the tile: with 4 a tile is under way while one
    # is multiplied.
    num_stages = 4 if has_hopper_shared_memory(q.device) else 2
    # Where latency counts more than bandwidth, tiles are small.
    if splits > 1 or variant.reads_few or heads_pad > MIN_COLUMNS:
        most_tokens, num_stages = 64, 3
    tokens = min(most_tokens, TILE_BYTES // (dim_pad * layout.decode_bytes(q, k_cache)))
    sizes = DecodeSizes(
        kv_heads,
        shares,
        heads,
        heads_pad,
        head_dim,
        dim_pad,
        block_size,
        TILE=max(MIN_DOT_SIZE, tokens),
        SPLIT=splits > 1,
        COMBINED_HEADS=combined_heads,
    )

    partial = counters = None
    if splits > 1:
        partial = q.new_empty(batch, splits, num_heads, head_dim + 1, dtype=torch.float32)
        counters = arrival_counters(q.device)
    out = empty_padded(batch, num_heads * head_dim, q).view(q.shape)
    kernel = layout.decode_kernel or _decode_kernel
    kernel[(shares, batch, splits)](
        q, k_cache, v_cache, step.block_tables, step.context_lens, variant.extras, out, partial, counters,
        variant.scale * LOG2_E, *q.stride()[:2], step.block_tables.stride(0), multiprocessors,
        SIZES=sizes, HOOKS=variant.hooks,
        num_warps=NUM_WARPS, num_stages=num_stages, **overlap_options(q.device),
    )  # fmt: skip
    return out


def paged_decode_attention_torch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    out = torch.zeros_like(q)
    begins = variant.first_token(step.context_lens).tolist()
    for i, (begin, end) in enumerate(zip(begins, step.context_lens.tolist(), strict=True)):
        if begin < end:
            keys, values = layout.read(k_cache, v_cache, step.block_tables[i], begin, end, q)
            # The query heads of one kv head are the query rows, so K and V are never expanded.
            queries = q[i : i + 1].unflatten(1, (len(keys), -1))
            out[i] = variant.attend(queries, keys[None], values[None]).flatten(1, 2)
    return out


@triton.jit(do_not_specialize=["table_stride", "num_multiprocessors"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, extras, out, partial, counters,
    scale_log2, q_batch_stride, q_head_stride, table_stride, num_multiprocessors,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Heads are columns: a tile of keys [TILE, DIM_PAD] times queries [DIM_PAD, HEADS_PAD], since the matrix
    unit takes 16 rows, and as few as 8 columns.
    """
    context_len, first, begin, end, used_splits = own_tokens(context_lens, extras, SIZES, HOOKS)
    share = tl.program_id(0)
    kv_head = share // (SIZES.SHARES // SIZES.KV_HEADS)
    seq = tl.program_id(1)
    table = block_tables + seq.to(tl.int64) * table_stride
    if OVERLAP:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if seq * SIZES.SHARES + share < num_multiprocessors:
            prefetch_tile(k_cache, v_cache, table, kv_head, begin, end, SIZES)
    pdl_wait_then_launch(OVERLAP)
    if SIZES.SPLIT and tl.program_id(2) >= used_splits:
        return

    query, index, highest, total, acc, kept = begin_decode(
        q, q_batch_stride, q_head_stride, extras, SIZES, HOOKS
    )
    _, head, dim = index
    is_dim = dim < SIZES.HEAD_DIM
    for start in range(begin, end, SIZES.TILE):
        token = start + tl.arange(0, SIZES.TILE)
        seen = token < end
        if HOOKS.first_token is not None:
            seen &= token >= first
        row_start = _row_start(table, start, end, kv_head, SIZES)
        key = masked_load(k_cache + row_start[:, None] + dim[None, :], seen[:, None] & is_dim[None, :])
        value = masked_load(v_cache + row_start[None, :] + dim[:, None], seen[None, :] & is_dim[:, None])
        key, value = key.to(query.dtype), value.to(query.dtype)
        score = tl.dot(key, query, input_precision="ieee") * scale_log2
        if HOOKS.score is not None:
            score = HOOKS.score(extras, score, head, (context_len - 1 - token)[:, None], HOOKS)
        score = tl.where(seen[:, None], score, MINUS_INF)
        new_highest = tl.maximum(highest, tl.max(score, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score - new_highest[None, :])
        total = total * shrink[None, :] + weight
        highest = new_highest
        acc = tl.dot(value, weight.to(value.dtype), acc * shrink[None, :], input_precision="ieee")

    total = tl.sum(total, axis=0)
    store_result(out, partial, counters, (highest, total, acc), kept, index, used_splits, SIZES, HOOKS)


@triton.jit
def begin_decode(q, q_batch_stride, q_head_stride, extras, SIZES, HOOKS):
    """
    -> queries [DIM_PAD, HEADS_PAD], and their index: number in the program, head, and dimension; what the
    sums over tokens begin with; and what `begin` of the hooks keeps for `end`.
    """
    row = tl.arange(0, SIZES.HEADS_PAD)
    dim = tl.arange(0, SIZES.DIM_PAD)
    head = tl.program_id(0) * SIZES.HEADS + row
    q += tl.program_id(1).to(tl.int64) * q_batch_stride
    address = q + head[None, :] * q_head_stride + dim[:, None]
    query = masked_load(address, (row < SIZES.HEADS)[None, :] & (dim < SIZES.HEAD_DIM)[:, None])
    index = row, head, dim
    highest = tl.full([SIZES.HEADS_PAD], MINUS_INF, tl.float32)
    # Each place in a tile has a sum of its own, until the end.
    total = tl.full([SIZES.TILE, SIZES.HEADS_PAD], 0.0, tl.float32)
    acc = tl.full([SIZES.DIM_PAD, SIZES.HEADS_PAD], 0.0, tl.float32)
    kept = ()
    if HOOKS.begin is not None:
        highest, total, kept = HOOKS.begin(extras, index, highest, total, SIZES, HOOKS)
    return query, index, highest, total, acc, kept


@triton.jit
def prefetch_tile(k_cache, v_cache, table, kv_head, begin, end, SIZES):
    """Start loading the tile at `begin` into the L2 cache, as far as it has tokens."""
    ROW_BYTES: tl.constexpr = SIZES.HEAD_DIM * k_cache.dtype.element_ty.primitive_bitwidth // 8
    if ROW_BYTES % 16 == 0:
        token = begin + tl.arange(0, SIZES.TILE)
        size = tl.where(token < end, ROW_BYTES, 0)
        row_start = _row_start(table, begin, end, kv_head, SIZES)
        prefetch_each(k_cache + row_start, size)
        prefetch_each(v_cache + row_start, size)


@triton.jit
def _row_start(table, start, end, kv_head, SIZES):
    """Where the keys of the tile from `start` on begin in their cache, and the values too."""
    IN_ONE_BLOCK: tl.constexpr = SIZES.BLOCK_SIZE % SIZES.TILE == 0
    index = tl.arange(0, SIZES.TILE)
    token = start if IN_ONE_BLOCK else start + index
    block = masked_load(table + token // SIZES.BLOCK_SIZE, token < end)
    slot = block.to(tl.int64) * SIZES.BLOCK_SIZE + token % SIZES.BLOCK_SIZE
    row_start = (slot * SIZES.KV_HEADS + kv_head) * SIZES.HEAD_DIM
    if IN_ONE_BLOCK:  # these are constants, where addresses of tokens anywhere would take registers
        row_start += index * (SIZES.KV_HEADS * SIZES.HEAD_DIM)
    return row_start
