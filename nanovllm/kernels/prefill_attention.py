"""Causal attention over sequences laid end to end, in FlashAttention-2's tiled form: scores are never stored.

The queries are the last len_q of a sequence's len_k tokens; query i sees the first len_k - len_q + i + 1
keys. So whole prompts, chunks of prompts and prompts with a cached beginning are one case. Keys and values
are contiguous or, with block tables, in the paged cache.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import ROWS, CacheLayout
from nanovllm.kernels.runtime import (
    LOG2_E,
    MIN_DOT_SIZE,
    MINUS_INF,
    cdiv,
    has_hopper_shared_memory,
    masked_load,
    next_power_of_2,
    tl,
    triton,
)

SHORT_QUERIES = 64  # a step whose sequences compute at most this many tokens each uses smaller tiles


class PrefillSizes(NamedTuple):
    """A program computes QUERY_TILE queries of one head. HEADS_PER_KV heads share a kv head."""

    HEADS_PER_KV: int
    HEAD_DIM: int
    DIM_PAD: int  # HEAD_DIM rounded up to what the matrix unit takes
    BLOCK_SIZE: int
    QUERY_TILE: int
    KEY_TILE: int


def varlen_prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """Attention of q [tokens, heads, head_dim] over k, v; returns the shape of q.

    `step` is a `Context` of a prefill. k and v are [keys, kv_heads, head_dim], last dimension contiguous, or
    if it has block_tables the contiguous caches [blocks, block_size, kv_heads, head_dim], or what the layout
    says.
    """
    _, heads, head_dim = q.shape
    tables = step.block_tables
    if tables is None:
        block_size, kv_heads, table_stride, layout = 1, k.shape[1], 0, ROWS
    else:
        block_size, kv_heads = layout.page_sizes(k, head_dim)
        table_stride = tables.stride(0)
    out = q.new_empty(q.shape)
    dim_pad = max(MIN_DOT_SIZE, next_power_of_2(head_dim))
    element_size = max(q.element_size(), k.element_size())
    query_tile, key_tile, num_warps, num_stages = _tiles(dim_pad, element_size, step.max_seqlen_q, q.device)
    sizes = PrefillSizes(heads // kv_heads, head_dim, dim_pad, block_size, query_tile, key_tile)
    _prefill_kernel[(cdiv(step.max_seqlen_q, query_tile), heads, len(step.cu_seqlens_q) - 1)](
        q,
        k,
        v,
        out,
        step.cu_seqlens_q,
        step.cu_seqlens_k,
        tables,
        variant.extras,
        variant.scale * LOG2_E,
        *q.stride()[:2],
        *k.stride()[-3:-1],
        *v.stride()[-3:-1],
        table_stride,
        SIZES=sizes,
        HOOKS=variant.hooks,
        LOAD=layout.load,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tiles(
    dim_pad: int, element_size: int, max_seqlen_q: int, device: torch.device
) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, pipeline stages: the fastest on Hopper, what fits on other chips."""
    if element_size > 2:
        return 16, 16, 4, 1
    if not has_hopper_shared_memory(device):
        if dim_pad <= 128:
            return 128, 64, 8, 2
        return (128, 32, 8, 1) if dim_pad == 256 else (64, 16, 8, 1)
    if max_seqlen_q <= SHORT_QUERIES and dim_pad <= 128:
        return SHORT_QUERIES, 64, 4, 3
    if dim_pad < 128:
        return 128, 64, 8, 3
    return {128: (128, 128, 8, 3), 256: (128, 64, 8, 2)}.get(dim_pad, (64, 32, 8, 2))


