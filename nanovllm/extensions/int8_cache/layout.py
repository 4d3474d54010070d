"""The `CacheLayout` of 8-bit pages."""

import torch
from torch import Tensor

from nanovllm.extensions.int8_cache.kernels.decode import int8_decode_kernel
from nanovllm.extensions.int8_cache.kernels.int8_cache import (
    SCALE_BYTES,
    as_stored,
    hadamard_rotate,
    load_dequantised,
    page_sizes,
    read_tokens,
    store_int8_torch,
)
from nanovllm.extensions.int8_cache.kernels.store import int8_store_hooks
from nanovllm.kernels.kv_store import CacheLayout


class Int8Layout(CacheLayout):
    """Keys and values of a head lie in the same page: `k_cache` and `v_cache` are one tensor."""

    planes = 1
    has_token_rows = False
    load = load_dequantised
    decode_kernel = int8_decode_kernel
    page_sizes = staticmethod(page_sizes)
    as_stored = staticmethod(as_stored)
    store_hooks = staticmethod(int8_store_hooks)

    def __init__(self):
        super().__init__(torch.uint8)

    def page_shape(self, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return kv_heads, block_size * (2 * head_dim + SCALE_BYTES)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return hadamard_rotate(q).to(q.dtype), hadamard_rotate(k)

    def store(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        store_int8_torch(key, value, k_cache, slots)

    def decode_bytes(self, q: Tensor, cache: Tensor) -> int:
        return 1  # a tile waits in bytes, and becomes float16 in registers

    def read(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, begin: int, end: int, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = read_tokens(k_cache, block_table, begin, end, q.shape[-1])
        return keys.to(q.dtype), values.to(q.dtype)
