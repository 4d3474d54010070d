"""The KV cache of one rank: its memory, and the layers' views of it.

Knows bytes and pages, nothing about who owns a page. Before `allocate` the layers have empty views, which the
warm-up writes nothing to.
"""

import math

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.kernels.copy_pages import copy_pages
from nanovllm.kernels.int8_cache import is_int8, page_shape
from nanovllm.layers.attention import Attention

MAX_BLOCKS = 1 << 18  # making Python's objects for more blocks takes longer than loading a small model


class KVCache:
    """
    `pages` is [2, layers, blocks, block_size, kv_heads of this rank, head_dim]; 2 is keys and values. 8-bit
    pages are laid out by `kernels/int8_cache.py`.
    """

    def __init__(self, config: Config, layers: list[Attention], device: torch.device):
        self.config = config
        self.layers = layers
        self.dtype = config.kv_cache_torch_dtype
        self.device = device
        heads, head_dim = layers[0].num_kv_heads, layers[0].head_dim
        self.page_shape = page_shape(config.kvcache_block_size, heads, head_dim, self.dtype)
        self.block_bytes = len(layers) * math.prod(self.page_shape) * self.dtype.itemsize
        self.num_blocks = 0
        self._set_views(torch.empty(self._shape(0), dtype=self.dtype, device=device))

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        planes, *page = self.page_shape
        return planes, len(self.layers), num_blocks, *page

    def _set_views(self, pages: torch.Tensor) -> None:
        self.pages = pages
        for i, layer in enumerate(self.layers):
            layer.k_cache, layer.v_cache = pages[0, i], pages[-1, i]

    def num_blocks_in(self, budget: int) -> int:
        """How many blocks fit into so many bytes. ValueError if these are too few for one sequence."""
        config = self.config
        block_bytes = self.block_bytes
        needed = -(-config.max_model_len // config.kvcache_block_size)
        if budget // block_bytes < needed:
            raise ValueError(
                f"the KV cache of one sequence of max_model_len={config.max_model_len} tokens needs "
                f"{needed * block_bytes:,} bytes, {needed * block_bytes - budget:,} more than there are; "
                f"raise gpu_memory_utilization (now {config.gpu_memory_utilization}), or lower "
                f"max_model_len or max_num_batched_tokens (now {config.max_num_batched_tokens})"
                + ("" if is_int8(self.pages) else ", or set kv_cache_dtype='int8'")
            )
        # Only the prefix cache has a use for more blocks than the running sequences can need.
        most = MAX_BLOCKS if config.enable_prefix_caching else config.max_num_seqs * needed
        return min(most, budget // block_bytes)

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Zeros, since a page that was never written may be read under a mask, where a NaN would survive.
        self._set_views(_zeros(self._shape(num_blocks), self.dtype, self.device))

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Copy at least the first tokens of blocks, all int64 [copies]. No target may be a source."""
        pages = self.pages
        if is_int8(pages):  # the bytes of a token are not contiguous: copy whole blocks, as if of one token
            pages, num_tokens = pages.flatten(3)[..., None, None, :], torch.ones_like(num_tokens)
        copy_pages(pages, sources, targets, num_tokens)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the memory is only mapped: it takes room page by page as it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
