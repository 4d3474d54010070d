"""Causal attention over sequences laid end to end, in FlashAttention-2's tiled form: scores are never stored.

The queries are the last len_q of a sequence's len_k tokens; query i sees the first len_k - len_q + i + 1
keys. So whole prompts, chunks of prompts and prompts with a cached beginning are one case. Keys and values
are contiguous or, with block tables, in the paged cache.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.attention_rule import UNIT, AttentionRule, attend_torch, soften
from nanovllm.kernels.int8_cache import TILE, dequantize_tile, load_int8_tile, page_sizes, read_tokens
from nanovllm.kernels.runtime import LOG2_E, cdiv, next_power_of_2, tl, triton, use_triton

# At most so many tokens of each sequence: short prompts, and ends of those that are cached.
SHORT_QUERIES = 64


def varlen_prefill_attention(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    rule: AttentionRule, block_tables: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q [tokens, heads, head_dim] over k, v by this rule; returns the shape of q.

    cu_seqlens_q and cu_seqlens_k are int32 [sequences + 1] running totals. k and v are
    [total_k, kv_heads, head_dim], last dimension contiguous, or with block_tables (int32
    [sequences, max_blocks]) the contiguous caches [blocks, block_size, kv_heads, head_dim]. If their dtype
    is not q's they are converted to it when they are read.
    """
    if not use_triton(q):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return varlen_prefill_attention_torch(q, k, v, *lengths, rule, block_tables)
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = page_sizes(k, head_dim) if block_tables is not None else (1, k.shape[1])
    out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    dim_pad = max(runtime.MIN_DOT_SIZE, next_power_of_2(head_dim))
    element_size = max(q.element_size(), k.element_size())
    query_tile, key_tile, num_warps, num_stages = _tiles(dim_pad, element_size, max_seqlen_q, q.device)
    if tokens:
        table_stride = 0 if block_tables is None else block_tables.stride(0)
        _prefill_kernel[(cdiv(max_seqlen_q, query_tile), heads, len(cu_seqlens_q) - 1)](
            q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, rule.sinks, rule.scale * LOG2_E,
            *q.stride()[:2], *k.stride()[-3:-1], *v.stride()[-3:-1], table_stride,
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad,
            BLOCK_SIZE=block_size, QUERY_TILE=query_tile, KEY_TILE=key_tile,
            WINDOW=rule.window, SOFTCAP=rule.softcap, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def _tiles(
    dim_pad: int, element_size: int, max_seqlen_q: int, device: torch.device
) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, pipeline stages: the fastest on Hopper, what fits on other chips."""
    if element_size > 2:
        return 16, 16, 4, 1
    is_hopper = runtime.has_hopper_shared_memory(device)
    if dim_pad > 256:
        return (64, 32, 8, 2) if is_hopper else (64, 16, 8, 1)
    if not is_hopper:
        return (128, 64, 8, 2) if dim_pad <= 128 else (128, 32, 8, 1)
    if max_seqlen_q <= SHORT_QUERIES and dim_pad <= 128:
        return SHORT_QUERIES, 64, 4, 3
    return {128: (128, 128, 8, 3), 256: (128, 64, 8, 2)}.get(dim_pad, (128, 64, 8, 3))


def varlen_prefill_attention_torch(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    rule: AttentionRule, block_tables: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    places = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for i, ((begin, end), (begin_k, end_k)) in enumerate(places):
        len_q, len_k = end - begin, end_k - begin_k
        if len_q == 0:
            continue
        # Nobody sees the keys before this one, which begins a tile of 8-bit caches.
        first = max(0, len_k - len_q - rule.window + 1) // TILE * TILE if rule.window else 0
        if block_tables is None:
            keys, values = (x[begin_k + first : end_k].transpose(0, 1) for x in (k, v))
        else:
            span = torch.tensor([[first], [len_k]], device=q.device)
            found = read_tokens(k, v, block_tables[i : i + 1], *span, q.shape[2])[:2]
            keys, values = (x[0, :, : len_k - first].to(q.dtype) for x in found)
        # [kv_heads, heads per kv head, tokens, head_dim]; K and V are expanded without a copy.
        queries = q[begin:end].unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
        sinks = rule.sinks_of_groups(len(keys))
        keys, values = (x.unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (keys, values))
        mask, last = None, len_k - first - len_q  # of the keys, the last that the first query sees
        if last or not rule.is_plain or 0 < rule.window < len_k:
            mask = torch.ones(len_q, len_k - first, dtype=torch.bool, device=q.device).tril(last)
            mask = mask.triu(last - rule.window + 1) if rule.window else mask
        if rule.is_plain:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=rule.scale
            )
        else:
            attended = attend_torch(
                queries, keys, values, mask, rule, None if sinks is None else sinks[..., None]
            )[0]
        out[begin:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, sinks, scale_log2,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A program computes QUERY_TILE queries of one head of one sequence."""
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
    dim = tl.arange(0, DIM_PAD)
    inside = (index < len_q)[:, None] & (dim < HEAD_DIM)[None, :]
    token = (q_start + index).to(tl.int64)
    q_address = q + token[:, None] * q_token_stride + head * q_head_stride + dim[None, :]
    query = tl.load(q_address, mask=inside, other=0.0)

    kv_head = head // GROUP
    k_head = k + kv_head * k_head_stride
    v_head = v + kv_head * v_head_stride
    table = block_tables
    if block_tables is None:
        k_head += k_start.to(tl.int64) * k_token_stride
        v_head += k_start.to(tl.int64) * v_token_stride
    else:
        table += seq.to(tl.int64) * table_stride
    last_key = len_k - len_q + index  # the last key that each query sees
    all_seen = (tl.maximum(len_k - len_q + first + 1, 0) // KEY_TILE) * KEY_TILE
    some_seen = tl.minimum(len_k - len_q + first + QUERY_TILE, len_k)

    highest = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    if sinks is not None:  # a key that has no value comes first
        highest = tl.zeros([QUERY_TILE], tl.float32) + tl.load(sinks + head).to(tl.float32) * UNIT
        total += 1.0
    acc = tl.zeros([QUERY_TILE, DIM_PAD], tl.float32)
    begin, first_key = 0, None
    if WINDOW:
        first_key = tl.maximum(len_k - len_q + first - WINDOW + 1, 0)  # that the first query sees
        begin = tl.maximum(len_k - len_q + first + QUERY_TILE - WINDOW, 0)  # that the last one does
        begin = tl.minimum(tl.cdiv(begin, KEY_TILE) * KEY_TILE, all_seen)
        for start in range(first_key // KEY_TILE * KEY_TILE, begin, KEY_TILE):
            highest, total, acc = attend_to_tile(
                query, k_head, v_head, table, start, len_k, first_key, last_key, highest, total, acc,
                scale_log2, k_token_stride, v_token_stride, HEAD_DIM, DIM_PAD, BLOCK_SIZE, KEY_TILE,
                WINDOW, SOFTCAP, True,
            )  # fmt: skip
    for start in range(begin, all_seen, KEY_TILE):  # every query of the tile sees these keys: no mask
        highest, total, acc = attend_to_tile(
            query, k_head, v_head, table, start, len_k, first_key, last_key, highest, total, acc,
            scale_log2, k_token_stride, v_token_stride, HEAD_DIM, DIM_PAD, BLOCK_SIZE, KEY_TILE,
            WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for start in range(all_seen, some_seen, KEY_TILE):
        highest, total, acc = attend_to_tile(
            query, k_head, v_head, table, start, len_k, first_key, last_key, highest, total, acc,
            scale_log2, k_token_stride, v_token_stride, HEAD_DIM, DIM_PAD, BLOCK_SIZE, KEY_TILE,
            WINDOW, SOFTCAP, True,
        )  # fmt: skip

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    num_heads = tl.num_programs(1)
    tl.store(out + (token[:, None] * num_heads + head) * HEAD_DIM + dim[None, :], result, mask=inside)


@triton.jit
def attend_to_tile(
    query, k_head, v_head, table, start, len_k, first_key, last_key, highest, total, acc,
    scale_log2, k_token_stride, v_token_stride,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """
    Add a tile: exp2(score - highest) of its keys to `total`, its values with these weights to `acc`. If it is
    MASKED, a query sees keys from first_key (None: from 0) to last_key, within its window. `start` is a
    multiple of KEY_TILE.
    """
    token = start + tl.arange(0, KEY_TILE)
    inside = token < len_k
    if first_key is not None:
        inside &= token >= first_key
    if k_head.dtype.element_ty == tl.uint8:
        key, value, key_scale, value_scale = load_int8_tile(
            k_head, k_token_stride, table, start, len_k, HEAD_DIM, DIM_PAD, BLOCK_SIZE, KEY_TILE, False
        )
        if MASKED:
            value_scale = tl.where(inside, value_scale, 0.0)
        key = tl.trans(dequantize_tile(key, key_scale[:, None]).to(query.dtype))
        value = tl.trans(dequantize_tile(value, value_scale[None, :]).to(query.dtype))
    else:
        dim = tl.arange(0, DIM_PAD)
        slot = token.to(tl.int64)
        if table is not None:
            if BLOCK_SIZE % KEY_TILE == 0:  # the whole tile is in one block
                block = tl.load(table + start // BLOCK_SIZE)
            else:
                block = tl.load(table + token // BLOCK_SIZE, mask=token < len_k, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        k_address = k_head + slot[None, :] * k_token_stride + dim[:, None]
        v_address = v_head + slot[:, None] * v_token_stride + dim[None, :]
        if MASKED:
            key = tl.load(k_address, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
            value = tl.load(v_address, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == DIM_PAD:
            key = tl.load(k_address)
            value = tl.load(v_address)
        else:
            key = tl.load(k_address, mask=(dim < HEAD_DIM)[:, None], other=0.0)
            value = tl.load(v_address, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        key, value = key.to(query.dtype), value.to(query.dtype)
    score = tl.dot(query, key, input_precision="ieee")
    if SOFTCAP > 0:
        score, scale_log2 = soften(score * scale_log2, SOFTCAP), 1.0
    if MASKED:
        score = tl.where(token[None, :] <= last_key[:, None], score, float("-inf"))
        if first_key is not None:
            score = tl.where(inside[None, :], score, float("-inf"))
        if WINDOW:
            score = tl.where(token[None, :] > last_key[:, None] - WINDOW, score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, axis=1) * scale_log2)
    if MASKED:
        new_highest = tl.maximum(new_highest, -1.0e30)  # finite for a query that has seen no key yet
    shrink = tl.exp2(highest - new_highest)
    weight = tl.exp2(score * scale_log2 - new_highest[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return new_highest, total, acc
