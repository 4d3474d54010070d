"""Attention with one order of addition, for prefill, decode and shared prefixes alike.

Keys come in tiles of 128, counted from a sequence's first token. Each tile's sums begin with nothing, and
tiles are folded in order (`sums`). The sum of the weights goes through the matrix unit, too, which adds in
the order of the keys whatever the shape of a tile is. A program that does not begin with the first token must
not fold: it stores each tile's sums, and who arrives last folds all. Sums are divided once, at the end.
Kernels are compiled without the fusion of a product and a sum, which a compiler does in one kernel and not in
the next; where it is wanted, `tl.fma` says so.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.exact.kernels.attention_torch import exact_decode_torch, exact_prefill_torch
from nanovllm.extensions.exact.kernels.sums import (
    across,
    along,
    divided,
    fold,
    load_sums,
    no_sums,
    store_sums,
    sum_tile,
)
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.decode_attention import MIN_COLUMNS, prefetch_tile
from nanovllm.kernels.kv_store import ROWS, CacheLayout
from nanovllm.kernels.runtime import (
    LOG2_E,
    MIN_DOT_SIZE,
    arrival_counters,
    cdiv,
    empty_padded,
    has_hopper_shared_memory,
    masked_load,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    pdl_wait_then_launch,
    tl,
    triton,
    use_triton,
)

TILE = 128  # keys
PREFILL_ROWS = 128  # queries times heads that a program computes in a prefill
FEW_ROWS = 64  # the same where there are few queries, and over a shared prefix
MAX_SPLITS = 64  # programs that share a context
MAX_STORED = 1 << 24  # elements of tiles' sums; if there would be more, contexts are not split
# Warps of a program of decode, and the most registers of a thread with which two such programs fit on a
# multiprocessor, or three with fewer warps, which are faster behind a shared prefix.
RESIDENT = 2
WHOLE = {"num_warps": 8, "maxnreg": 128}
BEHIND_PREFIX = {"num_warps": 4, "maxnreg": 168}
FOLDED = tl.constexpr(8)  # tiles whose stored sums are loaded together


class Sizes(NamedTuple):
    """Constants of a launch. A program computes ROWS heads of queries over one kv head's cache."""

    HEADS: int  # that share a kv head
    KV_HEADS: int
    HEAD_DIM: int
    DIM_PAD: int  # HEAD_DIM rounded up to what the matrix unit takes
    BLOCK_SIZE: int
    KEY_TILE: int
    TILE: int  # the same, as `prefetch_tile` calls it
    ROWS: int
    COLUMNS: bool  # whether rows are columns of scores and sums, see `sums`
    ONES: int  # numbers of ones by which the matrix unit sums weights, the fewest that it takes


