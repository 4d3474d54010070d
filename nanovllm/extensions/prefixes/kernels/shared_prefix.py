"""Attention of many sequences over a prefix that they share: its keys and values are read once for all.

The query heads of the sequences stand below one another in a tile, so that one pass over the prefix serves
them all, on tensor cores. The results are partial: hooks have `paged_decode_attention` add each sequence's
own tokens to them.
Known as cascade attention, Hydragen (Juravsky et al., 2024), DeFT (Yao et al., 2025). A fixed number of
programs reads on the device what there is to do: one captured graph serves every plan.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant, Hooks
from nanovllm.kernels.decode_attention import paged_decode_attention
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.prefill_attention import PrefillSizes, attend_to_tiles
from nanovllm.kernels.runtime import (
    LOG2_E,
    MIN_DOT_SIZE,
    MINUS_INF,
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

MAX_PARTIALS = 16  # partial results of a sequence
PARTIALS = tl.constexpr(MAX_PARTIALS)  # for kernels
QUERY_TILE = 64  # rows: queries times their heads for one kv head


class CascadePlan(NamedTuple):
    """
    Which prefixes a decode step reads once, in tables on the device. A query is a sequence that shares a
    prefix. A work item, (first query, queries, begin, end), computes attention over these tokens of its first
    query's block table, for all its queries; the partial result of each has the query's index. Together they
    cover a sequence's first `prefix_lens` tokens, each once.
    """

    prefix_lens: Any  # int32 [batch]
    num_partials: Any  # int32 [batch]
    partials: Any  # int32 [batch, MAX_PARTIALS], indices of each sequence's partial results
    queries: Any  # int32 [queries], which sequence of the batch
    work_items: Any  # int32 [items, 4]
    num_work_items: Any  # int32 [1]
    # For kernels that read whole tiles as prefixes: the sequence of the batch in whose blocks each finds its
    # own first tokens, too, and how many.
    readers: Any  # int32 [batch, 2]


def plan_shapes(batch_size: int) -> CascadePlan:
    """Of the tables. Small batches may have more queries for each sequence, to keep the device busy."""
    max_queries = max(4 * batch_size, min(16 * batch_size, 512))
    max_items = max(2 * batch_size, 64)
    each = (batch_size,)
    shapes = each, each, (batch_size, MAX_PARTIALS), (max_queries,), (max_items, 4), (1,), (batch_size, 2)
    return CascadePlan(*shapes)


def queries_per_item(heads_per_kv_head: int) -> int:
    """The most queries that a work item may have."""
    return max(1, QUERY_TILE // heads_per_kv_head)


def can_share(config_heads: int, heads: int, head_dim: int, element_size: int, device: torch.device) -> bool:
    """
    Whether a layer with so many heads for one kv head can compute work items made for `config_heads`. Other
    layers have no room for all queries in a tile, or for the tile in shared memory.
    """
    has_rows = queries_per_item(config_heads) <= queries_per_item(heads)
    return has_rows and (head_dim * element_size <= 1024 or has_hopper_shared_memory(device))


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    variant: AttentionVariant,
    step: Any,
    layout: CacheLayout,
) -> Tensor:
    """
    What `paged_decode_attention` computes, for a step that has a `CascadePlan` in `attention_plan`. `variant`
    has no first token. A work item's keys and values are read from its first query's blocks alone.
    """
    if not use_triton(q):
        return cascade_attention_torch(q, k_cache, v_cache, variant, step, layout)
    plan, (_, heads, head_dim) = step.attention_plan, q.shape
    block_size, kv_heads = layout.page_sizes(k_cache, head_dim)
    heads_per_kv_head = heads // kv_heads
    # The partial results, and log2 of each softmax's denominator.
    results = q.new_empty(len(plan.queries), heads, head_dim, dtype=torch.float32)
    log_sums = results.new_empty(len(plan.queries), heads)
    dim_pad = max(MIN_DOT_SIZE, next_power_of_2(head_dim))
    element_size = max(q.element_size(), k_cache.element_size())
    key_tile, num_stages, programs = _tile(dim_pad, element_size, q.device)
    query_tile = max(QUERY_TILE, next_power_of_2(heads_per_kv_head))
    _shared_prefix_kernel[(programs * num_multiprocessors(q.device),)](
        q,
        k_cache,
        v_cache,
        step.block_tables,
        step.context_lens,
        variant.extras,
        results,
        log_sums,
        plan.queries,
        plan.work_items,
        plan.num_work_items,
        variant.scale * LOG2_E,
        *q.stride()[:2],
        step.block_tables.stride(0),
        kv_heads,
        *k_cache.stride()[-3:-1],
        PrefillSizes(
            heads_per_kv_head,
            head_dim,
            dim_pad,
            block_size,
            query_tile,
            key_tile,
        ),
        variant.hooks,
        layout.load,
        num_warps=8 if dim_pad * element_size >= 1024 else 4,
        num_stages=num_stages,
        **overlap_options(q.device),
    )
    # Of the tokens behind the prefixes, and what has been computed added to it.
    rest = AttentionVariant(variant.scale)
    score = score_as_layer if variant.hooks.score is not None else None
    rest.hooks = Hooks(prefix_len, score, begin_with_partial, add_partials, constants=variant.hooks)
    rest.extras = *plan[:3], results, log_sums, variant.extras
    rest.reads_few = True
    return paged_decode_attention(q, k_cache, v_cache, rest, step, layout)


def _tile(dim_pad: int, element_size: int, device: torch.device) -> tuple[int, int, int]:
    """Keys of a tile, pipeline stages, programs of a multiprocessor: measured on Hopper."""
    if element_size > 2:
        return 16, 1, 2
    if has_hopper_shared_memory(device):
        return {64: (64, 3, 3), 128: (64, 3, 2)}.get(dim_pad, (32, 2, 1))
    if dim_pad <= 128:
        return 64, 2, 1
    return (32, 1, 1) if dim_pad <= 256 else (16, 1, 1)


def cascade_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    variant: AttentionVariant,
    step: Any,
    layout: CacheLayout,
) -> Tensor:
    plan = step.attention_plan
    items = plan.work_items[: plan.num_work_items].tolist()
    spans = [(plan.queries[first : first + count], begin, end) for first, count, begin, end in items]
    # What a sequence has of its own is as if of a work item, too.
    each = torch.arange(len(q), device=q.device).split(1)
    own = zip(each, plan.prefix_lens.tolist(), step.context_lens.tolist(), strict=False)
    spans += [span for span in own if span[1] < span[2]]
    first_sums = float("-inf") if variant.hooks.begin is None else variant.first_sums()
    totals = q.new_zeros(q.shape[:2], dtype=torch.float32) + first_sums
    partials = []
    for rows, begin, end in spans:
        keys, values = layout.read(k_cache, v_cache, step.block_tables[rows[0]], begin, end, q)
        # [kv_heads, tokens, head_dim], and queries [kv_heads, queries * heads per kv head, head_dim]
        queries = _regroup(q[rows], len(keys)).float()
        scores = queries @ keys.mT.float() * variant.scale
        if variant.hooks.score is not None:
            scores = scores.unflatten(1, (len(rows), -1)).transpose(1, 2)
            last, key = step.context_lens[rows, None] - 1, torch.arange(begin, end, device=q.device)
            scores = variant.score(scores, last, key).transpose(1, 2).flatten(1, 2)
        log_sum = scores.logsumexp(-1)
        result = _regroup((scores - log_sum[..., None]).exp() @ values.float(), len(rows))
        log_sum = _regroup(log_sum, len(rows))
        totals[rows] = torch.logaddexp(totals[rows], log_sum)
        partials.append((rows, result, log_sum))
    out = totals.new_zeros(q.shape)
    for rows, result, log_sum in partials:
        out[rows] += result * (log_sum - totals[rows]).exp()[..., None]
    return out.to(q.dtype)


def _regroup(x: Tensor, count: int) -> Tensor:
    """[a, count * b, ...] -> [count, a * b, ...]."""
    return x.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2)


@triton.jit(do_not_specialize=["table_stride"])
def _shared_prefix_kernel(
    q, k_cache, v_cache, block_tables, context_lens, extras, results, log_sums,
    queries, work_items, num_work_items, scale_log2, q_batch_stride, q_head_stride, table_stride,
    KV_HEADS: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes every n-th pair of a work item and a kv head, if there are n programs."""
    pdl_wait_then_launch(OVERLAP)
    QUERY_TILE: tl.constexpr = SIZES.QUERY_TILE
    KEY_TILE: tl.constexpr = SIZES.KEY_TILE
    HEADS: tl.constexpr = SIZES.HEADS_PER_KV
    row = tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, SIZES.DIM_PAD)
    for pair in range(tl.program_id(0), tl.load(num_work_items) * KV_HEADS, tl.num_programs(0)):
        kv_head = pair % KV_HEADS
        item = work_items + pair // KV_HEADS * 4
        first = tl.load(item)
        count = tl.load(item + 1)
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        index = first + row // HEADS
        head = kv_head * HEADS + row % HEADS
        is_row = row < count * HEADS
        seq = masked_load(queries + index, is_row).to(tl.int64)
        inside = is_row[:, None] & (dim < SIZES.HEAD_DIM)[None, :]
        q_row = q + seq * q_batch_stride + head * q_head_stride
        query = masked_load(q_row[:, None] + dim[None, :], inside)

        reader = tl.load(queries + first).to(tl.int64)
        table = block_tables + reader * table_stride
        of_head = kv_head * HEAD_STRIDE
        cache = k_cache + of_head, v_cache + of_head, table, TOKEN_STRIDE, TOKEN_STRIDE
        last_key = tl.zeros_like(row) + end - 1
        if HOOKS.score is not None:
            last_key = tl.maximum(last_key, tl.load(context_lens + seq) - 1)  # the query's own
        tile = query, last_key, head[:, None], extras
        seen = end, begin, None
        highest = tl.full([QUERY_TILE], MINUS_INF, tl.float32)
        acc = tl.full([QUERY_TILE, SIZES.DIM_PAD], 0.0, tl.float32)
        sums = highest, tl.zeros_like(highest), acc
        aligned = tl.cdiv(begin, KEY_TILE) * KEY_TILE
        whole_end = end // KEY_TILE * KEY_TILE
        # Whole tiles first, then a part of one in front of them and one behind them, if there are such.
        sums = attend_to_tiles(
            aligned, whole_end, tile, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, False
        )
        start = begin // KEY_TILE * KEY_TILE
        sums = attend_to_tiles(start, begin, tile, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, True)
        start = tl.maximum(aligned, whole_end)
        sums = attend_to_tiles(start, end, tile, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, True)

        highest, total, acc = sums
        out_row = index.to(tl.int64) * KV_HEADS * HEADS + head
        out = results + out_row[:, None] * SIZES.HEAD_DIM + dim[None, :]
        tl.store(out, acc / total[:, None], mask=inside)
        tl.store(log_sums + out_row, highest + tl.log2(total), mask=is_row)