def varlen_prefill_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    out = q.new_empty(q.shape)
    ends_k = step.cu_seqlens_k.tolist()
    for i, (begin, end) in enumerate(pairwise(step.cu_seqlens_q.tolist())):
        len_q, len_k = end - begin, ends_k[i + 1] - ends_k[i]
        if 0 in (len_q, len_k):  # padding sees no keys
            out[begin:end] = 0
            continue
        ends = torch.arange(len_k - len_q + 1, len_k + 1, device=q.device)  # behind each query's last key
        begins = variant.first_token(ends)
        first = int(begins[0])
        mask = None
        if len_q != len_k or begins[-1]:  # else each query sees all keys up to its own
            key = torch.arange(first, len_k, device=q.device)
            mask = (key >= begins[:, None]) & (key < ends[:, None])
        if step.block_tables is None:
            seen = slice(ends_k[i] + first, ends_k[i + 1])
            keys, values = k[seen].transpose(0, 1), v[seen].transpose(0, 1)
        else:
            keys, values = layout.read(k, v, step.block_tables[i], first, len_k, q)
        # [kv_heads, heads per kv head, tokens, head_dim]; K and V are expanded without a copy.
        queries = q[begin:end].unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
        keys, values = (x.unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (keys, values))
        attended = variant.attend(queries, keys, values, mask, is_causal=mask is None)
        out[begin:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, extras, scale_log2,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, table_stride,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """A program computes QUERY_TILE queries of one head of one sequence."""
    QUERY_TILE: tl.constexpr = SIZES.QUERY_TILE
    KEY_TILE: tl.constexpr = SIZES.KEY_TILE
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tile sees the most keys, so it starts first
    head = tl.program_id(1)
    seq = tl.program_id(2)
    q_start = tl.load(cu_seqlens_q + seq)
    len_q = tl.load(cu_seqlens_q + seq + 1) - q_start
    first = tile * QUERY_TILE
    if first >= len_q:
        return
    k_start = tl.load(cu_seqlens_k + seq)
    len_k = tl.load(cu_seqlens_k + seq + 1) - k_start

    index = first + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, SIZES.DIM_PAD)
    inside = (index < len_q)[:, None] & (dim < SIZES.HEAD_DIM)[None, :]
    token = (q_start + index).to(tl.int64)
    query = masked_load(q + token[:, None] * q_token_stride + head * q_head_stride + dim[None, :], inside)

    kv_head = head // SIZES.HEADS_PER_KV
    k_head = k + kv_head * k_head_stride
    v_head = v + kv_head * v_head_stride
    if block_tables is None:
        k_head += k_start.to(tl.int64) * k_token_stride
        v_head += k_start.to(tl.int64) * v_token_stride
    else:
        block_tables += seq.to(tl.int64) * table_stride
    last_key = len_k - len_q + index  # the last key that each query sees
    position = len_k - len_q + first  # of the first query
    all_seen = tl.maximum(position + 1, 0) // KEY_TILE * KEY_TILE
    some_seen = tl.minimum(position + QUERY_TILE, len_k)

    highest = tl.full([QUERY_TILE], MINUS_INF, tl.float32)
    total = tl.zeros_like(highest)
    acc = tl.full([QUERY_TILE, SIZES.DIM_PAD], 0.0, tl.float32)
    if HOOKS.begin_prefill is not None:
        highest, total = HOOKS.begin_prefill(extras, head, highest, total, HOOKS)
    sums = highest, total, acc
    cache = k_head, v_head, block_tables, k_token_stride, v_token_stride
    begin = 0
    seen = len_k, None, None
    queries = query, last_key, head, extras
    if HOOKS.first_token is not None:
        # Before first_key no query sees a key, and from `begin` on every query sees them.
        first_key = tl.maximum(HOOKS.first_token(extras, seq, position + 1, HOOKS), 0)
        begin = tl.maximum(HOOKS.first_token(extras, seq, position + QUERY_TILE, HOOKS), 0)
        unseen_key = HOOKS.first_token(extras, seq, last_key + 1, HOOKS) - 1  # of each query
        begin = tl.minimum(tl.cdiv(begin, KEY_TILE) * KEY_TILE, all_seen)
        seen = len_k, first_key, unseen_key
        start = first_key // KEY_TILE * KEY_TILE
        sums = attend_to_tiles(start, begin, queries, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, True)
    # Every query sees the keys from here on, without a mask, and some queries the last ones.
    sums = attend_to_tiles(begin, all_seen, queries, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, False)
    sums = attend_to_tiles(
        all_seen, some_seen, queries, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, True
    )

    _, total, acc = sums
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = token[:, None] * tl.num_programs(1) + head
    tl.store(out + row * SIZES.HEAD_DIM + dim[None, :], result, mask=inside)


@triton.jit
def attend_to_tiles(begin, end, queries, cache, seen, sums, scale_log2, SIZES, HOOKS, LOAD, MASKED):
    """
    Add the tiles from `begin`, a multiple of KEY_TILE, up to `end` to the sums: exp2(score - highest) to
    `total`, values with these weights to `acc`. `queries` are a tile of them, the last key that each sees,
    which is its own, their heads, and what hooks get. `load_rows` explains `cache`. `seen` is (len_k,
    first_key, unseen_key): no query sees a key before first_key (None: 0), or from len_k on. If tiles are
    MASKED, each sees keys behind unseen_key (None: from 0 on) up to its last.
    """
    highest, total, acc = sums
    query, last_key, head, extras = queries
    len_k, first_key, unseen_key = seen
    for start in range(begin, end, SIZES.KEY_TILE):
        token = start + tl.arange(0, SIZES.KEY_TILE)
        inside = token < len_k
        if first_key is not None:
            inside &= token >= first_key
        key, value = LOAD(cache, start, len_k, inside, query.dtype, SIZES, MASKED)
        score = tl.dot(query, key, input_precision="ieee")
        unit = scale_log2
        if HOOKS.score is not None:
            distance = last_key[:, None] - token[None, :]
            score, unit = HOOKS.score(extras, score * scale_log2, head, distance, HOOKS), 1.0
        if MASKED:
            score = tl.where(token[None, :] <= last_key[:, None], score, MINUS_INF)
            if first_key is not None:
                score = tl.where(inside[None, :], score, MINUS_INF)
            if unseen_key is not None:
                score = tl.where(token[None, :] > unseen_key[:, None], score, MINUS_INF)
        new_highest = tl.maximum(highest, tl.max(score, axis=1) * unit)
        if MASKED:
            new_highest = tl.maximum(new_highest, -1.0e30)  # finite for a query that has seen no key yet
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score * unit - new_highest[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, acc
