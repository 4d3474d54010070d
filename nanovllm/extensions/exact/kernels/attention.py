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

from nanovllm.extensions.exact.kernels.sums import (
    divided,
    fold,
    load_sums,
    load_vectors,
    no_sums,
    store_sums,
    store_vectors,
    sum_tile,
)
from nanovllm.kernels.attention_variant import AttentionVariant, Hooks
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
    LOAD: Any  # the layout's
    KEY_TILE: int
    TILE: int  # the same, as `prefetch_tile` calls it
    ROWS: int = 0
    COLUMNS: bool = False  # whether rows are columns of scores and sums, see `sums`
    ONES: int = 8  # numbers of ones by which the matrix unit sums weights, the fewest that it takes

    cache_key = Hooks.cache_key

    def for_rows(self, rows: int, **columns: Any) -> "Sizes":
        """For so many rows, or a few more."""
        return self._replace(ROWS=max(rows, next_power_of_2(self.HEADS)), **columns)


def launch_options(device: torch.device, num_warps: int) -> dict[str, Any]:
    num_stages = 2 if has_hopper_shared_memory(device) else 1
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """
    What `varlen_prefill_attention` computes, or in a decode step `paged_decode_attention`, for a variant
    without hooks and heads of up to 128. A plan in `step.attention_plan` has work items (first query,
    queries, 0, end) whose ends are multiples of TILE.
    """
    tables, (_, heads, head_dim) = step.block_tables, q.shape
    if tables is None:
        layout, block_size, kv_heads, table_stride = ROWS, 1, k.shape[1], 0
    else:
        (block_size, kv_heads), table_stride = layout.page_sizes(k, head_dim), tables.stride(0)
    dim_pad = max(MIN_DOT_SIZE, next_power_of_2(head_dim))
    sizes = Sizes(heads // kv_heads, kv_heads, head_dim, dim_pad, block_size, layout.load, TILE, TILE)
    caches = k, v, *k.stride()[-3:-1], *v.stride()[-3:-1]
    inputs = (q, *q.stride()[:2]), caches, tables, table_stride, variant.scale * LOG2_E
    if not step.is_prefill:
        return _decode(q, inputs, step, sizes, layout.has_token_rows)
    out = q.new_empty(q.shape)
    are_few = step.max_seqlen_q * sizes.HEADS <= FEW_ROWS
    sizes = sizes.for_rows(FEW_ROWS if are_few else PREFILL_ROWS)
    num_seqs = len(step.cu_seqlens_q) - 1
    _prefill_kernel[(cdiv(step.max_seqlen_q, sizes.ROWS // sizes.HEADS), sizes.KV_HEADS, num_seqs)](
        *inputs, out, step.cu_seqlens_q, step.cu_seqlens_k,
        SIZES=sizes, **launch_options(q.device, min(8, sizes.ROWS // 16)),
    )  # fmt: skip
    return out


def _decode(q: Tensor, inputs: tuple[Any, ...], step: Any, sizes: Sizes, are_columns: bool) -> Tensor:
    batch, heads, head_dim = q.shape
    plan, device, options = step.attention_plan, q.device, launch_options(q.device, 4)
    prefixes = partial = counters = None
    max_tiles = cdiv(step.block_tables.shape[1] * sizes.BLOCK_SIZE, TILE)
    stored = batch * heads * max_tiles * (head_dim + 2)
    splits = min(RESIDENT * num_multiprocessors(device) // (batch * sizes.KV_HEADS), MAX_SPLITS)
    if plan is not None:
        prefixes = (
            q.new_empty(batch, heads, head_dim + 2, dtype=torch.float32),
            plan.prefix_lens,
            plan.readers,
        )
        _prefix_kernel[(2 * num_multiprocessors(device),)](
            *inputs, prefixes[0], plan.queries, plan.work_items, plan.num_work_items,
            SIZES=sizes.for_rows(FEW_ROWS), **options, **overlap_options(device),
        )  # fmt: skip
    elif splits > 1 and stored <= MAX_STORED:
        partial = q.new_empty(stored, dtype=torch.float32)
        counters = arrival_counters(device)
    # As many rows as the matrix unit takes for the products of a prefill, or as few columns.
    sizes = sizes.for_rows(FEW_ROWS)
    if are_columns:
        sizes = sizes.for_rows(MIN_COLUMNS, COLUMNS=True, ONES=16)
        options |= WHOLE if plan is None else BEHIND_PREFIX
    out = empty_padded(batch, heads * head_dim, q).view(q.shape)
    _decode_kernel[(sizes.KV_HEADS, batch, 1 if partial is None else splits)](
        *inputs, out, step.context_lens, prefixes, partial, counters, max_tiles,
        num_multiprocessors(device), SIZES=sizes, **options, **overlap_options(device),
    )  # fmt: skip
    return out


@triton.jit
def load_queries(q, token, head, is_row, SIZES):
    """`q` is where they lie, and the strides of tokens and of heads."""
    place, token_stride, head_stride = q
    return load_vectors(place + token * token_stride + head * head_stride, is_row, SIZES)


@triton.jit
def of_head(caches, kv_head, first=0):
    """Where a kv head's keys and values lie, from the `first` token on, and the strides of their tokens."""
    k, v, k_token_stride, k_head_stride, v_token_stride, v_head_stride = caches
    k += kv_head * k_head_stride + first * k_token_stride
    v += kv_head * v_head_stride + first * v_token_stride
    return k, v, k_token_stride, v_token_stride


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, caches, block_tables, table_stride, scale_log2, out, cu_seqlens_q, cu_seqlens_k, SIZES: tl.constexpr
):
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
    is_row = (row < QUERIES * SIZES.HEADS) & (index < len_q)
    token = (q_start + index).to(tl.int64)
    query = load_queries(q, token, head, is_row, SIZES)
    if block_tables is None:
        cache = of_head(caches, kv_head, k_start.to(tl.int64))
    else:
        cache = of_head(caches, kv_head)
        block_tables += seq.to(tl.int64) * table_stride
    keys = cache, block_tables, len_k, len_k - len_q + index, scale_log2
    position = len_k - len_q + first  # of the first query
    all_seen = (position + 1) // SIZES.KEY_TILE * SIZES.KEY_TILE
    some_seen = tl.minimum(position + QUERIES, len_k)
    sums = no_sums(SIZES)
    for start in range(0, all_seen, SIZES.KEY_TILE):
        sums = fold(sums, sum_tile(query, keys, start, SIZES, False), SIZES)
    for start in range(all_seen, some_seen, SIZES.KEY_TILE):
        sums = fold(sums, sum_tile(query, keys, start, SIZES, True), SIZES)
    place = (token * SIZES.KV_HEADS * SIZES.HEADS + head) * SIZES.HEAD_DIM
    store_vectors(out + place, divided(sums, SIZES), is_row, SIZES)


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    q, caches, block_tables, table_stride, scale_log2, prefixes, queries, work_items, num_work_items,
    SIZES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes every n-th pair of a work item and a kv head, if there are n programs."""
    pdl_wait_then_launch(OVERLAP)
    row = tl.arange(0, SIZES.ROWS)
    for pair in range(tl.program_id(0), tl.load(num_work_items) * SIZES.KV_HEADS, tl.num_programs(0)):
        kv_head = pair % SIZES.KV_HEADS
        item = work_items + pair // SIZES.KV_HEADS * 4
        first = tl.load(item)
        is_row = row < tl.load(item + 1) * SIZES.HEADS
        end = tl.load(item + 3)
        seq = masked_load(queries + first + row // SIZES.HEADS, is_row).to(tl.int64)
        head = kv_head * SIZES.HEADS + row % SIZES.HEADS
        query = load_queries(q, seq, head, is_row, SIZES)
        table = block_tables + tl.load(queries + first).to(tl.int64) * table_stride
        keys = of_head(caches, kv_head), table, end, None, scale_log2
        sums = no_sums(SIZES)
        for start in range(0, end, SIZES.KEY_TILE):
            sums = fold(sums, sum_tile(query, keys, start, SIZES, False), SIZES)
        place = prefixes + (seq * SIZES.KV_HEADS * SIZES.HEADS + head) * (SIZES.HEAD_DIM + 2)
        store_sums(place, sums, is_row, SIZES)


@triton.jit(do_not_specialize=["table_stride", "max_tiles", "num_multiprocessors"])
def _decode_kernel(
    q, caches, block_tables, table_stride, scale_log2, out, context_lens, prefixes, partial, counters,
    max_tiles, num_multiprocessors, SIZES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program computes the heads of one kv head, of one sequence. They are COLUMNS if keys and values are rows
    of the model's dtype: converted in registers they would be added up in another order. `prefixes` are sums
    over each sequence's first tokens, over how many, and which sequence's blocks it reads up to which token.
    With `partial` several programs share a context of more than two tiles: each computes every n-th one, if
    they are n, and the last one to end folds all.
    """
    SUMS: tl.constexpr = SIZES.HEAD_DIM + 2  # numbers of a row
    kv_head = tl.program_id(0)
    program = tl.program_id(2)
    seq = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + seq)
    row = tl.arange(0, SIZES.ROWS)
    is_row = row < SIZES.HEADS
    head = kv_head * SIZES.HEADS + row
    number = seq * SIZES.KV_HEADS * SIZES.HEADS + head  # of a head of the batch
    last_key = tl.full([SIZES.ROWS], 0, tl.int32) + context_len - 1
    table = block_tables + seq * table_stride
    begin = 0
    if prefixes is not None:
        prefix_sums, prefix_lens, readers = prefixes
        begin = tl.load(prefix_lens + seq)
        common = tl.load(readers + 2 * seq + 1) // 16 * 16  # 8-bit pages hold the values of 16 as one piece
        reader = tl.load(readers + 2 * seq)
    if OVERLAP and SIZES.COLUMNS:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if (program * tl.num_programs(1) + seq) * SIZES.KV_HEADS + kv_head < num_multiprocessors:
            place = begin + program * SIZES.KEY_TILE
            prefetch_tile(caches[0], caches[1], table, kv_head, place, context_len, SIZES)
    pdl_wait_then_launch(OVERLAP)
    query = load_queries(q, seq, head, is_row, SIZES)

    sums, cache = no_sums(SIZES), of_head(caches, kv_head)
    end = context_len
    is_written = is_row
    if prefixes is not None:
        is_there = row < tl.where(begin > 0, SIZES.HEADS, 0)
        sums = load_sums(prefix_sums + number * SUMS, is_there, SIZES)
    if partial is not None:
        tiles = tl.cdiv(context_len, SIZES.KEY_TILE)
        programs = tl.where(tiles > 2, tl.minimum(tl.num_programs(2), tiles), 1)
        is_alone = programs + program == 1
        end = tl.where(is_alone, context_len, 0)
        is_written = row < tl.where(is_alone, SIZES.HEADS, 0)
    for start in range(begin, end, SIZES.KEY_TILE):
        its_table = table
        if prefixes is not None:
            owner = tl.where(start + tl.arange(0, SIZES.KEY_TILE) < common, reader, seq)
            its_table = block_tables + owner.to(tl.int64) * table_stride
        keys = cache, its_table, end, last_key, scale_log2
        sums = fold(sums, sum_tile(query, keys, start, SIZES, True), SIZES)
    if partial is not None:
        if programs > 1:
            keys = cache, table, context_len, last_key, scale_log2
            place = partial + number * max_tiles * SUMS
            for i in range(tl.where(program < programs, program, tiles), tiles, programs):
                tile = sum_tile(query, keys, i * SIZES.KEY_TILE, SIZES, True)
                store_sums(place + i * SUMS, tile, is_row, SIZES)
            tl.debug_barrier()  # all threads have stored their part before the counter says so
            counter = counters + seq * SIZES.KV_HEADS + kv_head
            num_before = programs
            if program < programs:
                num_before = tl.atomic_add(counter, 1)
            is_written = row < tl.where(num_before == programs - 1, SIZES.HEADS, 0)
            if num_before == programs - 1:
                tl.store(counter, 0)
                for first in range(0, tiles, FOLDED):
                    for j in tl.static_range(FOLDED):
                        is_there = row < tl.where(first + j < tiles, SIZES.HEADS, 0)
                        part = load_sums(place + (first + j) * SUMS, is_there, SIZES)
                        sums = fold(sums, part, SIZES)
    store_vectors(out + number * SIZES.HEAD_DIM, divided(sums, SIZES), is_written, SIZES)