@triton.jit
def prefix_len(extras, seq, context_len, HOOKS: tl.constexpr):
    return tl.load(extras[0] + seq)


@triton.jit
def score_as_layer(extras, score, head, distance, HOOKS: tl.constexpr):
    LAYER: tl.constexpr = HOOKS.constants
    return LAYER.score(extras[5], score, head, distance, LAYER)


@triton.jit
def begin_with_partial(extras, index, highest, total, SIZES: tl.constexpr, HOOKS: tl.constexpr):
    """Load the first partial result before it is needed, after the layer's own `begin`."""
    LAYER: tl.constexpr = HOOKS.constants
    if LAYER.begin is not None:
        highest, total, _ = LAYER.begin(extras[5], index, highest, total, SIZES, LAYER)
    seq = tl.program_id(1)
    row, head, dim = index
    count = tl.where(tl.program_id(2) == 0, tl.load(extras[1] + seq), 0)
    indices = extras[2] + seq * PARTIALS
    results = extras[3] + (head[None, :] * SIZES.HEAD_DIM + dim[:, None])
    log_sums = extras[4] + head
    result, log_sum = load_partial(indices, 0, count, results, log_sums, row, dim, SIZES)
    return highest, total, (count, indices, results, log_sums, result, log_sum)


@triton.jit
def add_partials(kept, index, sums, SIZES: tl.constexpr, HOOKS: tl.constexpr):
    """Add the partial results to that of the first split."""
    row, _, dim = index
    highest, total, acc = sums
    count, indices, results, log_sums, result, log_sum = kept
    for i in range(0, count):
        new_highest = tl.maximum(tl.maximum(highest, log_sum), -1.0e30)  # finite where nothing was seen
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest)
        highest = new_highest
        total = total * shrink + weight
        acc = acc * shrink[None, :] + result * weight[None, :]
        result, log_sum = load_partial(indices, i + 1, count, results, log_sums, row, dim, SIZES)
    return highest, total, acc


@triton.jit
def load_partial(indices, i, count, results, log_sums, row, dim, SIZES: tl.constexpr):
    """A sequence's i-th partial result and log2 of its softmax's denominator (-inf: there is none)."""
    index = masked_load(indices + i, i < count)
    first_row = index.to(tl.int64) * (SIZES.SHARES * SIZES.HEADS)
    is_there = row < tl.where(i < count, SIZES.HEADS, 0)
    inside = is_there[None, :] & (dim < SIZES.HEAD_DIM)[:, None]
    result = masked_load(results + first_row * SIZES.HEAD_DIM, inside)
    log_sum = tl.load(log_sums + first_row, mask=is_there, other=MINUS_INF)
    return result, log_sum
