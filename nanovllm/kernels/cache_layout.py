"""How keys and values lie in the pages of the KV cache, and how they are read from there.

A page holds the tokens of a block. In the core a token is a row: caches are contiguous
[blocks, block_size, kv_heads, head_dim], in any floating dtype. Keys and values are rounded to it when they
are written, and converted to the dtype of the queries when they are read. An extension that stores them in
another way subclasses `CacheLayout`; nothing else knows what a page looks like.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.kv_store import StoreHooks, store_kvcache
from nanovllm.kernels.runtime import masked_load, tl, triton


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

    def decode_tile(self, q: Tensor, cache: Tensor) -> tuple[int, int]:
        """
        Bytes that an element of a tile takes in the decode kernel, and the pipeline stages that load tiles
        where contexts are not split.
        """
        size = cache.element_size()
        if q.dtype != cache.dtype:  # a tile is held twice: as it was read, and converted
            size = 2 * max(q.element_size(), size)
        return size, 2

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
