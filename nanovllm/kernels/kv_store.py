"""The paged KV cache: how keys and values lie in it, how they are stored, and how they are read.

A page holds the tokens of a block. In the core a token is a row: caches are contiguous
[blocks, block_size, kv_heads, head_dim], so `slot = block_id * block_size + offset` is a row of
[slots, kv_heads, head_dim]. Slot -1 means "do not write": padding, or a token that is in the cache already.
Values are rounded to the cache's dtype, and converted to that of the queries when they are read. An extension
that stores them in another way subclasses `CacheLayout`; nothing else knows what a page looks like.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention_variant import Hooks
from nanovllm.kernels.runtime import (
    cdiv,
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    tl,
    triton,
    use_triton,
)


def store_kvcache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key, value [tokens, kv_heads, head_dim] to slot_mapping [tokens]."""
    if not use_triton(key):
        return store_kvcache_torch(key, value, k_cache, v_cache, slot_mapping)
    key, value = key.contiguous(), value.contiguous()
    to = k_cache, v_cache, slot_mapping
    qk_norm_rope_store(key[:, :0], key, value, None, None, 0.0, None, None, *to, StoreHooks())


def store_kvcache_torch(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if len(slot_mapping) == 1:  # a plain copy takes a fraction of the time of `index_copy_`
        page, offset = divmod(int(slot_mapping), k_cache.shape[1])
        if page >= 0:
            k_cache[page, offset] = key
            v_cache[page, offset] = value
        return
    written = slot_mapping >= 0
    slot_mapping = slot_mapping[written].long()
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new[written].to(cache.dtype))