def launch_options(device: torch.device, num_warps: int) -> dict[str, Any]:
    num_stages = 2 if has_hopper_shared_memory(device) else 1
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def exact_prefill(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """What `varlen_prefill_attention` computes, for a variant without hooks and heads of up to 128."""
    if not use_triton(q):
        return exact_prefill_torch(q, k, v, variant, step, layout)
    tables = step.block_tables
    if tables is None:
        block_size, kv_heads, layout = 1, k.shape[1], ROWS
    else:
        block_size, kv_heads = layout.page_sizes(k, q.shape[2])
    out = q.new_empty(q.shape)
    are_few = step.max_seqlen_q * (q.shape[1] // kv_heads) <= FEW_ROWS
    sizes = _sizes(q, block_size, kv_heads, FEW_ROWS if are_few else PREFILL_ROWS)
    num_seqs = len(step.cu_seqlens_q) - 1
    _prefill_kernel[(cdiv(step.max_seqlen_q, sizes.ROWS // sizes.HEADS), kv_heads, num_seqs)](
        q, k, v, out, step.cu_seqlens_q, step.cu_seqlens_k, tables, variant.scale * LOG2_E,
        *q.stride()[:2], *k.stride()[-3:-1], *v.stride()[-3:-1], 0 if tables is None else tables.stride(0),
        SIZES=sizes, LOAD=layout.load, **launch_options(q.device, min(8, sizes.ROWS // 16)),
    )  # fmt: skip
    return out


def exact_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """
    What `paged_decode_attention` computes, for a variant without hooks and heads of up to 128. A plan in
    `step.attention_plan` has work items (first query, queries, 0, end) whose ends are multiples of TILE.
    """
    if not use_triton(q):
        return exact_decode_torch(q, k_cache, v_cache, variant, step, layout)
    batch, heads, head_dim = q.shape
    block_size, kv_heads = layout.page_sizes(k_cache, head_dim)
    plan, device = step.attention_plan, q.device
    # As many rows as the matrix unit takes for the products of a prefill, or as few columns.
    are_columns = layout.has_token_rows
    sizes = _sizes(q, block_size, kv_heads, MIN_COLUMNS if are_columns else FEW_ROWS, are_columns)
    shared = [q, k_cache, v_cache, step.block_tables, variant.scale * LOG2_E, step.block_tables.stride(0)]
    shared += [*q.stride()[:2], *k_cache.stride()[-3:-1], *v_cache.stride()[-3:-1]]
    prefixes = prefix_plan = partial = counters = None
    splits = min(RESIDENT * num_multiprocessors(device) // (batch * kv_heads), MAX_SPLITS)
    if plan is not None:
        prefix_plan, splits = (plan.prefix_lens, plan.readers), 1
        prefixes = q.new_empty(batch, heads, head_dim + 2, dtype=torch.float32)
        _prefix_kernel[(2 * num_multiprocessors(device),)](
            *shared, prefixes, plan.queries, plan.work_items, plan.num_work_items,
            SIZES=_sizes(q, block_size, kv_heads, FEW_ROWS), LOAD=layout.load,
            **launch_options(device, 4), **overlap_options(device),
        )  # fmt: skip
    max_tiles = cdiv(step.block_tables.shape[1] * block_size, TILE)
    stored = batch * heads * max_tiles * (head_dim + 2)
    if splits > 1 and stored <= MAX_STORED:
        partial = q.new_empty(stored, dtype=torch.float32)
        counters = arrival_counters(device)
    else:
        splits = 1
    out = empty_padded(batch, heads * head_dim, q).view(q.shape)
    options = launch_options(device, 4)
    if are_columns:
        options |= WHOLE if plan is None else BEHIND_PREFIX
    _decode_kernel[(kv_heads, batch, splits)](
        *shared, out, step.context_lens, prefixes, prefix_plan, partial, counters, max_tiles,
        num_multiprocessors(device), SIZES=sizes, LOAD=layout.load,
        **options, **overlap_options(device),
    )  # fmt: skip
    return out


def _sizes(q: Tensor, block_size: int, kv_heads: int, rows: int, columns: bool = False) -> Sizes:
    """For queries like q, and so many rows or a few more."""
    _, heads, head_dim = q.shape
    heads_per_kv = heads // kv_heads
    dim_pad = max(MIN_DOT_SIZE, next_power_of_2(head_dim))
    rows = max(rows, next_power_of_2(heads_per_kv))
    ones = 16 if columns else 8
    return Sizes(heads_per_kv, kv_heads, head_dim, dim_pad, block_size, TILE, TILE, rows, columns, ones)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, scale_log2,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, table_stride,
    SIZES: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """A program computes the heads of one kv head for as many queries of a sequence as ROWS has room for."""
    QUERIES: tl.constexpr = SIZES.ROWS // SIZES.HEADS
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last one sees the most keys, so it starts first
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    q_start = tl.load(cu_seqlens_q + seq)
    len_q = tl.load(cu_seqlens_q + seq + 1) - q_start
    first = block * QUERIES
    if first >= len_q:
        return
    k_start = tl.load(cu_seqlens_k + seq)
    len_k = tl.load(cu_seqlens_k + seq + 1) - k_start
    row = tl.arange(0, SIZES.ROWS)
    index = first + row // SIZES.HEADS
    head = kv_head * SIZES.HEADS + row % SIZES.HEADS
    dim = tl.arange(0, SIZES.DIM_PAD)
    is_row = (row < QUERIES * SIZES.HEADS) & (index < len_q)
    inside = is_row[:, None] & (dim < SIZES.HEAD_DIM)[None, :]
    token = (q_start + index).to(tl.int64)
    query = masked_load(q + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :], inside)

    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    if block_tables is None:
        k += k_start.to(tl.int64) * k_token_stride
        v += k_start.to(tl.int64) * v_token_stride
    else:
        block_tables += seq.to(tl.int64) * table_stride
    cache = k, v, block_tables, k_token_stride, v_token_stride
    last_key = len_k - len_q + index
    position = len_k - len_q + first  # of the first query
    all_seen = (position + 1) // SIZES.KEY_TILE * SIZES.KEY_TILE
    some_seen = tl.minimum(position + QUERIES, len_k)
    sums = no_sums(SIZES)
    for start in range(0, all_seen, SIZES.KEY_TILE):
        tile = sum_tile(query, cache, start, len_k, last_key, scale_log2, SIZES, LOAD, False)
        sums = fold(sums, tile, SIZES)
    for start in range(all_seen, some_seen, SIZES.KEY_TILE):
        tile = sum_tile(query, cache, start, len_k, last_key, scale_log2, SIZES, LOAD, True)
        sums = fold(sums, tile, SIZES)
    place = (token * tl.num_programs(1) * SIZES.HEADS + head) * SIZES.HEAD_DIM
    tl.store(out + place[:, None] + dim[None, :], divided(sums, SIZES), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    q, k_cache, v_cache, block_tables, scale_log2, table_stride, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    prefixes, queries, work_items, num_work_items,
    SIZES: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes every n-th pair of a work item and a kv head, if there are n programs."""
    pdl_wait_then_launch(OVERLAP)
    row = tl.arange(0, SIZES.ROWS)
    dim = tl.arange(0, SIZES.DIM_PAD)
    is_dim = dim < SIZES.HEAD_DIM
    for pair in range(tl.program_id(0), tl.load(num_work_items) * SIZES.KV_HEADS, tl.num_programs(0)):
        kv_head = pair % SIZES.KV_HEADS
        item = work_items + pair // SIZES.KV_HEADS * 4
        first = tl.load(item)
        is_row = row < tl.load(item + 1) * SIZES.HEADS
        end = tl.load(item + 3)
        seq = masked_load(queries + first + row // SIZES.HEADS, is_row).to(tl.int64)
        head = kv_head * SIZES.HEADS + row % SIZES.HEADS
        address = (q + seq * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
        query = masked_load(address, is_row[:, None] & is_dim[None, :])
        table = block_tables + tl.load(queries + first).to(tl.int64) * table_stride
        k, v = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
        cache = k, v, table, k_token_stride, v_token_stride
        sums = no_sums(SIZES)
        for start in range(0, end, SIZES.KEY_TILE):
            tile = sum_tile(query, cache, start, end, None, scale_log2, SIZES, LOAD, False)
            sums = fold(sums, tile, SIZES)
        place = prefixes + (seq * SIZES.KV_HEADS * SIZES.HEADS + head) * (SIZES.HEAD_DIM + 2)
        store_sums(place, sums, is_row, is_dim, SIZES)


@triton.jit(do_not_specialize=["table_stride", "max_tiles", "num_multiprocessors"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, scale_log2, table_stride, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    out, context_lens, prefixes, prefix_plan, partial, counters, max_tiles, num_multiprocessors,
    SIZES: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program computes the heads of one kv head, of one sequence. They are COLUMNS if keys and values are rows
    of the model's dtype: converted in registers they would be added up in another order. `prefixes` are sums
    over each sequence's first tokens; `prefix_plan` says over how many, and which sequence's blocks it reads
    up to which token. With `partial` several programs share a context of more than two tiles: each computes
    every n-th one, if they are n, and the last one to end folds all.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(2)
    seq = tl.program_id(1)
    context_len = tl.load(context_lens + seq)
    row = tl.arange(0, SIZES.ROWS)
    dim = tl.arange(0, SIZES.DIM_PAD)
    is_row = row < SIZES.HEADS
    is_dim = dim < SIZES.HEAD_DIM
    head = kv_head * SIZES.HEADS + row
    last_key = tl.full([SIZES.ROWS], 0, tl.int32) + context_len - 1
    table = block_tables + seq.to(tl.int64) * table_stride
    k, v = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    number = (seq * SIZES.KV_HEADS * SIZES.HEADS + head).to(tl.int64)  # of a head of the batch
    begin = 0
    if prefixes is not None:
        prefix_lens, readers = prefix_plan
        begin = tl.load(prefix_lens + seq)
        common = tl.load(readers + 2 * seq + 1) // 16 * 16  # 8-bit pages hold the values of 16 as one piece
        reader = tl.load(readers + 2 * seq)
    if OVERLAP:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if SIZES.COLUMNS:
            if (program * tl.num_programs(1) + seq) * SIZES.KV_HEADS + kv_head < num_multiprocessors:
                place = begin + program * SIZES.KEY_TILE
                prefetch_tile(k_cache, v_cache, table, kv_head, place, context_len, SIZES)
    pdl_wait_then_launch(OVERLAP)
    address = q + seq.to(tl.int64) * q_token_stride + head * q_head_stride
    inside = along(is_row, SIZES) & across(is_dim, SIZES)
    query = masked_load(along(address, SIZES) + across(dim, SIZES), inside)

    sums = no_sums(SIZES)
    end = context_len
    if prefixes is not None:
        is_there = row < tl.where(begin > 0, SIZES.HEADS, 0)
        sums = load_sums(prefixes + number * (SIZES.HEAD_DIM + 2), is_there, is_dim, SIZES)
    if partial is not None:
        tiles = tl.cdiv(context_len, SIZES.KEY_TILE)
        programs = tl.where(tiles > 2, tl.minimum(tl.num_programs(2), tiles), 1)
        end = tl.where((programs > 1) | (program > 0), 0, context_len)
        is_row = row < tl.where((programs > 1) | (program > 0), 0, SIZES.HEADS)
    for start in range(begin, end, SIZES.KEY_TILE):
        its_table = table
        if prefixes is not None:
            owner = tl.where(start + tl.arange(0, SIZES.KEY_TILE) < common, reader, seq)
            its_table = block_tables + owner.to(tl.int64) * table_stride
        cache = k, v, its_table, k_token_stride, v_token_stride
        tile = sum_tile(query, cache, start, end, last_key, scale_log2, SIZES, LOAD, True)
        sums = fold(sums, tile, SIZES)
    if partial is not None:
        if programs > 1:
            cache = k, v, table, k_token_stride, v_token_stride
            place = partial + number * max_tiles * (SIZES.HEAD_DIM + 2)
            for i in range(tl.where(program < programs, program, tiles), tiles, programs):
                start = i * SIZES.KEY_TILE
                tile = sum_tile(query, cache, start, context_len, last_key, scale_log2, SIZES, LOAD, True)
                store_sums(place + i * (SIZES.HEAD_DIM + 2), tile, row < SIZES.HEADS, is_dim, SIZES)
            tl.debug_barrier()  # all threads have stored their part before the counter says so
            counter = counters + seq * SIZES.KV_HEADS + kv_head
            num_before = programs
            if program < programs:
                num_before = tl.atomic_add(counter, 1)
            is_row = row < tl.where(num_before == programs - 1, SIZES.HEADS, 0)
            if num_before == programs - 1:
                tl.store(counter, 0)
                for first in range(0, tiles, FOLDED):
                    for j in tl.static_range(FOLDED):
                        is_there = row < tl.where(first + j < tiles, SIZES.HEADS, 0)
                        part = place + (first + j) * (SIZES.HEAD_DIM + 2)
                        sums = fold(sums, load_sums(part, is_there, is_dim, SIZES), SIZES)
    place = along(number * SIZES.HEAD_DIM, SIZES) + across(dim, SIZES)
    inside = along(is_row, SIZES) & across(is_dim, SIZES)
    tl.store(out + place, divided(sums, SIZES), mask=inside)
