"""Stores keys and values in the paged cache, alone or in one kernel with the norm and rotation of q and k.

A layer's keys and values of a token go to `slot = block_id * block_size + offset`; slot -1 means "do not
write" (padding, or a token that is in the cache already). Caches are contiguous
[blocks, block_size, kv_heads, head_dim], so slots index the rows of a [slots, kv_heads, head_dim] tensor.
Their dtype may be any floating one: keys and values are rounded to it when they are written. 8-bit caches are
described in `int8_cache.py`.
"""

from torch import Tensor

from nanovllm.kernels.int8_cache import is_int8, page_sizes, quantize_halves, rotate_halves, store_int8_torch
from nanovllm.kernels.runtime import cdiv, next_power_of_2, overlap_options, tl, triton, use_triton

HEADS_PER_PROGRAM = 8


def store_kvcache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key, value [tokens, kv_heads, head_dim] (last dimension contiguous) to slot_mapping [tokens]."""
    if not use_triton(key) or is_int8(k_cache):
        return store_kvcache_torch(key, value, k_cache, v_cache, slot_mapping)
    tokens, heads, head_dim = key.shape
    if tokens:
        _store_kernel[(tokens,)](
            key, value, k_cache, v_cache, slot_mapping, *key.stride()[:2], *value.stride()[:2],
            HEADS=heads, HEADS_PAD=next_power_of_2(heads),
            HEAD_DIM=head_dim, DIM_PAD=next_power_of_2(head_dim),
        )  # fmt: skip


def store_kvcache_torch(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    slots = slot_mapping.tolist()
    if len(slots) == 1 and not is_int8(k_cache):  # a copy takes a fraction of the time of an index
        page, offset = divmod(slots[0], k_cache.shape[1])
        if page >= 0:
            k_cache[page, offset] = key
            v_cache[page, offset] = value
        return
    slot_mapping = slot_mapping.long()
    if min(slots, default=0) < 0:
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    if is_int8(k_cache):
        return store_int8_torch(key, value, k_cache, slot_mapping)
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new.to(cache.dtype))


def qk_norm_rope_store(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    positions: Tensor, cos_sin: Tensor,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, is_prefill: bool = False,
) -> None:  # fmt: skip
    """Normalise and rotate q and k in place, inside qkv, and store k and v in the caches.

    qkv is [tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows contiguous. Each head of q and k goes
    through RMSNorm (unless the weights are None) and the rotary embedding (Su et al., 2021) of its token's
    position, which turns the halves (x1, x2) of a head into (x1 cos - x2 sin, x2 cos + x1 sin). cos_sin is
    float32 [max_positions, head_dim], cosines then sines. The caches may be empty if every slot is -1. For
    8-bit caches q and k are rotated by `hadamard_rotate` too, and in a prefill k and v become what the caches
    hold of them. It has no torch twin: `Attention.rotate_and_store` does the same in parts.
    """
    if not len(qkv):
        return
    is_8_bit, half = is_int8(k_cache), head_dim // 2
    heads = HEADS_PER_PROGRAM // 2 if is_8_bit else HEADS_PER_PROGRAM  # which takes longer
    programs = cdiv(num_heads, heads) + 2 * cdiv(num_kv_heads, heads)
    _qk_norm_rope_store_kernel[(len(qkv) * programs,)](
        qkv, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping, qkv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEADS=heads,
        HEAD_DIM=head_dim, HALF_PAD=next_power_of_2(half), STAGES=(half & -half).bit_length() - 1,
        BLOCK_SIZE=page_sizes(k_cache, head_dim)[0] if is_8_bit else 1, ROUND_KV=is_prefill and is_8_bit,
        num_warps=1, **overlap_options(qkv.device),
    )  # fmt: skip


@triton.jit
def _store_kernel(
    key, value, k_cache, v_cache, slot_mapping,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    inside = (head < HEADS) & (dim < HEAD_DIM)
    offset = (slot * HEADS + head) * HEAD_DIM + dim
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=inside)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=inside)
    tl.store(k_cache + offset, k, mask=inside)
    tl.store(v_cache + offset, v, mask=inside)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROUND_KV: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of one token. Of a token's programs the first take q, then k, then v."""
    INT8: tl.constexpr = k_cache.dtype.element_ty == tl.uint8
    Q_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    PROGRAMS: tl.constexpr = Q_PROGRAMS + 2 * KV_PROGRAMS
    group = tl.program_id(0) % PROGRAMS
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    is_q = group < Q_PROGRAMS
    is_v = group >= Q_PROGRAMS + KV_PROGRAMS
    first_group = tl.where(is_q, 0, tl.where(is_v, Q_PROGRAMS + KV_PROGRAMS, Q_PROGRAMS))
    head = (group - first_group) * HEADS + tl.arange(0, HEADS)[:, None]
    num_heads = tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    half = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < num_heads) & (half < HALF)
    address = qkv + token * token_stride + (first_head + head) * HEAD_DIM + half

    rotated = half < tl.where(is_v, 0, HALF)  # none of v
    cos_address = cos_sin + tl.load(positions + token) * HEAD_DIM + half
    cos = tl.load(cos_address, mask=rotated, other=0.0)
    sin = tl.load(cos_address + HALF, mask=rotated, other=0.0)
    if q_weight is not None:
        if is_q:
            weight1 = tl.load(q_weight + half, mask=rotated, other=0.0)
            weight2 = tl.load(q_weight + HALF + half, mask=rotated, other=0.0)
        else:
            weight1 = tl.load(k_weight + half, mask=rotated, other=0.0)
            weight2 = tl.load(k_weight + HALF + half, mask=rotated, other=0.0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # attention, which prefetches before it waits
        tl.extra.cuda.gdc_wait()

    x1 = tl.load(address, mask=inside, other=0.0)
    x2 = tl.load(address + HALF, mask=inside, other=0.0)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    if not is_v:
        if q_weight is not None:
            scale = tl.rsqrt(tl.sum(wide1 * wide1 + wide2 * wide2, axis=1)[:, None] / HEAD_DIM + eps)
            # Rounded after the norm and again after the weight, as transformers' Qwen3RMSNorm does.
            wide1 = (wide1 * scale).to(x1.dtype).to(tl.float32) * weight1.to(tl.float32)
            wide2 = (wide2 * scale).to(x2.dtype).to(tl.float32) * weight2.to(tl.float32)
            wide1, wide2 = wide1.to(x1.dtype).to(tl.float32), wide2.to(x2.dtype).to(tl.float32)
        wide1, wide2 = (wide1 * cos - wide2 * sin).to(x1.dtype), (wide2 * cos + wide1 * sin).to(x1.dtype)
        wide1, wide2 = wide1.to(tl.float32), wide2.to(tl.float32)
        if INT8:
            wide1, wide2 = rotate_halves(wide1, wide2, HEADS, HALF_PAD, STAGES)
        tl.store(address, wide1, mask=inside)
        tl.store(address + HALF, wide2, mask=inside)
    if INT8:
        if not is_q:
            byte1, byte2, scale, wide1, wide2 = quantize_halves(wide1, wide2)
            if ROUND_KV:
                tl.store(address, wide1, mask=inside)
                tl.store(address + HALF, wide2, mask=inside)
            if slot >= 0:
                place = slot % BLOCK_SIZE
                page = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * ((2 * HEAD_DIM + 4) * BLOCK_SIZE)
                if is_v:
                    values = v_cache + page + (BLOCK_SIZE + place // 16 * 16) * HEAD_DIM + place % 16
                    tl.store(values + half * 16, byte1, mask=inside)
                    tl.store(values + (HALF + half) * 16, byte2, mask=inside)
                else:
                    keys = k_cache + page + place * HEAD_DIM + half
                    tl.store(keys, byte1, mask=inside)
                    tl.store(keys + HALF, byte2, mask=inside)
                scales = (k_cache + page + 2 * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.bfloat16))
                tl.store(scales + 2 * place + is_v, scale, mask=head < num_heads)
    elif slot >= 0:
        offset = (slot * NUM_KV_HEADS + head) * HEAD_DIM + half
        if is_v:
            tl.store(v_cache + offset, wide1, mask=inside)
            tl.store(v_cache + offset + HALF, wide2, mask=inside)
        elif not is_q:
            tl.store(k_cache + offset, wide1, mask=inside)
            tl.store(k_cache + offset + HALF, wide2, mask=inside)
