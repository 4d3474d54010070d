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
from nanovllm.kernels.runtime import cdiv, tl, triton


class CacheLayout:
    """
    `load` is a Triton function that reads a tile of keys and values in the prefill kernel, as `load_rows`
    does. `decode_kernel` is None, or a Triton kernel that does the work of decode attention's, with the same
    parameters.
    """

    planes = 2  # keys and values are two tensors
    has_token_rows = True  # what a block holds of a token is one piece, behind that of the token before
    decode_kernel: Any = None

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.load: Any = load_rows

    def page_shape(self, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of one layer's part of a block, in each plane."""
        return block_size, kv_heads, head_dim

    def page_sizes(self, cache: Tensor, head_dim: int) -> tuple[int, int]:
        """block_size and kv_heads of a layer's cache."""
        return cache.shape[1], cache.shape[2]

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys further, both alike: their products stay the same."""
        return q, k

    def store(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Do what `store_kvcache` does. The keys are rotated already."""
        store_kvcache(key, value, k_cache, v_cache, slots)

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
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        begins: Tensor,
        ends: Tensor,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        The tokens from begins to ends [batch] of sequences. -> keys and values [batch, kv_heads, longest,
        head_dim], and which of these are such tokens, bool [batch, longest]. The others are finite, so a mask
        can hide them.
        """
        block_size, kv_heads = self.page_sizes(k_cache, head_dim)
        blocks, offsets, seen = locate(block_tables, begins, ends, block_size)
        slots = (blocks * block_size + offsets).flatten()
        keys, values = (
            cache.view(-1, kv_heads, head_dim).index_select(0, slots).unflatten(0, blocks.shape)
            for cache in (k_cache, v_cache)
        )
        return keys.transpose(1, 2), values.transpose(1, 2), seen

    def read_one(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, begin: int, end: int
    ) -> tuple[Tensor, Tensor] | None:
        """
        Keys and values [1, kv_heads, tokens, head_dim] of one sequence's tokens from begin to end, or None if
        `read` is as quick. Where its blocks lie side by side, they are not copied.
        """
        _, block_size, *head_sizes = k_cache.shape
        blocks = block_table[begin // block_size : cdiv(end, block_size)]
        numbers = blocks.tolist()
        first = numbers[0] if numbers else 0
        if numbers != [*range(first, first + len(numbers))]:
            k_cache, v_cache, first = k_cache.index_select(0, blocks), v_cache.index_select(0, blocks), 0
        keys, values = k_cache.view(1, -1, *head_sizes), v_cache.view(1, -1, *head_sizes)
        span = first * block_size + begin % block_size, end - begin
        return keys.narrow(1, *span).transpose(1, 2), values.narrow(1, *span).transpose(1, 2)


def locate(tables: Tensor, begins: Tensor, ends: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Where the tokens from begins to ends [batch] of sequences lie. -> their blocks and their offsets in these,
    int [batch, longest], and which of these entries are such tokens, bool [batch, longest].
    """
    begins, ends = begins[:, None], ends[:, None]
    token = begins + torch.arange(int((ends - begins).max()), device=ends.device)
    seen = token < ends
    # Entries beyond a sequence's end repeat its first token. An empty sequence reads block 0.
    token = torch.where(seen, token, begins)
    blocks = tables.gather(1, token // block_size)
    blocks = torch.where(ends > begins, blocks, 0)
    return blocks, token % block_size, seen


@triton.jit
def load_rows(cache, start, len_k, inside, DTYPE: tl.constexpr, SIZES: tl.constexpr, MASKED: tl.constexpr):
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
            block = tl.load(table + token // SIZES.BLOCK_SIZE, mask=token < len_k, other=0)
        slot = block.to(tl.int64) * SIZES.BLOCK_SIZE + token % SIZES.BLOCK_SIZE
    k_address = k_head + slot[None, :] * k_token_stride + dim[:, None]
    v_address = v_head + slot[:, None] * v_token_stride + dim[None, :]
    is_dim = dim < SIZES.HEAD_DIM
    if MASKED:
        k_mask = inside[None, :] & is_dim[:, None]
        v_mask = inside[:, None] & is_dim[None, :]
        key = tl.load(k_address, mask=k_mask, other=0.0)
        value = tl.load(v_address, mask=v_mask, other=0.0)
    elif SIZES.HEAD_DIM < SIZES.DIM_PAD:
        key = tl.load(k_address, mask=is_dim[:, None], other=0.0)
        value = tl.load(v_address, mask=is_dim[None, :], other=0.0)
    else:
        key = tl.load(k_address)
        value = tl.load(v_address)
    return key.to(DTYPE), value.to(DTYPE)


ROWS = CacheLayout()