@triton.jit
def store_rows(k_cache, v_cache, slot, head, half, is_v, inside, address, half1, half2, SIZES, HOOKS):
    """
    Store both halves [HEADS, HALF_PAD], float32, of these heads [HEADS, 1] of a token's k or v. `inside`
    masks what is padding. The first half was read from `address`.
    """
    if slot >= 0:
        offset = (slot * SIZES.NUM_KV_HEADS + head) * SIZES.HEAD_DIM + half
        place = (v_cache if is_v else k_cache) + offset
        tl.store(place, half1, mask=inside)
        tl.store(place + SIZES.HEAD_DIM // 2, half2, mask=inside)


class StoreHooks(NamedTuple):
    """
    Triton functions that `qk_norm_rope_store` calls, with this record as the constant HOOKS.

    rotate(half1, half2, SIZES, HOOKS) -> both halves of heads of q and k, rotated further; or None.
    store(...): called as `store_rows` is.
    """

    rotate: Any = None
    store: Any = store_rows
    heads_per_program: int = 8
    constants: Any = None  # a record of what else the hooks need

    cache_key = Hooks.cache_key


class StoreSizes(NamedTuple):
    NUM_HEADS: int
    NUM_KV_HEADS: int
    HEADS: int  # that a program computes
    Q_PROGRAMS: int  # compute all heads of q of a token
    KV_PROGRAMS: int  # all of k, or of v
    HEAD_DIM: int
    HALF_PAD: int  # HEAD_DIM / 2 rounded up to a power of two


def qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    hooks: StoreHooks,
) -> None:
    """Normalise and rotate q and k in place, and store k and v in the caches.

    q, k and v are [tokens, heads of each, head_dim], as views of one product: a token's heads are contiguous,
    and the strides of tokens alike. Each head of q and k goes through RMSNorm (unless the weights are None)
    and the rotary embedding (Su et al., 2021) of its token's position, which turns the halves (x1, x2) of a
    head into (x1 cos - x2 sin, x2 cos + x1 sin). cos_sin is float32 [max_positions, head_dim], cosines then
    sines; if it is None, k and v are only stored. The caches may be empty if every slot is -1. There is no
    torch reference: on a CPU `Attention.rotate_and_store` calls one function after another.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, heads = k.shape[1], hooks.heads_per_program
    q_programs, kv_programs = cdiv(num_heads, heads), cdiv(num_kv_heads, heads)
    half_pad = next_power_of_2(head_dim // 2)
    sizes = StoreSizes(num_heads, num_kv_heads, heads, q_programs, kv_programs, head_dim, half_pad)
    _qk_norm_rope_store_kernel[(len(k) * (q_programs + 2 * kv_programs),)](
        q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping, k.stride(0),
        SIZES=sizes, HOOKS=hooks, num_warps=1, **overlap_options(k.device),
    )  # fmt: skip


@triton.jit
def _qk_norm_rope_store_kernel(
    q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping, token_stride,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes HEADS heads of one token. A token's first programs compute q, the next k, then v."""
    HALF: tl.constexpr = SIZES.HEAD_DIM // 2
    FIRST_V: tl.constexpr = SIZES.Q_PROGRAMS + SIZES.KV_PROGRAMS
    PROGRAMS: tl.constexpr = FIRST_V + SIZES.KV_PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    is_q = program < SIZES.Q_PROGRAMS
    is_v = program >= FIRST_V
    kv_program = FIRST_V if is_v else SIZES.Q_PROGRAMS
    first_program = 0 if is_q else kv_program
    kv = v if is_v else k
    num_heads = SIZES.NUM_HEADS if is_q else SIZES.NUM_KV_HEADS
    head = (program - first_program) * SIZES.HEADS + tl.arange(0, SIZES.HEADS)[:, None]
    half = tl.arange(0, SIZES.HALF_PAD)[None, :]
    inside = (head < num_heads) & (half < HALF)
    address = (q if is_q else kv) + token * token_stride + head * SIZES.HEAD_DIM + half

    rotated = half < (0 if is_v else HALF)  # v is not rotated
    if cos_sin is not None:
        cos_address = cos_sin + tl.load(positions + token) * SIZES.HEAD_DIM + half
        cos = masked_load(cos_address, rotated)
        sin = masked_load(cos_address + HALF, rotated)
    if q_weight is not None:
        weight = (q_weight if is_q else k_weight) + half
        weight1 = masked_load(weight, rotated)
        weight2 = masked_load(weight + HALF, rotated)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    pdl_wait(OVERLAP)  # decode attention, which comes next, prefetches before it waits

    x1 = masked_load(address, inside)
    x2 = masked_load(address + HALF, inside)
    DTYPE: tl.constexpr = x1.dtype
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    if not is_v:
        if q_weight is not None:
            mean_square = tl.sum(wide1 * wide1 + wide2 * wide2, axis=1)[:, None] / SIZES.HEAD_DIM
            scale = tl.rsqrt(mean_square + eps)
            # Rounded after the norm and again after the weight, as transformers' Qwen3RMSNorm does.
            wide1 = _rounded(_rounded(wide1 * scale, DTYPE) * weight1.to(tl.float32), DTYPE)
            wide2 = _rounded(_rounded(wide2 * scale, DTYPE) * weight2.to(tl.float32), DTYPE)
        if cos_sin is not None:
            rotated1 = _rounded(wide1 * cos - wide2 * sin, DTYPE)
            wide2 = _rounded(wide2 * cos + wide1 * sin, DTYPE)
            wide1 = rotated1
            if HOOKS.rotate is not None:
                wide1, wide2 = HOOKS.rotate(wide1, wide2, SIZES, HOOKS)
            tl.store(address, wide1, mask=inside)
            tl.store(address + HALF, wide2, mask=inside)
    if not is_q:
        HOOKS.store(k_cache, v_cache, slot, head, half, is_v, inside, address, wide1, wide2, SIZES, HOOKS)


