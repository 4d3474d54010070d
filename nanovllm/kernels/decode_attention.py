"""Attention of one new token per sequence over its paged KV cache: the kernel that decides decode throughput.

All query heads that share a kv head are computed together, so K and V are read once. When the batch is too
small to fill the chip, the context of a sequence is split over several programs (split-KV, as in
FlashDecoding); the last of them to finish combines the partial results. The number of splits follows from
shapes alone, and their boundaries from the context length, which the kernel reads on the device: one captured
graph serves every length. Longer sequences should come first: programs start in the order of the batch, and
when the last ones are short, all multiprocessors finish at about the same time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.cache_layout import ROWS, CacheLayout
from nanovllm.kernels.runtime import LOG2_E, cdiv, next_power_of_2, prefetch_each, tl, triton, use_triton
from nanovllm.kernels.split_kv import own_span, store_result

MAX_SPLITS = 32
MIN_COLUMNS = 8  # of a matrix product whose rows are tokens
REFERENCE_ROWS = 8  # sequences that the torch reference computes at once
PROGRAMS_PER_MULTIPROCESSOR = 3
MAX_APART = 16  # programs that the query heads of a small batch are dealt out to, for each split
COMBINED_ELEMENTS = 8192  # of partial results that a program adds up at a time
MEASURED_ROW_BYTES = 256  # of a key: 128 elements of 2 bytes, for which the tiles were measured


class DecodeSizes(NamedTuple):
    """
    A program computes GROUP query heads of one kv head, whose heads are shared by READERS programs; when
    SPLIT, over a part of the context. What ends in PAD is rounded up to what the matrix unit or a power of
    two asks for. MOST_COMBINED partial results are added up at a time, of HEADS_PAD heads.
    """

    KV_HEADS: int
    READERS: int
    GROUP: int
    GROUP_PAD: int
    HEAD_DIM: int
    DIM_PAD: int
    BLOCK_SIZE: int
    TILE: int  # tokens
    SPLIT: bool
    HEADS_PAD: int
    MOST_COMBINED: int


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    layout: CacheLayout = ROWS,
) -> Tensor:
    """Attention over the first context_lens tokens of every sequence, in the shape of q.

    q is [batch, heads, head_dim] with a contiguous last dimension, the caches are contiguous
    [blocks, block_size, kv_heads, head_dim] or what the layout says, block_tables int32 [batch, max_blocks],
    context_lens int32 [batch]. Entries of a block table beyond the end of its sequence are ignored. A context
    of 0 (a padded row) gives zeros.
    """
    arguments = q, k_cache, v_cache, block_tables, context_lens, variant
    if not use_triton(q):
        return paged_decode_attention_torch(*arguments, layout)
    if layout.decode is not None:
        return layout.decode(*arguments)
    element_size = k_cache.element_size()
    if q.dtype != k_cache.dtype:  # each tile is held twice: as it was read, and converted
        element_size = 2 * max(q.element_size(), element_size)
    return launch_decode(_decode_kernel, *arguments, k_cache.shape[1:3], element_size)


def launch_decode(
    kernel: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    page_sizes: tuple[int, int],
    element_size: int,
    stages_of_long: int = 2,
) -> Tensor:
    """
    Launch `_decode_kernel`, or another one that takes the same arguments. A tile's keys and values have
    elements of this size; with long contexts so many pipeline stages load them.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = page_sizes
    group = heads // kv_heads
    multiprocessors = runtime.num_multiprocessors(q.device)
    splits = min(cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, batch * kv_heads), MAX_SPLITS)
    readers = 1
    # A small batch leaves programs free, and what takes its time is adding up splits: share the query heads.
    while not variant.reads_few and group % 2 == 0 and 2 * batch * kv_heads * readers <= MAX_APART:
        group, readers = group // 2, 2 * readers
    heads_pad = next_power_of_2(group)
    group_pad = max(MIN_COLUMNS, heads_pad)
    dim_pad = max(runtime.MIN_DOT_SIZE, next_power_of_2(head_dim))
    # Four warps would multiply many columns by an instruction that wants its operands elsewhere.
    is_short = splits > 1 or variant.reads_few or group_pad > MIN_COLUMNS
    tile, num_warps, num_stages = _tile(dim_pad, element_size, is_short, stages_of_long)
    most_combined = max(1, COMBINED_ELEMENTS // (heads_pad * dim_pad))
    sizes = DecodeSizes(
        *(kv_heads, readers, group, group_pad, head_dim, dim_pad, block_size),
        *(tile, splits > 1, heads_pad, most_combined),
    )
    partial = counters = None
    if splits > 1:
        partial = torch.empty(batch * heads * splits * (head_dim + 1), dtype=torch.float32, device=q.device)
        counters = runtime.arrival_counters(q.device)
    out = runtime.empty_padded(batch, heads * head_dim, q).view(q.shape)
    if batch:
        kernel[(kv_heads * readers, batch, splits)](
            q, k_cache, v_cache, block_tables, context_lens, variant.extras, out, partial, counters,
            variant.scale * LOG2_E, *q.stride()[:2], block_tables.stride(0), splits, multiprocessors,
            SIZES=sizes, HOOKS=variant.hooks,
            num_warps=num_warps, num_stages=num_stages, **runtime.overlap_options(q.device),
        )  # fmt: skip
    return out


def _tile(dim_pad: int, element_size: int, is_short: bool, stages_of_long: int) -> tuple[int, int, int]:
    """Tokens of a tile, warps, pipeline stages.

    Keys and values of a tile take at most 64 KB, or 32 KB where `is_short` says that latency counts more.
    """
    most_tokens, num_warps, num_stages = (64, 2, 3) if is_short else (128, 4, stages_of_long)
    tokens = min(most_tokens, most_tokens * MEASURED_ROW_BYTES // (dim_pad * element_size))
    return max(runtime.MIN_DOT_SIZE, tokens), num_warps, num_stages


def paged_decode_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    layout: CacheLayout = ROWS,
) -> Tensor:
    if len(q) == 1:  # a single sequence needs no mask
        begin = 0 if variant.sees_all else int(variant.first_token(context_lens))
        found = layout.read_one(k_cache, v_cache, block_tables[0], begin, int(context_lens))
        if found is not None:
            keys, values = (x.to(q.dtype) for x in found)
            queries = q.reshape(1, keys.shape[1], -1, q.shape[2])  # a view, which costs less than `unflatten`
            attended = variant.attend_decode(queries, keys, values, None, slice(None))
            return variant.finish_decode(attended.reshape(q.shape).to(q.dtype))
    begins = variant.first_token(context_lens)
    lengths, order = (context_lens - begins).sort()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    # Sequences of similar length need little padding, and the keys of a few fit in a CPU's cache.
    for rows, own_lengths in zip(order.split(REFERENCE_ROWS), lengths.split(REFERENCE_ROWS), strict=True):
        if own_lengths[-1]:
            spans = begins[rows], context_lens[rows]
            keys, values, seen = layout.read(k_cache, v_cache, block_tables[rows], *spans, q.shape[2])
            # The query heads of one kv head are the query rows, so K and V are never expanded.
            queries = q[rows].unflatten(1, (keys.shape[1], -1))
            keys, values, mask = keys.to(q.dtype), values.to(q.dtype), seen[:, None, None]
            attended = variant.attend_decode(queries, keys, values, mask, rows).flatten(1, 2)
            out[rows] = attended.masked_fill(own_lengths[:, None, None] == 0, 0.0).to(q.dtype)
    return variant.finish_decode(out)


@triton.jit(do_not_specialize=["table_stride", "splits", "num_multiprocessors"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, extras, out, partial, counters,
    scale_log2, q_batch_stride, q_head_stride, table_stride, splits, num_multiprocessors,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Heads are columns: a tile of keys [TILE, DIM_PAD] times queries [DIM_PAD, GROUP_PAD], since the matrix
    unit takes 16 rows, and as few as 8 columns.
    """
    GROUP_PAD: tl.constexpr = SIZES.GROUP_PAD
    DIM_PAD: tl.constexpr = SIZES.DIM_PAD
    TILE: tl.constexpr = SIZES.TILE
    SHARES: tl.constexpr = SIZES.KV_HEADS * SIZES.READERS
    share = tl.program_id(0)
    kv_head = share // SIZES.READERS
    seq = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first = 0
    if HOOKS.first_token is not None:
        first = HOOKS.first_token(extras, seq, context_len, HOOKS)
    begin, end, used_splits = own_span(context_len, first, split, splits, SIZES)
    table = block_tables + seq.to(tl.int64) * table_stride
    if OVERLAP:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if seq * SHARES + share < num_multiprocessors:
            _prefetch_tile(k_cache, v_cache, table, kv_head, begin, end, SIZES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SIZES.SPLIT:
        if split >= used_splits:
            return

    row = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    is_dim = dim < SIZES.HEAD_DIM
    inside = (row < SIZES.GROUP)[None, :] & is_dim[:, None]
    head = share * SIZES.GROUP + row
    q_address = q + seq.to(tl.int64) * q_batch_stride + head[None, :] * q_head_stride + dim[:, None]
    query = tl.load(q_address, mask=inside, other=0.0)

    # Sums over the tokens stay apart until the end, one for each place in a tile.
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([TILE, GROUP_PAD], tl.float32)
    acc = tl.zeros([DIM_PAD, GROUP_PAD], tl.float32)
    kept = ()
    if HOOKS.begin is not None:
        highest, total, kept = HOOKS.begin(
            extras, seq, split == 0, row, head, dim, highest, total, SIZES, HOOKS
        )
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < end
        if HOOKS.first_token is not None:
            seen &= token >= first
        block = tl.load(table + token // SIZES.BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * SIZES.BLOCK_SIZE + token % SIZES.BLOCK_SIZE
        row_start = (slot * SIZES.KV_HEADS + kv_head) * SIZES.HEAD_DIM
        key_mask = seen[:, None] & is_dim[None, :]
        value_mask = seen[None, :] & is_dim[:, None]
        key = tl.load(k_cache + row_start[:, None] + dim[None, :], mask=key_mask, other=0.0)
        value = tl.load(v_cache + row_start[None, :] + dim[:, None], mask=value_mask, other=0.0)
        key, value = key.to(query.dtype), value.to(query.dtype)
        score = tl.dot(key, query, input_precision="ieee") * scale_log2
        if HOOKS.score is not None:
            score = HOOKS.score(score, HOOKS)
        score = tl.where(seen[:, None], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score - new_highest[None, :])
        total = total * shrink[None, :] + weight
        highest = new_highest
        acc = tl.dot(value, weight.to(value.dtype), acc * shrink[None, :], input_precision="ieee")

    total = tl.sum(total, axis=0)
    if HOOKS.end is not None:
        highest, total, acc = HOOKS.end(kept, row, dim, highest, total, acc, SIZES, HOOKS)
    where = seq, share, split, splits, used_splits
    store_result(out, partial, counters, (highest, total, acc), where, (row, head, dim), SIZES)


@triton.jit
def _prefetch_tile(k_cache, v_cache, table, kv_head, begin, end, SIZES: tl.constexpr):
    """Start to load the tile at `begin` into the L2 cache, as far as it has tokens."""
    ROW_BYTES: tl.constexpr = SIZES.HEAD_DIM * k_cache.dtype.element_ty.primitive_bitwidth // 8
    if ROW_BYTES % 16 == 0:
        token = begin + tl.arange(0, SIZES.TILE)
        block = tl.load(table + token // SIZES.BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        size = tl.where(token < end, ROW_BYTES, 0)
        slot = block * SIZES.BLOCK_SIZE + token % SIZES.BLOCK_SIZE
        row = (slot * SIZES.KV_HEADS + kv_head) * SIZES.HEAD_DIM
        prefetch_each((k_cache + row).to(tl.int64), size)
        prefetch_each((v_cache + row).to(tl.int64), size)
