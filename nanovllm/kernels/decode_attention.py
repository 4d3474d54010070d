"""Attention of one new token per sequence over its paged KV cache: the kernel that decides decode throughput.

All query heads that share a kv head are computed together, so K and V are read once. When the batch is too
small to fill the chip, the context of a sequence is split over several programs (split-KV, as in
FlashDecoding); the last of them to finish combines the partial results. The number of splits follows from
shapes alone, and their boundaries from the context length, which the kernel reads on the device: one captured
graph serves every length. Longer sequences should come first: programs start in the order of the batch, and
when the last ones are short, all multiprocessors finish at about the same time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.attention_rule import UNIT, AttentionRule, attend_torch, soften
from nanovllm.kernels.int8_cache import (
    fast_log2,
    is_int8,
    larger_of_each,
    load_int8_tile,
    page_sizes,
    read_sequence,
    read_tokens,
    scale_to_float16,
    widen,
)
from nanovllm.kernels.runtime import LOG2_E, cdiv, next_power_of_2, prefetch_each, tl, triton, use_triton
from nanovllm.kernels.shared_prefix import (
    MAX_PARTS,
    SharedPrefixes,
    add_part,
    add_parts_torch,
    load_part,
    shared_prefix_attention,
    shared_prefix_attention_torch,
)
from nanovllm.kernels.split_kv import combine_splits

MAX_SPLITS = 32
MIN_COLUMNS = 8  # of a matrix product whose rows are tokens
TWIN_GROUP = 8  # sequences that the torch twin computes at once
PROGRAMS_PER_MULTIPROCESSOR = 3
MAX_APART = 16  # programs that the query heads of a small batch are dealt out to, for each split
COMBINED_ELEMENTS = 8192  # of partial results that a program adds up at a time
MEASURED_ROW_BYTES = 256  # of a key: 128 elements of 2 bytes, for which the tiles were measured


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_tables: Tensor, context_lens: Tensor, rule: AttentionRule, shared: SharedPrefixes | None = None,
) -> Tensor:  # fmt: skip
    """Attention by this rule over the first context_lens tokens of every sequence, in the shape of q.

    q is [batch, heads, head_dim] with a contiguous last dimension, the caches are contiguous
    [blocks, block_size, kv_heads, head_dim], block_tables int32 [batch, max_blocks], context_lens int32
    [batch]. Entries of a block table beyond the end of its sequence are ignored. A context of 0 (a padded
    row) gives zeros. Keys and values of another dtype than q's are converted to it when they are read.
    With `shared`, what sequences begin with in common is read once; a rule with a window takes none.
    """
    if not use_triton(q):
        return paged_decode_attention_torch(q, k_cache, v_cache, block_tables, context_lens, rule, shared)
    batch, heads, head_dim = q.shape
    block_size, kv_heads = page_sizes(k_cache, head_dim)
    group = heads // kv_heads
    multiprocessors = runtime.num_multiprocessors(q.device)
    splits = min(cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, batch * kv_heads), MAX_SPLITS)
    readers = 1
    # A small batch leaves programs free, and what takes its time is adding up splits: share the query heads.
    while shared is None and group % 2 == 0 and 2 * batch * kv_heads * readers <= MAX_APART:
        group, readers = group // 2, 2 * readers
    heads_pad = next_power_of_2(group)
    group_pad = max(MIN_COLUMNS, heads_pad)
    dim_pad = max(runtime.MIN_DOT_SIZE, next_power_of_2(head_dim))
    element_size = k_cache.element_size()
    if is_int8(k_cache):
        element_size = 2  # of float16, which it becomes
    elif q.dtype != k_cache.dtype:  # each tile is held twice: as it was read, and converted
        element_size = 2 * max(q.element_size(), element_size)
    is_short = splits > 1 or shared is not None  # what a program reads: a split, or a few tokens of one's own
    # Four warps would multiply many columns by an instruction that wants its operands elsewhere.
    is_short |= group_pad > MIN_COLUMNS
    tile, num_warps, num_stages = _tile(dim_pad, element_size, is_short)
    if is_int8(k_cache) and not is_short and runtime.has_hopper_shared_memory(q.device):
        num_stages = 5  # a tile in advance
    prefix_lens = num_parts = parts = prefix_out = prefix_log_sums = None
    if shared is not None:
        prefix_lens, num_parts, parts = shared[:3]
        prefix_out, prefix_log_sums = shared_prefix_attention(q, k_cache, v_cache, block_tables, rule, shared)
    partial = counters = None
    if splits > 1:
        partial = torch.empty(batch * heads * splits * (head_dim + 1), dtype=torch.float32, device=q.device)
        counters = runtime.arrival_counters(q.device)
    out = runtime.empty_padded(batch, heads * head_dim, q).view(q.shape)
    if batch:
        _decode_kernel[(kv_heads * readers, batch, splits)](
            q, k_cache, v_cache, block_tables, context_lens,
            prefix_lens, num_parts, parts, prefix_out, prefix_log_sums, out, partial, counters, rule.sinks,
            rule.scale * LOG2_E, *q.stride()[:2], block_tables.stride(0), splits, multiprocessors,
            KV_HEADS=kv_heads, READERS=readers, GROUP=group, GROUP_PAD=group_pad,
            HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
            TILE=tile, SPLIT=splits > 1, MAX_PARTS=MAX_PARTS, WINDOW=rule.window, SOFTCAP=rule.softcap,
            HEADS_PAD=heads_pad, MOST_COMBINED=max(1, COMBINED_ELEMENTS // (heads_pad * dim_pad)),
            num_warps=num_warps, num_stages=num_stages, **runtime.overlap_options(q.device),
        )  # fmt: skip
    return out


def _tile(dim_pad: int, element_size: int, is_short: bool) -> tuple[int, int, int]:
    """Tokens of a tile, warps, pipeline stages.

    Keys and values of a tile take at most 64 KB, or 32 KB where `is_short` says that latency counts more.
    """
    most_tokens, num_warps, num_stages = (64, 2, 3) if is_short else (128, 4, 2)
    tokens = min(most_tokens, most_tokens * MEASURED_ROW_BYTES // (dim_pad * element_size))
    return max(runtime.MIN_DOT_SIZE, tokens), num_warps, num_stages


def paged_decode_attention_torch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_tables: Tensor, context_lens: Tensor, rule: AttentionRule, shared: SharedPrefixes | None = None,
) -> Tensor:  # fmt: skip
    assert shared is None or not rule.window
    is_plain = shared is None and rule.is_plain
    if is_plain and len(q) == 1 and not is_int8(k_cache):  # a single sequence needs no mask
        end = int(context_lens)
        begin = max(end - rule.window, 0) if rule.window else 0
        keys, values = read_sequence(k_cache, v_cache, block_tables[0], begin, end)
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        queries = q.reshape(1, keys.shape[1], -1, q.shape[2])  # a view, which costs less than `unflatten`
        return F.scaled_dot_product_attention(queries, keys, values, scale=rule.scale).reshape(q.shape)
    begins = torch.zeros_like(context_lens) if shared is None else shared.prefix_lens
    if rule.window:
        begins = (context_lens - rule.window).clamp_min(0)
    lengths, order = (context_lens - begins).sort()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    log_sums = torch.full(q.shape[:2], float("-inf"), device=q.device)
    # Groups of similar length need little padding, and the keys of one group fit in a CPU's cache.
    for rows, group_lengths in zip(order.split(TWIN_GROUP), lengths.split(TWIN_GROUP), strict=True):
        if group_lengths[-1]:
            spans = begins[rows], context_lens[rows]
            keys, values, seen = read_tokens(k_cache, v_cache, block_tables[rows], *spans, q.shape[2])
            # The query heads of one kv head are the query rows, so K and V are never expanded.
            queries = q[rows].unflatten(1, (keys.shape[1], -1))
            keys, values, mask = keys.to(q.dtype), values.to(q.dtype), seen[:, None, None]
            if is_plain:
                attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=rule.scale)
            else:
                sinks = rule.sinks_of_groups(keys.shape[1])
                attended, sums = attend_torch(queries, keys, values, mask, rule, sinks)
                log_sums[rows] = sums.flatten(1, 2)
            out[rows] = attended.flatten(1, 2).masked_fill(group_lengths[:, None, None] == 0, 0.0).to(q.dtype)
    if shared is None:
        return out
    prefixes = shared_prefix_attention_torch(q, k_cache, v_cache, block_tables, rule, shared)
    return add_parts_torch(out, log_sums, *prefixes, shared)


@triton.jit(do_not_specialize=["table_stride", "splits", "num_multiprocessors"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens,
    prefix_lens, num_parts, parts, prefix_out, prefix_log_sums, out, partial, counters, sinks,
    scale_log2, q_batch_stride, q_head_stride, table_stride, splits, num_multiprocessors,
    KV_HEADS: tl.constexpr, READERS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEADS_PAD: tl.constexpr, MOST_COMBINED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program computes the query heads of one kv head of a sequence, or one of READERS shares of them; when
    SPLIT, over a part of its context (whole tiles). Heads are columns: a tile of keys [TILE, DIM_PAD] times
    queries [DIM_PAD, GROUP_PAD], since the matrix unit takes 16 rows, and as few as 8 columns.
    """
    INT8: tl.constexpr = k_cache.dtype.element_ty == tl.uint8
    PAGE: tl.constexpr = (2 * HEAD_DIM + 4) * BLOCK_SIZE  # bytes of a head in a block, with INT8
    SHARES: tl.constexpr = KV_HEADS * READERS
    share = tl.program_id(0)
    kv_head = share // READERS
    seq = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first = 0  # the first token, and where its tile begins
    if prefix_lens is not None:
        first = tl.load(prefix_lens + seq)
    if WINDOW:
        first = tl.maximum(context_len - WINDOW, 0)
    begin = first // TILE * TILE
    end = context_len
    used_splits = 1  # a short context has fewer tiles than there are splits
    if SPLIT:
        own_len = context_len - begin
        split_len = tl.maximum(tl.cdiv(tl.cdiv(own_len, TILE), splits), 1) * TILE
        used_splits = tl.maximum(tl.cdiv(own_len, split_len), 1)
        begin += split * split_len
        end = tl.minimum(begin + split_len, context_len)
    table = block_tables + seq.to(tl.int64) * table_stride
    if OVERLAP:
        # The programs that start first prefetch their first tile while the query is still being computed.
        if seq * SHARES + share < num_multiprocessors:
            _prefetch_tile(k_cache, v_cache, table, kv_head, begin, end, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT:
        if split >= used_splits:
            return

    row = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    inside = (row < GROUP)[None, :] & (dim < HEAD_DIM)[:, None]
    head = share * GROUP + row
    q_address = q + seq.to(tl.int64) * q_batch_stride + head[None, :] * q_head_stride + dim[:, None]
    query = tl.load(q_address, mask=inside, other=0.0)
    if INT8:
        query, scale_log2, bias = scale_to_float16(query, scale_log2)

    # Sums over the tokens stay apart until the end, one for each place in a tile.
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([TILE, GROUP_PAD], tl.float32)
    acc = tl.zeros([DIM_PAD, GROUP_PAD], tl.float32)
    if INT8:
        highest_byte = tl.full([GROUP_PAD], -1.0e30, tl.float32)
    if sinks is not None:  # the first split begins with a key that has no value
        sink = tl.load(sinks + head, mask=row < GROUP, other=0.0).to(tl.float32) * UNIT
        highest = tl.where(split == 0, sink, highest)
        total += tl.where((tl.arange(0, TILE) == 0) & (split == 0), 1.0, 0.0)[:, None]
    if prefix_lens is not None:
        # The first split adds what groups have computed. The first part is loaded before it is needed.
        used_parts = tl.where(split == 0, tl.load(num_parts + seq), 0)
        prefix_out += head[None, :] * HEAD_DIM + dim[:, None]
        prefix_log_sums += head
        places = parts + seq * MAX_PARTS
        first_part, first_log_sum = load_part(
            places, 0, used_parts, prefix_out, prefix_log_sums, row, dim, SHARES, GROUP, HEAD_DIM
        )
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < end
        if prefix_lens is not None:
            seen &= token >= first
        if WINDOW:
            seen &= token >= first
        if INT8:
            key, value, key_scale, value_scale = load_int8_tile(
                k_cache + kv_head * PAGE, KV_HEADS * PAGE, table, start, end,
                HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, True,
            )  # fmt: skip
            score = tl.dot(widen(key), query, tl.zeros([TILE, GROUP_PAD], tl.float32) + bias[None, :])
            score = score * key_scale[:, None]
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
            row_start = (slot * KV_HEADS + kv_head) * HEAD_DIM
            key_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
            value_mask = seen[None, :] & (dim < HEAD_DIM)[:, None]
            key = tl.load(k_cache + row_start[:, None] + dim[None, :], mask=key_mask, other=0.0)
            value = tl.load(v_cache + row_start[None, :] + dim[:, None], mask=value_mask, other=0.0)
            key, value = key.to(query.dtype), value.to(query.dtype)
            score = tl.dot(key, query, input_precision="ieee")
        score = score * scale_log2
        if SOFTCAP > 0:
            score = soften(score, SOFTCAP)
        score = tl.where(seen[:, None], score, float("-inf"))
        if INT8:
            # Bytes are multiplied by their scale times their probability, in float16, so 1 at most.
            byte_score = score + tl.where(seen, fast_log2(value_scale), 0.0)[:, None]
            tile_highest, byte_highest = tl.reduce((score, byte_score), 0, larger_of_each)
        else:
            tile_highest = tl.max(score, axis=0)
        new_highest = tl.maximum(highest, tile_highest)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score - new_highest[None, :])
        total = total * shrink[None, :] + weight
        highest = new_highest
        if INT8:
            new_highest = tl.maximum(highest_byte, byte_highest)
            shrink = tl.exp2(highest_byte - new_highest)
            weight = tl.exp2(byte_score - new_highest[None, :]).to(tl.float16)
            highest_byte = new_highest
            # 1152 = 1024 + 128, by which `widen` gives too much, goes at once: left in the sum over a long
            # context it would cost float32 its last digits. (Of a score it is taken off in `bias`.)
            acc = tl.dot(widen(value) - 1152.0, weight, acc * shrink[None, :])
        else:
            weight = weight.to(value.dtype)
            acc = tl.dot(value, weight, acc * shrink[None, :], input_precision="ieee")

    total = tl.sum(total, axis=0)
    if INT8:
        acc = acc * tl.exp2(highest_byte - tl.where(total > 0, highest, 0.0))[None, :]

    if prefix_lens is not None:
        highest, total, acc = add_part(first_part, first_log_sum, highest, total, acc)
        for i in range(1, used_parts):
            part, log_sum = load_part(
                places, i, used_parts, prefix_out, prefix_log_sums, row, dim, SHARES, GROUP, HEAD_DIM
            )
            highest, total, acc = add_part(part, log_sum, highest, total, acc)

    result = acc / tl.where(total > 0, total, 1.0)[None, :]
    out_address = out + (seq.to(tl.int64) * SHARES * GROUP + head[None, :]) * HEAD_DIM + dim[:, None]
    if used_splits == 1:
        tl.store(out_address, result, mask=inside)
        return

    if SPLIT:
        pair = seq * SHARES + share
        num_rows = tl.num_programs(1) * SHARES * splits * GROUP
        first_row = pair * splits * GROUP
        log_sums = partial + num_rows.to(tl.int64) * HEAD_DIM  # log2 of each partial softmax's denominator
        own_row = (first_row + split * GROUP + row).to(tl.int64)
        tl.store(partial + own_row[None, :] * HEAD_DIM + dim[:, None], result, mask=inside)
        tl.store(log_sums + own_row, highest + tl.log2(total), mask=row < GROUP)
        tl.debug_barrier()  # all threads have stored their part before the counter says so
        num_before = tl.atomic_add(counters + pair, 1)
        if num_before == used_splits - 1:
            tl.store(counters + pair, 0)
            out += pair.to(tl.int64) * GROUP * HEAD_DIM
            combine_splits(
                partial, log_sums, first_row, used_splits, out, dim,
                GROUP, HEADS_PAD, HEAD_DIM, DIM_PAD, MOST_COMBINED,
            )  # fmt: skip


@triton.jit
def _prefetch_tile(
    k_cache, v_cache, table, kv_head, begin, end,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Start to load the tile at `begin` into the L2 cache, as far as it has tokens."""
    ROW_BYTES: tl.constexpr = HEAD_DIM * k_cache.dtype.element_ty.primitive_bitwidth // 8
    if ROW_BYTES % 16 == 0:
        token = begin + tl.arange(0, TILE)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        size = tl.where(token < end, ROW_BYTES, 0)
        if k_cache.dtype.element_ty == tl.uint8:
            # The values of 16 tokens take as much as their keys, and lie as far apart.
            row = (block * KV_HEADS + kv_head) * ((2 * HEAD_DIM + 4) * BLOCK_SIZE)
            row += token % BLOCK_SIZE * HEAD_DIM
            prefetch_each((k_cache + row).to(tl.int64), size)
            prefetch_each((v_cache + row + BLOCK_SIZE * HEAD_DIM).to(tl.int64), size)
        else:
            row = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
            prefetch_each((k_cache + row).to(tl.int64), size)
            prefetch_each((v_cache + row).to(tl.int64), size)