@triton.jit
def _rounded(x, DTYPE):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_rows(cache, start, len_k, inside, DTYPE, SIZES, MASKED):
    """
    The keys [DIM_PAD, KEY_TILE] and values [KEY_TILE, DIM_PAD] of the tokens from `start` on, a multiple of
    KEY_TILE, in this dtype; if MASKED, of those `inside` only. `cache` is where this head's key and value of
    token 0 lie (of block 0, with a block table), the block table or None, and from one token to the next the
    strides of keys and of values.
    """
    k_head, v_head, table, k_token_stride, v_token_stride = cache
    token = start + tl.arange(0, SIZES.KEY_TILE)
    dim = tl.arange(0, SIZES.DIM_PAD)
    slot = token.to(tl.int64)
    if table is not None:
        if SIZES.BLOCK_SIZE % SIZES.KEY_TILE == 0:  # the whole tile is in one block
            block = tl.load(table + start // SIZES.BLOCK_SIZE)
        else:
            block = masked_load(table + token // SIZES.BLOCK_SIZE, token < len_k)
        slot = block.to(tl.int64) * SIZES.BLOCK_SIZE + token % SIZES.BLOCK_SIZE
    k_address = k_head + slot[:, None] * k_token_stride + dim[None, :]
    v_address = v_head + slot[:, None] * v_token_stride + dim[None, :]
    if not MASKED and SIZES.HEAD_DIM == SIZES.DIM_PAD:
        key = tl.load(k_address)
        value = tl.load(v_address)
    else:
        mask = (dim < SIZES.HEAD_DIM)[None, :]
        if MASKED:
            mask &= inside[:, None]
        key = masked_load(k_address, mask)
        value = masked_load(v_address, mask)
    return tl.trans(key).to(DTYPE), value.to(DTYPE)


class CacheLayout:
    """
    `load` is a Triton function that reads a tile of keys and values in the prefill kernel, as `load_rows`
    does. `decode_kernel` is None, or a Triton kernel that does the work of decode attention's, with the same
    parameters.
    """

    planes = 2  # keys and values are two tensors
    has_token_rows = True  # what a block holds of a token is one piece, behind that of the token before
    store = staticmethod(store_kvcache)  # the keys are rotated already
    load: Any = load_rows
    decode_kernel: Any = None

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

    def page_shape(self, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of one layer's part of a block, in each plane."""
        return block_size, kv_heads, head_dim

    def page_sizes(self, cache: Tensor, head_dim: int) -> tuple[int, int]:
        """block_size and kv_heads of a layer's cache."""
        return cache.shape[1], cache.shape[2]

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys further, both alike: their products stay the same."""
        return q, k

    def as_stored(self, x: Tensor) -> Tensor:
        """
        What the cache holds of keys or values x [..., head_dim]. A prefill attends to that, so that results
        do not depend on which tokens come from the cache.
        """
        return x

    def store_hooks(self, cache: Tensor, head_dim: int, is_prefill: bool) -> StoreHooks:
        """What `qk_norm_rope_store` does differently for this layout."""
        return StoreHooks()

    def decode_bytes(self, q: Tensor, cache: Tensor) -> int:
        """Bytes that an element of a tile takes in the decode kernel."""
        size = cache.element_size()
        # Of another dtype than the queries, a tile is held twice: as it was read, and converted.
        return size if q.dtype == cache.dtype else 2 * max(q.element_size(), size)

    def read(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, begin: int, end: int, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        Keys and values [kv_heads, tokens, head_dim] of a sequence's tokens from begin to end, in the dtype of
        the queries q [..., head_dim]. Where its blocks lie side by side, they are not copied.
        """
        block_size = k_cache.shape[1]
        blocks = block_table[begin // block_size : -(-end // block_size)]
        numbers = blocks.tolist()
        first = numbers[0]
        if numbers != [*range(first, first + len(numbers))]:
            k_cache, v_cache, first = k_cache.index_select(0, blocks), v_cache.index_select(0, blocks), 0
        start = first * block_size + begin % block_size
        keys, values = (
            cache.flatten(0, 1).narrow(0, start, end - begin).transpose(0, 1).to(q.dtype)
            for cache in (k_cache, v_cache)
        )
        return keys, values


ROWS = CacheLayout()
